"""SGLang-shaped allocator: free slots, one row a request, and a radix tree that owns what is cached.

The unit is the page (`page_size` tokens; at 1 a page is a slot). A page is free, or in the tree, or the private tail
of one live request. Only unlocked leaves of the tree go when room is needed; freed pages come back in the order that
`free_slots` states. One request:

    row.page_ids   [ matched | rebound to the tree's | new to the tree | private tail ]
                   0         hit                                       protected       reserved

    pin       match, lock: [0, hit) belongs to the tree           reserve   append a private tail
    commit    checkpoint the prefill: whole pages move left of `protected`; equal pages are given up for the tree's
    release   FINISH checkpoints once more, generated tokens included; then the tail is freed and the lock dropped

Conservation law: free + evictable + in_use = num_pages; a page is in the tree once, or in one tail, or free.
Rules: SGLang 0.5.22.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from typing import ClassVar

from kvarena.allocators import token_fork, token_publish
from kvarena.allocators._arguments import check_reason, refuse_twice, whole
from kvarena.allocators.config import Design
from kvarena.allocators.free_slots import FreePages
from kvarena.allocators.interface import (
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
from kvarena.allocators.token_batch import TokenDecodeBatch
from kvarena.allocators.token_check import describe, verify
from kvarena.allocators.token_keys import TokenKeys
from kvarena.allocators.token_row import Plan, Row, demand, join_own, merge_bound, shared_pages
from kvarena.prefix.eviction import order
from kvarena.prefix.radix_tree import RadixTree

FINISH = Release.FINISH  # an enum's member costs more than the comparison with it
MAX_ROWS = 4096  # rows of req_to_token, hence live requests (SGLang's own ceiling for its default)


class TokenAllocator(KVAllocator):
    """SGLang 0.5.22's rules over pages of `design.page_size` tokens.

    num_rows: rows of req_to_token. A pin is refused when none is left.
    """

    kind: ClassVar[str] = "token"

    def __init__(self, num_pages: int, design: Design, *, num_rows: int = MAX_ROWS) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, found {num_pages}")
        self.num_pages = num_pages
        self.page_size = design.page_size
        self.design = design
        self.events = EventLog()
        self.num_rows = num_rows
        self.tree = RadixTree(
            order(design.eviction_order),
            eviction_unit=design.eviction_unit,
            split_touches_suffix=design.split_touches_suffix,
        )
        self._free = FreePages(num_pages, fifo=self.page_size == 1, need_sort=design.need_sort)
        self._rows: dict[str, Row] = {}
        self._free_rows = list(range(1, num_rows + 1))
        self._keys = TokenKeys(self.page_size)
        self._gate = design.gate
        self._prefix_cache = design.prefix_cache
        self._left_tokens = int(design.last_token_rule)
        self._slack = design.demand_slack if self.page_size > 1 else 0
        self._give_back = self._free.free_each if design.eviction_unit == "page" else self._free.free

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """Match, test the room with the match held, lock it and take a row.

        A refusal leaves the split and the touch of the match behind (SGLang 0.5.22: a refused request is matched
        again on every later pass). Cost: a dict look-up and a bytes compare for each node of the path.
        """
        if seq.request_id in self._rows:
            raise ValueError(f"request {seq.request_id!r} is live already")
        if not self._free_rows:
            self._refuse(seq, "no free row")
            return None
        text, width, namespace = self._text(seq, seq.num_prefill_tokens)
        whole_pages = self._keys.num_pages(seq, seq.num_prefill_tokens - self._left_tokens)
        tree = self.tree
        node, page_ids = tree.match(text, width, namespace, whole_pages)
        tree.lock(node)
        if not self._fits(seq, len(page_ids), gate or self._gate):
            tree.unlock(node)
            self._refuse(seq, "no room")
            return None
        self._rows[seq.request_id] = Row(seq, self._free_rows.pop(), node, page_ids, width, text)
        seq.num_computed_tokens = hit_tokens = len(page_ids) * self.page_size
        if self.events.enabled and page_ids:
            self.events.add(EventKind.HIT, seq.request_id, page_ids)
        return Pin(seq, hit_tokens, page_ids[:])

    def match(self, seq: Sequence) -> Match:
        """How much of all known tokens is cached now; splits and touches like `pin`, holds nothing."""
        text, width, namespace = self._text(seq, seq.num_tokens)
        node, page_ids = self.tree.match(text, width, namespace, len(text) // width)
        path: list[int] = []
        at = node
        while at.parent is not None:
            path.append(at.created)
            at = at.parent
        self.tree.lock(node)
        self.tree.unlock(node)  # drops a root that the look-up made
        return Match(len(page_ids) * self.page_size, tuple(reversed(path)))

    def room(self) -> tuple[int, int]:
        """(free, evictable) pages. O(1)."""
        return self._free.count, self.tree.evictable_pages

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """Private pages for positions [0, num_computed_tokens + n) of each sequence.

        Evicts what the summed demand lacks, then takes pages from the front, sequence after sequence (SGLang 0.5.22:
        the demand overshoots by a page a request at page_size > 1). An eviction that ran stays when the call is
        refused all the same.
        """
        plan, total = self._plan(wants)
        evicted = self._make_room(plan, total)
        if total > self._free.count:
            self._refuse_all(plan)
            return None
        taken, start = self._free.take(total), 0
        reservations = []
        for row, _, new in plan:
            page_ids = taken[start : start + new] if new < total else taken
            start += new
            row.page_ids += page_ids
            row.admitted = True
            reservations.append(Reservation(row.seq, page_ids, (), evicted))
            evicted = ()
            if self.events.enabled and page_ids:
                self.events.add(EventKind.RESERVE, row.seq.request_id, page_ids)
        return reservations

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        """The KV of the first n tokens of each sequence is written.

        A prefill's whole pages enter the tree (SGLang 0.5.22: checkpoint): behind an inner chunk duplicates are
        freed at once, behind the prefill's end with all others of the call. Generated tokens wait for the end.
        """
        plan = []
        for seq, n in done:
            row = self._touched_row(seq)
            if type(n) is not int:
                n = whole(n, f"request {seq.request_id!r}: tokens to commit")
            slots = len(row.page_ids) * self.page_size
            if not 0 <= n <= slots:
                raise ValueError(f"request {seq.request_id!r}: cannot commit {n} tokens, {slots} slots are reserved")
            plan.append((row, n))
        group: list[array[int]] = []
        commits = []
        for row, n in plan:
            commits.append(token_publish.commit(self, row, n, group))  # a comprehension costs a call here
        if group:
            self._free.free(join_own(group))
        return commits

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        """Drop locks and rows; free what the tree does not own.

        FINISH first publishes the whole pages of what is computed, and frees duplicates, then tail, as one group.
        PREEMPT and ABORT publish nothing, and each sequence's tail is freed by itself (SGLang 0.5.22: a retraction
        drops generated KV; what earlier checkpoints published stays cached).
        """
        if type(reason) is not Release:
            check_reason(reason)
        rows, finished = list(map(self._touched_row, seqs)), reason is FINISH
        if len(rows) > 1:
            self._check_group(rows, finished)
        freed: list[array[int]] = []
        cached: list[array[int]] = []
        duplicates: list[array[int]] = []
        for row in rows:
            runs = token_publish.finish(self, row) if finished and row.admitted else None
            given = row.page_ids[row.protected :]
            if runs:
                duplicates += runs
                given = join_own([*runs, given])
            if not finished:
                self._free.free(given)
            freed.append(given)
            cached.append(self._drop(row))
            if self.events.enabled:
                self.events.add(EventKind.RELEASE, row.seq.request_id, given, reason.value)
        group = join_own(freed)
        if finished and group:
            self._free.free(group)
        return Released(group, join_own(cached), (), join_own(duplicates) if duplicates else ())

    def evict(self, num_tokens: int) -> list[int]:
        """Evict leaves until `num_tokens` tokens are free or none can go; nothing while that many are free."""
        short = -(-whole(num_tokens, "num_tokens") // self.page_size) - self._free.count
        return list(self._evict(short, None)) if short > 0 else []

    def page_ids(self, seq: Sequence) -> array[int]:
        """Pages of a live sequence, a copy."""
        return self._row(seq).page_ids[:]

    def row_index(self, seq: Sequence) -> int:
        """Row of a live sequence in req_to_token, from 1 (0 is padding)."""
        return self._row(seq).index

    def capacity(self) -> Capacity:
        """Pages by state. O(live sequences x tree nodes on their paths)."""
        self._write_rows()
        free, evictable = self._free.count, self.tree.evictable_pages
        rows = self._rows.values()
        slots = sum(len(row.page_ids) * self.page_size - row.seq.num_computed_tokens for row in rows)
        return Capacity(
            num_pages=self.num_pages,
            page_size=self.page_size,
            free=free,
            evictable=evictable,
            in_use=self.num_pages - free - evictable,
            shared=shared_pages(rows),
            free_rows=len(self._free_rows),
            wasted_slots=slots,
        )

    def reset(self) -> bool:
        """Forget all cached content; ids are handed out ascending again. False while sequences are live."""
        if self._rows:
            return False
        self.tree.clear()
        self._free.clear()
        self._keys.forget()
        self._free_rows = list(range(1, self.num_rows + 1))
        return True

    def check(self) -> None:
        """Recompute every derived field; AllocatorError with a full dump. O(pages + nodes)."""
        self._write_rows()
        verify(self)

    def __repr__(self) -> str:
        self._write_rows()
        return describe(self)

    # --- decode batches ---

    def decode_batch(self, seqs: Iterable[Sequence]) -> TokenDecodeBatch:
        """These sequences as a batch that gains one token each in one call."""
        return TokenDecodeBatch(self, seqs)

    def bind(self, seq: Sequence, batch: TokenDecodeBatch) -> Row:
        """The row of a live sequence, for a batch that wants to hear when another verb touches it."""
        row = self._touched_row(seq)
        row.batch = batch
        return row

    def take_for_decode(self, seqs: list[Sequence], total: int) -> tuple[array[int], PageIds] | None:
        """`total` pages for one more token of each of `seqs`, and what was evicted for it; None: no room."""
        short = max(total, self._slack * len(seqs)) - self._free.count
        evicted = self._evict(short, seqs[0].request_id) if short > 0 else ()
        if total <= self._free.count:
            if self._free.need_sort and self.page_size > 1 and len(seqs) > self._free.num_ready:
                self._free.merge()
            return self._free.take(total), evicted
        for seq in seqs:
            self._refuse(seq, "no room")
        return None

    # --- fork ---

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
        """Checkpoint the parent's computed whole pages; the child locks that node and gets a copy of the tail."""
        return token_fork.fork(self, parent, child, num_tokens)

    def prepare_write(self, seq: Sequence, start: int, end: int) -> list[PageCopy]:
        """No copies: a page outside of the tree has one owner, and pages in it are full."""
        return token_fork.prepare_write(self, seq, start, end)

    # --- admission ---

    def _row(self, seq: Sequence) -> Row:
        row = self._rows.get(seq.request_id)
        if row is None or row.seq is not seq:
            raise ValueError(f"request {seq.request_id!r} is not live here")
        if row.batch is not None:
            row.batch.write_rows()
        return row

    def _text(self, seq: Sequence, num_tokens: int) -> tuple[bytes, int, Hashable]:
        """What the tree compares of the first `num_tokens` tokens: key bytes, bytes a page, namespace."""
        text = self._keys.prefix(seq, num_tokens) if self._prefix_cache else b""
        namespace, width = self._keys.space(seq)
        return text, width, namespace

    def _check_group(self, rows: list[Row], finished: bool) -> None:
        """Raise what a release of several sequences has to refuse before it gives the first of them back."""
        refuse_twice(row.seq for row in rows)
        if finished:
            for row in rows:
                token_publish.nameable(self, row)

    def _touched_row(self, seq: Sequence) -> Row:
        row = self._rows.get(seq.request_id)
        if row is None or row.seq is not seq:
            return self._row(seq)  # raises
        if row.batch is not None:
            row.batch.write_rows()
            row.batch.stale = True
            row.batch = None
        return row

    def _write_rows(self) -> None:
        """All rows as they would be without batches."""
        for batch in {row.batch for row in self._rows.values() if row.batch is not None}:
            batch.write_rows()

    def _fits(self, seq: Sequence, hit_pages: int, gate: Gate) -> bool:
        """Whether `seq` fits behind its hit, with the hit held."""
        room = self._free.count + self.tree.evictable_pages
        need = gate.headroom
        if gate.whole_prompt:
            tokens = seq.num_prefill_tokens - hit_pages * self.page_size
            need += -(-tokens // self.page_size) if gate.page_rounded else tokens
        if not gate.page_rounded:
            room *= self.page_size
        return need < room if gate.strict else need <= room

    def _refuse(self, seq: Sequence, reason: str) -> None:
        if self.events.enabled:
            self.events.add(EventKind.REFUSE, seq.request_id, (), reason)

    def _drop(self, row: Row) -> array[int]:
        """Unlock and give the row back; returns the pages of the tree that nobody holds any more, in order."""
        del self._rows[row.seq.request_id]
        self._free_rows.append(row.index)
        row.seq.num_computed_tokens = 0
        return row.page_ids[row.protected - self.tree.unlock(row.node) : row.protected]

    # --- room ---

    def _plan(self, wants: Iterable[tuple[Sequence, int]]) -> tuple[Plan, int]:
        """Row, tokens and new pages of each want, and the new pages of all."""
        size = self.page_size
        plan, total = [], 0
        for seq, n in wants:
            row = self._touched_row(seq)
            if type(n) is not int or n < 0:
                n = whole(n, f"request {seq.request_id!r}: tokens to reserve")
            new = (seq.num_computed_tokens + n + size - 1) // size - len(row.page_ids)
            if new < 0:
                new = 0
            plan.append((row, n, new))
            total += new
        if len(plan) > 1 and len({row for row, _, _ in plan}) < len(plan):
            refuse_twice(row.seq for row, _, _ in plan)
        return plan, total

    def _make_room(self, plan: Plan, total: int) -> PageIds:
        """Evict what the call's demand lacks; returns the pages that went. Then merge what waits, if it is time."""
        size, free = self.page_size, self._free
        short = (demand(plan, size, self._slack) if self._slack else total) - free.count
        evicted = self._evict(short, plan[0][0].seq.request_id) if short > 0 else ()
        if free.need_sort and size > 1 and merge_bound(plan, size, total <= free.count) > free.num_ready:
            free.merge()
        return evicted

    def _evict(self, num_pages: int, request_id: str | None) -> PageIds:
        runs = self.tree.evict(num_pages)
        for run in runs:
            self._give_back(run)
        evicted = join_own(runs)
        if self.events.enabled and evicted:
            self.events.add(EventKind.EVICT, request_id, evicted, "capacity")
        return evicted

    def _refuse_all(self, plan: Plan) -> None:
        """No room for the call: whoever was pinned for it and never admitted lets go."""
        for row, _, _ in plan:
            self._refuse(row.seq, "no room")
            if not row.admitted:
                self._drop(row)
