"""The least that pure Python has to do for a row of the benchmark, as code that is timed in turns with ours.

A replay has two parts that no allocator behind this interface can leave out, and its floor is their sum:

    Hollow   the four verbs with nothing behind them: the sequence made of an int32 array, is it live, result objects
    Bare...  the same hits, found by a structure with nothing around it: no interface, ref counts, locks, gates,
             events, forks or checks, for one request at a time

The bare structures are no allocators: they serve whole requests, one after the other, and find the hits that ours
find (`serve` gives them, and they are compared before anything counts). Where even the floor does not reach what is
asked for, no Python does; where it does, what lies between is what the bare ones leave out.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import xxhash
from kvarena.allocators.interface import Commit, Pin, Release, Released, Reservation, Sequence
from kvarena.experiments.bench.alloc_load import Prompt
from kvarena.prefix.radix_tree import common_pages

TOKEN_BYTES = 4


class Bare(Protocol):
    """Serves one request after the other; gives its hit in tokens."""

    def serve(self, prompt: Prompt) -> int: ...


class Hollow:
    """The four verbs, all of their checks that a request is live and all of their answers; nothing is decided."""

    def __init__(self, page_size: int, longest: int = 1 << 16) -> None:
        self.page_size = page_size
        self._pages = array("i", range(longest // page_size))
        self._rows: dict[str, tuple[Sequence, array[int]]] = {}

    def pin(self, seq: Sequence) -> Pin:
        if seq.request_id in self._rows:
            raise ValueError(f"request {seq.request_id!r} is already live")
        self._rows[seq.request_id] = seq, array("i")
        seq.num_computed_tokens = 0
        return Pin(seq, 0)

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation]:
        answers = []
        for seq, n in wants:
            pages = self._row(seq)
            pages += self._pages[: -(-n // self.page_size)]
            answers.append(Reservation(seq, pages[:]))
        return answers

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        answers = []
        for seq, n in done:
            self._row(seq)
            seq.num_computed_tokens = n
            answers.append(Commit(seq))
        return answers

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        for seq in seqs:
            self._row(seq)
            del self._rows[seq.request_id]
            seq.num_computed_tokens = 0
        return Released()

    def _row(self, seq: Sequence) -> array[int]:
        row = self._rows.get(seq.request_id)
        if row is None or row[0] is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live")
        return row[1]


class BarePages:
    """Block, page by page: a hash a page, a dict from hash to page, a doubly linked queue. Hits are not confirmed."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        pages = list(range(num_tokens // page_size + 1))
        self.next = [*pages[1:], 0]
        self.previous = [pages[-1], *pages[:-1]]
        self.keys: list[int | None] = [None] * len(pages)
        self.first: dict[int, int] = {}
        self.width = np.dtype((np.void, TOKEN_BYTES * page_size))

    def serve(self, prompt: Prompt) -> int:
        size, above, hash_page = self.page_size, 0, xxhash.xxh3_64_intdigest
        full = len(prompt) // size
        texts = np.frombuffer(prompt.tobytes(), self.width, full).tolist()
        keys = [above := hash_page(text, above) for text in texts]
        row = self._look_up(keys[: (len(prompt) - 1) // size])
        hit = len(row)
        new = self._take(-(-len(prompt) // size) - hit)
        for page, key in zip(new, keys[hit:], strict=False):
            self.keys[page] = key
            self.first.setdefault(key, page)
        row += new
        self._link(self.previous[0], row[:full][::-1], 0)
        self._link(0, row[full:], self.next[0])
        return hit * size

    def _look_up(self, keys: list[int]) -> list[int]:
        following, previous = self.next, self.previous
        found = []
        for page in map(self.first.get, keys):
            if page is None:
                break
            found.append(page)
            before, after = previous[page], following[page]
            following[before], previous[after] = after, before
        return found

    def _take(self, count: int) -> list[int]:
        following, keys, first, page = self.next, self.keys, self.first, 0
        taken = [page := following[page] for _ in range(count)]
        following[0] = following[page]
        self.previous[following[0]] = 0
        for page in taken:
            key = keys[page]
            if key is not None:
                keys[page] = None
                if first[key] == page:
                    del first[key]
        return taken

    def _link(self, before: int, pages: list[int], after: int) -> None:
        following, previous = self.next, self.previous
        for page in pages:
            following[before], previous[page] = page, before
            before = page
        following[before], previous[after] = after, before


class Node:
    """An edge of a bare tree; `seen`: when a request last ended here, `queued`: it waits for eviction."""

    __slots__ = ("children", "edge", "pages", "parent", "queued", "seen")

    def __init__(self, parent: Any, edge: bytes, pages: array[int], seen: int) -> None:
        self.parent = parent
        self.edge = edge
        self.pages = pages
        self.seen = seen
        self.children: dict[bytes, Node] = {}
        self.queued = False


class _BareText:
    """What both bare trees share: a walk over edges of bytes, cut where the prompt leaves them."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.width = TOKEN_BYTES * page_size
        self.free = array("i", range(1, num_tokens // page_size + 1))
        self.root = Node(None, b"", array("i"), 0)

    def _walk(self, key: bytes, row: array[int]) -> tuple[Node, list[Node]]:
        """The node where the cached prefix of `key` ends and the path to it; its pages join `row`."""
        node, at, width, path = self.root, 0, self.width, []
        while at < len(key):
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            if not key.startswith(child.edge, at):
                child = self._cut(child, common_pages(child.edge, key, at, width))
                at = len(key)
            node = child
            path.append(node)
            row += node.pages
            at += len(node.edge)
        return node, path

    def _cut(self, node: Node, num_pages: int) -> Node:
        """The first pages of `node` as a node above it."""
        end, width = num_pages * self.width, self.width
        upper = Node(node.parent, node.edge[:end], node.pages[:num_pages], node.seen)
        node.parent.children[node.edge[:width]] = upper
        node.edge, node.pages, node.parent = node.edge[end:], node.pages[num_pages:], upper
        upper.children[node.edge[:width]] = node
        return upper

    def _grow(self, node: Node, edge: bytes, pages: array[int], seen: int) -> Node:
        leaf = node.children[edge[: self.width]] = Node(node, edge, pages, seen)
        return leaf


class BareTree(_BareText):
    """Token: whole leaves go, least recently used first, by a heap whose entries are corrected as they surface."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(num_tokens, page_size)
        self.clock = 0
        self.heap: list[tuple[int, int, Node]] = []
        self.numbers = itertools.count()

    def serve(self, prompt: Prompt) -> int:
        size, width, text, row = self.page_size, self.width, prompt.tobytes(), array("i")
        node, path = self._walk(text[: (len(prompt) - 1) // size * width], row)
        self.clock = node.seen = self.clock + 1
        hit, full = len(row), len(prompt) // size
        new = -(-len(prompt) // size) - hit
        # The demand of a prefill has a page on top where pages hold several tokens.
        asked = new if size == 1 else -(-(len(prompt) - hit * size + size) // size)
        if asked > len(self.free):
            self._evict(asked - len(self.free), path)
        row += self.free[:new]
        del self.free[:new]
        if full > hit:
            self.clock += 1
            node = self._grow(node, text[hit * width : full * width], row[hit:full], self.clock)
        self.clock = node.seen = self.clock + 1
        self._offer(node)
        self.free += row[full:]
        return hit * size

    def _cut(self, node: Node, num_pages: int) -> Node:
        upper = super()._cut(node, num_pages)
        self.clock = node.seen = self.clock + 1  # the cut-off rest counts as used
        return upper

    def _offer(self, node: Node) -> None:
        if not (node.children or node.queued or node is self.root):
            node.queued = True
            heapq.heappush(self.heap, (node.seen, next(self.numbers), node))

    def _evict(self, count: int, held: list[Node]) -> None:
        """Leaves go until so many pages are free; what is held keeps its place."""
        kept = []
        while count > 0 and self.heap:
            seen, _, leaf = heapq.heappop(self.heap)
            leaf.queued = False
            if leaf in held:
                kept.append(leaf)
            elif leaf.seen != seen:
                self._offer(leaf)
            elif not leaf.children:
                parent = leaf.parent
                del parent.children[leaf.edge[: self.width]]
                parent.seen = max(parent.seen, leaf.seen)
                self._offer(parent)
                self.free += leaf.pages
                count -= len(leaf.pages)
        for leaf in kept:
            self._offer(leaf)


class BareRuns(_BareText):
    """Block, by runs: single pages go, from the end of the run that was released first."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(num_tokens, page_size)
        self.free.reverse()  # a stack: the next page is its last
        self.idle: OrderedDict[Node, None] = OrderedDict()

    def serve(self, prompt: Prompt) -> int:
        size, width, text, row = self.page_size, self.width, prompt.tobytes(), array("i")
        node, path = self._walk(text[: (len(prompt) - 1) // size * width], row)
        for each in path:
            self.idle.pop(each, None)
        hit, full = len(row), len(prompt) // size
        row += self._take(-(-len(prompt) // size) - hit)
        if full > hit:
            path.append(self._grow(node, text[hit * width : full * width], row[hit:full], 0))
        self.free += row[: full - 1 if full else None : -1]
        for each in reversed(path):
            self.idle[each] = None
        return hit * size

    def _take(self, count: int) -> array[int]:
        clean = min(count, len(self.free))
        taken = self.free[: -clean - 1 : -1]
        del self.free[len(self.free) - clean :]
        while len(taken) < count:
            run = next(iter(self.idle))
            keep = max(len(run.pages) - (count - len(taken)), 0)
            taken += run.pages[: keep - 1 if keep else None : -1]
            if keep:
                run.edge = run.edge[: keep * self.width]
                del run.pages[keep:]
            else:
                del self.idle[run]
                del run.parent.children[run.edge[: self.width]]
        return taken


BARE: dict[tuple[str, int], Callable[[int, int], Bare]] = {
    ("block hashed", 16): BarePages,
    ("block runs", 16): BareRuns,
    ("token", 1): BareTree,
    ("token", 16): BareTree,
}
