"""`kvarena verify result`: does a finished result say what its rows say, and are its files the ones that were written?

A folder of `compare` or `run`: every number of the summary again from the rows (`verify_numbers.py`), the laws
(`verify_laws.py`), the hash of every file against the provenance, and the trace's where it is at hand. A sweep's
folder: each of its cells, its index and its table. `verify_kinds.py` lists the other kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments.partial import PARTIAL, load_partial, partial_words, read_partial
from kvarena.experiments.provenance import sha256
from kvarena.experiments.results import KEYS, Result, load_result
from kvarena.experiments.verify_laws import LAWS
from kvarena.experiments.verify_numbers import SKIP, UNSEEN, CellRows, agrees, recomputed
from kvarena.experiments.verify_verdict import Verdict, verdict_json

__all__ = ["Verdict", "verdict_json", "verify", "verify_tables"]


def verify(path: Path | str, *, again: bool = False) -> Verdict:
    """Check one result of any kind of `KINDS`; whatever cannot be recomputed is said to be so, with the reason.

    again: also carry out the config once more with this code, and compare every row.

    Costs a pass over the rows. Raises ValueError when there is no whole result at `path`.
    """
    from kvarena.experiments.verify_kinds import kind_at

    path = Path(path)
    return kind_at(path).verify(path, again)


def verify_tables(result: Result, path: Path | None = None) -> Verdict:
    """Check a result's tables against each other, without its files."""
    kind = result.manifest["kind"]
    verdict = Verdict(path or Path("."), f"{kind} of {result.manifest['trace']}, {len(result.summary)} cells")
    _check_manifest(result, verdict)
    for cell in cells(result):
        _check_numbers(kind, cell, verdict)
        _check_laws(cell, verdict)
    return verdict


def verify_folder(path: Path, again: bool) -> Verdict:
    """A folder of `compare` or `run`."""
    result = load_result(path)
    verdict = verify_tables(result, path)
    _check_files(path, result.provenance, verdict)
    _check_trace(result, verdict)
    if again:
        _check_again(result, verdict)
    return verdict


def verify_partial(path: Path, again: bool) -> Verdict:
    """What an interrupted command left: its files and, of a comparison or run, its finished cells. It never stands."""
    about = read_partial(path)
    verdict = Verdict(path, f"PARTIAL {about['kind']}")
    if about["kind"] in ("compare", "run") and about.get("manifest") and about["finished"]:
        verdict = verify_tables(load_partial(path), path)
        verdict.what = f"PARTIAL {verdict.what}"
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {PARTIAL}
    _compare_hashes(path, present, about["files"], verdict)
    verdict.check("whole", False, partial_words(about))
    return verdict


def cells(result: Result) -> Iterator[CellRows]:
    """The rows of each seed, pool and allocator. Raises ValueError when the manifest lacks a cell of the summary."""
    about = {entry["name"]: entry for entry in result.manifest["allocators"]}
    budgets = {(row["seed"], row["pool_bytes"], row["allocator"]): row for row in result.manifest["budgets"]}
    for row in result.summary.to_dict("records"):
        stated = {str(name): value for name, value in row.items()}
        key = tuple(stated[name] for name in KEYS)
        if key not in budgets or stated["allocator"] not in about:
            raise ValueError(f"result.json: expected a budget and an allocator for the cell {key} of the summary")
        requests, steps = (_rows_of(frame, key) for frame in (result.requests, result.steps))
        token_bytes = int(result.manifest["bytes_per_token"])
        engine = result.config.get("engine", {})
        yield CellRows(requests, steps, stated, about[stated["allocator"]], budgets[key], engine, token_bytes)


def _rows_of(frame: pd.DataFrame, key: tuple[Any, ...]) -> pd.DataFrame:
    chosen = pd.Series(True, frame.index)
    for name, value in zip(KEYS, key, strict=True):
        chosen &= frame[name] == value
    return frame[chosen]


def _name(cell: CellRows) -> str:
    return f"seed {cell.stated['seed']}, {cell.stated['pool_bytes']} B, {cell.stated['allocator']}"


