"""The block design, by the rules of vLLM 0.32.0: pages with a ref count, and one free queue that is also the LRU.

A request owns a row of pages; any number of requests may hold the same full page. Full pages are published, by the
hash of everything up to their end, when their slots are reserved. A page that nobody holds goes back to the queue:
to its head when it holds nothing, to its tail when it still serves hits. New pages are taken from the head, and
taking a cached page is its eviction. On shortage nothing is done: the answer is None.

    pin      row = [hit hit hit]                      looked up; nothing is touched, so a refusal leaves no trace
    reserve  row = [hit hit hit | new new new]        hits touched, then pages from the head; full ones published
    commit                                            tokens are written: only counters move
    release  row reversed: without content -> head of the queue, cached -> tail
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from kvarena.allocators.block_rows import Plan, Row
from kvarena.allocators.config import Design
from kvarena.allocators.free_queue import FreeQueue
from kvarena.allocators.interface import (
    PADDING_PAGE,
    AllocatorError,
    Capacity,
    Commit,
    EventKind,
    EventLog,
    Gate,
    KVAllocator,
    Match,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
)
from kvarena.allocators.window import SlidingWindow
from kvarena.prefix.hash_chain import HashChainIndex, PageChain
from kvarena.prefix.page_text import HashFn


class BlockAllocator(KVAllocator):
    """Ref-counted pages over a free queue; see the module's head.

    Conservation law: free + evictable + in_use = num_pages. A page stands in the queue exactly when no row holds it;
    its ref count is the number of rows that name it; it is evictable when it stands in the queue and has a key. Page
    0 is padding: it is in none of these states.
    """

    kind = "block"

    def __init__(self, num_pages: int, design: Design, *, hash_fn: HashFn | str | None = None) -> None:
        """A pool of pages 1..num_pages. `hash_fn` (bytes -> bytes, or a name) replaces the design's page hash."""
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, found {num_pages}")
        self.design = design
        self.num_pages = num_pages
        self.page_size = design.page_size
        self.events = EventLog()
        self._index = HashChainIndex(num_pages, design.page_size, hash_fn or design.hash_fn)
        self._window = None if design.sliding_window is None else SlidingWindow(design)
        if self._window is None and design.retention_interval:
            raise ValueError(f"retention_interval {design.retention_interval}: only a sliding window has one")
        self._queue = FreeQueue(num_pages)
        self._refs = [2] + [0] * num_pages  # padding is never free, and never about to be
        self._rows: dict[str, Row] = {}
        self._pins: dict[str, Row] = {}  # looked up, not yet reserved for
        self._evictable = 0
        self._shared = 0
        self._wasted = 0

    # pin

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """Look up the prefix and test the room. Costs one hash a page not hashed before; changes nothing else.

        The held pages are touched by the first `reserve`. If another sequence reserves before that, they are touched
        then, so a pin is never lost. None: no room under the gate.
        """
        if seq.request_id in self._rows or seq.request_id in self._pins:
            raise ValueError(f"request {seq.request_id!r} is already live")
        chain = self._chain(seq) if self.design.prefix_cache else None
        # vLLM 0.32.0: at least the last token is computed, so a fully cached prompt gives its last page up.
        limit = (seq.num_prefill_tokens - self.design.last_token_rule) // self.page_size
        pages = self._match(chain, limit) if chain is not None else []
        gate = gate or self.design.gate
        if gate.whole_prompt and not self._has_room(seq, pages, gate):
            return None
        row = Row(seq, chain, pages, self.page_size)
        row.headroom = gate.headroom if gate.page_rounded else 0
        self._pins[seq.request_id] = row
        seq.num_computed_tokens = row.committed
        return Pin(seq, row.committed, row.pages[:])

    def _chain(self, seq: Sequence) -> PageChain:
        chain = seq.memo
        if not (isinstance(chain, PageChain) and chain.index is self._index and _still_true(chain, seq)):
            given = seq.page_hashes is not None
            seq.memo = chain = self._index.chain(seq.namespace, seq.extra_keys, given=given)
        self._extend(chain, seq, seq.num_tokens // self.page_size)
        return chain

    def _extend(self, chain: PageChain, seq: Sequence, num_pages: int) -> None:
        if seq.page_hashes is None:
            chain.extend(seq.token_ids, num_pages)
        else:
            chain.extend_given(seq.page_hashes, num_pages)

    def match(self, seq: Sequence) -> Match:
        """How much of the sequence is cached, its last token included. Changes nothing."""
        if not self.design.prefix_cache:
            return Match(0)
        pages = self._match(self._chain(seq), seq.num_tokens // self.page_size)
        return Match(len(pages) * self.page_size, tuple(pages))

    def _match(self, chain: PageChain, limit: int) -> list[int]:
        if self._window is None:
            return self._index.match(chain, limit)
        skipped, pages = self._index.match_window(chain, limit, max(self._window.tail_pages, 1))
        return [PADDING_PAGE] * skipped + pages

    def _has_room(self, seq: Sequence, hits: list[int], gate: Gate) -> bool:
        idle = self._num_idle(hits)
        if gate.page_rounded:
            need = -(-seq.num_prefill_tokens // self.page_size) - len(hits) + idle
            if self._window is not None:
                need = min(need, self._window.admission_cap(gate, need))
            need, room = need + gate.headroom, len(self._queue)
        else:
            need = seq.num_prefill_tokens - len(hits) * self.page_size + gate.headroom
            room = (len(self._queue) - idle) * self.page_size
        fits = need < room if gate.strict else need <= room
        if not fits and self.events.enabled:
            self.events.add(EventKind.REFUSE, seq.request_id, (), f"gate: needs {need}, has {room}")
        return fits

    def _num_idle(self, pages: Iterable[int]) -> int:
        refs = self._refs
        return [refs[page] for page in pages].count(0)

    # reserve

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """Slots for each sequence in order, as one-by-one calls would give them, but all or nothing.

        On a refusal nothing is taken; pages that left a window are freed all the same (vLLM 0.32.0).
        """
        plans = [self._plan(seq, n) for seq, n in wants]
        work = [plan for plan in plans if type(plan) is Plan]
        if len({plan.row for plan in work}) < len(work):
            raise ValueError("reserve: a sequence stands twice in one call")
        served = self._num_served(work)
        if served < len(work):
            self._refuse(work, served)
            return None
        if self._pins:
            self._hold_pins(work)
        return [self._serve(plan) if type(plan) is Plan else plan for plan in plans]

    def _plan(self, seq: Sequence, n: int) -> Plan | Reservation:
        """What has to be done for n more tokens; the answer itself when that is nothing."""
        row = self._rows.get(seq.request_id)
        end = seq.num_computed_tokens + n
        if row is not None and row.seq is seq and n > 0:
            if end <= row.settled:
                return row.nothing_new()
            take = max(-(-end // self.page_size) - len(row.pages), 0)
            if self._window is None:
                return Plan(row, end, take)
            return Plan(row, end, take, *self._window.left_behind(row.committed, row.pages))
        return self._plan_first(seq, n, end)

    def _plan_first(self, seq: Sequence, n: int, end: int) -> Plan:
        row = self._pins.get(seq.request_id)
        if row is None or row.seq is not seq:
            if seq.request_id not in self._rows or self._rows[seq.request_id].seq is not seq:
                raise ValueError(f"request {seq.request_id!r} is not live: pin it before reserving for it")
            raise ValueError(f"request {seq.request_id!r}: expected n >= 1 tokens, found {n}")
        if n < 0 or end == 0:
            raise ValueError(f"request {seq.request_id!r}: expected n >= 1 tokens, found {n}")
        return Plan(row, end, max(-(-end // self.page_size) - len(row.pages), 0))

    def _num_served(self, work: list[Plan]) -> int:
        """How many plans fit, in order. Counts the pages that pins hold and that windows free on the way."""
        room = len(self._queue)
        unheld = [row for row in self._pins.values() if not row.held]
        if unheld:
            room -= self._num_idle(unheld[0].pages if len(unheld) == 1 else {p for row in unheld for p in row.pages})
        dropped: dict[int, int] = {}
        for number, plan in enumerate(work):
            if plan.low < plan.high:
                for page in plan.row.pages[plan.low : plan.high]:
                    dropped[page] = dropped.get(page, 0) + 1
                    room += dropped[page] == self._refs[page] + sum(page in row.pages for row in unheld)
            if plan.take + (0 if plan.row.held else plan.row.headroom) > room:
                return number
            room -= plan.take
        return len(work)

    def _refuse(self, work: list[Plan], served: int) -> None:
        for plan in work[: served + 1]:
            self._drop_left_behind(plan)
        if self.events.enabled:
            plan, room = work[served], len(self._queue)
            reason = f"capacity: needs {plan.take} pages, {room} free or evictable"
            self.events.add(EventKind.REFUSE, plan.row.seq.request_id, (), reason)
        for plan in work:
            row = plan.row
            if self._pins.pop(row.seq.request_id, None) is not None:
                row.seq.num_computed_tokens = 0
                self._let_go(row.pages[::-1] if row.held else array("i"))

    def _hold_pins(self, work: list[Plan]) -> None:
        """Touch every page that a pin names before any page is taken."""
        for row in self._pins.values():
            if not row.held:
                row.held = True
                self._touch(row.pages)
        for plan in work:
            row = plan.row
            if self._pins.pop(row.seq.request_id, None) is not None:
                self._rows[row.seq.request_id] = row
                if self.events.enabled and row.adopted:
                    self.events.add(EventKind.HIT, row.seq.request_id, filter(None, row.pages))

    def _touch(self, pages: Iterable[int]) -> None:
        refs = self._refs
        held = [page for page in pages if refs[page] and page != PADDING_PAGE]
        idle = [page for page in pages if not refs[page]]
        self._queue.remove(idle)
        self._evictable -= len(idle)
        for page in idle:
            refs[page] = 1
        for page in held:
            refs[page] += 1
            self._shared += refs[page] == 2

    def _serve(self, plan: Plan) -> Reservation:
        row = plan.row
        freed = self._drop_left_behind(plan)
        taken, evicted = self._take(row, plan.take) if plan.take else ([], [])
        duplicates = self._publish(row, plan.end)
        row.settled = self._settled(row)
        if not (taken or duplicates or plan.low < plan.high):
            return row.nothing_new()
        window = (plan.low, plan.high)
        return Reservation(row.seq, array("i", taken), (), tuple(evicted), freed, tuple(duplicates), window)

    def _settled(self, row: Row) -> int:
        """Tokens up to which a `reserve` for this row finds nothing to do: no page to take, publish or drop."""
        if self._window is not None:
            return 0
        slots = len(row.pages) * self.page_size
        return slots if row.chain is None else min(slots, (row.published + 1) * self.page_size - 1)

    def _take(self, row: Row, count: int) -> tuple[list[int], list[int]]:
        """Give the first pages of the queue to `row`; returns them, and those whose content had to go."""
        taken = self._queue.take(count)
        evicted = self._index.drop(taken) if self._evictable else []
        self._evictable -= len(evicted)
        refs = self._refs
        for page in taken:
            refs[page] = 1
        row.pages.extend(taken)
        self._wasted += count * self.page_size
        if self.events.enabled:
            if evicted:
                self.events.add(EventKind.EVICT, row.seq.request_id, evicted, "capacity")
            self.events.add(EventKind.RESERVE, row.seq.request_id, taken)
        return taken, evicted

    def _drop_left_behind(self, plan: Plan) -> tuple[int, ...]:
        if plan.low == plan.high:
            return ()
        pages = plan.row.pages[plan.low : plan.high]
        plan.row.pages[plan.low : plan.high] = array("i", [PADDING_PAGE]) * len(pages)
        freed, cached = self._let_go(pages[::-1])
        if self.events.enabled:
            self.events.add(EventKind.RELEASE, plan.row.seq.request_id, pages[::-1], "window")
        return (*freed, *cached)

    # publish

    def _publish(self, row: Row, end: int) -> list[int]:
        """Offer the full pages of tokens [0, end) that are known to the cache; returns the duplicates among them."""
        if row.chain is None:
            return []
        seq = row.seq
        full = min(end, seq.num_tokens) // self.page_size
        if seq.page_hashes is not None:
            full = min(full, len(seq.page_hashes))
        start = row.published
        if full <= start:
            return []
        self._extend(row.chain, seq, full)
        row.published = full
        if self._window is None:
            return self._publish_pages(row, start, full)
        return [
            duplicate
            for position in range(start, full)
            if row.pages[position] != PADDING_PAGE and self._window.retains(position, seq.num_prompt_tokens)
            for duplicate in self._publish_pages(row, position, position + 1)
        ]

    def _publish_pages(self, row: Row, start: int, end: int) -> list[int]:
        pages = row.pages[start:end]
        duplicates = self._index.publish(pages, row.chain, start)  # type: ignore[arg-type]
        if self.events.enabled:
            self.events.add(EventKind.PUBLISH, row.seq.request_id, pages)
            if duplicates:
                self.events.add(EventKind.DUPLICATE, row.seq.request_id, duplicates)
        return duplicates

    # commit, release

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        """The first n tokens are written. O(1) a sequence.

        A scheduler that runs ahead has raised `num_computed_tokens` itself and commits when the tokens arrive: pages
        that they fill are published now (vLLM 0.32.0, asynchronous scheduling). Otherwise the next reserve does it.
        """
        return [self._commit(seq, n) for seq, n in done]

    def _commit(self, seq: Sequence, n: int) -> Commit:
        row = self._rows.get(seq.request_id)
        if row is None or row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live: reserve before committing")
        if not 0 <= n <= len(row.pages) * self.page_size:
            raise ValueError(
                f"request {seq.request_id!r}: commits {n} tokens, has slots for {len(row.pages) * self.page_size}"
            )
        duplicates: list[int] = []
        if n > seq.num_computed_tokens:
            seq.num_computed_tokens = n
        elif n >= (row.published + 1) * self.page_size:
            duplicates = self._publish(row, n)
        if n > row.committed:
            self._wasted -= n - row.committed
            row.committed = n
        return Commit(seq, duplicates=tuple(duplicates)) if duplicates else row.nothing_published()

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        """Free each sequence's pages, last page first. A sequence that holds nothing is passed over.

        ABORT also takes back the keys of pages that were published but not committed. Costs one step a page.
        """
        freed: list[int] = []
        cached: list[int] = []
        evicted: list[int] = []
        for seq in seqs:
            row = self._remove_row(seq)
            if row is None:
                continue
            if reason is Release.ABORT:
                evicted += self._unpublish(row)
            without_content, with_content = self._let_go(row.pages[::-1]) if row.held else ([], [])
            freed += without_content
            cached += with_content
            if self.events.enabled and row.held:
                self.events.add(EventKind.RELEASE, seq.request_id, filter(None, row.pages[::-1]), reason.value)
        return Released(tuple(freed), tuple(cached), tuple(evicted))

    def _remove_row(self, seq: Sequence) -> Row | None:
        row = self._rows.get(seq.request_id) or self._pins.get(seq.request_id)
        if row is None:
            return None
        if row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r}: another sequence of this id is live")
        if self._pins.pop(seq.request_id, None) is None:
            del self._rows[seq.request_id]
            self._wasted -= len(row.pages) * self.page_size - row.committed
        seq.num_computed_tokens = 0
        return row

    def _unpublish(self, row: Row) -> list[int]:
        start = max(row.adopted, row.committed // self.page_size)
        dropped = self._index.drop(row.pages[start : row.published])
        if dropped and self.events.enabled:
            self.events.add(EventKind.EVICT, row.seq.request_id, dropped, "abort")
        return dropped

    def _let_go(self, pages: array[int]) -> tuple[list[int], list[int]]:
        """One holder less for each page; those without one go to the queue: (without content, cached)."""
        refs, keys = self._refs, self._index.keys
        idle = [page for page in pages if refs[page] == 1]
        if len(idle) < len(pages):
            self._let_go_shared(pages)
        for page in idle:
            refs[page] = 0
        freed = [page for page in idle if keys[page] is None]
        cached = [page for page in idle if keys[page] is not None] if freed else idle
        self._queue.prepend(freed)
        self._queue.append(cached)
        self._evictable += len(cached)
        return freed, cached

    def _let_go_shared(self, pages: Iterable[int]) -> None:
        refs = self._refs
        for page in pages:
            if refs[page] > 1 and page != PADDING_PAGE:
                refs[page] -= 1
                self._shared -= refs[page] == 1

    # the rest of the interface

    def evict(self, num_tokens: int) -> list[int]:
        """Drop cached content from the head side until `num_tokens` tokens fit into free pages. Places stay.

        vLLM never needs this (taking a page evicts it); it is here for policies that make room ahead of need.
        """
        target = -(-num_tokens // self.page_size)
        if self._pins:
            self._hold_pins([])
        missing = min(target - (len(self._queue) - self._evictable), self._evictable)
        if missing <= 0:
            return []
        victims: list[int] = []
        for page in self._queue:
            if len(victims) >= missing:
                break
            if self._index.keys[page] is not None:
                victims.append(page)
        self._index.drop(victims)
        self._evictable -= len(victims)
        if victims and self.events.enabled:
            self.events.add(EventKind.EVICT, None, victims, "demand")
        return victims

    def page_ids(self, seq: Sequence) -> array[int]:
        """Pages of a live sequence, int32 [pages], a copy; 0 where a page left the window. ValueError if not live."""
        row = self._rows.get(seq.request_id)
        if row is None or row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live")
        return row.pages[:]

    def capacity(self) -> Capacity:
        """Counts by state, O(1). A pin that was not reserved for yet still counts as evictable."""
        queued = len(self._queue)
        return Capacity(
            num_pages=self.num_pages,
            page_size=self.page_size,
            free=queued - self._evictable,
            evictable=self._evictable,
            in_use=self.num_pages - queued,
            shared=self._shared,
            duplicates=self._index.duplicates,
            wasted_slots=self._wasted,
        )

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages, O(1)."""
        return len(self._queue) - self._evictable, self._evictable

    def reset(self) -> bool:
        """Forget all cached content; the queue keeps its order. False while a sequence is live or pinned."""
        if self._rows or self._pins:
            return False
        dropped = self._index.clear()
        self._evictable = 0
        if dropped and self.events.enabled:
            self.events.add(EventKind.EVICT, None, dropped, "reset")
        return True

    def check(self) -> None:
        """Recompute refs, states, counters and keys from rows, queue and texts. AllocatorError with a dump."""
        from kvarena.allocators.block_check import problems

        found = problems(self)
        if found:
            raise AllocatorError("; ".join(found) + "\n" + repr(self))

    def __repr__(self) -> str:
        from kvarena.allocators.block_check import describe

        return describe(self)

    def __rich__(self) -> Any:
        from rich.panel import Panel

        head, _, body = repr(self).partition("\n")
        return Panel(body, title=head, title_align="left", expand=False)


def _still_true(chain: PageChain, seq: Sequence) -> bool:
    return chain.fits(seq.token_ids, seq.namespace, seq.extra_keys)
