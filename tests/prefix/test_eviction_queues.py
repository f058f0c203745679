"""The orders that no key tells: random draws from all candidates alike, SIEVE walks as its paper says."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from kvarena.prefix.eviction import order, queue_for
from kvarena.prefix.radix_tree import RadixTree
from kvarena.prefix.random_order import RandomQueue
from kvarena.prefix.sieve import SieveQueue


@dataclass(eq=False)
class Leaf:
    serial: int
    hits: int = 1
    queued: Any = None
    locks: int = 0
    children: tuple[()] = ()
    last_access: int = 0
    priority: int = 0

    @property
    def created(self) -> int:
        return self.serial


class PlainSieve:
    """SIEVE as its paper draws it: a list from old to new, a visited bit each, a hand."""

    def __init__(self) -> None:
        self.line: list[int] = []
        self.visited: dict[int, bool] = {}
        self.hand = 0

    def pop(self) -> int:
        while True:
            at = next((i for i, serial in enumerate(self.line) if serial > self.hand), 0)
            serial = self.hand = self.line[at]
            if not self.visited[serial]:
                del self.line[at]
                return serial
            self.visited[serial] = False


@pytest.mark.parametrize("seed", range(5))
def test_sieve_walks_as_its_paper_says(seed: int) -> None:
    rng, ours, plain = random.Random(seed), SieveQueue(), PlainSieve()
    leaves: dict[int, Leaf] = {}
    for clock in range(1, 1500):
        if not leaves or rng.random() < 0.4:
            leaves[clock] = Leaf(clock)
            ours.offer(leaves[clock])
            plain.line.append(clock)
            plain.visited[clock] = False
        elif rng.random() < 0.5:
            leaf = leaves[rng.choice(list(leaves))]
            leaf.hits += 1
            plain.visited[leaf.serial] = True
        else:
            popped = ours.pop()
            assert popped.serial == plain.pop()
            del leaves[popped.serial]


@pytest.mark.parametrize("queue", [SieveQueue(), RandomQueue()], ids=["sieve", "random"])
def test_held_leaves_and_parents_are_passed_over_until_they_are_offered_again(queue: Any) -> None:
    held, free = Leaf(1), Leaf(2)
    queue.offer(held)
    queue.offer(free)
    held.locks = 1
    assert queue.pop() is free
    assert queue.pop() is None
    held.locks = 0
    queue.offer(held)
    queue.offer(held)
    assert len(queue) == 1
    assert queue.pop() is held
    assert queue.pop() is None


def test_random_gives_every_candidate_the_same_chance_whenever_it_came() -> None:
    counts: Counter[int] = Counter()
    queue = RandomQueue()
    waiting = {serial: Leaf(serial) for serial in range(10)}
    for leaf in waiting.values():
        queue.offer(leaf)
    for _ in range(20_000):
        gone = queue.pop()
        counts[gone.serial] += 1
        queue.offer(gone)
    # 2,000 each; five standard deviations of a binomial count
    assert all(abs(count - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5 for count in counts.values())


def test_the_same_calls_draw_the_same() -> None:
    draws = []
    for _ in range(2):
        queue = RandomQueue()
        for serial in range(50):
            queue.offer(Leaf(serial))
        draws.append([queue.pop().serial for _ in range(50)])
    assert draws[0] == draws[1]
    assert sorted(draws[0]) == list(range(50))


@pytest.mark.parametrize("name", ["sieve", "random"])
def test_a_tree_under_these_orders_evicts_all_of_its_unlocked_leaves(name: str) -> None:
    from array import array

    tree, rng, page = RadixTree(order(name)), random.Random(name), 0
    assert type(queue_for(order(name))) in (SieveQueue, RandomQueue)
    for _ in range(60):
        key = bytes(rng.randrange(2) for _ in range(rng.randint(1, 9)))
        node, found = tree.match(key, 1)
        tree.lock(node)
        new = array("i", range(page + 1, page + 1 + len(key) - len(found)))
        page += len(new)
        node, _, _ = tree.insert(node, key[len(found) :], 1, found + new, len(found))
        tree.count_hit(node)
        tree.unlock(node)
        assert not list(tree.faults())
        if rng.random() < 0.3:
            before, freed = tree.evictable_pages, sum(map(len, tree.evict(rng.randint(1, 5))))
            assert tree.evictable_pages == before - freed
    tree.evict(10_000)
    assert not tree.evictable_pages
    assert not tree.roots
