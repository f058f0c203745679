"""Sweeps: many cells, any of which may fail, any moment of which may be the last.

    OUT/sweep.json        the cells in order: key, point, state (finished, failed, pending), and the code's hash
    OUT/sweep.csv         a row a seed, pool and allocator of every finished cell, its point in the first columns
    OUT/cells/KEY/        a finished cell: the tables of a result, without figures (`load_result` reads it)
    OUT/failed/KEY.json   a failed cell: its point, error and traceback

A cell is written under another name and renamed when it is whole, by the one process that holds OUT's lock. What was
killed with SIGKILL and started again ends with the bytes of an undisturbed run (measured times and provenance apart).
Finished cells are never run again; failed ones are tried again by the next call.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments.config import SCHEMA_VERSION
from kvarena.experiments.foreign import read_json
from kvarena.experiments.outputs import as_path
from kvarena.experiments.partial import Interrupted
from kvarena.experiments.results import MANIFEST, Result, finished_folder, load_result
from kvarena.experiments.sweep_plan import SweepCell, code_digest, load_sweep, sweep_cells
from kvarena.experiments.sweep_workers import LocalWorkers, Outcome, RayWorkers, Workers
from kvarena.experiments.wrong_kind import reads

INDEX = "sweep.json"
LATER = {("pending", "finished"), ("pending", "failed"), ("failed", "finished")}
"""(in the index, in the folder): states of a cell that differ when a sweep was killed, its index being from before."""
_KEY = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class SweepResult:
    """A sweep as it stands.

    path      its folder
    cells     key, point and state of each, in order
    table     summary rows of the finished cells, the points in the first columns
    failures  key -> point, error, traceback
    """

    path: Path
    cells: list[dict[str, Any]]
    table: pd.DataFrame
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def result(self, key: str) -> Result:
        """The whole result of a finished cell. Raises ValueError when it is not finished."""
        return load_result(self.path / "cells" / key)


def sweep(
    config: Path | str | Mapping[str, Any] | Sequence[SweepCell],
    out: Path | str,
    *,
    sets: Iterable[str] = (),
    jobs: int | None = None,
    ray: str | None = None,
    progress: bool = False,
    beside: Iterable[str] = (),
) -> SweepResult:
    """Carry out what is not finished of a sweep, and return how it stands then.

    config  a TOML file, or the same as a mapping (`sweep_plan.py`), or the cells themselves
    sets    `key=value` pairs on top of its base
    jobs    processes at once; default: one a core. With `ray="local"`: its cores
    ray     "local" or the address of a Ray cluster, in place of processes
    beside  names of files that a study keeps in `out` too

    Raises ValueError for a config that is wrong anywhere, before anything runs, and for an `out` that holds other
    things or that another sweep is writing to. A cell that fails is recorded and does not stop the others.
    """
    folder = as_path(out, "out")
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise ValueError(f"jobs: expected a whole number from 1, found {jobs!r}")
    if not isinstance(config, Path | str | Iterable):
        raise ValueError(f"config: expected a path, a mapping or cells, found {config!r}")
    if isinstance(config, Path | str):
        cells = load_sweep(Path(config), sets)
    else:
        cells = sweep_cells(config, sets) if isinstance(config, Mapping) else list(config)
    workers: Workers = LocalWorkers(jobs or _cores()) if ray is None else RayWorkers(ray, jobs)
    if not cells:
        raise ValueError("sweep: expected at least one cell, found none")
    with _locked(folder, beside):
        _write_index(folder, cells)
        try:
            _carry_out(folder, cells, workers, progress)
        except KeyboardInterrupt:
            done = sum(_finished(folder, cell.key) for cell in cells)
            raise Interrupted(
                f"{done} of {len(cells)} cells are finished in {folder}; the same command goes on from there"
            ) from None
        finally:  # the index last: what it says of an ended sweep is true of its table
            _write_table(folder, cells)
            _write_index(folder, cells)
    return open_sweep(folder)


@reads("sweep")
def open_sweep(path: Path | str) -> SweepResult:
    """Read a sweep's folder, finished or not, as its cells stand: what was killed has an index and a table from before.
    Raises ValueError when there is none."""
    folder = Path(path)
    stated, failures = read_index(folder)
    cells = [{**cell, "state": _state_now(folder, cell)} for cell in stated]
    return SweepResult(folder, cells, _table_now(folder, cells, cells != stated), failures)


def read_index(folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """(key, point and state of each cell as sweep.json has them, what is on record of those that failed). Raises
    ValueError when they cannot be read."""
    try:
        index = read_json(folder / INDEX)
        keys = {_key_of(cell) for cell in index["cells"]}
        failures = {key: read_json(_failed(folder, key)) for key in keys if _failed(folder, key).is_file()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX}: cannot be read as a sweep ({error})") from None
    if index.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{folder / INDEX}: schema_version: expected {SCHEMA_VERSION}")
    return index["cells"], failures


def _state_now(folder: Path, cell: Mapping[str, Any]) -> str:
    """The index's word, unless more was done since. A cell that it says is finished and is not there stays missing."""
    now = _state(folder, cell["key"])
    return now if (cell["state"], now) in LATER else str(cell["state"])


