"""Saved runs of the allocator benchmark: read, laid together, and summed up in the table of the documentation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def load(folder: Path) -> list[Row]:
    """Rows of one run, header first. ValueError when the folder is no run's."""
    path = folder / ROWS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: not found; expected a folder that `kvarena bench allocators --out` wrote")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def together(runs: list[list[Row]]) -> list[Row]:
    """One row for each measurement that all runs have: the median of their medians, the range of all samples.

    What follows from the value (ratio, verdict) is taken from the run that has the median. The header is the first
    run's. An even number of runs gives the lower one of the two in the middle.
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
    return chosen | {"low": min(row["low"] for row in found), "high": max(row["high"] for row in found)}


def _name(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(part) for part in ("study", "name", "design", "page_size", "size"))


def summary(rows: Iterable[Row]) -> str:
    """Markdown: the main figures of both designs in all forms, each with its ratio to the recorded real package."""
    cells = {(row["study"], row["name"], row["design"], row["page_size"]): _cell(row) for row in rows if "value" in row}
    lines = ["| | " + " | ".join(DESIGNS.values()) + " |", "|---|" + "---|" * len(DESIGNS)]
    for (study, name), label in SUMMARY.items():
        values = [cells.get((study, name, *design), "") for design in DESIGNS]
        if any(values):
            lines.append(f"| {label} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    value = f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"
    return f"{value} ({row['ratio']:.1f}x)" if row["ratio"] is not None else value
