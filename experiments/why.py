"""Where the prompt tokens went, and which of it makes the difference between allocators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments.metrics import misses

if TYPE_CHECKING:
    from kvarena.experiments.results import Result

FACTORS = {
    "hit": "served from the cache",
    "never_seen": "no earlier request began so",
    "last_token": "known, but one token is always computed",
    "rounding": "known, but not a whole page",
    "lost": "known whole pages that were evicted, or not published yet",
}


def why(result: Result, metric: str = "token_hit_rate", pool: int | None = None) -> pd.DataFrame:
    """See `Result.why`. Index: factors; columns: meaning, one share for each allocator, differences, note."""
    if metric != "token_hit_rate":
        raise ValueError(f"metric: expected 'token_hit_rate', found {metric!r}")
    size = result.reference_pool if pool is None else pool
    if size not in result.pools:
        raise ValueError(f"pool: expected one of {result.pools} bytes, found {size}")
    entries = [entry for entry in result.manifest["allocators"] if entry["shares_prefixes"]]
    if not entries:
        raise ValueError("no allocator of this result caches prefixes, so there is nothing to split")
    table = pd.DataFrame({"meaning": FACTORS})
    for entry in entries:
        table[entry["name"]] = pd.Series(_shares(result, entry, size))
    first = entries[0]["name"]
    for entry in entries[1:]:
        table[f"{entry['name']} - {first}"] = table[entry["name"]] - table[first]
    table["note"] = pd.Series(_notes(result, table, [entry["name"] for entry in entries]))
    return table


def token_split(result: Result, entry: dict[str, Any], pool: int) -> dict[str, int]:
    """Prompt tokens of admitted requests by factor, over all seeds. They add up to the prompt tokens exactly."""
    rows = result.requests
    rows = rows[(rows["pool_bytes"] == pool) & (rows["allocator"] == entry["name"]) & rows["admitted"]]
    totals, grain = dict.fromkeys(FACTORS, 0), hit_grain(result, entry)
    columns = (rows["num_prompt_tokens"], rows["prefix_tokens"], rows["hit_tokens"])
    for prompt, prefix, hit in zip(*(column.tolist() for column in columns), strict=True):
        split = misses(prompt, prefix, hit, grain, entry["last_token_rule"])
        for name in FACTORS:
            totals[name] += getattr(split, name)
    return totals


def hit_grain(result: Result, entry: dict[str, Any]) -> int:
    """Tokens to which an allocator rounds a hit down: its page, or the unit of it where hits may end inside pages."""
    table = next(table for table in result.config["allocators"] if table.get("name", entry["name"]) == entry["name"])
    unit = table.get("hash_unit")
    return unit if isinstance(unit, int) and unit > 0 else int(entry["page_size"])


def _shares(result: Result, entry: dict[str, Any], pool: int) -> dict[str, float]:
    totals = token_split(result, entry, pool)
    whole = sum(totals.values())
    return {name: count / whole if whole else float("nan") for name, count in totals.items()}


def _notes(result: Result, table: pd.DataFrame, names: list[str]) -> dict[str, str]:
    grain = result.visible["grain"]
    notes = dict.fromkeys(FACTORS, "")
    if grain > 1:
        seen = bool(table.loc["rounding", names].any())
        text = f"below {grain} tokens not observable here"
        notes["rounding"] = f"at least this much; {text}" if seen else text
    return notes
