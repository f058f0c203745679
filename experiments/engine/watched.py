"""An allocator that tells a watcher what it did, in order and at once: how an executor's page table keeps up.

Schedulers talk to the allocator alone. An executor that holds real KV has to know which rows changed, before the
next operation changes them again (a sequence admitted and thrown back in one step, say).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Protocol

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


class PageWatcher(Protocol):
    """Told after each operation that went through."""

    def reserved(self, reservations: ListLike[Reservation]) -> None: ...

    def refused(self, seqs: ListLike[Sequence]) -> None:
        """A reservation found no room; under a sliding window rows may have changed all the same."""

    def committed(self, commits: ListLike[Commit]) -> None: ...

    def released(self, seqs: ListLike[Sequence]) -> None: ...

    def forked(self, fork: Fork) -> None:
        """The caller sees to the copies."""

    def unshared(self, seq: Sequence) -> None:
        """A sequence got pages of its own for shared ones; the caller sees to the copies."""


class WatchedAllocator(KVAllocator):
    """Passes everything on to `inner`, and word of it to `watcher`."""

    def __init__(self, inner: KVAllocator, watcher: PageWatcher) -> None:
        self.inner = inner
        self.watcher = watcher
        self.kind = inner.kind  # type: ignore[misc]  # the class variable of whatever is inside
        self.page_size = inner.page_size
        self.num_pages = inner.num_pages
        self.events = inner.events

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        return self.inner.pin(seq, gate)

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        pairs = list(wants)
        reservations = self.inner.reserve(pairs)
        if reservations is None:
            self.watcher.refused([seq for seq, _ in pairs])
        else:
            self.watcher.reserved(reservations)
        return reservations

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
        """As `SupportsFork.prepare_write`. ValueError when the design has no fork."""
        copies = forking(self.inner).prepare_write(seq, start, end)
        if copies:
            self.watcher.unshared(seq)
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        """As `SupportsFork.fork`. ValueError when the design has no fork."""
        fork = forking(self.inner).fork(parent, child, *([] if num_tokens is None else [num_tokens]))
        if fork is not None:
            self.watcher.forked(fork)
        return fork

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        commits = self.inner.commit(done)
        self.watcher.committed(commits)
        return commits

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        gone = list(seqs)
        released = self.inner.release(gone, reason)
        self.watcher.released(gone)
        return released

    def evict(self, num_tokens: int) -> list[int]:
        return self.inner.evict(num_tokens)

    def match(self, seq: Sequence) -> Match:
        return self.inner.match(seq)

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
