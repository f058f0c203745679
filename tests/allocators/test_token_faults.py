"""`check()` notices every planted fault, and says which."""

from collections.abc import Callable

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import AllocatorError, Release, Sequence
from kvarena.allocators.token import TokenAllocator
from kvarena.prefix.radix_tree import Node


def busy(page_size: int) -> TokenAllocator:
    """One live sequence with a hit, new pages and a tail; one cached leaf; free pages."""
    allocator = make_allocator({"kind": "token", "page_size": page_size}, num_pages=40)
    assert isinstance(allocator, TokenAllocator)
    first = Sequence("first", range(4 * page_size))
    allocator.admit(first)
    allocator.commit([(first, first.num_tokens)])
    allocator.release([first], Release.FINISH)
    live = Sequence("live", [*range(2 * page_size), *([7] * (3 * page_size))])
    pin = allocator.admit(live)
    assert pin is not None
    assert pin.hit_tokens == 2 * page_size
    allocator.commit([(live, live.num_tokens)])
    live.append(1)
    allocator.extend(live, 1)
    allocator.commit([(live, live.num_tokens)])
    allocator.check()
    return allocator


def leaf(allocator: TokenAllocator) -> Node:
    return next(node for node in allocator.tree.nodes() if node.is_candidate)


def leak_a_page(allocator: TokenAllocator) -> None:
    allocator._free.take(1)


def leak_the_tail(allocator: TokenAllocator) -> None:
    allocator._rows["live"].page_ids.pop()
    allocator._rows["live"].seq.num_computed_tokens -= allocator.page_size


def free_a_cached_page(allocator: TokenAllocator) -> None:
    allocator._free.free(leaf(allocator).pages[:1])


def free_a_page_twice(allocator: TokenAllocator) -> None:
    run = allocator._free.take(1)
    allocator._free.free(run + run)


def share_a_tail(allocator: TokenAllocator) -> None:
    allocator._rows["live"].page_ids[-1] = leaf(allocator).pages[0]


def free_a_live_page(allocator: TokenAllocator) -> None:
    allocator._free.free(allocator._rows["live"].page_ids[-1:])


def free_a_matched_page(allocator: TokenAllocator) -> None:
    allocator._free.free(allocator._rows["live"].page_ids[:1])


def keep_the_given_up_duplicate(allocator: TokenAllocator) -> None:
    allocator._rows["live"].page_ids[1] = leaf(allocator).pages[0]


def lock_once_more(allocator: TokenAllocator) -> None:
    allocator._rows["live"].node.locks += 1


def lose_a_lock(allocator: TokenAllocator) -> None:
    allocator.tree.unlock(allocator._rows["live"].node)


def lock_only_the_parent(allocator: TokenAllocator) -> None:
    row = allocator._rows["live"]
    above = row.node.parent
    assert above is not None
    allocator.tree.lock(above)
    allocator.tree.unlock(row.node)


def count_an_evictable_page_too_many(allocator: TokenAllocator) -> None:
    allocator.tree.evictable_pages += 1


def forget_a_candidate(allocator: TokenAllocator) -> None:
    allocator.tree.queue.pop()


def file_a_child_wrongly(allocator: TokenAllocator) -> None:
    node = leaf(allocator)
    node.edge = node.edge[::-1]


def cut_an_edge_short(allocator: TokenAllocator) -> None:
    node = leaf(allocator)
    node.edge = node.edge[:-1]


def hand_out_an_unknown_page(allocator: TokenAllocator) -> None:
    allocator._free.take(1)
    allocator._free.free(allocator._free.take(1)[:0])
    allocator._rows["live"].page_ids.append(99)


def lose_a_row(allocator: TokenAllocator) -> None:
    allocator._free_rows.pop()


def take_a_row_twice(allocator: TokenAllocator) -> None:
    allocator._free_rows.append(allocator._rows["live"].index)


def compute_beyond_the_row(allocator: TokenAllocator) -> None:
    allocator._rows["live"].seq.num_computed_tokens += 10 * allocator.page_size


FAULTS: list[tuple[Callable[[TokenAllocator], None], str]] = [
    (leak_a_page, "leaked"),
    (leak_the_tail, "leaked"),
    (free_a_cached_page, "two states"),
    (free_a_page_twice, "two states"),
    (share_a_tail, "two states"),
    (free_a_live_page, "points at free page"),
    (free_a_matched_page, "points at free page"),
    (keep_the_given_up_duplicate, "the tree holds"),
    (lock_once_more, "lock count"),
    (lose_a_lock, "lock count"),
    (lock_only_the_parent, "lock count"),
    (count_an_evictable_page_too_many, "evictable count"),
    (forget_a_candidate, "not queued"),
    (file_a_child_wrongly, "not filed"),
    (cut_an_edge_short, "bytes for"),
    (hand_out_an_unknown_page, "outside 1..40"),
    (lose_a_row, "rows 1.."),
    (take_a_row_twice, "rows 1.."),
    (compute_beyond_the_row, "computed tokens"),
]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("fault", "told"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_check_names_the_fault(fault: Callable[[TokenAllocator], None], told: str, page_size: int) -> None:
    allocator = busy(page_size)
    fault(allocator)
    with pytest.raises(AllocatorError, match=told) as error:
        allocator.check()
    assert "free, front first:" in str(error.value), "the dump is missing"
    assert "'live'" in str(error.value)
