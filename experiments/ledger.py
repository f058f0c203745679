"""What became of every page of text: kept beside an allocator from its events, judged by trees of its own.

`WatchedAllocator` passes every verb on and reads the events that it caused. Three things are kept, none of them by the
allocator: which text each page of the pool serves; for each page of text, who published and who evicted it last; and
two trees of all tokens that were computed so far, one by namespace and one over all. At every admission that goes
through they say why each token of the prompt was not served: see `reasons`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.allocators.forwarding import ForwardingAllocator
from kvarena.allocators.interface import (
    AllocatorError,
    Commit,
    Event,
    EventKind,
    Gate,
    KVAllocator,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
)
from kvarena.experiments.ceilings import PrefixTree
from kvarena.experiments.page_names import PageNames
from kvarena.prefix.page_text import encode
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvarena.experiments.specs import AllocatorEntry

NOBODY = -1
REASONS = {
    "first_seen": "no earlier request computed a text that begins so",
    "in_progress": "in the prompt of a request admitted before, which had not computed it yet",
    "host": "served from the host's cache, not from the device's",
    "namespace": "computed before, in another namespace only",
    "last_token": "computed before, but the last token is always computed again",
    "rounding": "computed before, but it does not fill a page",
    "evicted": "was cached, and its page was evicted",
    "behind_gap": "is cached, but a page before it is not",
    "never_published": "computed before, and not (yet) offered to the cache by anyone",
    "not_kept": "computed before; the design does not keep it",
    "refused": "the request was never admitted",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt tokens [start, end) that were not served, and why.

    by, step      evicted: number of the request whose operation evicted the page, and of the request that arrived
                  then. behind_gap: the same of the page that is missing before it
    source        number of the request that published the page last, or that computed the text first; NOBODY: none
    """

    start: int
    end: int
    reason: str
    by: int = NOBODY
    step: int = NOBODY
    source: int = NOBODY


