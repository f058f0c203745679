"""Slow, obvious models of the prefix indexes and of the orders of eviction. They share no code with kvarena.

A page is (text up to and with it); a tree is nodes with lists of pages, searched whole at every question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Text = tuple[Any, ...]  # namespace, then one symbol a page


@dataclass
class SlowPages:
    """Which page serves which text: every page with its text, in the order of publication. Pages without gaps or with.

    holders  page -> how many sequences hold it; idle: pages that nobody holds, the next to be evicted first
    """

    served: list[tuple[int, Text]] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    idle: list[int] = field(default_factory=list)

    def find(self, text: Text) -> int:
        """The earliest published page of a text; 0: none."""
        return next((page for page, own in self.served if own == text), 0)

    def match(self, text: Text, limit: int) -> list[int]:
        """Pages of the first positions, up to the first without one."""
        found = []
        for count in range(1, min(limit, len(text) - 1) + 1):
            page = self.find(text[: count + 1])
            if not page:
                break
            found.append(page)
        return found

    def publish(self, pages: list[int], text: Text, start: int) -> list[int]:
        """Returns those whose text another page serves already."""
        duplicates = []
        for place, page in enumerate(pages):
            own = text[: start + place + 2]
            if self.find(own):
                duplicates.append(page)
            self.served.append((page, own))
        return duplicates

    def serves(self, page: int) -> bool:
        return any(other == page for other, _ in self.served)

    def drop(self, pages: list[int]) -> list[int]:
        gone = [page for page in pages if self.serves(page)]
        self.served = [(page, text) for page, text in self.served if page not in gone]
        return gone

    @property
    def duplicates(self) -> int:
        return len(self.served) - len({text for _, text in self.served})

    # --- holding ---

    def hold(self, pages: list[int]) -> None:
        for page in pages:
            self.holders[page] += 1
            if page in self.idle:
                self.idle.remove(page)

    def let_go(self, pages: list[int]) -> tuple[list[int], list[int]]:
        """The last page first. Returns those that nobody holds any more: the ones that serve nobody, and the idle."""
        freed, cached = [], []
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            (cached if self.serves(page) else freed).append(page)
        self.idle += cached
        return freed, cached

    def evict(self, count: int) -> list[int]:
        gone, self.idle = self.idle[:count], self.idle[count:]
        self.drop(gone)
        return gone

    @property
    def shared(self) -> int:
        return sum(count > 1 for count in self.holders.values())


# --- a tree ---


@dataclass(eq=False)
class SlowNode:
    """A run of pages below `above`. `holds`: locks of this very node."""

    above: SlowNode | None
    symbols: list[Any]
    pages: list[int]
    born: int
    seen: int
    holds: int = 0
    hits: int = 0
    priority: int = 0
    below: list[SlowNode] = field(default_factory=list)

    def locked(self) -> bool:
        return self.holds > 0 or any(node.locked() for node in self.below)

    def path(self) -> list[int]:
        return [] if self.above is None else self.above.path() + self.pages


ORDERS: dict[str, Callable[[Any], Any]] = {
    "lru": lambda node: node.seen,
    "mru": lambda node: -node.seen,
    "fifo": lambda node: (node.born, node.seen),
    "filo": lambda node: (-node.born, node.seen),
    "lfu": lambda node: (node.hits, node.seen),
    "slru": lambda node: (1 if node.hits > 1 else 0, node.seen),
    "priority": lambda node: (node.priority, node.seen),
}


class SlowTree:
    """A tree of runs: matching cuts, locks hold a path, leaves go by their order."""

    def __init__(self, order: str, *, by_page: bool, touches_rest: bool) -> None:
        self.order, self.by_page, self.touches_rest = ORDERS[order], by_page, touches_rest
        self.roots: dict[Any, SlowNode] = {}
        self.now = 0

    def root(self, namespace: Any) -> SlowNode:
        return self.roots.setdefault(namespace, SlowNode(None, [], [], 0, 0))

    def nodes(self) -> list[SlowNode]:
        found = [node for root in self.roots.values() for node in root.below]
        for node in found:
            found += node.below
        return found

    def see(self, node: SlowNode | None) -> None:
        """Whoever comes to a node came by all above it."""
        self.now += 1
        while node is not None:
            node.seen = self.now
            node = node.above

    def match(self, namespace: Any, symbols: list[Any]) -> tuple[SlowNode, list[int]]:
        node, _ = self._walk(self.root(namespace), symbols)
        self.see(node)
        return node, node.path()

    def _walk(self, node: SlowNode, symbols: list[Any]) -> tuple[SlowNode, list[Any]]:
        """The node where the known part of the symbols ends, cut out if need be, and the symbols behind it."""
        child = next((one for one in node.below if symbols and one.symbols[0] == symbols[0]), None)
        if child is None:
            return node, symbols
        same = 0
        while same < min(len(child.symbols), len(symbols)) and child.symbols[same] == symbols[same]:
            same += 1
        if same < len(child.symbols):
            return self.cut(child, same), symbols[same:]
        return self._walk(child, symbols[same:])

    def cut(self, child: SlowNode, count: int) -> SlowNode:
        above = child.above
        assert above is not None
        upper = SlowNode(above, child.symbols[:count], child.pages[:count], child.born, child.seen)
        upper.hits, upper.priority, upper.below = child.hits, child.priority, [child]
        above.below[above.below.index(child)] = upper
        child.above, child.symbols, child.pages = upper, child.symbols[count:], child.pages[count:]
        if self.touches_rest:
            self.see(child)
        return upper

    def insert(self, node: SlowNode, symbols: list[Any], pages: list[int], start: int) -> tuple[SlowNode, list[int]]:
        """`pages[start:]` below `node`, whose lock moves to the end. Returns that end, and the pages given up."""
        end, left = self._walk(node, symbols)
        given_up = pages[start : start + len(symbols) - len(left)]
        if left:
            self.now += 1
            fresh = pages[start + len(symbols) - len(left) : start + len(symbols)]
            leaf = SlowNode(end, list(left), list(fresh), self.now, self.now)
            end.below.append(leaf)
            end = leaf
        node.holds -= 1
        end.holds += 1
        self.see(end)
        return end, given_up

    def border(self, node: SlowNode, at: int) -> None:
        """A border at page `at` of the path to `node`; what lies above it is worth 1 at least."""
        path = []
        while node.above is not None:
            path.append(node)
            node = node.above
        for one in path:
            start = len(one.path()) - len(one.pages)
            if start < at < start + len(one.pages):
                path.append(self.cut(one, at - start))
        for one in path:
            if len(one.path()) <= at:
                one.priority = max(one.priority, 1)

    def evict(self, count: int) -> list[list[int]]:
        runs: list[list[int]] = []
        while count > 0:
            leaves = [node for node in self.nodes() if not node.below and not node.locked()]
            if not leaves:
                break
            leaf = min(leaves, key=self.order)
            take = min(count, len(leaf.pages)) if self.by_page else len(leaf.pages)
            run = leaf.pages[len(leaf.pages) - take :]
            del leaf.pages[len(leaf.pages) - take :], leaf.symbols[len(leaf.symbols) - take :]
            if not leaf.pages and leaf.above is not None:
                leaf.above.below.remove(leaf)
            runs.append(run[::-1] if self.by_page else run)
            count -= take
        return runs

    @property
    def evictable(self) -> int:
        return sum(len(node.pages) for node in self.nodes() if not node.locked())


# --- orders alone ---


@dataclass(eq=False)
class SlowSieve:
    """A line by age and a hand, both as a list that is searched: what was used since the hand passed is spared once."""

    line: list[Any] = field(default_factory=list)
    hand: tuple[int, int] = (0, 0)
    spared: dict[int, int] = field(default_factory=dict)

    def offer(self, leaf: Any) -> None:
        if leaf not in self.line:
            self.line.append(leaf)

    def pop(self, free: Callable[[Any], bool]) -> Any:
        while self.line:
            age = {leaf: (leaf.created, leaf.serial) for leaf in self.line}
            ahead = [leaf for leaf in self.line if age[leaf] > self.hand]
            leaf = min(ahead or self.line, key=lambda one: age[one])
            if not free(leaf):
                self.line.remove(leaf)
                continue
            self.hand = age[leaf]
            if leaf.hits > self.spared.get(leaf.serial, 1):
                self.spared[leaf.serial] = leaf.hits
                continue
            self.spared.pop(leaf.serial, None)
            self.line.remove(leaf)
            return leaf
        return None

    def clear(self) -> None:
        self.line.clear()
        self.spared.clear()