def _table_now(folder: Path, cells: list[dict[str, Any]], behind: bool) -> pd.DataFrame:
    """sweep.csv, or what it would be where the index is `behind`."""
    path = folder / "sweep.csv"
    if behind:
        try:
            return pd.read_csv(StringIO(table_of(folder, [(cell["key"], cell["point"]) for cell in cells])))
        except OSError as error:
            raise ValueError(f"{folder}: a finished cell cannot be read ({error})") from None
    return pd.read_csv(path) if path.is_file() else pd.DataFrame()


def _key_of(cell: dict[str, Any]) -> str:
    """The key of an index entry, which becomes part of a path: nothing but the digits that a sweep writes."""
    key, state = cell["key"], cell["state"]
    if not isinstance(key, str) or _KEY.fullmatch(key) is None or not isinstance(cell["point"], dict):
        raise ValueError(f"cell {key!r}: expected a key of hexadecimal digits and a point")
    if state not in ("finished", "failed", "pending"):
        raise ValueError(f"cell {key}: state: expected finished, failed or pending, found {state!r}")
    return key


def _carry_out(folder: Path, cells: list[SweepCell], workers: Workers, shown: bool) -> None:
    waiting = [cell for cell in cells if not _finished(folder, cell.key)]
    if shown and len(waiting) < len(cells):
        print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already", file=sys.stderr)
    if not waiting:
        return
    with _Progress(len(cells), len(waiting), shown) as bar, contextlib.closing(workers.outcomes(waiting)) as outcomes:
        for cell, outcome in outcomes:
            _store(folder, cell, outcome)
            bar.ended(cell, outcome)


# --- the folder ---


def _cell(folder: Path, key: str) -> Path:
    return folder / "cells" / key


def _failed(folder: Path, key: str) -> Path:
    return folder / "failed" / f"{key}.json"


def _finished(folder: Path, key: str) -> bool:
    return (_cell(folder, key) / MANIFEST).is_file()


def _store(folder: Path, cell: SweepCell, outcome: Outcome) -> None:
    if outcome.failed:
        record = {"point": cell.point, "error": outcome.error, "traceback": outcome.traceback}
        write_whole(_failed(folder, cell.key), json.dumps(record, indent=1) + "\n")
        return
    with finished_folder(_cell(folder, cell.key)) as partial:
        for name, content in outcome.files.items():
            (partial / name).write_bytes(content)
    _failed(folder, cell.key).unlink(missing_ok=True)


def _state(folder: Path, key: str) -> str:
    if _finished(folder, key):
        return "finished"
    return "failed" if _failed(folder, key).is_file() else "pending"


def _write_index(folder: Path, cells: list[SweepCell]) -> None:
    rows = [{"key": cell.key, "point": cell.point, "state": _state(folder, cell.key)} for cell in cells]
    data = {"schema_version": SCHEMA_VERSION, "code": code_digest(), "cells": rows}
    write_whole(folder / INDEX, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def _write_table(folder: Path, cells: list[SweepCell]) -> None:
    write_whole(folder / "sweep.csv", table_of(folder, [(cell.key, cell.point) for cell in cells]))


def table_of(folder: Path, cells: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of sweep.csv: every finished cell's summary as it was written, text for text, behind its key and
    point. `cells` are pairs of the two."""
    frames = []
    for key, values in cells:
        if _finished(folder, key):
            frame = pd.read_csv(_cell(folder, key) / "summary.csv", dtype=str, keep_default_na=False)
            point = {"cell": key, **{f"sweep.{name}": str(value) for name, value in values.items()}}
            for place, (name, value) in enumerate(point.items()):
                frame.insert(place, name, value)
            frames.append(frame)
    table = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"cell": []})
    return table.to_csv(index=False, lineterminator="\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that a half one never stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, beside: Iterable[str] = ()) -> Iterator[None]:
    """Hold a sweep's folder: make it, refuse a foreign one or one in use, and clear what a killed sweep left half."""
    if folder.is_file():
        raise ValueError(f"{folder}: expected a folder, found a file")
    if folder.is_dir() and not (folder / INDEX).is_file():
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if foreign := [name for name in names if name not in set(beside)]:
            raise ValueError(f"{folder}: holds other files ({foreign[0]}); give a new folder, or an earlier sweep")
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None
    with lock:
        _take(lock, folder)
        for left in [*folder.rglob(".*.partial"), *folder.rglob(".*.old")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


def _take(lock: Any, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a Unix: nothing to hold on to
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{folder}: another sweep is writing there") from None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Progress:
    """On stderr: a bar with the time left on a terminal, a line a cell in a log."""

    def __init__(self, total: int, waiting: int, shown: bool) -> None:
        self._total, self._waiting, self._shown = total, waiting, shown
        self._done = 0
        self._start = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        if not self._shown:
            return self
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True)).__enter__()
            self._task = self._bar.add_task("sweep", total=self._waiting)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def ended(self, cell: SweepCell, outcome: Outcome) -> None:
        self._done += 1
        if self._bar is not None:
            if outcome.failed:
                self._bar.console.print(f"failed: {cell.name}: {outcome.error}", markup=False)
            self._bar.advance(self._task)
        elif self._shown:
            left = (time.monotonic() - self._start) / self._done * (self._waiting - self._done)
            text = f"cell {self._total - self._waiting + self._done} of {self._total}: {cell.name}"
            text += f": FAILED, {outcome.error}" if outcome.failed else ""
            print(f"{text}; about {left:.0f} s left", file=sys.stderr, flush=True)
