"""In which order the waiting queue is tried: first come first served, longest prefix first, depth-first by weight.

Rules of SGLang 0.5.22's scheduler, over any allocator: all that is asked of one is `match`, which says how
much of a sequence is cached (and leaves what a lookup leaves in that design: nothing in block; a split and a
touch in token).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from operator import itemgetter
from typing import cast

from kvarena.allocators.interface import KVAllocator, Match
from kvarena.experiments.engine.request import EngineRequest
from kvarena.experiments.engine.scheduler import SchedulerConfig

LPM_LIMIT = 128  # SGLang 0.5.22: a longer queue is not matched, and keeps its order
REFRESH_EVERY = 32  # calls between two touches of the waiting prefixes
REFRESH_REQUESTS = 128
DEFERRAL_TOKENS = 32  # a request with at most so many cached tokens that shares so many with one ahead waits


class WaitingOrder:
    """Orders the waiting queue in place before admission is tried.

    refreshes: under an order that does not look at the cache, touch what the head of the queue waits for at
    every 32nd call, the last one first (SGLang); the block design has nothing to touch.
    """

    def __init__(self, allocator: KVAllocator, config: SchedulerConfig, *, refreshes: bool = False) -> None:
        self.allocator = allocator
        self.order = config.order
        self.defers = config.order == "lpm" if config.prefix_deferral is None else config.prefix_deferral
        self.refreshes = refreshes
        self._calls = 0

    def arrange(self, waiting: deque[EngineRequest]) -> None:
        """Put the queue into the order in which admission is tried. Cost: a match a request, unless fcfs."""
        if self.order == "priority":
            _replace(waiting, sorted(waiting, key=lambda request: (request.priority, request.arrival_s)))
        elif self.order == "dfs-weight":
            _replace(waiting, by_weight([(request, self.allocator.match(request.seq)) for request in waiting]))
        elif len(waiting) <= LPM_LIMIT and (self.order == "lpm" or self.defers):
            self._arrange_by_match(waiting)
        else:
            self._refresh(waiting)

    def _arrange_by_match(self, waiting: deque[EngineRequest]) -> None:
        seen: set[tuple[object, ...]] = set()
        keyed = []
        for request in waiting:
            matched = self.allocator.match(request.seq).hit_tokens
            deferred = self.defers and matched <= DEFERRAL_TOKENS and _shares(request, seen)
            hit = min(matched, request.num_tokens - 1) if self.order == "lpm" else 0
            keyed.append((1 if deferred else -hit, request))  # deferred ones keep list order among themselves
        keyed.sort(key=itemgetter(0))
        _replace(waiting, [request for _, request in keyed])

    def _refresh(self, waiting: deque[EngineRequest]) -> None:
        if not (self.refreshes and waiting):
            return
        if self._calls % REFRESH_EVERY == 0:
            head = [request for request, _ in zip(waiting, range(REFRESH_REQUESTS), strict=False)]
            for request in reversed(head):
                self.allocator.match(request.seq)
        self._calls += 1


def _replace(waiting: deque[EngineRequest], ordered: list[EngineRequest]) -> None:
    waiting.clear()
    waiting.extend(ordered)


def _shares(request: EngineRequest, seen: set[tuple[object, ...]]) -> bool:
    """The request begins with the same 32 tokens as one before it; if not, it is remembered."""
    seq = request.seq
    if request.num_tokens < DEFERRAL_TOKENS:
        return False
    ids = seq.token_ids if seq.page_hashes is None else seq.page_hashes
    every = cast("tuple[tuple[int, int, Hashable], ...]", seq.extra_keys)
    items = tuple(item for item in every if item[0] < DEFERRAL_TOKENS)
    key = (seq.namespace, items, bytes(memoryview(ids)[: _head_ids(request)]))
    if key in seen:
        return True
    seen.add(key)
    return False


def _head_ids(request: EngineRequest) -> int:
    """How many of a sequence's ids its first 32 tokens are: with page hashes, the whole pages in them, at least one."""
    if request.seq.page_hashes is None:
        return DEFERRAL_TOKENS
    grain = -(-request.seq.num_prompt_tokens // len(request.seq.page_hashes))
    return max(DEFERRAL_TOKENS // grain, 1)


def by_weight(matched: list[tuple[EngineRequest, Match]]) -> list[EngineRequest]:
    """Depth first over the cached tree, the child with most waiting requests below it first.

    Ties go to the child added first (`Match.path` rises with age among siblings). A node's own requests come
    behind those of its subtree, in list order. SGLang 0.5.22: dfs-weight.
    """
    own: dict[tuple[int, ...], list[EngineRequest]] = {}
    weight: dict[tuple[int, ...], int] = {}
    children: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for request, match in matched:
        path = match.path
        own.setdefault(path, []).append(request)
        for depth in range(len(path) + 1):
            weight[path[:depth]] = weight.get(path[:depth], 0) + 1
            if depth:
                children.setdefault(path[: depth - 1], set()).add(path[:depth])
    ordered: list[EngineRequest] = []
    stack: list[tuple[tuple[int, ...], bool]] = [((), False)]
    while stack:
        node, below_done = stack.pop()
        if below_done:
            ordered.extend(own.get(node, ()))
            continue
        stack.append((node, True))
        ranked = sorted(children.get(node, ()), key=lambda child: (-weight[child], child[-1]))
        stack.extend((child, False) for child in reversed(ranked))
    return ordered
