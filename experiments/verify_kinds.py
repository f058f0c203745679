"""Every kind of result that kvarena writes: how it is recognised, and what `kvarena verify result` recomputes of it, or
why it can recompute nothing. A test runs every command that has an `--out` and looks its result up here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments import verify_capacity as capacity
from kvarena.experiments import verify_files as files
from kvarena.experiments import verify_studies as studies
from kvarena.experiments.foreign import read_object, reading
from kvarena.experiments.partial import PARTIAL
from kvarena.experiments.results import MANIFEST
from kvarena.experiments.study import REASONS_FILE
from kvarena.experiments.sweep import INDEX
from kvarena.experiments.verify_result import verify_folder, verify_partial, verify_sweep
from kvarena.experiments.verify_verdict import Verdict

Check = Callable[[Path, bool], Verdict]
_LOOKED_AT = 50  # entries of a folder, for a hint


@dataclass(frozen=True)
class Kind:
    """One kind of result.

    command  what writes it
    how      what is recomputed, in words; for a kind without `check`: why nothing can be
    is_it    whether a path holds one
    check    (path, again) -> verdict; None: nothing can be recomputed
    """

    name: str
    command: str
    how: str
    is_it: Callable[[Path], bool]
    check: Check | None = None

    def verify(self, path: Path, again: bool) -> Verdict:
        """What holds at `path`, which is of this kind. Raises ValueError when its contents cannot be read so."""
        if self.check is None:
            return Verdict(path, self.name, why_not=self.how)
        with reading(path, f"{self.name}, written by `kvarena {self.command}`"):
            verdict = self.check(path, False)
        # Its contents could be read: what fails in running it again is no fault of theirs.
        return self.check(path, True) if again else verdict


def kind_at(path: Path) -> Kind:
    """The kind of what stands at `path`. Raises ValueError saying what was expected when it is none."""
    found = next((kind for kind in KINDS if kind.is_it(path)), None)
    if found is None:
        what = "is not there" if not path.exists() else "is no result of kvarena that is finished"
        raise ValueError(f"{path}: {what}; `kvarena verify kinds` lists what can be verified{hint(path)}")
    return found


def hint(path: Path) -> str:
    """Where in the folder, or above it, the result may be meant."""
    inside = sorted(path.iterdir(), key=lambda one: (one.is_file(), one))[:_LOOKED_AT] if path.is_dir() else []
    named = next((one for one in (path / "sweep", *inside, path.parent) if kind_name(one)), None)
    return "" if named is None else f"; {named} is one"


def kind_name(path: Path) -> str | None:
    """The name of the kind at `path`; None for no result, and for one that cannot be read."""
    try:
        return next((kind.name for kind in KINDS if kind.is_it(path)), None)
    except ValueError:
        return None


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: all((path / name).is_file() for name in names)


def _of_kind(kind: str) -> Callable[[Path], bool]:
    """A folder whose result.json has that kind."""
    return lambda path: (path / MANIFEST).is_file() and read_object(path / MANIFEST).get("kind") == kind


def _table_with(*columns: str) -> Callable[[Path], bool]:
    def is_it(path: Path) -> bool:
        if not path.is_file() or path.suffix not in (".csv", ".parquet"):
            return False
        return set(columns) <= set(_columns(path))

    return is_it


def _columns(path: Path) -> list[str]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return list(pq.read_schema(path).names)
        return list(pd.read_csv(path, nrows=0).columns)
    except (OSError, ValueError, NotImplementedError, pd.errors.ParserError) as error:
        raise ValueError(f"{path}: cannot be read as a table ({error})") from None


def _json_with(*fields: str) -> Callable[[Path], bool]:
    return lambda path: path.is_file() and path.suffix == ".json" and set(fields) <= set(_fields(path))


def _fields(path: Path) -> dict[str, Any]:
    data = read_object(path)
    return data if "schema_version" in data else {}


def _lines_with(*fields: str) -> Callable[[Path], bool]:
    """A .jsonl file whose first line has those fields."""

    def is_it(path: Path) -> bool:
        if not path.is_file() or path.suffix != ".jsonl":
            return False
        with open(path, encoding="utf-8", errors="replace") as file:
            first = file.readline(1 << 20)
        try:
            data = json.loads(first)
        except (ValueError, RecursionError):
            return False
        return isinstance(data, dict) and set(fields) <= set(data)

    return is_it


def _reasons_of_a_sweep(path: Path) -> bool:
    """The table, or a folder with it and where it comes from."""
    file = path / REASONS_FILE if path.is_dir() else path
    return _table_with("cell", "prompt_tokens", "hit_tokens", "evicted", "first_seen")(file)


MEASURED = "it is made of measured times, and keeps nothing that they could be computed from; measure again"

KINDS = (
    Kind("partial", "any command, interrupted", "hashes, finished cells; never stands", _has(PARTIAL), verify_partial),
    Kind(
        "resample",
        "resample",
        "every cell, the table from the cells, intervals and q from the table",
        _has("study.json"),
        studies.verify_resample,
    ),
    Kind("sweep", "sweep", "every cell, the index, the table", _has(INDEX), verify_sweep),
    Kind("compare", "compare", "every summary number from the rows, laws, hashes", _of_kind("compare"), verify_folder),
    Kind("run", "run", "every summary number from the rows, laws, hashes", _of_kind("run"), verify_folder),
    Kind(
        "capacity",
        "capacity",
        "pages, predictions and parts in closed form, sums, bursts; --again: every burst",
        _of_kind("capacity"),
        capacity.verify_capacity,
    ),
    Kind(
        "rate",
        "rate",
        "rates, knees and Amdahl's law from the tables; the runs behind them are not kept",
        _of_kind("rate"),
        studies.verify_rate,
    ),
    Kind(
        "ladder",
        "ladder",
        "shares, ranges and interactions from the subsets, the subsets from the cells",
        _has("ladder.json"),
        studies.verify_ladder,
    ),
    Kind(
        "ablations",
        "ablations",
        "hit rates from hit tokens, which all designs have of one prompt; --again: every row",
        _has("ablations.json"),
        studies.verify_ablations,
    ),
    Kind(
        "page-size study",
        "pagesize",
        "concurrency in closed form, ranges; the replays are not kept",
        _has("pagesize.json"),
        studies.verify_pagesize,
    ),
    Kind("claims", "claims", "every verdict from its values", _has("claims.json"), studies.verify_claims),
    Kind(
        "aged pools",
        "aged",
        "slots of the layouts, means of the churn table; the hours behind them are not kept",
        _has("aged.parquet"),
        files.verify_aged,
    ),
    Kind(
        "forks",
        "forks",
        "the study once more",
        _table_with("lengths", "method", "width", "saved", "copies"),
        files.verify_forks,
    ),
    Kind(
        "laws",
        "laws",
        "whether each law holds, from its numbers",
        _table_with("law", "predicted", "measured", "holds"),
        files.verify_laws,
    ),
    Kind(
        "reasons",
        "explain --out",
        "hits and reasons add up to every prompt",
        _table_with("num_prompt_tokens", "hit_tokens", "evicted_by"),
        files.verify_reasons,
    ),
    Kind(
        "reasons of a sweep",
        "explain SWEEP --out",
        "hits and reasons of a cell add up to its prompts",
        _reasons_of_a_sweep,
        files.verify_sweep_reasons,
    ),
    Kind(
        "bounds",
        "bounds --out",
        "the order of the bounds, and the regret",
        _table_with("policy", "clairvoyant", "infinite", "regret"),
        files.verify_bounds,
    ),
    Kind(
        "live verification",
        "verify upstream --out",
        "sums over its settings",
        _json_with("package", "settings", "differences"),
        files.verify_upstream,
    ),
    Kind("measurements on a card", "bench kernels", MEASURED, _json_with("parts")),
    Kind("capacity on a card", "python -m kvarena.experiments.capacity_card", MEASURED, _json_with("cells", "gpu")),
    Kind("step times", "python -m kvarena.experiments.engine.calibrate", MEASURED, _json_with("calibrated")),
    Kind(
        "report of the GPU tests",
        "pytest -m gpu",
        "it is the outcome of tests; run them on a card",
        _json_with("card", "counts"),
    ),
    Kind("allocator benchmark", "bench allocators", MEASURED, _has("allocators.jsonl")),
    Kind(
        "decision log",
        "scenario",
        "it is the answers themselves; compare it with the recorded ones (tests/golden/FORMAT.md)",
        _lines_with("peer"),
    ),
)


def kind_lines() -> Iterator[str]:
    """The kinds for people: name, command, what is recomputed or why nothing is."""
    for kind in KINDS:
        mark = "verified" if kind.check is not None else "NOT VERIFIED"
        yield f"{kind.name:24} {kind.command:44} {mark}: {kind.how}"
