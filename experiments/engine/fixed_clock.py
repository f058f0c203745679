"""`clock = "fixed"`: one recorded schedule of admissions and releases, replayed into any allocator.

With the feedback clock a hit saves time, so that the next request is admitted earlier and meets another cache: what a
design does and what its speed does come together. Here every design is given the same moments: each request is
admitted, has its prompt computed, grows and ends when the schedule says. What differs is the allocator's alone.

The schedule is that of a finished run, or of a neutral one: the same scheduler over a pool of the same bytes that
shares and keeps nothing. A design that has no room at a moment cannot wait: the request is left out there (counted as
rejected), or cut where it could not grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvarena.allocators.interface import Release
from kvarena.allocators.interface import Sequence as KVSequence
from kvarena.experiments.engine.executors import UnnamedOutputs
from kvarena.experiments.engine.latency import Latencies, Limits, TokenTimes
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.rows import Record, RequestRow, StepRow, request_row
from kvarena.experiments.metrics import pool_fields

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Request


@dataclass(frozen=True, slots=True)
class Moments:
    """When one request was admitted, got its first and last token, and ended; seconds."""

    index: int
    arrival_s: float
    admitted_s: float
    first_s: float
    last_s: float
    end_s: float
    output_tokens: int


def schedule_of(rows: Iterable[RequestRow]) -> list[Moments]:
    """The schedule of a run's requests, in their order. Who got no token has no place in it: 0 output tokens."""
    return [
        Moments(r.index, r.arrival_s, r.admitted_s, r.first_token_s, r.last_token_s, r.end_s, r.output_tokens)
        if r.end != "rejected"
        and r.admitted_s is not None
        and r.first_token_s is not None
        and r.last_token_s is not None
        else no_place(r.index, r.arrival_s)
        for r in rows
    ]


def no_place(index: int, arrival_s: float) -> Moments:
    """Of a request that the schedule leaves out."""
    return Moments(index, *(arrival_s,) * 5, output_tokens=0)


def read_schedule(folder: Path, seed: int, requests: Sequence[Request]) -> list[Moments]:
    """The schedule of a finished run's reference pool. Raises ValueError when it is of other requests."""
    from kvarena.experiments.results import load_result

    result = load_result(folder)
    rows = result.requests
    rows = rows[(rows["seed"] == seed) & (rows["pool_bytes"] == result.reference_pool)]
    rows = rows[rows["allocator"] == result.allocators[0]]
    if "admitted_s" not in rows or len(rows) != len(requests):
        raise ValueError(f"engine.schedule: {folder} holds no run of these {len(requests)} requests, seed {seed}")
    for row, request in zip(rows.itertuples(), requests, strict=True):
        if row.request_id != request.request_id or row.num_prompt_tokens != request.num_prompt_tokens:
            raise ValueError(f"engine.schedule: {folder} is of other requests ({row.request_id})")
    served = ((rows["end"] != "rejected") & rows["admitted_s"].notna() & rows["last_token_s"].notna()).tolist()
    names = ("index", "arrival_s", "admitted_s", "first_token_s", "last_token_s", "end_s", "output_tokens")
    every = rows[list(names)].itertuples(index=False, name=None)
    return [Moments(*v) if placed else no_place(v[0], v[1]) for v, placed in zip(every, served, strict=True)]


@dataclass(slots=True)
class _Live:
    """A live request; `last_s` and `ended_s` of one that was cut, where they are not the schedule's."""

    moments: Moments
    request: Request
    seq: KVSequence
    output: Sequence[int]
    hit_tokens: int
    computed: bool = False
    last_s: float | None = None
    ended_s: float | None = None


