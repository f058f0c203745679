"""A shadow pool: what each slot of an allocator's pool holds, and the laws that live sequences must find kept.

The shadow knows nothing of the design: a slot gets the content of the position that is written to it, content being
the namespace, all tokens up to there and the images among them; where an image stands it is the image that counts,
whatever its placeholder tokens are. Each live sequence must find its own content in all slots of its committed tokens.
So a page with two owners, a hit on wrong or unwritten pages, an eviction under a live row, a forgotten move and a row
that kept freed pages all show as wrong content.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from kvarena.allocators.interface import (
    PADDING_PAGE,
    Capacity,
    KVAllocator,
    PageMove,
    Released,
    Sequence,
    SupportsFork,
)


class Violation(Exception):
    """A law that the allocator broke: the message names the law, the sequence and what was found."""


@dataclass
class Actor:
    """A sequence and the content of each of its known positions."""

    seq: Sequence
    content: list[int] = field(default_factory=list)


class Contents:
    """Numbers for contents: two positions have the same one exactly if their KV must be the same."""

    def __init__(self) -> None:
        self._ids: dict[Any, int] = {}

    def note(self, actor: Actor) -> None:
        """Number the positions of a sequence that have none yet."""
        seq = actor.seq
        items: Any = sorted(seq.extra_keys, key=itemgetter(0))  # whoever lists them otherwise has the same content
        for position in range(len(actor.content), seq.num_tokens):
            before = actor.content[-1] if position else ("start", seq.namespace)
            images = tuple(item for item in items if item[0] <= position)
            below = any(position < start + length for start, length, _ in images)
            key = (before, None if below else seq.token_ids[position], images)
            actor.content.append(self._ids.setdefault(key, len(self._ids)))


@dataclass(frozen=True)
class State:
    """What a refusal must leave as it was."""

    capacity: Capacity
    rows: dict[str, array[int]]


class ShadowPool:
    """Contents by slot for one allocator. `live` is the caller's table of live sequences, by request id."""

    def __init__(self, allocator: KVAllocator, live: Mapping[str, Actor]) -> None:
        self.allocator = allocator
        self.live = live
        self._slots: dict[int, int] = {}
        self._given_back: set[int] = set()  # reported freed by a release, in no row since
        self.window = getattr(getattr(allocator, "design", None), "sliding_window", None)
        # With a hash unit a page may serve no more than its beginning.
        self.written = getattr(getattr(allocator, "design", None), "hash_unit", None) or allocator.page_size
        self._forks = isinstance(allocator, SupportsFork)

    def slots_of(self, actor: Actor, n: int) -> list[int]:
        """Slots of the next n positions of a sequence."""
        start, size = actor.seq.num_computed_tokens, self.allocator.page_size
        pages = self.allocator.page_ids(actor.seq)
        return [pages[p // size] * size + p % size for p in range(start, start + n)]

    def write(self, actor: Actor, slots: list[int]) -> None:
        """The KV of the next positions of a sequence is written to these slots."""
        start = actor.seq.num_computed_tokens
        self._slots.update(zip(slots, actor.content[start : start + len(slots)], strict=True))

    def move(self, moves: Iterable[PageMove]) -> None:
        """Copy pages, all sources read before any target is written."""
        size, copied = self.allocator.page_size, {}
        for move in moves:
            for offset in range(size):
                copied[move.dst * size + offset] = self._slots.get(move.src * size + offset)
        self._slots.update({slot: content for slot, content in copied.items() if content is not None})

    def forget(self, pages: Iterable[int]) -> None:
        """Pages were freed or evicted: a hit on them from now on finds nothing."""
        size = self.allocator.page_size
        for page in pages:
            for slot in range(page * size, page * size + size):
                self._slots.pop(slot, None)

    def clear(self) -> None:
        """Forget all pages."""
        self._slots.clear()
        self._given_back.clear()

    def verify(self) -> None:
        """Conservation, owners, contents; then the allocator's own `check`. Raises Violation."""
        capacity = self.allocator.capacity()
        check_conservation(capacity, self.allocator.num_pages)
        rows = {name: self.allocator.page_ids(actor.seq) for name, actor in self.live.items()}
        owners: dict[int, list[tuple[str, int]]] = {}
        for name, pages in rows.items():
            self._verify_row(self.live[name], pages)
            for column, page in enumerate(pages):
                if page != PADDING_PAGE:
                    owners.setdefault(page, []).append((name, column))
        self._given_back -= owners.keys()
        if capacity.in_use < len(owners):
            raise Violation(f"conservation: {len(owners)} pages are in live rows, {capacity.in_use} counted in use")
        for page, holders in owners.items():
            self._verify_sharing(page, holders)
        self.allocator.check()

    def _verify_row(self, actor: Actor, pages: array[int]) -> None:
        seq, size = actor.seq, self.allocator.page_size
        if bad := [p for p in pages if not 0 <= p <= self.allocator.num_pages]:
            raise Violation(f"page ids: request {seq.request_id} names {bad}, expected 1..{self.allocator.num_pages}")
        if len(pages) * size < seq.num_computed_tokens:
            raise Violation(f"row: {len(pages)} pages of {size} for {seq.num_computed_tokens} computed tokens")
        for position in range(seq.num_computed_tokens):
            page = pages[position // size]
            if page == PADDING_PAGE:
                self._verify_left_behind(seq, position)
            elif self._slots.get(page * size + position % size) != actor.content[position]:
                raise Violation(
                    f"content: request {seq.request_id}, position {position}: page {page} does not hold its KV "
                    "(never written, freed meanwhile, or another sequence's)"
                )

    def _verify_left_behind(self, seq: Sequence, position: int) -> None:
        if self.window is None:
            raise Violation(f"page ids: request {seq.request_id} owns the padding page at position {position}")
        if position > seq.num_computed_tokens - self.window:
            raise Violation(f"window: request {seq.request_id} still sees position {position}, its page is gone")

    def _verify_sharing(self, page: int, holders: list[tuple[str, int]]) -> None:
        size = self.allocator.page_size
        if len({name for name, _ in holders}) < len(holders):
            raise Violation(f"owners: page {page} is twice in the row of {holders[0][0]}")
        contents = {tuple(self.live[name].content[col * size : (col + 1) * size]) for name, col in holders}
        full = len(contents) == 1 and len(next(iter(contents))) == size
        if len(holders) > 1 and not full and not (self._forks and self._same_beginning(holders)):
            raise Violation(
                f"owners: page {page} belongs to {[name for name, _ in holders]}, whose tokens differ there"
            )

    def _same_beginning(self, holders: list[tuple[str, int]]) -> bool:
        """A partial page after a fork: all have computed the same tokens of it, and none further."""
        size, written = self.allocator.page_size, set()
        for name, column in holders:
            actor = self.live[name]
            written.add(tuple(actor.content[column * size : actor.seq.num_computed_tokens]))
        return len(written) == 1 and 0 < len(next(iter(written))) < size

    def state(self) -> State:
        """What a refusal must leave as it is."""
        rows = {name: self.allocator.page_ids(actor.seq) for name, actor in self.live.items()}
        return State(self.allocator.capacity(), rows)

    def expect_unchanged(self, before: State, what: str) -> None:
        """No page changed owner since `before`."""
        self.expect_same_rows(before, what)
        after = self.allocator.capacity()
        if (after.free, after.evictable, after.in_use) != (
            before.capacity.free,
            before.capacity.evictable,
            before.capacity.in_use,
        ):
            raise Violation(f"{what}: changed {before.capacity} to {after}; no page may change owner")

    def expect_nothing_taken(self, before: State, what: str) -> None:
        """A refused reserve: no row changed, no page more is in use; pages that left a window may have gone."""
        self.expect_same_rows(before, what)
        in_use = self.allocator.capacity().in_use
        if in_use > before.capacity.in_use:
            raise Violation(f"{what}: {in_use} pages in use, {before.capacity.in_use} before; all or nothing")

    def expect_released(self, before: State, name: str, released: Released) -> None:
        """A release of `name`: `freed` and `cached` are the pages that came free and became evictable, each once.

        `cached` may also name pages that were evictable: equal ones, for which as many own ones were given up. None
        is in a live row, none was given back before without having been in a row since, and those that stay cached
        were written. Raises Violation.
        """
        self._given_back -= set(before.rows[name])
        held = {page for actor in self.live.values() for page in self.allocator.page_ids(actor.seq)}
        reported = [*released.freed, *released.cached]
        for page in reported:
            if page in held or not 1 <= page <= self.allocator.num_pages or reported.count(page) > 1:
                raise Violation(f"release: page {page} is reported twice, or is in a live row, or outside the pool")
            if page in self._given_back:
                raise Violation(f"release: page {page} is reported again, it was free already")
        after, size = self.allocator.capacity(), self.allocator.page_size
        for what, pages, grown, surplus in (
            ("freed", released.freed, after.free - before.capacity.free, 0),
            ("cached", released.cached, after.evictable - before.capacity.evictable, len(released.duplicates)),
        ):
            if not grown <= len(pages) <= grown + surplus:
                raise Violation(f"release: {len(pages)} pages are reported {what}, {grown} more are")
        for page in released.cached:
            if any(slot not in self._slots for slot in range(page * size, page * size + self.written)):
                raise Violation(f"release: page {page} is reported cached, its KV was never written")
        self._given_back.update(released.freed)

    def expect_same_rows(self, before: State, what: str) -> None:
        """No row changed since `before`; pages that a window left behind may have gone."""
        for name, pages in before.rows.items():
            now = self.allocator.page_ids(self.live[name].seq)
            kept = len(now) == len(pages) and all(b in (a, PADDING_PAGE) for a, b in zip(pages, now, strict=True))
            if not kept or (now != pages and self.window is None):
                raise Violation(f"{what}: the row of {name} changed from {list(pages)} to {list(now)}")


def check_conservation(capacity: Capacity, num_pages: int) -> None:
    """free + evictable + in use = num_pages, none negative. Raises Violation."""
    parts = (capacity.free, capacity.evictable, capacity.in_use)
    if min(parts) < 0 or sum(parts) != num_pages or capacity.shared > capacity.in_use:
        raise Violation(
            f"conservation: {capacity.free} free + {capacity.evictable} evictable + {capacity.in_use} in use "
            f"({capacity.shared} shared), expected {num_pages} pages in all"
        )
