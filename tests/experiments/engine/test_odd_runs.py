"""Whatever the setting: no run hangs, leaks or raises, and what has KV decides as what has none."""

from __future__ import annotations

import pytest
from kvarena.experiments.engine.request import End, make_request
from kvarena.experiments.engine.scheduler import SchedulerConfig
from support.engine import SmallEngine
from support.odd_runs import OddEngine, draw
from support.truth import TruthEngine, beam_model


@pytest.mark.parametrize("start", range(0, 400, 50))
def test_runs_in_odd_settings_end_with_every_law_held(start: int) -> None:
    for seed in range(start, start + 50):
        OddEngine(draw(seed)).finish()


@pytest.mark.parametrize("seed", [seed for seed in range(0, 400, 10) if draw(seed).spec["page_size"] != 3])
def test_real_pages_decide_alike_and_hold_what_was_written(seed: int) -> None:
    assert OddEngine(draw(seed), truth=True).finish() == OddEngine(draw(seed)).finish()


def test_without_the_gate_who_outgrows_the_pool_ends_and_lets_others_pass() -> None:
    small = SmallEngine("vllm", "token", 3, 3, whole_prompt_gate=False, result_lag=1)
    grown, behind = small.add("grown", range(4), 200), small.add("behind", range(50, 54), 3)
    small.run()
    assert (grown.end, behind.end, behind.num_output) == (End.POOL, End.STOP, 3)
    assert "grown needs 4 pages" in grown.message


def test_without_the_gate_a_prompt_of_any_limits_that_never_fits_is_rejected_at_once() -> None:
    small = SmallEngine("vllm", "block", 3, 16, whole_prompt_gate=False, limits="upstream", max_model_len=33)
    assert "41 tokens" in small.add("long", range(41), 5).message
    assert small.add("short", range(19), 1).end is None
    small.run()


def test_guesses_never_cost_the_last_request_its_place() -> None:
    small = SmallEngine("vllm", "exact", 40, 1, max_num_seqs=1)
    small.scheduler.speculate(lambda request, count: [7] * count, 1)
    request = small.add("r", range(31), 9)
    small.run()
    assert (request.end, request.num_output, request.num_preemptions) == (End.STOP, 9, 0)


def test_no_guess_before_the_prompts_own_first_token() -> None:
    """The last token of a prompt alone in a step looks like a decode; its other replies fork there."""
    small = TruthEngine("vllm", {"kind": "block", "page_size": 4}, 40, max_num_batched_tokens=8, chunk_size=2)
    small.scheduler.speculate(small.outputs.drafter(1.0), 3)
    small.add("other", range(50, 53), 20)
    small.add("r", range(5), 6, samples=3)
    small.run()
    assert [len(small.output(name)) for name in ("r", "r/1", "r/2")] == [6, 5, 6]


def test_the_sglang_policys_guesses_stay_within_the_budget() -> None:
    small = SmallEngine("sglang", "token", 100, 1, max_num_batched_tokens=6, max_num_seqs=4)
    small.scheduler.speculate(lambda request, count: [7] * count, 3)
    for number in range(4):
        small.add(f"r{number}", range(10 * number, 10 * number + 3), 20)
    most = 0
    while small.engine.has_work:
        most = max(most, small.engine.step().plan.num_tokens)
    assert most == 6


@pytest.mark.parametrize("samples", [1, 3])
def test_replies_of_a_prompt_that_upstream_limits_turn_away_end_with_it(samples: int) -> None:
    small = SmallEngine("sglang", "token", 40, 1, limits="upstream", max_model_len=32)
    away = small.add("away", range(30), 5, samples=samples)
    fine = small.add("fine", range(100, 104), 5)
    small.run()
    assert (away.end, fine.end) == (End.REJECTED, End.STOP)
    assert not small.scheduler.take_children()


def test_a_prompt_that_is_turned_away_keeps_what_runs_are_sized_by() -> None:
    small = SmallEngine("sglang", "token", 40, 1, limits="upstream", max_model_len=32)
    away = make_request("away", range(30), 5)
    away.seq.declared_max_tokens, away.seq.oracle_tokens = 5, 33
    small.engine.add(away)
    assert (away.num_tokens, away.seq.declared_max_tokens, away.seq.oracle_tokens) == (1, 5, 33)


def test_a_limit_of_admission_above_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_active_seqs: expected at most max_num_seqs, 2, found 3"):
        SchedulerConfig(max_num_seqs=2, max_num_active_seqs=3)


def test_more_beams_than_are_ever_admitted_together_are_rejected() -> None:
    small = SmallEngine("vllm", "block", 40, 4, max_num_active_seqs=2)
    assert "3 beams, max_num_active_seqs 2" in small.add("r", range(5), 3, beam_width=3).message


def test_beams_that_no_empty_pool_holds_together_end_with_the_numbers() -> None:
    """A design without forks computes each beam by itself: two of 13 tokens are more than 24."""
    engine = TruthEngine("vllm", {"kind": "exact", "page_size": 2}, 12, beam_model(1), whole_prompt_gate=False)
    engine.add("r", range(3), 200, beam_width=2)
    engine.add("behind", range(60, 70), 4)
    engine.run()
    ended = [request for name, request in engine.requests.items() if name.startswith("r")]
    assert {request.end for request in ended} <= {End.POOL, End.PRUNED}
    assert any("do not fit together: pool of 12 pages" in request.message for request in ended)
    assert engine.requests["behind"].end is End.STOP


def test_two_groups_of_beams_that_fit_one_at_a_time_both_get_through() -> None:
    engine = TruthEngine("vllm", {"kind": "block", "page_size": 2, "prefix_cache": False}, 30, beam_model(2))
    for number in range(2):
        engine.add(f"r{number}", range(50 * number, 50 * number + 9), 8, beam_width=3)
    engine.run(8000)
    assert [len(engine.requests[f"r{number}"].beams.finished) for number in range(2)] == [3, 3]


def test_beams_that_wait_for_one_of_theirs_do_not_starve_whoever_is_admitted_before_it() -> None:
    """One of two beams runs and holds pages; replies of another prompt, ahead of the other beam, never find three."""
    OddEngine(draw(21027)).finish()
