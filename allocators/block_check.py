"""Verification and display of a `BlockAllocator`: recompute everything, and say what does not add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarena.allocators.block import BlockAllocator
    from kvarena.allocators.block_rows import Row

SHOWN = 64  # entries of a list that a display shows


def problems(allocator: BlockAllocator) -> list[str]:
    """Broken invariants as sentences; empty when sound. O(pages + hashed tokens)."""
    found = allocator._queue.problems()
    if found:  # the links cannot be walked
        return found
    return [
        *_state_problems(allocator),
        *_row_problems(allocator),
        *_counter_problems(allocator),
        *allocator._index.problems(),
    ]


def _held_rows(allocator: BlockAllocator) -> list[Row]:
    return [*allocator._rows.values(), *(row for row in allocator._pins.values() if row.held)]


def _holders(allocator: BlockAllocator) -> Counter[int]:
    return Counter(page for row in _held_rows(allocator) for page in row.pages if page)


def _state_problems(allocator: BlockAllocator) -> Iterable[str]:
    holders, queued, refs = _holders(allocator), set(allocator._queue), allocator._refs
    for page in range(1, allocator.num_pages + 1):
        if refs[page] != holders[page]:
            yield f"page {page}: ref count is {refs[page]}, {holders[page]} rows name it"
        if page in queued and refs[page]:
            yield f"page {page} is in two states: in the free queue with ref count {refs[page]}"
        if page in queued and holders[page]:
            yield f"page {page} is named by a live row and stands in the free queue"
        if page not in queued and not holders[page]:
            yield f"page {page} is leaked: no row names it and it is not in the free queue"
    for page in {page for page in (*holders, *queued) if not 1 <= page <= allocator.num_pages}:
        yield f"page {page} does not exist: ids run from 1 to {allocator.num_pages}"
    if allocator._index.keys[0] is not None:
        yield "the padding page has a key"


def _row_problems(allocator: BlockAllocator) -> Iterable[str]:
    size, window = allocator.page_size, allocator.design.sliding_window
    for request_id, row in allocator._rows.items():
        if request_id in allocator._pins:
            yield f"request {request_id!r} is pinned and live"
        if not row.adopted <= row.published <= len(row.pages) or not 0 <= row.committed <= len(row.pages) * size:
            yield (
                f"request {request_id!r}: {row.adopted} adopted, {row.published} published, {row.committed} tokens "
                f"committed do not fit {len(row.pages)} pages"
            )
        if window is None and 0 in row.pages:
            yield f"request {request_id!r}: a page left the row without a window"
        if row.chain is not None:
            yield from _text_problems(allocator, row)


def _text_problems(allocator: BlockAllocator, row: Row) -> Iterable[str]:
    chain, keys = row.chain, allocator._index.keys
    if chain is None or len(chain.keys) < row.published:
        yield f"request {row.seq.request_id!r}: {row.published} pages published, fewer hashed"
        return
    if not chain.fits(row.seq.token_ids, row.seq.namespace, row.seq.extra_keys):
        yield f"request {row.seq.request_id!r}: its tokens are not those that were hashed"
    dense = allocator.design.sliding_window is None
    for position, page in enumerate(row.pages):
        if not 1 <= page <= allocator.num_pages:
            continue
        expected = chain.keys[position] if position < row.published else None
        if keys[page] != expected and (dense or keys[page] is not None):
            yield f"request {row.seq.request_id!r}: page {page} at position {position} serves other content"


def _counter_problems(allocator: BlockAllocator) -> Iterable[str]:
    keys, size = allocator._index.keys, allocator.page_size
    evictable = sum(keys[page] is not None for page in allocator._queue)
    if allocator._evictable != evictable:
        yield f"evictable is {allocator._evictable}, {evictable} pages of the free queue have a key"
    shared = sum(count > 1 for count in _holders(allocator).values())
    if allocator._shared != shared:
        yield f"shared is {allocator._shared}, counted {shared}"
    wasted = sum(len(row.pages) * size - row.committed for row in allocator._rows.values())
    if allocator._wasted != wasted:
        yield f"wasted slots are {allocator._wasted}, counted {wasted}"


def describe(allocator: BlockAllocator) -> str:
    """Counts, rows and queue as text, long lists cut; * marks a cached page, (n) one that n rows hold."""
    room = allocator.capacity()
    lines = [
        f"BlockAllocator: {room.num_pages} pages x {room.page_size} tokens, {room.free} free, "
        f"{room.evictable} evictable, {room.in_use} in use"
    ]
    for title, rows in (("row", allocator._rows), ("pin", allocator._pins)):
        for request_id, row in list(rows.items())[:SHOWN]:
            tokens = f"{row.committed}/{len(row.pages) * room.page_size} tokens"
            lines.append(f"  {title} {request_id}: {_pages(allocator, row.pages)} ({tokens})")
        if len(rows) > SHOWN:
            lines.append(f"  ... {len(rows) - SHOWN} more")
    lines.append(f"  queue, head first: {_pages(allocator, allocator._queue)}")
    return "\n".join(lines)


def _pages(allocator: BlockAllocator, pages: Iterable[int]) -> str:
    shown: list[str] = []
    for count, page in enumerate(pages):
        if count == SHOWN or not 0 <= page <= allocator.num_pages:
            return " ".join([*shown, "..."])
        cached = "*" if allocator._index.keys[page] is not None else ""
        refs = allocator._refs[page]
        shown.append(f"{page}{cached}" + (f"({refs})" if refs > 1 else ""))
    return " ".join(shown) or "empty"
