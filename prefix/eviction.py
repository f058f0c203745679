"""Orders in which unlocked leaves of a prefix tree go, and the queue that hands them out.

An order turns a node's last access, creation, hit count and priority into a key; the lowest key goes first.
SGLang 0.5.22 offers the same family (lru, lfu, slru, priority; fifo, mru and filo exist there but are not offered).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from kvarena.prefix.random_order import RandomQueue
from kvarena.prefix.sieve import SieveQueue


class Evictable(Protocol):
    """What an order may look at, and what the queue needs to know of a tree node."""

    last_access: int
    created: int
    hits: int
    priority: int
    serial: int
    queued: Any
    locks: int  # > 0: held
    children: Any  # true: not a leaf


class EvictionQueue(Protocol):
    """What hands out candidates. A node is named in it at most once, and `queued` is not None while it is."""

    def offer(self, node: Any) -> None: ...

    def pop(self) -> Any: ...

    def clear(self) -> None: ...

    def entries(self) -> Iterator[tuple[Any, Any]]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Order:
    """An eviction order.

    key            of a node; the lowest goes first. Keys end with the last access, so no two candidates tie.
    only_grows     a node's key never falls, so an outdated queue entry is always too low and can wait until it
                   surfaces; else every touch of a candidate has to queue it anew
    uses_hits      hit counts have to be kept
    uses_priority  priorities have to be kept
    queue          of candidates, for an order that no key tells; then `key` is not asked
    """

    name: str
    key: Callable[[Evictable], Any]
    only_grows: bool = True
    uses_hits: bool = False
    uses_priority: bool = False
    queue: Callable[[], EvictionQueue] | None = None


SLRU_PROTECTED_HITS = 2  # from this hit count on a node belongs to the protected segment

ORDERS: dict[str, Order] = {
    order.name: order
    for order in (
        Order("lru", attrgetter("last_access")),
        Order("lfu", attrgetter("hits", "last_access"), uses_hits=True),
        Order("fifo", attrgetter("created", "last_access")),
        Order("filo", lambda node: (-node.created, node.last_access)),
        Order("mru", lambda node: -node.last_access, only_grows=False),
        Order("priority", attrgetter("priority", "last_access"), uses_priority=True),
        Order("slru", lambda node: (node.hits >= SLRU_PROTECTED_HITS, node.last_access), uses_hits=True),
        Order("random", attrgetter("serial"), queue=RandomQueue),
        Order("sieve", attrgetter("created"), uses_hits=True, queue=SieveQueue),
    )
}


def order(name: str) -> Order:
    """The order of that name; ValueError lists the known ones."""
    if name not in ORDERS:
        raise ValueError(f"eviction order: expected one of {', '.join(ORDERS)}, found {name!r}")
    return ORDERS[name]


FEW = 64  # outdated entries that are not worth a sweep

Leaf = TypeVar("Leaf", bound=Evictable)


class LeafQueue(Generic[Leaf]):
    """Candidates for eviction, lowest key first: a lazy heap with at most one valid entry a node.

    A touch or a lock does not reach into the heap. An entry is judged when it surfaces: dropped if its node is no
    candidate any more, put back with its present key if that has grown. Cost O(log n) for `offer`, amortised
    O(log n) for `pop`; a touch is free. Serves every order; `lru` has a cheaper queue of its own.

    Where a key can fall (mru), every touch leaves an entry behind that may never surface: once they are the larger
    part of the heap they are swept out.
    """

    __slots__ = ("_heap", "_key", "_left_behind", "_only_grows")

    def __init__(self, order: Order) -> None:
        self._key = order.key
        self._only_grows = order.only_grows
        self._heap: list[tuple[Any, int, Leaf]] = []
        self._left_behind = 0  # entries whose node has a later one; never fewer than there are

    def offer(self, node: Leaf) -> None:
        """`node` is a candidate now, or was touched while it is one."""
        if node.queued is not None and self._only_grows:
            return
        key = self._key(node)
        if key != node.queued:
            self._left_behind += node.queued is not None
            node.queued = key
            heapq.heappush(self._heap, (key, node.serial, node))
            if self._left_behind > FEW and 2 * self._left_behind > len(self._heap):
                self._sweep()

    def pop(self) -> Leaf | None:
        """Take the candidate with the lowest key; None when there is none."""
        heap, key_of = self._heap, self._key
        while heap:
            key, serial, node = heap[0]
            if key != node.queued:  # a later entry stands for this node
                heapq.heappop(heap)
                continue
            if node.locks or node.children:
                heapq.heappop(heap)
                node.queued = None
                continue
            now = key_of(node)
            if now == key:
                heapq.heappop(heap)
                node.queued = None
                return node
            node.queued = now
            heapq.heapreplace(heap, (now, serial, node))
        return None

    def clear(self) -> None:
        """Forget all entries (the tree was emptied)."""
        self._heap.clear()
        self._left_behind = 0

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued]
        heapq.heapify(self._heap)
        self._left_behind = 0

    def __len__(self) -> int:
        """Entries held, outdated ones included."""
        return len(self._heap)

    def entries(self) -> Iterator[tuple[Any, Leaf]]:
        """Key and node of all entries, outdated ones included, for `check()`."""
        return ((key, node) for key, _, node in self._heap)


SPAN = 256  # clock values; a request takes about four


class RecencyQueue(Generic[Leaf]):
    """The queue of the lru order: time is cut into spans, and only the oldest span's entries are in order.

    As lazy as `LeafQueue`, with the same results. Entries come nearly in the order of time, so they are appended to
    their span's list; a span is sorted once, when it is the oldest that is left. Cost of `offer` and amortised of
    `pop`: O(1), plus a share of sorting a span and of a heap of spans.

    Measured (one step = three touches, one `pop`, one `offer`; or a replay of 20,000 requests): a heap of leaves
    takes 3 us a step at 10^3 leaves and 7.7 at 10^6, sortedcontainers' SortedDict 7 and 19; on the replay the two
    are level, and building a heap at every eviction, as SGLang does, is ten times slower.
    """

    __slots__ = ("_ages", "_oldest", "_oldest_span", "_spans")

    def __init__(self) -> None:
        self._oldest: list[tuple[int, Leaf]] = []  # newest first, so that the next one is popped off the end
        self._oldest_span = -1
        self._spans: dict[int, list[tuple[int, Leaf]]] = {}  # the others, unsorted
        self._ages: list[int] = []  # heap of their numbers

    def offer(self, node: Leaf) -> None:
        """`node` is a candidate now."""
        if node.queued is None:
            self._put(node)

    def pop(self) -> Leaf | None:
        """Take the candidate that was accessed least recently; None when there is none."""
        while True:
            oldest = self._oldest
            while oldest:
                key, node = oldest.pop()
                if node.locks or node.children:
                    node.queued = None
                elif node.last_access == key:
                    node.queued = None
                    return node
                else:
                    self._put(node)
            if not self._ages:
                return None
            self._oldest_span = heapq.heappop(self._ages)
            self._oldest = self._spans.pop(self._oldest_span)
            self._oldest.sort(key=_age)

    def clear(self) -> None:
        """Forget all entries (the tree was emptied)."""
        self._oldest.clear()
        self._oldest_span = -1
        self._spans.clear()
        self._ages.clear()

    def __len__(self) -> int:
        """Entries held, outdated ones included."""
        return len(self._oldest) + sum(map(len, self._spans.values()))

    def entries(self) -> Iterator[tuple[int, Leaf]]:
        """Key and node of all entries, outdated ones included, for `check()`."""
        return (entry for span in (self._oldest, *self._spans.values()) for entry in span)

    def _put(self, node: Leaf) -> None:
        key = node.queued = node.last_access
        span, entry = key // SPAN, (key, node)
        if span in self._spans:
            self._spans[span].append(entry)
        elif span <= self._oldest_span:
            bisect.insort(self._oldest, entry, key=_age)
        else:
            self._spans[span] = [entry]
            heapq.heappush(self._ages, span)


def _age(entry: tuple[int, Any]) -> int:
    return -entry[0]


def queue_for(order: Order) -> EvictionQueue:
    """The cheapest queue that serves an order."""
    if order.queue is not None:
        return order.queue()
    return RecencyQueue() if order.name == "lru" else LeafQueue(order)
