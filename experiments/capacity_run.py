"""A burst of requests through the engine: is it carried, and what does it cost when it is not?

Carried: all are live at once, nobody is preempted and nobody waits for room. Waiting because a step's tokens are spent
is no waiting for room, nor is going from one of SGLang's prompt passes to the next: nobody decodes in between. The
engine, the schedulers and the allocators are those of `kvarena run`; with `make_executor` the same burst runs over real
pools and kernels.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from kvarena.allocators.interface import Capacity, KVAllocator
from kvarena.experiments.capacity_loads import Load
from kvarena.experiments.engine.arrivals import Arrivals
from kvarena.experiments.engine.engine import StepRecord
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.engine.simulate import MakeExecutor, RunOptions, Simulation
from kvarena.experiments.engine.step_time import StepTimeModel, step_amounts

PEAK_STEP = 0.002  # capacity is read again when the pages in use have grown by this share of the pool


@dataclass(frozen=True)
class Burst:
    """What became of a burst. Times are the engine's clock.

    carried       all live at once, nobody preempted, nobody waited for room
    stopped       why not, or "" (preempted, room, rows, not all at once)
    peak_running  most requests that ran at once
    peak          capacity when most pages were in use (within 0.2 % of the pool), with tail slots beside it
    fragmented    refusals of a contiguous pool although enough pages were free
    steps         with an executor that measures: amounts of each step that ran, `host_us` and `kernels_us`
    """

    size: int
    carried: bool
    stopped: str
    peak_running: int
    preemptions: int
    served: int
    output_tokens: int
    recomputed_tokens: int
    duration_s: float
    peak_pages: int
    peak: dict[str, int]
    fragmented: int = 0
    steps: tuple[dict[str, float], ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def preemptions_per_request(self) -> float:
        return self.preemptions / self.size

    def row(self) -> dict[str, Any]:
        """As a row of a table, the peak's fields named peak_..."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("peak", "steps")}
        rates = {"tokens_per_s": self.tokens_per_s, "preemptions_per_request": self.preemptions_per_request}
        return {**fields, **rates, **{f"peak_{name}": value for name, value in self.peak.items()}}


class _Decided(Exception):
    """Whether the burst is carried is known, and the rest of the run was not asked for."""


class _BurstRun(Simulation):
    """A simulation that looks after every step whether somebody had to wait."""

    amounts: list[dict[str, float]]
    stopped = ""
    stop_early = False
    size = 0
    peak_running = 0
    peak_pages = 0
    peak: dict[str, int] | None = None

    def _note_step(self, record: StepRecord, host: float, gpu: float) -> None:
        super()._note_step(record, host, gpu)
        if record.plan.batch and hasattr(self.executor, "times"):
            self.amounts.append(asdict(step_amounts(record.plan)))
        self._note_peak()
        if not self.stopped:
            self.stopped = self._why(record)
            if self.stop_early and (self.stopped or self._cannot_fail()):
                raise _Decided

    def _cannot_fail(self) -> bool:
        """All have been live at once, and what they can still grow fits behind what they hold."""
        if self.peak_running < self.size or self.record.num_steps % 16 or self.allocator.inner.kind == "contiguous":
            return False
        page = self.allocator.page_size
        growth = sum(
            -(-(live.arrival.request.num_output_tokens - live.request.num_output) // page) + 2
            for live in self._live.values()
        )
        return growth <= sum(self.allocator.room())

    def _note_peak(self) -> None:
        free, evictable = self.allocator.room()
        in_use = self.allocator.num_pages - free - evictable
        if self.peak is None or in_use > self.peak_pages + PEAK_STEP * self.allocator.num_pages:
            running = self.scheduler.running_requests
            self.peak = _slots(self.allocator.capacity(), [request.num_computed for request in running])
            self.peak_pages = in_use

    def _why(self, record: StepRecord) -> str:
        plan, scheduler, config = record.plan, self.scheduler, self.scheduler.config
        running = len(scheduler.running_requests)
        self.peak_running = max(self.peak_running, running)
        if plan.preempted:
            return "preempted"
        if not scheduler.waiting:
            return ""
        if running >= config.max_num_seqs:
            return "rows"
        if scheduler.name == "vllm":
            return "room" if plan.num_tokens < config.max_num_batched_tokens else ""
        return "room" if plan.kind != "prefill" else ""


def _slots(seen: Capacity, lengths: list[int]) -> dict[str, int]:
    size = seen.page_size
    tails = sum(-n % size for n in lengths)
    return {
        "in_use": seen.in_use,
        "duplicates": seen.duplicates,
        "wasted_slots": seen.wasted_slots,
        "tail_slots": min(tails, seen.wasted_slots),
        "live_tokens": sum(lengths),
    }


def run_burst(
    load: Load,
    allocator: KVAllocator,
    policy: str,
    limits: SchedulerConfig,
    model: StepTimeModel,
    *,
    declared: int = 4096,
    stop_early: bool = False,
    make_executor: MakeExecutor | None = None,
) -> Burst:
    """All requests of `load` arrive at once.

    declared       max_tokens that every client states (never below its true output)
    stop_early     end the run as soon as it is known whether the burst is carried: it is not, or all have been live at
                   once and what they can still grow fits; what is counted ends there too
    make_executor  real pools in place of scripted outputs: given the allocator, the outputs and the limits, it returns
                   an executor whose `allocator` the scheduler then uses
    """
    options = RunOptions(lambda tokens, index: max(declared, tokens), steps_every=1_000_000)
    arrivals = Arrivals(load.requests)  # their arrival is 0
    run = _BurstRun(MeteredAllocator(allocator), policy, limits, model, arrivals, options, make_executor=make_executor)
    run.stop_early, run.size, run.amounts = stop_early, len(load), []
    with suppress(_Decided):
        run.run()
    return _result(run, load, allocator)


def _result(run: _BurstRun, load: Load, allocator: KVAllocator) -> Burst:
    record, size = run.record, len(load)
    stopped = run.stopped or ("" if run.peak_running == size else "not all at once")
    return Burst(
        size=size,
        carried=not stopped,
        stopped=stopped,
        peak_running=run.peak_running,
        preemptions=record.preemptions,
        served=sum(row.end != "rejected" for row in record.requests),
        output_tokens=record.output_tokens,
        recomputed_tokens=sum(row.recomputed_tokens for row in record.requests),
        duration_s=run.clock.now_s,
        peak_pages=run.peak_pages,
        peak=run.peak or {},
        fragmented=getattr(allocator, "refused_by_fragmentation", 0),
        steps=_measured_steps(run),
    )


def _measured_steps(run: _BurstRun) -> tuple[dict[str, float], ...]:
    times = getattr(run.executor, "times", None)
    if times is None:
        return ()
    rows = zip(run.amounts, times.host_s, times.kernels_s, strict=False)
    return tuple({**amounts, "host_us": 1e6 * host, "kernels_us": 1e6 * gpu} for amounts, host, gpu in rows)
