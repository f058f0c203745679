"""Why a request of an engine run missed: the ledger of `explain.py` beside a scheduler's allocator.

Unlike a replay, a scheduler looks up and then may not get room, admits several requests in one step, computes a prompt
in pieces, and throws requests back. So a look-up counts when its slots are granted; a text counts as computed from then
on; what a request admitted before has in its prompt and has not computed yet is a reason of its own; and what a request
finds when it is admitted again after a preemption stands apart, since it finds mostly itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from kvarena.allocators.interface import AllocatorError, KVAllocator
from kvarena.allocators.interface import Sequence as KVSequence
from kvarena.experiments.ceilings import PrefixTree
from kvarena.experiments.explain import Explanation, check_cover, reasons_row
from kvarena.experiments.ledger import Ledger, Span, WatchedAllocator, space_of, tokens_of
from kvarena.experiments.page_names import PageNames, name_pages

if TYPE_CHECKING:
    from kvarena.experiments.engine.simulate import RequestRow
    from kvarena.experiments.results import Result
    from kvarena.experiments.specs import AllocatorEntry
    from kvarena.experiments.traces.base import Request

Tick = Callable[[], None] | None
FIRST_UNNAMED = -(2**30)


@dataclass
class Admission:
    """What one admission was served: tokens that it had to have, tokens hit, and why the others were not."""

    num_tokens: int
    hit_tokens: int
    spans: list[Span] = field(default_factory=list)


class RunLedger(Ledger):
    """A ledger whose requests are found by their id, in whatever order a scheduler admits them."""

    def __init__(
        self, names: PageNames, num_pages: int, entry: AllocatorEntry, requests: Sequence[Request], tick: Tick = None
    ) -> None:
        super().__init__(names, num_pages, entry, namespaced=any(r.namespace is not None for r in requests))
        self._number_of = {request.request_id: number for number, request in enumerate(requests)}
        if len(self._number_of) < len(requests):
            raise ValueError("explain: request ids must be unique in a run")
        self.admissions: list[list[Admission]] = [[] for _ in requests]
        self._looked_up: dict[str, Admission] = {}  # pinned, and without slots so far
        self._granted: dict[str, int] = {}  # tokens that each live request has slots for
        self._begun = PrefixTree()  # whole prompts of everybody who was admitted
        self._tick = tick

    def arrive(self, seq: KVSequence, hit_tokens: int) -> None:
        """A look-up, which may come to nothing."""
        self.step = self._number_of[seq.request_id]
        super().arrive(seq, hit_tokens)
        self._looked_up[seq.request_id] = Admission(seq.num_tokens, hit_tokens, self.spans.pop(self.step))

    def reserved(self, wants: Iterable[tuple[KVSequence, int]]) -> None:
        """Slots were granted: looked-up requests are admitted, in this order, and their texts count as computed."""
        for seq, n in wants:
            found = self._looked_up.pop(seq.request_id, None)
            if found is not None:
                self._admitted(seq, found)
            self._granted[seq.request_id] = seq.num_computed_tokens + n
            self.write(seq, seq.num_computed_tokens + n)

    def _admitted(self, seq: KVSequence, found: Admission) -> None:
        number, ids = self._number_of[seq.request_id], tokens_of(seq)
        begun, source = self._begun.known(ids, space_of(seq))
        found.spans = [part for span in found.spans for part in _split(span, begun, source)]
        self._begun.add(ids, number, space_of(seq))
        self.admissions[number].append(found)
        if self._tick is not None and len(self.admissions[number]) == 1:
            self._tick()

    def leave(self, seq: KVSequence) -> None:
        """No longer live; a look-up without slots is forgotten. What ran ahead has its token by now, or never."""
        self._looked_up.pop(seq.request_id, None)
        self.write(seq, self._granted.pop(seq.request_id, 0))
        super().leave(seq)


def _split(span: Span, begun: int, source: int) -> list[Span]:
    """A stretch that nobody had computed, cut where the prompts of those admitted before end."""
    if span.reason != "first_seen" or begun <= span.start:
        return [span]
    early = Span(span.start, min(begun, span.end), "in_progress", source=source)
    return [early] if begun >= span.end else [early, replace(span, start=begun)]


def explain_run(
    result: Result, *, allocator: str | None = None, pool: int | None = None, seed: int | None = None, tick: Tick = None
) -> list[Explanation]:
    """Explain one cell of a finished engine run. Raises ValueError for what is not in the result, and when the run
    does not come out again."""
    from kvarena.experiments.engine.run import record_again

    chosen = _chosen(result, allocator, pool, seed)
    ledgers: list[RunLedger] = []

    def watch(inner: KVAllocator, entry: AllocatorEntry, requests: Sequence[Request]) -> KVAllocator:
        ran = as_run(requests)
        names = name_pages(ran, entry.page_size, replies=True)
        ledgers.append(RunLedger(names, inner.num_pages, entry, ran, tick))
        return WatchedAllocator(inner, ledgers[-1])

    record, entry, requests = record_again(result.config, *chosen, watch=watch)
    return [_explanation(result, chosen, record.requests, entry, requests, ledgers[-1])]


def as_run(requests: Sequence[Request]) -> list[Request]:
    """The requests with replies as the engine gives them: the trace's where it names each token, else ids that nobody
    shares. One id more than that, since a step that runs ahead may write a reply's last token too."""
    ran, unnamed = [], FIRST_UNNAMED
    for request in requests:
        count = max(request.num_output_tokens, 1)
        named = request.grain == 1 and request.output_ids is not None and len(request.output_ids) == count
        fresh = 1 if named else count + 1
        ids = np.arange(unnamed, unnamed + fresh, dtype=np.int32)
        unnamed += fresh
        reply = np.concatenate([request.output_ids, ids]).astype(np.int32) if named else ids
        part = "output_ids" if request.grain == 1 else "reply_tokens"
        ran.append(replace(request, num_output_tokens=count + 1, **{part: reply}))  # type: ignore[arg-type]
    return ran


