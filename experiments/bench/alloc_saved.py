"""Saved runs of the allocator benchmark: read, laid together, and summed up in the table of the documentation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvarena.experiments.bench.alloc_recorded import Mark, verdict
from kvarena.experiments.wrong_kind import reads

Row = dict[str, Any]
ROWS_FILE = "allocators.jsonl"
DESIGNS = {
    ("block hashed", 16): "block, page by page",
    ("block runs", 16): "block, by runs",
    ("token", 1): "token, page 1",
    ("token", 16): "token, page 16",
}
SUMMARY = {
    ("replay", "tokens"): "replay, requests a CPU second",
    ("replay", "page hashes"): "the same, page hashes given",
    ("op", "look up 4,096 cached tokens"): "look up 4,096 cached tokens, µs",
    ("op", "hash and look up 4,096 cached tokens"): "hash and look up 4,096 cached tokens, µs",
    ("op", "match 4,096 over 32 nodes"): "match 4,096 tokens over 32 nodes, µs",
    ("op", "admit 4,096 uncached tokens"): "admit 4,096 uncached tokens, µs",
    ("op", "free a request of 100 pages"): "free a request of 100 pages, µs",
    ("op", "decode step of 256"): "decode step of 256 requests, µs",
    ("op", "evict 4,096 tokens of 20,000 leaves"): "evict 4,096 tokens of 20,000 leaves, µs",
    ("memory", "bytes a cached token"): "bytes a cached token",
}
LABELS = {"replay": "replay of ", "slowdown": "growth, "}


@reads("allocator benchmark")
def load(folder: Path) -> list[Row]:
    """Rows of one run, header first. ValueError when the folder is no run's."""
    path = folder / ROWS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: not found; expected a folder that `kvarena bench allocators --out` wrote")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save_rows(rows: list[Row], folder: Path) -> list[Path]:
    """Rows as JSON lines into a folder, which is made."""
    from kvarena.experiments.scenarios import write_log

    write_log(rows, folder / ROWS_FILE)
    return [folder / ROWS_FILE]


def several(number: int, run: Callable[[], Iterable[Row]], out: Path, say: Callable[[str], None]) -> list[Row]:
    """So many runs, each saved when it ends as OUT/run1 and so on with its table; then OUT/spread.txt. Returns them
    laid together."""
    from kvarena.experiments.bench import alloc_tables

    found = []
    for turn in range(1, number + 1):
        say(f"run {turn} of {number}")
        found.append(list(run()))
        save_rows(found[-1], out / f"run{turn}")
        (out / f"run{turn}" / "allocators.txt").write_text(alloc_tables.text(found[-1]), encoding="utf-8")
    (out / "spread.txt").write_text(alloc_tables.spread(found), encoding="utf-8")
    return together(found)


def together(runs: list[list[Row]]) -> list[Row]:
    """One row for each measurement that all runs have: the median of their medians, the range of all samples.

    Ratios to the real packages of the runs are medians of their medians too, and the verdict follows from them. The
    header is the first run's. An even number of runs gives the lower one of the two in the middle.
    """
    tables = [{_name(row): row for row in run} for run in runs]
    rows = []
    for name in tables[0]:
        found = [table[name] for table in tables if name in table]
        if len(found) == len(runs):
            rows.append(_middle(found))
    return rows


def _middle(found: list[Row]) -> Row:
    if "value" not in found[0]:
        return found[0]
    middle = statistics.median_low(row["value"] for row in found)
    chosen = next(row for row in found if row["value"] == middle)
    joined = chosen | _over(found, "low", "high") | _over(found, "here_ratio_low", "here_ratio_high")
    for name in ("here", "here_ratio", "lean", "lean_ratio", "floor", "floor_ratio"):
        if all(name in row for row in found):
            joined[name] = statistics.median_low(row[name] for row in found)
    mark = Mark(chosen["real"], chosen["must"], chosen["aim"], chosen["absolute"])
    against = joined["value"] if mark.absolute else joined.get("here_ratio", joined["ratio"])
    return joined | {"met": verdict(against, mark, chosen["unit"])}


def _over(found: list[Row], low: str, high: str) -> Row:
    """The range of all runs' ranges, where all have one."""
    if not all(low in row for row in found):
        return {}
    return {low: min(row[low] for row in found), high: max(row[high] for row in found)}


def _name(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(part) for part in ("study", "name", "design", "page_size", "size"))


def summary(rows: Iterable[Row]) -> str:
    """Markdown: the main figures of both designs in all forms, each with its ratio to the real package (of the run
    where it was beside, else (r) to the recorded one); then all that is asked for, and what was found."""
    rows = list(rows)
    return _main_figures(rows) + asked_for(rows)


def _main_figures(rows: list[Row]) -> str:
    cells = {(row["study"], row["name"], row["design"], row["page_size"]): _cell(row) for row in rows if "value" in row}
    lines = ["| | " + " | ".join(DESIGNS.values()) + " |", "|---|" + "---|" * len(DESIGNS)]
    for (study, name), label in SUMMARY.items():
        values = [cells.get((study, name, *design), "") for design in DESIGNS]
        if any(values):
            lines.append(f"| {label} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def asked_for(rows: Iterable[Row]) -> str:
    """Markdown: every must with what was found beside it; of a missed one, what the floor says. Empty: nothing is
    asked for."""
    from kvarena.experiments.bench.alloc_tables import MET, reason

    lines = []
    for row in rows:
        if row.get("must") is not None:
            times = "" if row["absolute"] else "x"
            verdict = f"missed: {reason(row)}" if row["met"] == "no" else MET[row["met"]]
            label = f"{LABELS.get(row['study'], '')}{row['name']}, {row['design']}, page {row['page_size']}"
            lines.append(f"| {label} | {_found(row)} | {row['must']:,g}{times} | {verdict} |")
    head = "\n| asked for | ours | must | |\n|---|---|---|---|\n"
    return head + "\n".join(lines) + "\n" if lines else ""


def _found(row: Row) -> str:
    """The figure, with its unit and what is asked of it."""
    unit = {"requests/CPU s": " requests a CPU second", "times": "x slower"}.get(row["unit"], f" {row['unit']}")
    value = f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"
    ratio = row.get("here_ratio", row["ratio"])
    shown = "" if row["absolute"] or ratio is None else f", {ratio:.1f}x"
    return value + unit.replace("us", "µs") + shown


def _cell(row: Row) -> str:
    value = f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"
    if "here_ratio" in row:
        return f"{value} ({row['here_ratio']:.1f}x)"
    return f"{value} ({row['ratio']:.1f}x r)" if row["ratio"] is not None else value
