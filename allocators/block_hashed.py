"""The general form of the block design's pages: a key, and a holder or a place in the free queue, for each page.

This is vLLM 0.32.0's block pool as a reader would draw it, and the oracle of the `runs` form: it serves every
setting, and every step costs a little for each page. A page's ref count is 0 in the queue and 1 outside of it; that
of the few pages that have more holders is written down.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from kvarena.allocators.block_rows import PageStore, Row, holders, state_problems
from kvarena.allocators.config import Design
from kvarena.allocators.free_queue import FreeQueue
from kvarena.allocators.interface import PADDING_PAGE, Sequence
from kvarena.allocators.window import SlidingWindow
from kvarena.prefix.hash_chain import HashChainIndex, PageChain
from kvarena.prefix.page_text import HashFn


class HashedRow(Row):
    """A row with the keys of its pages (None: nothing is cached). `pages` is a list of the queue's own int objects."""

    __slots__ = ("chain",)

    def __init__(self, seq: Sequence, chain: PageChain | None, pages: list[int], page_size: int) -> None:
        super().__init__(seq, pages, page_size, chain is not None)
        self.chain = chain


class HashedPages(PageStore[HashedRow]):
    """Free queue, ref counts and page index. A page stands in the queue exactly when its ref count is 0.

    often  ref counts above 1
    """

    def __init__(
        self, num_pages: int, design: Design, window: SlidingWindow | None, hash_fn: HashFn | str | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = design.page_size
        self.index = HashChainIndex(num_pages, design.page_size, hash_fn or design.hash_fn, gapless=window is None)
        self.free_queue = FreeQueue(num_pages)
        self.often: dict[int, int] = {}
        self.evictable = 0
        self.withdrawn: set[int] = set()  # held pages whose content another sequence's abort took back
        self._caches = design.prefix_cache
        self._window = window

    @property
    def queued(self) -> int:  # type: ignore[override]
        return self.free_queue.num_pages

    @property
    def shared(self) -> int:  # type: ignore[override]
        return len(self.often)

    @property
    def duplicates(self) -> int:  # type: ignore[override]
        return self.index.duplicates

    def lookup(self, seq: Sequence, limit: int) -> HashedRow:
        """Hashes the pages that were not hashed before, then one look-up a page."""
        if not self._caches:
            return HashedRow(seq, None, [], self.page_size)
        chain = self._chain(seq)
        return HashedRow(seq, chain, self._pages(chain, limit), self.page_size)

    def find(self, seq: Sequence, limit: int) -> list[int]:
        return self._pages(self._chain(seq), limit) if self._caches else []

    def _pages(self, chain: PageChain, limit: int) -> list[int]:
        if self._window is None:
            return self.index.match(chain, limit)
        skipped, pages = self.index.match_window(chain, limit, max(self._window.tail_pages, 1))
        return [PADDING_PAGE] * skipped + pages

    def _chain(self, seq: Sequence) -> PageChain:
        chain = seq.memo
        if not (isinstance(chain, PageChain) and chain.index is self.index and _still_true(chain, seq)):
            seq.memo = chain = PageChain(self.index, seq.namespace, seq.extra_keys, seq.page_hashes is not None)
        _extend(chain, seq, seq.num_tokens // self.page_size)
        return chain

    def num_idle(self, rows: list[HashedRow]) -> int:
        pages = rows[0].pages if len(rows) == 1 else list({page for row in rows for page in row.pages})
        return len(self.free_queue.inside(pages))

    def touch(self, row: HashedRow) -> None:
        idle = self.free_queue.inside(row.pages)
        if len(idle) < len(row.pages):
            self._share(row.pages)
        self.free_queue.remove(idle)
        self.evictable -= len(idle)

    def _share(self, pages: list[int]) -> None:
        """One holder more for those that have one already."""
        often = self.often
        for page in self.free_queue.outside(pages):
            often[page] = often.get(page, 1) + 1

    def take(self, row: HashedRow, count: int) -> tuple[array[int], tuple[int, ...]]:
        taken = self.free_queue.take(count)
        evicted = self.index.drop(taken) if self.evictable else []
        self.evictable -= len(evicted)
        row.pages += taken
        return array("i", taken), tuple(evicted)

    def take_one(self, row: HashedRow) -> tuple[array[int], tuple[int, ...]]:
        page = self.free_queue.take_one()
        row.pages.append(page)
        if not (self.evictable and self.index.drop((page,))):
            return array("i", (page,)), ()
        self.evictable -= 1
        return array("i", (page,)), (page,)

    def publish(self, row: HashedRow, start: int, end: int) -> tuple[int, ...]:
        chain = _chain_of(row)
        if len(chain.keys) < end:
            _extend(chain, row.seq, end)
        if end - start == 1:
            page = row.pages[start]
            return (page,) if self.index.publish_one(page, chain, start) else ()
        return tuple(self.index.publish(row.pages[start:end], chain, start))

    def unpublish(self, row: HashedRow, start: int) -> tuple[int, ...]:
        dropped = self.index.drop(row.pages[start : row.published])
        self.index.gapless = False  # what others cached behind these pages stays
        self.withdrawn.update(page for page in dropped if page in self.often)
        row.published = start
        return tuple(dropped)

    def let_go(self, row: HashedRow) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pages = row.pages[::-1]
        if self._window is None and not self.withdrawn:  # pages that serve hits are those that the row published
            border = len(pages) - row.published
            return self._to_queue(self._let_go(pages[:border]), self._let_go(pages[border:]))
        return self._sort_to_queue(self._let_go(pages))

    def share(self, row: HashedRow, seq: Sequence, num_pages: int, num_published: int) -> HashedRow:
        """Hashes the child's pages."""
        child = HashedRow(seq, self._chain(seq) if row.publishes else None, row.pages[:num_pages], self.page_size)
        child.adopted = child.published = num_published
        self._share(child.pages)
        return child

    def replace(self, row: HashedRow, position: int, page: int) -> None:
        self._let_go_shared(row.pages[position : position + 1])
        row.pages[position] = page

    def num_holders(self, page: int) -> int:
        return self.often.get(page, 0 if page in self.free_queue else 1)

    def let_go_part(self, row: HashedRow, low: int, high: int) -> tuple[int, ...]:
        pages = row.pages[low:high]
        row.pages[low:high] = [PADDING_PAGE] * len(pages)
        freed, cached = self._sort_to_queue(self._let_go(pages[::-1]))
        return (*freed, *cached)

    def _let_go(self, pages: list[int]) -> list[int]:
        """One holder less for each; returns those that nobody holds now."""
        often = self.often
        if not often and self._window is None:
            return pages
        idle = [page for page in pages if page not in often and page != PADDING_PAGE]
        if len(idle) < len(pages):
            self._let_go_shared(pages)
        return idle

    def _sort_to_queue(self, idle: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        keys = self.index.keys
        freed = [page for page in idle if keys[page] is None]
        self.withdrawn.difference_update(freed)
        return self._to_queue(freed, [page for page in idle if keys[page] is not None])

    def _to_queue(self, freed: list[int], cached: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self.free_queue.prepend(freed)
        self.free_queue.append(cached)
        self.evictable += len(cached)
        return tuple(freed), tuple(cached)

    def _let_go_shared(self, pages: Iterable[int]) -> None:
        """One holder less for those that have several."""
        often = self.often
        for page in pages:
            if page in often:
                often[page] -= 1
                if often[page] == 1:
                    del often[page]

    def evict(self, count: int) -> tuple[int, ...]:
        victims: list[int] = []
        for page in self.free_queue:
            if len(victims) == count:
                break
            if self.index.keys[page] is not None:
                victims.append(page)
        self.evictable -= count
        return tuple(self.index.drop(victims))

    def clear(self) -> tuple[int, ...]:
        self.evictable = 0
        self.index.gapless = self._window is None
        return tuple(self.index.clear())

    def queue(self) -> Iterator[int]:
        return iter(self.free_queue)

    def marks(self, rows: Iterable[HashedRow]) -> Mapping[int, str]:
        often = self.often
        return {
            page: ("*" if self.index.keys[page] is not None else "") + (f"({often[page]})" if page in often else "")
            for page in range(1, self.num_pages + 1)
        }

    def problems(self, rows: list[HashedRow], pins: list[HashedRow]) -> list[str]:
        """Costs the hashing of every cached text again."""
        found = self.free_queue.problems()
        if found:  # the links cannot be walked
            return found
        held = holders([*rows, *(row for row in pins if row.held)])
        refs = {page: self.num_holders(page) for page in range(1, self.num_pages + 1)}
        return [
            *state_problems(self.num_pages, refs, set(self.free_queue), held),
            *self._key_problems(rows),
            *self._counter_problems(held),
            *self.index.problems(),
        ]

    def _key_problems(self, rows: list[HashedRow]) -> Iterator[str]:
        keys = self.index.keys
        if keys[PADDING_PAGE] is not None:
            yield "the padding page has a key"
        for row in rows:
            if not row.publishes:
                continue
            name, chain = repr(row.seq.request_id), _chain_of(row)
            if len(chain.keys) < row.published and self._window is None:
                yield f"request {name}: {row.published} pages published, {len(chain.keys)} hashed"
                continue
            if not _still_true(chain, row.seq):
                yield f"request {name}: its tokens are not those that were hashed"
            for position, page in enumerate(row.pages):
                expected = chain.keys[position] if position < min(row.published, len(chain.keys)) else None
                may_be_none = self._window is not None or page in self.withdrawn
                if 0 < page <= self.num_pages and keys[page] != expected and not (may_be_none and keys[page] is None):
                    yield f"request {name}: page {page} at position {position} serves other content"

    def _counter_problems(self, held: dict[int, int]) -> Iterator[str]:
        evictable = sum(self.index.keys[page] is not None for page in self.free_queue)
        if self.evictable != evictable:
            yield f"evictable is {self.evictable}, {evictable} pages of the free queue have a key"
        shared = sum(count > 1 for count in held.values())
        if self.shared != shared:
            yield f"shared is {self.shared}, counted {shared}"


def _chain_of(row: HashedRow) -> PageChain:
    if row.chain is None:
        raise ValueError(f"request {row.seq.request_id!r} has no keys: nothing of it is cached")
    return row.chain


def _extend(chain: PageChain, seq: Sequence, num_pages: int) -> None:
    if seq.page_hashes is None:
        chain.extend(seq.token_ids, num_pages)
    else:
        chain.extend_given(seq.page_hashes, num_pages)


def _still_true(chain: PageChain, seq: Sequence) -> bool:
    return chain.fits(seq.token_ids, seq.namespace, seq.extra_keys)
