"""The host's side of an adapter: which row each sequence has, the page ids in it, and what changed since last sent.

NumPy only; `adapter.py` adds the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from itertools import repeat
from typing import Protocol

import numpy as np
from kvarena.allocators.interface import AllocatorError, Commit, Reservation, Sequence
from numpy.typing import NDArray


class PageSource(Protocol):
    """What an adapter needs of an allocator."""

    @property
    def page_size(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    def page_ids(self, seq: Sequence) -> array[int]: ...


class PageRows:
    """A row of page ids for each sequence. Row 0 is padding: no sequence has it and its entries stay 0.

    source        any `PageSource`
    max_requests  rows that sequences can have
    max_tokens    tokens a row can hold; rounded up to whole pages

    Memory: int32 [max_requests + 1, pages a row], touched as rows fill.
    """

    def __init__(self, source: PageSource, max_requests: int, max_tokens: int) -> None:
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")
        self.source = source
        self.page_size = source.page_size
        self.max_requests = max_requests
        self.width = -(-max_tokens // self.page_size)
        self._rows: dict[str, int] = {}
        self._free = list(range(max_requests, 0, -1))  # taken from the end, given back to it
        self._counts = np.zeros(max_requests + 1, dtype=np.int64)
        self._pages = np.zeros((max_requests + 1, self.width), dtype=np.int32)
        self._dirty: list[tuple[int, int, int]] = []  # (row, first column, columns)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.request_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, seq: Sequence) -> None:
        """Give a live sequence a row with all pages that it owns. ValueError: it has one, or no row is free."""
        if seq in self:
            raise ValueError(f"request {seq.request_id} has a row already")
        if not self._free:
            raise ValueError(f"request {seq.request_id}: all {self.max_requests} rows are taken (max_requests)")
        pages = self.source.page_ids(seq)
        self._check_width(seq, len(pages))
        row = self._rows[seq.request_id] = self._free.pop()
        self._counts[row] = len(pages)
        self._note(row, 0, pages)

    def update(self, change: Reservation | Commit) -> None:
        """Note what a reservation or commit changed. Costs O(pages that changed)."""
        seq = change.seq
        row = self._rows.get(seq.request_id)
        if row is None:
            if isinstance(change, Commit):
                raise ValueError(f"request {seq.request_id} has no row: its reservation was never seen")
            self.add(seq)
            return
        if isinstance(change, Reservation) and change.page_ids:
            count = int(self._counts[row])
            self._check_width(seq, count + len(change.page_ids))
            self._counts[row] = count + len(change.page_ids)
            self._note(row, count, change.page_ids)
        start, stop = change.rewritten
        if stop > start:
            self._note(row, start, self.source.page_ids(seq)[start:stop])

    def append_each(self, seqs: ListLike[Sequence], page_ids: array[int]) -> None:
        """One page more for each of these different sequences. A few array operations."""
        rows = np.array(self.indices(seqs), dtype=np.int64)
        counts = self._counts[rows]
        if (full := np.flatnonzero(counts >= self.width)).size:
            self._check_width(seqs[int(full[0])], self.width + 1)
        self._pages[rows, counts] = page_ids
        self._counts[rows] = counts + 1
        self._dirty += zip(rows.tolist(), counts.tolist(), repeat(1), strict=False)

    def refresh(self, seq: Sequence) -> None:
        """Read the sequence's whole row again. O(pages)."""
        row, pages = self.index(seq), self.source.page_ids(seq)
        self._check_width(seq, len(pages))
        self._counts[row] = len(pages)
        self._note(row, 0, pages)

    def remove(self, seq: Sequence) -> None:
        """Drop the row of a sequence whose pages were released."""
        row = self.index(seq)
        del self._rows[seq.request_id]
        self._counts[row] = 0
        self._free.append(row)

    def pages(self, seq: Sequence) -> array[int]:
        """Page ids in the sequence's row."""
        row = self.index(seq)
        return array("i", self._pages[row, : self._counts[row]].tobytes())

    def index(self, seq: Sequence) -> int:
        """The sequence's row. ValueError when it has none."""
        try:
            return self._rows[seq.request_id]
        except KeyError:
            raise ValueError(f"request {seq.request_id} has no row: add it, or update with its reservation") from None

    def indices(self, seqs: ListLike[Sequence]) -> list[int]:
        """`index` of each."""
        try:
            return [self._rows[seq.request_id] for seq in seqs]
        except KeyError:
            return [self.index(seq) for seq in seqs]

    def check_covered(self, seqs: ListLike[Sequence], rows: NDArray[np.int32], lens: NDArray[np.int32]) -> None:
        """Raise ValueError unless each row, named once, has pages for `lens` tokens."""
        if len(np.unique(rows)) != len(rows):
            raise ValueError(f"a sequence is named twice in one batch: {[seq.request_id for seq in seqs]}")
        covered = self._counts[rows] * self.page_size
        if (short := np.flatnonzero(lens > covered)).size:
            at = int(short[0])
            raise ValueError(
                f"request {seqs[at].request_id}: {int(lens[at])} tokens after this step, its row covers "
                f"{int(covered[at])} (reserve first, and update with the reservation)"
            )

    def take_changes(self) -> NDArray[np.int32]:
        """Entries changed since the last call, int32 [3, n]: row, column, page.

        A place noted twice has its latest page both times, so the order of writing them does not matter.
        """
        if not self._dirty:
            return np.empty((3, 0), dtype=np.int32)
        notes = np.array(self._dirty, dtype=np.int64)
        self._dirty.clear()
        counts = notes[:, 2]
        rows = np.repeat(notes[:, 0], counts)
        first = np.repeat(notes[:, 1] - (np.cumsum(counts) - counts), counts)
        columns = first + np.arange(len(rows))
        return np.stack([rows, columns, self._pages[rows, columns]]).astype(np.int32)

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Rebuild every row from the source and compare; `seqs` are all live sequences. Raises AllocatorError."""
        live = {seq.request_id: seq for seq in seqs}
        if live.keys() != self._rows.keys():
            raise AllocatorError(f"rows of {sorted(self._rows)}, live sequences {sorted(live)}")
        if sorted([*self._rows.values(), *self._free]) != list(range(1, self.max_requests + 1)):
            raise AllocatorError(f"rows taken {self._rows}, free {self._free}: not each exactly once")
        if self._pages[0].any():
            raise AllocatorError(f"row 0, the padding row, names pages {self._pages[0]}")
        for seq in live.values():
            expected, found = self.source.page_ids(seq), self.pages(seq)
            if found != expected:
                raise AllocatorError(
                    f"request {seq.request_id}, row {self.index(seq)}: owns pages {list(expected)}, "
                    f"the row names {list(found)}"
                )

    def _check_width(self, seq: Sequence, num_pages: int) -> None:
        if num_pages > self.width:
            raise ValueError(
                f"request {seq.request_id} needs {num_pages} pages: a row holds {self.width} "
                f"({self.width * self.page_size} tokens, page_size {self.page_size}; max_tokens)"
            )

    def _note(self, row: int, start: int, pages: array[int]) -> None:
        self._pages[row, start : start + len(pages)] = pages
        self._dirty.append((row, start, len(pages)))
