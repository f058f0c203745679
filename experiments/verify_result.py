"""`kvarena verify result`: does a finished result say what its rows say, and are its files the ones that were written?

A folder of `compare` or `run`: every number of the summary again from the rows (`verify_numbers.py`), the laws
(`verify_laws.py`), the hash of every file against the provenance, and the trace's where it is at hand. A sweep's
folder: each of its cells, its index and its table. A table of `kvarena forks`: the study once more, having no rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments.provenance import sha256
from kvarena.experiments.results import KEYS, MANIFEST, Result, load_result
from kvarena.experiments.sweep import INDEX
from kvarena.experiments.verify_laws import LAWS
from kvarena.experiments.verify_numbers import SKIP, UNSEEN, CellRows, agrees, recomputed

SHOWN = 20  # problems printed of one result


@dataclass
class Verdict:
    """What was checked in one result, and what did not hold.

    checked   kind of check -> how often it was made
    problems  one line each; none: the result stands
    unseen    numbers that the rows cannot give back, with the reason
    notes     what could not be checked here, such as a trace that is not at hand
    """

    path: Path
    what: str
    checked: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def stands(self) -> bool:
        return not self.problems

    def check(self, kind: str, fine: bool, problem: str) -> None:
        """Count one check, and note its fault."""
        self.checked[kind] += 1
        if not fine:
            self.problems.append(problem)

    def lines(self) -> Iterator[str]:
        """For people: counts, then what is wrong."""
        counts = ", ".join(f"{count:,} {kind}" for kind, count in self.checked.items())
        yield f"{self.path}: {self.what}: {'stands' if self.stands else 'DOES NOT STAND'} (checked: {counts})"
        for reason in dict.fromkeys(self.unseen.values()):
            names = ", ".join(name for name, why in self.unseen.items() if why == reason)
            yield f"  not in the rows: {names} ({reason})"
        yield from (f"  note: {note}" for note in self.notes)
        yield from (f"  WRONG {problem}" for problem in self.problems[:SHOWN])
        if len(self.problems) > SHOWN:
            yield f"  ... and {len(self.problems) - SHOWN} more"


def verify(path: Path | str, *, again: bool = False) -> Verdict:
    """Check one result: a folder of `compare`, `run` or `sweep`, or a table of `forks`.

    again: also carry out the config once more with this code, and compare every row.

    Costs a pass over the rows. Raises ValueError when there is no whole result at `path`.
    """
    path = Path(path)
    if path.is_file():
        return _verify_forks(path)
    if (path / INDEX).is_file():
        return _verify_sweep(path, again)
    return _verify_folder(path, again)


def verify_tables(result: Result, path: Path | None = None) -> Verdict:
    """Check a result's tables against each other, without its files."""
    kind = result.manifest["kind"]
    if kind not in ("compare", "run"):
        raise ValueError(f"{MANIFEST}: kind: expected 'compare' or 'run', found {kind!r}")
    verdict = Verdict(path or Path("."), f"{kind} of {result.manifest['trace']}, {len(result.summary)} cells")
    _check_manifest(result, verdict)
    for cell in cells(result):
        _check_numbers(kind, cell, verdict)
        _check_laws(cell, verdict)
    return verdict


def _verify_folder(path: Path, again: bool) -> Verdict:
    result = load_result(path)
    verdict = verify_tables(result, path)
    _check_files(path, result.provenance, verdict)
    _check_trace(result, verdict)
    if again:
        _check_again(result, verdict)
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
    verdict.check("manifest", names == configured, f"config.toml: allocators {configured}, result.json has {names}")


def _check_files(path: Path, provenance: dict[str, Any], verdict: Verdict) -> None:
    """Each file has the hash that it was written with, and none is missing or was added."""
    known = provenance.get("files")
    if not isinstance(known, dict):
        verdict.notes.append("provenance.json holds no hashes of the folder's files (written before they were kept)")
        return
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"provenance.json"}
    for name in sorted(present | known.keys()):
        if name not in known:
            verdict.check("files", False, f"{name}: is not among the files that were written")
        elif name not in present:
            verdict.check("files", False, f"{name}: was written, and is gone")
        else:
            verdict.check("files", sha256(path / name) == known[name], f"{name}: was changed after it was written")


def _check_trace(result: Result, verdict: Verdict) -> None:
    """The trace's file, where one was read and lies where the config says."""
    trace = Path(result.config["workload"]["trace"])
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


def _verify_sweep(path: Path, again: bool) -> Verdict:
    """Every finished cell, the states in the index, and the table, which must be the cells' summaries."""
    from kvarena.experiments.sweep import open_sweep, table_of

    sweep = open_sweep(path)
    verdict = Verdict(path, f"sweep of {len(sweep.cells)} cells")
    for cell in sweep.cells:
        folder, failed = path / "cells" / cell["key"], path / "failed" / f"{cell['key']}.json"
        state = "finished" if folder.is_dir() else "failed" if failed.is_file() else "pending"
        verdict.check(
            "index", state == cell["state"], f"cell {cell['key']}: is {state}, the index says {cell['state']}"
        )
        if state == "finished":
            one = _verify_folder(folder, again)
            verdict.checked += one.checked
            verdict.unseen |= one.unseen
            verdict.problems += [f"cell {cell['key']}: {problem}" for problem in one.problems]
    if unfinished := [cell["key"] for cell in sweep.cells if cell["state"] != "finished"]:
        verdict.notes.append(f"{len(unfinished)} of {len(sweep.cells)} cells are not finished")
    expected = table_of(path, [(cell["key"], cell["point"]) for cell in sweep.cells])
    found = (path / "sweep.csv").read_text(encoding="utf-8") if (path / "sweep.csv").is_file() else ""
    verdict.check("table", found == expected, "sweep.csv: is not the finished cells' summaries, row for row")
    return verdict


# --- forks ---


def _verify_forks(path: Path) -> Verdict:
    """A table of the fork study: each row is computed once more from its own columns (20 us a decoded token)."""
    from kvarena.experiments.forking import saving_again

    frame = _read_table(path)
    needed = {"lengths", "method", "allocator", "width", "requests", "seed", "scale", "saved", "copies"}
    if missing := sorted(needed - set(frame.columns)):
        raise ValueError(f"{path}: expected a table of `kvarena forks`, found no column {', '.join(missing)}")
    verdict = Verdict(path, f"forks, {len(frame)} rows")
    for stated in frame.to_dict("records"):
        row = {str(name): value for name, value in stated.items()}
        found = saving_again(row)
        for column in ("saved", "copies"):
            problem = f"{row['lengths']}, {row['method']}, {row['allocator']}, {row['width']}: {column} is "
            problem += f"{row[column]}, computed again {getattr(found, column)}"
            verdict.check("numbers", agrees(row[column], getattr(found, column)), problem)
    return verdict


def _read_table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise ValueError(f"{path}: cannot be read as a table ({error})") from None


def verdict_json(verdict: Verdict) -> str:
    """One line for programs."""
    data = {"path": str(verdict.path), "what": verdict.what, "stands": verdict.stands}
    return json.dumps({**data, "checked": dict(verdict.checked), "problems": verdict.problems})
