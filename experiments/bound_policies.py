"""Policies of eviction over named pages, page by page, for one pool without overlap of requests; what they are for, and
why clairvoyance is a bound, is said in `bounds.py`."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvarena.experiments.metrics import ratio
from kvarena.experiments.page_names import PageNames

NEVER = 1 << 62  # next use of a page that is not used again

Policy = Literal["lru", "fifo", "random", "clairvoyant", "clairvoyant_leaf"]
POLICIES: tuple[Policy, ...] = ("lru", "fifo", "random", "clairvoyant", "clairvoyant_leaf")


@dataclass(frozen=True)
class BoundHits:
    """What one policy at one capacity serves.

    hit_pages      per request: pages of the contiguous cached prefix, within the last-token rule
    any_hit_pages  pages hit wherever they stand in the prompt, over the run; equals sum(hit_pages) where no policy
                   keeps a page without those before it
    """

    policy: Policy
    capacity_pages: int
    hit_pages: list[int]
    any_hit_pages: int

    def block_rate(self, names: PageNames, start: int = 0) -> float | None:
        """Hit pages / pages asked for, over the requests from `start` on."""
        return ratio(sum(self.hit_pages[start:]), sum(names.prompt_pages[start:]))

    def token_rate(self, names: PageNames, start: int = 0) -> float | None:
        """Hit tokens / prompt tokens, over the requests from `start` on; a partial page by its real tokens."""
        hits = sum(names.hit_tokens(i, self.hit_pages[i]) for i in range(start, len(names.tokens)))
        return ratio(hits, sum(names.tokens[start:]))


def replay_bound(
    names: PageNames, capacity_pages: int, policy: Policy, *, reverse: bool = True, seed: int = 0
) -> BoundHits:
    """Replay named pages through one policy.

    reverse  lru: a request's pages are touched last to first, as both designs release them; False: first to last
    """
    if capacity_pages < 1:
        raise ValueError(f"capacity_pages: expected at least 1, found {capacity_pages}")
    if policy in ("clairvoyant", "clairvoyant_leaf"):
        return _Clairvoyant(names, capacity_pages, leaves=policy == "clairvoyant_leaf").run()
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, found {policy!r}")
    use: Callable[[list[int]], None]
    if policy == "random":
        pool = _RandomPool(capacity_pages, seed)
        cached: Any = pool.place
        use = pool.use
    else:
        cached = OrderedDict()
        use = _lru(cached, capacity_pages, reverse) if policy == "lru" else _fifo(cached, capacity_pages)
    return _flat(names, capacity_pages, policy, cached, use)


def _flat(names: PageNames, capacity: int, policy: Policy, cached: Any, use: Callable[[list[int]], None]) -> BoundHits:
    hits, found_anywhere, starts = [], 0, names.starts()
    for request, limit in enumerate(names.limits):
        pages = names.pages(request, starts).tolist()
        found = [page in cached for page in pages[:limit]]
        hits.append(found.index(False) if False in found else len(found))
        found_anywhere += sum(found)
        use(pages)
    return BoundHits(policy, capacity, hits, found_anywhere)


def _lru(cached: OrderedDict[int, None], capacity: int, reverse: bool) -> Callable[[list[int]], None]:
    def use(pages: list[int]) -> None:
        for page in reversed(pages) if reverse else pages:
            if page in cached:
                cached.move_to_end(page)
                continue
            cached[page] = None
            if len(cached) > capacity:
                cached.popitem(last=False)

    return use


def _fifo(cached: OrderedDict[int, None], capacity: int) -> Callable[[list[int]], None]:
    def use(pages: list[int]) -> None:
        for page in pages:
            if page not in cached:
                cached[page] = None
                if len(cached) > capacity:
                    cached.popitem(last=False)

    return use


class _RandomPool:
    """Cached pages in no order: `place` says where each stands in `slots`."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.place: dict[int, int] = {}
        self.slots: list[int] = []
        self._draw = random.Random(seed)

    def use(self, pages: list[int]) -> None:
        for page in pages:
            if page in self.place:
                continue
            if len(self.slots) < self.capacity:
                self.place[page] = len(self.slots)
                self.slots.append(page)
                continue
            at = int(self._draw.random() * self.capacity)
            del self.place[self.slots[at]]
            self.slots[at], self.place[page] = page, at


