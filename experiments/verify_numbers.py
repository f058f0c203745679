"""The summary of a result once more, from its rows alone: second definitions, written apart from `metrics.py`.

Each column of `summary.csv` has one entry here, a function of the rows of its cell. A column that the rows cannot give
back is named in `UNSEEN` with the reason; one that is in neither place is a fault of this module, and reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

RELATIVE = 1e-9  # means are sums in another order


@dataclass(frozen=True)
class CellRows:
    """One seed, pool and allocator: its rows, what the manifest says of it, and the engine section of the config."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    stated: Mapping[str, Any]
    about: Mapping[str, Any]
    budget: Mapping[str, Any]
    engine: Mapping[str, Any]
    token_bytes: int

    @property
    def admitted(self) -> pd.DataFrame:
        return self.requests[self.requests["admitted"].astype(bool)]

    @property
    def served(self) -> pd.DataFrame:
        """Of an engine run: whatever was not rejected."""
        return self.requests[self.requests["end"] != "rejected"]

    @property
    def pages(self) -> int:
        return int(self.budget["num_pages"])

    @property
    def size(self) -> int:
        return int(self.about["page_size"])

    @property
    def every_step(self) -> bool:
        return self.engine.get("steps_every", 1) == 1

    @property
    def fixed_clock(self) -> bool:
        """Whether the moments were given: then a step is an event of the schedule, several of which fall together."""
        return self.engine.get("clock") == "fixed"


Recompute = Callable[[CellRows], Any]
SKIP = object()  # the rows of this cell cannot give the number: steps were not all recorded


def rate(part: float, whole: float) -> float | None:
    return None if not whole else float(part) / float(whole)


def _average(values: Any) -> float | None:
    numbers = np.asarray(values, dtype=float)
    return None if not numbers.size else math.fsum(numbers) / numbers.size


def nearest_rank(values: Any, percent: int) -> float | None:
    """The smallest value that `percent` of 100 of the values do not exceed, in whole numbers throughout.

    >>> nearest_rank([4, 1, 3, 2], 50), nearest_rank(range(1, 101), 99), nearest_rank([], 50)
    (2.0, 99.0, None)
    """
    ordered = sorted(float(value) for value in values)
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1] if ordered else None


def _sum(column: str, of: str = "requests") -> Recompute:
    return lambda cell: int(getattr(cell, of)[column].sum())


def _hit_rate(rows: pd.DataFrame) -> float | None:
    return rate(rows["hit_tokens"].sum(), rows["num_prompt_tokens"].sum())


