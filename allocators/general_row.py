"""What the general form remembers of a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvarena.allocators.general_text import Page, Text
from kvarena.allocators.interface import Sequence


class Row:
    """The pages of one sequence, and how far they went through each stage.

    serial       tells rows apart, also of one request id
    index        its row of the page table, from 1; 0 where the design has none
    pages        position order
    text         where its published text ends
    source       page that serves the beginning of the page in which the hit ends; held until it is copied
    hit_tokens   tokens of the hit
    adopted      pages at the front that came from the cache
    published    pages at the front that were offered to the cache, adopted ones included
    counted      of those, the ones whose hit count knows of this sequence
    committed    tokens whose KV is written
    headroom     pages that the first reserve must leave free
    held         its pages count as in use
    admitted     reserved at least once
    prefilled    a commit covered the whole prefill
    checkpointed was offered to the cache at least once
    tail_offered the beginning of the prompt's last page was offered (hash_unit)
    """

    __slots__ = (
        "admitted",
        "adopted",
        "checkpointed",
        "committed",
        "counted",
        "headroom",
        "held",
        "hit_tokens",
        "index",
        "pages",
        "prefilled",
        "published",
        "seq",
        "serial",
        "source",
        "tail_offered",
        "text",
    )

    def __init__(self, seq: Sequence, text: Text, pages: list[Page], page_size: int, serial: int) -> None:
        self.seq = seq
        self.serial = serial
        self.index = 0
        self.pages = pages
        self.text = text
        self.source: Page | None = None
        self.adopted = self.published = len(pages)
        self.hit_tokens = self.committed = len(pages) * page_size
        self.counted = 0
        self.headroom = 0
        self.held = self.admitted = self.prefilled = self.checkpointed = self.tail_offered = False

    @property
    def named(self) -> list[Page]:
        """All pages that it names, the source of a copy last."""
        return self.pages if self.source is None else [*self.pages, self.source]

    @property
    def decoding(self) -> bool:
        """All of the prefill is computed."""
        return self.seq.num_computed_tokens >= self.seq.num_prefill_tokens


class Plan:
    """One sequence's share of a `reserve`: slots for tokens [0, end), the last `n` asked for now; `take` new pages."""

    __slots__ = ("end", "n", "row", "take")

    def __init__(self, row: Row, n: int, end: int, take: int) -> None:
        self.row = row
        self.n = n
        self.end = end
        self.take = take


def numbers(pages: Iterable[Page]) -> array[int]:
    """Page ids, int32."""
    return array("i", [page.number for page in pages])
