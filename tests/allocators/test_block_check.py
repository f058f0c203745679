"""`check()` of the block design finds each kind of fault: one is planted, and it must be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.config import design
from kvarena.allocators.interface import AllocatorError, Release, Sequence

FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {}


def fault(message: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(plant: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[plant.__name__] = (plant, message)
        return plant

    return add


def allocator_in_use() -> BlockAllocator:
    """Pages 1-3 held by `a` and `b` (1, 2 shared), 4 by `b`, 5 and 6 idle and cached, 7 to 9 free."""
    allocator = BlockAllocator(9, design({"kind": "block", "page_size": 2, "form": "hashed"}))
    gone = Sequence("gone", [9, 9, 8, 8, 7])
    a, b = Sequence("a", [1, 1, 2, 2, 3]), Sequence("b", [1, 1, 2, 2, 4])
    for seq in (a, b, gone):
        assert allocator.admit(seq) is not None
        allocator.commit([(seq, 5)])
    allocator.release([gone], Release.FINISH)
    allocator.check()
    assert [list(allocator.page_ids(seq)) for seq in (a, b)] == [[1, 2, 3], [1, 2, 4]]
    assert list(allocator._store.free_queue) == [7, 8, 9, 6, 5]
    return allocator


@fault("page 7 is leaked")
def leak_a_free_page(allocator: Any) -> None:
    allocator._store.free_queue.take(1)


@fault("page 6 is leaked")
def leak_a_cached_page(allocator: Any) -> None:
    allocator._store.free_queue.remove([6])
    allocator._store.evictable -= 1


@fault("page 3 is leaked")
def lose_a_page_of_a_row(allocator: Any) -> None:
    allocator._rows["a"].pages.pop()


@fault("page 4 is in two states")
def put_a_held_page_into_the_queue(allocator: Any) -> None:
    allocator._store.free_queue.append([4])


@fault("page 7 is named by a live row and stands in the free queue")
def let_a_row_point_at_a_free_page(allocator: Any) -> None:
    allocator._rows["a"].pages[2] = 7


@fault("page 5 is named by a live row and stands in the free queue")
def let_a_row_point_at_a_cached_page(allocator: Any) -> None:
    allocator._rows["b"].pages[0] = 5


@fault("page 99 does not exist")
def let_a_row_point_outside_the_pool(allocator: Any) -> None:
    allocator._rows["a"].pages[2] = 99


@fault("page 1: ref count is 3, 2 rows name it")
def count_a_holder_too_many(allocator: Any) -> None:
    allocator._store.refs[1] += 1


@fault("page 2: ref count is 1, 2 rows name it")
def count_a_holder_too_few(allocator: Any) -> None:
    allocator._store.refs[2] -= 1


@fault("page 8: ref count is 1, 0 rows name it")
def count_a_holder_of_a_free_page(allocator: Any) -> None:
    allocator._store.refs[8] = 1


@fault("evictable is 3, 2 pages")
def count_too_many_evictable(allocator: Any) -> None:
    allocator._store.evictable += 1


@fault("evictable is 2, 1 pages")
def drop_a_key_without_counting(allocator: Any) -> None:
    allocator._store.index.drop([5])


@fault("shared is 1, counted 2")
def miscount_shared(allocator: Any) -> None:
    allocator._store.shared -= 1


@fault("wasted slots are 3, counted 2")
def miscount_waste(allocator: Any) -> None:
    allocator._wasted += 1


@fault("stands in the queue twice")
def close_the_queue_into_a_ring(allocator: Any) -> None:
    allocator._store.free_queue._next[9] = 8


@fault("but names page")
def break_a_back_link(allocator: Any) -> None:
    allocator._store.free_queue._previous[9] = 7


@fault("the queue counts 6 pages and holds 5")
def miscount_the_queue(allocator: Any) -> None:
    allocator._store.free_queue.num_pages += 1


@fault("as its tail")
def lose_the_tail(allocator: Any) -> None:
    allocator._store.free_queue._previous[0] = 6


@fault("page 2 at position 1 serves other content")
def drop_the_key_of_a_held_page(allocator: Any) -> None:
    allocator._store.index.drop([2])


@fault("page 2 at position 0 serves other content")
def swap_two_pages_of_a_row(allocator: Any) -> None:
    pages = allocator._rows["a"].pages
    pages[0], pages[1] = pages[1], pages[0]


@fault("its tokens are not those that were hashed")
def change_a_token_behind_the_cache(allocator: Any) -> None:
    allocator._rows["a"].seq.token_ids[0] = 77


@fault("not the hash of its text")
def change_a_cached_text(allocator: Any) -> None:
    allocator._store.index._texts[5].raw[0] ^= 1


@fault("page 5: key")
def forget_a_page_in_the_map(allocator: Any) -> None:
    del allocator._store.index._first[allocator._store.index.keys[5]]


@fault("duplicates is 1, counted 0")
def miscount_duplicates(allocator: Any) -> None:
    allocator._store.index.duplicates += 1


@fault("do not fit 3 pages")
def publish_more_than_there_is(allocator: Any) -> None:
    allocator._rows["a"].published = 4


@fault("do not fit 3 pages")
def commit_more_than_there_are_slots(allocator: Any) -> None:
    allocator._rows["a"].committed = 7
    allocator._wasted -= 2


@fault("left the row without a window")
def null_an_entry(allocator: Any) -> None:
    allocator._rows["a"].pages[0] = 0


@fault("the padding page has a key")
def publish_the_padding_page(allocator: Any) -> None:
    allocator._store.index.keys[0] = b"x"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_a_dump(name: str) -> None:
    plant, message = FAULTS[name]
    allocator = allocator_in_use()
    plant(allocator)
    with pytest.raises(AllocatorError, match=message) as caught:
        allocator.check()
    assert "queue, head first" in str(caught.value)


def test_a_sound_allocator_passes() -> None:
    allocator_in_use().check()
