"""Fork and copy-on-write of the block design.

    parent   [ p1  p2  p3 ]        p1, p2 full, p3 partly filled            S = 4, 10 tokens computed
    child    [ p1  p2  p3 ]        fork: one more holder each, no copy

    whoever writes position 10 first gets a page of its own, p3 copied into it; the last holder writes p3 in place

Only the page in which the fork happened ever needs a copy: full pages are not written again, and pages taken later
have one owner. Until it has one holder it is *open* for each of them: it is not published, and a commit that would
need it written is an error. vLLM 0.32.0 has no fork; it had this one in its early versions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvarena.allocators import block_publish
from kvarena.allocators.block_rows import Row
from kvarena.allocators.fork_rules import check_child, check_range, shared_tokens, start_child
from kvarena.allocators.interface import PADDING_PAGE, Commit, EventKind, Fork, PageCopy, PageIds, Sequence

if TYPE_CHECKING:
    from kvarena.allocators.block import BlockAllocator


def fork(allocator: BlockAllocator, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
    """The child holds the pages of the parent's committed tokens, or of the first `num_tokens` of them. O(pages).

    A partial page that the parent may be writing already, since it serves hits or a step is in flight, or in which it
    has more than it shares, is copied at once. None: that copy has no room.
    """
    row = _live_row(allocator, parent)
    written = min(row.committed, parent.num_computed_tokens)
    computed = shared_tokens(parent, written, num_tokens)
    full, rest = divmod(computed, allocator.page_size)
    check_child(parent, child, computed, child.request_id in allocator._rows or child.request_id in allocator._pins)
    _check_window(allocator, row, computed)
    ahead = parent.num_computed_tokens > row.committed or written > computed
    being_written = rest > 0 and (row.published > full or ahead)
    if being_written and not _has_page(allocator, child):
        return None
    duplicates = _publish(allocator, row, written)
    num_pages = full if being_written or not rest else full + 1
    new = allocator._store.share(row, child, num_pages, min(row.published, full))
    new.held, new.committed = True, computed
    new.granted = row.granted = computed
    allocator._rows[child.request_id] = new
    start_child(child, computed)
    if rest and not being_written:
        allocator._open[parent.request_id] = allocator._open[child.request_id] = full
    copies, evicted = _copy(allocator, new, row.pages[full]) if being_written else ((), ())
    allocator._wasted += len(new.pages) * allocator.page_size - computed
    if allocator.events.enabled:
        allocator.events.add(EventKind.FORK, child.request_id, filter(None, new.pages[:num_pages]), parent.request_id)
    commit = Commit(parent, duplicates=duplicates) if duplicates else row.nothing_published()
    return Fork(parent, child, copies, commit, evicted)


def _check_window(allocator: BlockAllocator, row: Row, computed: int) -> None:
    """Raise ValueError when a child of `computed` tokens still sees what the parent's window has left behind."""
    window, size = allocator.design.sliding_window, allocator.page_size
    if window is not None and PADDING_PAGE in row.pages[max(computed - window + 1, 0) // size : -(-computed // size)]:
        raise ValueError(
            f"num_tokens: expected more than {computed}: request {row.seq.request_id!r} has left pages behind its "
            f"window of {window} tokens that a child of so few would still see"
        )


def prepare_write(allocator: BlockAllocator, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
    """A page of its own in place of the open page, if [start, end) touches it and others hold it. O(1).

    It is published as far as a reserve was granted: what one would refuse is never written.
    """
    row = _live_row(allocator, seq)
    check_range(seq, start, end)
    position = allocator._open.get(seq.request_id)
    if position is None or not start // allocator.page_size <= position < -(-end // allocator.page_size):
        return []
    copies: tuple[PageCopy, ...] = ()
    if allocator._store.num_holders(row.pages[position]) > 1:
        if not _has_page(allocator, seq):
            return None
        copies, _ = _copy(allocator, row, row.pages[position], position)
    del allocator._open[seq.request_id]
    _publish(allocator, row, min(end, row.granted))
    return list(copies)


def check_written(allocator: BlockAllocator, row: Row, num_tokens: int) -> None:
    """Raise ValueError when `num_tokens` tokens cannot have been written without harm to the others."""
    if num_tokens <= row.committed or block_publish.first_open(allocator, row) is None:
        return
    raise ValueError(
        f"request {row.seq.request_id!r}: commits {num_tokens} tokens, of which those from {row.committed} on lie in a "
        "page that a fork shares; call prepare_write before writing"
    )


def open_problems(allocator: BlockAllocator) -> Iterator[str]:
    """Every page that is shared and not full must be known to be open, and no other."""
    rows, size = allocator._rows, allocator.page_size
    for name in allocator._open.keys() - rows.keys():
        yield f"request {name!r} is not live and has an open page"
    for name, row in rows.items():
        position, last = allocator._open.get(name), row.committed // size
        if position is not None and (row.published > position or position != last or position >= len(row.pages)):
            yield f"request {name!r}: its open page {position} is published, or is not where it writes next"
        shared = last < len(row.pages) and last >= row.published and row.pages[last]
        if shared and position is None and allocator._store.num_holders(shared) > 1:
            yield f"request {name!r} writes page {shared} next, which others hold"


def _live_row(allocator: BlockAllocator, seq: Sequence) -> Row:
    row = allocator._rows.get(seq.request_id)
    if row is None or row.seq is not seq:
        raise ValueError(f"request {seq.request_id!r} is not live: reserve before it forks or writes")
    row.leave_batch()
    return row


def _has_page(allocator: BlockAllocator, seq: Sequence) -> bool:
    store = allocator._store
    unheld = [row for row in allocator._pins.values() if not row.held]
    if store.queued - (store.num_idle(unheld) if unheld else 0) > 0:
        return True
    if allocator.events.enabled:
        allocator.events.add(EventKind.REFUSE, seq.request_id, (), "copy: needs 1 page, 0 free or evictable")
    return False


def _copy(
    allocator: BlockAllocator, row: Row, source: int, position: int | None = None
) -> tuple[tuple[PageCopy, ...], PageIds]:
    """A new page for a copy of `source`: in place of the one at `position`, or at the end of the row."""
    if allocator._pins:
        allocator._hold_pins([])
    store = allocator._store
    taken, evicted = store.take(row, 1)
    if position is not None:
        store.replace(row, position, row.pages.pop())
    if allocator.events.enabled:
        name = row.seq.request_id
        if evicted:
            allocator.events.add(EventKind.EVICT, name, evicted, "capacity")
        allocator.events.add(EventKind.RESERVE, name, taken)
        allocator.events.add(EventKind.COPY, name, (source, taken[0]))
    return (PageCopy(source, taken[0]),), evicted


def _publish(allocator: BlockAllocator, row: Row, end: int) -> PageIds:
    duplicates: PageIds = block_publish.publish(allocator, row, end) if row.publishes else array("i")
    row.settled = block_publish.settled(allocator, row)
    return duplicates
