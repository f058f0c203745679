"""What the block design lets serve hits: full pages whose tokens are known, from the time their slots are reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarena.allocators.block_rows import Row
from kvarena.allocators.interface import EventKind, PageIds, Sequence

if TYPE_CHECKING:
    from kvarena.allocators.block import BlockAllocator


def publish(allocator: BlockAllocator, row: Row, end: int) -> PageIds:
    """Offer the full pages of tokens [0, end) that are known to the cache; returns the duplicates among them."""
    seq = row.seq
    full = num_full(seq, end, allocator.page_size)
    start = row.published
    if allocator._open and (shared := first_open(allocator, row)) is not None:
        full = min(full, shared)
    if full <= start:
        return ()
    if allocator._window is None:
        duplicates = _publish_pages(allocator, row, start, full)
    else:
        duplicates = tuple(
            page
            for position in range(start, full)
            if row.pages[position] and allocator._window.retains(position, seq.num_prompt_tokens)
            for page in _publish_pages(allocator, row, position, position + 1)
        )
    row.published = full
    return duplicates


def num_full(seq: Sequence, end: int, page_size: int) -> int:
    """Full pages of tokens [0, end) whose text is known."""
    known = seq.num_tokens
    full = (end if end < known else known) // page_size
    return full if seq.page_hashes is None else min(full, len(seq.page_hashes))


def first_open(allocator: BlockAllocator, row: Row) -> int | None:
    """Position of the page of a fork that must not be published or written yet, since others hold it."""
    position = allocator._open.get(row.seq.request_id)
    if position is not None and allocator._store.num_holders(row.pages[position]) == 1:
        del allocator._open[row.seq.request_id]
        return None
    return position


def _publish_pages(allocator: BlockAllocator, row: Row, start: int, end: int) -> PageIds:
    duplicates = allocator._store.publish(row, start, end)
    if allocator.events.enabled:
        allocator.events.add(EventKind.PUBLISH, row.seq.request_id, row.pages[start:end])
        if duplicates:
            allocator.events.add(EventKind.DUPLICATE, row.seq.request_id, duplicates)
    return duplicates


def settled(allocator: BlockAllocator, row: Row) -> int:
    """Tokens up to which a `reserve` for this row finds nothing to do: no page to take, publish or drop."""
    if allocator._window is not None:
        return 0
    num_pages, size = len(row.pages), allocator.page_size
    return (row.published + 1) * size - 1 if row.publishes and row.published < num_pages else num_pages * size


def unpublish(allocator: BlockAllocator, row: Row) -> PageIds:
    """Take back what an aborted row published and never wrote; returns those pages."""
    start = max(row.adopted, row.committed // allocator.page_size)
    if start >= row.published:
        return ()
    if allocator._pins:  # a pin may name these pages: hold them before they lose their content
        allocator._hold_pins([])
    dropped = allocator._store.unpublish(row, start)
    if dropped and allocator.events.enabled:
        allocator.events.add(EventKind.EVICT, row.seq.request_id, dropped, "abort")
    return dropped
