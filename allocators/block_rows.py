"""What the block design remembers of one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvarena.allocators.interface import Commit, Reservation, Sequence
from kvarena.prefix.hash_chain import PageChain


class Row:
    """The pages of one sequence.

    pages      array('i') in position order; 0 where a page left the window
    adopted    pages at the front that came from the cache
    published  pages at the front that were offered to the cache, adopted ones included
    committed  tokens whose KV is written
    held       the pages count as in use; False from the pin to the first reserve
    headroom   pages that the first reserve must leave free (the gate's)
    settled    tokens up to which a reserve has nothing to do
    """

    __slots__ = (
        "_commit",
        "_reservation",
        "adopted",
        "chain",
        "committed",
        "headroom",
        "held",
        "pages",
        "published",
        "seq",
        "settled",
    )

    def __init__(self, seq: Sequence, chain: PageChain | None, pages: Iterable[int], page_size: int) -> None:
        self.seq = seq
        self.chain = chain
        self.pages = array("i", pages)
        self.adopted = self.published = len(self.pages)
        self.committed = self.adopted * page_size
        self.held = False
        self.headroom = 0
        self.settled = 0
        self._reservation: Reservation | None = None
        self._commit: Commit | None = None

    # Nearly every decode step takes nothing and publishes nothing: its answers are made once.

    def nothing_new(self) -> Reservation:
        if self._reservation is None:
            self._reservation = Reservation(self.seq)
        return self._reservation

    def nothing_published(self) -> Commit:
        if self._commit is None:
            self._commit = Commit(self.seq)
        return self._commit


class Plan:
    """One sequence's share of a `reserve`: slots for tokens [0, end), `take` new pages, entries [low, high) to drop."""

    __slots__ = ("end", "high", "low", "row", "take")

    def __init__(self, row: Row, end: int, take: int, low: int = 0, high: int = 0) -> None:
        self.row = row
        self.end = end
        self.take = take
        self.low = low
        self.high = high
