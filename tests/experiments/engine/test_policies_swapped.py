"""Either policy runs over any allocator: every scenario ends, nothing leaks, every admissible request is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvarena.experiments.engine.request import End
from kvarena.experiments.engine.scenario import SchedRunner, SchedScenario, read_sched_scenario
from support.sched import plain_name, scenario_paths

MAX_STEPS = 20_000
CHECK_EVERY = 50  # check() costs O(pages)
SWAPPED = [("vllm", "token"), ("sglang", "block")]


def run(scenario: SchedScenario, runner: SchedRunner, check_every: int = CHECK_EVERY) -> None:
    while not runner.finished:
        runner.step()
        assert runner.engine.num_steps < MAX_STEPS, "the engine does not come to an end"
        if runner.engine.num_steps % check_every == 0:
            runner.allocator.check()
    runner.allocator.check()
    assert sum(runner.allocator.room()) == runner.allocator.num_pages
    assert_all_served(scenario, runner)


def assert_all_served(scenario: SchedScenario, runner: SchedRunner) -> None:
    assert len(runner.requests) == len(scenario.arrivals)
    for arrival in scenario.arrivals:
        request = runner.requests[arrival.request_id]
        generated = list(request.seq.token_ids[request.seq.num_prompt_tokens :])
        if request.end is End.REJECTED:
            assert request.message
            continue
        assert generated == arrival.output[: len(generated)]
        if len(generated) < len(arrival.output):
            assert request.cut


@pytest.mark.parametrize("path", scenario_paths(), ids=plain_name)
@pytest.mark.parametrize(("policy", "kind"), SWAPPED)
@pytest.mark.parametrize("lag", [0, 1])
def test_policy_over_the_other_design(path: Path, policy: str, kind: str, lag: int) -> None:
    scenario = read_sched_scenario(path)
    run(scenario, SchedRunner(scenario, policy, allocator=kind, lag=lag))


@pytest.mark.parametrize("name", ["page4", "preempt_last", "identical_requests"])
@pytest.mark.parametrize(("policy", "kind"), [*SWAPPED, ("vllm", "block"), ("sglang", "token")])
def test_every_invariant_holds_after_every_step(name: str, policy: str, kind: str) -> None:
    path = next(path for path in scenario_paths() if plain_name(path) == name)
    scenario = read_sched_scenario(path)
    run(scenario, SchedRunner(scenario, policy, allocator=kind), check_every=1)


@pytest.mark.parametrize("order", ["lpm", "dfs-weight", "priority"])
@pytest.mark.parametrize("policy", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", ["sg_lpm", "decode_overload", "sg_retract"])
def test_every_waiting_order_over_either_design(name: str, kind: str, policy: str, order: str, lag: int) -> None:
    path = next(path for path in scenario_paths() if plain_name(path) == name)
    scenario = read_sched_scenario(path)
    run(scenario, SchedRunner(scenario, policy, allocator=kind, lag=lag, order=order))


@pytest.mark.parametrize("kind", ["contiguous", "exact"])
@pytest.mark.parametrize("policy", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["sg_lpm", "head_of_line", "sg_limits"])
def test_baselines_run_under_either_policy(name: str, policy: str, kind: str) -> None:
    path = next(path for path in scenario_paths() if plain_name(path) == name)
    scenario = read_sched_scenario(path)
    spec = {"kind": kind}
    if kind == "contiguous":
        spec["max_model_len"] = scenario.header["max_model_len"]
    run(scenario, SchedRunner(scenario, policy, allocator=spec, page_size=1))
