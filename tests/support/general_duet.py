"""The general form beside the slow models of the two designs, at whose values it must decide as they do.

It forks nothing; its free pages stand in its pool. Where a tree has no edges (pages evicted one by one, or the rest of
a split edge kept as old as it was) equal pages may come back in another order than the token design's: those are not
driven.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarena.allocators.general import GeneralAllocator
from kvarena.allocators.host import HostTier
from support.duet import Duet, Pair, same


@dataclass
class GeneralDuet(Duet):
    """As `Duet`, our side in the general form."""

    def __post_init__(self) -> None:
        super().__post_init__()
        general = self.design.model_copy(update={"form": "general"})
        self.ours = GeneralAllocator(self.num_pages, general, num_rows=self.num_rows)
        self.host = HostTier(self.ours, self.host_pages)

    def fork(self, choice: int, tail: list[int], whole_prompt: bool, fewer: int = 0) -> None:
        """Nothing: see the module's head."""

    def _same_row(self, pair: Pair) -> None:
        name = pair.facts.name
        if self.design.kind == "token":
            same(f"row of {name}", self.ours.page_ids(pair.seq), self.model.holds[name].row)
        else:
            super()._same_row(pair)

    def _prepared(self, pair: Pair, n: int) -> bool:
        return True

    def _model_reserve(self, wants: list[tuple[str, int]]) -> Any:
        if self.design.kind == "token":
            return self.model.reserve(wants)
        return self.model.reserve(wants, all(row.held for row in self.ours._rows.values() if not row.admitted))

    def _same_order(self) -> None:
        pages = list(self.ours.pool.free)
        if self.design.kind == "block":
            same("free pages", pages, self.model.queue[: len(pages)])
        else:
            same("free pages", pages, self.model.free)
