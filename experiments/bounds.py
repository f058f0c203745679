"""Bounds of every prefix cache on a trace: none, random eviction, clairvoyance, no end of room; and the regret to them.

All are page by page at a given page size, for one pool without overlap of requests: a request is served the longest
cached prefix of whole pages, then all its pages are used. What each is:

    no cache            every token is computed
    lru, fifo           flat lists of pages, the plain policies of public tables
    random              a page drawn at random goes, whatever hangs below it
    clairvoyant         the page whose next use is farthest away goes, one that just came included (bypass). A *bound*:
                        no cache of so many pages hits more pages (see below), whether it keeps lists or trees
    clairvoyant leaves  the same among leaves of the tree of cached prefixes. A mark, not a bound, of what a radix tree
                        could do with foresight
    infinite            nothing ever goes: `ceilings.py`

Why clairvoyance is a bound here. Between two uses of a page a cache either keeps it all the time, which takes a page of
room and yields one hit, or it does not. Choosing most such intervals with at most `capacity` at any time is solved by
letting the farthest end go. Hits of a contiguous prefix are hits. And since whoever uses a page uses all before it, a
page's next use never comes after that of what follows it, so the farthest-next-use choice keeps prefixes whole where
any choice of that value exists: the bound is reached, scored by contiguous prefix as well. Two provisos: pages, not
tokens, are what is maximal (they differ only where partial pages count as pages); and with replies replayed and live
requests overlapping, reply pages enter earlier here than in a replay, so that the figure is a mark (`proven` False).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from kvarena.experiments.bound_policies import POLICIES, BoundHits, Policy, replay_bound
from kvarena.experiments.ceilings import ceiling_tokens
from kvarena.experiments.metrics import ratio
from kvarena.experiments.page_names import name_pages
from kvarena.experiments.plots import _finish, _new_axes, _pool_axis, _styled, draw_series, say_outputs
from kvarena.experiments.style import looks

if TYPE_CHECKING:
    from kvarena.experiments.config import Config
    from kvarena.experiments.pools import Cell
    from kvarena.experiments.results import Result
    from kvarena.experiments.specs import AllocatorEntry
    from kvarena.experiments.traces.base import Request
    from matplotlib.axes import Axes

__all__ = ["POLICIES", "BoundHits", "Policy", "bound_curve", "bounds", "plot_bounds", "replay_bound"]

RATES = ("no_cache", "random", "policy", "clairvoyant_leaf", "clairvoyant", "infinite", "regret")
MAX_RANDOM_USES = 20_000_000  # page uses up to which random eviction is replayed (a second a million, about)


def bound_curve(
    requests: Sequence[Request],
    capacities: Iterable[int],
    *,
    page_size: int | None = None,
    policies: Iterable[Policy] = ("fifo", "lru", "clairvoyant"),
    reverse: bool = True,
    last_token_rule: bool = False,
) -> pd.DataFrame:
    """The rows of public tables: one a capacity (pages) and policy, whole run and last half, and the infinite cache.

    Default page: the trace's grain, every hash id counted as a page and no last-token rule, as those tables count.
    """
    partial = page_size is None and requests[0].hash_ids is not None
    size = requests[0].grain if page_size is None else page_size
    names = name_pages(requests, size, last_token_rule=last_token_rule, partial=partial)
    asked: list[tuple[Policy | Literal["infinite"], int]] = [(p, c) for c in capacities for p in policies]
    asked.append(("infinite", max(names.num_pages, 1)))
    rows = []
    for policy, capacity in asked:
        found = replay_bound(names, capacity, "lru" if policy == "infinite" else policy, reverse=reverse)
        half = len(names.tokens) // 2
        for measure, start in (("whole", 0), ("last_half", half)):
            rates = {"block_hit_rate": found.block_rate(names, start), "token_hit_rate": found.token_rate(names, start)}
            row = {"policy": policy, "capacity_pages": capacity, "capacity_tokens": capacity * size, "measure": measure}
            rows.append({**row, **rates})
    return pd.DataFrame(rows)


def bounds(result: Result, *, source: Any = None) -> pd.DataFrame:
    """Bounds beside every cell of a comparison or an engine run, at that allocator's own page size, pool and last-token
    rule (`bounds_run.py` says what they are for a run).

    A row a seed, pool and allocator: token hit rates of `no_cache`, `random`, `policy` (the allocator's own),
    `clairvoyant_leaf`, `clairvoyant` and `infinite`; `regret`, clairvoyant - policy, in points; `proven`, whether
    clairvoyant is a bound. Requests that the allocator rejected are left out. None: not defined, or too many pages; a
    design that shares no prefixes has its own rate alone, having no cache whose evictions could have been better.
    `source` stands for the trace when it was an object in memory. Costs one replay of the trace a page size, and two
    passes a cell.
    """
    from kvarena.experiments.again import cells_again

    if not hasattr(result, "manifest"):
        raise ValueError(f"bounds: expected a Result, found {type(result).__name__}")
    if result.manifest["kind"] == "run":
        from kvarena.experiments.bounds_run import bounds_of_run

        return bounds_of_run(result)
    config, cells = cells_again(result, source)
    proven = config.engine.live == 1 or config.engine.outputs == "none"
    rows = []
    for cell in cells:
        rows.append({**_cell_bounds(result, cell, config), "proven": proven})
    return pd.DataFrame(rows).astype(dict.fromkeys(RATES, float))


def _cell_bounds(result: Result, cell: Cell, config: Config) -> dict[str, Any]:
    table = result.requests
    keys = {"seed": cell.workload.seed, "pool_bytes": cell.pool_bytes, "allocator": cell.entry.name}
    for name, value in keys.items():
        table = table[table[name] == value]
    admitted = [r for r, ok in zip(cell.workload.requests, table["admitted"], strict=True) if ok]
    table = table[table["admitted"]]
    replies, pages = config.engine.outputs == "replay", cell.budget.num_pages
    known, hits = table["prefix_tokens"].tolist(), int(table["hit_tokens"].sum())
    rates = bound_rates(admitted, known, hits, cell.entry, pages, replies=replies, seed=cell.workload.seed)
    return {**keys, "label": cell.entry.label, "page_size": cell.entry.page_size, "num_pages": pages, **rates}


def bound_rates(
    admitted: Sequence[Request],
    known: Sequence[int],
    hit_tokens: int,
    entry: AllocatorEntry,
    num_pages: int,
    *,
    replies: bool,
    seed: int,
) -> dict[str, Any]:
    """The rates of one cell. `known`: per request, first tokens that a request before it had; `hit_tokens`: of all."""
    size, rule = entry.page_size, entry.last_token_rule
    lengths = [request.num_prompt_tokens for request in admitted]
    tokens = sum(lengths)
    policy = ratio(hit_tokens, tokens)
    if not entry.shares_prefixes or not tokens:  # no cache of prefixes to bound, or nobody whom it could have served
        return {**dict.fromkeys(RATES), "no_cache": 0.0 if tokens else None, "policy": policy}
    names = name_pages(admitted, size, last_token_rule=rule, replies=replies)

    def rate(policy: Policy) -> float | None:
        return replay_bound(names, num_pages, policy, seed=seed).token_rate(names)

    uses = sum(names.lengths[s] for path in names.paths for s in path)
    most = sum(ceiling_tokens(p, n, size, rule) for p, n in zip(known, lengths, strict=True))
    foresight = rate("clairvoyant")
    return {
        "no_cache": 0.0,
        "random": rate("random") if uses <= MAX_RANDOM_USES else None,
        "policy": policy,
        "clairvoyant_leaf": rate("clairvoyant_leaf"),
        "clairvoyant": foresight,
        "infinite": ratio(most, tokens),
        "regret": None if policy is None or foresight is None else 100 * (foresight - policy),
    }


# --- figure ---

# Thin, and dashed as no allocator is (`style.DASHES`); their marks are no allocator's either.
_LINES: dict[str, tuple[str, Any]] = {
    "clairvoyant": ("clairvoyant", (0, (9, 2, 1.5, 2, 1.5, 2))),
    "random": ("random eviction", (0, (1, 3.5))),
}
_MARKS = {"clairvoyant": "2", "random": "1"}  # a tripod up, a tripod down
_THIN = 0.9


@_styled
def plot_bounds(result: Result, ax: Axes | None = None, *, table: pd.DataFrame) -> Axes:
    """Token hit rate of each allocator (markers) against pool size, between random eviction and clairvoyance at its
    own page size; the infinite cache as a thin line, no cache at 0. `table` is that of `bounds`; means over seeds."""
    ax = ax or _new_axes((6.4, 4.0))
    for name, look in looks(result.manifest["allocators"]).items():
        rows = table[table["allocator"] == name].groupby("pool_bytes").mean(numeric_only=True)
        x = rows.index.tolist()
        draw_series(ax, x, 100 * rows["policy"], look)
        for column, (_, dashes) in _LINES.items():
            if column in rows:
                style: dict[str, Any] = {"linestyle": dashes, "marker": _MARKS[column], "markersize": 7}
                ax.plot(x, 100 * rows[column], color=look.colour, linewidth=_THIN, **style)
        if "infinite" in rows and len(rows):
            ax.axhline(100 * rows["infinite"].iloc[-1], color=look.colour, linewidth=0.6)
    for column, (text, dashes) in _LINES.items():
        style = {"linestyle": dashes, "marker": _MARKS[column], "markersize": 7}
        ax.plot([], [], color="#555555", linewidth=_THIN, label=text, **style)
    ax.plot([], [], color="#555555", linewidth=0.6, label="infinite cache, at each design's grain")
    ax.axhline(0, color="#555555", linewidth=1, linestyle=":", label="no cache")
    ax.set_ylabel("token hit rate (%)")
    _pool_axis(ax, table)
    say_outputs(result, ax)
    return _finish(ax, table)
