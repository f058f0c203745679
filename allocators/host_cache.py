"""Second-level prefix cache: pages that the device cache evicts go to the host, and come back on a hit.

It wraps any allocator and knows pages by what they hold: the chained key of everything up to a page's end, computed
here, since each design keeps its own. After `commit` the content of full pages is known; when the allocator says that
such a page was evicted, its KV is copied to a host page before the page is written again. `pin` looks further on the
host behind what the device has; `reserve` gives those tokens device pages as it gives to any others, and their KV is
copied in before the step. Tokens found on the host count as computed, and as hits of their own tier.

    pin      hit_tokens = device hit | host hit          host pages stay where they are until `reserve`
    reserve  ("out", evicted page -> host page) ...      in the order in which they have to be carried out
             ("in", host page -> new page) ...

The host keeps what was loaded (it need not be copied out again); least recently used content goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import xxhash
from kvarena.allocators.forwarding import ForwardingAllocator
from kvarena.allocators.interface import (
    PADDING_PAGE,
    AllocatorError,
    Commit,
    EventKind,
    Fork,
    Gate,
    KVAllocator,
    Match,
    PageCopy,
    PageMove,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
)

Moved = Callable[[Literal["out", "in"], tuple[PageMove, ...]], None]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class HostCacheCapacity:
    """Where the host pages are, and what moved so far.

    free + cached = num_pages. `twins` of the cached ones are on the device too, so that the two tiers together hold
    device pages + cached - twins different ones. `copied_out`, `copied_in` and `dropped` count pages, `hit_tokens`
    tokens found here that the device did not have.
    """

    num_pages: int
    free: int
    cached: int
    twins: int
    copied_out: int
    copied_in: int
    dropped: int
    hit_tokens: int


@dataclass(slots=True)
class _Chain:
    """Page keys of one sequence, as far as they were computed; `loads`: host pages that its reservation copies in,
    for the row's pages from `first` on; `named` pages of its row whose content is noted."""

    seq: Sequence
    keys: list[bytes] = field(default_factory=list)
    first: int = 0
    loads: list[int] = field(default_factory=list)
    named: int = 0


def _design_of(allocator: KVAllocator) -> Any:
    """The design under any wrappers, or None."""
    inner = getattr(allocator, "inner", None)
    return getattr(allocator, "design", None) if inner is None else _design_of(inner)


