"""Engine runs on the simulated clock: conservation, determinism, what schedulers may know, overload without a leak."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from kvarena.allocators.config import make_allocator
from kvarena.experiments.engine.arrivals import Arrivals
from kvarena.experiments.engine.latency import Limits
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.engine.simulate import Record, RunOptions, Simulation
from kvarena.experiments.engine.step_time import Compute, StepTimeModel
from kvarena.experiments.models import ModelShape
from kvarena.experiments.traces.base import Request
from support.engine import PAIRS

SHAPE = ModelShape(num_layers=4, num_kv_heads=2, head_dim=64)


def workload(count: int, rate: float, seed: int = 0, longest: int = 60) -> list[Request]:
    """`count` requests at `rate` a second, a third of which share one of three prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, 1000, 40, dtype=np.int32) for _ in range(3)]
    requests, now = [], 0.0
    for index in range(count):
        now += rng.exponential(1 / rate)
        tokens = rng.integers(0, 1000, int(rng.integers(1, longest)), dtype=np.int32)
        if index % 3 == 0:
            tokens = np.concatenate([prefixes[index % 9 // 3], tokens])
        output = rng.integers(0, 1000, int(rng.integers(1, 30)), dtype=np.int32)
        requests.append(Request(f"r{index}", now, len(tokens), len(output), token_ids=tokens, output_ids=output))
    return requests


def simulation(
    requests: list[Request],
    policy: str = "vllm",
    kind: str = "block",
    *,
    page_size: int = 4,
    num_pages: int = 128,
    options: RunOptions | None = None,
    sessions: Any = "open",
    **limits: Any,
) -> Simulation:
    config = SchedulerConfig(**{"max_num_batched_tokens": 128, "max_num_seqs": 16, "max_model_len": 256, **limits})
    allocator = MeteredAllocator(make_allocator({"kind": kind, "page_size": page_size}, num_pages=num_pages))
    model = StepTimeModel(SHAPE, Compute(8, 1e8), page_size)
    return Simulation(
        allocator,
        policy,
        config,
        model,
        Arrivals(requests, sessions=sessions),
        options or RunOptions(lambda tokens, index: 64, check_every=7),
    )


def assert_conserved(run: Simulation, record: Record, requests: list[Request]) -> None:
    """Requests in = finished + rejected + live (none), and every page is back."""
    assert sorted(row.request_id for row in record.requests) == sorted(request.request_id for request in requests)
    assert [row.index for row in record.requests] == list(range(len(requests)))
    assert not run.engine.has_work
    run.allocator.check()
    assert sum(run.allocator.room()) == run.allocator.num_pages
    for row, request in zip(record.requests, requests, strict=True):
        assert row.output_tokens + row.cut_output_tokens == request.num_output_tokens
        assert row.admitted == (row.end != "rejected")
        if row.admitted:
            assert row.first_token_s is not None
            assert row.arrival_s < row.first_token_s <= row.end_s
    assert record.output_tokens == sum(row.output_tokens for row in record.requests)
    assert record.preemptions == sum(row.preemptions for row in record.requests)
    for step in record.steps:
        assert step.free + step.evictable + step.in_use == run.allocator.num_pages


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_every_request_is_served_and_everything_adds_up(policy: str, kind: str, lag: int) -> None:
    requests = workload(120, 400.0)
    run = simulation(requests, policy, kind, result_lag=lag)
    record = run.run()
    assert_conserved(run, record, requests)
    assert {row.end for row in record.requests} == {"stop"}
    tokens = sum(request.num_output_tokens for request in requests)
    assert len(record.latencies.itl) == tokens - len(requests)
    assert len(record.latencies.ttft) == len(requests)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_overload_ends_without_leak_or_hang(policy: str, kind: str, lag: int) -> None:
    """Arrivals far above the service rate into a pool that holds a handful of requests: preemptions happen."""
    requests = workload(150, 1e5)
    # Declared lengths near the true ones and no reservation for who runs: SGLang's policy overcommits too.
    options = RunOptions(lambda tokens, index: tokens, check_every=7)
    run = simulation(requests, policy, kind, num_pages=40, result_lag=lag, conservativeness=0.0, options=options)
    record = run.run()
    assert_conserved(run, record, requests)
    assert record.preemptions > 0
    assert max(step.waiting for step in record.steps) > 50
    assert sum(row.recomputed_tokens for row in record.requests) > 0


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_paged_designs_reserve_nothing_beyond_the_tails(policy: str, kind: str, lag: int, page_size: int) -> None:
    """Slots that a launched step is writing hold tokens: they are neither waste nor a reservation."""
    options = RunOptions(lambda tokens, index: tokens)
    pages = 160 // page_size
    limits: dict[str, Any] = {"num_pages": pages, "page_size": page_size, "conservativeness": 0.0, "result_lag": lag}
    record = simulation(workload(60, 1e5), policy, kind, options=options, max_num_batched_tokens=32, **limits).run()
    assert record.preemptions > 0
    assert {step.wasted_slots - step.tail_slots for step in record.steps} == {0}
    assert any(step.live_tokens for step in record.steps)


def test_the_same_run_twice_is_the_same_run() -> None:
    requests = workload(80, 400.0)
    first, second = (simulation(requests, "sglang", "token", result_lag=1).run() for _ in range(2))
    assert first.requests == second.requests
    assert first.steps == second.steps


def test_rejected_and_cut_requests_are_counted_with_the_numbers() -> None:
    requests = [*workload(6, 400.0), Request("long", 1.0, 300, 5, token_ids=np.arange(300, dtype=np.int32))]
    requests.append(Request("cut", 2.0, 250, 50, token_ids=np.arange(1000, 1250, dtype=np.int32)))
    run = simulation(requests)
    record = run.run()
    rows = {row.request_id: row for row in record.requests}
    assert rows["long"].end == "rejected"
    assert "300" in rows["long"].message
    assert rows["long"].cut_output_tokens == 5
    assert rows["long"].first_token_s is None
    assert (rows["cut"].end, rows["cut"].output_tokens, rows["cut"].cut_output_tokens) == ("length", 6, 44)
    assert len(record.latencies.ttft) == len(requests) - 1


def test_cut_and_rejected_requests_are_no_goodput() -> None:
    requests = [Request("cut", 0.0, 250, 50, token_ids=np.arange(250, dtype=np.int32)), *workload(5, 400.0)]
    run = simulation(requests, options=RunOptions(lambda tokens, index: 64, Limits(ttft_ms=1e9)))
    assert run.run().latencies.num_good == 5


def decisions(run: Simulation, steps: int) -> list[Any]:
    seen = []
    for _ in range(steps):
        run._next_step()
        record = run.engine.step()
        run.clock.step(record.plan)
        list(run._results(record))
        seen.append([(entry.request.id, entry.num_new, entry.num_before) for entry in record.plan.batch])
    return seen


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_true_output_lengths_change_nothing_before_they_show(policy: str, kind: str, lag: int) -> None:
    """Outputs that agree in their first 12 tokens: the first 12 steps are the same whatever comes after."""
    short = [replace(request, arrival_s=0.0) for request in workload(10, 400.0)]
    output = np.arange(12, dtype=np.int32)
    longer = np.concatenate([output, np.arange(40, dtype=np.int32)])
    runs = [
        simulation(
            [replace(r, output_ids=ids, num_output_tokens=len(ids)) for r in short], policy, kind, result_lag=lag
        )
        for ids in (output, longer)
    ]
    first, second = (decisions(run, 12) for run in runs)
    assert first == second


def test_closed_sessions_keep_one_turn_in_flight() -> None:
    base = np.arange(200, dtype=np.int32)
    turns = [
        Request(f"t{i}", 0.01 * i, 20 * (i + 1), 10, token_ids=base[: 20 * (i + 1)], session_id="s") for i in range(6)
    ]
    record = simulation(turns, sessions="closed").run()
    rows = record.requests
    for before, after in pairwise(rows):
        assert after.arrival_s >= before.end_s
    assert all(row.hit_tokens > 0 for row in rows[1:])


def test_outputs_without_ids_are_never_found_again() -> None:
    requests = [
        Request("a", 0.0, 20, 30, token_ids=np.arange(20, dtype=np.int32)),
        Request("b", 9.0, 20, 30, token_ids=np.arange(20, dtype=np.int32)),
    ]
    record = simulation(requests, kind="token", page_size=1, num_pages=512).run()
    assert [row.hit_tokens for row in record.requests] == [0, 19]
    assert [row.output_tokens for row in record.requests] == [30, 30]


def test_first_hits_and_own_pages_after_a_preemption_are_apart() -> None:
    requests = workload(150, 1e5)
    record = simulation(requests, num_pages=48).run()
    again = [row for row in record.requests if row.readmissions]
    assert again
    assert any(row.readmitted_hit_tokens > 0 for row in again)
    assert all(row.hit_tokens < row.num_prompt_tokens for row in record.requests)


def test_duplicate_live_ids_raise() -> None:
    requests = [Request("same", 0.0, 5, 9, token_ids=np.arange(5, dtype=np.int32)) for _ in range(2)]
    with pytest.raises(ValueError, match="already live"):
        simulation(requests).run()


def test_allocator_verbs_are_timed_and_evictions_counted() -> None:
    run = simulation(workload(60, 1e4), "sglang", "token", num_pages=64)
    run.run()
    meter = run.allocator
    assert len(meter.nanoseconds["pin"]) >= 60
    assert len(meter.nanoseconds["reserve"]) > 0
    assert meter.evicted_pages > 0
