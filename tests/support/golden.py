"""Golden decision logs of the real packages: where they lie, how they load, how ours compare with them.

`first_difference` follows the published comparison rules of the logs (tests/golden/FORMAT.md): a key that our
line leaves out counts as its empty value, a key that the golden line leaves out is not compared, nor is
"skipped".
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden"
CASES = TESTS / "cases" / "cases.jsonl"

# `pages` and `new_pages` have no empty value: a log that compares them must write [].
_EMPTY = {"ok": True, "hit": 0, "free": None, "evictable": None, "evicted": [], "pages": None, "new_pages": None}


def load_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of a .jsonl or .jsonl.gz file, header line included."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as rows:
        return [json.loads(row) for row in rows if row.strip()]


def plain_name(path: Path) -> str:
    """File name without .jsonl and .gz: `stress_page1`, or `stress_page1.p16` for a token log."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def log_files(folder: str) -> list[Path]:
    """Every golden log (or scenario) of a folder of tests/golden, by name. Never empty."""
    files = sorted(path for path in (GOLDEN / folder).iterdir() if ".jsonl" in path.suffixes)
    if not files:
        raise ValueError(f"tests/golden/{folder}: no .jsonl or .jsonl.gz file")
    return files


def find_log(folder: str, name: str) -> Path:
    """The file `name`.jsonl[.gz] of a folder of tests/golden."""
    for suffix in (".jsonl", ".jsonl.gz"):
        path = GOLDEN / folder / f"{name}{suffix}"
        if path.is_file():
            return path
    raise ValueError(f"tests/golden/{folder}: no {name}.jsonl or {name}.jsonl.gz")


def first_difference(golden_lines: Sequence[dict[str, Any]], our_lines: Iterable[dict[str, Any]]) -> str | None:
    """What differs first, as one sentence, or None. Both start with their header line, which is not compared."""
    ours = list(our_lines)
    pairs = zip(islice(golden_lines, 1, None), islice(ours, 1, None), strict=False)
    for number, (golden, mine) in enumerate(pairs, 1):
        difference = line_difference(golden, mine)
        if difference is not None:
            return f"op {number}: {difference}"
    if len(golden_lines) != len(ours):
        return f"{len(ours) - 1} decisions, golden has {len(golden_lines) - 1}"
    return None


def line_difference(golden: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """The first field in which one decision differs from the golden one, or None."""
    for key, empty in _EMPTY.items():
        if key in golden and golden[key] != mine.get(key, empty):
            return f"{key} is {mine.get(key, empty)!r}, golden {golden[key]!r}"
    return None


def load_cases(area: str | None = None, *ids: str) -> list[dict[str, Any]]:
    """Cases of an area, plus those named by id, in file order."""
    return [case for case in load_jsonl(CASES) if case["area"] == area or case["id"] in ids]
