"""The two forms of the block design decide alike: same pages, order, evictions, refusals and events, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.block_hashed import HashedPages
from kvarena.allocators.block_runs import PageRuns
from kvarena.allocators.config import design, make_allocator
from kvarena.allocators.interface import Release, Sequence
from support.block_actors import Actors, common, picture
from support.crowd import Crowd

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


def hit(pool: BlockAllocator, seq: Sequence) -> int:
    pin = pool.pin(seq)
    assert pin is not None
    return pin.hit_tokens


def test_a_gap_that_an_abort_leaves_is_no_ground_for_trust() -> None:
    """Behind the page that the abort took back stands another one, and a colliding text moves into its key."""

    def parity(data: bytes) -> bytes:
        """Of the first token of a page of 4."""
        return bytes(byte % 2 for byte in data[-16:-15])

    pool = BlockAllocator(8, design({"kind": "block", "page_size": 4}), hash_fn=parity)
    text, colliding = [4, 1, 1, 1, 5, 1, 1, 1, 9], [6, 1, 1, 1, 8]
    first = Sequence("first", text[:5])
    assert pool.admit(first) is not None  # publishes the first page, writes nothing
    second = Sequence("second", text)
    assert hit(pool, second) == 4
    pool.reserve([(second, 5)])
    pool.release([first], Release.ABORT)
    pool.release([second], Release.FINISH)
    pool.check()
    third = Sequence("third", colliding)
    assert hit(pool, third) == 0
    pool.reserve([(third, 5)])
    pool.commit([(third, 5)])
    pool.release([third], Release.FINISH)
    assert pool.match(Sequence("again", text)).hit_tokens == 0
    assert pool.match(Sequence("colliding", colliding)).hit_tokens == 4
    pool.check()
    pool.reset()
    assert pool.admit(first) is not None
    pool.check()
