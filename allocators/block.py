"""The block design, by the rules of vLLM 0.32.0: pages with a ref count, and one free queue that is also the LRU.

A request owns a row of pages; any number of requests may hold the same full page. Full pages are published, by the
content of everything up to their end, when their slots are reserved. A page that nobody holds goes back to the
queue: to its head when it holds nothing, to its tail when it still serves hits. New pages are taken from the head,
and taking a cached page is its eviction. On shortage nothing is done: the answer is None.

    pin      row = [hit hit hit]                      looked up; nothing is touched, so a refusal leaves no trace
    reserve  row = [hit hit hit | new new new]        hits touched, then pages from the head; full ones published
    commit                                            tokens are written: only counters move
    release  row reversed: without content -> head of the queue, cached -> tail

The verbs are here. The pages are kept in one of two forms that decide alike: `block_hashed` page by page, for every
setting, and `block_runs` by the run, many times cheaper, where no window cuts rows into pieces.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from kvarena.allocators import block_fork, block_publish, block_room
from kvarena.allocators._arguments import check_reason, refuse_twice, whole
from kvarena.allocators.block_batch import BlockDecodeBatch
from kvarena.allocators.block_check import describe, problems
from kvarena.allocators.block_hashed import HashedPages
from kvarena.allocators.block_rows import PageStore, Plan, Row
from kvarena.allocators.block_runs import PageRuns
from kvarena.allocators.config import Design
from kvarena.allocators.interface import (
    AllocatorError,
    Capacity,
    Commit,
    EventKind,
    EventLog,
    Fork,
    Gate,
    KVAllocator,
    Match,
    PageCopy,
    PageIds,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
)
from kvarena.allocators.window import SlidingWindow
from kvarena.prefix.page_text import HashFn

NO_ANSWER: Any = None  # stands in a batch's answers until the sequence is served
NO_PAGES = array("i")
ABORT = Release.ABORT  # an enum's member costs more than the comparison with it


class BlockAllocator(KVAllocator):
    """Ref-counted pages over a free queue; see the module's head.

    Conservation law: free + evictable + in_use = num_pages. A page stands in the queue exactly when no row holds it;
    its ref count is the number of rows that name it; it is evictable when it stands in the queue and serves hits.
    Page 0 is padding: it is in none of these states.
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
        self._window = None if design.sliding_window is None else SlidingWindow(design)
        if self._window is None and design.retention_interval:
            raise ValueError(f"retention_interval {design.retention_interval}: only a sliding window has one")
        self._store = _make_store(num_pages, design, self._window, hash_fn)
        self._rows: dict[str, Row] = {}
        self._pins: dict[str, Row] = {}  # looked up, not yet reserved for
        self._open: dict[str, int] = {}  # position of the page in which a live request was forked
        self._wasted = 0

    # pin

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """Look up the prefix and test the room; changes nothing else.

        The held pages are touched by the first `reserve`. If another sequence reserves before that, they are touched
        then, so a pin is never lost. None: no room under the gate.
        """
        if seq.request_id in self._rows or seq.request_id in self._pins:
            raise ValueError(f"request {seq.request_id!r} is already live")
        # vLLM 0.32.0: at least the last token is computed, so a fully cached prompt gives its last page up.
        row = self._store.lookup(seq, (seq.num_prefill_tokens - self.design.last_token_rule) // self.page_size)
        gate = gate or self.design.gate
        if gate.whole_prompt and not block_room.fits(self, row, gate):
            return None
        row.headroom = gate.headroom if gate.page_rounded else 0
        self._pins[seq.request_id] = row
        seq.num_computed_tokens = row.committed
        return Pin(seq, row.committed, array("i", row.pages))

    def match(self, seq: Sequence) -> Match:
        """How much of the sequence is cached, its last token included. Changes nothing."""
        pages = self._store.find(seq, seq.num_tokens // self.page_size)
        return Match(len(pages) * self.page_size, tuple(pages))

    # reserve

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """Slots for each sequence in order, as one-by-one calls would give them, but all or nothing.

        On a refusal nothing is taken; pages that left a window are freed all the same (vLLM 0.32.0).
        """
        rows = self._rows
        asked = wants if type(wants) is list else list(wants)
        if len(asked) > 1 and len({seq for seq, _ in asked}) < len(asked):
            refuse_twice(seq for seq, _ in asked)
        answers: list[Reservation] = []
        work: list[Plan] = []
        for seq, n in asked:
            row = rows.get(seq.request_id)
            if row is not None and row.seq is seq and type(n) is int and 0 < n <= row.settled - seq.num_computed_tokens:
                answers.append(row.no_change or row.nothing_new())
                continue
            work.append(self._plan(seq, n, len(answers)))
            answers.append(NO_ANSWER)
        return self._serve_all(work, answers) if work else answers

    def _serve_all(self, work: list[Plan], answers: list[Reservation]) -> list[Reservation] | None:
        served = block_room.num_served(self, work)
        if served < len(work):
            self._refuse(work, served)
            return None
        if self._pins:
            self._hold_pins(work)
        for plan in work:
            answers[plan.place] = self._serve(plan)
        return answers

    def _plan(self, seq: Sequence, n: int, place: int) -> Plan:
        """What has to be done for n more tokens."""
        row = self._rows.get(seq.request_id) or self._pins.get(seq.request_id)
        if row is None or row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live: pin it before reserving for it")
        if type(n) is not int:
            n = whole(n, f"request {seq.request_id!r}: tokens to reserve")
        end = seq.num_computed_tokens + n
        if n < 1 and (n < 0 or end == 0 or seq.request_id in self._rows):
            raise ValueError(f"request {seq.request_id!r}: expected n >= 1 tokens, found {n}")
        return self._plan_row(row, end, place)

    def _plan_row(self, row: Row, end: int, place: int) -> Plan:
        take = -(-end // self.page_size) - len(row.pages)
        plan = Plan(row, end, take if take > 0 else 0, place)
        if self._window is not None and row.seq.request_id in self._rows:
            plan.low, plan.high = self._window.left_behind(row.committed, row.pages)
        return plan

    def _refuse(self, work: list[Plan], served: int) -> None:
        for plan in work[: served + 1]:
            if plan.low < plan.high:
                self._drop_left_behind(plan)
        if self.events.enabled:
            plan = work[served]
            reason = f"capacity: needs {plan.take} pages, {self._store.queued} free or evictable"
            self.events.add(EventKind.REFUSE, plan.row.seq.request_id, (), reason)
        for plan in work:
            row = plan.row
            if self._pins.pop(row.seq.request_id, None) is not None:
                row.seq.num_computed_tokens = 0
                if row.held:
                    self._store.let_go(row)

    def _hold_pins(self, work: list[Plan]) -> None:
        """Touch every page that a pin names before any page is taken."""
        for row in self._pins.values():
            if not row.held:
                row.held = True
                self._store.touch(row)
        for plan in work:
            row = plan.row
            if self._pins.pop(row.seq.request_id, None) is not None:
                self._rows[row.seq.request_id] = row
                if self.events.enabled and row.adopted:
                    self.events.add(EventKind.HIT, row.seq.request_id, filter(None, row.pages))

    def _serve(self, plan: Plan) -> Reservation:
        row = plan.row
        if self._open:
            row.granted = plan.end
        freed = self._drop_left_behind(plan) if plan.low < plan.high else ()
        taken, evicted = self._take(row, plan.take) if plan.take else (NO_PAGES, ())
        border = (row.published + 1) * self.page_size
        fills_a_page = row.publishes and plan.end >= border and row.seq.num_tokens >= border
        duplicates = block_publish.publish(self, row, plan.end) if fills_a_page else ()
        row.settled = block_publish.settled(self, row)
        if not (taken or duplicates or plan.low < plan.high):
            return row.nothing_new()
        return Reservation(row.seq, taken or array("i"), (), evicted, freed, duplicates, (plan.low, plan.high))

    def _take(self, row: Row, count: int) -> tuple[array[int], PageIds]:
        taken, evicted = self._store.take(row, count)
        self._wasted += count * self.page_size
        if self.events.enabled:
            if evicted:
                self.events.add(EventKind.EVICT, row.seq.request_id, evicted, "capacity")
            self.events.add(EventKind.RESERVE, row.seq.request_id, taken)
        return taken, evicted

    def _drop_left_behind(self, plan: Plan) -> PageIds:
        pages = plan.row.pages[plan.low : plan.high]
        freed = self._store.let_go_part(plan.row, plan.low, plan.high)
        if self.events.enabled:
            self.events.add(EventKind.RELEASE, plan.row.seq.request_id, pages[::-1], "window")
        return freed

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
        if row.batch is not None:
            row.leave_batch()
        if type(n) is not int:
            n = whole(n, f"request {seq.request_id!r}: tokens to commit")
        if not 0 <= n <= len(row.pages) * self.page_size:
            raise ValueError(
                f"request {seq.request_id!r}: commits {n} tokens, has slots for {len(row.pages) * self.page_size}"
            )
        if self._open:
            block_fork.check_written(self, row, n)
            row.granted = n
        duplicates: PageIds = ()
        if n > seq.num_computed_tokens:
            seq.num_computed_tokens = n
        elif row.publishes and n >= (row.published + 1) * self.page_size:
            duplicates = block_publish.publish(self, row, n)
            row.settled = block_publish.settled(self, row)
        if n > row.committed:
            self._wasted -= n - row.committed
            row.committed = n
        return Commit(seq, duplicates=duplicates) if duplicates else row.no_publication or row.nothing_published()

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        """Free each sequence's pages, last page first.

        ABORT also takes back what was published but not committed.
        """
        check_reason(reason)
        leaving = list(seqs)
        if len(leaving) > 1:
            refuse_twice(leaving)
        rows = []
        for seq in leaving:
            row = self._rows.get(seq.request_id)
            rows.append(row if row is not None and row.seq is seq else self._held_row(seq))
        freed: PageIds = ()
        cached: PageIds = ()
        evicted: PageIds = ()
        for row in rows:
            self._remove_row(row)
            if not row.held:
                continue
            if reason is ABORT:
                evicted = _joined(evicted, block_publish.unpublish(self, row))
            without_content, with_content = self._store.let_go(row)
            freed = _joined(freed, without_content) if freed else without_content
            cached = _joined(cached, with_content) if cached else with_content
            if self.events.enabled:
                self.events.add(EventKind.RELEASE, row.seq.request_id, filter(None, row.pages[::-1]), reason.value)
        return Released(freed, cached, evicted)

    def _held_row(self, seq: Sequence) -> Row:
        row = self._rows.get(seq.request_id) or self._pins.get(seq.request_id)
        if row is None:
            raise ValueError(f"request {seq.request_id!r} is not live: it has nothing to release")
        if row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live: another sequence of this id is live")
        return row

    def _remove_row(self, row: Row) -> None:
        seq = row.seq
        if self._rows.pop(seq.request_id, None) is None:
            del self._pins[seq.request_id]
        else:
            self._wasted -= len(row.pages) * self.page_size - row.committed
            if self._open:
                self._open.pop(seq.request_id, None)
            if row.batch is not None:
                row.leave_batch()
        seq.num_computed_tokens = 0

    # decode batches

    def decode_batch(self, seqs: Iterable[Sequence]) -> BlockDecodeBatch:
        """These sequences as a batch that gains one token each in one call."""
        return BlockDecodeBatch(self, seqs)

    def bind(self, seq: Sequence, batch: BlockDecodeBatch) -> Row:
        """The row of a live sequence, for a batch that wants to hear when another verb touches it."""
        row = self._rows.get(seq.request_id)
        if row is None or row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live: reserve before it decodes")
        row.leave_batch()
        row.batch = batch
        return row

    def reserve_decodes(self, rows: list[Row]) -> list[Reservation] | None:
        """`reserve` one token for each of these live rows; `block_decode` knows a shorter way for most steps."""
        work = [self._plan_row(row, row.seq.num_computed_tokens + 1, place) for place, row in enumerate(rows)]
        return self._serve_all(work, [NO_ANSWER] * len(work))

    def count_written(self, num_tokens: int) -> None:
        """That many tokens of live rows were written, one a row."""
        self._wasted -= num_tokens

    @property
    def has_open_pages(self) -> bool:
        """Whether forks share pages that are not full."""
        return bool(self._open)

    # fork

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        """The child holds the parent's pages too; a partial one is copied by whoever writes it first."""
        return block_fork.fork(self, parent, child, num_tokens)

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy] | None:
        """A page of its own in place of a shared partial page in [start, end). None: no room."""
        return block_fork.prepare_write(self, seq, start, end)

    # the rest of the interface

    def evict(self, num_tokens: int) -> list[int]:
        """Drop cached content from the head side until `num_tokens` tokens fit into free pages. Places stay.

        vLLM never needs this (taking a page evicts it); it is here for policies that make room ahead of need.
        """
        needed = whole(num_tokens, "num_tokens")
        if self._pins:
            self._hold_pins([])
        free, evictable = self.room()
        missing = min(-(-needed // self.page_size) - free, evictable)
        if missing <= 0:
            return []
        victims = list(self._store.evict(missing))
        if self.events.enabled:
            self.events.add(EventKind.EVICT, None, victims, "demand")
        return victims

    def page_ids(self, seq: Sequence) -> array[int]:
        """Pages of a live sequence, int32 [pages], a copy; 0 where a page left the window. ValueError if not live."""
        row = self._rows.get(seq.request_id)
        if row is None or row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live")
        return array("i", row.pages)

    def capacity(self) -> Capacity:
        """Counts by state, O(1). A pin that was not reserved for yet still counts as evictable."""
        store = self._store
        return Capacity(
            num_pages=self.num_pages,
            page_size=self.page_size,
            free=store.queued - store.evictable,
            evictable=store.evictable,
            in_use=self.num_pages - store.queued,
            shared=store.shared,
            duplicates=store.duplicates,
            wasted_slots=self._wasted,
        )

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages, O(1)."""
        return self._store.queued - self._store.evictable, self._store.evictable

    def reset(self) -> bool:
        """Forget all cached content; the queue keeps its order. False while a sequence is live or pinned."""
        if self._rows or self._pins:
            return False
        dropped = self._store.clear()
        if dropped and self.events.enabled:
            self.events.add(EventKind.EVICT, None, dropped, "reset")
        return True

    def check(self) -> None:
        """Recompute refs, states, counters and content from rows, queue and texts. AllocatorError with a dump."""
        found = problems(self)
        if found:
            raise AllocatorError("; ".join(found) + "\n" + describe(self))

    def __repr__(self) -> str:
        return describe(self)

    def __rich__(self) -> Any:
        from rich.panel import Panel

        head, _, body = describe(self).partition("\n")
        return Panel(body, title=head, title_align="left", expand=False)


def _make_store(
    num_pages: int, design: Design, window: SlidingWindow | None, hash_fn: HashFn | str | None
) -> PageStore:
    """The form that the design names; `auto` keeps runs unless a window or a chosen hash asks for single pages."""
    by_page = "a sliding window" if window is not None else "a page hash of one's own" if hash_fn is not None else ""
    if design.form == "runs" and by_page:
        raise ValueError(f"form 'runs' keeps no single pages, as {by_page} needs them; use 'hashed' or 'auto'")
    if design.form == "hashed" or by_page or design.hash_fn != "xxh3_64":
        return HashedPages(num_pages, design, window, hash_fn)
    return PageRuns(num_pages, design)


def _joined(left: PageIds, right: PageIds) -> PageIds:
    return array("i", [*left, *right]) if left and right else left or right
