"""Small trace files, and requests as plain tuples, for tests of readers and workloads."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TRACES = os.environ.get("KVARENA_TRACES")
needs_traces = pytest.mark.skipif(
    not TRACES, reason="needs the public traces: set KVARENA_TRACES to the folder that holds them"
)


def public_file(name: str) -> Path:
    """The public trace file of that name (without .gz) under KVARENA_TRACES; skips the test when it is not held."""
    if not TRACES:
        pytest.skip("needs the public traces: set KVARENA_TRACES to the folder that holds them")
    found = sorted(p for suffix in ("", ".gz") for p in Path(TRACES).glob(f"**/{name}{suffix}"))
    if not found:
        pytest.skip(f"{name} is not under KVARENA_TRACES")
    return found[0]


def write(path: Path, content: str | bytes) -> Path:
    """The file with that content; gzip when its name ends in .gz."""
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A JSONL file of the rows."""
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def mooncake_row(time: Any, length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": time, "input_length": length, "output_length": 1, "hash_ids": ids, **more}


def rows_of(trace: Any) -> list[tuple[float, int, int]]:
    """(arrival_s, prompt tokens, output tokens) of every request."""
    return [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace]


def common_prefix(left: Any, right: Any) -> int:
    """Number of equal leading tokens."""
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    return shared
