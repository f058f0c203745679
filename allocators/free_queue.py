"""The free queue of the block design: which page is taken next, and by the same order which content goes first.

A doubly linked list over page ids in two lists, closed by page 0, which never stands in it. Pages without content
return to the head and are taken first; cached ones return to the tail, so the head side of them is the least recently
released. Removal anywhere costs O(1). A page that leaves follows nobody any more, which tells it from those inside.

Lists and not arrays of int32: an array makes a new int at every read, which costs four times as much as the link
itself. Both lists share one int object a page, and callers that hand back the objects they were given keep it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

END = 0


class FreeQueue:
    """Page ids 1..num_pages in order, all of them at the start.

    >>> queue = FreeQueue(5)
    >>> queue.take(2), queue.remove([4])
    ([1, 2], None)
    >>> queue.prepend([2, 1]); queue.append([4]); list(queue)
    [2, 1, 3, 5, 4]
    """

    __slots__ = ("_next", "_previous", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages  # pages in the queue now
        pages = list(range(num_pages + 1))
        # None behind a page: it does not stand in the queue.
        self._next: list[Any] = pages[1:] + [END]  # noqa: RUF005  (a display leaves room to grow, which this never does)
        self._previous = pages[-1:] + pages[:-1]

    def __len__(self) -> int:
        return self.num_pages

    def __iter__(self) -> Iterator[int]:
        """Head first. The queue must not change meanwhile."""
        page = self._next[END]
        while page != END:
            yield page
            page = self._next[page]

    def __contains__(self, page: int) -> bool:
        return page != END and self._next[page] is not None

    def inside(self, pages: Sequence[int]) -> list[int]:
        """Those of `pages` that stand in the queue."""
        following = self._next
        return [page for page in pages if following[page] is not None and page]  # END is 0

    def outside(self, pages: Sequence[int]) -> list[int]:
        """Those of `pages` that do not; page 0 is of neither kind."""
        following = self._next
        return [page for page in pages if following[page] is None]

    def take(self, count: int) -> list[int]:
        """Unlink the first `count` pages, which must be there."""
        following, page = self._next, END
        pages = [page := following[page] for _ in range(count)]
        head = following[page]
        for taken in pages:  # the walk's own name is a cell, which costs more
            following[taken] = None
        following[END] = head
        self._previous[head] = END
        self.num_pages -= count
        return pages

    def take_one(self) -> int:
        """`take(1)`, as decode steps ask for it: the page itself."""
        following = self._next
        page = following[END]
        following[END] = head = following[page]
        following[page] = None
        self._previous[head] = END
        self.num_pages -= 1
        return page

    def remove(self, pages: Sequence[int]) -> None:
        """Unlink pages that stand anywhere in the queue."""
        following, previous = self._next, self._previous
        for page in pages:
            before, after = previous[page], following[page]
            following[before] = after
            previous[after] = before
            following[page] = None
        self.num_pages -= len(pages)

    def append(self, pages: Sequence[int]) -> None:
        """Put pages at the tail, in order."""
        self._link(self._previous[END], pages, END)

    def prepend(self, pages: Sequence[int]) -> None:
        """Put pages at the head as one run: the first of them becomes the head."""
        self._link(END, pages, self._next[END])

    def _link(self, before: int, pages: Sequence[int], after: int) -> None:
        following, previous = self._next, self._previous
        for page in pages:
            following[before] = page
            previous[page] = before
            before = page
        following[before] = after
        previous[after] = before
        self.num_pages += len(pages)

    def problems(self) -> list[str]:
        """What is broken in the links or the count; empty when sound. Terminates on any list."""
        seen: set[int] = set()
        before, page = END, self._next[END]
        while page != END:
            if page in seen:
                return [f"page {page} stands in the queue twice"]
            if self._previous[page] != before:
                return [f"page {page} follows page {before} in the queue, but names page {self._previous[page]}"]
            seen.add(page)
            before, page = page, self._next[page]
        if self._previous[END] != before:
            return [f"the queue ends with page {before}, but names page {self._previous[END]} as its tail"]
        inside = self.inside(range(len(self._next)))
        if len(inside) != len(seen):
            return [f"pages {sorted(seen.symmetric_difference(inside))} have a follower and are not in the queue"]
        return [] if len(seen) == self.num_pages else [f"the queue counts {self.num_pages} pages and holds {len(seen)}"]
