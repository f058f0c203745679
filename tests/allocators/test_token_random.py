"""Weighted random requests through the token allocator, verified after every step and against a slow oracle."""

import random

import pytest
from kvarena.allocators.config import Design, design
from kvarena.allocators.interface import EventKind, Gate, Release, Sequence
from kvarena.allocators.token import TokenAllocator
from support.token_oracle import ORDERS, TokenOracle

STEPS = 400
VERBS = {"arrive": 5, "chunked": 2, "decode": 6, "finish": 3, "preempt": 1, "resume": 1}


def ordered(order: str, **fields: object) -> Design:
    """A token design under an eviction order that a config may not offer."""
    return design({"kind": "token", **fields}).model_copy(update={"eviction_order": order})


def prompt(rng: random.Random, page_size: int, known: list[list[int]]) -> list[int]:
    """Few distinct pages, so prompts share prefixes, diverge inside pages, and repeat whole earlier sequences."""
    if known and rng.random() < 0.4:
        head = list(rng.choice(known))
        head = head[: rng.randint(1, len(head))]
    else:
        head = []
    tail = [rng.randint(1, 3) for _ in range(rng.randint(1, 6 * page_size))]
    return head + tail


class Pair:
    """The same operations on the allocator and on the oracle; `compare` after each."""

    def __init__(self, num_pages: int, spec: Design) -> None:
        self.ours = TokenAllocator(num_pages, spec)
        self.ours.events.enabled = True
        self.oracle = TokenOracle(
            num_pages, spec.page_size, spec.eviction_order, page_unit=spec.eviction_unit == "page"
        )
        self.live: dict[str, Sequence] = {}
        self.preempted: dict[str, Sequence] = {}

    def arrive(self, name: str, tokens: list[int], chunk: int | None) -> bool:
        return self._arrive(Sequence(name, tokens), chunk)

    def resume(self, name: str) -> None:
        seq = self.preempted[name]
        seq.resume()
        if self._arrive(seq, None):
            del self.preempted[name]

    def _arrive(self, seq: Sequence, chunk: int | None) -> bool:
        name = seq.request_id
        ok, hit, pages = self.oracle.arrive(name, list(seq.token_ids), chunk, seq.num_prompt_tokens)
        pin = self.ours.pin(seq, Gate())
        admitted = pin is not None and self._prefill(seq, pin.hit_tokens, chunk)
        assert admitted == ok
        if ok:
            self.live[name] = seq
            assert (pin.hit_tokens, list(self.ours.page_ids(seq))) == (hit, pages)
        return ok

    def _prefill(self, seq: Sequence, hit: int, chunk: int | None) -> bool:
        while seq.num_computed_tokens < seq.num_tokens:
            n = min(chunk or seq.num_tokens, seq.num_tokens - seq.num_computed_tokens)
            if self.ours.extend(seq, n) is None:
                if seq.num_computed_tokens > hit:
                    self.ours.release([seq], Release.ABORT)
                return False
            self.ours.commit([(seq, seq.num_computed_tokens + n)])
        return True

    def decode(self, steps: list[tuple[str, int]]) -> None:
        expected = self.oracle.decode(steps)
        seqs = [self.live[name] for name, _ in steps]
        for seq, (_, token) in zip(seqs, steps, strict=True):
            seq.append(token)
        got = self.ours.reserve([(seq, 1) for seq in seqs])
        assert (got is None) == (expected is None)
        if got is None:
            for seq in seqs:
                seq.pop()
            return
        self.ours.commit([(seq, seq.num_tokens) for seq in seqs])
        assert [list(reservation.page_ids) for reservation in got] == expected

    def finish(self, name: str) -> None:
        self.oracle.finish(name)
        self.ours.release([self.live.pop(name)], Release.FINISH)

    def preempt(self, name: str) -> None:
        self.oracle.preempt(name)
        seq = self.preempted[name] = self.live.pop(name)
        self.ours.release([seq], Release.PREEMPT)
        self.ours.evict(20 * len(self.live))

    def compare(self) -> None:
        self.ours.check()
        capacity = self.ours.capacity()
        assert (capacity.free, capacity.evictable) == (len(self.oracle.free), self.oracle.evictable())
        assert list(self.ours._free) == self.oracle.free
        evicted = [p for event in self.ours.events.drain() if event.kind is EventKind.EVICT for p in event.page_ids]
        assert evicted == self.oracle.evicted
        for name, seq in self.live.items():
            assert list(self.ours.page_ids(seq)) == self.oracle.live[name].row


def drive(pair: Pair, rng: random.Random, page_size: int, steps: int = STEPS) -> None:
    known: list[list[int]] = []
    for step in range(steps):
        verb = rng.choices(list(VERBS), VERBS.values())[0]
        if verb == "resume" and pair.preempted:
            pair.resume(rng.choice(sorted(pair.preempted)))
        elif verb in ("arrive", "chunked", "resume") or not pair.live:
            tokens = prompt(rng, page_size, known)
            chunk = page_size * rng.randint(1, 3) if verb == "chunked" else None
            if pair.arrive(f"r{step}", tokens, chunk):
                known.append(tokens)
        elif verb == "decode":
            names = rng.sample(sorted(pair.live), rng.randint(1, len(pair.live)))
            pair.decode([(name, rng.randint(1, 3)) for name in names])
        else:
            name = rng.choice(sorted(pair.live))
            known.append(list(pair.live[name].token_ids))
            getattr(pair, verb)(name)
        pair.compare()


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("order", ORDERS)
def test_decides_as_the_oracle_under_every_eviction_order(order: str, page_size: int) -> None:
    rng = random.Random(f"{order} {page_size}")
    drive(Pair(12 * 4, ordered(order, page_size=page_size)), rng, page_size, 250)


@pytest.mark.parametrize("num_pages", [6, 24, 400])
@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_decides_as_the_oracle_in_scarce_and_ample_pools(page_size: int, num_pages: int) -> None:
    rng = random.Random(num_pages * 100 + page_size)
    drive(Pair(num_pages, ordered("lru", page_size=page_size)), rng, page_size)


@pytest.mark.parametrize("order", ["lru", "lfu", "mru"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_page_wise_eviction_takes_the_tail_of_the_leaf_that_would_go(page_size: int, order: str) -> None:
    rng = random.Random(f"pages {order} {page_size}")
    drive(Pair(40, ordered(order, page_size=page_size, eviction_unit="page")), rng, page_size, 250)
