"""Is there room? The gate between match and reservation, and the demand of one `reserve`, by the rules of vLLM 0.32.0.

Both count pages that pins hold although they were not touched yet: they stand in the queue and cannot be taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarena.allocators.block_rows import Plan, Row
from kvarena.allocators.interface import EventKind, Gate

if TYPE_CHECKING:
    from kvarena.allocators.block import BlockAllocator


def fits(allocator: BlockAllocator, row: Row, gate: Gate) -> bool:
    """Does the prompt behind a pin fit, with its hits held? O(hits) where room is scarce, else O(1)."""
    queued, num_tokens = allocator._store.queued, row.seq.num_prefill_tokens
    num_pages = -(-num_tokens // allocator.page_size)
    if gate.page_rounded and num_pages + gate.headroom < queued:  # it would even if no hit were held already
        return True
    idle = allocator._store.num_idle([row])
    if gate.page_rounded:
        need = num_pages - row.adopted + idle
        if allocator._window is not None:
            need = min(need, allocator._window.admission_cap(gate, need))
        need, room = need + gate.headroom, queued
    else:
        need, room = num_tokens - row.committed + gate.headroom, (queued - idle) * allocator.page_size
    admitted = need < room if gate.strict else need <= room
    if not admitted and allocator.events.enabled:
        allocator.events.add(EventKind.REFUSE, row.seq.request_id, (), f"gate: needs {need}, has {room}")
    return admitted


def num_served(allocator: BlockAllocator, work: list[Plan]) -> int:
    """How many plans fit, in order. Counts the pages that pins hold and that windows free on the way."""
    asked = 0
    for plan in work:
        asked += plan.take if plan.row.held else plan.take + plan.row.headroom
    for row in allocator._pins.values():
        asked += 0 if row.held else len(row.pages)
    room = allocator._store.queued
    if asked <= room:
        return len(work)
    unheld = [row for row in allocator._pins.values() if not row.held]
    if unheld:
        room -= allocator._store.num_idle(unheld)
    dropped: dict[int, int] = {}
    for number, plan in enumerate(work):
        for page in plan.row.pages[plan.low : plan.high] if plan.low < plan.high else ():
            dropped[page] = dropped.get(page, 0) + 1
            room += dropped[page] == allocator._store.num_holders(page) + sum(page in row.pages for row in unheld)
        if plan.take + (0 if plan.row.held else plan.row.headroom) > room:
            return number
        room -= plan.take
    return len(work)
