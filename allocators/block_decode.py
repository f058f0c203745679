"""One token more for rows that decode: `reserve` without what a plain step of them never needs.

A row takes one page at most, so nothing is planned and no list is made for it. Steps that pins, forks, windows or
events have a part in, which is asked once for all rows, go the long way.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvarena.allocators import block_publish
from kvarena.allocators.block_rows import Row
from kvarena.allocators.interface import PageIds, Reservation

if TYPE_CHECKING:
    from kvarena.allocators.block import BlockAllocator


def reserve(allocator: BlockAllocator, rows: list[Row]) -> list[Reservation] | None:
    """A slot for the next token of each of these live rows, one at least, in order; all or nothing."""
    size = allocator.page_size
    spare = [len(row.pages) * size - row.seq.num_computed_tokens for row in rows]
    asks_more = allocator._pins or allocator._open or allocator._window is not None or allocator.events.enabled
    if asks_more or min(spare) < 0:
        return allocator.reserve_decodes(rows)
    num_taken = spare.count(0)
    if num_taken > allocator._store.queued:
        return None
    allocator._wasted += num_taken * size
    return [_serve(allocator, row, not slots) for row, slots in zip(rows, spare, strict=True)]


def _serve(allocator: BlockAllocator, row: Row, takes_page: bool) -> Reservation:
    seq, store = row.seq, allocator._store
    taken, evicted = store.take_one(row) if takes_page else (array("i"), ())
    duplicates: PageIds = ()
    if row.publishes:
        full = block_publish.num_full(seq, seq.num_computed_tokens + 1, allocator.page_size)
        if full > row.published:
            duplicates = store.publish(row, row.published, full)
            row.published = full
    row.settled = block_publish.settled(allocator, row)
    return Reservation(seq, taken, (), evicted, (), duplicates)
