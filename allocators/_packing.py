"""A step in one int32 buffer, as `kernels/step.py` reads it: header, step pages, changes.

    rows [R] | seq_lens [R] | query_start_loc [R + 1] | page_start [R + 1] | step pages | changes [3 or 4, n]

NumPy only. A decode step, one token for each of the sequences of the step before, is a handful of array operations
whatever its size; other steps pay for looking up their members as well.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
from kvarena.allocators._rows import Ints, PageRows
from kvarena.allocators.interface import Sequence

MIN_STAGED_PAGES = 1024  # changed pages that travel with the step; more of them go in a second copy


@dataclass(slots=True)
class Packed:
    """What a packed step is: tokens, the longest of each, its rows, and where its numbers end in the buffer."""

    num_tokens: int
    longest_query: int
    longest: int
    rows: Ints
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
        self._fields = 4 if gathered else 3
        staged = max(MIN_STAGED_PAGES, 4 * requests, step_pages)
        self.capacity = self.header + step_pages + self._fields * staged
        self._ones = [1] * requests
        self._count = np.arange(requests + 1, dtype=np.int32)
        self._decoding: dict[int, Ints | None] = {}  # rows of the decode step that each buffer holds
        self._place = np.full(requests + 1, -1, dtype=np.int32)  # of each row in the batch that is gathered

    def pack(self, buffer: Ints, seqs: ListLike[Sequence], num_new_tokens: ListLike[int]) -> Packed:
        """Write header and step pages. ValueError: see `adapter.batch`."""
        host, count, limit = self.host, len(seqs), self.host.max_requests
        rows = host.rows_of(seqs)
        plain = isinstance(num_new_tokens, list) and num_new_tokens == self._ones[:count]
        new = self._count[1:2] if plain else _token_counts(num_new_tokens, count)
        lens = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int32)
        lens += new
        host.check_covered(seqs, rows, lens)
        if not count:
            buffer[: self.header] = 0
            self._decoding[id(buffer)] = None
            return Packed(0, 0, 0, rows, self.header)
        if plain:
            if self._decoding.get(id(buffer)) is not rows:
                self._write_header(buffer, rows, self._count[: count + 1], self._count[: count + 1])
            num_tokens, longest_query = count, 1
            pages = host.at(rows, (lens - 1) // host.page_size)
        else:
            starts = np.concatenate([self._count[:1], np.cumsum(new)])
            num_tokens, longest_query = int(starts[count]), int(new.max())
            pages, page_starts = self._step_pages(rows, lens - new, lens)
            self._write_header(buffer, rows, starts, page_starts)
        self._decoding[id(buffer)] = rows if plain else None
        buffer[limit : limit + count] = lens
        end = self.header + len(pages)
        buffer[self.header : end] = pages
        return Packed(num_tokens, longest_query, int(lens.max()), rows, end)

    def _write_header(self, buffer: Ints, rows: Ints, starts: Ints, page_starts: Ints) -> None:
        """All but the lengths. A decode step of the same rows finds it in the buffer as the last one left it."""
        count, limit = len(rows), self.host.max_requests
        buffer[: self.header] = 0
        buffer[:count] = rows
        buffer[2 * limit : 2 * limit + count + 1] = starts
        buffer[2 * limit + count + 1 : 3 * limit + 1] = starts[-1]
        buffer[3 * limit + 1 : 3 * limit + 2 + count] = page_starts

    def _step_pages(self, rows: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Pages of positions [begin, end) of each row, one after the other; where each row's pages begin and end."""
        size = self.host.page_size
        first = begin // size
        counts = np.where(end > begin, (end - 1) // size + 1 - first, 0)
        starts = np.concatenate([self._count[:1], np.cumsum(counts)])
        columns = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        return self.host.at(np.repeat(rows, counts), columns), starts

    def place(self, rows: Ints) -> None:
        """From now on row rows[b] stands at place b of the gathered batch."""
        self._place[:] = -1
        self._place[rows] = self._count[: len(rows)]

    def take_changes(self) -> Ints:
        """Changed entries, int32 [3, n], or [4, n] with places in the gathered batch."""
        changes = self.host.take_changes()
        if self._fields == 3 or not changes.size:
            return changes
        return np.concatenate([changes, self._place[changes[0]][None]])


def _token_counts(num_new_tokens: ListLike[int], count: int) -> Ints:
    """As int32 [B]. ValueError: not one for each request, negative, or no integers."""
    new = np.asarray(num_new_tokens)
    if len(new) != count or (count and (new.dtype.kind not in "iu" or new.min() < 0)):
        raise ValueError(f"num_new_tokens: expected {count} numbers >= 0, found {list(num_new_tokens)}")
    return new.astype(np.int32)