class _Clairvoyant:
    """Farthest next use, segment by segment: pages of a segment share their next use, the deeper one being later."""

    def __init__(self, names: PageNames, capacity: int, *, leaves: bool) -> None:
        self.names = names
        self.capacity = capacity
        self.leaves = leaves
        self.next_use = _next_uses(names)
        self.depth = _depths(names)
        self.cached = [0] * len(names.lengths)  # pages at the front of each segment
        self.key: list[tuple[int, int]] = [(NEVER, 0)] * len(names.lengths)
        self.below = [0] * len(names.lengths)  # segments right below one that have cached pages
        self.used = 0
        self.heap: list[tuple[int, int, int]] = []

    def run(self) -> BoundHits:
        hits, found_anywhere = [], 0
        for request in range(len(self.names.paths)):
            contiguous, anywhere = self._look_up(request)
            hits.append(contiguous)
            found_anywhere += anywhere
            self._use(request)
            self._trim()
        policy: Policy = "clairvoyant_leaf" if self.leaves else "clairvoyant"
        return BoundHits(policy, self.capacity, hits, found_anywhere)

    def _look_up(self, request: int) -> tuple[int, int]:
        limit, at, contiguous, anywhere, whole = self.names.limits[request], 0, 0, 0, True
        for segment in self.names.paths[request]:
            if at >= limit:
                break
            anywhere += self.cached[segment]
            if whole:
                contiguous += self.cached[segment]
                whole = self.cached[segment] == self.names.lengths[segment]
            at += self.names.lengths[segment]
        return contiguous, anywhere

    def _use(self, request: int) -> None:
        for segment, then in zip(self.names.paths[request], self.next_use[request], strict=True):
            self._count_below(segment, bool(self.cached[segment]), True)
            self.used += self.names.lengths[segment] - self.cached[segment]
            self.cached[segment] = self.names.lengths[segment]
            self.key[segment] = (then, self.depth[segment])
            self._push(segment)

    def _count_below(self, segment: int, before: bool, after: bool) -> None:
        parent = self.names.parents[segment]
        if parent >= 0:
            self.below[parent] += after - before
            if self.leaves and before and not after and not self.below[parent]:
                self._push(parent)  # a leaf again

    def _push(self, segment: int) -> None:
        then, depth = self.key[segment]
        heapq.heappush(self.heap, (-then, -depth, segment))

    def _trim(self) -> None:
        """Let the farthest go until what is left fits."""
        while self.used > self.capacity:
            then, depth, segment = self.heap[0]
            stale = self.key[segment] != (-then, -depth) or not self.cached[segment]
            if stale or (self.leaves and self.below[segment]):
                heapq.heappop(self.heap)
                continue
            gone = min(self.used - self.capacity, self.cached[segment])
            self.cached[segment] -= gone
            self.used -= gone
            if not self.cached[segment]:
                heapq.heappop(self.heap)
                self._count_below(segment, True, False)


def _next_uses(names: PageNames) -> list[list[int]]:
    """Per request and segment: the next request that uses it, NEVER where that use cannot count as a hit."""
    following = [NEVER] * len(names.lengths)
    out: list[list[int]] = []
    for request in range(len(names.paths) - 1, -1, -1):
        path = names.paths[request]
        out.append([following[segment] for segment in path])
        at = 0
        for segment in path:
            following[segment] = request if at < names.limits[request] else NEVER
            at += names.lengths[segment]
    return out[::-1]


def _depths(names: PageNames) -> list[int]:
    """Pages above each segment. Parents are numbered before what hangs below them."""
    depths: list[int] = []
    for parent in names.parents:
        depths.append(0 if parent < 0 else depths[parent] + names.lengths[parent])
    return depths
