"""The fixed clock: the same moments for every allocator, room that is missing is said, nothing leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import RunConfig, run_config
from kvarena.experiments.results import Result, merge_results

SMALL: dict[str, Any] = {
    "workload": {"trace": "chat", "requests": 40, "options": {"num_sessions": 20, "max_reply": 60, "max_turns": 6}},
    "pool": {"pool": "400 MiB"},
    "engine": {"speed": 20.0, "max_num_seqs": 8, "max_num_batched_tokens": 512, "steps_every": 5},
}
MOMENTS = ["arrival_s", "admitted_s", "first_token_s", "last_token_s", "end_s"]


def small(*sets: str) -> RunConfig:
    return run_config(SMALL, sets)


@pytest.fixture(scope="module")
def fixed() -> list[Result]:
    return [run_engine(small(f"allocator.kind={kind}", "clock=fixed")) for kind in ("block", "token")]


def test_every_allocator_is_given_the_same_moments(fixed: list[Result]) -> None:
    block, token = (result.requests[result.requests["end"] == "stop"].set_index("index") for result in fixed)
    both = block.index.intersection(token.index)
    assert len(both) > 30
    assert block.loc[both, MOMENTS].equals(token.loc[both, MOMENTS])
    assert not block.loc[both, "hit_tokens"].equals(token.loc[both, "hit_tokens"])


def test_the_feedback_clock_lets_time_react() -> None:
    block, token = (run_engine(small(f"allocator.kind={kind}")).requests for kind in ("block", "token"))
    assert not block["admitted_s"].equals(token["admitted_s"])


def test_both_clocks_stand_beside_each_other(fixed: list[Result]) -> None:
    both = run_engine(small("clock=both")).summary.iloc[0]
    feedback = run_engine(small()).summary.iloc[0]
    assert both["token_hit_rate"] == feedback["token_hit_rate"]
    assert both["fixed_token_hit_rate"] == fixed[0].summary.iloc[0]["token_hit_rate"]


def test_a_finished_run_is_replayed_into_its_own_allocator(tmp_path: Path) -> None:
    """Not short of room, its own schedule gives every request its own hits again but where a step published several."""
    roomy = ("pool=4 GiB", "max_num_seqs=2")
    run = run_engine(small(*roomy))
    run.save(tmp_path / "run")
    again = run_engine(small(*roomy, "clock=fixed", f"schedule={tmp_path / 'run'}"))
    assert again.summary.iloc[0]["rejected"] == 0
    assert again.requests[MOMENTS].equals(run.requests[MOMENTS])
    assert again.requests["output_tokens"].equals(run.requests["output_tokens"])
    assert again.summary.iloc[0]["token_hit_rate"] == pytest.approx(run.summary.iloc[0]["token_hit_rate"], abs=0.02)


def test_room_that_is_missing_is_counted_and_nothing_leaks() -> None:
    result = run_engine(small("clock=fixed", "pool=80 MiB"))
    row = result.summary.iloc[0]
    assert row["rejected"] > 0
    assert row["requests"] == row["served"] + row["rejected"] == 40
    assert any("rejected" in text for text in result.warnings)
    last = result.steps.iloc[-1]
    assert last["in_use"] == 0 or last["running"] > 0


def test_results_under_unlike_clocks_are_not_laid_over_each_other(fixed: list[Result]) -> None:
    with pytest.raises(ValueError, match=r"engine\.clock"):
        merge_results([fixed[0], run_engine(small("allocator.kind=token"))])
    assert merge_results(fixed).allocators == ["vllm", "sglang"]


def test_a_schedule_without_its_clock_and_of_other_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="schedule is replayed by clock"):
        small("schedule=out/x")
    run_engine(small("requests=10")).save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"engine\.schedule.*40 requests"):
        run_engine(small("clock=fixed", f"schedule={tmp_path / 'run'}"))
