"""The block design's decode batch: a member costs nothing but its counters until its page is full.

A row says up to which length a `reserve` for it finds nothing to do (`Row.settled`), so the step in which a member
needs service is known when it was served last. The batch keeps its members by that step.

    step            7        8        9          10
    members due   2, 5       -       0, 3         -          of 256, about 256 / page_size in each
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from kvarena.allocators import block_decode
from kvarena.allocators.decode_batch import DecodeBatch, StepReservation
from kvarena.allocators.interface import Sequence

if TYPE_CHECKING:
    from kvarena.allocators.block import BlockAllocator


class BlockDecodeBatch(DecodeBatch):
    """Decides as `BlockAllocator.reserve` for a list of decodes.

    `stale` is set by the allocator when another verb makes a member due sooner (commit, fork, a write that is made
    ready) or ends it; the next step then binds the rows anew. A `reserve` beside the batch only makes it due later,
    and whoever is served too early is told that nothing is new.
    """

    allocator: BlockAllocator

    def __init__(self, allocator: BlockAllocator, seqs: Iterable[Sequence]) -> None:
        super().__init__(allocator, seqs)
        self._bind()

    def _bind(self) -> None:
        self._rows = [self.allocator.bind(seq, self) for seq in self.seqs]
        self._computed = np.array([seq.num_computed_tokens for seq in self.seqs], dtype=np.intp)
        self._step = 0
        self._due: defaultdict[int, list[int]] = defaultdict(list)
        self._await(range(len(self.seqs)))
        self._is_served = False  # in this step
        self._runs_ahead = any(row.committed != row.seq.num_computed_tokens for row in self._rows)
        self.stale = False

    def _await(self, members: Iterable[int]) -> None:
        """Put members into the steps in which they need service: this one while their last tokens are not known."""
        rows, due, step = self._rows, self._due, self._step
        for member in members:
            row = rows[member]
            wait = row.settled - row.seq.num_computed_tokens
            due[step + wait if wait > 0 else step].append(member)

    def reserve(self) -> StepReservation | None:
        """A slot for the next token of each member. Cost: that of the members whose pages are full."""
        if self.stale:
            self._bind()
        due = sorted(self._due.get(self._step, ()))
        if not due:
            return StepReservation(self.seqs, (), array("i"), computed=self._computed)
        served, early = (due, []) if self.allocator.has_open_pages else self._sorted_by_work(due)
        answers = block_decode.reserve(self.allocator, [self._rows[member] for member in served]) if served else []
        if answers is None:
            return None
        self._due[self._step] = early
        self._await(served)
        self._is_served = True
        return StepReservation.of(self.seqs, dict(zip(served, answers, strict=True)), self._computed)

    def _sorted_by_work(self, due: list[int]) -> tuple[list[int], list[int]]:
        """Members for which a reserve of one token takes or publishes a page, and those whose last token is not
        known yet."""
        rows, size = self._rows, self.allocator.page_size
        served: list[int] = []
        early: list[int] = []
        for member in due:
            row = rows[member]
            seq = row.seq
            fits = seq.num_computed_tokens < len(row.pages) * size
            early_too = fits and row.settled and seq.num_tokens < (row.published + 1) * size
            (early if early_too else served).append(member)
        return served, early

    def commit(self) -> None:
        """Raise the members' lengths by one; their pages are published by the `reserve` after."""
        if self.stale:
            self._bind()
        due = self._due.get(self._step)
        if (due and not self._is_served) or self._runs_ahead or self.allocator.has_open_pages:
            super().commit()
            self._computed += 1
            return
        for row in self._rows:
            seq = row.seq
            row.committed = seq.num_computed_tokens = seq.num_computed_tokens + 1
        self._computed += 1
        self.allocator.count_written(len(self._rows))
        self._next_step()

    def _next_step(self) -> None:
        late = self._due.pop(self._step, ())
        self._step += 1
        self._is_served = False
        if late:
            self._due[self._step] += late