def _last_half(cell: CellRows) -> float | None:
    rows = cell.admitted
    return _hit_rate(rows[rows["index"] >= len(cell.requests) // 2])


def _lower_edge(cell: CellRows) -> pd.DataFrame:
    """The requests with the hits that they had beside unreachable replies."""
    return cell.admitted.assign(hit_tokens=cell.admitted["hit_tokens_unreachable"])


def _ceiling(cell: CellRows) -> float | None:
    if not cell.about["shares_prefixes"]:
        return None
    return rate(cell.admitted["ceiling_tokens"].sum(), cell.admitted["num_prompt_tokens"].sum())


# --- the pool, over the recorded steps ---


def _counted(cell: CellRows) -> bool:
    return bool((cell.steps["wasted_slots"] >= cell.steps["tail_slots"]).all())


def _share(column: str) -> Recompute:
    return lambda cell: _average(cell.steps[column] / cell.pages)


def _slot_share(cell: CellRows) -> Any:
    full = cell.steps["in_use"] * cell.size - cell.steps["wasted_slots"]
    return _average(full / (cell.pages * cell.size)) if _counted(cell) else None


def _fragmentation(cell: CellRows) -> float | None:
    used = cell.steps[cell.steps["in_use"] > 0]
    return _average(used["wasted_slots"] / (used["in_use"] * cell.size)) if _counted(cell) else None


def _reservation(cell: CellRows) -> float | None:
    rows = cell.steps
    return _average((rows["wasted_slots"] - rows["tail_slots"]) * cell.token_bytes) if _counted(cell) else None


POOL: dict[str, Recompute] = {
    "utilisation": _share("in_use"),
    "free_share": _share("free"),
    "evictable_share": _share("evictable"),
    "peak_in_use_pages": lambda cell: int(cell.steps["in_use"].max()) if len(cell.steps) else 0,
    "slot_utilisation": _slot_share,
    "fragmentation": _fragmentation,
    "external_fragmentation": lambda cell: _average(cell.steps["external_fragmentation"].dropna()),
    "tail_waste_bytes": lambda cell: _average(cell.steps["tail_slots"] * cell.token_bytes),
    "reservation_bytes": _reservation,
    "duplicate_bytes": lambda cell: _average(cell.steps["duplicates"] * cell.size * cell.token_bytes),
}
SHARED: dict[str, Recompute] = {
    "label": lambda cell: cell.about["label"],
    "page_size": lambda cell: cell.size,
    "num_pages": lambda cell: cell.pages,
    "requests": lambda cell: len(cell.requests),
    "token_hit_rate_ceiling": _ceiling,
    "token_hit_rate": lambda cell: _hit_rate(cell.admitted),
    "token_hit_rate_last_half": _last_half,
    "token_hit_rate_unreachable": lambda cell: _hit_rate(_lower_edge(cell)),
    "token_hit_rate_last_half_unreachable": lambda cell: _last_half(replace(cell, requests=_lower_edge(cell))),
    "request_hit_rate": lambda cell: rate((cell.admitted["hit_tokens"] > 0).sum(), len(cell.admitted)),
    "prompt_tokens": _sum("num_prompt_tokens", "admitted"),
    "hit_tokens": _sum("hit_tokens", "admitted"),
    **POOL,
}
COMPARE: dict[str, Recompute] = {
    **SHARED,
    "admitted": lambda cell: len(cell.admitted),
    "rejected": lambda cell: len(cell.requests) - len(cell.admitted),
    "refusals": _sum("refusals"),
    "requests_with_hit": lambda cell: int((cell.admitted["hit_tokens"] > 0).sum()),
    # Nobody is preempted in a replay, and each row is one admission at most.
    "readmitted_prompt_tokens": lambda cell: 0,
    "readmitted_hit_tokens": lambda cell: 0,
    "reply_tokens": _sum("reply_tokens"),
    "cut_output_tokens": _sum("cut_output_tokens"),
    "evicted_pages": _sum("evicted_pages"),
    "duplicate_pages_seen": _sum("duplicate_pages"),
}


# --- an engine run ---


def _span(cell: CellRows) -> float:
    """Seconds of the run. The rows give it exactly only when every step has one: the last may come after all ends."""
    if cell.every_step:
        return float(cell.steps["time_s"].max() - cell.requests["arrival_s"].min())
    return float(cell.stated["duration_s"])


def _good(cell: CellRows) -> float | None:
    rows = cell.served[cell.served["cut_output_tokens"] <= 0]
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        limit = cell.engine.get(name)
        if limit is not None:
            rows = rows[rows[name].isna() | (rows[name] <= limit)]
    return rate(len(rows), _span(cell))


def _steps_only(value: Recompute) -> Recompute:
    return lambda cell: value(cell) if cell.every_step else SKIP


def _clocked(value: Recompute) -> Recompute:
    """A measure of steps that took time; there are none where the clock was fixed."""
    return lambda cell: None if cell.fixed_clock else _steps_only(value)(cell)


def _mean_batch(cell: CellRows) -> float | None:
    return rate(cell.steps["batch"].sum(), (cell.steps["batch"] > 0).sum())


def _host_rate(cell: CellRows) -> float | None:
    return rate(cell.admitted["host_hit_tokens"].sum(), cell.admitted["num_prompt_tokens"].sum())


def _spread(name: str) -> dict[str, Recompute]:
    column = f"{name}_ms"
    found: dict[str, Recompute] = {f"{name}_mean_ms": lambda cell: _average(cell.served[column].dropna())}
    for percent in (50, 90, 99):
        found[f"{name}_p{percent}_ms"] = _rank(column, percent)
    return found


def _rank(column: str, percent: int) -> Recompute:
    return lambda cell: nearest_rank(cell.served[column].dropna(), percent)


RUN: dict[str, Recompute] = {
    **SHARED,
    "policy": lambda cell: cell.engine["scheduler"],
    "served": lambda cell: len(cell.served),
    "rejected": lambda cell: len(cell.requests) - len(cell.served),
    "cut": lambda cell: int((cell.served["cut_output_tokens"] > 0).sum()),
    "cut_output_tokens": _sum("cut_output_tokens", "served"),
    "readmissions": _sum("readmissions"),
    "readmitted_hit_tokens": _sum("readmitted_hit_tokens"),
    "output_tokens": _sum("output_tokens"),
    "preemptions": _sum("preemptions"),
    "recomputed_tokens": _sum("recomputed_tokens"),
    "host_hit_tokens": _sum("host_hit_tokens", "admitted"),
    "host_token_hit_rate": _host_rate,
    "swapped_tokens": _sum("swapped_tokens"),
    "steps": _steps_only(lambda cell: len(cell.steps)),
    "mean_batch": _clocked(_mean_batch),
    "duration_s": _steps_only(_span),
    "output_tokens_per_s": lambda cell: rate(cell.requests["output_tokens"].sum(), _span(cell)),
    "requests_per_s": lambda cell: rate(len(cell.served), _span(cell)),
    "gpu_share": _clocked(lambda cell: rate(math.fsum(cell.steps["gpu_ms"]) / 1e3, _span(cell))),
    "host_share": _clocked(lambda cell: rate(math.fsum(cell.steps["host_ms"]) / 1e3, _span(cell))),
    "goodput_per_s": _good,
    **_spread("ttft"),
    **_spread("tpot"),
    **_spread("e2el"),
}
UNSEEN = {
    **dict.fromkeys(
        ("itl_mean_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms"), "single gaps between tokens have no rows"
    ),
    **dict.fromkeys(("swapped_out_bytes", "swapped_in_bytes"), "moves to and from the host have no rows"),
    "prefill_share": "what a step would have taken without its prompts has no rows",
    **dict.fromkeys(
        ("fixed_token_hit_rate", "fixed_left_out", "fixed_cut", "fixed_token_hit_rate_last_half"),
        "the same requests on a fixed clock have no rows of their own",
    ),
    **dict.fromkeys(("evicted_pages", "duplicate_pages_seen"), "an engine run counts them over all operations"),
}


def recomputed(kind: str, column: str, cell: CellRows) -> Any:
    """The column's value from the rows; SKIP when they cannot give it. Raises KeyError for an unknown column."""
    rules = COMPARE if kind == "compare" else RUN
    if column not in rules and kind == "run" and column in UNSEEN:
        return SKIP
    return rules[column](cell)


def agrees(stated: Any, found: Any) -> bool:
    """Whether a number of the summary is that of the rows: whole numbers exactly, means to the last digits but one.

    >>> agrees(0.1 + 0.2, 0.3), agrees(3, 4), agrees(float("nan"), None), agrees(0.0, None)
    (True, False, True, False)
    """
    missing = [value is None or (isinstance(value, float) and math.isnan(value)) for value in (stated, found)]
    if any(missing):
        return all(missing)
    if isinstance(stated, str) or isinstance(found, str | int):
        return bool(stated == found)
    return math.isclose(stated, found, rel_tol=RELATIVE, abs_tol=1e-12)
