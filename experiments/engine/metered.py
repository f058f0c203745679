"""An allocator that counts what passes through it: time of each verb, pages evicted, duplicates."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

from kvarena.allocators.forwarding import ForwardingAllocator
from kvarena.allocators.interface import (
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
)

VERBS = ("pin", "reserve", "commit", "release", "evict", "match", "fork", "prepare_write")


class MeteredAllocator(ForwardingAllocator):
    """Passes everything on to `inner`.

    nanoseconds     verb -> wall time of each call; total_ns: of all calls so far
    evicted_pages   pages whose content was dropped for room, so far
    duplicate_pages pages given up for, or kept beside, equal ones, so far
    """

    def __init__(self, inner: KVAllocator) -> None:
        super().__init__(inner)
        self.nanoseconds: dict[str, array[int]] = {verb: array("q") for verb in VERBS}
        self.total_ns = 0
        self.evicted_pages = 0
        self.duplicate_pages = 0

    def _took(self, verb: str, start: int) -> None:
        passed = time.perf_counter_ns() - start
        self.nanoseconds[verb].append(passed)
        self.total_ns += passed

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        start = time.perf_counter_ns()
        pin = self.inner.pin(seq, gate)
        self._took("pin", start)
        return pin

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        start = time.perf_counter_ns()
        reservations = self.inner.reserve(wants)
        self._took("reserve", start)
        for reservation in reservations or ():
            if reservation.evicted:
                self.evicted_pages += len(reservation.evicted)
            if reservation.duplicates:
                self.duplicate_pages += len(reservation.duplicates)
        return reservations

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        start = time.perf_counter_ns()
        commits = self.inner.commit(done)
        self._took("commit", start)
        for commit in commits:
            if commit.duplicates:
                self.duplicate_pages += len(commit.duplicates)
        return commits

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        start = time.perf_counter_ns()
        released = self.inner.release(seqs, reason)
        self._took("release", start)
        self.duplicate_pages += len(released.duplicates)
        return released

    def evict(self, num_tokens: int) -> list[int]:
        start = time.perf_counter_ns()
        evicted = self.inner.evict(num_tokens)
        self._took("evict", start)
        self.evicted_pages += len(evicted)
        return evicted

    def match(self, seq: Sequence) -> Match:
        start = time.perf_counter_ns()
        match = self.inner.match(seq)
        self._took("match", start)
        return match

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        start = time.perf_counter_ns()
        fork = super().fork(parent, child, num_tokens)
        self._took("fork", start)
        if fork is not None:
            self.evicted_pages += len(fork.evicted)
            self.duplicate_pages += 0 if fork.commit is None else len(fork.commit.duplicates)
        return fork

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
        began = time.perf_counter_ns()
        copies = super().prepare_write(seq, start, end)
        self._took("prepare_write", began)
        return copies
