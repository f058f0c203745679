"""The cheap form of the block design's pages: what came together is kept together, as runs in a tree of texts.

Decides exactly as `block_hashed` wherever rows lose no page before their end, that is without sliding windows. No
page is hashed; a prefix is found by comparing bytes. Pages without content form a stack, since they are put back and
taken at the head of the queue only; cached ones follow them in the tree's order of eviction.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvarena.allocators.block_rows import PageStore, Row, holders, state_problems
from kvarena.allocators.config import Design
from kvarena.allocators.interface import AllocatorError, PageIds, Sequence
from kvarena.prefix.page_text import TOKEN_BYTES, encode, page_extras
from kvarena.prefix.run_tree import NO_EXTRAS, Extras, Found, Node, Run, RunTree
from kvarena.prefix.run_tree_check import holder_problems, text_above, tree_problems

NOTHING = Found(0)


class RunRow(Row):
    """A row as runs.

    parts    (run, pages) in position order: the last `pages` pages up to the end of `run`, over all its fronts
    node     where the published text ends
    found    the match behind the pin
    root     namespace of the text; `width` bytes a page, `extras` what images add to pages
    """

    __slots__ = ("extras", "found", "node", "parts", "root", "width")

    def __init__(self, seq: Sequence, page_size: int, publishes: bool) -> None:
        super().__init__(seq, array("i"), page_size, publishes)
        self.parts: list[tuple[Run, int]] = []
        self.found = NOTHING
        self.node: Node | None = None
        self.root: Any = None
        self.width = 0
        self.extras: Extras = NO_EXTRAS


class PageRuns(PageStore[RunRow]):
    """A stack of pages without content, its end being the head of the queue, and a tree of runs behind it."""

    def __init__(self, num_pages: int, design: Design) -> None:
        self.num_pages = num_pages
        self.page_size = design.page_size
        self.tree = RunTree()
        self.stack = array("i", range(num_pages, 0, -1))
        self._often: dict[int, int] = {}  # holders of pages that serve no hits, where forks made them more than one
        self._caches = design.prefix_cache

    @property
    def queued(self) -> int:  # type: ignore[override]
        return len(self.stack) + self.tree.evictable

    @property
    def evictable(self) -> int:  # type: ignore[override]
        return self.tree.evictable

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.tree.shared + len(self._often)

    @property
    def duplicates(self) -> int:  # type: ignore[override]
        return self.tree.duplicates

    def lookup(self, seq: Sequence, limit: int) -> RunRow:
        """One dict look-up and one byte comparison a run."""
        row = self._row(seq)
        if not self._caches:
            return row
        row.found = found = self._find(row, limit)
        row.adopted = row.published = found.num_pages
        row.committed = found.num_pages * self.page_size
        for run in found.runs:
            row.pages += run.pages
        if found.surplus:
            del row.pages[found.num_pages :]
        return row

    def _row(self, seq: Sequence) -> RunRow:
        row = RunRow(seq, self.page_size, self._caches)
        if self._caches:
            given = seq.page_hashes is not None
            row.width = TOKEN_BYTES if given else self.page_size * TOKEN_BYTES
            row.root = given if seq.namespace is None else (given, encode(seq.namespace), seq.namespace)
            if seq.extra_keys and not given:
                row.extras = {page: tuple(extra) for page, *extra in page_extras(seq.extra_keys, self.page_size)}
        return row

    def _find(self, row: RunRow, limit: int) -> Found:
        root = self.tree.find_root(row.root)
        if root is None:
            return Found(self.tree.version)
        text = _text(row.seq)
        return self.tree.match(root, text, min(limit, len(text) // row.width), row.extras)

    def _found(self, row: RunRow) -> Found:
        """What the pin found. Looked up again if the tree changed meanwhile: the same pages, perhaps in other parts."""
        if row.found.version != self.tree.version:
            row.found = self._find(row, row.adopted)
            if row.found.num_pages != row.adopted:
                raise AllocatorError(f"request {row.seq.request_id!r}: pinned {row.adopted} pages, found {row.found}")
        return row.found

    def num_idle(self, rows: list[RunRow]) -> int:
        if len(rows) == 1:
            return self._found(rows[0]).num_idle if rows[0].publishes else 0
        idle: dict[Run, int] = {}
        for row in rows:
            found = self._found(row)
            for run in found.runs:
                size = len(run.pages) - (found.surplus if run is found.runs[-1] else 0)
                if not run.refs:
                    idle[run] = max(size, idle.get(run, 0))
        return sum(idle.values())

    def touch(self, row: RunRow) -> None:
        if not row.publishes:
            return
        runs, node = self.tree.hold(self._found(row))
        row.parts = [(run, len(run.pages)) for run in runs]
        row.node = self.tree.root(row.root, row.width) if node is None else node
        row.node.users += 1
        row.found = NOTHING

    def take(self, row: RunRow, count: int) -> tuple[array[int], array[int]]:
        clean = min(count, len(self.stack))
        taken = self.stack[: -clean - 1 : -1]
        del self.stack[len(self.stack) - clean :]
        evicted = self.tree.evict(count - clean) if clean < count else array("i")
        taken += evicted
        row.pages += taken
        return taken, evicted

    def take_one(self, row: RunRow) -> tuple[array[int], PageIds]:
        if not self.stack:
            return self.take(row, 1)
        page = self.stack.pop()
        row.pages.append(page)
        return array("i", (page,)), ()

    def publish(self, row: RunRow, start: int, end: int) -> array[int]:
        node, pages, text = _node_of(row), row.pages[start:end], _text_between(row, start, end)
        if row.parts and not row.extras:
            run, count = row.parts[-1]
            if self.tree.extend(run, node, text, pages):
                row.parts[-1] = (run, count + len(pages))
                return array("i")
        runs, last, duplicates = self.tree.publish(node, text, start, pages, row.extras)
        row.parts += [(run, len(run.pages)) for run in runs]
        node.users -= 1
        last.users += 1
        row.node = last
        return duplicates

    def unpublish(self, row: RunRow, start: int) -> array[int]:
        end = row.published
        for run, count in reversed(row.parts):
            if end <= start:
                break
            self.tree.unpublish(run, count, max(start - (end - count), 0))
            end -= count
        return row.pages[start : row.published]

    def let_go(self, row: RunRow) -> tuple[PageIds, PageIds]:
        let_go: list[Run] = []
        idle, border = 0, row.published
        for run, count in reversed(row.parts):
            idle += self.tree.let_go(run, count, let_go)
        freed: PageIds = ()
        if border < len(row.pages):
            freed = row.pages[: border - 1 if border else None : -1]
        if self._often:
            freed = array("i", [page for page in freed if not self._let_go_shared(page)])
        cached: PageIds = ()
        if idle == border:
            if border:
                cached = memoryview(row.pages)[border - 1 :: -1]  # backwards without a copy
        else:
            cached = _backwards(run for run in let_go if run.node is not None)
            freed = array("i", [*freed, *_backwards(run for run in let_go if run.node is None)])
        if freed:
            self.stack.extend(freed[::-1])
        node = row.node
        if node is not None:
            node.users -= 1
            if not node.copies:
                self.tree.prune(node)
        return freed, cached

    def share(self, row: RunRow, seq: Sequence, num_pages: int, num_published: int) -> RunRow:
        """O(runs); cuts a run if the child holds a part of it."""
        child = self._row(seq)
        child.pages = row.pages[:num_pages]
        child.adopted = child.published = num_published
        if row.publishes:
            child.parts, child.node = self._parts_before(row, num_published)
            child.node.users += 1
            for run, count in child.parts:
                self.tree.share(run, count)
        for page in child.pages[num_published:]:
            self._often[page] = self._often.get(page, 1) + 1
        return child

    def _parts_before(self, row: RunRow, num_pages: int) -> tuple[list[tuple[Run, int]], Node]:
        """The parts of the first `num_pages` pages of a row, and the node in which they end."""
        parts, surplus = row.parts[:], row.published - num_pages
        node = self.tree.above(_node_of(row), surplus)
        while surplus > 0:
            run, count = parts.pop()
            self.tree.cut_off(run, surplus)
            surplus, count = surplus - len(run.pages), count - len(run.pages)
            if count and run.front is not None:
                parts.append((run.front, count))
        return parts, node

    def replace(self, row: RunRow, position: int, page: int) -> None:
        self._let_go_shared(row.pages[position])
        row.pages[position] = page

    def num_holders(self, page: int) -> int:
        return self._often.get(page, 1)

    def _let_go_shared(self, page: int) -> bool:
        """One holder less for a page that serves no hits; False if it has no other one."""
        count = self._often.get(page, 1) - 1
        if count > 1:
            self._often[page] = count
        else:
            self._often.pop(page, None)
        return count > 0

    def evict(self, count: int) -> array[int]:
        victims = self.tree.evict(count)
        self.stack[0:0] = victims[::-1]
        return victims

    def clear(self) -> tuple[int, ...]:
        return tuple(sorted(self.evict(self.tree.evictable)))

    def queue(self) -> Iterator[int]:
        yield from reversed(self.stack)
        for run in self.tree.idle():
            yield from reversed(run.pages)

    def marks(self, rows: Iterable[RunRow]) -> Mapping[int, str]:
        runs = [*self.tree.idle(), *(run for row in rows for run in _runs_of(row))]
        marks = {
            page: ("" if run.node is None else "*") + (f"({run.refs})" if run.refs > 1 else "")
            for run in runs
            for page in run.pages
        }
        return {**marks, **{page: f"({count})" for page, count in self._often.items()}}

    def problems(self, rows: list[RunRow], pins: list[RunRow]) -> list[str]:
        """Costs one walk over the tree and one comparison of each live row's text."""
        found = tree_problems(self.tree)
        if found:  # the lists cannot be walked
            return found
        live = [*rows, *(row for row in pins if row.held)]
        queued = list(self.queue())
        found = [f"page {page} stands in the queue twice" for page, n in Counter(queued).items() if n > 1]
        found += state_problems(self.num_pages, self._page_refs(live), set(queued), holders(live))
        held = Counter(run for row in live for run in _runs_of(row))
        found += holder_problems(self.tree, held, Counter(id(row.node) for row in live))
        often = Counter(page for row in live for page in row.pages[row.published :])
        if self._often != (counted := {page: count for page, count in often.items() if count > 1}):
            found.append(f"pages that several hold without serving hits are {self._often}, counted {counted}")
        for row in live:
            found += _row_problems(row)
        return found

    def _page_refs(self, rows: list[RunRow]) -> Mapping[int, int]:
        refs: Counter[int] = Counter(page for row in rows for page in row.pages[row.published :])
        runs = {*self.tree.idle(), *(run for row in rows for run in _runs_of(row))}
        refs.update({page: run.refs for run in runs for page in run.pages})
        return refs