def _check_numbers(kind: str, cell: CellRows, verdict: Verdict) -> None:
    for column, stated in cell.stated.items():
        if column in KEYS:
            continue
        try:
            found = recomputed(kind, str(column), cell)
        except KeyError:
            verdict.check("numbers", False, f"summary: column {column!r} is none that this version can recompute")
            continue
        if found is SKIP:
            verdict.unseen[str(column)] = UNSEEN.get(str(column), "not every step has a row: steps_every is above 1")
            continue
        problem = f"{_name(cell)}: {column} is {stated!r} in the summary, {found!r} by the rows"
        verdict.check("numbers", agrees(stated, found), problem)


def _check_laws(cell: CellRows, verdict: Verdict) -> None:
    for name, law in LAWS.items():
        faults = list(law(cell))
        verdict.check("laws", not faults, f"{_name(cell)}: {name}: {faults[0] if faults else ''}")
        verdict.problems += [f"{_name(cell)}: {name}: {fault}" for fault in faults[1:]]


def _check_manifest(result: Result, verdict: Verdict) -> None:
    """What result.json says of the tables."""
    manifest, config = result.manifest, result.config
    pools = sorted(result.summary["pool_bytes"].unique().tolist())
    verdict.check("manifest", manifest["pools"] == pools, f"result.json: pools {manifest['pools']}, rows of {pools}")
    middle = pools[len(pools) // 2] if pools else None
    verdict.check("manifest", manifest["reference_pool"] == middle, f"result.json: reference_pool is not {middle}")
    names = [entry["name"] for entry in manifest["allocators"]]
    configured = [entry.get("name") for entry in config.get("allocators", [])]
    if "partial" in manifest:  # allocators whose turn had not come
        configured = [name for name in configured if name in names]
    verdict.check("manifest", names == configured, f"config.toml: allocators {configured}, result.json has {names}")


def _check_files(path: Path, provenance: dict[str, Any], verdict: Verdict) -> None:
    """Each file has the hash that it was written with, and none is missing or was added."""
    known = provenance.get("files")
    if not isinstance(known, dict):
        verdict.notes.append("provenance.json holds no hashes of the folder's files (written before they were kept)")
        return
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {"provenance.json"}
    _compare_hashes(path, present, known, verdict)


def _compare_hashes(path: Path, present: set[str], known: dict[str, Any], verdict: Verdict) -> None:
    drawn = {name for name in known if Path(name).suffix in (".pdf", ".svg", ".png", ".html")}
    if drawn - present and not drawn & present - {"report.html"}:  # a result kept for its numbers
        verdict.notes.append("figures and report are left out; `kvarena plot` draws them again")
        known = {name: digest for name, digest in known.items() if name not in drawn - present}
    for name in sorted(present | known.keys()):
        if name not in known:
            verdict.check("files", False, f"{name}: is not among the files that were written")
        elif name not in present:
            verdict.check("files", False, f"{name}: was written, and is gone")
        else:
            verdict.check("files", sha256(path / name) == known[name], f"{name}: was changed after it was written")


def _check_trace(result: Result, verdict: Verdict) -> None:
    """The trace's file, where one was read and lies where the config says."""
    asked = result.config["workload"]
    trace = Path(asked.get("options", {}).get("file") or asked["trace"])
    for item in result.provenance.get("inputs", []):
        if trace.name != item["name"] or not trace.is_file():
            verdict.notes.append(f"the trace {item['name']} is not at hand; it had the SHA-256 {item['sha256']}")
            continue
        verdict.check("files", sha256(trace) == item["sha256"], f"{trace}: is not the trace that was replayed")


def _check_again(result: Result, verdict: Verdict) -> None:
    """The same config once more: every row but measured times must come out alike."""
    other = _carry_out(result)
    for name in ("requests", "steps", "summary"):
        # A column without any value reloads as numbers.
        mine, theirs = (frame.astype(object).where(frame.notna(), None) for frame in
                        (getattr(result, name), getattr(other, name)))  # fmt: skip
        try:
            pd.testing.assert_frame_equal(mine, theirs, check_dtype=False, check_exact=False, rtol=1e-12)
            verdict.check("tables run again", True, "")
        except AssertionError as error:
            said = " ".join(str(error).split())[:200]
            verdict.check("tables run again", False, f"{name}: does not come out again: {said}")


def _carry_out(result: Result) -> Result:
    from kvarena.experiments.again import IN_MEMORY

    if result.config["workload"]["trace"] == IN_MEMORY:
        raise ValueError("--again: this result's trace was an object in memory")
    if result.manifest["kind"] == "run":
        from kvarena.experiments.engine.run import run_engine
        from kvarena.experiments.engine.run_config import run_config

        return run_engine(run_config(result.config))
    from kvarena.experiments.compare import run
    from kvarena.experiments.config import config_from_mapping

    return run(config_from_mapping(result.config))


# --- sweeps ---


def verify_sweep(path: Path, again: bool) -> Verdict:
    """Every finished cell, the states in the index, and the table, which must be the cells' summaries.

    Of a sweep that was killed, index and table are from before: the cells are looked at in their folders, the index may
    lag behind them, and the table may lack rows of theirs. Nothing of that is wrong; the notes say what is finished.
    """
    from kvarena.experiments.sweep import LATER, read_index

    index, _ = read_index(path)
    stated = [cell["state"] for cell in index]
    verdict = Verdict(path, f"sweep of {len(index)} cells")
    found = [_state_in_folder(path, cell["key"]) for cell in index]
    for cell, said, state in zip(index, stated, found, strict=True):
        fine = state == said or (said, state) in LATER
        verdict.check("index", fine, f"cell {cell['key']}: is {state}, the index says {said}")
        if state == "finished":
            _check_cell(path, cell["key"], again, verdict)
    cut = "pending" in stated or any(pair in LATER for pair in zip(stated, found, strict=True))
    verdict.notes += _unfinished(found, cut and found != stated)
    _check_table(path, [(cell["key"], cell["point"]) for cell in index], cut, verdict)
    return verdict


def _state_in_folder(path: Path, key: str) -> str:
    if (path / "cells" / key).is_dir():
        return "finished"
    return "failed" if (path / "failed" / f"{key}.json").is_file() else "pending"


def _check_cell(path: Path, key: str, again: bool, verdict: Verdict) -> None:
    try:
        one = verify_folder(path / "cells" / key, again)
    except ValueError as error:
        verdict.check("cells", False, f"cell {key}: {error}")
        return
    verdict.checked += one.checked
    verdict.unseen |= one.unseen
    verdict.problems += [f"cell {key}: {problem}" for problem in one.problems]


def _unfinished(states: list[str], behind: bool) -> Iterator[str]:
    """What a sweep lacks, and how it is had."""
    done, failed = states.count("finished"), states.count("failed")
    if done < len(states):
        count = f"{done} of {len(states)} cells are finished" + (f", {failed} failed" if failed else "")
        yield f"{count}; the same command into the same folder goes on from there"
    if behind:
        yield "it was killed: its index and sweep.csv are from before, and are written anew when it goes on"


def _check_table(path: Path, cells: list[tuple[str, dict[str, Any]]], cut: bool, verdict: Verdict) -> None:
    from kvarena.experiments.sweep import table_of

    file = path / "sweep.csv"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    try:
        fine = text == table_of(path, cells) or (cut and _is_earlier(path, text, dict(cells)))
    except (OSError, ValueError) as error:
        verdict.check("table", False, f"sweep.csv: the finished cells' summaries cannot be read ({error})")
        return
    verdict.check("table", fine, "sweep.csv: is not the finished cells' summaries, row for row")


def _is_earlier(path: Path, text: str, points: dict[str, dict[str, Any]]) -> bool:
    """Whether a table is that of some of the finished cells, each whole; a shorter sweep may have left it."""
    if not text:
        return True
    table = pd.read_csv(StringIO(text), dtype=str, keep_default_na=False)
    for key, rows in table.groupby("cell", sort=False):
        summary = path / "cells" / str(key) / "summary.csv"
        if not str(key).isalnum() or not summary.is_file():
            return False
        own = pd.read_csv(summary, dtype=str, keep_default_na=False)
        if not set(own) <= set(rows) or not rows[list(own)].reset_index(drop=True).equals(own):
            return False
        told = {f"sweep.{name}": str(value) for name, value in points.get(str(key), {}).items()}
        if any(name in rows and (rows[name] != value).any() for name, value in told.items()):
            return False
    return True
