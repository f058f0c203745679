"""A run step by step: requests, steps, evictions with reasons, and the state of every page, for looking at.

A finished result has counts; who evicted which page and when is not kept. So the cell that is looked at is replayed,
with the allocator's events on: the same requests, the same pool, the same decisions.

An engine run has a simulated clock. A comparison without an engine has none: a step is one arrival, and is shown as
`STEP_S`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from kvarena.allocators.interface import AllocatorError, Event, EventKind, KVAllocator, Sequence
from kvarena.experiments.budget import format_bytes
from kvarena.experiments.provenance import config_digest
from kvarena.experiments.style import printable
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvarena.experiments.engine.engine import StepRecord
    from kvarena.experiments.results import Result

STEP_S = 1e-3
MAX_SAMPLES = 600  # columns of the pool map
MAX_PAGES = 512  # its rows: every n-th page of a larger pool
FREE, EVICTABLE, IN_USE, SHARED = range(4)
STATES = ("free", "evictable", "in use", "shared")


@dataclass(frozen=True, slots=True)
class Span:
    """A request from its arrival to its end, seconds. None: never admitted, or no token. `admitted_s` of a run is not
    known, the first token's time is."""

    request_id: str
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float
    num_prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    preemptions: int
    end: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step and the pool after it."""

    step: int
    start_s: float
    end_s: float
    batch: int
    new_tokens: int
    running: int
    waiting: int
    free: int
    evictable: int
    in_use: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What the allocator did in a step: an event of its log, pages counted and the first ones named."""

    step: int
    time_s: float
    kind: str
    request_id: str | None
    num_pages: int
    first_pages: tuple[int, ...]
    reason: str


@dataclass
class Timeline:
    """One cell of a result, step by step.

    pool_bytes, seed  which cell, beside the label's allocator
    config    names the resolved config of the result, as its own figures do
    page_ids  int32 [rows]: pages that the map shows
    states    uint8 [samples, rows]: FREE, EVICTABLE, IN_USE or SHARED
    sampled   step of each sample
    """

    title: str
    label: str
    kind: str
    page_size: int
    num_pages: int
    pool_bytes: int
    seed: int
    config: str
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    page_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    states: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    sampled: list[int] = field(default_factory=list)

    @property
    def evictions(self) -> list[Mark]:
        return [mark for mark in self.marks if mark.kind == EventKind.EVICT.value]


