"""Whatever forks, writes, ends, is preempted or moves to the host: each live sequence reads its own KV."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Release
from support.kv_truth import Users

DESIGNS: dict[str, dict[str, Any]] = {
    "hashed": {"kind": "block", "form": "hashed"},
    "runs": {"kind": "block", "form": "runs"},
    "token": {"kind": "token"},
    "hashed-nocache": {"kind": "block", "form": "hashed", "prefix_cache": False},
    "runs-nocache": {"kind": "block", "form": "runs", "prefix_cache": False},
    "token-nocache": {"kind": "token", "prefix_cache": False},
    "token-need-sort": {"kind": "token", "need_sort": True},
}
POOLS = {1: 40, 4: 24, 16: 14}  # pages by page size: small enough that copies and forks are refused


def users(design: str, page_size: int, seed: int, **options: Any) -> Users:
    spec = {**DESIGNS[design], "page_size": page_size}
    return Users(make_allocator(spec, num_pages=POOLS[page_size]), seed, **options)


def run(actors: Users, steps: int) -> Users:
    for _ in range(steps):
        actors.step()
        actors.verify()
    return actors


@pytest.mark.parametrize("prepare_first", [True, False], ids=["prepare-reserve", "reserve-prepare"])
@pytest.mark.parametrize("page_size", POOLS)
@pytest.mark.parametrize("design", DESIGNS)
def test_every_read_finds_its_own_kv(design: str, page_size: int, prepare_first: bool) -> None:
    seen: dict[str, int] = {}
    for seed in range(4):
        actors = run(users(design, page_size, seed, prepare_first=prepare_first), 200)
        for what, count in actors.seen.items():
            seen[what] = seen.get(what, 0) + count
        while actors.live:
            actors._end(actors.live[0], Release.FINISH)
            actors.verify()
        capacity = actors.allocator.capacity()
        assert (capacity.in_use, capacity.shared, capacity.wasted_slots) == (0, 0, 0)
        assert actors.allocator.reset()
    assert min(seen[what] for what in ("fork", "draft", "swap_in", "preempted for room")) > 0
    if design.partition("-")[0] != "token" and page_size > 1:
        assert seen["copy"] > 20
    if page_size == 1 or design.startswith("token"):
        assert "copy" not in seen


@pytest.mark.parametrize("page_size", POOLS)
@pytest.mark.parametrize("cache", ["", "-nocache"])
def test_both_forms_of_the_block_design_fork_alike(cache: str, page_size: int) -> None:
    for seed in range(10, 14):
        hashed, runs = (users(form + cache, page_size, seed) for form in ("hashed", "runs"))
        for _ in range(200):
            hashed.step()
            runs.step()
            assert hashed.answers == runs.answers
            hashed.answers.clear()
            runs.answers.clear()
            assert hashed.allocator.capacity() == runs.allocator.capacity()
            assert list(hashed.allocator._store.queue()) == list(runs.allocator._store.queue())
            for seq, twin in zip(hashed.live, runs.live, strict=True):
                assert hashed.allocator.page_ids(seq) == runs.allocator.page_ids(twin)


@pytest.mark.parametrize("page_size", POOLS)
@pytest.mark.parametrize("design", ["hashed", "runs", "token"])
def test_adapter_rows_follow_forks_and_copies(design: str, page_size: int) -> None:
    adapters = pytest.importorskip("kvarena.allocators.adapter", reason="torch is not installed")
    for kind in (adapters.BlockTableAdapter, adapters.ReqToTokenAdapter):
        actors = users(design, page_size, seed=3)
        options = {"max_requests": 8, "max_tokens": 1024, "slots_by": "torch"}
        actors.adapter = kind(actors.allocator, **options)
        assert run(actors, 120).seen["fork"] > 5


class WritesWithoutAsking(Users):
    """A mutant: forked sequences write without prepare_write."""

    def _prepare(self, wants: Any) -> bool:
        return True


class CopiesLate(Users):
    """A mutant: copies are asked for, told to the adapter, and never carried out."""

    def _prepare(self, wants: Any) -> bool:
        starts = [(seq, seq.num_computed_tokens, n) for seq, n in wants]
        return all(self.allocator.prepare_write(seq, start, start + n) is not None for seq, start, n in starts)


@pytest.mark.parametrize("design", ["hashed", "runs", "hashed-nocache", "runs-nocache"])
def test_a_write_without_preparation_is_an_error_at_commit(design: str) -> None:
    spec = {**DESIGNS[design], "page_size": 4}
    with pytest.raises(ValueError, match=r"in a page that a fork shares; call prepare_write before writing"):
        run(WritesWithoutAsking(make_allocator(spec, num_pages=24), seed=0), 200)


@pytest.mark.parametrize("design", ["hashed", "runs", "hashed-nocache", "runs-nocache"])
def test_a_copy_that_is_not_carried_out_shows(design: str) -> None:
    spec = {**DESIGNS[design], "page_size": 4}
    with pytest.raises(AssertionError, match=r"position \d+, page \d+"):
        run(CopiesLate(make_allocator(spec, num_pages=24), seed=0), 200)
