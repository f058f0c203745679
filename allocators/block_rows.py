"""What the block design remembers of a sequence, and what it asks of the structure that keeps the pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvarena.allocators.interface import Commit, PageIds, Reservation, Sequence

if TYPE_CHECKING:
    from kvarena.allocators.block_batch import BlockDecodeBatch


class Row:
    """The pages of one sequence.

    pages      list or array('i') in position order; 0 where a page left the window
    publishes  its full pages are offered to the cache
    adopted    pages at the front that came from the cache
    published  pages at the front that were offered to the cache, adopted ones included
    committed  tokens whose KV is written
    held       the pages count as in use; False from the pin to the first reserve
    headroom   pages that the first reserve must leave free (the gate's)
    settled    tokens up to which a reserve has nothing to do
    granted    tokens up to which a reserve was granted and may be written now; kept while forks share a page only
    no_change, no_publication  what `nothing_new` and `nothing_published` give, once they were asked
    batch      the decode batch that has bound this row, told when another verb touches it
    """

    __slots__ = (
        "adopted",
        "batch",
        "committed",
        "granted",
        "headroom",
        "held",
        "no_change",
        "no_publication",
        "pages",
        "published",
        "publishes",
        "seq",
        "settled",
    )

    def __init__(self, seq: Sequence, pages: list[int] | array[int], page_size: int, publishes: bool) -> None:
        self.seq = seq
        self.pages: Any = pages
        self.publishes = publishes
        self.adopted = self.published = len(pages)
        self.committed = self.adopted * page_size
        self.held = False
        self.headroom = 0
        self.settled = 0
        self.granted = 0
        self.no_change: Reservation | None = None
        self.no_publication: Commit | None = None
        self.batch: BlockDecodeBatch | None = None

    def leave_batch(self) -> None:
        """Another verb touches the row: its batch has to look at it again."""
        if self.batch is not None:
            self.batch.stale = True
            self.batch = None

    # Nearly every decode step takes nothing and publishes nothing: its answers are made once.

    def nothing_new(self) -> Reservation:
        if self.no_change is None:
            self.no_change = Reservation(self.seq)
        return self.no_change

    def nothing_published(self) -> Commit:
        if self.no_publication is None:
            self.no_publication = Commit(self.seq)
        return self.no_publication


class Plan:
    """One sequence's share of a `reserve`: slots for tokens [0, end), `take` new pages, entries [low, high) to drop.

    place  where its answer stands in the answer to the call
    """

    __slots__ = ("end", "high", "low", "place", "row", "take")

    def __init__(self, row: Row, end: int, take: int, place: int) -> None:
        self.row = row
        self.end = end
        self.take = take
        self.place = place
        self.low = self.high = 0


RowT = TypeVar("RowT", bound=Row)


class PageStore(ABC, Generic[RowT]):
    """PageIds 1..num_pages: who holds them, what they serve, in which order they are taken.

    queued      pages that nobody holds, evictable ones included
    evictable   those of them that serve hits
    shared      pages that more than one row holds
    duplicates  pages that serve what an earlier one serves too
    """

    queued: int
    evictable: int
    shared: int
    duplicates: int

    @abstractmethod
    def lookup(self, seq: Sequence, limit: int) -> RowT:
        """A row with the longest cached prefix of at most `limit` pages. Touches nothing."""

    def find(self, seq: Sequence, limit: int) -> ListLike[int]:
        """Those pages alone."""
        pages: ListLike[int] = self.lookup(seq, limit).pages
        return pages

    @abstractmethod
    def num_idle(self, rows: list[RowT]) -> int:
        """Different pages that these rows, not held yet, name and nobody holds."""

    @abstractmethod
    def touch(self, row: RowT) -> None:
        """Hold the pages that a look-up found."""

    @abstractmethod
    def take(self, row: RowT, count: int) -> tuple[array[int], PageIds]:
        """Give the first `count` pages of the queue to `row`: (pages, those whose content went), in order."""

    @abstractmethod
    def take_one(self, row: RowT) -> tuple[array[int], PageIds]:
        """`take` for one page, as decode steps ask for it."""

    @abstractmethod
    def publish(self, row: RowT, start: int, end: int) -> PageIds:
        """Let the pages at positions [start, end) serve their text; returns the duplicates among them."""

    @abstractmethod
    def unpublish(self, row: RowT, start: int) -> PageIds:
        """The row's published pages from position `start` on stop serving; returns them."""

    @abstractmethod
    def let_go(self, row: RowT) -> tuple[PageIds, PageIds]:
        """Free a whole row, last page first: (pages now without content, pages still cached) that nobody holds."""

    @abstractmethod
    def share(self, row: RowT, seq: Sequence, num_pages: int, num_published: int) -> RowT:
        """A row for `seq` that holds the first `num_pages` pages of `row` too; `num_published` of them serve hits."""

    @abstractmethod
    def replace(self, row: RowT, position: int, page: int) -> None:
        """Put `page`, which the row has taken, in place of the shared, unpublished one at `position`."""

    @abstractmethod
    def num_holders(self, page: int) -> int:
        """Rows that hold a page. The form by runs answers for pages that serve no hits only."""

    def let_go_part(self, row: RowT, low: int, high: int) -> PageIds:
        """Free the row entries [low, high), last first, and leave padding in their place."""
        raise NotImplementedError(f"{type(self).__name__} keeps whole rows")

    @abstractmethod
    def evict(self, count: int) -> PageIds:
        """Drop the content of the first `count` evictable pages; they keep their places."""

    @abstractmethod
    def clear(self) -> PageIds:
        """Drop all content; returns the pages that had some, ascending. They keep their places."""

    @abstractmethod
    def queue(self) -> Iterator[int]:
        """PageIds that nobody holds, the next to be taken first."""

    @abstractmethod
    def marks(self, rows: Iterable[RowT]) -> Mapping[int, str]:
        """For a display: `*` for a page that serves hits, and its ref count when more than one."""

    @abstractmethod
    def problems(self, rows: list[RowT], pins: list[RowT]) -> list[str]:
        """Broken invariants as sentences, everything recomputed; empty when sound."""


def holders(rows: Iterable[Row]) -> dict[int, int]:
    """How many of the rows name each page, padding left out."""
    counts: dict[int, int] = {}
    for row in rows:
        for page in row.pages:
            if page:
                counts[page] = counts.get(page, 0) + 1
    return counts


def state_problems(num_pages: int, refs: Any, queued: set[int], held: dict[int, int]) -> Iterator[str]:
    """Is every page in exactly one state, with the ref count of its holders? `refs` maps page to count."""
    for page in range(1, num_pages + 1):
        count = held.get(page, 0)
        if refs[page] != count:
            yield f"page {page}: ref count is {refs[page]}, {count} rows name it"
        if page in queued and refs[page]:
            yield f"page {page} is in two states: in the free queue with ref count {refs[page]}"
        if page in queued and count:
            yield f"page {page} is named by a live row and stands in the free queue"
        if page not in queued and not count:
            yield f"page {page} is leaked: no row names it and it is not in the free queue"
    for page in sorted({page for page in (*held, *queued) if not 1 <= page <= num_pages}):
        yield f"page {page} does not exist: ids run from 1 to {num_pages}"
