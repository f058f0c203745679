"""Look-up and publishing of the general form: how the pages of a row and the texts of the pool meet."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvarena.allocators.config import Design
from kvarena.allocators.general_keys import PageKey, PageKeys
from kvarena.allocators.general_pool import PagePool
from kvarena.allocators.general_row import Row
from kvarena.allocators.general_text import Page, Text
from kvarena.allocators.interface import Sequence as Seq


@dataclass
class Published:
    """What one publication did.

    pages       that serve a text from now on
    duplicates  own pages that equal an earlier one: kept beside it, or given up for it
    freed       those of them that hold nothing now, a run for each edge; the caller puts them back
    rewritten   row entries that name another page now
    """

    pages: list[Page] = field(default_factory=list)
    duplicates: list[Page] = field(default_factory=list)
    freed: list[list[Page]] = field(default_factory=list)
    rewritten: tuple[int, int] = (0, 0)


class Publisher:
    """Finds prefixes and publishes rows, by a design's rules."""

    def __init__(self, design: Design, pool: PagePool, keys: PageKeys) -> None:
        self.design = design
        self.pool = pool
        self.keys = keys
        self.merges = design.duplicates == "merge"
        self.by_access = design.recency == "access"
        self.unit = design.hash_unit or 0

    # --- look-up ---

    def look_up(self, seq: Seq, num_tokens: int) -> Row:
        """A row with the longest cached prefix among the first `num_tokens` tokens. Holds nothing.

        Under recency = access, what was found is used now, whatever comes of the look-up (SGLang 0.5.22); under
        split_touches_suffix so is the rest of the edge in which it ended.
        """
        pool, size = self.pool, self.design.page_size
        text, pages = pool.root(self.keys.space(seq)), list[Page]()
        if self.design.prefix_cache:
            self.keys.check(seq)
            for key in self.keys.pages(seq, 0, self.keys.num_pages(seq, num_tokens)):
                child = text.children.get(key)
                if child is None or not child.copies:
                    break
                text = child
                pages.append(child.copies[0])
        row = Row(seq, text, pages, size, pool.tick())
        if self.unit and self.design.prefix_cache:
            self._find_part(row, num_tokens)
        touched = pool.has_edges and pool.split_below(text)
        if self.by_access or touched:  # what stands before a used text is never older than it
            pool.touch(row.named)
        return row

    def _find_part(self, row: Row, num_tokens: int) -> None:
        """Go on inside the first page that is not cached whole: the longest beginning that was offered, in hash units.

        vLLM 0.32.0 probes from the longest to the shortest.
        """
        if not row.text.parts:
            return
        start = row.adopted * self.design.page_size
        most = min(num_tokens - start, self.design.page_size - 1) // self.unit * self.unit
        for length in range(most, 0, -self.unit):
            found = row.text.parts.get(self.keys.part(row.seq, start, start + length))
            if found:
                row.source = found[0]
                row.hit_tokens = row.committed = start + length
                return

    # --- publishing ---

    def publish(self, row: Row, num_tokens: int) -> Published:
        """Offer the whole pages of the first `num_tokens` tokens, from where the row's publication ended."""
        if not self.design.prefix_cache:
            return Published()
        start = row.published
        end = max(start, min(self.keys.num_pages(row.seq, num_tokens), len(row.pages)))
        if end == start and row.checkpointed:
            if self.by_access:
                self.pool.touch(row.pages[:start])
            return Published()
        done = self._insert(row, start, end)
        self._count_hits(row)
        row.checkpointed = True
        if self.by_access:
            self.pool.touch(row.pages[:end])
        if row.seq.num_prompt_tokens < num_tokens:
            self._border(row, start)
        return done

    def _insert(self, row: Row, start: int, end: int) -> Published:
        pool, done = self.pool, Published()
        text, given, created, goes_on = row.text, list[list[Page]](), 0, False
        for position, key in enumerate(self.keys.pages(row.seq, start, end), start):
            page, child = row.pages[position], text.children.get(key)
            if child is None or not child.copies:
                child = self._grow(text, key, goes_on)
                goes_on, created = True, created or pool.tick()
                self._serve(row, page, child, created)
                done.pages.append(page)
            elif page.text is not child:
                goes_on = False
                done.duplicates.append(page)
                if self.merges:
                    self._give_up(row, position, child, given)
                else:
                    self._serve(row, page, child, pool.tick())
                    done.pages.append(page)
            text = child
        if pool.has_edges:
            pool.split_below(text)
        self.move_end(row, text)
        row.published = end
        if given:
            done.rewritten = (start, start + sum(map(len, given)))
            done.freed = [pool.let_go(run)[0] for run in given]
        return done

    def _grow(self, text: Text, key: PageKey, goes_on: bool) -> Text:
        """A text behind `text`: the first of a publication begins an edge, those after it go on with it."""
        child = text.child(key)
        if self.pool.has_edges and text.run_on is not child:
            self.pool.split_below(text)
            if goes_on and len(text.children) == 1:
                text.run_on = child
        return child

    def _serve(self, row: Row, page: Page, text: Text, created: int) -> None:
        self.pool.duplicates += bool(text.copies)
        text.copies.append(page)
        page.text, page.created, page.author = text, created, row.serial
        if len(text.copies) == 2:
            self.pool.offer(text.copies)  # in a tree the earlier one had to stay; now either may go

    def _give_up(self, row: Row, position: int, text: Text, given: list[list[Page]]) -> None:
        """The row names the tree's page from now on (SGLang 0.5.22); its own goes with those of the same edge."""
        kept = text.copies[0]
        self.pool.hold((kept,))
        own, row.pages[position] = row.pages[position], kept
        self.pool.hand_over_part(own, kept)
        begins_edge = text.parent is None or text.parent.run_on is not text
        if begins_edge or not given:
            given.append([])
        given[-1].append(own)

    def move_end(self, row: Row, text: Text) -> None:
        """The row's published text ends at `text`."""
        if text is not row.text:
            row.text.users -= 1
            text.users += 1
            row.text = text

    def _count_hits(self, row: Row) -> None:
        if self.pool.order.uses_hits:
            for page in row.pages[row.counted : row.published]:
                page.hits += 1
        row.counted = row.published

    def _border(self, row: Row, start: int) -> None:
        """An edge ends with the prompt, which outlives what was generated from it (SGLang 0.5.22)."""
        prompt = row.seq.num_prompt_tokens // self.design.page_size
        if not 0 < prompt < row.published:
            return
        last = row.pages[prompt - 1].text
        if prompt != start and self.pool.has_edges and last is not None:
            self.pool.split_below(last)
        if self.pool.order.uses_priority:
            for page in row.pages[:prompt]:
                page.priority = max(page.priority, 1)

    def offer_tail(self, row: Row) -> None:
        """The beginning of the page in which the prompt ends, up to its last hash unit (vLLM 0.32.0, hybrid models).

        Only once it is written, whatever `publish` says of whole pages: whoever hits it copies it at once.
        """
        prompt, size = row.seq.num_prompt_tokens, self.design.page_size
        if not self.unit or row.tail_offered or row.committed < prompt:
            return
        row.tail_offered = True
        whole, length = prompt // size, prompt % size // self.unit * self.unit
        if not length or row.published != whole or whole >= len(row.pages):
            return
        page, key = row.pages[whole], self.keys.part(row.seq, whole * size, whole * size + length)
        if key is None or page.cached or key in row.text.parts:
            return
        row.text.add_part(key, page)
        page.part = (row.text, key)

    def withdraw(self, row: Row, start: int, *, spares_shared: bool) -> list[int]:
        """The whole pages that the row published itself, from position `start` on, serve nothing any more; their ids.

        `spares_shared`: those that another row holds too go on serving.
        """
        own = [page for page in row.pages[start:] if page.text is not None and page.author == row.serial]
        pages = [page for page in own if page.locks == 1] if spares_shared else own
        for page in pages:
            self.pool.forget(page)
        return [page.number for page in pages]
