"""Both policies take the decisions that the real schedulers took, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.experiments.engine.scenario import SchedRunner, read_sched_scenario, run_sched_scenario
from support.sched import GoldenSched, first_difference, golden_scheds, load_jsonl

LOGS = golden_scheds()


def answer(log: GoldenSched, upto: int | None = None) -> list[dict[str, Any]]:
    return list(run_sched_scenario(read_sched_scenario(log.scenario), log.policy, **log.options))[1:upto]


def is_stuck(log: GoldenSched) -> bool:
    return "stuck" in load_jsonl(log.path)[0]


@pytest.mark.parametrize("log", [log for log in LOGS if not is_stuck(log)], ids=lambda log: log.id)
def test_every_step_is_the_recorded_one(log: GoldenSched) -> None:
    golden, ours = load_jsonl(log.path)[1:], answer(log)
    for theirs, mine in zip(golden, ours, strict=False):
        assert first_difference(theirs, mine, log.policy) is None
    assert len(ours) == len(golden)


@pytest.mark.parametrize("log", [log for log in LOGS if is_stuck(log)], ids=lambda log: log.id)
def test_where_upstream_waits_for_ever_ours_is_identical_so_far_and_then_rejects(log: GoldenSched) -> None:
    """The rule: ours may differ only from the step on in which it first rejects a request, and upstream must not
    schedule, admit or finish anything in that step or after it."""
    golden, ours = load_jsonl(log.path)[1:], answer(log)
    until = next(line["step"] for line in ours if line["extra"]["rejected"])
    for theirs, mine in zip(golden[:until], ours[:until], strict=True):
        assert first_difference(theirs, mine, log.policy) is None
    rest = golden[until:]
    assert len(rest) >= 3
    assert not any(line["scheduled"] or line["admitted"] or line["finished"] or line["preempted"] for line in rest)


@pytest.mark.parametrize("log", [log for log in LOGS if is_stuck(log)], ids=lambda log: log.id)
def test_what_upstream_leaves_stuck_ends_with_the_numbers_and_frees_the_rest(log: GoldenSched) -> None:
    runner = SchedRunner(read_sched_scenario(log.scenario), log.policy, **log.options)
    while not runner.finished:
        runner.step()
        runner.allocator.check()
    never = [request for request in runner.requests.values() if request.message]
    assert never
    for request in never:
        assert request.id in request.message
        assert str(request.num_tokens) in request.message
    assert sum(runner.allocator.room()) == runner.allocator.num_pages
    served = [request for request in runner.requests.values() if not request.message]
    assert served
    assert all(request.num_output >= 1 for request in served)


def test_the_recorded_logs_are_all_here() -> None:
    counts: dict[str, int] = {}
    for log in LOGS:
        counts[log.path.parent.name] = counts.get(log.path.parent.name, 0) + 1
    assert counts == {"vllm": 26, "vllm_lag1": 26, "vllm_extra": 8, "sglang": 157}
    assert sum(map(is_stuck, LOGS)) == 6