def _row_problems(row: RunRow) -> Iterator[str]:
    name = repr(row.seq.request_id)
    pages = [page for run in reversed(_runs_of(row)) for page in run.pages]
    if pages != list(row.pages[: row.published]):
        yield f"request {name}: its runs name pages {pages}, its row {list(row.pages[: row.published])}"
    if row.node is not None and text_above(row.node) != _keys_between(row):
        yield f"request {name}: its text is not that of the node where it ends"


def _runs_of(row: RunRow) -> list[Run]:
    """Every run that a row holds, deepest first."""
    runs: list[Run] = []
    for last, count in reversed(row.parts):
        run: Run | None = last
        while count > 0 and run is not None:
            runs.append(run)
            count -= len(run.pages)
            run = run.front
    return runs


def _backwards(runs: Iterable[Run]) -> array[int]:
    """Pages of runs, deepest run first, last page first."""
    pages = array("i")
    for run in runs:
        pages += run.pages[::-1]
    return pages


def _node_of(row: RunRow) -> Node:
    if row.node is None:
        raise ValueError(f"request {row.seq.request_id!r}: nothing of it is cached")
    return row.node


def _text(seq: Sequence) -> bytes:
    return (seq.token_ids if seq.page_hashes is None else seq.page_hashes).tobytes()


def _text_between(row: RunRow, start: int, end: int) -> bytes:
    """Text of the pages at positions [start, end)."""
    seq = row.seq
    if seq.page_hashes is not None:
        return seq.page_hashes[start:end].tobytes()
    size = row.width // TOKEN_BYTES
    return seq.token_ids[start * size : end * size].tobytes()


def _keys_between(row: RunRow) -> list[Any]:
    text = _text_between(row, 0, row.published)
    pages = [text[i * row.width : (i + 1) * row.width] for i in range(row.published)]
    return [(page, row.extras[i]) if i in row.extras else page for i, page in enumerate(pages)]
