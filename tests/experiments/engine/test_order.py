"""Waiting orders: longest prefix, in-batch deferral as a rule of its own, depth first by weight, priority, refresh."""

from __future__ import annotations

from collections import deque

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator, Match, Release, Sequence
from kvarena.experiments.engine.order import DEFERRAL_TOKENS, LPM_LIMIT, WaitingOrder, by_weight
from kvarena.experiments.engine.request import End, EngineRequest, make_request
from support.engine import SmallEngine, limits

A = list(range(100, 200))
B = list(range(300, 400))


def allocator_with(kind: str, *prompts: list[int], page_size: int = 4) -> KVAllocator:
    """An allocator whose cache holds these prompts."""
    allocator = make_allocator({"kind": kind, "page_size": page_size}, num_pages=512)
    for index, tokens in enumerate(prompts):
        seq = Sequence(f"cached{index}", tokens)
        assert allocator.admit(seq) is not None
        allocator.commit([(seq, len(tokens))])
        allocator.release([seq], Release.FINISH)
    return allocator


def waiting_of(prompts: dict[str, list[int]]) -> deque[EngineRequest]:
    return deque(make_request(name, tokens, 4, arrival_s=float(i)) for i, (name, tokens) in enumerate(prompts.items()))


def arranged(allocator: KVAllocator, prompts: dict[str, list[int]], **fields: object) -> list[str]:
    waiting = waiting_of(prompts)
    WaitingOrder(allocator, limits(**fields)).arrange(waiting)
    return [request.id for request in waiting]


@pytest.mark.parametrize("kind", ["block", "token"])
def test_longest_prefix_goes_first_and_ties_keep_their_order(kind: str) -> None:
    allocator = allocator_with(kind, A[:80])
    prompts = {"none": B[:40], "short": A[:44], "long": A[:70], "also_none": [7] * 8, "as_long": [*A[:68], 9, 9]}
    assert arranged(allocator, prompts, order="lpm") == ["long", "as_long", "short", "none", "also_none"]
    assert arranged(allocator, prompts, order="fcfs") == list(prompts)


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize(("shared", "deferred"), [(DEFERRAL_TOKENS - 1, False), (DEFERRAL_TOKENS, True)])
def test_a_request_that_shares_32_uncached_tokens_with_one_ahead_goes_last(
    kind: str, shared: int, deferred: bool
) -> None:
    prompts = {"first": A[:60], "sharer": [*A[:shared], *B[:20]], "other": B[50:90]}
    expected = ["first", "other", "sharer"] if deferred else ["first", "sharer", "other"]
    assert arranged(allocator_with(kind), prompts, order="lpm") == expected


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize(("cached", "deferred"), [(DEFERRAL_TOKENS, True), (DEFERRAL_TOKENS + 4, False)])
def test_only_requests_with_at_most_32_cached_tokens_are_deferred(kind: str, cached: int, deferred: bool) -> None:
    allocator = allocator_with(kind, A[:cached])
    prompts = {"first": A[:60], "same": A[:60], "other": B[:40]}
    expected = ["first", "other", "same"] if deferred else ["first", "same", "other"]
    assert arranged(allocator, prompts, order="lpm") == expected


@pytest.mark.parametrize("kind", ["block", "token"])
def test_deferral_is_a_rule_of_its_own(kind: str) -> None:
    prompts = {"first": A[:60], "same": A[:60], "hit": [*B[:60], 1], "other": [5] * 40}
    allocator = allocator_with(kind, B[:60])
    assert arranged(allocator, prompts, order="lpm", prefix_deferral=False) == ["hit", "first", "same", "other"]
    assert arranged(allocator, prompts, order="fcfs", prefix_deferral=True) == ["first", "hit", "other", "same"]


def test_namespaces_do_not_defer_each_other() -> None:
    waiting = deque(make_request(f"r{i}", A[:60], 4, namespace=i) for i in range(3))
    WaitingOrder(allocator_with("token"), limits(order="lpm")).arrange(waiting)
    assert [request.id for request in waiting] == ["r0", "r1", "r2"]


def test_a_queue_longer_than_128_is_neither_matched_nor_sorted() -> None:
    prompts = {f"r{i}": [i] * 8 for i in range(LPM_LIMIT)} | {"hit": A[:44]}
    assert arranged(allocator_with("token", A[:80]), prompts, order="lpm") == list(prompts)
    prompts.pop("r0")
    assert arranged(allocator_with("token", A[:80]), prompts, order="lpm")[0] == "hit"


@pytest.mark.parametrize("kind", ["block", "token"])
def test_depth_first_puts_the_heavier_branch_first_and_a_node_behind_its_subtree(kind: str) -> None:
    allocator = allocator_with(kind, A[:16], [*A[:16], *B[:16]], [*A[:16], *B[40:56]], B[60:76])
    prompts = {
        "root": [3] * 8,
        "light": [*B[60:76], 1],
        "trunk": [*A[:16], 1],
        "left": [*A[:16], *B[:16], 1],
        "right": [*A[:16], *B[40:56], 1],
        "right2": [*A[:16], *B[40:56], 2],
    }
    assert arranged(allocator, prompts, order="dfs-weight") == ["right", "right2", "left", "trunk", "light", "root"]


def test_equal_weights_go_by_age_of_the_branch() -> None:
    young, old = make_request("young", [1], 1), make_request("old", [2], 1)
    matched = [(young, Match(4, (9,))), (old, Match(4, (3,)))]
    assert [request.id for request in by_weight(matched)] == ["old", "young"]


def test_priority_goes_first_and_arrival_breaks_ties() -> None:
    waiting = deque(
        make_request(name, [1, 2], 4, priority=priority, arrival_s=float(at))
        for at, (name, priority) in enumerate([("low", 5), ("high", 0), ("low2", 5), ("high2", 0)])
    )
    WaitingOrder(allocator_with("block"), limits(order="priority")).arrange(waiting)
    assert [request.id for request in waiting] == ["high", "high2", "low", "low2"]


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("lag", [0, 1])
def test_priority_preempts_who_matters_least_also_if_scheduled_before(kind: str, lag: int) -> None:
    """Three requests outgrow the pool; the least important one was admitted first and is the one thrown back."""
    small = SmallEngine("vllm", kind, 12, 4, order="priority", result_lag=lag)
    small.add("low", range(10, 22), 20, priority=9)
    small.engine.step()
    small.add("high", range(50, 62), 20, priority=0)
    small.add("mid", range(80, 92), 20, priority=1)
    small.run()
    counts = {request.id: request.num_preemptions for request in small.requests.values()}
    assert counts["low"] > 0
    assert counts["high"] == 0
    assert all((request.num_output, request.end) == (20, End.STOP) for request in small.requests.values())


def test_fcfs_refreshes_what_the_head_waits_for_every_32_calls() -> None:
    """SGLang 0.5.22: under fcfs the waiting prefixes are touched at calls 0, 32, 64 ..., so they are evicted last."""
    allocator = make_allocator({"kind": "token", "page_size": 4}, num_pages=16)
    for index, tokens in enumerate((A[:16], B[:16])):
        seq = Sequence(f"c{index}", tokens)
        allocator.admit(seq)
        allocator.commit([(seq, 16)])
        allocator.release([seq], Release.FINISH)
    order = WaitingOrder(allocator, limits(), refreshes=True)
    order.arrange(waiting_of({"w": [*A[:16], 1]}))  # touches A, which was the older one
    allocator.evict((allocator.room()[0] + 1) * 4)
    assert allocator.match(Sequence("a", A[:17])).hit_tokens == 16
    assert allocator.match(Sequence("b", B[:17])).hit_tokens == 0
