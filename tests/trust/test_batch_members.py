"""A batch shows the rows of its own members, whoever stood in the batches before it, whatever their number."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="adapters need torch")

from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter  # noqa: E402
from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.allocators.interface import Release, Sequence  # noqa: E402


@pytest.mark.parametrize("adapter_class", [BlockTableAdapter, ReqToTokenAdapter])
def test_every_order_of_members_after_every_other_shows_their_own_slots(adapter_class):
    pool = make_allocator({"kind": "block", "page_size": 4}, num_pages=40)
    adapter = adapter_class(pool, max_requests=4, max_tokens=32, slots_by="torch")
    seqs = [Sequence(f"r{i}", range(100 * i, 100 * i + 9 + i)) for i in range(4)]
    for seq in seqs:
        for change in (pool.admit(seq), *pool.commit([(seq, seq.num_tokens)])):
            assert change is not None
        adapter.add(seq)
    members = [m for size in (1, 2, 3) for m in itertools.permutations(range(4), size)]
    for before, now in itertools.product(members[:16], members):
        for chosen in (before, now):
            batch = [seqs[i] for i in chosen]
            shown = adapter.batch(batch, [0] * len(batch))
            for place, seq in enumerate(batch):
                pages = list(pool.page_ids(seq))
                slots = [pages[p // 4] * 4 + p % 4 for p in range(seq.num_tokens)]
                assert shown.table.slots(place).tolist() == slots


@pytest.mark.parametrize("adapter_class", [BlockTableAdapter, ReqToTokenAdapter])
def test_a_row_taken_over_by_a_newcomer_shows_its_pages_in_a_batch_of_the_same_members_otherwise(adapter_class):
    pool = make_allocator({"kind": "block", "page_size": 4}, num_pages=12)
    adapter = adapter_class(pool, max_requests=2, max_tokens=32, slots_by="torch")
    first, second = Sequence("a", range(9)), Sequence("a", range(50, 63))
    for seq in (first, second):
        assert pool.admit(seq) is not None
        pool.commit([(seq, seq.num_tokens)])
        adapter.add(seq)
        pages = list(pool.page_ids(seq))
        shown = adapter.batch([seq], [0]).table.slots(0).tolist()
        assert shown == [pages[p // 4] * 4 + p % 4 for p in range(seq.num_tokens)]
        adapter.remove(seq)
        pool.release([seq], Release.FINISH)
