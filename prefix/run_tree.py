"""Cached pages by the run: a tree of texts in which one node has one text, and one run of pages for each copy of it.

The same rules as `hash_chain`, for pages that are published without gaps and leave from the end: pages that came
together are held, touched and evicted together, so a run needs one ref count, one place in the order of eviction, and
one comparison of bytes. A run is cut only where a sequence shares a part of it.

    root -- "ab" -- "cd"        text of a node: whole pages, as bytes
            |  |    |  |
            1  2    3  4        copies[0], the earliest inserted: it serves
                    7  8        copies[1]: the same text, kept by another sequence

Idle runs stand in a doubly linked list, least recently released first; within one release the deepest run comes
first, and a run is evicted from its last page on. That is page by page the order of the hashed form.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST_RUN = 256  # pages; bounds what a cut has to copy

Key = bytes | tuple[bytes, Any]  # first page of a node; with what an image adds to it
Extras = Mapping[int, Any]  # page position -> what an image adds to that page
NO_EXTRAS: Extras = {}


class Run:
    """Pages with one fate. `front` is the part that was cut off before it; `node` is None when it serves nobody."""

    __slots__ = ("after", "before", "front", "node", "pages", "refs")

    def __init__(self, node: Node | None, pages: array[int], refs: int) -> None:
        self.node = node
        self.pages = pages
        self.refs = refs
        self.front: Run | None = None
        self.before: Run = self
        self.after: Run = self


class Node:
    """One stretch of text. Without a copy it is hollow: it only leads to what stands below it.

    users  sequences whose published text ends here
    """

    __slots__ = ("children", "copies", "edge", "key", "parent", "users", "width")

    def __init__(self, edge: bytes, parent: Node | None, key: Key, width: int) -> None:
        self.edge = edge
        self.parent = parent
        self.key = key
        self.width = width  # bytes a page
        self.children: dict[Key, Node] = {}
        self.copies: list[Run] = []
        self.users = 0

    def __len__(self) -> int:
        return len(self.edge) // self.width


class Found:
    """What a match found at one `version` of the tree: its runs, of the last of which `surplus` pages do not count."""

    __slots__ = ("num_idle", "num_pages", "runs", "surplus", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.runs: list[Run] = []
        self.num_pages = 0  # that count
        self.num_idle = 0  # of these, pages of idle runs
        self.surplus = 0


class RunTree:
    """Which pages hold this text, who holds them, and which go first?

    evictable   pages of idle runs
    shared      pages of runs with more than one holder
    duplicates  pages whose text an earlier copy holds too
    version     changes with every change of the tree

    >>> tree = RunTree()
    >>> root = tree.root(None, 2)
    >>> runs, leaf, _ = tree.publish(root, b"aabbcc", 0, array("i", [1, 2, 3]))
    >>> tree.let_go(runs[0], 3, [])
    3
    >>> found = tree.match(root, b"aabbxx", 3)
    >>> found.num_pages, tree.evictable, tree.evict(2)
    (2, 3, array('i', [3, 2]))
    """

    def __init__(self) -> None:
        self.evictable = 0
        self.shared = 0
        self.duplicates = 0
        self.version = 0
        self.withdrawn: set[Run] = set()  # held runs whose content another sequence's abort took back
        self._roots: dict[Any, Node] = {}
        self._ends = Run(None, array("i"), 0)  # closes the list of idle runs

    def root(self, namespace: Any, width: int) -> Node:
        """Where the texts of a namespace begin; `width` bytes a page."""
        found = self._roots.get(namespace)
        if found is None:
            found = self._roots[namespace] = Node(b"", None, namespace, width)
        return found

    def find_root(self, namespace: Any) -> Node | None:
        """The root of a namespace, if it has one already."""
        return self._roots.get(namespace)

    def idle(self) -> Iterator[Run]:
        """Idle runs, the next to be evicted first. The tree must not change meanwhile."""
        run = self._ends.after
        while run is not self._ends:
            yield run
            run = run.after

    # look-up: nothing below changes the tree

    def match(self, root: Node, text: bytes, limit: int, extras: Extras = NO_EXTRAS) -> Found:
        """Serving runs of the longest cached prefix of at most `limit` pages.

        One dict look-up and one byte comparison a node.
        """
        found = Found(self.version)
        node, done, width, stop = root, 0, root.width, limit
        key: Key
        while done < limit:
            start = done * width
            key = text[start : start + width]
            if extras:
                key, stop = _next_key(key, done, limit, extras)
            child = node.children.get(key)
            if child is None or not child.copies:
                break
            run = child.copies[0]
            size = shared = len(run.pages)
            if size > stop - done or not text.startswith(child.edge, start):
                shared = _pages_in_common(child.edge, text, start, width, min(size, stop - done))
            found.runs.append(run)
            done += shared
            if not run.refs:
                found.num_idle += shared
            if shared < size:
                found.surplus = size - shared
                break
            node = child
        found.num_pages = done
        return found

    # holding

    def hold(self, found: Found) -> tuple[list[Run], Node | None]:
        """Hold what a match found, at the version at which it was found; cuts its last run if only a part counts.

        Returns the runs held and the node in which they end.
        """
        runs = found.runs
        if not runs:
            return [], None
        if found.surplus:
            last = runs[-1]
            runs = [*runs[:-1], self._split(_node_of(last), len(last.pages) - found.surplus).copies[0]]
        self.version += 1
        for run in runs:
            if run.refs == 0:
                self._unlink(run)
                self.evictable -= len(run.pages)
            elif run.refs == 1:
                self.shared += len(run.pages)
            run.refs += 1
        return runs, runs[-1].node

    def share(self, run: Run, num_pages: int) -> None:
        """One holder more for the `num_pages` pages that end with `run`, which are held."""
        while True:
            self.shared += len(run.pages) if run.refs == 1 else 0
            run.refs += 1
            num_pages -= len(run.pages)
            if num_pages <= 0:
                return
            run = _front_of(run)

    def cut_off(self, run: Run, num_pages: int) -> None:
        """Make `run`, which is held, begin at its last `num_pages` pages at the latest."""
        before = len(run.pages) - num_pages
        if before > 0 and run.node is not None:
            self._split(run.node, before)
        elif before > 0:
            self.version += 1
            self.withdrawn.add(self._cut(run, before, None))

    def above(self, node: Node, num_pages: int) -> Node:
        """The node `num_pages` pages above the end of `node`, which is cut if there is none. It may be hollow."""
        while num_pages > 0:
            if len(node) > num_pages:
                return self._split(node, len(node) - num_pages)
            num_pages, node = num_pages - len(node), _parent_of(node)
        return node

    def let_go(self, run: Run, num_pages: int, let_go: list[Run]) -> int:
        """One holder less for the `num_pages` pages that end with `run`, deepest part first.

        Runs without a holder are appended to `let_go`; those that serve somebody have joined the idle ones. Returns
        how many pages these have.
        """
        self.version += 1
        idle = 0
        while True:
            size = len(run.pages)
            run.refs -= 1
            if run.refs == 1:
                self.shared -= size
            elif run.refs == 0:
                let_go.append(run)
                if run.node is None:
                    self.withdrawn.discard(run)
                else:
                    self._link(run, self._ends)
                    idle += size
            num_pages -= size
            if num_pages <= 0:
                self.evictable += idle
                return idle
            run = _front_of(run)

    def _link(self, run: Run, after: Run) -> None:
        before = after.before
        run.before, run.after = before, after
        before.after = after.before = run

    def _unlink(self, run: Run) -> None:
        run.before.after, run.after.before = run.after, run.before

    # publishing

    def publish(
        self, node: Node, text: bytes, start: int, pages: array[int], extras: Extras = NO_EXTRAS
    ) -> tuple[list[Run], Node, array[int]]:
        """Let `pages` hold `text` below `node`, held once; the first of them has position `start`.

        Returns the new runs, the node in which they end, and the pages that are duplicates.
        """
        self.version += 1
        runs: list[Run] = []
        duplicates: array[int] = array("i")
        done, count, width = 0, len(pages), node.width
        key: Key
        stop = count
        while done < count:
            key = text[done * width : (done + 1) * width]
            if extras:
                key, stop = _next_key(key, start + done, start + count, extras)
                stop -= start
            child = self._child(node, key, text, done, stop)
            size = len(child)
            run = Run(child, pages[done : done + size], 1)
            if child.copies:
                duplicates += run.pages
                self.duplicates += size
            child.copies.append(run)
            runs.append(run)
            node, done = child, done + size
        return runs, node, duplicates

    def _child(self, node: Node, key: Key, text: bytes, done: int, stop: int) -> Node:
        """The child of `node` whose whole edge agrees with `text` from page `done` on: found, cut, or new."""
        width = node.width
        child = node.children.get(key)
        if child is None:
            edge = text[done * width : min(stop, done + LONGEST_RUN) * width]
            child = node.children[key] = Node(edge, node, key, width)
            return child
        size = _pages_in_common(child.edge, text, done * width, width, min(len(child), stop - done))
        return child if size == len(child) else self._split(child, size)

    def extend(self, run: Run, node: Node, text: bytes, pages: array[int]) -> bool:
        """Let `run` grow by pages if nobody else could tell: one holder, one copy, nothing below. Else False."""
        if run.refs != 1 or len(node.copies) != 1 or node.children or node.users != 1 or run.node is not node:
            return False
        if type(node.key) is tuple or len(run.pages) + len(pages) > LONGEST_RUN:
            return False
        self.version += 1
        node.edge += text
        run.pages.extend(pages)
        return True

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` and all its copies after `num_pages` pages; returns the new upper part. `node` keeps its end."""
        self.version += 1
        parent, width = _parent_of(node), node.width
        upper = Node(node.edge[: num_pages * width], parent, node.key, width)
        parent.children[node.key] = upper
        node.edge = node.edge[num_pages * width :]
        node.parent, node.key = upper, node.edge[:width]
        upper.children[node.key] = node
        upper.copies = [self._cut(run, num_pages, upper) for run in node.copies]
        return upper

    def _cut(self, run: Run, num_pages: int, node: Node | None) -> Run:
        front = Run(node, run.pages[:num_pages], run.refs)
        front.front, run.front = run.front, front
        run.pages = run.pages[num_pages:]
        if not run.refs:
            self._link(front, run.after)  # the deeper part goes first
        return front

    # leaving

    def evict(self, count: int) -> array[int]:
        """Take the first `count` pages in the order of eviction out of the tree; they must be there."""
        self.version += 1
        self.evictable -= count
        taken: array[int] = array("i")
        while count > 0:
            run = self._ends.after
            size = len(run.pages)
            if size > count:
                taken.extend(run.pages[: size - count - 1 : -1])
                self._shorten(run, size - count)
                return taken
            taken.extend(run.pages[::-1])
            self._unlink(run)
            self._drop(run)
            count -= size
        return taken

    def _shorten(self, run: Run, num_pages: int) -> None:
        node = _node_of(run)
        if len(node.copies) == 1 and not node.children and not node.users:
            node.edge = node.edge[: num_pages * node.width]
            del run.pages[num_pages:]
            return
        self._split(node, num_pages)
        self._unlink(run)
        self._drop(run)

    def _drop(self, run: Run) -> None:
        node = _node_of(run)
        node.copies.remove(run)
        if node.copies:
            self.duplicates -= len(run.pages)
        run.node = None
        self.prune(node)

    def unpublish(self, run: Run, num_pages: int, keep: int) -> None:
        """Of the `num_pages` pages that end with `run`, all but the first `keep` stop serving; holders stay."""
        self.version += 1
        end = num_pages
        while end > keep:
            front = run.front
            begin = end - len(run.pages)
            if begin < keep:
                self._split(_node_of(run), keep - begin)
                begin = keep
            if run.refs > 1:
                self.withdrawn.add(run)
            self._drop(run)
            if begin > keep and front is None:
                raise ValueError("run: its parts hold fewer pages than were asked for")
            end, run = begin, front or run

    def prune(self, node: Node) -> None:
        """Take out `node`, and what it leaves behind above, if it has no copy, no user and nothing below."""
        while not (node.copies or node.children or node.users):
            parent = node.parent
            if parent is None:
                self._roots.pop(node.key, None)
                return
            del parent.children[node.key]
            node = parent

    def clear(self) -> array[int]:
        """Take every page out; returns them in the order of eviction. No run may be held."""
        return self.evict(self.evictable)


def _next_key(page: bytes, position: int, limit: int, extras: Extras) -> tuple[Key, int]:
    """Key of the page at `position`, and the page before which an edge that starts there ends at the latest."""
    if position in extras:
        return (page, extras[position]), position + 1
    return page, min([limit, *(other for other in extras if other > position)])


def _pages_in_common(edge: bytes, text: bytes, start: int, width: int, limit: int) -> int:
    """How many of the first `limit` pages of `edge` stand in `text` from byte `start` on. Halving byte compares."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[low * width : middle * width], start + low * width):
            low = middle
        else:
            high = middle - 1
    return low


def _node_of(run: Run) -> Node:
    if run.node is None:
        raise ValueError("run: it serves nobody")
    return run.node


def _front_of(run: Run) -> Run:
    if run.front is None:
        raise ValueError("run: its parts hold fewer pages than were asked for")
    return run.front


def _parent_of(node: Node) -> Node:
    if node.parent is None:
        raise ValueError("node: a root cannot be cut")
    return node.parent
