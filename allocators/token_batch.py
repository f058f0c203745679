"""The token design's decode batch: the members' lengths as arrays, their rows bound once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from kvarena.allocators.decode_batch import DecodeBatch, StepReservation
from kvarena.allocators.interface import EventKind, Sequence

if TYPE_CHECKING:
    from kvarena.allocators.token import TokenAllocator


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
        self._append = [row.page_ids.append for row in rows]
        self._computed = np.array([seq.num_computed_tokens for seq in self.seqs], dtype=np.int64)
        self._slots = np.array([len(row.page_ids) * allocator.page_size for row in rows], dtype=np.int64)
        self.stale = False

    def reserve(self) -> StepReservation | None:
        """A slot for the next token of each member. Cost: a few array operations, and an append a new page."""
        if self.stale:
            self._bind()
        needing = np.flatnonzero(self._computed >= self._slots)
        taken = self.allocator.take_for_decode(self.seqs, len(needing))
        if taken is None:
            return None
        page_ids, evicted = taken
        append = self._append
        members: range | list[int] = range(len(append))
        if len(needing) < len(append):
            members = needing.tolist()
            append = [append[member] for member in members]
        for add, page in zip(append, page_ids, strict=True):
            add(page)
        self._slots[needing] += self.allocator.page_size
        step = StepReservation(self.seqs, members, page_ids, evicted)
        events = self.allocator.events
        if events.enabled:
            for member, page in zip(members, page_ids, strict=True):
                events.add(EventKind.RESERVE, self.seqs[member].request_id, (page,))
        return step

    def commit(self) -> None:
        """Raise the members' lengths by one; generated tokens are published when they finish."""
        if self.stale:
            self._bind()
        if (self._computed >= self._slots).any():
            raise ValueError("decode batch: commit without a reserved slot for every member")
        self._computed += 1
        for seq in self.seqs:
            seq.num_computed_tokens += 1