class FixedReplay:
    """Replays a schedule into one allocator. Cost: an event three times a request, each over all live ones."""

    def __init__(
        self,
        allocator: MeteredAllocator,
        requests: Sequence[Request],
        schedule: Sequence[Moments],
        limits: Limits,
        steps_every: int = 1,
    ) -> None:
        self.allocator = allocator
        self.requests = requests
        self.schedule = [moments for moments in schedule if moments.output_tokens]
        self.absent = [moments for moments in schedule if not moments.output_tokens]
        self.steps_every = steps_every
        self.record = Record(latencies=Latencies(limits))
        self._unnamed = UnnamedOutputs()
        self._live: dict[int, _Live] = {}
        self._evicted_before = 0

    def run(self) -> Record:
        """Every moment in order; at one time releases come first, then prompts that are done, then admissions."""
        events = [(m.end_s, 0, m.index, m) for m in self.schedule] + [(m.first_s, 1, m.index, m) for m in self.schedule]
        events += [(m.admitted_s, 2, m.index, m) for m in self.schedule]
        for now, kind, index, moments in sorted(events, key=lambda event: event[:3]):
            before = self.allocator.total_ns
            admitted = 0
            if kind == 2:
                admitted = self._admit(moments)
            elif index in self._live:
                self._live[index].computed |= kind == 1
                self._grow(now)
                if kind == 0 and index in self._live:
                    self._end(self._live.pop(index), "stop", "")
            self.record.step_ns.append(self.allocator.total_ns - before)
            self._note(now, ("release", "commit", "admit")[kind], admitted)
        if not events:  # the schedule's own run let nobody in: the pool as it stood
            self._note(min((m.arrival_s for m in self.absent), default=0.0), "idle", 0)
        self._note_absent()
        self.record.requests.sort(key=lambda row: row.index)
        arrived = min((m.arrival_s for m in self.absent), default=0.0)
        self.record.duration_s = max((m.end_s for m in self.schedule), default=arrived)
        return self.record

    def _note_absent(self) -> None:
        """Requests that the schedule's own run rejected."""
        for moments in self.absent:
            request = self.requests[moments.index]
            nowhere = _Live(moments, request, KVSequence(request.request_id, [0]), (), 0)
            self._finish(nowhere, "rejected", f"request {request.request_id} has no place in the schedule")

    def _admit(self, moments: Moments) -> int:
        request = self.requests[moments.index]
        output: Sequence[int] = self._unnamed.take(moments.output_tokens)
        if request.grain == 1 and request.output_ids is not None and len(request.output_ids) >= moments.output_tokens:
            output = request.output_ids[: moments.output_tokens]  # type: ignore[assignment]  # an array serves
        seq = KVSequence(
            request.request_id,
            request.prompt_ids(),
            namespace=request.namespace,
            declared_max_tokens=moments.output_tokens,
            oracle_tokens=request.num_prompt_tokens + moments.output_tokens,
        )
        pin = self.allocator.admit(seq)
        live = _Live(moments, request, seq, output, 0 if pin is None else pin.hit_tokens)
        if pin is None:
            free, evictable = self.allocator.room()
            text = f"request {request.request_id}: {seq.num_tokens} tokens at {moments.admitted_s:.3f} s, {free} pages "
            self._finish(live, "rejected", text + f"free and {evictable} evictable: the schedule does not wait")
            return 0
        self._live[moments.index] = live
        return 1

    def _grow(self, now: float) -> None:
        """Tokens that are there by now: evenly from the first to the last."""
        done: list[tuple[KVSequence, int]] = []
        for live in list(self._live.values()):
            if not live.computed:
                continue
            target = live.request.num_prompt_tokens + _generated(live.moments, now) - 1
            seq = live.seq
            fresh = target + 1 - seq.num_tokens
            if fresh > 0:
                start = seq.num_tokens - seq.num_prompt_tokens
                for token in live.output[start : start + fresh]:
                    seq.append(int(token))
            need = target - max(seq.num_computed_tokens, live.request.num_prompt_tokens)
            if need > 0 and self.allocator.reserve([(seq, target - seq.num_computed_tokens)]) is None:
                del self._live[live.moments.index]
                self._cut(live, target, now)
                continue
            if target > seq.num_computed_tokens:
                done.append((seq, target))
        if done:
            self.allocator.commit(done)

    def _cut(self, live: _Live, target: int, now: float) -> None:
        """No room to grow: tokens that were to come since it last grew never come, and its last is the one before."""
        seq = live.seq
        while seq.num_tokens > seq.num_computed_tokens + 1:
            seq.pop()
        live.ended_s = now
        live.last_s = _moment_of(live.moments, seq.num_tokens - seq.num_prompt_tokens)
        self._end(live, "pool", f"request {live.request.request_id}: no room to grow to {target} tokens")

    def _end(self, live: _Live, end: str, message: str) -> None:
        self.allocator.release([live.seq], Release.FINISH)
        self._finish(live, end, message)

    def _finish(self, live: _Live, end: str, message: str) -> None:
        moments, request = live.moments, live.request
        generated = 0 if end == "rejected" else live.seq.num_tokens - live.seq.num_prompt_tokens
        cut = max(max(request.num_output_tokens, 1) - generated, 0)
        last_s = moments.last_s if live.last_s is None else live.last_s
        if end != "rejected":
            self.record.latencies.served(
                TokenTimes(moments.arrival_s, moments.first_s, last_s, generated), whole=cut == 0
            )
        self.record.output_tokens += generated
        there = end != "rejected"
        self.record.requests.append(
            request_row(
                request,
                end,
                index=moments.index,
                arrival_s=moments.arrival_s,
                declared_max_tokens=moments.output_tokens,
                admitted=there,
                hit_tokens=live.hit_tokens,
                host_hit_tokens=0,
                readmissions=0,
                readmitted_hit_tokens=0,
                output_tokens=generated,
                reply_tokens=generated,
                preemptions=0,
                recomputed_tokens=0,
                swapped_tokens=0,
                admitted_s=moments.admitted_s if there else None,
                first_token_s=moments.first_s if there else None,
                last_token_s=last_s if there else None,
                end_s=moments.end_s if live.ended_s is None else live.ended_s,
                message=message,
            )
        )

    def _note(self, now: float, kind: str, admitted: int) -> None:
        out = self.record
        out.num_steps += 1
        if (out.num_steps - 1) % self.steps_every:
            return
        lengths = [live.seq.num_computed_tokens or live.seq.num_prompt_tokens for live in self._live.values()]
        evicted = self.allocator.evicted_pages
        out.steps.append(
            StepRow(
                step=out.num_steps - 1,
                time_s=now,
                kind=kind,
                batch=len(lengths),
                new_tokens=0,
                admitted=admitted,
                preempted=0,
                running=len(lengths),
                waiting=0,
                gpu_ms=0.0,
                host_ms=0.0,
                **pool_fields(self.allocator, lengths),
                evicted_pages=evicted - self._evicted_before,
            )
        )
        self._evicted_before = evicted


def _generated(moments: Moments, now: float) -> int:
    """Output tokens by `now`, at least the first.

    >>> _generated(Moments(0, 0.0, 1.0, 2.0, 6.0, 6.0, 5), 4.0)
    3
    """
    if now >= moments.last_s or moments.last_s <= moments.first_s:
        return moments.output_tokens
    share = max(now - moments.first_s, 0.0) / (moments.last_s - moments.first_s)
    return 1 + int(share * (moments.output_tokens - 1))


def _moment_of(moments: Moments, token: int) -> float:
    """When output token number `token` came, from 1: the other way round from `_generated`.

    >>> _moment_of(Moments(0, 0.0, 1.0, 2.0, 6.0, 6.0, 5), 3)
    4.0
    """
    if moments.output_tokens < 2:
        return moments.first_s
    return moments.first_s + (token - 1) / (moments.output_tokens - 1) * (moments.last_s - moments.first_s)
