"""The pages of the general form: who holds them, what they serve, which are taken and which evicted next.

    index = queue    free and cached pages nobody holds stand in one order; taking a cached page evicts it. Pages
                     without content come first (unhashed_to_head), or where they were freed (not)
    index = tree     free pages stand apart; when they run out, ends of the prefix tree are evicted

What is evicted is chosen by `eviction_order`; how much at once by `eviction_unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from kvarena.allocators.config import Design
from kvarena.allocators.general_text import Page, Text, TreePage, prune
from kvarena.prefix.eviction import order, queue_for


class PagePool:
    """Pages 1..num_pages and the texts they serve.

    free        ids of pages without content, the next to be taken first; `strays` more stand in the queue of cached
                pages (unhashed_to_head = False)
    evictable   pages that serve hits and that nobody holds
    shared      pages that more than one row holds
    duplicates  pages that serve what an earlier one serves too
    """

    def __init__(self, num_pages: int, design: Design) -> None:
        self.num_pages = num_pages
        self.order = order(design.eviction_order)
        self.queue = queue_for(self.order)
        self.roots: dict[Hashable, Text] = {}
        self.free: deque[int] = deque(range(1, num_pages + 1))
        self.strays = self.evictable = self.shared = self.duplicates = 0
        self.by_release = design.recency == "release"
        self.in_tree = design.index == "tree"
        self.whole_leaf = design.eviction_unit == "leaf"
        self.touches_suffix = design.split_touches_suffix
        self.has_edges = self.whole_leaf or self.touches_suffix
        self.backwards = design.reversed_release
        self._page = TreePage if self.in_tree else Page
        self._strays = not (self.in_tree or design.unhashed_to_head)
        # SGLang 0.5.22: at page_size 1 freed pages go behind all others, else before them.
        self._behind = self.in_tree and design.page_size == 1 and not design.unhashed_to_head
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self.free) + self.strays

    @property
    def room(self) -> int:
        """Pages that can be taken, by eviction or not."""
        return self.num_free + self.evictable

    # --- time ---

    def tick(self) -> int:
        """The next moment."""
        self._clock += 1
        return self._clock

    def touch(self, pages: Sequence[Page]) -> None:
        """These pages, in position order, are used now. By `reversed_release` the last or the first is oldest."""
        for page in reversed(pages) if self.backwards else pages:
            page.last_access = self.tick()
            if not self.order.only_grows and page.cached and not (page.locks or page.children):
                self.queue.offer(page)

    # --- texts ---

    def root(self, space: Hashable) -> Text:
        """Where the texts of a namespace begin; made on first use, dropped with its last content and user."""
        found = self.roots.get(space)
        if found is None:
            found = self.roots[space] = Text(None, space)
        return found

    def tidy(self, text: Text) -> None:
        """Something left `text`: forget what nothing holds, and queue what has become an end."""
        stays = prune(text)
        if stays is None:
            root = text
            while root.parent is not None:
                root = root.parent
            self.roots.pop(root.key, None)
        elif self.in_tree:
            self.offer(stays.copies)

    def split_below(self, text: Text) -> bool:
        """An edge that goes on behind `text` ends here from now on. True if what it cut off counts as used now."""
        touched = self.touches_suffix and text.run_on is not None
        if touched:
            for rest in text.edge_after():
                self.touch(rest.copies)
        text.run_on = None
        return touched

    # --- holding ---

    def hold(self, pages: Iterable[Page]) -> None:
        """One holder more for each page."""
        for page in pages:
            if not page.locks and page.cached:
                self.evictable -= 1
            page.locks += 1
            self.shared += page.locks == 2

    def let_go(self, pages: Iterable[Page], *, used: bool = True) -> tuple[list[Page], list[Page]]:
        """One holder less for each page, in order: (pages that hold nothing now, pages still cached) nobody holds.

        The former are the caller's to put back. Not `used`: a pin that came to nothing, which no release counts.
        """
        freed: list[Page] = []
        cached: list[Page] = []
        for page in pages:
            page.locks -= 1
            self.shared -= page.locks == 1
            if not page.locks:
                (cached if page.cached else freed).append(page)
        self.evictable += len(cached)
        if self.by_release and used:
            for page in cached:
                page.last_access = self.tick()
        self.offer(cached)
        return freed, cached

    def offer(self, pages: Iterable[Page]) -> None:
        """Queue those of these pages that may be evicted."""
        for page in pages:
            if not (page.locks or page.children):
                self.queue.offer(page)

    def put_back(self, pages: Sequence[Page]) -> None:
        """Pages without content and holder can be taken again; one call is one run."""
        if self._strays:
            for page in pages:
                page.last_access = self.tick()
                self.queue.offer(page)
            self.strays += len(pages)
            return
        numbers = self._forsake(pages)
        if self._behind:
            self.free.extend(numbers)
        else:
            self.free.extendleft(reversed(numbers))

    def _forsake(self, pages: Iterable[Page]) -> list[int]:
        numbers = []
        for page in pages:
            page.gone = True
            numbers.append(page.number)
        return numbers

    # --- taking and evicting ---

    def take(self, count: int) -> tuple[list[Page], list[int]]:
        """The next `count` pages, held, and the ids of those whose content went for it. The caller tested the room."""
        taken: list[Page] = []
        evicted: list[int] = []
        for _ in range(count):
            number = self.free.popleft() if self.free else self._take_queued(evicted)
            taken.append(self._page(number, self.tick()))
        return taken, evicted

    def _take_queued(self, evicted: list[int]) -> int:
        page = self._next()
        if not page.cached:
            self.strays -= 1
            page.gone = True
            return page.number
        unit = self._drop_unit(page)
        evicted += (each.number for each in unit)
        self._forsake(unit)
        self.free.extendleft(reversed([each.number for each in unit if each is not page]))
        return page.number

    def evict(self, count: int) -> list[int]:
        """Drop cached content, unit by unit, until `count` pages more are free or none can go; their ids in order."""
        evicted: list[int] = []
        passed: list[Page] = []
        while len(evicted) < count and self.evictable:
            page = self._next()
            if not page.cached:
                passed.append(page)
                continue
            unit = self._drop_unit(page)
            evicted += (each.number for each in unit)
            self._free_in_place(unit)
        for page in passed:
            self.queue.offer(page)
        return evicted

    def _free_in_place(self, unit: list[Page]) -> None:
        """The pages of a unit are free: in a queue they keep their place, hence stand behind all without content."""
        if self.in_tree:
            self.put_back(unit)
        elif self._strays:
            self.strays += len(unit)
            for page in unit:
                self.queue.offer(page)
        else:
            self.free.extend(self._forsake(unit))

    def _next(self) -> Page:
        page = self.queue.pop()
        return self._any_idle() if page is None else page

    def _any_idle(self) -> Page:
        """The oldest idle page, wherever it stands: only above a text whose own pages an abort took back."""
        idle = [page for root in self.roots.values() for page in pages_below(root) if not page.locks]
        return min(idle, key=lambda page: page.last_access)

    def _drop_unit(self, page: Page) -> list[Page]:
        """Take the content of what goes with `page`: itself, or its leaf up to what somebody holds. Position order."""
        unit = self._leaf(page) if self.whole_leaf and page.text is not None else [page]
        for each in unit:
            self.forget(each)
        return unit

    def _leaf(self, page: Page) -> list[Page]:
        end = page.text
        if end is None or end.goes_on:
            return [page]
        backwards: list[Page] = []
        for text in end.edge_before():
            if any(copy.locks for copy in text.copies) or (text is not end and text.parts):
                break
            backwards += text.copies
        return backwards[::-1] or [page]

    def forget(self, page: Page) -> None:
        """`page` serves nothing any more. Who holds it keeps it."""
        if not page.locks and page.cached:
            self.evictable -= 1
        text, part = page.text, page.part
        page.text = page.part = None
        if text is not None:
            text.copies.remove(page)
            self.duplicates -= bool(text.copies)
            self.tidy(text)
        if part is not None:
            before, key = part
            before.parts[key].remove(page)
            if not before.parts[key]:
                del before.parts[key]
            self.tidy(before)

    def hand_over_part(self, page: Page, heir: Page) -> None:
        """`heir` holds all that `page` does, and serves the beginning of it from now on."""
        if page.part is None:
            return
        before, key = page.part
        if heir.part is None:
            before.add_part(key, heir)
            heir.part = page.part
        self.forget(page)

    def clear(self) -> list[int]:
        """Forget all content, while nobody holds anything. A tree starts anew, a queue keeps its order."""
        dropped = self.evict(self.evictable)
        if self.in_tree:
            self.free = deque(sorted(self.free))
        return dropped


def pages_below(root: Text) -> Iterable[Page]:
    """Every page that serves a text below `root`, or the beginning of one."""
    stack = [root]
    while stack:
        text = stack.pop()
        yield from text.copies
        for pages in text.parts.values():
            yield from (page for page in pages if page.text is None)
        stack.extend(text.children.values())
