"""One allocator for every design: each rule in which the two upstreams differ is a field of `Design`.

At block's values it decides as `block.py` does, at token's values as `token.py`, page ids included; between them lie
the designs of the attribution ladder. It is written to be read and switched, not to be fast: `make_allocator` takes
it only where the fast form of a kind does not honour a field.

    pin       look up, test the room            `general_publish`: what is found, split, touched
    reserve   make room, take pages             `general_rules`: how much; `general_pool`: which
    commit    tokens are written                `general_rules`: what is offered to the cache
    release   give back                         `general_rules`: what stays

With `hash_unit`, a hit may end inside a page. That page is held beside the row, and the first `reserve` takes a page
of the row's own and says so in `Reservation.moves`: copy before anything is written (vLLM 0.32.0, hybrid models).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, ClassVar

from kvarena.allocators import general_rules as rules
from kvarena.allocators._arguments import check_reason, refuse_twice, whole
from kvarena.allocators.config import Design
from kvarena.allocators.general_check import describe, faults
from kvarena.allocators.general_keys import make_keys
from kvarena.allocators.general_pool import PagePool
from kvarena.allocators.general_publish import Published, Publisher
from kvarena.allocators.general_row import Plan, Row, numbers
from kvarena.allocators.general_text import Page
from kvarena.allocators.interface import (
    AllocatorError,
    Capacity,
    Commit,
    EventKind,
    EventLog,
    Gate,
    KVAllocator,
    Match,
    PageMove,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
)

MAX_ROWS = 4096  # rows of req_to_token (index = tree), as in `token`


class GeneralAllocator(KVAllocator):
    """Any design over pages 1..num_pages; costs are a few operations a page that a verb names.

    Conservation law: free + evictable + in_use = num_pages. A page is free, or cached and held by nobody, or held by
    as many rows as its locks say.
    """

    kind: ClassVar[str] = "general"

    def __init__(self, num_pages: int, design: Design, *, num_rows: int = MAX_ROWS) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, found {num_pages}")
        self.kind = design.kind  # type: ignore[misc]  # schedulers ask by which upstream's protocol to drive it
        self.design = design
        self.num_pages = num_pages
        self.page_size = design.page_size
        self.num_rows = num_rows
        self.events = EventLog()
        self.pool = PagePool(num_pages, design)
        self.keys = make_keys(design)
        self._publisher = Publisher(design, self.pool, self.keys)
        self._tree = design.index == "tree"
        self._rows: dict[str, Row] = {}  # pinned or admitted
        self._free_rows = list(range(1, num_rows + 1)) if self._tree else []

    # --- pin ---

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """Look up the prefix and test the room. A tree holds what it found at once, a queue at the next `reserve`.

        None: no room, or no row; what the look-up touched or split (recency, split_touches_suffix) stays so.
        """
        if seq.request_id in self._rows:
            raise ValueError(f"request {seq.request_id!r} is already live")
        if self._tree and not self._free_rows:
            self._refuse(seq, "no free row")
            return None
        gate = gate or self.design.gate
        row = self._publisher.look_up(seq, seq.num_prefill_tokens - self.design.last_token_rule)
        row.text.users += 1
        if self._tree:
            self._hold(row)
        if rules.tests_at_pin(self.design, gate) and not self._passes(row, gate):
            self._refuse(seq, "gate")
            self._forget(row)
            return None
        if self._tree:
            row.index = self._free_rows.pop()
        elif gate.page_rounded:
            row.headroom = gate.headroom
        self._rows[seq.request_id] = row
        seq.num_computed_tokens = row.hit_tokens
        return Pin(seq, row.hit_tokens, numbers(row.named))

    def match(self, seq: Sequence) -> Match:
        """How much of all known tokens is cached; touches and splits as `pin` does, holds nothing."""
        row = self._publisher.look_up(seq, seq.num_tokens)
        self.pool.tidy(row.text)  # a root that the look-up made
        path = [page.created for page in row.named] if self._tree else [page.number for page in row.named]
        return Match(row.hit_tokens, tuple(path))

    def _passes(self, row: Row, gate: Gate) -> bool:
        need, room = rules.gate_need(self.design, row, gate), self.pool.room - self._num_idle([row])
        if not gate.page_rounded:
            room *= self.page_size
        return need < room if gate.strict else need <= room

    def _num_idle(self, rows: Iterable[Row]) -> int:
        """Different pages that these rows, where not held yet, name and nobody holds."""
        idle = {page.number for row in rows if not row.held for page in row.named if not page.locks}
        return len(idle)

    def _hold(self, row: Row) -> None:
        row.held = True
        self.pool.hold(row.named)
        if row.adopted or row.source:
            self._note(EventKind.HIT, row.seq, numbers(row.named))

    def _hold_pins(self) -> None:
        """Hold every page that a pin names before any page is taken or loses its content."""
        for row in self._rows.values():
            if not row.held:
                self._hold(row)

    # --- reserve ---

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """Slots for each sequence in order, all or nothing.

        refused_evicts: room was made as far as it went before the call is refused (SGLang 0.5.22), or nothing changes
        (vLLM 0.32.0).
        """
        plans = [self._plan(seq, n) for seq, n in wants]
        refuse_twice(plan.row.seq for plan in plans)
        fits = rules.serves_all(plans, self.pool.room - self._num_idle(self._rows.values()))
        evicted: list[int] = []
        if plans and rules.evicts_ahead(self.design) and (fits or self.design.refused_evicts):
            evicted = self._evict(rules.demand(self.design, plans) - self.pool.num_free, plans[0].row.seq)
        if not fits:
            self._refuse_all(plans)
            return None
        if any(rules.does_something(self.design, plan) for plan in plans):
            self._hold_pins()
        for plan in plans:
            plan.row.admitted = True
        answers = []
        for plan in plans:
            answers.append(self._serve(plan, evicted))
            evicted = []
        return answers

    def _plan(self, seq: Sequence, n: int) -> Plan:
        row = self._row(seq)
        n = whole(n, f"request {seq.request_id!r}: tokens to reserve")
        end = seq.num_computed_tokens + n
        if not n and not self._tree and (row.admitted or not end):
            raise ValueError(f"request {seq.request_id!r}: expected n >= 1 tokens, found {n}")
        return Plan(row, n, end, max(-(-end // self.page_size) - len(row.pages), 0))

    def _serve(self, plan: Plan, ahead: list[int]) -> Reservation:
        row, seq = plan.row, plan.row.seq
        taken, evicted = self.pool.take(plan.take)
        row.pages += taken
        if evicted:
            self._note(EventKind.EVICT, seq, evicted, "capacity")
        if taken:
            self._note(EventKind.RESERVE, seq, numbers(taken))
        moves: tuple[PageMove, ...] = ()
        if row.source is not None and taken and len(row.pages) - len(taken) == row.adopted:
            moves = (PageMove(row.source.number, taken[0].number),)
            self._note(EventKind.COPY, seq, (moves[0].src, moves[0].dst))
        done = self._publish(row, rules.publish_at_reserve(self.design, row, plan.end))
        for run in done.freed:
            self.pool.put_back(run)
        freed = numbers(page for run in done.freed for page in run)
        stood = len(row.pages) - len(taken)  # entries behind are new, which `page_ids` tells
        low, high = done.rewritten[0], min(done.rewritten[1], stood)
        evicted = [*ahead, *evicted]
        rewritten = (low, high) if low < high else (0, 0)
        new, duplicates = numbers(row.pages[stood:]), numbers(done.duplicates)
        return Reservation(seq, new, moves, tuple(evicted), freed, duplicates, rewritten)

    def _refuse_all(self, plans: list[Plan]) -> None:
        for plan in plans:
            self._refuse(plan.row.seq, "no room")
            if not plan.row.admitted:
                self._drop(plan.row)

    def _evict(self, count: int, seq: Sequence | None, reason: str = "capacity") -> list[int]:
        if count <= 0:
            return []
        self._hold_pins()
        evicted = self.pool.evict(count)
        if evicted:
            self._note(EventKind.EVICT, seq, evicted, reason)
        return evicted

    # --- commit ---

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        """The first n tokens of each are written; offers to the cache what the design offers now.

        Own pages given up for equal ones come free together behind the prefill's end, at once behind an inner chunk.
        """
        plan = [(self._committed(seq, n), whole(n, "n")) for seq, n in done]
        group: list[Page] = []
        commits = [self._commit(row, n, group) for row, n in plan]
        self.pool.put_back(group)
        return commits

    def _committed(self, seq: Sequence, n: int) -> Row:
        row = self._row(seq)
        n = whole(n, f"request {seq.request_id!r}: tokens to commit")
        slots = len(row.pages) * self.page_size
        if not row.admitted or n > slots:
            raise ValueError(f"request {seq.request_id!r}: commits {n} tokens, has slots for {slots}; reserve before")
        return row

    def _commit(self, row: Row, n: int, group: list[Page]) -> Commit:
        seq = row.seq
        late = n <= seq.num_computed_tokens
        seq.num_computed_tokens = max(seq.num_computed_tokens, n)
        row.committed = max(row.committed, n)
        self._let_source_go(row)
        tokens = rules.publish_at_commit(self.design, row, n, late)
        row.prefilled = row.prefilled or n >= seq.num_prefill_tokens
        done = self._publish(row, tokens)
        if self.design.prefix_cache:
            self._publisher.offer_tail(row)
        for run in done.freed:
            if row.prefilled:
                group += run
            else:
                self.pool.put_back(run)
        freed = numbers(page for run in done.freed for page in run)
        return Commit(seq, numbers(done.pages), (), freed, numbers(done.duplicates), done.rewritten)

    def _let_source_go(self, row: Row) -> None:
        """The copy has been carried out: whoever wrote these tokens had it."""
        if row.source is not None:
            source, row.source = row.source, None
            self.pool.put_back(self.pool.let_go((source,))[0])

    def _publish(self, row: Row, num_tokens: int | None) -> Published:
        if num_tokens is None:
            return Published()
        done = self._publisher.publish(row, num_tokens)
        if done.pages:
            self._note(EventKind.PUBLISH, row.seq, numbers(done.pages))
        if done.duplicates:
            self._note(EventKind.DUPLICATE, row.seq, numbers(done.duplicates))
        return done

    # --- release ---

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        """Give back what each sequence holds, its last page first or its first (reversed_release)."""
        check_reason(reason)
        rows = [self._row(seq) for seq in seqs]
        refuse_twice(row.seq for row in rows)
        out, group = Released(array("i"), array("i"), array("i"), array("i")), list[Page]()
        for row in rows:
            self._release(row, reason, out, group)
        self.pool.put_back(group)
        return out

    def _release(self, row: Row, reason: Release, out: Any, group: list[Page]) -> None:
        start = rules.withdrawn_from(self.design, row, reason)
        if start is not None and row.held:
            out.evicted += array("i", self._withdraw(row, start, reason))
        done = self._publish_rest(row, reason)
        out.duplicates += numbers(done.duplicates)
        given = [page for run in done.freed for page in run]
        if row.held:
            pages = self._leaving(row)
            self._note(EventKind.RELEASE, row.seq, numbers(pages), reason.value)
            freed, cached = self.pool.let_go(pages, used=row.admitted or not self._tree)
            given += freed
            out.cached += numbers(cached)
            row.held = False
        out.freed += numbers(given)
        if self._tree and reason is Release.FINISH:
            group += given  # SGLang 0.5.22: what finishes in one step comes free as one group
        else:
            self.pool.put_back(given)
        self._drop(row)

    def _leaving(self, row: Row) -> list[Page]:
        return row.named[::-1] if self.design.reversed_release else row.named

    def _publish_rest(self, row: Row, reason: Release) -> Published:
        tokens = rules.publish_at_release(self.design, row, reason)
        if tokens is not None and tokens > row.seq.num_prefill_tokens:
            self.keys.check(row.seq, row.seq.num_prefill_tokens)
        if tokens is None and row.admitted and reason is Release.FINISH and self.design.recency == "access":
            self.pool.touch(row.pages[: row.published])
        return self._publish(row, tokens)

    def _withdraw(self, row: Row, start: int, reason: Release) -> list[int]:
        if start < row.published:
            self._hold_pins()  # one may name these pages
        dropped = self._publisher.withdraw(row, start, spares_shared=reason is Release.PREEMPT)
        if dropped:
            self._note(EventKind.EVICT, row.seq, dropped, reason.value)
        return dropped

    def _drop(self, row: Row) -> None:
        """Forget a row and what it holds, if anything."""
        del self._rows[row.seq.request_id]
        if row.index:
            self._free_rows.append(row.index)
        self._forget(row)

    def _forget(self, row: Row) -> None:
        if row.held:
            # In a queue who was held and comes to nothing goes to the tail all the same (vLLM 0.32.0).
            self.pool.put_back(self.pool.let_go(self._leaving(row), used=not self._tree)[0])
        row.seq.num_computed_tokens = 0
        row.text.users -= 1
        self.pool.tidy(row.text)

    # --- the rest of the interface ---

    def evict(self, num_tokens: int) -> list[int]:
        """Drop cached content until `num_tokens` tokens fit into free pages, or none is left."""
        needed = -(-whole(num_tokens, "num_tokens") // self.page_size)
        self._hold_pins()  # whether or not anything goes, as the fast form of block does
        return self._evict(needed - self.pool.num_free, None, "demand")

    def page_ids(self, seq: Sequence) -> array[int]:
        """Pages of a live sequence, a copy."""
        return numbers(self._row(seq).pages)

    def capacity(self) -> Capacity:
        """Pages by state; O(live sequences)."""
        pool = self.pool
        wasted = sum(len(row.pages) * self.page_size - row.committed for row in self._rows.values() if row.admitted)
        return Capacity(
            num_pages=self.num_pages,
            page_size=self.page_size,
            free=pool.num_free,
            evictable=pool.evictable,
            in_use=self.num_pages - pool.room,
            shared=pool.shared,
            duplicates=pool.duplicates,
            free_rows=len(self._free_rows) if self._tree else -1,
            wasted_slots=wasted,
        )

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages, O(1)."""
        return self.pool.num_free, self.pool.evictable

    def reset(self) -> bool:
        """Forget all cached content. A tree's ids are handed out ascending again, a queue keeps its order."""
        if self._rows:
            return False
        dropped = self.pool.clear()
        if self._tree:
            self._free_rows = list(range(1, self.num_rows + 1))
        elif dropped:
            self._note(EventKind.EVICT, None, sorted(dropped), "reset")
        self.keys.forget()
        return True

    def check(self) -> None:
        """Recompute every derived field from rows and texts; AllocatorError with the fault and a dump."""
        for fault in faults(self):
            raise AllocatorError(f"{fault}\n{describe(self)}")

    def __repr__(self) -> str:
        return describe(self)

    # --- helpers ---

    def _row(self, seq: Sequence) -> Row:
        row = self._rows.get(seq.request_id)
        if row is None or row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live here")
        return row

    def _refuse(self, seq: Sequence, reason: str) -> None:
        self._note(EventKind.REFUSE, seq, (), reason)

    def _note(self, kind: EventKind, seq: Sequence | None, pages: Iterable[int], reason: str = "") -> None:
        if self.events.enabled:
            self.events.add(kind, None if seq is None else seq.request_id, pages, reason)
