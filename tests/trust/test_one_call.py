"""What a call does for several sequences is one act: duplicates of one commit come back as one free group."""

from __future__ import annotations

import pytest
from kvarena.allocators._runs import Buddy
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Sequence
from kvarena.experiments.engine.request import make_request
from support.slow_facts import Facts, SlowGate
from support.slow_token import SlowToken


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_duplicates_of_one_commit_are_freed_as_one_group(page_size, count):
    """Equal prompts in one prefill batch, each with pages of its own until the commit."""
    pool = make_allocator({"kind": "token", "page_size": page_size}, num_pages=64)
    model = SlowToken(64, page_size)
    seqs = [Sequence(f"r{i}", range(8)) for i in range(count)]
    for seq in seqs:
        facts = Facts(seq.request_id, list(range(8)))
        assert pool.admit(seq) is not None
        assert model.pin(facts, SlowGate()) == []
        model.reserve([(facts.name, 8)])
    commits = pool.commit([(seq, 8) for seq in seqs])
    given = model.commit([(seq.request_id, 8) for seq in seqs])
    assert [list(commit.freed) for commit in commits] == given
    assert sum(map(len, given)) == (count - 1) * 8 // page_size
    assert list(pool._free) == model.free  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["runs", "hashed"])
def test_a_commit_into_a_page_that_a_fork_shares_is_refused(form):
    pool = make_allocator({"kind": "block", "page_size": 4, "form": form}, num_pages=8)
    parent, child = Sequence("p", range(6)), Sequence("c", range(6))
    assert pool.admit(parent) is not None
    pool.commit([(parent, 6)])
    assert pool.fork(parent, child) is not None  # type: ignore[attr-defined]
    for seq in (parent, child):
        seq.append(9)
        assert pool.reserve([(seq, 1)]) is not None
        with pytest.raises(ValueError, match="call prepare_write before writing"):
            pool.commit([(seq, 7)])
    assert pool.prepare_write(child, 6, 7)  # type: ignore[attr-defined]
    pool.commit([(child, 7), (parent, 7)])
    pool.check()


def test_a_pin_finds_its_pages_after_others_cut_the_run_it_found():
    """Between the look-up and the hold, a late publication cuts the cached run in two: the same pages are held."""
    pool = make_allocator({"kind": "block", "page_size": 2, "form": "runs"}, num_pages=24)
    first = Sequence("first", range(8))
    assert pool.admit(first) is not None
    pool.commit([(first, 8)])
    late = Sequence("late", [0, 1, 2])
    assert pool.admit(late) is not None
    pool.commit([(late, 3)])
    pinned = Sequence("pinned", range(8))
    pin = pool.pin(pinned)
    assert pin is not None
    assert list(pin.page_ids) == list(pool.page_ids(first))[:3]
    # A scheduler that runs ahead: the slot is there and counted before its token is known, and is published late.
    late.append(3)
    late.num_computed_tokens = 4
    pool.commit([(late, 4)])
    late.append(77)
    assert pool.reserve([(late, 1)]) is not None
    assert pool.reserve([(pinned, 2)]) is not None
    pool.commit([(pinned, 8)])
    assert list(pool.page_ids(pinned))[:3] == list(pool.page_ids(first))[:3]
    pool.check()


def test_a_buddy_run_grows_only_into_its_own_other_half():
    free = Buddy(8)
    assert [free.place(1) for _ in range(4)] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    free.give((3, 1))
    # Page 3 is free behind page 2, and belongs to another pair.
    assert free.grow((2, 1), 2) is None
    free.give((2, 1))
    assert free.grow((1, 1), 2) == (1, 2)
    free.check()


@pytest.mark.parametrize(
    ("computed", "hit", "from_host", "again"), [(12, 8, 0, 4), (12, 0, 0, 12), (4, 8, 0, 0), (12, 4, 6, 2)]
)
def test_recomputed_tokens_are_those_that_no_cache_had(computed, hit, from_host, again):
    request = make_request("a", range(10), 5)
    request.admitted(0)
    request.num_computed = computed
    request.throw_back()
    request.admitted(hit, from_host)
    assert request.recomputed_tokens == again
    request.admitted(0)  # another admission without a preemption in between loses nothing
    assert request.recomputed_tokens == again
