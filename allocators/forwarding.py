"""What wrappers of an allocator have in common: everything passes on to `inner` until a wrapper says otherwise."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvarena.allocators.interface import (
    Capacity,
    Commit,
    Fork,
    Gate,
    KVAllocator,
    Match,
    PageCopy,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
    SupportsFork,
)


def forking(allocator: KVAllocator) -> SupportsFork:
    """The allocator as one that forks. Raises ValueError when its design does not."""
    if not isinstance(allocator, SupportsFork):
        raise ValueError(f"allocator {allocator.kind!r} has no fork")
    return allocator


class ForwardingAllocator(KVAllocator):
    """Decides as `inner` does. A wrapper overrides the verbs that it watches; verbs made of others (`admit`,
    `extend`, `decode_batch`) come through the wrapper, never around it."""

    def __init__(self, inner: KVAllocator) -> None:
        self.inner = inner
        self.kind = inner.kind  # type: ignore[misc]  # the class variable of whatever is inside
        self.page_size = inner.page_size
        self.num_pages = inner.num_pages
        self.events = inner.events

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        return self.inner.pin(seq, gate)

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        return self.inner.reserve(wants)

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        return self.inner.commit(done)

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        return self.inner.release(seqs, reason)

    def evict(self, num_tokens: int) -> list[int]:
        return self.inner.evict(num_tokens)

    def match(self, seq: Sequence) -> Match:
        return self.inner.match(seq)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        """As `SupportsFork.fork`. ValueError when the design has no fork."""
        return forking(self.inner).fork(parent, child, *([] if num_tokens is None else [num_tokens]))

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
        """As `SupportsFork.prepare_write`. ValueError when the design has no fork."""
        return forking(self.inner).prepare_write(seq, start, end)

    def room(self) -> tuple[int, int]:
        return self.inner.room()

    def page_ids(self, seq: Sequence) -> array[int]:
        return self.inner.page_ids(seq)

    def capacity(self) -> Capacity:
        return self.inner.capacity()

    def reset(self) -> bool:
        return self.inner.reset()

    def check(self) -> None:
        self.inner.check()
