"""Many sequences at once against one allocator, in every stage of their lives."""

from __future__ import annotations

import random
from array import array
from typing import Any

from kvarena.allocators.interface import Gate, KVAllocator, Release, Sequence


class Crowd:
    """Many sequences in flight in every stage at once: pins left open, chunks, results that come late, aborts."""

    def __init__(self, allocator: KVAllocator, seed: int, given: bool) -> None:
        self.allocator = allocator
        self.rng = random.Random(seed)
        self.given = given
        self.pinned: list[Sequence] = []
        self.live: list[Sequence] = []
        self.count = 0

    def step(self) -> Any:
        acts = [self.pin, self.pin, self.reserve, self.reserve, self.reserve, self.commit, self.commit, self.leave]
        return self.rng.choice(acts)()

    def pin(self) -> Any:
        self.count += 1
        seq = self.sequence(f"r{self.count}")
        pin = self.allocator.pin(seq, Gate(whole_prompt=self.rng.random() < 0.5))
        if pin is not None:
            self.pinned.append(seq)
        return pin and (pin.hit_tokens, list(pin.page_ids))

    def sequence(self, name: str) -> Sequence:
        size, rng = self.allocator.page_size, self.rng
        if not self.given:
            return Sequence(name, [rng.choice([0, 0, 0, 1]) for _ in range(rng.randrange(1, 9 * size))])
        ids, last = [], 0
        for _ in range(rng.randrange(1, 9)):  # an id names its whole prefix
            last = last * 2 + rng.choice([1, 1, 2])
            ids.append(last)
        return Sequence(name, page_hashes=array("i", ids), num_tokens=len(ids) * size - rng.randrange(size))

    def reserve(self) -> Any:
        waiting = self.rng.sample(self.pinned, self.rng.randrange(len(self.pinned) + 1))
        running = self.rng.sample(self.live, self.rng.randrange(len(self.live) + 1))
        wants = []
        for seq in waiting + running:
            unknown = self.rng.random() < 0.3  # tokens to come, or drafts: slots without a known token
            missing = max(seq.num_tokens - seq.num_computed_tokens, 0)
            if not missing and not unknown:
                seq.append(self.rng.choice([0, 0, 1]))
                missing = 1
            wants.append((seq, self.rng.randrange(1, missing + 3) if unknown or missing < 2 else missing))
        done = self.allocator.reserve(wants)
        for seq in waiting:
            self.pinned.remove(seq)
            if done is not None:
                self.live.append(seq)
        if done is not None and self.rng.random() < 0.3:
            for seq, n in wants:  # the scheduler runs ahead
                seq.num_computed_tokens += n
        return done and [(list(r.page_ids), list(r.evicted), list(r.freed), list(r.duplicates)) for r in done]

    def commit(self) -> Any:
        chosen = self.rng.sample(self.live, self.rng.randrange(len(self.live) + 1))
        done = []
        for seq in chosen:
            slots = len(self.allocator.page_ids(seq)) * self.allocator.page_size
            if self.rng.random() < 0.5 and seq.num_tokens < slots:
                seq.append(self.rng.choice([0, 0, 1]))
            done.append((seq, min(seq.num_tokens, slots)))
        return [list(one.duplicates) for one in self.allocator.commit(done)]

    def leave(self) -> Any:
        which = self.live if self.rng.random() < 0.7 else self.pinned
        gone = [which.pop(self.rng.randrange(len(which))) for _ in range(self.rng.randrange(len(which) + 1))]
        done = self.allocator.release(gone, self.rng.choice(list(Release)))
        return list(done.freed), list(done.cached), list(done.evicted)
