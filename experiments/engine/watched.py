"""An allocator that tells a watcher what it did, in order and at once: how an executor's page table keeps up.

Schedulers talk to the allocator alone. An executor that holds real KV has to know which rows changed, before the
next operation changes them again (a sequence admitted and thrown back in one step, say).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Protocol

from kvarena.allocators.forwarding import ForwardingAllocator
from kvarena.allocators.interface import (
    Commit,
    Fork,
    KVAllocator,
    PageCopy,
    Release,
    Released,
    Reservation,
    Sequence,
)


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


class WatchedAllocator(ForwardingAllocator):
    """Passes everything on to `inner`, and word of it to `watcher`."""

    def __init__(self, inner: KVAllocator, watcher: PageWatcher) -> None:
        super().__init__(inner)
        self.watcher = watcher

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        pairs = list(wants)
        reservations = self.inner.reserve(pairs)
        if reservations is None:
            self.watcher.refused([seq for seq, _ in pairs])
        else:
            self.watcher.reserved(reservations)
        return reservations

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
        copies = super().prepare_write(seq, start, end)
        if copies:
            self.watcher.unshared(seq)
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        fork = super().fork(parent, child, num_tokens)
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
