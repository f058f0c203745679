"""Whether the parts of a result folder are whole and belong together: what was cut or edited is said at once, not by
a figure that lacks half of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

_MANIFEST: dict[str, type] = {
    "kind": str,
    "trace": str,
    "visible": dict,
    "allocators": list,
    "pools": list,
    "reference_pool": int,
    "working_set_bytes": dict,
    "tokens_per_id": int,
    "bytes_per_token": int,
    "budgets": list,
    "warnings": list,
    "kernel_check": dict,
}
_KEYS = ("seed", "pool_bytes", "allocator")
_COLUMNS = {
    "summary": ("label", "page_size", "num_pages", "requests", "token_hit_rate"),
    "requests": ("index", "request_id", "num_prompt_tokens", "admitted", "hit_tokens", "prefix_tokens"),
    "steps": ("step", "free", "evictable", "in_use", "wasted_slots", "tail_slots", "duplicates", "evicted_pages"),
    "timings": ("verb", "calls", "p50_us", "p99_us"),
}
_TEXT = {"allocator", "label", "request_id", "verb"}


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first field that is missing or of another type."""
    for name, kind in _MANIFEST.items():
        if not isinstance(manifest.get(name), kind):
            raise ValueError(f"result.json: {name}: expected {kind.__name__}, found {manifest.get(name)!r}"[:300])


def check_tables(frames: Mapping[str, pd.DataFrame]) -> None:
    """Raise ValueError unless every table has its columns, and all of them the same seeds, pools and allocators.

    frames: "summary", "requests", "steps" and "timings". Costs one pass over the keys of each.
    """
    for name, columns in _COLUMNS.items():
        for column in (*_KEYS, *columns):
            _check_column(name, frames[name], column)
    cells = _cells(frames["summary"])
    if len(cells) < len(frames["summary"]):
        raise ValueError("summary: expected one row for each seed, pool and allocator, found one twice")
    for name in ("requests", "steps"):
        if odd := _cells(frames[name]) ^ cells:
            raise ValueError(
                f"{name}: expected the seeds, pools and allocators of summary, found a difference at {odd}"
            )
    found, stated = len(frames["requests"]), int(frames["summary"]["requests"].sum())
    if found != stated:
        raise ValueError(f"requests: expected {stated} rows, as many as summary counts, found {found}")


def _check_column(name: str, frame: pd.DataFrame, column: str) -> None:
    if column not in frame:
        raise ValueError(f"{name}: column {column!r} is missing")
    if column not in _TEXT and len(frame) and not pd.api.types.is_numeric_dtype(frame[column]):
        raise ValueError(f"{name}: column {column!r}: expected numbers, found {frame[column].dtype}")


def _cells(frame: pd.DataFrame) -> set[tuple[Any, ...]]:
    return set(frame[list(_KEYS)].drop_duplicates().itertuples(index=False, name=None))
