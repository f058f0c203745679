"""Preemption by swap: who is thrown back goes to the host tier and comes back by a copy, under either policy."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.experiments.engine.request import End, EngineRequest
from kvarena.experiments.engine.scheduler import StepPlan
from support.engine import PAIRS, SmallEngine


def token_at(request: EngineRequest, position: int) -> int:
    """The token of a position, also one that the engine does not know yet (it runs one step ahead with lag 1)."""
    prompt = request.seq.num_prompt_tokens
    return request.seq.token_ids[position] if position < prompt else 1000 + position - prompt


class Memory:
    """Device and host pages with what a kernel would have written: (token, position) a slot."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.device: dict[int, list[Any]] = {}
        self.host: dict[int, list[Any]] = {}

    def run(self, small: SmallEngine, plan: StepPlan) -> None:
        """Carry out a plan: copies first, then the KV of its tokens, then check what every request would read."""
        for direction, moves in plan.moves:
            source, target = (self.device, self.host) if direction == "out" else (self.host, self.device)
            for move in moves:
                target[move.dst] = list(source[move.src])
        for entry in plan.batch:
            pages = small.allocator.page_ids(entry.request.seq)
            for position in range(entry.num_before, entry.end):
                page = self.device.setdefault(pages[position // self.page_size], [None] * self.page_size)
                page[position % self.page_size] = (token_at(entry.request, position), position)
        for entry in plan.batch:
            pages = small.allocator.page_ids(entry.request.seq)
            for position in range(entry.end):
                held = self.device[pages[position // self.page_size]][position % self.page_size]
                assert held == (token_at(entry.request, position), position), (entry.request.id, position)


def overloaded(policy: str, kind: str, host_pages: int, lag: int = 0, page_size: int = 4) -> SmallEngine:
    """An engine for six requests that outgrow its pool. SGLang's policy reserves nothing for who runs, and `drain`
    lets one in a step, so it overcommits too."""
    num_pages = 48 // page_size
    return SmallEngine(policy, kind, num_pages, page_size, host_pages=host_pages, conservativeness=0.0, result_lag=lag)


def drain(small: SmallEngine, count: int = 6, max_tokens: int = 14) -> None:
    for index in range(count):
        small.add(f"r{index}", range(100 * index, 100 * index + 5 + index), max_tokens)
        step(small)
    while small.engine.has_work:
        step(small)
        assert small.engine.num_steps < 2000


def step(small: SmallEngine) -> None:
    small.engine.step()
    small.allocator.check()
    if small.scheduler.host is not None:
        small.scheduler.host.check()


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
def test_swapped_requests_come_back_and_are_served_whole(policy: str, kind: str, lag: int, page_size: int) -> None:
    small = overloaded(policy, kind, host_pages=200, lag=lag, page_size=page_size)
    drain(small)
    requests = small.requests.values()
    assert all((request.num_output, request.end) == (14, End.STOP) for request in requests)
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.swapped_tokens for request in requests) > 0
    host = small.scheduler.host
    assert host is not None
    assert (host.capacity().in_use, host.capacity().dropped) == (0, 0)
    assert sum(small.allocator.room()) == small.allocator.num_pages


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_outputs_are_the_same_with_and_without_a_host_tier(policy: str, kind: str) -> None:
    outputs = []
    for host_pages in (0, 3, 200):
        small = overloaded(policy, kind, host_pages)
        drain(small)
        outputs.append({name: list(request.seq.token_ids) for name, request in small.requests.items()})
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_swapping_computes_less_again(policy: str, kind: str) -> None:
    totals = {}
    for host_pages in (0, 200):
        small = overloaded(policy, kind, host_pages)
        drain(small)
        totals[host_pages] = sum(request.recomputed_tokens for request in small.requests.values())
    assert totals[200] < totals[0]


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("lag", [0, 1])
def test_every_token_that_is_read_holds_its_own_kv(
    policy: str, kind: str, page_size: int, host_pages: int, lag: int
) -> None:
    """Plans carried out on toy pages: shared prefixes, chunks, preemptions and swaps keep every request's KV right."""
    small = overloaded(policy, kind, host_pages, lag, page_size)
    memory = Memory(page_size)
    moved = 0

    def launched(plan: StepPlan) -> None:
        nonlocal moved
        moved += plan.num_moved_pages
        memory.run(small, plan)

    small.engine.executor.launch = launched  # type: ignore[method-assign]
    for index in range(3):  # sharers of the first prompts, in the same steps
        small.add(f"twin{index}", range(100 * index, 100 * index + 9), 9)
    drain(small)
    assert (moved > 0) == (host_pages > 0)
    assert sum(request.num_preemptions for request in small.requests.values()) > 0


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_a_host_tier_that_is_too_small_drops_whole_sequences_and_they_are_computed_again(
    policy: str, kind: str
) -> None:
    small = overloaded(policy, kind, host_pages=4)
    drain(small)
    assert all(request.end is End.STOP for request in small.requests.values())
    host = small.scheduler.host
    assert host is not None
    assert host.capacity().in_use == 0


def test_who_ends_while_it_waits_leaves_the_host() -> None:
    """Lag 1: the token in flight of a victim can be its last."""
    for max_tokens in range(2, 16):
        small = overloaded("vllm", "block", host_pages=64, lag=1)
        drain(small, max_tokens=max_tokens)
        assert small.scheduler.host is not None
        assert small.scheduler.host.capacity().in_use == 0
