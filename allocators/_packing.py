"""A step in one int32 buffer, as `kernels/step.py` reads it: header, step pages, changes.

    rows [R] | seq_lens [R] | query_start_loc [R + 1] | page_start [R + 1] | step pages | changes [3 or 4, n]

NumPy only. A decode step, one token for each of the sequences of the step before, is a handful of array operations
whatever its size; other steps pay for looking up their members as well.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
from kvarena.allocators._rows import Index, Ints, PageRows
from kvarena.allocators.interface import Sequence

MIN_STAGED_PAGES = 1024  # changed pages that travel with the step; more of them go in a second copy


@dataclass(slots=True)
class Packed:
    """What a packed step is: tokens, the longest of each, its rows, and where its numbers end in the buffer."""

    num_tokens: int
    longest_query: int
    longest: int
    rows: Index
    end: int


class StepPacking:
    """Writes steps of at most `max_requests` requests and `max_batch_tokens` new tokens.

    gathered   changes carry a fourth number: the row's place in the batch
    capacity   numbers in a buffer that holds any step and its usual changes
    """

    def __init__(self, host: PageRows, max_batch_tokens: int, gathered: bool) -> None:
        requests = host.max_requests
        step_pages = max_batch_tokens // host.page_size + 2 * requests
        self.host = host
        self.header = 4 * requests + 2
        self.fields = 4 if gathered else 3
        staged = max(MIN_STAGED_PAGES, 4 * requests, step_pages)
        self.capacity = self.header + step_pages + self.fields * staged
        self._ones = [1] * requests
        self._count = np.arange(requests + 1, dtype=np.intp)
        self._decoding: dict[int, Index | None] = {}  # rows of the decode step that each buffer holds
        self._place = np.full(requests + 1, -1, dtype=np.int32)  # of each row in the batch that is gathered
        self._placed: Index | None = None  # the rows of that batch, in order

    def is_decode(self, seqs: ListLike[Sequence], num_new_tokens: ListLike[int]) -> bool:
        """Whether this is a list of ones, one for each sequence."""
        return isinstance(num_new_tokens, list) and len(seqs) > 0 and num_new_tokens == self._ones[: len(seqs)]

    def pack_decode(self, buffer: Ints, seqs: ListLike[Sequence]) -> Packed:
        """Write header and step pages of one new token each. ValueError: see `adapter.batch`."""
        computed = computed_of(seqs)
        return self.pack_column(buffer, seqs, self.host.rows_of(seqs), computed)

    def pack_column(self, buffer: Ints, seqs: ListLike[Sequence], rows: Index, computed: Index) -> Packed:
        """The same where the positions of the new tokens, `computed` [B], stand in a column."""
        host, count, limit, size = self.host, len(rows), self.host.max_requests, self.host.page_size
        columns = computed // size if size > 1 else computed
        host.check_covered(seqs, rows, computed, columns)
        if self._decoding.get(id(buffer)) is not rows:
            self._write_header(buffer, rows, self._count[: count + 1], self._count[: count + 1])
            self._decoding[id(buffer)] = rows
        end = self.header + count
        host.read(rows, columns, buffer[self.header : end])
        lens = buffer[limit : limit + count]
        lens[:] = computed  # cast, then added to: as one operation NumPy takes three times as long
        lens += 1
        return Packed(count, 1, lens.item(lens.argmax()), rows, end)

    def pack(self, buffer: Ints, seqs: ListLike[Sequence], num_new_tokens: ListLike[int]) -> Packed:
        """Write header and step pages of any step. ValueError: see `adapter.batch`."""
        host, count, limit = self.host, len(seqs), self.host.max_requests
        rows, new = host.rows_of(seqs), _token_counts(num_new_tokens, count)
        computed = computed_of(seqs)
        lens = computed + new
        host.check_covered(seqs, rows, lens - 1, (lens - 1) // host.page_size)
        pages, page_starts = self._step_pages(rows, computed, lens)
        starts = np.concatenate([self._count[:1], np.cumsum(new)])
        self._write_header(buffer, rows, starts, page_starts)
        self._decoding[id(buffer)] = None
        buffer[limit : limit + count] = lens
        end = self.header + len(pages)
        buffer[self.header : end] = pages
        longest = (int(new.max()), int(lens.max())) if count else (0, 0)
        return Packed(int(starts[count]), *longest, rows, end)

    def _write_header(self, buffer: Ints, rows: Index, starts: Index, page_starts: Index) -> None:
        """All but the lengths. A decode step of the same rows finds it in the buffer as the last one left it."""
        count, limit = len(rows), self.host.max_requests
        buffer[: self.header] = 0
        buffer[:count] = rows
        buffer[2 * limit : 2 * limit + count + 1] = starts
        buffer[2 * limit + count + 1 : 3 * limit + 1] = starts[-1]
        buffer[3 * limit + 1 : 3 * limit + 2 + count] = page_starts

    def _step_pages(self, rows: Index, begin: Index, end: Index) -> tuple[Ints, Index]:
        """Pages of positions [begin, end) of each row, one after the other; where each row's pages begin and end."""
        size = self.host.page_size
        first = begin // size
        counts = np.where(end > begin, (end - 1) // size + 1 - first, 0)
        starts = np.concatenate([self._count[:1], np.cumsum(counts)])
        columns = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        return self.host.at(np.repeat(rows, counts), columns), starts

    def place(self, rows: Index) -> None:
        """From now on row rows[b] stands at place b of the gathered batch."""
        self._place[:] = -1
        self._place[rows] = self._count[: len(rows)]
        self._placed = rows

    def write_changes(self, buffer: Ints, start: int) -> tuple[int, Ints | None]:
        """Write changed entries, [3 or 4, n], behind `start`; returns n, and an array of its own where they are too
        many for the buffer."""
        rows, columns, pages = self.host.take_changes()
        count, fields = len(rows), self.fields
        if not count:
            return 0, None
        fits = start + fields * count <= len(buffer)
        target = buffer[start : start + fields * count] if fits else np.empty(fields * count, dtype=np.int32)
        changes = target.reshape(fields, count)
        changes[0], changes[1], changes[2] = rows, columns, pages
        if fields == 4:
            changes[3] = self._count[:count] if rows is self._placed else self._place[rows]
        return count, None if fits else target


def computed_of(seqs: ListLike[Sequence]) -> Index:
    """Computed tokens of each, [B], read-only. Through `struct`: NumPy takes three times as long for a list."""
    return np.frombuffer(struct.pack(f"{len(seqs)}n", *[seq.num_computed_tokens for seq in seqs]), np.intp)


def _token_counts(num_new_tokens: ListLike[int], count: int) -> Index:
    """As an array [B]. ValueError: not one for each request, negative, or no integers."""
    new = np.asarray(num_new_tokens)
    if len(new) != count or (count and (new.dtype.kind not in "iu" or new.min() < 0)):
        raise ValueError(f"num_new_tokens: expected {count} numbers >= 0, found {list(num_new_tokens)}")
    return new.astype(np.intp)
