"""The token design's decode batch: the members' lengths as arrays, their rows bound once.

At page size 1 every member takes a page in every step. Such a step is kept as it was taken, a column of pages, and the
columns are written into the rows together: when another verb looks at a row, or after `MOST_COLUMNS` steps.

    row of a   [ 4 5 6 |            the columns 9 12 and 10 13, taken in two steps, become
    row of b   [ 7 8   |            row of a [ 4 5 6 9 10, row of b [ 7 8 12 13
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from kvarena.allocators.decode_batch import DecodeBatch, StepReservation
from kvarena.allocators.interface import EventKind, Sequence

if TYPE_CHECKING:
    from kvarena.allocators.token import TokenAllocator


MOST_COLUMNS = 64  # steps after which the rows are written all the same


class TokenDecodeBatch(DecodeBatch):
    """Decides as `TokenAllocator.reserve` for a list of decodes.

    `stale` is set by the allocator when another verb touches a member; the next step then binds the rows anew.
    """

    allocator: TokenAllocator

    def __init__(self, allocator: TokenAllocator, seqs: Iterable[Sequence]) -> None:
        super().__init__(allocator, seqs)
        self._bind()

    def _bind(self) -> None:
        allocator = self.allocator
        rows = [allocator.bind(seq, self) for seq in self.seqs]
        self._page_ids = [row.page_ids for row in rows]
        self._columns: list[array[int]] = []  # a page for every row each, not in the rows yet
        self._computed = np.array([seq.num_computed_tokens for seq in self.seqs], dtype=np.intp)
        self._slots = np.array([len(row.page_ids) * allocator.page_size for row in rows], dtype=np.int64)
        self.stale = False

    def reserve(self) -> StepReservation | None:
        """A slot for the next token of each member. Cost: a few array operations, and what `write_rows`
        does for the step when its time comes."""
        if self.stale:
            self._bind()
        needing = (self._computed >= self._slots).nonzero()[0]
        taken = self.allocator.take_for_decode(self.seqs, len(needing))
        if taken is None:
            return None
        page_ids, evicted = taken
        members: range | list[int] = range(len(self.seqs))
        if len(needing) == len(self.seqs):
            self._slots += self.allocator.page_size
            self._columns.append(page_ids)
            if len(self._columns) == MOST_COLUMNS:
                self.write_rows()
        else:
            self._slots[needing] += self.allocator.page_size
            members = needing.tolist()
            self.write_rows()
            for member, page in zip(members, page_ids, strict=True):
                self._page_ids[member].append(page)
        step = StepReservation(self.seqs, members, page_ids, evicted, computed=self._computed)
        events = self.allocator.events
        if events.enabled:
            for member, page in zip(members, page_ids, strict=True):
                events.add(EventKind.RESERVE, self.seqs[member].request_id, (page,))
        return step

    def write_rows(self) -> None:
        """Append to the rows what whole steps took; whoever looks at a row of the batch asks for it first."""
        if not self._columns:
            return
        steps = np.frombuffer(b"".join(self._columns), dtype=np.int32).reshape(len(self._columns), -1)
        for row, new in zip(self._page_ids, np.ascontiguousarray(steps.T).view(np.uint8), strict=True):
            row.frombytes(new)
        self._columns.clear()

    def commit(self) -> None:
        """Raise the members' lengths by one; generated tokens are published when they finish."""
        if self.stale:
            self._bind()
        if np.count_nonzero(self._computed >= self._slots):
            raise ValueError("decode batch: commit without a reserved slot for every member")
        self._computed += 1
        for seq in self.seqs:
            seq.num_computed_tokens += 1
