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


def allocator_in_use(form: str = "hashed") -> BlockAllocator:
    """Pages 1-3 held by `a` and `b` (1, 2 shared), 4 by `b`, 5 and 6 idle and cached, 7 to 9 free."""
    allocator = BlockAllocator(9, design({"kind": "block", "page_size": 2, "form": form}))
    gone = Sequence("gone", [9, 9, 8, 8, 7])
    a, b = Sequence("a", [1, 1, 2, 2, 3]), Sequence("b", [1, 1, 2, 2, 4])
    for seq in (a, b, gone):
        assert allocator.admit(seq) is not None
        allocator.commit([(seq, 5)])
    allocator.release([gone], Release.FINISH)
    allocator.check()
    assert [list(allocator.page_ids(seq)) for seq in (a, b)] == [[1, 2, 3], [1, 2, 4]]
    assert list(allocator._store.queue()) == [7, 8, 9, 6, 5]
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


@fault("page 4: ref count is 0, 1 rows name it; page 4 is named by a live row and stands in the free queue")
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
    allocator._store.often[1] += 1


@fault("page 2: ref count is 1, 2 rows name it")
def count_a_holder_too_few(allocator: Any) -> None:
    del allocator._store.often[2]


@fault("page 8: ref count is 2, 0 rows name it")
def count_a_holder_of_a_free_page(allocator: Any) -> None:
    allocator._store.often[8] = 2


@fault("evictable is 3, 2 pages")
def count_too_many_evictable(allocator: Any) -> None:
    allocator._store.evictable += 1


@fault("evictable is 2, 1 pages")
def drop_a_key_without_counting(allocator: Any) -> None:
    allocator._store.index.drop([5])


@fault("shared is 3, counted 2")
def count_a_page_of_one_holder_as_shared(allocator: Any) -> None:
    allocator._store.often[3] = 1


@fault(r"pages \[3\] have a follower and are not in the queue")
def let_a_held_page_have_a_follower(allocator: Any) -> None:
    allocator._store.free_queue._next[3] = 7


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


@pytest.mark.parametrize("form", ["hashed", "runs"])
def test_a_sound_allocator_passes(form: str) -> None:
    allocator_in_use(form).check()


# the same for the form that keeps runs: the row of `a` is pages 1, 2 (shared, one run) and 3


RUN_FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "leak a free page": (lambda a: a._store.stack.pop(), "page 7 is leaked"),
    "leak a cached run": (lambda a: a._store.tree._unlink(next(a._store.tree.idle())), r"pages \[5, 6\] is leaked"),
    "lose a page of a row": (lambda a: a._rows["a"].pages.pop(), "page 3 is leaked"),
    "put a held page into the queue": (lambda a: a._store.stack.append(4), "page 4 is in two states"),
    "let a row point at a free page": (
        lambda a: a._rows["a"].pages.__setitem__(2, 7),
        "page 7 is named by a live row and stands in the free queue",
    ),
    "let a row point at a cached page": (
        lambda a: a._rows["b"].pages.__setitem__(0, 5),
        "page 5 is named by a live row and stands in the free queue",
    ),
    "let a row point outside the pool": (lambda a: a._rows["a"].pages.__setitem__(2, 99), "page 99 does not exist"),
    "count a holder too many": (lambda a: shared_run(a, +1), r"pages \[1, 2\] has ref count 3, 2 rows name it"),
    "count a holder too few": (lambda a: shared_run(a, -1), r"pages \[1, 2\] has ref count 1, 2 rows name it"),
    "count too many evictable": (lambda a: setattr(a._store.tree, "evictable", 3), "evictable is 3, 2 pages"),
    "count too few shared": (lambda a: setattr(a._store.tree, "shared", 1), "shared is 1, counted 2"),
    "count too many duplicates": (lambda a: setattr(a._store.tree, "duplicates", 1), "duplicates is 1, counted 0"),
    "put a page twice into the queue": (lambda a: a._store.stack.append(7), "page 7 stands in the queue twice"),
    "swap two pages of a row": (lambda a: swap(a._rows["a"].pages), "its runs name pages"),
    "change a token behind the cache": (
        lambda a: a._rows["a"].seq.token_ids.__setitem__(0, 77),
        "its text is not that of the node",
    ),
    "forget that a row ends in a node": (lambda a: setattr(a._rows["a"].node, "users", 1), "1 users, 2 rows end in it"),
    "drop the content of a held run": (
        lambda a: a._store.tree._drop(a._rows["a"].parts[0][0]),
        "is held as published and serves nobody",
    ),
    "commit more than there are slots": (lambda a: setattr(a._rows["a"], "committed", 7), "do not fit 3 pages"),
    "miscount waste": (lambda a: setattr(a, "_wasted", 9), "wasted slots are 9, counted 2"),
}


def shared_run(allocator: Any, change: int) -> None:
    allocator._rows["a"].parts[0][0].refs += change


def swap(pages: Any) -> None:
    pages[0], pages[1] = pages[1], pages[0]


@pytest.mark.parametrize("name", RUN_FAULTS)
def test_a_fault_planted_in_runs_is_named_with_a_dump(name: str) -> None:
    plant, message = RUN_FAULTS[name]
    allocator = allocator_in_use("runs")
    plant(allocator)
    with pytest.raises(AllocatorError, match=message) as caught:
        allocator.check()
    assert "queue, head first" in str(caught.value)
