"""Replay without an engine: requests in arrival order through one allocator.

A step is one arrival:

    1. way       its predecessors in the session, and the oldest request when `live` are there, finish
    2. admit     pin -> reserve the prompt behind the hit -> commit it
    3. reply     each live request appends its share of its reply: reserve -> commit   (outputs = "replay")
    4. record    pages by state, tails, what was evicted

A request lives for `live` steps, so each share is 1 / `live` of its reply and all of it is there at its end. The
last token of a reply is appended and never committed: no engine writes its KV.

Where live requests do not fit together, the oldest ends early; reply tokens that are lost so are counted as
`cut_output_tokens`. A request that does not fit an empty pool is an error, or a counted rejection.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvarena.allocators.interface import KVAllocator, Pin, Release, Sequence
from kvarena.experiments.metrics import pool_fields

if TYPE_CHECKING:
    from kvarena.experiments.config import EngineConfig
    from kvarena.experiments.traces.base import Request

VERBS = ("pin", "reserve", "commit", "release")


@dataclass(frozen=True, slots=True)
class RequestRow:
    """What became of one request.

    hit_tokens        of its first admission; tries that were refused do not count
    refusals          tries before it was admitted or rejected
    evicted_pages     pages evicted by its own operations
    duplicate_pages   own pages given up or kept beside equal ones, as its commits reported
    reply_tokens      reply tokens whose KV was written
    cut_output_tokens reply tokens that were not replayed, for want of room
    """

    index: int
    request_id: str
    session_id: str | None
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    admitted: bool
    hit_tokens: int
    refusals: int
    evicted_pages: int
    duplicate_pages: int
    reply_tokens: int
    cut_output_tokens: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """Pages by state at the end of a step, before anything is released.

    tail_slots     free slots in the last page of each live request
    wasted_slots   slots in owned pages that hold no token: tails, reservations, holes
    external_fragmentation  1 - longest free run / free pages, for designs that need runs; else None
    live_tokens    tokens with KV of all live requests, shared ones once for each
    evicted_pages  during this step
    """

    step: int
    request_id: str
    live: int
    free: int
    evictable: int
    in_use: int
    shared: int
    duplicates: int
    wasted_slots: int
    tail_slots: int
    live_tokens: int
    evicted_pages: int
    external_fragmentation: float | None = None


@dataclass
class BatchRecord:
    """The live requests of one step: id -> (tokens with KV, page ids in position order)."""

    step: int
    page_size: int
    requests: dict[str, tuple[int, list[int]]]


@dataclass
class Lane:
    """One allocator's run over one list of requests."""

    requests: list[RequestRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    nanoseconds: dict[str, array[int]] = field(default_factory=lambda: {verb: array("q") for verb in VERBS})


@dataclass
class _Live:
    """A live request and what its row needs at the end."""

    index: int
    request: Request
    seq: Sequence
    reply: Any
    share: int
    hit_tokens: int = 0
    refusals: int = 0
    evicted: int = 0
    duplicates: int = 0
    appended: int = 0
    stopped: bool = False


class Replay:
    """Drives one allocator. `sample_steps` are the steps whose batches are recorded for the kernel check."""

    def __init__(
        self,
        allocator: KVAllocator,
        engine: EngineConfig,
        *,
        sample_steps: Iterable[int] = (),
        check: bool = False,
    ) -> None:
        self.allocator = allocator
        self.engine = engine
        self.lane = Lane()
        self._live: dict[str, _Live] = {}
        self._rows: dict[int, RequestRow] = {}
        self._sample_steps = frozenset(sample_steps)
        self._check = check
        self._evicted_before = 0
        self._evicted = 0

    def run(self, requests: Iterable[Request], tick: Callable[[], None] | None = None) -> Lane:
        """Replay all requests; `tick` is called once a request (a progress bar's advance)."""
        for index, request in enumerate(requests):
            self.step(index, request)
            if tick is not None:
                tick()
        for live in list(self._live.values()):
            self._end(live)
        self.lane.requests = self.ended()
        return self.lane

    def ended(self) -> list[RequestRow]:
        """Rows of the requests that have ended, in order of arrival."""
        return [self._rows[index] for index in sorted(self._rows)]

    def step(self, index: int, request: Request) -> None:
        """One arrival, see the module's head."""
        self._make_way(request)
        live = self._admit(index, request)
        for other in list(self._live.values()):
            if other.request.request_id in self._live:  # not ended by another's need for room
                self._append_reply(other)
        if self._check:
            self.allocator.check()
        if index % self.engine.steps_every == 0:
            self._record_step(index, request)
        if live is not None and index in self._sample_steps:
            self._record_batch(index)

    def pages_of(self, request_id: str) -> array[int] | None:
        """Page ids of a live request in position order; None when it is not live."""
        live = self._live.get(request_id)
        return None if live is None else self.allocator.page_ids(live.seq)

    def live_sequences(self) -> list[tuple[str, Sequence]]:
        """Live requests and their sequences, the oldest first."""
        return [(name, live.seq) for name, live in self._live.items()]

    # --- way ---

    def _make_way(self, request: Request) -> None:
        if request.session_id is not None:
            for other in [o for o in self._live.values() if precedes(o.request, request)]:
                self._end(other)
        if len(self._live) >= self.engine.live:
            self._finish(next(iter(self._live.values())))
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id}: already live; ids must be unique while requests overlap")

    # --- admit ---

    def _admit(self, index: int, request: Request) -> _Live | None:
        seq = Sequence(
            request.request_id,
            request.prompt_ids(),
            namespace=request.namespace,
            declared_max_tokens=self.engine.declared_max_tokens,
            oracle_tokens=request.num_prompt_tokens + request.num_output_tokens,
        )
        live = _Live(index, request, seq, self._reply(request), 0)
        live.share = -(-len(live.reply) // self.engine.live) if live.reply is not None else 0
        pin = self._enter(live)
        while pin is None and self._live:
            live.refusals += 1
            self._finish(next(iter(self._live.values())))
            pin = self._enter(live)
        if pin is None:
            live.refusals += 1
            self._reject(live)
            return None
        live.hit_tokens = pin.hit_tokens
        self._live[request.request_id] = live
        self._commit(live, seq.num_prefill_tokens)
        return live

    def _reply(self, request: Request) -> Any:
        reply = None if self.engine.outputs == "none" else request.reply_ids()
        return None if reply is None else reply.tolist()

    def _enter(self, live: _Live) -> Pin | None:
        start = time.perf_counter_ns()
        pin = self.allocator.pin(live.seq)
        self.lane.nanoseconds["pin"].append(time.perf_counter_ns() - start)
        if pin is None or not self._reserve(live, live.seq.num_prefill_tokens - pin.hit_tokens):
            return None
        return pin

    def _reject(self, live: _Live) -> None:
        if self.engine.too_long == "error":
            pool = self.allocator
            name = live.request.request_id
            raise ValueError(too_long_message(name, live.seq.num_tokens, pool.page_size, pool.num_pages, pool.kind))
        self._write_row(live, admitted=False)

    # --- reply ---

    def _append_reply(self, live: _Live, *, whole: bool = False) -> None:
        """This step's share of the reply, or all that is left of it."""
        if live.reply is None or live.stopped:
            return
        end = len(live.reply) if whole else min(live.appended + live.share, len(live.reply))
        chunk = self.engine.reply_chunk or max(end - live.appended, 1)
        while live.appended < end and not live.stopped:
            self._append_tokens(live, live.reply[live.appended : min(live.appended + chunk, end)])

    def _append_tokens(self, live: _Live, tokens: list[int]) -> None:
        seq = live.seq
        for token in tokens:
            seq.append(token)
        live.appended += len(tokens)
        # All but the reply's very last token get KV.
        goal = seq.num_tokens - (live.appended == len(live.reply))
        if goal > seq.num_computed_tokens and self._grow(live, goal):
            self._commit(live, goal)

    def _grow(self, live: _Live, goal: int) -> bool:
        """Room up to `goal`; the oldest other request ends early where it must, else the reply stops here."""
        while not self._reserve(live, goal - live.seq.num_computed_tokens):
            others = [other for other in self._live.values() if other is not live]
            if not others:
                while live.seq.num_tokens > live.seq.num_computed_tokens:
                    live.seq.pop()
                live.appended = live.seq.num_tokens - live.seq.num_prompt_tokens
                live.stopped = True
                return False
            self._finish(others[0])
        return True

    def _end(self, live: _Live) -> None:
        """The natural end: the rest of the reply, then the release."""
        if live.request.request_id in self._live:
            self._append_reply(live, whole=True)
            self._finish(live)

    # --- verbs, timed ---

    def _reserve(self, live: _Live, n: int) -> bool:
        start = time.perf_counter_ns()
        reservations = self.allocator.reserve([(live.seq, n)])
        self.lane.nanoseconds["reserve"].append(time.perf_counter_ns() - start)
        if reservations is None:
            return False
        self._count(live, len(reservations[0].evicted), len(reservations[0].duplicates))
        return True

    def _commit(self, live: _Live, goal: int) -> None:
        start = time.perf_counter_ns()
        done = self.allocator.commit([(live.seq, goal)])
        self.lane.nanoseconds["commit"].append(time.perf_counter_ns() - start)
        self._count(live, len(done[0].evicted), len(done[0].duplicates))

    def _finish(self, live: _Live) -> None:
        if live.request.request_id not in self._live:
            return
        del self._live[live.request.request_id]
        written = live.seq.num_computed_tokens - live.seq.num_prompt_tokens
        start = time.perf_counter_ns()
        released = self.allocator.release([live.seq], Release.FINISH)
        self.lane.nanoseconds["release"].append(time.perf_counter_ns() - start)
        self._count(live, len(released.evicted), len(released.duplicates))
        self._write_row(live, admitted=True, reply_tokens=max(written, 0))

    def _count(self, live: _Live, evicted: int, duplicates: int) -> None:
        live.evicted += evicted
        live.duplicates += duplicates
        self._evicted += evicted

    # --- record ---

    def _write_row(self, live: _Live, *, admitted: bool, reply_tokens: int = 0) -> None:
        request, reply = live.request, live.reply
        self._rows[live.index] = RequestRow(
            index=live.index,
            request_id=request.request_id,
            session_id=request.session_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=live.seq.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            admitted=admitted,
            hit_tokens=live.hit_tokens,
            refusals=live.refusals,
            evicted_pages=live.evicted,
            duplicate_pages=live.duplicates,
            reply_tokens=reply_tokens,
            cut_output_tokens=0 if reply is None else len(reply) - live.appended,
        )

    def _record_step(self, index: int, request: Request) -> None:
        lengths = [live.seq.num_computed_tokens for live in self._live.values()]
        self.lane.steps.append(
            StepRow(
                step=index,
                request_id=request.request_id,
                live=len(lengths),
                **pool_fields(self.allocator, lengths),
                evicted_pages=self._evicted - self._evicted_before,
                external_fragmentation=self._external_fragmentation(),
            )
        )
        self._evicted_before = self._evicted

    def _external_fragmentation(self) -> float | None:
        waste = getattr(self.allocator, "waste", None)
        return None if waste is None else waste().external_fragmentation

    def _record_batch(self, index: int) -> None:
        rows = {
            name: (live.seq.num_computed_tokens, list(self.allocator.page_ids(live.seq)))
            for name, live in self._live.items()
        }
        self.lane.batches.append(BatchRecord(index, self.allocator.page_size, rows))


def precedes(earlier: Request, request: Request) -> bool:
    """Whether the prompt holds the other's reply, so that one has ended. A retry has the same prompt and overlaps."""
    return earlier.session_id == request.session_id and earlier.num_prompt_tokens < request.num_prompt_tokens


def too_long_message(request_id: str, num_tokens: int, page_size: int, num_pages: int, allocator: str) -> str:
    """For a request that an empty pool refuses: demand, supply and identity in one line."""
    pages = -(-num_tokens // page_size)
    advice = "give a larger pool, or too_long = 'reject' to count and skip it"
    if pages <= num_pages:
        return (
            f"request {request_id} has {num_tokens} tokens ({pages} pages of {page_size}), and {allocator} refuses it "
            f"with all of its {num_pages} pages free: its rules ask for more than the prompt (a reserved run, say), or "
            f"for a shorter one; change them, {advice}"
        )
    return (
        f"request {request_id} needs {pages} pages ({num_tokens} tokens, page_size {page_size}), and the pool of "
        f"{allocator} has {num_pages}; {advice}"
    )


def longest_tokens(requests: Iterable[Request], outputs: str) -> tuple[int, str]:
    """Tokens with KV of the longest request (with its reply but the last token when replayed), and its id."""
    longest, name = 0, ""
    for request in requests:
        reply = request.reply_ids() if outputs == "replay" else None
        tokens = request.num_prompt_tokens + (0 if reply is None else max(len(reply) - 1, 0))
        if tokens > longest:
            longest, name = tokens, request.request_id
    return longest, name
