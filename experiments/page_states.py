"""What states a page passes through, counted from a run; any transition that the diagram does not have fails the run.

    free        holds nothing
    private     a live request owns it, no later request can find it
    cached      a live request owns it, and later requests find it
    evictable   cached, and no live request holds it

The states come from the allocator's events and from `page_ids` of the live requests; after every operation their counts
must be those of `capacity()`, so a diagram cannot drift from what the allocator says of itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvarena.allocators.interface import AllocatorError, Event, EventKind, KVAllocator, Release, Sequence

FREE, PRIVATE, CACHED, EVICTABLE = "free", "private", "cached", "evictable"
EDGES = {
    (FREE, PRIVATE): "reserve",
    (PRIVATE, CACHED): "publish",
    (PRIVATE, FREE): "release, or a duplicate given up",
    (CACHED, EVICTABLE): "last holder releases",
    (EVICTABLE, CACHED): "hit",
    (EVICTABLE, FREE): "evict",
    (CACHED, FREE): "abort before its KV was written",
}


@dataclass
class PageStates:
    """Follows the pages of one allocator. `observe` after each operation; `edges` counts transitions.

    Costs O(num_pages) an observation.
    """

    allocator: KVAllocator
    edges: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.allocator.events.enabled = True
        self.allocator.events.drain()
        self.states = [FREE] * (self.allocator.num_pages + 1)
        self._published: set[int] = set()

    def observe(self, live: Iterable[Sequence]) -> None:
        """Follow what happened since the last call. Raises AllocatorError for a transition that is not in `EDGES`,
        and where the states do not add up to `capacity()`."""
        for event in self.allocator.events.drain():
            self._follow(event)
        owned = {page for seq in live for page in self.allocator.page_ids(seq)}
        for page in range(1, len(self.states)):
            known = page in self._published
            self._go(page, (CACHED if known else PRIVATE) if page in owned else (EVICTABLE if known else FREE))
        self._compare()

    def counts(self) -> dict[str, int]:
        """Pages in each state; the padding page is in none."""
        found = Counter(self.states[1:])
        return {state: found[state] for state in (FREE, PRIVATE, CACHED, EVICTABLE)}

    def _follow(self, event: Event) -> None:
        """The steps inside one operation, in order: a page may be evicted, taken and published by a single reserve."""
        for page in event.page_ids:
            if event.kind is EventKind.HIT:
                self._go(page, CACHED)
            elif event.kind is EventKind.EVICT:
                self._published.discard(page)
                self._go(page, FREE)
            elif event.kind is EventKind.RESERVE:
                self._go(page, PRIVATE)
            elif event.kind is EventKind.PUBLISH:
                self._published.add(page)
                self._go(page, CACHED)

    def _go(self, page: int, after: str) -> None:
        before = self.states[page]
        if before == after:
            return
        if (before, after) not in EDGES:
            raise AllocatorError(f"page {page} went from {before} to {after}, which no rule allows")
        self.edges[before, after] += 1
        self.states[page] = after

    def _compare(self) -> None:
        counts, capacity = self.counts(), self.allocator.capacity()
        told = (capacity.free, capacity.in_use, capacity.evictable)
        found = (counts[FREE], counts[PRIVATE] + counts[CACHED], counts[EVICTABLE])
        if told != found:
            raise AllocatorError(f"free, in use, evictable: capacity() says {told}, the pages' states say {found}")


def watch(allocator: KVAllocator, *, ops: int = 600, seed: int = 0) -> PageStates:
    """Follow the pages of an empty allocator through random requests that arrive, decode, are preempted and end."""
    rng, states = random.Random(seed), PageStates(allocator)
    live: list[Sequence] = []
    for number in range(ops):
        choice = rng.random()
        if choice < 0.35 or not live:
            seq = Sequence(f"r{number}", [rng.choice((1, 2)) for _ in range(rng.randint(1, 8 * allocator.page_size))])
            if _admit(allocator, seq):
                live.append(seq)
        elif choice < 0.75:
            _decode(allocator, rng.choice(live), rng)
        else:
            seq = live.pop(rng.randrange(len(live)))
            allocator.release([seq], Release.PREEMPT if choice < 0.85 else Release.FINISH)
        states.observe(live)
    return states


def _admit(allocator: KVAllocator, seq: Sequence) -> bool:
    pin = allocator.pin(seq)
    if pin is None or allocator.reserve([(seq, seq.num_tokens - pin.hit_tokens)]) is None:
        return False
    allocator.commit([(seq, seq.num_tokens)])
    return True


def _decode(allocator: KVAllocator, seq: Sequence, rng: random.Random) -> None:
    seq.append(rng.choice((1, 2)))
    if allocator.reserve([(seq, 1)]) is None:
        seq.pop()
        return
    allocator.commit([(seq, seq.num_tokens)])


def state_diagram(states: PageStates) -> str:
    """Mermaid text: every transition of the run with its count."""
    lines = ["stateDiagram-v2", f"    [*] --> {FREE}"]
    for (before, after), text in EDGES.items():
        if count := states.edges[before, after]:
            lines.append(f"    {before} --> {after}: {text} ({count:,})")
    return "\n".join(lines)


def request_diagram(allocator: KVAllocator) -> str:
    """Mermaid text: 10 tokens, one reply token, the end; then a request that begins with the same ten."""
    from kvarena.experiments.walk import Walk

    walk = Walk(allocator)
    first, second = Sequence("a", range(10)), Sequence("b", [*range(10), 70, 71])
    walk.arrive(first)
    walk.decode(first, 50)
    walk.finish(first)
    walk.arrive(second)
    lines = [
        "sequenceDiagram",
        "    participant S as scheduler",
        "    participant A as allocator",
        "    participant P as pages",
    ]
    for row in walk.table().to_dict("records"):
        lines.append(f"    S->>A: {row['verb']}")
        lines += [f"    A->>P: {event}" for event in row["events"].split("; ") if event]
        lines.append(f"    Note over P: free {row['free']}, evictable {row['evictable']}, in use {row['in use']}")
    return "\n".join(lines)
