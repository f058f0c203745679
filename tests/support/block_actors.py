"""Random users of a block allocator, and a picture of all its state."""

from __future__ import annotations

import random
from typing import Any

from kvarena.allocators.block_hashed import HashedPages
from kvarena.allocators.interface import Gate, KVAllocator, Release, Sequence


def picture(allocator: Any) -> dict[str, Any]:
    """Everything that decides: queue order, what serves and who holds it, rows, counters, and the form's own order."""
    store = allocator._store
    rows = [*allocator._rows.values(), *allocator._pins.values()]
    seen = {
        "queue": list(store.queue()),
        "marks": {page: mark for page, mark in store.marks(rows).items() if mark},
        "rows": {name: (list(row.pages), row.published, row.committed) for name, row in allocator._rows.items()},
        "pins": {name: list(row.pages) for name, row in allocator._pins.items()},
        "counts": allocator.capacity(),
    }
    if isinstance(store, HashedPages):
        order = {key: list(later) for key, later in store.index._later.items()}
        return {**seen, "serving": dict(store.index._first), "after": order}
    return {**seen, "version": store.tree.version}


def common(seen: dict[str, Any]) -> dict[str, Any]:
    """The part of a picture that both forms must agree on."""
    return {name: value for name, value in seen.items() if name not in ("serving", "after", "version")}


def prompt(rng: random.Random, page_size: int, longest: int) -> list[int]:
    """A prompt that often shares whole pages with others: a few symbols, each written as runs of a page or less."""
    tokens: list[int] = []
    for _ in range(rng.randrange(1, 6)):
        tokens += [rng.randrange(3)] * (page_size if rng.random() < 0.7 else rng.randrange(1, 2 * page_size + 1))
    return tokens[:longest]


class Actors:
    """Random requests against one allocator; each step is one of a few weighted acts.

    Every act returns what a user can see of it, so that two allocators can be driven alike and compared.
    """

    WEIGHTS = (("arrive", 5), ("decode", 9), ("finish", 3), ("preempt", 1), ("abort", 1), ("evict", 1), ("reset", 1))

    def __init__(self, allocator: KVAllocator, seed: int, longest: int = 60) -> None:
        self.allocator = allocator
        self.rng = random.Random(seed)
        self.longest = longest
        self.live: list[Sequence] = []
        self.away: list[Sequence] = []
        self.count = 0

    def step(self) -> tuple[Any, ...]:
        """Act once; returns (act, what came of it)."""
        names, weights = zip(*self.WEIGHTS, strict=True)
        act = self.rng.choices(names, weights)[0]
        if act in ("decode", "finish", "preempt", "abort") and not self.live:
            act = "arrive"
        return act, getattr(self, f"_{act}")()

    def _sequence(self) -> Sequence:
        if self.away and self.rng.random() < 0.5:
            seq = self.away.pop(self.rng.randrange(len(self.away)))
            seq.resume()
            return seq
        self.count += 1
        extra = [(self.rng.randrange(8), 3, self.rng.randrange(2))] if self.rng.random() < 0.1 else []
        name = self.rng.choice([None, None, None, "tenant"])
        tokens = prompt(self.rng, self.allocator.page_size, self.longest)
        return Sequence(f"r{self.count}", tokens, namespace=name, extra_keys=extra)

    def _arrive(self) -> tuple[Any, ...]:
        seq = self._sequence()
        gate = Gate(headroom=self.rng.choice([0, 0, 2]), whole_prompt=self.rng.random() < 0.8)
        pin = self.allocator.pin(seq, gate)
        if pin is None:
            return ("refused by the gate",)
        chunk = self.rng.choice([1, 3, 7, self.longest, self.longest])
        taken: list[Any] = []
        while seq.num_computed_tokens < seq.num_prefill_tokens or not taken:  # a full hit still adopts its pages
            n = min(chunk, seq.num_prefill_tokens - seq.num_computed_tokens)
            reservation = self.allocator.extend(seq, n)
            if reservation is None:
                if taken:  # else the pin was dropped by the refusal
                    self.allocator.release([seq], Release.ABORT)
                return ("refused", pin.hit_tokens, taken)
            taken.append((list(reservation.page_ids), list(reservation.evicted), reservation.rewritten))
            self.allocator.commit([(seq, seq.num_computed_tokens + n)])
        self.live.append(seq)
        return ("admitted", pin.hit_tokens, taken, list(self.allocator.page_ids(seq)))

    def _decode(self) -> tuple[Any, ...]:
        batch = self.rng.sample(self.live, self.rng.randrange(1, len(self.live) + 1))
        for seq in batch:
            seq.append(self.rng.randrange(3))
        reservations = self.allocator.reserve([(seq, 1) for seq in batch])
        if reservations is None:
            for seq in batch:
                seq.pop()
            return ("refused",)
        self.allocator.commit([(seq, seq.num_computed_tokens + 1) for seq in batch])
        return tuple(
            (list(done.page_ids), list(done.evicted), list(done.freed), done.rewritten) for done in reservations
        )

    def _leave(self, reason: Release, count: int) -> tuple[Any, ...]:
        seqs = [self.live.pop(self.rng.randrange(len(self.live))) for _ in range(min(count, len(self.live)))]
        if reason is Release.PREEMPT:
            self.away += seqs
        done = self.allocator.release(seqs, reason)
        return list(done.freed), list(done.cached), list(done.evicted)

    def _finish(self) -> tuple[Any, ...]:
        return self._leave(Release.FINISH, self.rng.randrange(1, 3))

    def _preempt(self) -> tuple[Any, ...]:
        return self._leave(Release.PREEMPT, 1)

    def _abort(self) -> tuple[Any, ...]:
        seq = self.rng.choice(self.live)
        # Reserved for and never committed: what this published must not be found afterwards.
        for _ in range(self.allocator.page_size + 1):
            seq.append(self.rng.randrange(3))
        reservation = self.allocator.extend(seq, self.allocator.page_size + 1)
        self.live.remove(seq)
        done = self.allocator.release([seq], Release.ABORT)
        return reservation is None, list(done.freed), list(done.cached), list(done.evicted)

    def _evict(self) -> list[int]:
        return self.allocator.evict(self.rng.randrange(self.allocator.page_size * 6))

    def _reset(self) -> bool:
        return self.allocator.reset()
