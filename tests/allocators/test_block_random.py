"""Random users with fixed seeds: every invariant holds after every step, in every setting of the block design."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.config import Design, design
from kvarena.allocators.interface import EventKind, Release, Sequence
from support.block_actors import Actors, picture, prompt

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"form": "hashed"},
    "runs": {"form": "runs"},
    "runs_page1": {"form": "runs", "page_size": 1},
    "page1": {"form": "hashed", "page_size": 1},
    "page3": {"form": "hashed", "page_size": 3},
    "no_cache": {"form": "hashed", "prefix_cache": False},
    "runs_no_cache": {"form": "runs", "prefix_cache": False},
    "last_token": {"form": "hashed", "last_token_rule": False},
    "runs_last_token": {"form": "runs", "last_token_rule": False},
    "window_dense": {"sliding_window": 9, "retention_interval": None},
    "window_tail": {"sliding_window": 6, "retention_interval": 0},
    "window_every": {"sliding_window": 5, "retention_interval": 8},
    "window_of_one": {"sliding_window": 1, "retention_interval": None},
    "window_no_cache": {"sliding_window": 7, "prefix_cache": False},
}


def setting(name: str) -> Design:
    return design({"kind": "block", "page_size": 4, **SETTINGS[name]})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_pages", [7, 24, 60])
@pytest.mark.parametrize("name", SETTINGS)
def test_invariants_hold_after_every_step(name: str, num_pages: int, seed: int) -> None:
    allocator = BlockAllocator(num_pages, setting(name))
    actors = Actors(allocator, seed)
    seen = set()
    for _ in range(250):
        act, came = actors.step()
        allocator.check()
        counts = allocator.capacity()
        assert counts.free + counts.evictable + counts.in_use == num_pages
        assert allocator.room() == (counts.free, counts.evictable)
        seen.add((act, came[0] if isinstance(came, tuple) and came and isinstance(came[0], str) else ""))
    assert ("arrive", "admitted") in seen


@pytest.mark.parametrize("name", [name for name in SETTINGS if "runs" not in name])
def test_a_hash_that_always_collides_changes_no_decision(name: str) -> None:
    runs = []
    for hash_fn in ("xxh3_64", lambda data: b"same"):
        actors = Actors(BlockAllocator(24, setting(name), hash_fn=hash_fn), seed=5)
        runs.append([actors.step() for _ in range(300)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_decides_as_calls_one_by_one(name: str, seed: int) -> None:
    both = [BlockAllocator(200 // setting(name).page_size, setting(name)) for _ in range(2)]
    batches = [live_sequences(allocator, seed) for allocator in both]
    rng = random.Random(seed)
    for _ in range(60):
        chosen = [i for i in range(len(batches[0])) if rng.random() < 0.6]
        n, tokens = rng.randrange(1, 6), [rng.randrange(3) for _ in range(5)]
        for batch in batches:
            for i in chosen:
                for token in tokens[:n]:
                    batch[i].append(token)
        together = both[0].reserve([(batches[0][i], n) for i in chosen])
        if together is None:
            break
        one_by_one = [both[1].extend(batches[1][i], n) for i in chosen]
        assert [list(r.page_ids) for r in together] == [list(r.page_ids) for r in one_by_one if r is not None]
        for allocator, batch in zip(both, batches, strict=True):
            allocator.commit([(batch[i], batch[i].num_tokens) for i in chosen])
            allocator.check()
        assert picture(both[0]) == picture(both[1])


def live_sequences(allocator: BlockAllocator, seed: int) -> list[Sequence]:
    rng = random.Random(seed)
    seqs = [Sequence(f"r{i}", prompt(rng, 4, 20)) for i in range(4)]
    for seq in seqs:
        assert allocator.admit(seq) is not None
        allocator.commit([(seq, seq.num_tokens)])
    return seqs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in SETTINGS if "window" not in name])
def test_a_refusal_leaves_no_trace(name: str, seed: int) -> None:
    allocator = BlockAllocator(16, setting(name))
    actors, refusals = Actors(allocator, seed), 0
    for number in range(300):
        actors.step()
        seq = Sequence(f"big{number}", prompt(actors.rng, 4, 60) * 3)
        before = picture(allocator)
        if allocator.pin(seq) is not None:
            allocator.release([seq], Release.ABORT)
        else:
            refusals += 1
        assert picture(allocator) == before
        if actors.live:
            before = picture(allocator)
            room = sum(allocator.room()) * 4
            assert allocator.extend(actors.live[0], room + 9) is None
            assert picture(allocator) == before
    assert refusals > 20


@pytest.mark.parametrize("name", SETTINGS)
def test_events_retell_the_states_of_all_pages(name: str) -> None:
    allocator = BlockAllocator(24, setting(name))
    allocator.events.enabled = True
    actors = Actors(allocator, seed=11)
    holders = dict.fromkeys(range(1, 25), 0)
    cached: set[int] = set()
    for _ in range(400):
        actors.step()
        for event in allocator.events.drain():
            for page in event.page_ids:
                if event.kind in (EventKind.HIT, EventKind.RESERVE):
                    holders[page] += 1
                elif event.kind is EventKind.RELEASE:
                    holders[page] -= 1
                elif event.kind is EventKind.PUBLISH:
                    cached.add(page)
                elif event.kind is EventKind.EVICT:
                    cached.remove(page)
        counts = allocator.capacity()
        assert sum(n > 0 for n in holders.values()) == counts.in_use
        assert sum(n > 1 for n in holders.values()) == counts.shared
        assert sum(holders[page] == 0 for page in cached) == counts.evictable
