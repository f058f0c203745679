"""The step loop: arrivals, a plan, its execution, its results, with a result lag of 0 or 1."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.engine.policy_sglang import SglangScheduler
from kvarena.experiments.engine.policy_vllm import VllmScheduler
from kvarena.experiments.engine.request import EngineRequest
from kvarena.experiments.engine.scheduler import Sample, Scheduler, SchedulerConfig, StepPlan

POLICIES: dict[str, type[Scheduler]] = {"vllm": VllmScheduler, "sglang": SglangScheduler}


def make_scheduler(policy: str, allocator: KVAllocator, config: SchedulerConfig) -> Scheduler:
    """The scheduler of a policy name; ValueError lists the known ones."""
    if policy not in POLICIES:
        raise ValueError(f"scheduler: expected one of {', '.join(POLICIES)}, found {policy!r}")
    return POLICIES[policy](allocator, config)


class Executor(Protocol):
    """Runs steps. `launch` starts one; `collect` waits for it and returns a sample for each batch entry."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self, plan: StepPlan) -> list[Sample | None]: ...


@dataclass(slots=True)
class StepRecord:
    """What one step did.

    due       the plan whose results it processed: its own, or with result_lag 1 the one before
    finished  ended by those results
    ended     ended outside a result: rejected, or out of pool
    children  forked by those results; they are requests of their own from now on
    """

    step: int
    plan: StepPlan
    due: StepPlan | None = None
    finished: list[EngineRequest] = field(default_factory=list)
    ended: list[EngineRequest] = field(default_factory=list)
    children: list[EngineRequest] = field(default_factory=list)


class Engine:
    """Continuous batching over one scheduler and one executor.

    With `result_lag` 1 the plan of a step is launched before the result of the step before is processed, as both
    upstreams do by default.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.lag = scheduler.config.result_lag
        self.num_steps = 0
        # Launched, its result not processed.
        self.in_flight: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        return self.in_flight is not None or self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """A request arrives; it can be admitted by the next step."""
        self.scheduler.add(request)

    def step(self) -> StepRecord:
        """Schedule and launch one step, and process the results that are due."""
        plan = self.scheduler.schedule()
        plan.moves = self.scheduler.take_moves()
        plan.pages_in_use = self.scheduler.allocator.num_pages - sum(self.scheduler.allocator.room())
        self.executor.launch(plan)
        due: StepPlan | None = plan
        if self.lag:
            due, self.in_flight = self.in_flight, plan if plan.batch else None
        record = StepRecord(self.num_steps, plan, due)
        if due is not None and due.batch:
            record.finished = self.scheduler.update(due, self.executor.collect(due))
        record.ended = self.scheduler.drain_ended()
        record.children = self.scheduler.take_children()
        self.num_steps += 1
        return record
