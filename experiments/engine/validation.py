"""Workloads on which the simulated clock is held against the card, and their schedules once more, without one.

A schedule depends on workload, design and limits alone, so that the plan of every measured step can be had again from a
scripted run: its lengths, and what was shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.engine.attention_time import TableKind
from kvarena.experiments.engine.engine import Engine, Executor, StepRecord, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor, UnnamedOutputs
from kvarena.experiments.engine.request import EngineRequest, make_request
from kvarena.experiments.engine.scheduler import SchedulerConfig, StepPlan
from kvarena.experiments.workloads import make

MAX_STEPS = 400
MAX_OUTPUT = 96
LIMITS = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=128, max_model_len=16_384)


@dataclass(frozen=True)
class StepLoad:
    """A workload of the validation: a built-in one with its parameters, so many of its requests, and the pool.

    burst  requests that arrive before each step, until all have
    """

    workload: str
    parameters: dict[str, Any]
    requests: int
    pool_tokens: int
    burst: int = 2


LOADS: dict[str, StepLoad] = {
    "chat": StepLoad("chat", {"num_sessions": 60, "sessions_per_s": 20.0, "think_median_s": 2.0}, 140, 40_960),
    "shared-prompts": StepLoad(
        "generated_shared_prefix",
        {"gsp_num_groups": 12, "gsp_prompts_per_group": 10, "gsp_system_prompt_len": 2001, "gsp_question_len": 131},
        120,
        40_960,
    ),
    "long-prompts": StepLoad("long_document_qa", {"document_median": 3000.0, "max_document": 12_000}, 40, 65_536, 1),
}
ALLOCATORS: dict[str, tuple[dict[str, Any], TableKind]] = {
    "block, 16": ({"kind": "block", "page_size": 16}, "block_table"),
    "block, 64": ({"kind": "block", "page_size": 64}, "block_table"),
    "token, 1": ({"kind": "token", "page_size": 1}, "req_to_token"),
    "token, 64": ({"kind": "token", "page_size": 64}, "req_to_token"),
}


def arrivals(load: StepLoad, outputs: HiddenOutputs, max_output: int = MAX_OUTPUT) -> Iterator[EngineRequest]:
    """The workload's requests in order, each with a hidden output."""
    unnamed = UnnamedOutputs()
    for index, traced in enumerate(make(load.workload, limit=load.requests, **load.parameters)):
        tokens = min(max(traced.num_output_tokens, 1), max_output)
        name = f"{index}-{traced.request_id}"
        named = traced.output_ids is not None and len(traced.output_ids) >= tokens
        outputs.add(name, traced.output_ids[:tokens] if named else unnamed.take(tokens))  # type: ignore[arg-type, index]
        yield make_request(name, traced.prompt_ids(), tokens, namespace=traced.namespace)


def run_load(engine: Engine, load: StepLoad, requests: Iterator[EngineRequest], max_steps: int) -> Iterator[StepRecord]:
    """Step by step until all have ended, `load.burst` requests arriving before each."""
    for _ in range(max_steps):
        for _ in range(load.burst):
            request = next(requests, None)
            if request is not None:
                engine.add(request)
        if not engine.has_work:
            return
        yield engine.step()


def pool_of(load: StepLoad, design: str) -> tuple[KVAllocator, TableKind]:
    """The allocator of a design, its pool of the load's size, and the page table that it comes with."""
    spec, table = ALLOCATORS[design]
    return make_allocator(spec, num_pages=load.pool_tokens // spec["page_size"]), table


def schedule_again(
    load: StepLoad, design: str, policy: str = "vllm", limits: SchedulerConfig = LIMITS, max_output: int = MAX_OUTPUT
) -> dict[int, StepPlan]:
    """Step -> plan of every step that computes something. Cost: seconds for 100 requests."""
    allocator, _ = pool_of(load, design)
    outputs = HiddenOutputs()
    executor: Executor = ScriptedExecutor(outputs)
    engine = Engine(make_scheduler(policy, allocator, limits), executor)
    records = run_load(engine, load, arrivals(load, outputs, max_output), MAX_STEPS)
    return {record.step: record.plan for record in records if record.plan.batch}


def step_load(saved: Mapping[str, Any]) -> StepLoad:
    """A load as a file of measured steps states it. Raises ValueError naming the field."""
    try:
        return StepLoad(**saved)
    except TypeError as error:
        raise ValueError(f"load: {error}") from None