def _chosen(result: Result, allocator: str | None, pool: int | None, seed: int | None) -> tuple[str, int, int]:
    seeds = sorted(int(one) for one in result.summary["seed"].unique())
    asked = (
        ("allocator", result.allocators[0] if allocator is None else allocator, result.allocators),
        ("pool", result.reference_pool if pool is None else pool, result.pools),
        ("seed", seeds[0] if seed is None else seed, seeds),
    )
    for name, value, known in asked:
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, found {value!r}")
    return asked[0][1], asked[1][1], asked[2][1]


def _explanation(
    result: Result,
    chosen: tuple[str, int, int],
    rows: Sequence[RequestRow],
    entry: AllocatorEntry,
    requests: Sequence[Request],
    ledger: RunLedger,
) -> Explanation:
    name, pool, seed = chosen
    _check_against(result, chosen, rows)
    ran = [replace(request, arrival_s=row.arrival_s) for request, row in zip(requests, rows, strict=True)]
    spans, firsts, again = [], [], []
    for row in rows:
        first, later = _told(row, ledger.admissions[row.index])
        spans.append(first.spans)
        firsts.append(reasons_row(row, first.num_tokens, first.hit_tokens, first.spans, ran))
        again += [
            {**reasons_row(row, one.num_tokens, one.hit_tokens, one.spans, ran), "admission": place}
            for place, one in enumerate(later, 2)
        ]
    keys: dict[str, Any] = {"seed": seed, "pool_bytes": pool, "allocator": name}
    table, readmitted = (pd.DataFrame(part).assign(**keys) for part in (firsts, again))
    columns = [*keys, *firsts[0]] if firsts else list(keys)
    later_spans = {row.index: ledger.admissions[row.index][1:] for row in rows}
    return Explanation(
        entry,
        ran,
        table[columns],
        spans,
        readmitted.reindex(columns=[*columns, "admission"]),
        {number: [one.spans for one in found] for number, found in later_spans.items() if found},
    )


def _told(row: RequestRow, admissions: list[Admission]) -> tuple[Admission, list[Admission]]:
    """First admission and later ones, each checked: its hit and its reasons cover it exactly once."""
    if not row.admitted:
        return Admission(row.num_prompt_tokens, 0, [Span(0, row.num_prompt_tokens, "refused")]), []
    stated = (1 + row.readmissions, row.hit_tokens, row.readmitted_hit_tokens)
    hits = [one.hit_tokens for one in admissions]
    seen = (len(hits), sum(hits[:1]), sum(hits[1:]))
    # What comes back from a host tier is capped by what was saved there, so its later hits are counted otherwise.
    if stated[:2] != seen[:2] or (stated != seen and not row.swapped_tokens):
        raise AllocatorError(f"request {row.request_id}: admissions and hits {stated}, the ledger saw {hits}")
    for one in admissions:
        check_cover(row.request_id, one.hit_tokens, one.num_tokens, one.spans)
    first = replace(admissions[0], spans=_from_host(admissions[0], row.host_hit_tokens))
    return first, admissions[1:]


def _from_host(one: Admission, tokens: int) -> list[Span]:
    """The spans, with the first `tokens` behind the device's hit as served by the host's cache."""
    end = one.hit_tokens + tokens
    if not tokens:
        return one.spans
    rest = [replace(span, start=max(span.start, end)) for span in one.spans if span.end > end]
    return [Span(one.hit_tokens, end, "host"), *rest]


def _check_against(result: Result, chosen: tuple[str, int, int], rows: Sequence[RequestRow]) -> None:
    table = result.requests
    for name, value in zip(("allocator", "pool_bytes", "seed"), chosen, strict=True):
        table = table[table[name] == value]
    stated = list(zip(table["request_id"], table["hit_tokens"], table["readmitted_hit_tokens"], strict=True))
    found = [(row.request_id, row.hit_tokens, row.readmitted_hit_tokens) for row in rows]
    if stated == found:
        return
    differs = next((a, b) for a, b in zip(stated, found, strict=False) if a != b)
    raise ValueError(
        f"the result does not come out again: request {differs[0][0]} hit {differs[0][1]} tokens there and "
        f"{differs[1][1]} here; was it made by another version, or did the trace change?"
    )
