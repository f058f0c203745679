"""The host's side of an adapter: which row each sequence has, the page ids in it, and what changed since last sent.

NumPy only; `adapter.py` adds the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Protocol, TypeAlias

import numpy as np
from kvarena.allocators.interface import AllocatorError, Commit, Reservation, Sequence
from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.int32]"
Index: TypeAlias = "NDArray[np.intp]"  # what NumPy indexes by; any other integer is converted, which costs more
_Places: TypeAlias = "tuple[Index, Index, Index, Ints]"  # changed: rows, columns, places in `_flat`, pages; one each
UNCHANGED = (0, 0)
_NONE: Index = np.empty(0, dtype=np.intp)


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
        self._counts = np.zeros(max_requests + 1, dtype=np.intp)
        self._most = 0  # no row has more pages
        self._pages = np.zeros((max_requests + 1, self.width), dtype=np.int32)
        self._flat = self._pages.reshape(-1)  # the same memory: one index a place is looked up faster than two
        self._runs: list[tuple[int, int, int]] = []  # changed: (row, first column, columns)
        self._places: list[_Places] = []
        self._last: tuple[list[Sequence], Index] | None = None  # what `rows_of` answered last; None: rows moved
        self._starts: tuple[Index, Index] = (_NONE, _NONE)  # rows asked for last, where they begin in `_flat`

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
        self._set_count(row, len(pages))
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
            self._set_count(row, count + len(change.page_ids))
            self._note(row, count, change.page_ids)
        start, stop = change.rewritten
        if stop > start:
            self._note(row, start, self.source.page_ids(seq)[start:stop])

    def update_all(self, changes: Iterable[Reservation | Commit]) -> None:
        """`update` for each, in order; runs of single pages for rows that exist go in as one."""
        single: dict[int, Reservation] = {}
        for change in changes:
            row = self._rows.get(change.seq.request_id)
            if row is not None and row not in single and change.rewritten == UNCHANGED:
                count = 0 if isinstance(change, Commit) else len(change.page_ids)
                if count < 2:
                    if count:
                        single[row] = change  # type: ignore[assignment]
                    continue
            self._append_single(single)
            self.update(change)
        self._append_single(single)

    def _append_single(self, single: dict[int, Reservation]) -> None:
        if single:
            pages = [change.page_ids[0] for change in single.values()]
            self._append(np.array(list(single), dtype=np.intp), pages, [change.seq for change in single.values()])
            single.clear()

    def append_each(self, rows: Index, seqs: ListLike[Sequence], members: ListLike[int], page_ids: array[int]) -> None:
        """One page more for each of `members`, ascending places in these different sequences and their rows. A few
        array operations."""
        if not page_ids:
            return
        if len(members) < len(rows):
            rows = rows[np.array(members, dtype=np.intp)]
            seqs = [seqs[member] for member in members]
        self._append(rows, page_ids, seqs)

    def _append(self, rows: Index, page_ids: ListLike[int], seqs: ListLike[Sequence]) -> None:
        counts = self._counts[rows]
        if self._most >= self.width:
            self._most = int(self._counts.max())
            if counts.max() >= self.width:
                self._check_width(seqs[int((counts >= self.width).argmax())], self.width + 1)
        self._most += 1
        places = self._starts_of(rows) + counts
        pages = np.array(page_ids, np.int32)
        self._flat.put(places, pages)
        self._counts[rows] = counts + 1
        self._places.append((rows, counts, places, pages))

    def refresh(self, seq: Sequence) -> None:
        """Read the sequence's whole row again. O(pages)."""
        row, pages = self.index(seq), self.source.page_ids(seq)
        self._check_width(seq, len(pages))
        self._set_count(row, len(pages))
        self._note(row, 0, pages)

    def remove(self, seq: Sequence) -> None:
        """Drop the row of a sequence whose pages were released."""
        row = self.index(seq)
        del self._rows[seq.request_id]
        self._counts[row] = 0
        self._free.append(row)
        self._last = None

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

    def rows_of(self, seqs: ListLike[Sequence]) -> Index:
        """Rows of different sequences, [B]; the same array while the same sequences are asked for and keep
        their rows. ValueError: one has no row, or is named twice."""
        seqs = seqs if isinstance(seqs, list) else list(seqs)
        if self._last is not None and self._last[0] == seqs:
            return self._last[1]
        rows = np.array([self.index(seq) for seq in seqs], dtype=np.intp)
        if len(np.unique(rows)) != len(rows):
            raise ValueError(f"a sequence is named twice in one batch: {[seq.request_id for seq in seqs]}")
        self._last = list(seqs), rows
        return rows

    def counts(self, rows: Index) -> Index:
        """Pages in each of these rows."""
        return self._counts[rows]

    def settle(self, rows: Index, counts: Index, places: Index, pages: Ints) -> None:
        """Write pages that the device has already, at places of the table row by row; `rows` have `counts` then."""
        self._flat.put(places, pages)
        self._counts[rows] = counts
        self._most = max(self._most, int(counts.max()))

    @property
    def has_changes(self) -> bool:
        """Whether entries changed since `take_changes`."""
        return bool(self._places or self._runs)

    def longest(self, rows: Index) -> int:
        """Most pages in one of these rows."""
        return int(self._counts[rows].max()) if len(rows) else 0

    def at(self, rows: Index, columns: Index) -> Ints:
        """Page ids at these places."""
        return self._flat[self._starts_of(rows) + columns]

    def read(self, rows: Index, columns: Index, out: Ints) -> None:
        """The same into `out`, for places that `check_covered` has passed."""
        self._flat.take(self._starts_of(rows) + columns, 0, out, "clip")

    def _starts_of(self, rows: Index) -> Index:
        """Where rows begin in `_flat`; a decode step asks for the same array three times."""
        if self._starts[0] is not rows:
            self._starts = rows, rows * self.width
        return self._starts[1]

    def check_covered(self, seqs: ListLike[Sequence], rows: Index, last: Index, columns: Index) -> None:
        """Raise ValueError unless each row has page `columns` of it, which holds its position `last`; -1: it needs
        none."""
        counts = self._counts[rows]
        short = columns >= counts
        if b"\1" in short.tobytes():  # half the time of any()
            at = int(short.argmax())
            raise ValueError(
                f"request {seqs[at].request_id}: {int(last[at]) + 1} tokens after this step, its row covers "
                f"{int(counts[at]) * self.page_size} (reserve first, and update with the reservation)"
            )

    def take_changes(self) -> tuple[Index, Index, Ints]:
        """Entries changed since the last call: rows, columns, pages, one each.

        A place noted twice has its latest page both times, so the order of writing them does not matter.
        """
        places, self._places = self._places, []
        if self._runs:
            rows, columns, flat = _places_of(np.array(self._runs, dtype=np.intp), self.width)
            places.append((rows, columns, flat, self._flat[flat]))
            self._runs.clear()
        if not places:
            return _NONE, _NONE, np.empty(0, dtype=np.int32)
        if len(places) == 1:
            rows, columns, _, pages = places[0]
            return rows, columns, pages
        rows, columns, flat, _ = (np.concatenate(each) for each in zip(*places, strict=True))
        return rows, columns, self._flat[flat]

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

    def _set_count(self, row: int, count: int) -> None:
        self._counts[row] = count
        self._most = max(self._most, count)

    def _note(self, row: int, start: int, pages: array[int]) -> None:
        self._pages[row, start : start + len(pages)] = pages
        self._runs.append((row, start, len(pages)))


def _places_of(runs: Index, width: int) -> tuple[Index, Index, Index]:
    """Rows, columns and flat places of runs [n, 3] of (row, first column, columns)."""
    counts = runs[:, 2]
    rows = np.repeat(runs[:, 0], counts)
    first = np.repeat(runs[:, 1] - (np.cumsum(counts) - counts), counts)
    columns = first + np.arange(len(rows))
    return rows, columns, rows * width + columns
