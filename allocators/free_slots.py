"""The free pages of the token design, in the order in which SGLang 0.5.22 hands them out again.

Pages are taken from the front. Where freed ones go depends on the page size:

    page_size 1    behind all others: a queue           free [5, 9]  ->  front  1 2 3 5 9
    page_size > 1  before all others, order kept        free [5, 9]  ->  front  5 9 1 2 3
    need_sort      aside, until a merge sorts all ids ascending (prefill/decode disaggregation)

Neither copies the list: the queue moves a mark, the stack grows at its end. Ids that were never taken are two
numbers, so a pool of any size is built at once; they are written out a block at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

TRIM = 1024  # taken ids at the head of the queue before it is moved up
BLOCK = 16_384  # fresh ids written out at once: NumPy takes two microseconds for a few and five for these


class _Queue:
    """First in, first out."""

    __slots__ = ("head", "ids")

    def __init__(self) -> None:
        self.ids = array("i")
        self.head = 0

    def put(self, run: array[int]) -> None:
        self.ids.extend(run)

    def take(self, n: int) -> array[int]:
        head = self.head
        taken = self.ids[head : head + n]
        self.head = head = head + len(taken)
        # Moving up only when half is spent makes the cost of a taken id constant.
        if head > TRIM and 2 * head > len(self.ids):
            del self.ids[:head]
            self.head = 0
        return taken

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids[self.head :])


class _Stack:
    """Batches, last in first out, each in its own order: the ids lie back to front."""

    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids = array("i")

    def put(self, run: array[int]) -> None:
        self.ids.extend(run[::-1])

    def take(self, n: int) -> array[int]:
        ids = self.ids
        start = max(len(ids) - n, 0)
        taken = ids[start:]
        del ids[start:]
        return taken[::-1]

    def __iter__(self) -> Iterator[int]:
        return reversed(self.ids)


class FreePages:
    """Ids 1..num_pages that nobody owns.

    count  free pages, waiting ones included
    fifo   the order of page_size 1

    Cost of every verb: O(ids moved), plus the sort of a merge.
    """

    __slots__ = ("_block", "_block_start", "_fresh", "_returned", "_waiting", "count", "fifo", "need_sort", "num_pages")

    def __init__(self, num_pages: int, *, fifo: bool, need_sort: bool = False) -> None:
        self.num_pages = num_pages
        self.fifo = fifo
        self.need_sort = need_sort
        self._block, self._block_start = array("i"), 1  # a stretch of fresh ids, written out
        self.clear()

    def clear(self) -> None:
        """All pages free, ascending."""
        self._fresh = 1  # ids from here to num_pages were never taken; they stand where the first list stood
        if self._block_start > 1:  # the first stretch is written out once
            self._block, self._block_start = array("i"), 1
        self._returned: _Queue | _Stack = _Queue() if self.fifo else _Stack()
        self.count = self.num_pages
        self._waiting = array("i")

    @property
    def num_ready(self) -> int:
        """Pages that can be taken without a merge."""
        return self.count - len(self._waiting)

    def take(self, n: int) -> array[int]:
        """The first n ids; the caller has tested that n <= count."""
        if self._waiting and n > self.num_ready:
            self.merge()
        self.count -= n
        fresh_first = self.fifo and self._fresh <= self.num_pages
        taken = self._take_fresh(n) if fresh_first else self._returned.take(n)
        if len(taken) < n:
            rest = n - len(taken)
            taken += self._returned.take(rest) if fresh_first else self._take_fresh(rest)
        return taken

    def free(self, run: array[int]) -> None:
        """Give back a run in one call. A free group is one call: its runs joined in order."""
        self.count += len(run)
        if self.need_sort:
            self._waiting += run
        else:
            self._returned.put(run)

    def free_each(self, run: array[int]) -> None:
        """Give back the pages of a run in order, each in a call of its own."""
        self.free(run if self.fifo or self.need_sort else run[::-1])

    def merge(self) -> None:
        """Sort ready and waiting pages together, ascending. O(n log n), only with need_sort."""
        if not self._waiting:
            return
        merged = array("i", sorted(self))
        self._returned = _Queue() if self.fifo else _Stack()
        self._returned.put(merged)
        self._fresh, self._waiting = self.num_pages + 1, array("i")

    def __iter__(self) -> Iterator[int]:
        """All ids in the order in which they would be taken, waiting ones last."""
        fresh = range(self._fresh, self.num_pages + 1)
        for part in (fresh, self._returned) if self.fifo else (self._returned, fresh):
            yield from part
        yield from self._waiting

    def _take_fresh(self, n: int) -> array[int]:
        start = self._fresh
        self._fresh = end = min(start + n, self.num_pages + 1)
        if end > self._block_start + len(self._block):
            stop = min(start + max(n, BLOCK), self.num_pages + 1)
            self._block, self._block_start = array("i"), start
            self._block.frombytes(np.arange(start, stop, dtype=np.int32).view(np.uint8).data)
        return self._block[start - self._block_start : end - self._block_start]