class HostCache(ForwardingAllocator):
    """An allocator with `num_pages` host pages behind it, ids from `first_page` on.

    moved  told of copies in the order in which they have to be carried out, all before the next step computes

    Conservation law, checked by `check()`: free + cached = num_pages; a host page has one key. Costs a hash of every
    page once a request, beside what the allocator costs.

    >>> from kvarena.allocators.config import make_allocator
    >>> moves = []
    >>> cache = HostCache(make_allocator("vllm", num_pages=2), 4, lambda way, pages: moves.append((way, len(pages))))
    >>> for name, first in (("a", 0), ("b", 100), ("a again", 0)):
    ...     seq = Sequence(name, range(first, first + 20))
    ...     pin = cache.admit(seq); hit = cache.hit_tokens(seq)
    ...     _ = cache.commit([(seq, 20)]); _ = cache.release([seq], Release.FINISH)
    >>> pin.hit_tokens, hit, moves
    (16, 16, [('out', 1), ('out', 1), ('in', 1)])
    """

    def __init__(self, inner: KVAllocator, num_pages: int, moved: Moved, *, first_page: int = 1) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1 host page, found {num_pages}")
        design = _design_of(inner)
        if getattr(design, "sliding_window", None) is not None or (getattr(design, "hash_unit", None) or 0):
            raise ValueError(
                f"a host cache knows whole pages of whole prefixes: no window, no hash_unit; found {design}"
            )
        super().__init__(inner)
        self.num_host_pages = num_pages
        self._moved = moved
        self._first = first_page
        self._free = list(range(first_page + num_pages - 1, first_page - 1, -1))
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._locked: dict[bytes, int] = {}  # waiting to be copied in, by how many
        self._content: dict[int, bytes] = {}  # device page -> key of what it holds
        self._chains: dict[str, _Chain] = {}
        self._names: dict[Hashable, int] = {}  # namespaces and items, as numbers that a key can hold
        self._hits: dict[str, int] = {}
        self._copied_out = self._copied_in = self._dropped = self._hit_tokens = 0

    # Keys

    def _name(self, value: Hashable) -> int:
        return self._names.setdefault(value, len(self._names))

    def _keys(self, seq: Sequence, num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` full pages of a sequence, as far as its tokens are named."""
        keys = self._chain(seq).keys
        items = cast("tuple[tuple[int, int, Hashable], ...]", seq.extra_keys)
        while len(keys) < num_pages:
            text = self._text(seq, len(keys))
            if text is None:
                break
            digest = xxhash.xxh3_128(keys[-1] if keys else b"%d" % self._name(("namespace", seq.namespace)))
            digest.update(text)
            start, end = len(keys) * self.page_size, (len(keys) + 1) * self.page_size
            for offset, length, content in items:
                if offset < end and offset + length > start:
                    digest.update(b"%d:%d;" % (max(offset - start, 0), self._name(("item", content))))
            keys.append(digest.digest())
        return keys[:num_pages]

    def _chain(self, seq: Sequence) -> _Chain:
        chain = self._chains.get(seq.request_id)
        if chain is None or chain.seq is not seq:
            chain = self._chains[seq.request_id] = _Chain(seq)
        return chain

    def _text(self, seq: Sequence, page: int) -> bytes | None:
        """What a page of a sequence says; None where its tokens have no names."""
        if seq.page_hashes is not None:
            return bytes(memoryview(seq.page_hashes)[page : page + 1]) if page < len(seq.page_hashes) else None
        start, end = page * self.page_size, (page + 1) * self.page_size
        return bytes(memoryview(seq.token_ids)[start:end]) if end <= len(seq.token_ids) else None

    # Content of device pages

    def _note_content(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a live sequence have KV: its full pages hold what their keys say."""
        chain = self._chain(seq)
        full = min(num_tokens, seq.num_tokens) // self.page_size
        if full <= chain.named:
            return
        keys, pages = self._keys(seq, full), self.inner.page_ids(seq)
        for at in range(chain.named, len(keys)):
            if pages[at] != PADDING_PAGE:
                self._content[pages[at]] = keys[at]
        chain.named = max(chain.named, len(keys))

    def _evicted(self, pages: Iterable[int]) -> None:
        """Copy what is known of pages to the host before they are written again."""
        moves = []
        for page in pages:
            key = self._content.pop(page, None)
            if key is None:
                continue
            host = self._place(key)
            if host is not None:
                moves.append(PageMove(page, host))
        if moves:
            self._copied_out += len(moves)
            self._moved("out", tuple(moves))

    def _place(self, key: bytes) -> int | None:
        """A host page for new content; None when it is there already, or every page is about to be copied in."""
        if key in self._cached:
            self._cached.move_to_end(key)
            return None
        if not self._free:
            oldest = next((each for each in self._cached if each not in self._locked), None)
            if oldest is None:
                return None
            self._free.append(self._cached.pop(oldest))
            self._dropped += 1
        host = self._cached[key] = self._free.pop()
        return host

    def _taken(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._content.pop(page, None)

    # Verbs

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """As `KVAllocator.pin`; `hit_tokens` go on with what is found on the host, in whole pages."""
        pin = self.inner.pin(seq, gate)
        if pin is None:
            return None
        found = self._found(seq, pin.hit_tokens)
        for key in found:
            self._cached.move_to_end(key)
            self._locked[key] = self._locked.get(key, 0) + 1
        chain = self._chain(seq)
        chain.first, chain.named = pin.hit_tokens // self.page_size, 0
        chain.loads = [self._cached[key] for key in found]
        self._hits[seq.request_id] = len(found) * self.page_size
        seq.num_computed_tokens = pin.hit_tokens + len(found) * self.page_size
        return Pin(seq, seq.num_computed_tokens, pin.page_ids)

    def _found(self, seq: Sequence, hit_tokens: int) -> list[bytes]:
        """Keys on the host that go on where the device's hit ends, one token left to compute."""
        if hit_tokens % self.page_size:
            return []
        first, last = hit_tokens // self.page_size, (seq.num_prefill_tokens - 1) // self.page_size
        found = []
        for key in self._keys(seq, last)[first:]:
            if key not in self._cached:
                break
            found.append(key)
        return found

    def hit_tokens(self, seq: Sequence) -> int:
        """Tokens of the sequence's last admission that the host had and the device had not."""
        return self._hits.get(seq.request_id, 0)

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """As `KVAllocator.reserve`; what evicted pages held goes out, what a new sequence found comes in."""
        asked = [self._with_loads(seq, n) for seq, n in wants]
        answers, dropped = self._dropping(lambda: self.inner.reserve(asked))
        if answers is None:
            self._evicted(dropped)
            for seq, _ in asked:
                self._unlock(seq)
            return None
        for answer in answers:
            self._evicted(answer.evicted)
        for answer in answers:
            self._taken(answer.page_ids)
        for answer in answers:
            self._load(answer.seq)
        return answers

    def _dropping(self, verb: Callable[[], Answer]) -> tuple[Answer, list[int]]:
        """What a verb answers, and the pages that it evicted by its own account: a refusal has no list of them
        (SGLang's demand evicts before it is known to fail), nor has a copy on write."""
        log, first = self.inner.events, len(self.inner.events.rows)
        recorded, log.enabled = log.enabled, True
        try:
            answer = verb()
        finally:
            log.enabled = recorded
            made = log.rows[first:]
            if not recorded:
                del log.rows[first:]
        return answer, [page for event in made if event.kind is EventKind.EVICT for page in event.page_ids]

    def _with_loads(self, seq: Sequence, n: int) -> tuple[Sequence, int]:
        """What the allocator is asked for: to it, tokens that come from the host are new ones."""
        chain = self._chains.get(seq.request_id)
        loads = 0 if chain is None else len(chain.loads) * self.page_size
        seq.num_computed_tokens -= loads
        return seq, n + loads

    def _load(self, seq: Sequence) -> None:
        chain = self._chains.get(seq.request_id)
        if chain is None or not chain.loads:
            return
        pages = self.inner.page_ids(seq)[chain.first : chain.first + len(chain.loads)]
        moves = tuple(map(PageMove, chain.loads, pages))
        end = seq.num_computed_tokens = (chain.first + len(chain.loads)) * self.page_size
        self._copied_in += len(moves)
        self._hit_tokens += len(moves) * self.page_size
        self._unlock(seq)
        self._moved("in", moves)
        self._note_content(seq, end)

    def _unlock(self, seq: Sequence) -> None:
        chain = self._chains.get(seq.request_id)
        if chain is None:
            return
        for key in chain.keys[chain.first : chain.first + len(chain.loads)]:
            self._locked[key] -= 1
            if not self._locked[key]:
                del self._locked[key]
        chain.loads = []

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        pairs = list(done)
        commits = self.inner.commit(pairs)
        for commit in commits:
            self._evicted(commit.evicted)
            self._taken(commit.freed)
            if commit.rewritten != (0, 0):
                chain = self._chain(commit.seq)
                chain.named = min(chain.named, commit.rewritten[0])
        for seq, num_tokens in pairs:
            self._note_content(seq, num_tokens)
        return commits

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        gone = list(seqs)
        released = self.inner.release(gone, reason)
        for seq in gone:
            self._unlock(seq)
            self._hits.pop(seq.request_id, None)
            if reason is not Release.PREEMPT:  # who comes back has the same tokens, and their keys
                self._chains.pop(seq.request_id, None)
        self._evicted(released.evicted)
        self._taken(released.freed)
        return released

    def evict(self, num_tokens: int) -> list[int]:
        evicted = self.inner.evict(num_tokens)
        self._evicted(evicted)
        return evicted

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        """As `SupportsFork.fork`; its copies come behind the moves told here. ValueError: the design has no fork."""
        made, dropped = self._dropping(lambda: super(HostCache, self).fork(parent, child, num_tokens))
        self._evicted(dropped if made is None else made.evicted)
        if made is not None:
            self._taken(copy.dst for copy in made.copies)
            if made.commit is not None:
                self._taken(made.commit.freed)
                self._chain(parent).named = 0
        return made

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
        """As `SupportsFork.prepare_write`; what its copies displace goes out before them."""
        copies, dropped = self._dropping(lambda: super(HostCache, self).prepare_write(seq, start, end))
        self._evicted(dropped)
        self._taken(copy.dst for copy in copies or ())
        return copies

    def match(self, seq: Sequence) -> Match:
        """What the device has: an order by cached prefix prefers what needs no copy."""
        return self.inner.match(seq)

    def reset(self) -> bool:
        """Drop both tiers. False, and nothing changed, while sequences are live."""
        if not self.inner.reset():
            return False
        self._free.extend(self._cached.values())
        self._cached.clear()
        self._content.clear()
        return True

    def host_capacity(self) -> HostCacheCapacity:
        """Host pages by state, and counts so far. O(pages)."""
        on_device = set(self._content.values())
        twins = sum(key in on_device for key in self._cached)
        counts = (self._copied_out, self._copied_in, self._dropped, self._hit_tokens)
        return HostCacheCapacity(self.num_host_pages, len(self._free), len(self._cached), twins, *counts)

    def check(self) -> None:
        """The allocator's own check, and: each host page is free or has one key, what is locked is cached."""
        self.inner.check()
        owned = [*self._cached.values(), *self._free]
        if sorted(owned) != list(range(self._first, self._first + self.num_host_pages)):
            raise AllocatorError(f"host cache: pages are not each free or cached once: {sorted(owned)}")
        if not self._locked.keys() <= self._cached.keys():
            raise AllocatorError("host cache: content that waits to be copied in is not there")

    def __repr__(self) -> str:
        return f"{self.inner!r}\nhost cache: {len(self._cached)} of {self.num_host_pages} pages cached"

    def __getattr__(self, name: str) -> Any:
        """Whatever else the allocator has (waste of runs, say)."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
