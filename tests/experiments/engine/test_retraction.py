"""Retraction by SGLang's rules, against the rule written out once more by hand: who goes, in which order.

The recorded logs retract one request at a time; these tests cover several victims, every tie, and the pass that waits.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from kvarena.experiments.engine.policy_sglang import SglangScheduler
from kvarena.experiments.engine.request import End, EngineRequest
from kvarena.experiments.engine.scheduler import StepPlan
from support.engine import SmallEngine


class Watched:
    """A SmallEngine whose retractions are compared with the rule, pass by pass."""

    def __init__(self, seed: int, lag: int, page_size: int, kind: str = "token") -> None:
        self.rng = random.Random(seed)
        self.small = SmallEngine(
            "sglang", kind, 96 // page_size, page_size, conservativeness=0.0, result_lag=lag, max_num_seqs=12
        )
        assert isinstance(self.small.scheduler, SglangScheduler)
        self.scheduler = self.small.scheduler
        self.victims = 0
        self.largest = 0
        original = self.scheduler._retract

        def retract(plan: StepPlan) -> None:
            self.compare(plan, original)

        self.scheduler._retract = retract  # type: ignore[method-assign]

    def compare(self, plan: StepPlan, original: object) -> None:
        batch = list(self.scheduler.running.requests)
        waiting = list(self.scheduler.waiting)
        original(plan)  # type: ignore[operator]
        victims = plan.preempted
        kept = self.scheduler.running.requests
        self.victims += len(victims)
        self.largest = max(self.largest, len(victims))
        assert victims == expected_order(batch)[: len(victims)]
        assert kept == expected_order(batch)[len(victims) :][::-1]  # most generated first
        assert list(self.scheduler.waiting) == waiting + victims  # at the end, in the order in which they went
        assert len(kept) >= 1
        generated = sum(request.num_output for request in kept)
        limit = sum(request.max_tokens for request in kept)
        assert self.scheduler.ratio.value == min(1.0, (generated + 20 * len(kept)) / (limit + 1))
        for victim in victims:
            assert victim.num_computed == 0
            assert victim.num_in_flight == 0

    def run(self) -> None:
        for index in range(14):
            length, output = self.rng.choice([3, 5, 5, 9]), self.rng.randint(8, 22)
            self.small.add(f"r{index}", [self.rng.randrange(1000) for _ in range(length)], output)
            for _ in range(self.rng.choice([0, 1, 1, 2])):
                self.small.engine.step()
                self.small.allocator.check()
        self.small.run()


def expected_order(batch: list[EngineRequest]) -> list[EngineRequest]:
    """Victims first: fewest generated, then the longest prompt, then the last in the batch."""
    places = {id(request): place for place, request in enumerate(batch)}

    def key(request: EngineRequest) -> tuple[int, int, int]:
        return request.num_output, -request.seq.num_prompt_tokens, -places[id(request)]

    return sorted(batch, key=key)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["token", "block"])
def test_victims_keep_order_queue_and_ratio_are_those_of_the_rule(lag: int, page_size: int, kind: str) -> None:
    victims = largest = 0
    for seed in range(12):
        watched = Watched(seed, lag, page_size, kind)
        watched.run()
        victims += watched.victims
        largest = max(largest, watched.largest)
        for request in watched.small.requests.values():
            assert request.end in (End.STOP, End.LENGTH)
            assert list(request.seq.token_ids[request.seq.num_prompt_tokens :]) == [
                1000 + place for place in range(request.num_output)
            ]
    assert victims > 10
    if page_size == 4:
        assert largest > 1


@pytest.mark.parametrize("kind", ["token", "block"])
def test_retraction_stops_at_the_first_fit(kind: str) -> None:
    """Every victim but the last was not enough: with it alone kept, the decode would still have had no room."""
    seen = []
    for seed in range(8):
        watched = Watched(seed, 0, 4, kind)
        rooms: list[bool] = []
        has_room = watched.scheduler._has_room

        def noted(requests: list[EngineRequest], *, has_room: object = has_room, rooms: list[bool] = rooms) -> bool:
            rooms.append(has_room(requests))  # type: ignore[operator]
            return rooms[-1]

        watched.scheduler._has_room = noted  # type: ignore[method-assign]
        watched.run()
        # A failed test is always followed by another one, of fewer requests; a passed one ends the pass.
        seen += [pair for pair in pairwise(rooms) if not pair[0]]
    assert (False, True) in seen
    assert (False, False) in seen


def test_with_lag_a_decode_waits_for_a_request_whose_last_token_is_in_flight() -> None:
    """SGLang 0.5.22: memory short and somebody's last token in flight: the pass is skipped, nobody is retracted."""
    skipped = 0
    for seed in range(30):
        watched = Watched(seed, 1, 1)
        scheduler = watched.scheduler
        decode = scheduler._decode

        def noted(decode: object = decode, scheduler: SglangScheduler = scheduler) -> StepPlan:
            nonlocal skipped
            ending = scheduler._ends_in_flight
            plan = decode()  # type: ignore[operator]
            if ending:
                assert not plan.preempted
                if not plan.batch and scheduler.running.requests:
                    skipped += 1
                    assert not scheduler.running.full
            return plan

        scheduler._decode = noted  # type: ignore[method-assign]
        watched.run()
    assert skipped > 0
