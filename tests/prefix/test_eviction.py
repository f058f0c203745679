"""Eviction orders and the queue behind them."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from kvarena.prefix.eviction import ORDERS, SPAN, LeafQueue, RecencyQueue, order, queue_for


@dataclass(eq=False)
class Leaf:
    serial: int
    last_access: int
    created: int = 0
    hits: int = 0
    priority: int = 0
    queued: Any = None
    locks: int = 0
    children: tuple[()] = ()

    @property
    def is_candidate(self) -> bool:
        return not self.locks


# name -> serials in the order in which they go
EXPECTED = {
    "lru": [2, 0, 3, 1],
    "mru": [1, 3, 0, 2],
    "fifo": [0, 1, 2, 3],
    "filo": [3, 2, 1, 0],
    "lfu": [3, 1, 2, 0],
    "slru": [3, 1, 2, 0],
    "priority": [2, 1, 0, 3],
}


BY_KEY = [name for name in ORDERS if ORDERS[name].queue is None]
QUEUES = [*(pytest.param(name, LeafQueue(order(name)), id=name) for name in BY_KEY)]
QUEUES.append(pytest.param("lru", RecencyQueue(), id="lru by spans"))


@pytest.mark.parametrize(("name", "queue"), QUEUES)
def test_the_order_is_the_one_its_name_says(name: str, queue: Any) -> None:
    queue.clear()
    for leaf in (
        Leaf(0, last_access=20, created=1, hits=3, priority=5),
        Leaf(1, last_access=40, created=2, hits=1, priority=0),
        Leaf(2, last_access=10, created=3, hits=2, priority=0),
        Leaf(3, last_access=30, created=4, hits=0, priority=7),
    ):
        queue.offer(leaf)
    gone = []
    while (leaf := queue.pop()) is not None:
        gone.append(leaf.serial)
    assert gone == EXPECTED[name]


def test_slru_protects_from_the_second_hit_on() -> None:
    queue: LeafQueue[Leaf] = LeafQueue(order("slru"))
    for leaf in (Leaf(0, 1, hits=2), Leaf(1, 2, hits=1), Leaf(2, 3, hits=9), Leaf(3, 4, hits=0)):
        queue.offer(leaf)
    gone = [queue.pop() for _ in range(4)]
    assert [leaf.serial for leaf in gone if leaf is not None] == [1, 3, 0, 2]


def test_an_unknown_order_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of lru, lfu, .*found 'clock'"):
        order("clock")


@pytest.mark.parametrize(("name", "queue"), QUEUES)
def test_pops_what_a_search_of_all_candidates_finds(name: str, queue: Any) -> None:
    """Touches, hits, locks and unlocks between the pops; a candidate is offered again when it was touched."""
    rng = random.Random(name)
    chosen = order(name)
    queue.clear()
    leaves: list[Leaf] = []
    for clock in range(1, 4000):
        verb = rng.random()
        if verb < 0.3 or not leaves:
            leaves.append(Leaf(clock, clock, clock, 0, rng.randint(0, 3)))
            queue.offer(leaves[-1])
        elif verb < 0.6:
            leaf = rng.choice(leaves)
            leaf.last_access, leaf.hits = clock, leaf.hits + rng.randint(0, 1)
            if leaf.is_candidate and not chosen.only_grows:
                queue.offer(leaf)
        elif verb < 0.8:
            leaf = rng.choice(leaves)
            leaf.locks = 1 - leaf.locks
            if leaf.is_candidate:
                queue.offer(leaf)
        else:
            candidates = [leaf for leaf in leaves if leaf.is_candidate]
            popped = queue.pop()
            assert popped is (min(candidates, key=chosen.key) if candidates else None)
            if popped is not None:
                leaves.remove(popped)
    assert len(queue) < 4000


def test_lru_gets_the_queue_of_its_own() -> None:
    assert {name: type(queue_for(order(name))) for name in BY_KEY} == {
        name: RecencyQueue if name == "lru" else LeafQueue for name in BY_KEY
    }


def test_entries_older_than_the_oldest_span_are_next() -> None:
    """A parent whose last child went, or a sequence thrown back, brings an old access time."""
    queue: RecencyQueue[Leaf] = RecencyQueue()
    for number in (12, 10, 11):
        queue.offer(Leaf(number, number * SPAN))
    first = queue.pop()
    assert first is not None
    assert first.serial == 10
    for number in (3, 1, 2):
        queue.offer(Leaf(number, number * SPAN))
    queue.offer(Leaf(4, 10 * SPAN + 1))
    gone = []
    while (leaf := queue.pop()) is not None:
        gone.append(leaf.serial)
    assert gone == [1, 2, 3, 4, 11, 12]
    assert len(queue) == 0


@pytest.mark.parametrize("queue", [LeafQueue(order("lru")), RecencyQueue()], ids=["heap", "spans"])
def test_a_touch_costs_the_queue_nothing(queue: Any) -> None:
    leaves = [Leaf(number, number) for number in range(100)]
    for leaf in leaves:
        queue.offer(leaf)
    for clock in range(100, 10_000):
        leaves[clock % 100].last_access = clock
        queue.offer(leaves[clock % 100])
    assert len(queue) == 100


def test_touches_of_an_order_whose_keys_fall_leave_a_bounded_heap() -> None:
    """And what is swept out of it is never the entry that counts."""
    queue = queue_for(order("mru"))
    leaves = [Leaf(number, number) for number in range(100)]
    for leaf in leaves:
        queue.offer(leaf)
    for clock in range(100, 10_000):
        leaf = leaves[clock * 7 % 100]
        leaf.last_access = clock
        queue.offer(leaf)
        assert len(queue) <= 300
    gone = [queue.pop() for _ in range(101)]
    assert gone == [*sorted(leaves, key=lambda leaf: -leaf.last_access), None]
