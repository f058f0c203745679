"""Limits are never silent: what can never fit is rejected at once with the numbers, nothing hangs, cuts are counted."""

from __future__ import annotations

import json

import pytest
from kvarena.experiments.engine.request import End, make_request
from kvarena.experiments.engine.scheduler import SchedulerConfig
from support.engine import PAIRS, SmallEngine
from support.golden import CASES

CASE_05 = next(case for case in map(json.loads, CASES.read_text().splitlines()) if case["id"] == "engine-05")


def prompt(length: int, first: int = 1) -> range:
    return range(first, first + length)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_case_engine_05_prompt_and_output_may_reach_the_limit_and_not_pass_it(policy: str, kind: str, lag: int) -> None:
    given = CASE_05["input"]
    size = given["page_size"]
    small = SmallEngine(
        policy, kind, given["num_slots"] // size, size, max_model_len=given["max_model_len"], result_lag=lag
    )
    for index, row in enumerate(given["requests"]):
        small.add(row["id"], prompt(row["prompt"], 100 * index), row["max_new"])
    rejected = small.requests["a"]
    assert rejected.end is End.REJECTED  # at once, before any step
    assert rejected.num_tokens == 17  # not shortened
    assert "17" in rejected.message
    assert "16" in rejected.message
    small.run()
    outcome = {request.id: (request.num_output, request.end, request.cut) for request in small.requests.values()}
    assert outcome == {
        "a": (0, End.REJECTED, False),
        "b": (1, End.LENGTH, True),
        "c": (6, End.STOP, False),
        "d": (6, End.LENGTH, True),
    }


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("longest", [8, 16, 17, 33])
def test_output_is_cut_exactly_at_max_model_len(policy: str, kind: str, lag: int, longest: int) -> None:
    for length in range(longest - 4, longest + 2):
        small = SmallEngine(policy, kind, 32, 4, max_model_len=longest, result_lag=lag)
        request = small.add("r", prompt(length), 3)
        small.run()
        if length >= longest:
            assert request.end is End.REJECTED
            assert str(length) in request.message
        else:
            assert request.num_output == min(3, longest - length)
            assert request.cut == (longest - length < 3)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_an_end_at_the_limit_that_the_request_itself_chose_is_no_cut(policy: str, kind: str, lag: int) -> None:
    small = SmallEngine(policy, kind, 32, 4, max_model_len=16, result_lag=lag)
    request = small.add("r", prompt(10), 50, num_output=6)
    small.run()
    assert (request.num_output, request.end, request.cut) == (6, End.STOP, False)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_larger_than_the_pool_is_rejected_at_once_and_blocks_nobody(policy: str, kind: str, lag: int) -> None:
    small = SmallEngine(policy, kind, 8, 4, result_lag=lag)
    small.add("before", prompt(6), 4)
    never = small.add("never", prompt(33, 100), 4)
    behind = small.add("behind", prompt(6, 200), 4)
    assert never.end is End.REJECTED
    assert "33" in never.message
    small.run()
    assert (behind.num_output, behind.end) == (4, End.STOP)
    assert small.requests["before"].num_output == 4


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("lag", [0, 1])
def test_case_engine_02_a_lone_request_that_outgrows_the_pool_ends_and_leaves_its_pages(kind: str, lag: int) -> None:
    small = SmallEngine("vllm", kind, 2, 4, result_lag=lag)
    request = small.add("r0", prompt(7), 50)
    small.run()
    assert request.end is End.POOL
    assert request.cut
    assert 1 <= request.num_output <= 2
    assert "3 pages" in request.message
    again = small.add("r1", prompt(8), 1)
    small.run()
    assert again.hits == [4]
    assert again.num_output == 1


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
def test_sglang_cuts_the_output_to_the_pool_so_that_nobody_outgrows_it(kind: str, lag: int, page_size: int) -> None:
    small = SmallEngine("sglang", kind, 32 // page_size, page_size, result_lag=lag)
    request = small.add("r0", prompt(8), 500)
    small.run()
    # SGLang 0.5.22: prompt in pages + output + a page + 1 <= pool
    assert request.num_output == 32 - 8 - page_size - 1
    assert (request.end, request.cut) == (End.LENGTH, True)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_case_engine_01_a_pool_full_of_cached_pages_admits(policy: str, kind: str) -> None:
    small = SmallEngine(policy, kind, 8, 4)
    for index in range(6):
        small.add(f"r{index}", prompt(20, 100 * index), 1)
        small.run()
    assert all(request.num_output == 1 for request in small.requests.values())


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("limits", ["exact", "upstream"])
@pytest.mark.parametrize("length", [1, 3, 26, 27, 28, 29, 30, 31, 32, 33, 63, 64, 65])
def test_nothing_hangs_whatever_the_prompt_length(policy: str, kind: str, limits: str, length: int) -> None:
    """A prompt near the pool or the context, then a small one behind it: both end, under either arrival rule."""
    small = SmallEngine(policy, kind, 8, 4, max_model_len=64, limits=limits)
    first = small.add("first", prompt(length), 4)
    second = small.add("second", prompt(2, 500), 2)
    small.run()
    assert first.done
    assert first.message or first.num_output == 4 or first.cut
    assert (second.num_output, second.end) == (2, End.STOP)


def test_an_unchunked_prompt_over_the_token_budget_is_rejected_with_the_numbers() -> None:
    small = SmallEngine("vllm", "block", 64, 4, chunked_prefill=False, max_num_batched_tokens=32)
    request = small.add("r", prompt(33), 4)
    assert request.end is End.REJECTED
    assert "33" in request.message
    assert "32" in request.message


def test_a_scheduler_never_reads_the_true_output() -> None:
    """The output stands with the executor alone: a request carries its prompt and its limit."""
    small = SmallEngine("sglang", "token", 64, 4)
    request = small.add("r", prompt(5), 9, num_output=2)
    assert list(request.seq.token_ids) == list(prompt(5))
    assert request.max_tokens == 9
    small.run()
    assert request.num_output == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": -1},
        {"chunk_size": 0},
        {"order": "random"},
        {"result_lag": 2},
        {"watermark": 1.0},
        {"limits": "none"},
        {"conservativeness": -0.1},
    ],
)
def test_a_bad_limit_names_its_field(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SchedulerConfig(**fields)  # type: ignore[arg-type]


def test_bad_requests_raise() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        make_request("r", [1, 2], 0)
    with pytest.raises(ValueError, match="empty"):
        make_request("r", [], 3)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SmallEngine("vllm", "block", 8, 4, max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="scheduler"):
        SmallEngine("orca", "block", 8, 4)
