"""The steps of a decode batch whose members stay: a page for some of them, step after step, kept as columns.

While a tail is in use the device knows its rows' pages as well as the host does, so a step sends three numbers a
member, and the host writes its own rows later, many steps at once.

    computed [R] | new page or -1 [R] | its column [R]

Example, members a, b, c with 2, 1, 1 pages of 4 tokens and 7, 4, 3 tokens computed; b got page 9:

    computed 7 4 3     new page -1 9 -1     column . 1 .         then b's row has 2 pages, which `settle` writes down
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as ListLike

import numpy as np
from kvarena.allocators._rows import Index, Ints, PageRows
from kvarena.allocators.interface import Sequence

MOST_STEPS = 64  # told steps that are kept before the rows are written all the same
Told = tuple[Index, Index, bytes]  # where rows begin in the host's table, columns, pages; one each


class DecodeTail:
    """Tells and packs steps of the sequences `seqs`, whose rows both host and device know as they are now."""

    def __init__(self, host: PageRows, seqs: list[Sequence], rows: Index) -> None:
        self.host, self.seqs, self.rows = host, list(seqs), rows
        self._starts = rows * host.width
        self._counts = host.counts(rows)
        self._most = int(self._counts.max())  # no member has more pages
        self._told: list[Told] = []  # sent, and not in the host's rows yet
        self.noted: tuple[ListLike[int], array[int]] | None = None  # told since the last step that was sent

    def note(self, members: ListLike[int], page_ids: array[int]) -> bool:
        """One page more for each of `members`, ascending; False where it has to be told another way."""
        if not page_ids:
            return True
        if self._most >= self.host.width:
            self._most = int(self._counts.max())
        if self.noted is not None or self._most >= self.host.width:
            return False
        self.noted = members, page_ids
        return True

    def pack(self, buffer: Ints, computed: Index) -> int:
        """Write a step of one token each at positions `computed`; returns the longest length. 0: a member's pages do
        not reach so far, nothing has changed."""
        count, limit, size = len(self.rows), self.host.max_requests, self.host.page_size
        counts, told = (self._counts, None) if self.noted is None else self._with_noted(buffer)
        columns = computed // size if size > 1 else computed
        if b"\1" in (columns >= counts).tobytes():
            return 0
        if told is None:
            buffer[limit : limit + count] = -1
        else:
            self._counts, self.noted = counts, None
            self._most += 1
            self._told.append(told)
            if len(self._told) >= MOST_STEPS:
                self.settle()
        buffer[:count] = computed
        return int(computed.item(computed.argmax())) + 1

    def _with_noted(self, buffer: Ints) -> tuple[Index, Told]:
        """Write the noted pages; how many pages each member has with them, and what was told."""
        members, page_ids = self.noted or ((), array("i"))
        count, limit, before = len(self.rows), self.host.max_requests, self._counts
        if len(members) == count:
            buffer[limit : limit + count] = page_ids
            buffer[2 * limit : 2 * limit + count] = before
            return before + 1, (self._starts, before, page_ids.tobytes())
        some = np.array(members, dtype=np.intp)
        columns = before[some]
        buffer[limit : limit + count] = -1
        buffer[limit : limit + count][some] = page_ids
        buffer[2 * limit : 2 * limit + count][some] = columns
        counts = before.copy()
        counts[some] = columns + 1
        return counts, (self._starts[some], columns, page_ids.tobytes())

    def settle(self) -> None:
        """Write what was sent into the host's rows."""
        if self._told:
            starts, columns, pages = zip(*self._told, strict=True)
            places = np.concatenate(starts) + np.concatenate(columns)
            self.host.settle(self.rows, self._counts, places, np.frombuffer(b"".join(pages), np.int32))
            self._told.clear()
