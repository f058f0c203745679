"""What one finished cell of a comparison or of an engine run leaves, and what the two count alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pandas as pd
from kvarena.experiments import metrics
from kvarena.experiments.ceilings import ceilings

if TYPE_CHECKING:
    from kvarena.experiments.ceilings import Reuse
    from kvarena.experiments.specs import AllocatorEntry

Cell = TypeVar("Cell")
ABOUT = ("name", "label", "kind", "page_size", "last_token_rule", "shares_prefixes")


@dataclass(frozen=True)
class Measured(Generic[Cell]):
    """The rows of one finished cell, and what was refused or cut in it."""

    cell: Cell
    requests: pd.DataFrame
    steps: pd.DataFrame
    summary: dict[str, Any]
    timings: list[dict[str, Any]]
    warnings: Sequence[str] = ()


def keyed(keys: dict[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the keys of its cell as its first columns; changes it."""
    for place, (name, value) in enumerate(keys.items()):
        frame.insert(place, name, value)
    return frame


def floats(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns without any value as NaN, so that they reload as they were, and are there when a mean is taken."""
    empty = [name for name in frame.columns if frame[name].isna().all()]
    return frame.astype(dict.fromkeys(empty, float))


def about(entry: AllocatorEntry) -> dict[str, Any]:
    """What a manifest says of an allocator."""
    return {name: getattr(entry, name) for name in ABOUT}


def add_ceilings(requests: pd.DataFrame, reuse: Reuse, entry: AllocatorEntry) -> None:
    """Columns `prefix_tokens`, `source` and `ceiling_tokens` of a row a request, in order of arrival."""
    requests["prefix_tokens"], requests["source"] = reuse.prefix_tokens, reuse.source
    requests["ceiling_tokens"] = ceilings(reuse, requests["num_prompt_tokens"], entry.hit_grain, entry.last_token_rule)


def ceiling_rate(requests: pd.DataFrame, entry: AllocatorEntry) -> float | None:
    """Ceiling of the token hit rate over the requests that were admitted; None for designs that share nothing."""
    if not entry.shares_prefixes:
        return None
    admitted = requests[requests["admitted"]]
    return metrics.ratio(int(admitted["ceiling_tokens"].sum()), int(admitted["num_prompt_tokens"].sum()))
