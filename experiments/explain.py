"""Why is my hit rate low? Every prompt token that was not served from the cache, with exactly one reason.

A comparison is replayed with a ledger beside each allocator (`ledger.py`): what the allocator did is read from its
events, what *could* have been served from trees of all computed tokens that the allocator has no part in. The reasons
of a request add up to its misses, token for token, or the replay stops with an error; and its hits are those of the
result, or the result is not reproducible by this code, and that is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.allocators.interface import AllocatorError
from kvarena.experiments.again import IN_MEMORY, cells_again
from kvarena.experiments.config import Config, EngineConfig
from kvarena.experiments.ledger import NOBODY, REASONS, Ledger, Span, WatchedAllocator
from kvarena.experiments.page_names import name_pages
from kvarena.experiments.replay import Replay, RequestRow

if TYPE_CHECKING:
    from kvarena.experiments.pools import Cell
    from kvarena.experiments.results import Result
    from kvarena.experiments.specs import AllocatorEntry
    from kvarena.experiments.traces.base import Request

__all__ = ["REASONS", "Explanation", "Span", "explain", "explain_replay", "summarise"]


@dataclass
class Explanation:
    """Where the prompt tokens of one cell went.

    table  a row a request: seed, pool_bytes, allocator (of a comparison's cell), index, request_id,
           num_prompt_tokens, admitted, hit_tokens, a column for each reason (tokens), and evicted_by, the request whose
           operations cost it most ("": nobody)
    spans  per request, in order: stretches of tokens that were not served
    """

    entry: AllocatorEntry
    requests: Sequence[Request]
    table: pd.DataFrame
    spans: list[list[Span]]

    def number_of(self, request_id: str) -> int:
        """Number of a request in order of arrival. Raises ValueError when it is not there, or is there twice."""
        found = [i for i, request in enumerate(self.requests) if request.request_id == request_id]
        if len(found) != 1:
            count = "no request" if not found else f"{len(found)} requests"
            raise ValueError(
                f"request: {count} of the id {request_id!r}; ids look like {self.requests[0].request_id!r}"
            )
        return found[0]

    def tell(self, request_id: str) -> list[str]:
        """One request's prompt as sentences, from its first token to its last."""
        number = self.number_of(request_id)
        request, row = self.requests[number], self.table.iloc[number]
        lines = [
            f"request {request_id}, number {number + 1} in order of arrival ({request.arrival_s:.3f} s), under "
            f"{self.entry.label}: {row['hit_tokens']:,} of {row['num_prompt_tokens']:,} prompt tokens served"
        ]
        if row["hit_tokens"]:
            lines.append(f"{_range(0, row['hit_tokens'])}: served from the cache")
        return lines + [f"{_range(s.start, s.end)}: {self._why(s)}" for s in self.spans[number]]

    def _why(self, span: Span) -> str:
        text = REASONS[span.reason]
        if span.source != NOBODY:
            verb = "published by" if span.reason in ("evicted", "behind_gap") else "computed first by"
            text += f"; {verb} {self._name(span.source)}"
        if span.step != NOBODY:
            what = "evicted" if span.reason == "evicted" else "that page was evicted"
            text += f"; {what} {self._for(span)}when {self._name(span.step)} arrived"
            text += f" ({self.requests[span.step].arrival_s:.3f} s)"
        return text

    def _for(self, span: Span) -> str:
        return "" if span.by in (NOBODY, span.step) else f"to make room for {self._name(span.by)}, "

    def _name(self, number: int) -> str:
        return self.requests[number].request_id


def explain(
    what: Result | Config,
    *,
    source: Any = None,
    allocator: str | None = None,
    pool: int | None = None,
    seed: int | None = None,
    tick: Callable[[], None] | None = None,
) -> list[Explanation]:
    """Explain a finished comparison, or a config that was never run: one `Explanation` an allocator.

    allocator  only that one; pool  bytes, default the reference pool; seed  default the first
    source     the trace, when it was an object in memory
    tick       called once a request

    Raises ValueError for what is not in the result, and when the replay's hits are not those of the result.
    """
    config, cells = cells_again(what, source) if not isinstance(what, Config) else _cells(what, source)
    chosen = _choose(cells, allocator, pool, seed)
    found = [_explain_cell(cell, config.engine, tick) for cell in chosen]
    if not isinstance(what, Config):
        for cell, explanation in zip(chosen, found, strict=True):
            _check_against(what, cell, explanation)
    return found


def _cells(config: Config, source: Any) -> tuple[Config, list[Cell]]:
    from kvarena.experiments.loading import load_workloads
    from kvarena.experiments.pools import plan

    if config.workload.trace == IN_MEMORY and source is None:
        raise ValueError("source: the trace was an object in memory; pass it")
    return config, plan(config, load_workloads(config, source), config.entries())


def _choose(cells: list[Cell], allocator: str | None, pool: int | None, seed: int | None) -> list[Cell]:
    pools = sorted({cell.pool_bytes for cell in cells})
    size = pools[len(pools) // 2] if pool is None else pool
    first = cells[0].workload.seed if seed is None else seed
    names = list(dict.fromkeys(cell.entry.name for cell in cells))
    asked = (("pool", size, pools), ("seed", first, sorted({cell.workload.seed for cell in cells})))
    for field, value, known in (*asked, ("allocator", allocator, [None, *names])):
        if value not in known:
            raise ValueError(
                f"{field}: expected one of {', '.join(str(k) for k in known if k is not None)}, found {value!r}"
            )
    return [
        cell
        for cell in cells
        if cell.pool_bytes == size and cell.workload.seed == first and allocator in (None, cell.entry.name)
    ]


def _explain_cell(cell: Cell, engine: EngineConfig, tick: Callable[[], None] | None) -> Explanation:
    found = explain_replay(cell.workload.requests, cell.entry, cell.budget.num_pages, engine, tick=tick)
    found.table.insert(0, "seed", cell.workload.seed)
    found.table.insert(1, "pool_bytes", cell.pool_bytes)
    found.table.insert(2, "allocator", cell.entry.name)
    return found


def explain_replay(
    requests: Sequence[Request],
    entry: AllocatorEntry,
    num_pages: int,
    engine: EngineConfig,
    *,
    tick: Callable[[], None] | None = None,
) -> Explanation:
    """Replay requests through one allocator with a ledger. Raises AllocatorError when reasons do not add up."""
    names = name_pages(requests, entry.page_size, replies=engine.outputs == "replay")
    ledger = Ledger(names, num_pages, entry, namespaced=any(r.namespace is not None for r in requests))
    watched = WatchedAllocator(entry.build(num_pages), ledger)
    replay = Replay(watched, engine.model_copy(update={"steps_every": max(len(requests), 1)}))
    lane = replay.run(_numbered(requests, ledger), tick)
    spans = [_spans_of(row, ledger) for row in lane.requests]
    rows = [_row(row, own, requests) for row, own in zip(lane.requests, spans, strict=True)]
    return Explanation(entry, requests, pd.DataFrame(rows), spans)


def _numbered(requests: Iterable[Request], ledger: Ledger) -> Iterator[Request]:
    for number, request in enumerate(requests):
        ledger.step = number
        yield request


def _spans_of(row: RequestRow, ledger: Ledger) -> list[Span]:
    if not row.admitted:
        return [Span(0, row.num_prompt_tokens, "refused")]
    at = row.hit_tokens
    for span in ledger.spans[row.index]:
        if span.start != at:
            raise AllocatorError(
                f"request {row.request_id}: token {at} has no reason, or two: {ledger.spans[row.index]}"
            )
        at = span.end
    if at != row.num_prompt_tokens or ledger.hits[row.index] != row.hit_tokens:
        raise AllocatorError(f"request {row.request_id}: reasons up to token {at} of {row.num_prompt_tokens}")
    return ledger.spans[row.index]


def _row(row: RequestRow, spans: list[Span], requests: Sequence[Request]) -> dict[str, Any]:
    counts, evictors = Counter[str](), Counter[int]()
    for span in spans:
        counts[span.reason] += span.end - span.start
        if span.by != NOBODY:
            evictors[span.by] += span.end - span.start
    worst = evictors.most_common(1)
    return {
        "index": row.index,
        "request_id": row.request_id,
        "num_prompt_tokens": row.num_prompt_tokens,
        "admitted": row.admitted,
        "hit_tokens": row.hit_tokens,
        **{reason: counts[reason] for reason in REASONS},
        "evicted_by": requests[worst[0][0]].request_id if worst else "",
    }


def _check_against(result: Result, cell: Cell, found: Explanation) -> None:
    rows = result.requests
    rows = rows[(rows["seed"] == cell.workload.seed) & (rows["pool_bytes"] == cell.pool_bytes)]
    rows = rows[rows["allocator"] == cell.entry.name]
    differs = [a != b for a, b in zip(rows["hit_tokens"].tolist(), found.table["hit_tokens"].tolist(), strict=True)]
    if any(differs):
        at = differs.index(True)
        raise ValueError(
            f"the result does not come out again: request {rows['request_id'].iloc[at]} hit "
            f"{rows['hit_tokens'].iloc[at]} tokens there and {found.table['hit_tokens'].iloc[at]} here; was it made "
            "by another version?"
        )


def summarise(found: Iterable[Explanation]) -> pd.DataFrame:
    """Prompt tokens by reason over all requests: index "served" and the reasons; a column of tokens and one of shares
    for each allocator. Tokens of a column add up to the prompts."""
    table = pd.DataFrame({"meaning": {"served": "from the cache", **REASONS}})
    for one in found:
        counts = pd.Series({"served": one.table["hit_tokens"].sum(), **one.table[list(REASONS)].sum()}).astype(int)
        table[one.entry.name] = counts
        table[f"{one.entry.name} share"] = counts / counts.sum() if counts.sum() else float("nan")
    return table


def _range(start: int, end: int) -> str:
    return f"token {start:,}" if end == start + 1 else f"tokens {start:,} to {end - 1:,}"
