"""The two forms of the block design decide alike: same pages, order, evictions, refusals and events, step by step."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.block_hashed import HashedPages
from kvarena.allocators.block_runs import PageRuns
from kvarena.allocators.config import design, make_allocator
from kvarena.allocators.interface import Gate, Release, Sequence
from support.block_actors import Actors, common, picture

FORMS = ("hashed", "runs")
SETTINGS: dict[str, dict[str, Any]] = {
    "page4": {},
    "page1": {"page_size": 1},
    "page3": {"page_size": 3},
    "no_cache": {"prefix_cache": False},
    "no_last_token_rule": {"last_token_rule": False},
}


def pair(num_pages: int, fields: dict[str, Any]) -> list[BlockAllocator]:
    spec = {"kind": "block", "page_size": 4, **fields}
    both = [BlockAllocator(num_pages, design({**spec, "form": form})) for form in FORMS]
    for allocator in both:
        allocator.events.enabled = True
    return both


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_pages", [6, 25, 90])
@pytest.mark.parametrize("name", SETTINGS)
def test_random_users_see_no_difference(name: str, num_pages: int, seed: int) -> None:
    both = pair(num_pages, SETTINGS[name])
    users = [Actors(allocator, seed) for allocator in both]
    for _ in range(220):
        assert users[0].step() == users[1].step()
        assert both[0].events.drain() == both[1].events.drain()
        assert common(picture(both[0])) == common(picture(both[1]))
    both[1].check()


class Crowd:
    """Many sequences in flight in every stage at once: pins left open, chunks, results that come late, aborts."""

    def __init__(self, allocator: BlockAllocator, seed: int, given: bool) -> None:
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


@pytest.mark.parametrize("given", [False, True], ids=["tokens", "given_ids"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("num_pages", "page_size"), [(9, 4), (40, 2), (64, 1)])
def test_a_crowd_in_every_stage_sees_no_difference(num_pages: int, page_size: int, seed: int, given: bool) -> None:
    both = pair(num_pages, {"page_size": page_size})
    crowds = [Crowd(allocator, seed, given) for allocator in both]
    for _ in range(150):
        assert crowds[0].step() == crowds[1].step()
        assert both[0].events.drain() == both[1].events.drain()
        assert common(picture(both[0])) == common(picture(both[1]))
        for allocator in both:
            allocator.check()


@pytest.mark.parametrize("length", [2, 255, 256, 257, 600])
def test_long_prompts_are_kept_in_bounded_runs(length: int) -> None:
    for allocator in pair(2000, {"page_size": 1}):
        tokens = list(range(length + 1))
        seqs = [Sequence(name, tokens) for name in "ab"]
        for seq in seqs:
            assert allocator.admit(seq) is not None
            allocator.commit([(seq, len(tokens))])
        assert seqs[1].num_computed_tokens == length + 1
        assert list(allocator.page_ids(seqs[1]))[:length] == list(range(1, length + 1))
        allocator.check()
        assert allocator.match(Sequence("probe", tokens[: length // 2])).hit_tokens == length // 2
        if isinstance(allocator._store, PageRuns):
            rows = allocator._rows.values()
            assert max(len(run.pages) for row in rows for run, _ in row.parts) <= 256  # type: ignore[attr-defined]


def test_make_allocator_chooses_the_form() -> None:
    def form(**fields: Any) -> type:
        return type(make_allocator({"kind": "block", **fields}, num_pages=4)._store)  # type: ignore[attr-defined]

    assert form() is PageRuns
    assert form(prefix_cache=False) is PageRuns
    assert form(form="hashed") is HashedPages
    assert form(hash_fn="sha256") is HashedPages
    assert form(sliding_window=64) is HashedPages
    injected: Any = make_allocator("vllm", num_pages=4, hash_fn=lambda data: b"x")
    assert type(injected._store) is HashedPages
