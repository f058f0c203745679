"""Verification and display of a `BlockAllocator`. What its pages must satisfy is with the form that keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from kvarena.allocators.block_fork import open_problems

if TYPE_CHECKING:
    from kvarena.allocators.block import BlockAllocator

SHOWN = 64  # entries of a list that a display shows


def problems(allocator: BlockAllocator) -> list[str]:
    """Broken invariants as sentences, everything recomputed from rows, queue and texts; empty when sound."""
    rows, pins = list(allocator._rows.values()), list(allocator._pins.values())
    found = [*allocator._store.problems(rows, pins), *_row_problems(allocator)]
    return found or list(open_problems(allocator))  # the last look up pages, which must be sound


def _row_problems(allocator: BlockAllocator) -> Iterator[str]:
    size = allocator.page_size
    for name, row in allocator._rows.items():
        if name in allocator._pins:
            yield f"request {name!r} is pinned and live"
        if not row.adopted <= row.published <= len(row.pages) or not 0 <= row.committed <= len(row.pages) * size:
            yield (
                f"request {name!r}: {row.adopted} adopted, {row.published} published, {row.committed} tokens "
                f"committed do not fit {len(row.pages)} pages"
            )
        if allocator.design.sliding_window is None and 0 in row.pages:
            yield f"request {name!r}: a page left the row without a window"
    wasted = sum(len(row.pages) * size - row.committed for row in allocator._rows.values())
    if allocator._wasted != wasted:
        yield f"wasted slots are {allocator._wasted}, counted {wasted}"


def describe(allocator: BlockAllocator) -> str:
    """Counts, rows and queue, long lists cut; * marks a page that serves hits, (n) one that n rows hold."""
    room = allocator.capacity()
    lines = [
        f"BlockAllocator: {room.num_pages} pages x {room.page_size} tokens, {room.free} free, "
        f"{room.evictable} evictable, {room.in_use} in use"
    ]
    marks = allocator._store.marks([*allocator._rows.values(), *allocator._pins.values()])
    for title, rows in (("row", allocator._rows), ("pin", allocator._pins)):
        for name, row in islice(rows.items(), SHOWN):
            tokens = f"{row.committed}/{len(row.pages) * room.page_size} tokens"
            lines.append(f"  {title} {name}: {_listed(row.pages, marks)} ({tokens})")
        if len(rows) > SHOWN:
            lines.append(f"  ... {len(rows) - SHOWN} more")
    lines.append(f"  queue, head first: {_listed(allocator._store.queue(), marks)}")
    return "\n".join(lines)


def _listed(pages: Iterable[int], marks: Mapping[int, str]) -> str:
    shown = [f"{page}{marks.get(page, '')}" for page in islice(pages, SHOWN + 1)]
    return " ".join([*shown[:SHOWN], "..."] if len(shown) > SHOWN else shown) or "empty"