class _Watch:
    """Follows an allocator's events, and takes the state of its pages from time to time."""

    def __init__(self, allocator: KVAllocator, timeline: Timeline, every: int) -> None:
        self.allocator = allocator
        self.timeline = timeline
        self._every = every
        self._cached = np.zeros(allocator.num_pages + 1, bool)
        self._columns: list[NDArray[np.uint8]] = []
        stride = -(-allocator.num_pages // MAX_PAGES)
        timeline.page_ids = np.arange(1, allocator.num_pages + 1, stride, dtype=np.int32)
        allocator.events.enabled = True

    def step(self, step: int, time_s: float, live: Callable[[], Iterable[Sequence]]) -> None:
        """Take in the events of a step that has just ended; `live` gives the sequences that hold pages."""
        self.take_in(step, time_s)
        if step % self._every == 0:
            self._columns.append(self._states(live())[self.timeline.page_ids])
            self.timeline.sampled.append(step)

    def take_in(self, step: int, time_s: float) -> None:
        """The events alone: of what happens behind the last step."""
        for event in self.allocator.events.drain():
            self._follow(event)
            self.timeline.marks.append(_mark(event, step, time_s))

    def _follow(self, event: Event) -> None:
        if event.kind is EventKind.PUBLISH:
            self._cached[list(event.page_ids)] = True
        elif event.kind is EventKind.EVICT:
            self._cached[list(event.page_ids)] = False

    def _states(self, live: Iterable[Sequence]) -> NDArray[np.uint8]:
        """State of every page, uint8 [num_pages + 1], checked against what the allocator counts."""
        holders = np.zeros(self.allocator.num_pages + 1, np.int32)
        for seq in live:
            np.add.at(holders, np.frombuffer(self.allocator.page_ids(seq), np.int32), 1)
        holders[0] = 0
        states = np.where(self._cached, EVICTABLE, FREE).astype(np.uint8)
        states[holders > 0] = IN_USE
        states[holders > 1] = SHARED
        counted = self.allocator.capacity()
        found = (int((states[1:] >= IN_USE).sum()), int((states[1:] == EVICTABLE).sum()))
        if found != (counted.in_use, counted.evictable):
            raise AllocatorError(f"rows and events give {found} pages in use and evictable, the allocator {counted}")
        return states

    def finish(self) -> None:
        """Hand the map over."""
        rows = len(self.timeline.page_ids)
        self.timeline.states = np.stack(self._columns) if self._columns else np.zeros((0, rows), np.uint8)


def _mark(event: Event, step: int, time_s: float) -> Mark:
    pages = event.page_ids
    return Mark(step, time_s, event.kind.value, event.request_id, len(pages), pages[:8], event.reason)


def timeline(
    result: Result | Path | str, *, allocator: str | None = None, pool: int | None = None, seed: int | None = None
) -> Timeline:
    """Replay one cell of a finished comparison or engine run and keep everything there is to look at.

    allocator, pool, seed  which cell; default: the first allocator, the reference pool, the first seed

    Raises ValueError for a cell that the result does not have.
    """
    from kvarena.experiments.results import Result, load_result

    loaded = result if isinstance(result, Result) else load_result(result)
    name = loaded.allocators[0] if allocator is None else allocator
    size = loaded.reference_pool if pool is None else pool
    for what, value, known in (("allocator", name, loaded.allocators), ("pool", size, loaded.pools)):
        if value not in known:
            raise ValueError(f"{what}: expected one of {', '.join(map(str, known))}, found {value!r}")
    seeds = sorted(int(value) for value in loaded.summary["seed"].unique())
    if seed is not None and seed not in seeds:
        raise ValueError(f"seed: expected one of {', '.join(map(str, seeds))}, found {seed!r}")
    of = _of_run if loaded.manifest["kind"] == "run" else _of_comparison
    chosen = seeds[0] if seed is None else seed
    made = of(loaded, name, size, chosen)
    _check_hits(loaded, made, name, size, chosen)
    return made


def _check_hits(result: Result, made: Timeline, name: str, pool: int, seed: int) -> None:
    """Raise ValueError unless the replay had the hits of the result, request by request."""
    rows = result.requests
    rows = rows[(rows["allocator"] == name) & (rows["pool_bytes"] == pool) & (rows["seed"] == seed)]
    stated = dict(zip(rows["request_id"], rows["hit_tokens"].astype(int), strict=True))
    for span in made.spans:
        if stated.get(span.request_id) != span.hit_tokens:
            raise ValueError(
                f"request {span.request_id}: the replay had {span.hit_tokens} hit tokens, the result has "
                f"{stated.get(span.request_id)}: it was made by another version, or the trace changed"
            )


def summary_lines(made: Timeline) -> list[str]:
    """What there is to see, in a few lines."""
    reasons = Counter(mark.reason for mark in made.evictions)
    pages = Counter(dict.fromkeys(reasons, 0))
    for mark in made.evictions:
        pages[mark.reason] += mark.num_pages
    told = [f"{pages[reason]:,} pages in {count:,} evictions for {reason}" for reason, count in reasons.most_common()]
    clock = "simulated seconds" if made.kind == "run" else "steps of one arrival"
    span = made.steps[-1].end_s if made.kind == "run" else len(made.steps)
    return [
        f"{printable(made.title)}, seed {made.seed}: {printable(made.label)}, {made.num_pages:,} pages of "
        f"{made.page_size}, pool {format_bytes(made.pool_bytes)}",
        f"{len(made.spans):,} requests, {len(made.steps):,} steps, {span:,.6g} {clock}",
        *(told or ["nothing was evicted"]),
    ]


def _begun(result: Result, label: str, allocator: KVAllocator, pool: int, seed: int) -> Timeline:
    about = result.manifest
    size, pages, config = allocator.page_size, allocator.num_pages, config_digest(result.config)
    return Timeline(about["trace"], label, about["kind"], size, pages, pool, seed, config)


def _of_comparison(result: Result, name: str, pool: int, seed: int) -> Timeline:
    from kvarena.experiments.again import cells_again
    from kvarena.experiments.replay import Replay

    config, cells = cells_again(result)
    cell = next(c for c in cells if (c.entry.name, c.pool_bytes, c.workload.seed) == (name, pool, seed))
    requests = cell.workload.requests
    allocator = cell.entry.build(cell.budget.num_pages)
    made = _begun(result, cell.entry.label, allocator, pool, seed)
    replay = Replay(allocator, config.engine.model_copy(update={"steps_every": 1}))
    watch = _Watch(allocator, made, -(-len(requests) // MAX_SAMPLES))
    entered: dict[str, int] = {}
    left: dict[str, int] = {}
    for index, request in enumerate(requests):
        before = dict(replay.live_sequences())
        replay.step(index, request)
        after = dict(replay.live_sequences())
        left.update(dict.fromkeys(before.keys() - after.keys(), index))
        if request.request_id in after:
            entered[request.request_id] = index
        watch.step(index, index * STEP_S, lambda: [seq for _, seq in replay.live_sequences()])
    lane = replay.run(())
    watch.take_in(len(requests), len(requests) * STEP_S)
    for row, request in zip(lane.requests, requests, strict=True):
        start = row.index * STEP_S
        end = (left.get(request.request_id, len(requests)) if row.admitted else row.index + 1) * STEP_S
        made.spans.append(
            Span(
                request_id=row.request_id,
                arrival_s=start,
                admitted_s=start if row.admitted else None,
                first_token_s=None,
                end_s=max(end, start + STEP_S),
                num_prompt_tokens=row.num_prompt_tokens,
                hit_tokens=row.hit_tokens,
                output_tokens=row.reply_tokens,
                preemptions=0,
                end="finish" if row.admitted else "rejected",
            )
        )
    for step in lane.steps:
        at = step.step * STEP_S
        made.steps.append(Step(step.step, at, at + STEP_S, 1, 0, step.live, 0, step.free, step.evictable, step.in_use))
    watch.finish()
    return made


def _of_run(result: Result, name: str, pool: int, seed: int) -> Timeline:
    from kvarena.experiments.engine.run import simulation_again

    simulation, entry = simulation_again(result.config, name, pool, seed)
    allocator = simulation.allocator
    made = _begun(result, entry.label, allocator, pool, seed)
    total = int(result.summary.loc[result.summary["allocator"] == name, "steps"].max())
    watch = _Watch(allocator.inner, made, max(1, -(-total // MAX_SAMPLES)))
    started = 0.0

    def after(record: StepRecord, now_s: float) -> None:
        nonlocal started
        watch.step(record.step, now_s, lambda: [r.seq for r in simulation.scheduler.running_requests])
        counted, plan = allocator.capacity(), record.plan
        made.steps.append(
            Step(
                step=record.step,
                start_s=started,
                end_s=now_s,
                batch=len(plan.batch),
                new_tokens=plan.num_tokens,
                running=len(simulation.scheduler.running_requests),
                waiting=len(simulation.scheduler.waiting),
                free=counted.free,
                evictable=counted.evictable,
                in_use=counted.in_use,
            )
        )
        started = now_s

    simulation.after_step = after
    for row in simulation.run().requests:
        fields = asdict(row)
        names = ("request_id", "arrival_s", "first_token_s", "end_s", "num_prompt_tokens", "hit_tokens")
        made.spans.append(
            Span(
                **{key: fields[key] for key in (*names, "output_tokens", "preemptions", "end")},
                admitted_s=None,
            )
        )
    watch.finish()
    return made