class Ledger:
    """Texts, pages and fates. `step` is the number of the request that is arriving; requests are named by number.

    namespaced  some request has a namespace; without one, a single tree of tokens serves for both
    """

    def __init__(self, names: PageNames, num_pages: int, entry: AllocatorEntry, *, namespaced: bool = True) -> None:
        self.names = names
        self.page_size = names.page_size
        self.last_token_rule = entry.last_token_rule
        self.tracks = entry.shares_prefixes  # else nothing outlives its users, and there is nothing to follow
        self.strict = self.tracks and entry.kind in ("block", "token")
        self.windowed = entry.design is not None and entry.design.sliding_window is not None
        self.step = 0
        self.spans: dict[int, list[Span]] = {}
        self.hits: dict[int, int] = {}
        count = names.num_pages
        self._starts = names.starts()
        self._text_of = np.full(num_pages + 1, NOBODY, np.int64)  # text that each page of the pool serves
        self._serving = np.zeros(count, np.int32)  # pages of the pool that serve each text
        self._publisher = np.full(count, NOBODY, np.int32)
        self._evictor = np.full(count, NOBODY, np.int32)
        self._evicted_at = np.full(count, NOBODY, np.int32)
        self._own = PrefixTree()
        self._all = PrefixTree() if namespaced else self._own
        self._numbers: dict[str, int] = {}  # of live requests
        self._texts: dict[str, NDArray[np.int64]] = {}
        self._written: dict[str, tuple[Sequence, int]] = {}  # tokens computed and not in the trees yet

    # --- what happens ---

    def arrive(self, seq: Sequence, hit_tokens: int) -> None:
        """An admission went through its look-up: say where its prompt's tokens were."""
        self._flush()
        number = self.step
        self._numbers[seq.request_id] = number
        self._texts[seq.request_id] = self.names.pages(number, self._starts)
        self.hits[number] = hit_tokens
        self.spans[number] = list(self._reasons(seq, hit_tokens))

    def reserved(self, wants: Iterable[tuple[Sequence, int]]) -> None:
        """A reservation was granted. In a replay that says nothing that the commit right behind it does not."""

    def write(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of the first tokens of a sequence is there."""
        self._written[seq.request_id] = (seq, num_tokens)

    def leave(self, seq: Sequence) -> None:
        """A sequence is no longer live."""
        self._flush()
        self._numbers.pop(seq.request_id, None)
        self._texts.pop(seq.request_id, None)

    def _flush(self) -> None:
        for seq, count in self._written.values():
            ids, number = tokens_of(seq)[:count], self._numbers[seq.request_id]
            self._own.add(ids, number, space_of(seq))
            if self._all is not self._own:
                self._all.add(ids, number)
        self._written.clear()

    def read(self, events: Iterable[Event], rows: dict[str, array[int]]) -> None:
        """Note what was published and evicted. `rows` are the rows of the sequences that may have published."""
        for event in events:
            if not event.page_ids or not self.tracks:
                continue
            if event.kind is EventKind.PUBLISH and event.request_id is not None:
                self._publish(event.request_id, event.page_ids, rows[event.request_id])
            elif event.kind is EventKind.EVICT:
                self._evict(event)

    def _publish(self, request_id: str, page_ids: tuple[int, ...], row: array[int]) -> None:
        pages = np.array(page_ids, np.int64)
        at = _position(pages, np.frombuffer(row, np.int32), request_id)
        texts = self._texts[request_id][at : at + len(pages)]
        if len(texts) < len(pages):
            raise AllocatorError(f"request {request_id} published {len(pages)} pages at {at}, beyond its whole pages")
        new = self._text_of[pages] != texts
        if (self._text_of[pages[new]] != NOBODY).any():
            raise AllocatorError(f"request {request_id} published pages that serve another text")
        self._text_of[pages] = texts
        np.add.at(self._serving, texts[new], 1)
        self._publisher[texts] = self._numbers[request_id]

    def _evict(self, event: Event) -> None:
        pages = np.array(event.page_ids, np.int64)
        texts = self._text_of[pages]
        if (texts == NOBODY).any():
            raise AllocatorError(f"pages {pages[texts == NOBODY].tolist()} were evicted, and nobody published them")
        np.subtract.at(self._serving, texts, 1)
        self._text_of[pages] = NOBODY
        self._evictor[texts] = NOBODY if event.request_id is None else self._numbers.get(event.request_id, self.step)
        self._evicted_at[texts] = self.step

    # --- why ---

    def _reasons(self, seq: Sequence, hit: int) -> Iterator[Span]:
        """Spans from the end of the hit to the end of the prompt, without gap or overlap."""
        ids, size, end = tokens_of(seq), self.page_size, seq.num_tokens
        known, source = self._own.known(ids, space_of(seq))
        anywhere, elsewhere = (known, source) if self._all is self._own else self._all.known(ids)
        usable = min(known, end - self.last_token_rule)
        whole = max(usable // size * size, hit)
        self._check_hit(seq, hit, usable)
        yield from self._lost_pages(seq, hit, whole, source)
        yield from _span(max(whole, hit), usable, "rounding", source)
        yield from _span(usable, known, "last_token", source)
        yield from _span(known, anywhere, "namespace", elsewhere)
        yield from _span(max(known, anywhere), end, "first_seen", NOBODY)

    def _check_hit(self, seq: Sequence, hit: int, usable: int) -> None:
        if hit > usable:
            raise AllocatorError(f"request {seq.request_id} hit {hit} tokens; {usable} were computed before")
        texts = self._texts[seq.request_id][: hit // self.page_size]
        if self.strict and not self.windowed and not self._serving[texts].all():
            raise AllocatorError(f"request {seq.request_id} hit {hit} tokens, and not all of their pages are cached")

    def _lost_pages(self, seq: Sequence, hit: int, whole: int, source: int) -> Iterator[Span]:
        """Whole known pages that were not served, neighbours of one fate together."""
        size = self.page_size
        if whole <= hit:
            return
        if not self.strict and not self._publisher[self._texts[seq.request_id]].max(initial=NOBODY) >= 0:
            yield Span(hit, whole, "not_kept", source=source)
            return
        fates = self._fates(self._texts[seq.request_id][hit // size : whole // size], source)
        borders = np.flatnonzero((fates[:, 1:] != fates[:, :-1]).any(axis=0)) + 1
        gap: Span | None = None
        for low, high in pairwise([0, *borders.tolist(), fates.shape[1]]):
            cached, by, at, publisher, published = fates[:, low].tolist()
            span = Span(hit + low * size, hit + high * size, "evicted", by, at, publisher)
            if cached:
                yield self._behind(seq, span, gap)
                continue
            if not published:
                span = Span(span.start, span.end, "never_published", source=source)
            gap = gap or span
            yield span

    def _fates(self, texts: NDArray[np.int64], source: int) -> NDArray[np.int64]:
        """Rows: cached now, evicted by, evicted at, published (else computed) by, published ever. A column a text."""
        publisher = self._publisher[texts]
        published = publisher >= 0
        whose = np.where(published, publisher, source)
        evictions = self._evictor[texts], self._evicted_at[texts]
        return np.stack([self._serving[texts] > 0, *evictions, whose, published]).astype(np.int64)

    def _behind(self, seq: Sequence, span: Span, gap: Span | None) -> Span:
        if gap is not None:
            return Span(span.start, span.end, "behind_gap", gap.by, gap.step, span.source)
        if self.strict and not self.windowed:
            raise AllocatorError(f"request {seq.request_id}: tokens from {span.start} are cached and were not served")
        return Span(span.start, span.end, "not_kept", source=span.source)


def _span(start: int, end: int, reason: str, source: int) -> Iterator[Span]:
    if start < end:
        yield Span(start, end, reason, source=source)


def tokens_of(seq: Sequence) -> NDArray[np.int32]:
    return np.frombuffer(seq.token_ids.tobytes(), np.int32)


def space_of(seq: Sequence) -> Any:
    return None if seq.namespace is None else encode(seq.namespace)


def _position(pages: NDArray[np.int64], row: NDArray[np.int32], request_id: str) -> int:
    """Where `pages` stand in a row, as one stretch."""
    found = np.flatnonzero(row == pages[0])
    at = int(found[0]) if len(found) else 0
    if not np.array_equal(row[at : at + len(pages)], pages):
        raise AllocatorError(f"request {request_id} published pages {pages.tolist()}, which are not in its row")
    return at


class WatchedAllocator(ForwardingAllocator):
    """Passes everything on to `inner`, and tells `ledger` what its events say."""

    def __init__(self, inner: KVAllocator, ledger: Ledger) -> None:
        super().__init__(inner)
        self.ledger = ledger
        self.events.enabled = True

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        pin = self.inner.pin(seq, gate)
        self.ledger.read(self.events.drain(), {})
        if pin is not None:
            self.ledger.arrive(seq, pin.hit_tokens)
        return pin

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        asked = list(wants)
        reservations = self.inner.reserve(asked)
        self._read(seq for seq, _ in asked)
        if reservations is not None:
            self.ledger.reserved(asked)
        return reservations

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        counted = list(done)
        commits = self.inner.commit(counted)
        self._read(seq for seq, _ in counted)
        for seq, count in counted:
            self.ledger.write(seq, count)
        return commits

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        leaving = list(seqs)
        rows = {seq.request_id: self.inner.page_ids(seq) for seq in leaving}
        released = self.inner.release(leaving, reason)
        self.ledger.read(self.events.drain(), rows)
        for seq in leaving:
            self.ledger.leave(seq)
        return released

    def evict(self, num_tokens: int) -> list[int]:
        evicted = self.inner.evict(num_tokens)
        self.ledger.read(self.events.drain(), {})
        return evicted

    def _read(self, seqs: Iterable[Sequence]) -> None:
        """Hand the events on, with the rows of those who published: others need none."""
        events = self.events.drain()
        named = {event.request_id for event in events if event.kind is EventKind.PUBLISH}
        rows = {s.request_id: self.inner.page_ids(s) for s in seqs if s.request_id in named} if named else {}
        self.ledger.read(events, rows)
