"""A radix tree over pages of tokens: which cached pages match these tokens?

An edge is a run of whole pages: their tokens as bytes, and the ids of the pages that hold their KV. Two children of
a node never share their first page, so a walk looks at one child a node. Matching *changes* the tree: it splits the
edge in which it ends and refreshes what it found.

The unit is the page throughout. `width` is the number of key bytes a page: 4 x page_size for token ids (int32), 4
when one symbol names a page. A namespace has a root of its own, hence shares nothing with another.

    root -- [system prompt, 3 pages] -- [question A, 2 pages]      unlocked leaf: can be evicted
                                     `- [question B, 4 pages]      locked by a live request, and so is all above it
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import Any, Literal

from kvarena.prefix import radix_tree_check
from kvarena.prefix.eviction import EvictionQueue, Order, order, queue_for

_NO_CHILDREN: dict[bytes, Node] = {}  # shared by all leaves, never written


class Node:
    """One edge of the tree and the place where it ends.

    edge         tokens of its pages, width bytes each
    key          those of the first page, under which its parent files it; of a root its namespace
    pages        their page ids, array('i'); never changed in place, so whoever is shown them may keep the view
    children     key -> child
    locks        own locks + locked children: > 0 means that a live request needs this node. A root starts at 1.
    last_access  clock value of the last match or insert that *ended* here. One that went further is added when the
                 child in question leaves (`_remove`), which is the first moment at which it can matter.
    queued       key of its entry in the eviction queue, None without one
    serial       clock value at which it was made. `created` is that of the edge's first maker: the upper half of a
                 split takes it over, and hits and priority too, which are kept for orders that use them alone
    """

    __slots__ = (
        "children",
        "created",
        "edge",
        "hits",
        "key",
        "last_access",
        "locks",
        "pages",
        "parent",
        "priority",
        "queued",
        "serial",
    )

    def __init__(
        self, parent: Node | None, key: Any, edge: bytes, pages: array[int], serial: int, locks: int = 0
    ) -> None:
        self.parent: Any = parent  # a Node; None for a root, whose locks end every walk before it is followed
        self.key = key
        self.edge = edge
        self.pages = pages
        self.children = _NO_CHILDREN
        self.locks = locks
        self.serial = self.created = self.last_access = serial
        self.hits = 0
        self.priority = 0
        self.queued: Any = None

    @property
    def is_candidate(self) -> bool:
        """Whether eviction may take this node now."""
        return not self.locks and not self.children and self.parent is not None

    def __repr__(self) -> str:
        return f"Node({len(self.pages)} pages, {len(self.children)} children, locks {self.locks})"


def _root(namespace: Hashable, serial: int) -> Node:
    """Start of a namespace. Its base lock keeps it out of eviction and ends every lock walk."""
    # No class of its own: CPython remembers where a line finds an attribute for one class at a time.
    return Node(None, namespace, b"", array("i"), serial, 1)


class RadixTree:
    """Page-aligned radix tree with locks and eviction.

    eviction_unit         "leaf": a whole leaf goes at once (SGLang 0.5.22); "page": its last pages, as many as asked
    split_touches_suffix  the cut-off rest of a split edge counts as accessed (SGLang 0.5.22)
    """

    def __init__(
        self,
        eviction_order: Order | None = None,
        *,
        eviction_unit: Literal["page", "leaf"] = "leaf",
        split_touches_suffix: bool = True,
    ) -> None:
        self.order = eviction_order or order("lru")
        self.eviction_unit = eviction_unit
        self.split_touches_suffix = split_touches_suffix
        self.queue: EvictionQueue = queue_for(self.order)
        self.default_root = _root(None, 0)  # stays, empty or not
        self.roots: dict[Hashable, Node] = {}  # of the other namespaces
        self.evictable_pages = 0
        self._clock = 0
        self._whole_leaves = eviction_unit == "leaf"
        self.uses_hits, self.uses_priority = self.order.uses_hits, self.order.uses_priority
        self._requeues = not self.order.only_grows  # a touch can move a candidate forward in the queue

    def root(self, namespace: Hashable = None) -> Node:
        """Root of a namespace, made on first use and dropped with its last content (but for the default one)."""
        if namespace is None:
            return self.default_root
        found = self.roots.get(namespace)
        if found is None:
            found = self.roots[namespace] = _root(namespace, self._tick())
        return found

    def all_roots(self) -> list[Node]:
        """The roots of all namespaces, the default one first."""
        return [self.default_root, *self.roots.values()]

    def match(
        self, key: bytes, width: int, namespace: Hashable = None, num_pages: int | None = None
    ) -> tuple[Node, array[int]]:
        """Longest cached prefix of `key` in whole pages: the node where it ends, and its page ids in order.

        Looks at the first `num_pages` pages of the key alone (default: at all of it), which saves a copy. Splits the
        edge in which the match ends and marks the node it ends at as accessed, also when the caller then gives up
        (SGLang 0.5.22). Cost: one dict look-up and one bytes compare a node.
        """
        node: Node = self.default_root if namespace is None else self.root(namespace)
        pages = array("i")
        at, stop = 0, len(key) if num_pages is None else num_pages * width
        while at < stop:
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            edge = child.edge
            end = at + len(edge)
            if end > stop or not key.startswith(edge, at):
                node = self._split(child, common_pages(edge, key, at, width, stop) * width)
                pages += node.pages
                break
            node = child
            pages += node.pages
            at = end
        self._clock = node.last_access = self._clock + 1
        if self._requeues:
            self._requeue(node)
        return node, pages

    def insert(
        self, node: Node, key: bytes, width: int, pages: array[int], start: int = 0
    ) -> tuple[Node, list[array[int]], int]:
        """Publish `pages[start:]` below `node`, whose lock the caller holds; the lock moves to the end of the key.

        `node` ends at page `start`; `key` holds the tokens of `pages[start:start + len(key) // width]`. Where the
        tree has equal pages already, its own stay and `pages` is rewritten *in place* to name them. Returns the node
        where the key ends, the pages given up (a run for each node, in path order), and the position from which on
        pages are new to the tree.
        """
        duplicates: list[array[int]] = []
        page, here = key[:width], start
        if page in node.children:
            node, here = self._rebind(node, key, width, pages, start, duplicates)
            key = key[(here - start) * width :]
            page = key[:width]
        now = self._clock + 1
        if key:
            # The leaf starts with one lock, its parent's: that one trades it for a locked child.
            leaf = Node(node, page, key, pages[here : here + len(key) // width], now, 1)
            if node.children is _NO_CHILDREN:
                node.children = {page: leaf}
            else:
                node.children[page] = leaf
            node, now = leaf, now + 1
        self._clock = node.last_access = now  # it is locked: nobody has to queue it anew
        return node, duplicates, here

    def touch(self, node: Node) -> None:
        """`node` was accessed now, and so was all above it (see `Node.last_access`)."""
        self._clock = node.last_access = self._clock + 1
        if self._requeues:
            self._requeue(node)

    def border(self, node: Node, end: int, at: int) -> Node:
        """The node that ends at page `at` of the path to `node`, which ends at page `end`; splits the edge that
        has `at` inside. Cost: one step a node between the two."""
        while end > at:
            size = len(node.pages)
            start = end - size
            if start < at:
                return self._split(node, (at - start) * (len(node.edge) // size))
            node, end = node.parent, start
        return node

    def raise_priority(self, node: Node) -> None:
        """The path to `node` is worth 1 at least (SGLang 0.5.22: a prompt outlives what was generated from it)."""
        while node.parent is not None and not node.priority:
            node.priority = 1
            node = node.parent

    def count_hit(self, node: Node, until: Node | None = None) -> None:
        """One more request used the path from `node` up to, but not including, `until` (default: all of it)."""
        while node.parent is not None and node is not until:
            node.hits += 1
            node = node.parent

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction. Stops at the first locked ancestor, which is locked already."""
        held = 0
        while not node.locks:
            node.locks = 1
            held += len(node.pages)
            node = node.parent
        node.locks += 1
        self.evictable_pages -= held

    def unlock(self, node: Node) -> int:
        """Undo one `lock` of `node`; returns how many pages nobody holds any more: the last ones of the path."""
        at, let_go = node, 0
        while at.locks == 1:  # a root that is left at one was at two
            at.locks = 0
            let_go += len(at.pages)
            at = at.parent
        at.locks -= 1
        if let_go:
            self.evictable_pages += let_go
            if not node.children:
                self.queue.offer(node)
        if not at.children and at.parent is None:
            self._drop(at)
        return let_go

    def evict(self, num_pages: int) -> list[array[int]]:
        """Let unlocked leaves go until `num_pages` pages are free or none is left.

        Returns a run of page ids for each leaf, in order. Unit "leaf": in position order, and the sum may exceed
        the demand; unit "page": tail first. Cost O(log leaves) a leaf.
        """
        runs: list[array[int]] = []
        whole = self._whole_leaves
        while num_pages > 0:
            leaf = self.queue.pop()
            if leaf is None:
                break
            if whole or len(leaf.pages) <= num_pages:
                self._remove(leaf)
                run = leaf.pages
            else:
                run = self._trim(leaf, num_pages)
            runs.append(run if whole else run[::-1])
            num_pages -= len(run)
        return runs

    def clear(self) -> None:
        """Forget everything; the clock goes on."""
        self.default_root = _root(None, self._tick())
        self.roots.clear()
        self.queue.clear()
        self.evictable_pages = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack: list[Node] = [*self.all_roots()]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def path_pages(self, node: Node) -> array[int]:
        """Page ids from the root to the end of `node`."""
        runs = []
        while node.parent is not None:
            runs.append(node.pages)
            node = node.parent
        pages = array("i")
        for run in reversed(runs):
            pages += run
        return pages

    def faults(self) -> Iterator[str]:
        """What is inconsistent, one sentence each; nothing for a sound tree. O(nodes)."""
        return radix_tree_check.faults(self)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _lower_lock(self, first: Node, node: Node) -> None:
        """Move one lock from `first` down to `node`."""
        if node.parent is not first:
            self.lock(node)
            self.unlock(first)
        elif node.locks:
            node.locks += 1
            first.locks -= 1
        else:
            # `first` trades its own lock for a locked child: its count stays.
            node.locks = 1
            self.evictable_pages -= len(node.pages)

    def _requeue(self, node: Node) -> None:
        if node.is_candidate:
            self.queue.offer(node)

    def _rebind(
        self, first: Node, key: bytes, width: int, pages: array[int], here: int, duplicates: list[array[int]]
    ) -> tuple[Node, int]:
        """Follow `key` below `first` as far as the tree has it, and make `pages[here:]` name the tree's pages.

        What it named before is appended to `duplicates`. One lock of `first` moves to the node where this ends, which
        is returned with its end.
        """
        node, at = first, 0
        while at < len(key):
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            if not key.startswith(child.edge, at):
                child = self._split(child, common_pages(child.edge, key, at, width) * width)
            node, beyond = child, here + len(child.pages)
            duplicates.append(pages[here:beyond])
            pages[here:beyond] = child.pages
            here = beyond
            at += len(child.edge)
        self._lower_lock(first, node)
        return node, here

    def _split(self, child: Node, cut: int) -> Node:
        """Cut `child` after `cut` bytes of its edge; returns the new upper node. No size changes."""
        edge, parent = child.edge, child.parent
        size = len(child.pages)
        width = len(edge) // size
        upper = Node(parent, child.key, edge[:cut], child.pages[: cut // width], self._tick())
        upper.created, upper.last_access = child.created, child.last_access
        upper.hits, upper.priority = child.hits, child.priority
        upper.locks = 1 if child.locks else 0
        parent.children[child.key] = upper
        child.edge, child.pages, child.parent = edge[cut:], child.pages[cut // width :], upper
        child.key = child.edge[:width]
        upper.children = {child.key: child}
        if self.split_touches_suffix:
            self.touch(child)
        return upper

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        del parent.children[leaf.key]
        leaf.parent = None
        self.evictable_pages -= len(leaf.pages)
        # Whoever accessed the leaf accessed all above it: noted here, once, instead of at every access.
        if leaf.last_access > parent.last_access:
            parent.last_access = leaf.last_access
        if parent.children:
            return
        parent.children = _NO_CHILDREN
        if parent.parent is None:
            self._drop(parent)
        elif parent.locks == 0:
            self.queue.offer(parent)

    def _trim(self, leaf: Node, num_pages: int) -> array[int]:
        keep = len(leaf.pages) - num_pages
        run = leaf.pages[keep:]
        leaf.edge = leaf.edge[: keep * (len(leaf.edge) // len(leaf.pages))]
        leaf.pages = leaf.pages[:keep]
        self.evictable_pages -= num_pages
        self.queue.offer(leaf)
        return run

    def _drop(self, root: Any) -> None:
        """Forget a namespace that holds nothing, unless somebody holds it."""
        if root.locks == 1 and root is not self.default_root:
            del self.roots[root.key]


def common_pages(edge: bytes, key: bytes, at: int, width: int, stop: int | None = None) -> int:
    """Whole pages that `edge` and `key[at:stop]` share; the first one is known to be equal.

    Halves the undecided stretch with bytes compares: cheaper than a vectorised compare at prompt lengths.

    >>> common_pages(b"aabbcc", b"..aabbxx", 2, 2)
    2
    """
    low, high = 1, min(len(edge), (len(key) if stop is None else stop) - at) // width
    while low < high:
        middle = (low + high + 1) // 2
        if edge[low * width : middle * width] == key[at + low * width : at + middle * width]:
            low = middle
        else:
            high = middle - 1
    return low
