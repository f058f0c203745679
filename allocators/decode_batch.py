"""Decode steps of a whole batch in one call.

A step of B sequences through `reserve([(seq, 1), ...])` pays for B pairs, look-ups and result objects. A batch is
made once, when its members change, and then asked for a slot each, step after step. It decides as the list form
does: demand summed first, all or nothing, members in order.

    batch = allocator.decode_batch(seqs)
    step = batch.reserve()          # None: no room, nothing taken; the caller preempts and makes a new batch
    ... the model runs ...
    batch.commit()                  # the KV of one more token of each is written
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvarena.allocators.interface import KVAllocator, PageIds, Reservation, Sequence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class StepReservation:
    """New pages of one step: `page_ids[i]` went to the member at `members[i]`, ascending; others had room.

    `answers` are whole reservations of members, where pages and evictions do not say everything. `computed` [B] are the
    members' `num_computed_tokens` where the batch keeps them as a column, which its next `commit` raises in place.
    """

    seqs: list[Sequence]
    members: ListLike[int]
    page_ids: array[int]
    evicted: PageIds = ()
    answers: Mapping[int, Reservation] = field(default_factory=dict)
    computed: NDArray[np.intp] | None = None

    @classmethod
    def of(
        cls, seqs: list[Sequence], answers: Mapping[int, Reservation], computed: NDArray[np.intp] | None = None
    ) -> StepReservation:
        """A step in which the members of `answers`, ascending, were served so."""
        page_ids, evicted = array("i"), array("i")
        for answer in answers.values():
            page_ids += answer.page_ids
            evicted.extend(answer.evicted)
        members = [member for member, answer in answers.items() if answer.page_ids]
        return cls(seqs, members, page_ids, evicted, answers, computed)

    @property
    def one_page_each(self) -> bool:
        """`members` and `page_ids` say everything that a page table needs: no row was moved, rewritten or given
        several pages."""
        if len(self.members) != len(self.page_ids):
            return False
        return not self.answers or not any(
            answer.moves or answer.rewritten != (0, 0) for answer in self.answers.values()
        )

    def reservations(self) -> list[Reservation]:
        """The same as the list form gives it, one for each member. O(B)."""
        each = [self.answers.get(member) or Reservation(seq) for member, seq in enumerate(self.seqs)]
        if self.answers:
            return each
        for member, page in zip(self.members, self.page_ids, strict=True):
            each[member].page_ids = array("i", [page])
        if each:
            each[0].evicted = self.evicted
        return each


class DecodeBatch:
    """Live sequences whose prefill is committed; each gains one token a step.

    While a batch is in use it raises its members' `num_computed_tokens`; whoever sets them otherwise makes a new
    batch. This form serves every allocator; one that can do better returns its own from `decode_batch`.
    """

    def __init__(self, allocator: KVAllocator, seqs: Iterable[Sequence]) -> None:
        self.allocator = allocator
        self.seqs = list(seqs)
        if len({seq.request_id for seq in self.seqs}) < len(self.seqs):
            raise ValueError("decode batch: a request is in it twice")
        for seq in self.seqs:
            if seq.num_computed_tokens < seq.num_prefill_tokens:
                raise ValueError(f"request {seq.request_id!r} is not decoding: {seq!r}")

    def reserve(self) -> StepReservation | None:
        """A slot for the next token of each member, all or nothing."""
        reservations = self.allocator.reserve([(seq, 1) for seq in self.seqs])
        if reservations is None:
            return None
        return StepReservation.of(self.seqs, dict(enumerate(reservations)))

    def commit(self) -> None:
        """The KV of one more token of each member is written."""
        self.allocator.commit([(seq, seq.num_computed_tokens + 1) for seq in self.seqs])
