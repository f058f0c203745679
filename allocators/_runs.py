"""Free runs of consecutive pages, placed by first fit or by the buddy rule. Pages are numbered from 1.

Both keep their free space canonical (neighbours joined at once), so freeing what was taken restores it exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

from kvarena.allocators.interface import AllocatorError
from sortedcontainers import SortedDict, SortedList

Run = tuple[int, int]  # first page, pages


class FreeRuns(ABC):
    """The free pages of a pool, as runs."""

    free_pages: int

    @abstractmethod
    def place(self, num_pages: int) -> Run | None:
        """Take a run of at least `num_pages`; None when no free run is long enough."""

    @abstractmethod
    def grow(self, run: Run, num_pages: int) -> Run | None:
        """Lengthen a taken run where it lies to at least `num_pages`; None when what follows it is not free."""

    @abstractmethod
    def give(self, run: Run) -> None:
        """Give back a run, or the end of one."""

    @abstractmethod
    def largest(self) -> int:
        """Pages of the longest run that `place` can hand out."""

    @abstractmethod
    def runs(self) -> list[Run]:
        """All free runs by first page."""

    @abstractmethod
    def check(self) -> None:
        """Raise AllocatorError when a run should have been joined with another, or lies where it must not."""


class FirstFit(FreeRuns):
    """The lowest free run that is long enough, cut to what was asked. `place` costs O(free runs).

    >>> free = FirstFit(10)
    >>> free.place(4), free.place(2), free.give((1, 4)), free.place(3), free.runs()
    ((1, 4), (5, 2), None, (1, 3), [(4, 1), (7, 4)])
    """

    def __init__(self, num_pages: int) -> None:
        self.free_pages = 0
        self._lengths: SortedDict[int, int] = SortedDict()  # first page -> pages
        self.give((1, num_pages))

    def place(self, num_pages: int) -> Run | None:
        for start, length in self._lengths.items():
            if length >= num_pages:
                self._cut(start, num_pages)
                return start, num_pages
        return None

    def grow(self, run: Run, num_pages: int) -> Run | None:
        start, length = run
        more = num_pages - length
        if self._lengths.get(start + length, 0) < more:
            return None
        self._cut(start + length, more)
        return start, num_pages

    def _cut(self, start: int, num_pages: int) -> None:
        rest = self._lengths.pop(start) - num_pages
        if rest:
            self._lengths[start + num_pages] = rest
        self.free_pages -= num_pages

    def give(self, run: Run) -> None:
        start, length = run
        self.free_pages += length
        length += self._lengths.pop(start + length, 0)
        at = self._lengths.bisect_left(start) - 1
        if at >= 0:
            before, pages = self._lengths.peekitem(at)
            if before + pages == start:
                self._lengths[before] = pages + length
                return
        self._lengths[start] = length

    def largest(self) -> int:
        return max(self._lengths.values(), default=0)

    def runs(self) -> list[Run]:
        return list(self._lengths.items())

    def check(self) -> None:
        runs = self.runs()
        for (start, length), (following, _) in pairwise(runs):
            if start + length >= following:
                raise AllocatorError(f"free runs {runs}: {start}..{start + length - 1} touches {following}")


class Buddy(FreeRuns):
    """Runs of 2^k pages at multiples of 2^k, split in halves and joined with their other half. O(log pages).

    A request for n pages takes the next power of two. A pool that is no power of two starts as several runs.

    >>> free = Buddy(8)
    >>> free.place(3), free.place(1), free.runs()
    ((1, 4), (5, 1), [(6, 1), (7, 2)])
    >>> free.give((5, 1)), free.runs()
    (None, [(5, 4)])
    """

    def __init__(self, num_pages: int) -> None:
        self.free_pages = 0
        self._starts: list[SortedList[int]] = [SortedList() for _ in range(num_pages.bit_length())]
        self.give((1, num_pages))

    def place(self, num_pages: int) -> Run | None:
        order = (num_pages - 1).bit_length()
        found = next((k for k in range(order, len(self._starts)) if self._starts[k]), None)
        if found is None:
            return None
        start = self._starts[found].pop(0)
        for k in range(found - 1, order - 1, -1):
            self._starts[k].add(start + (1 << k))
        self.free_pages -= 1 << order
        return start, 1 << order

    def grow(self, run: Run, num_pages: int) -> Run | None:
        start, length = run
        order = length.bit_length() - 1
        wanted = (num_pages - 1).bit_length()
        halves = [(k, start + (1 << k)) for k in range(order, wanted)]
        if any((start - 1) >> k & 1 or k >= len(self._starts) or at not in self._starts[k] for k, at in halves):
            return None
        for k, at in halves:
            self._starts[k].remove(at)
            self.free_pages -= 1 << k
        return start, 1 << wanted

    def give(self, run: Run) -> None:
        start, length = run[0] - 1, run[1]
        self.free_pages += length
        while length:
            order = length.bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._join(start + 1, order)
            start, length = start + (1 << order), length - (1 << order)

    def _join(self, start: int, order: int) -> None:
        while order + 1 < len(self._starts):
            other = ((start - 1) ^ (1 << order)) + 1
            if other not in self._starts[order]:
                break
            self._starts[order].remove(other)
            start, order = min(start, other), order + 1
        self._starts[order].add(start)

    def largest(self) -> int:
        return max((1 << k for k, starts in enumerate(self._starts) if starts), default=0)

    def runs(self) -> list[Run]:
        return sorted((start, 1 << k) for k, starts in enumerate(self._starts) for start in starts)

    def check(self) -> None:
        for k, starts in enumerate(self._starts):
            for start in starts:
                if (start - 1) % (1 << k):
                    raise AllocatorError(f"free run of {1 << k} pages at page {start}: not at a multiple")
                if k + 1 < len(self._starts) and ((start - 1) ^ (1 << k)) + 1 in starts:
                    raise AllocatorError(f"free run of {1 << k} pages at page {start}: its other half is free too")
