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


def check_same_numbers(name: str, mine: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Raise ValueError unless the summaries of two results say the same of an allocator that both have.

    Equal configs give equal numbers, whatever the machine; other ones come from other code or other packages.
    """
    left, right = (
        frame[frame["allocator"] == name].sort_values(["seed", "pool_bytes"], ignore_index=True)
        for frame in (mine, theirs)
    )
    common = [column for column in left.columns if column in right.columns]
    differing = [column for column in common if not left[column].equals(right[column])]
    if differing:
        raise ValueError(
            f"allocator {name!r} has other numbers in the two results ({', '.join(differing[:3])}): they were made by "
            "other versions; make both anew"
        )


def other_code(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What to say when two results were made by other versions: a difference may then be one between these."""
    told = [
        (code.get("version"), code.get("commit"), code.get("dirty"))
        for code in (one.get("kvarena") or {} for one in (mine, theirs))
    ]
    if told[0] == told[1] and not told[0][2]:  # of two trees with changes nobody knows whether they are one
        return []
    names = [f"{version or 'an unknown version'}{_commit(commit, dirty)}" for version, commit, dirty in told]
    return [f"these results were made by other code, {names[0]} and {names[1]}: a difference may be one between these"]


def _commit(commit: str | None, dirty: bool | None) -> str:
    return "" if commit is None else f" at {commit[:10]}{' with changes' if dirty else ''}"
