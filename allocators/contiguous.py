"""One reserved run of pages a request, as servers kept the KV cache before paging: the baseline without sharing.

A run is taken whole at admission and given back whole. How long it is, is a guess (`Design.sizing`):

    max       max_model_len tokens for everybody
    pow2      the next power of two of the tokens needed now
    declared  prompt + what the client declared (`Sequence.declared_max_tokens`)
    oracle    the true final length (`Sequence.oracle_tokens`), which no server knows: the bound of the others

never less than the tokens to prefill, never more than max_model_len where that is set. A run that is outgrown gets
the next power of two: where it lies if the pages behind it are free, else it moves to another run, KV copied
(`Reservation.moves`), else the request is refused. On shortage nothing can be evicted: nothing is cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvarena.allocators._arguments import check_reason, refuse_twice, whole
from kvarena.allocators._room import admits, pages_for
from kvarena.allocators._runs import Buddy, FirstFit, FreeRuns, Run
from kvarena.allocators.config import Design
from kvarena.allocators.config import contiguous as contiguous_design
from kvarena.allocators.interface import (
    AllocatorError,
    Capacity,
    Commit,
    EventKind,
    EventLog,
    Gate,
    KVAllocator,
    PageMove,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
)


@dataclass(frozen=True, slots=True)
class Waste:
    """Where a contiguous pool's slots go. Slots are tokens' places; pages x page_size.

    used_slots         slots of live runs that a token has or was promised in this step
    reservation_slots  slots kept for tokens that are to come: up to the true final length where `oracle_tokens`
                       says it, else up to what the sizing promised
    internal_slots     slots of live runs past that: no token will ever use them
    free_pages         pages in no run
    largest_free_run   pages; the longest run that could be handed out
    external_fragmentation  1 - largest_free_run / free_pages; 0 when nothing is free
    refused_by_fragmentation  refusals so far although the free pages were enough
    """

    used_slots: int
    reservation_slots: int
    internal_slots: int
    free_pages: int
    largest_free_run: int
    external_fragmentation: float
    refused_by_fragmentation: int


@dataclass(slots=True)
class _Live:
    """A live sequence's run, and the tokens for which slots were asked so far."""

    seq: Sequence
    run: Run
    used: int


class ContiguousAllocator(KVAllocator):
    """Runs of consecutive pages, one a sequence.

    Conservation law, checked by `check()`: free + in use = num_pages; every page is in exactly one free run or one
    sequence's run; nothing is shared, cached or evictable.

    >>> from kvarena.allocators.config import contiguous
    >>> pool = ContiguousAllocator(16, contiguous(page_size=4, sizing="pow2"))
    >>> a, b = Sequence("a", range(9)), Sequence("b", range(5))
    >>> pool.admit(a).hit_tokens, list(pool.page_ids(a))      # 9 tokens: a run of 16, 4 pages
    (0, [1, 2, 3, 4])
    >>> pool.admit(b).hit_tokens, list(pool.page_ids(b))
    (0, [5, 6])
    >>> pool.commit([(a, 9)])[0].freed
    ()
    >>> pool.extend(a, 8).moves[0], list(pool.page_ids(a))    # 17 tokens outgrow it, b lies behind it: it moves
    (PageMove(src=1, dst=7), [7, 8, 9, 10, 11, 12, 13, 14])
    """

    kind = "contiguous"

    def __init__(self, num_pages: int, design: Design | None = None) -> None:
        self.design = design or contiguous_design(sizing="pow2")
        if self.design.sizing == "max" and self.design.max_model_len is None:
            raise ValueError("contiguous, sizing 'max': expected max_model_len (tokens), found None")
        self.num_pages = num_pages
        self.page_size = self.design.page_size
        self.events = EventLog()
        self.refused_by_fragmentation = 0
        self._free: FreeRuns = Buddy(num_pages) if self.design.placement == "buddy" else FirstFit(num_pages)
        self._pinned: dict[str, Sequence] = {}
        self._live: dict[str, _Live] = {}

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """Test that a run for the whole sequence is free; hits nothing and holds nothing.

        The run is tested whole also where the gate asks for a chunk only: a chunk's run is the whole run.
        """
        if seq.request_id in self._live or seq.request_id in self._pinned:
            raise ValueError(f"request {seq.request_id} is live already")
        tokens = self._promise(seq, seq.num_prefill_tokens)
        if tokens is None:
            self._refuse(seq, "max_model_len")
            return None
        if not admits(gate or self.design.gate, tokens, self.page_size, self._free.free_pages):
            self._refuse(seq, "capacity")
            return None
        if self._free.largest() < pages_for(tokens, self.page_size):
            self._refuse_fragmented(seq)
            return None
        self._pinned[seq.request_id] = seq
        seq.num_computed_tokens = 0
        return Pin(seq, 0)

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """A run for a new sequence, a longer one where it is outgrown. A moved run keeps its old pages until the end
        of the call, since they are copied from."""
        asked = [(seq, whole(n, f"request {seq.request_id!r}: tokens to reserve")) for seq, n in wants]
        for seq, _ in asked:
            self._known(seq)
        refuse_twice(seq for seq, _ in asked)
        undo = _Undo()
        results = []
        for seq, n in asked:
            result = self._reserve_one(seq, seq.num_computed_tokens + n, undo)
            if result is None:
                self._roll_back(undo, asked)
                return None
            results.append(result)
        for run in undo.left_behind:
            self._free.give(run)
        if self.events.enabled:
            for result in results:
                self.events.add(EventKind.RESERVE, result.seq.request_id, result.page_ids)
                if result.moves:
                    pages = [move.dst for move in result.moves]
                    self.events.add(EventKind.COPY, result.seq.request_id, pages, "outgrown")
        return results

    def _reserve_one(self, seq: Sequence, tokens: int, undo: _Undo) -> Reservation | None:
        live = self._live.get(seq.request_id)
        if live is None:
            return self._place(seq, tokens, undo)
        if self.design.max_model_len is not None and tokens > self.design.max_model_len:
            self._refuse(seq, "max_model_len")
            return None
        undo.before.append((live, live.run, live.used))
        live.used = max(live.used, tokens)
        if tokens <= live.run[1] * self.page_size:
            return Reservation(seq)
        return self._outgrow(live, tokens, undo)

    def _place(self, seq: Sequence, tokens: int, undo: _Undo) -> Reservation | None:
        promised = self._promise(seq, max(tokens, seq.num_prefill_tokens))
        if promised is None:
            self._refuse(seq, "max_model_len")
            return None
        run = self._take(seq, promised)
        if run is None:
            return None
        undo.taken.append(run)
        self._pinned.pop(seq.request_id)
        self._live[seq.request_id] = _Live(seq, run, tokens)
        undo.placed.append(seq)
        return Reservation(seq, _pages(run))

    def _outgrow(self, live: _Live, tokens: int, undo: _Undo) -> Reservation | None:
        target = min(_next_power_of_two(tokens), self.design.max_model_len or 2 * tokens)
        old = live.run
        grown = self._free.grow(old, pages_for(target, self.page_size))
        if grown is not None:
            live.run = grown
            added = (old[0] + old[1], grown[1] - old[1])
            undo.taken.append(added)
            return Reservation(live.seq, _pages(added))
        run = self._take(live.seq, target)
        if run is None:
            return None
        live.run = run
        undo.taken.append(run)
        undo.left_behind.append(old)
        moves = tuple(PageMove(src, dst) for src, dst in zip(_pages(old), _pages(run), strict=False))
        return Reservation(live.seq, _pages(run)[old[1] :], moves, freed=tuple(_pages(old)), rewritten=(0, old[1]))

    def _take(self, seq: Sequence, tokens: int) -> Run | None:
        pages = pages_for(tokens, self.page_size)
        run = self._free.place(pages)
        if run is None:
            if pages <= self._free.free_pages:
                self._refuse_fragmented(seq)
            else:
                self._refuse(seq, "capacity")
        return run

    def _roll_back(self, undo: _Undo, asked: list[tuple[Sequence, int]]) -> None:
        for run in undo.taken:
            self._free.give(run)
        for live, run, used in reversed(undo.before):
            live.run, live.used = run, used
        for seq in undo.placed:
            del self._live[seq.request_id]
        for seq, _ in asked:
            self._pinned.pop(seq.request_id, None)

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        """Note how far the KV is written. ValueError: past the run, or the sequence is not live."""
        results = []
        for seq, n in done:
            slots = self._get(seq).run[1] * self.page_size
            written = whole(n, f"request {seq.request_id!r}: tokens to commit")
            if written > slots:
                raise ValueError(f"request {seq.request_id}: commit of {n} tokens, its run has {slots} slots")
            seq.num_computed_tokens = max(seq.num_computed_tokens, written)
            results.append(Commit(seq))
        return results

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        """Give back each run; a sequence that was only pinned is forgotten."""
        check_reason(reason)
        leaving = list(seqs)
        for seq in leaving:
            self._known(seq)
        refuse_twice(leaving)
        freed: list[int] = []
        for seq in leaving:
            if self._pinned.pop(seq.request_id, None) is None:
                live = self._get(seq)
                del self._live[seq.request_id]
                self._free.give(live.run)
                freed.extend(_pages(live.run))
                if self.events.enabled:
                    self.events.add(EventKind.RELEASE, seq.request_id, _pages(live.run), reason.value)
            seq.num_computed_tokens = 0
        return Released(tuple(freed))

    def evict(self, num_tokens: int) -> list[int]:
        """Nothing is cached, so nothing can go."""
        whole(num_tokens, "num_tokens")
        return []

    def page_ids(self, seq: Sequence) -> array[int]:
        """All pages of the run, reserved ones included."""
        return _pages(self._get(seq).run)

    def capacity(self) -> Capacity:
        free = self._free.free_pages
        in_use = self.num_pages - free
        used = sum(live.used for live in self._live.values())
        wasted = in_use * self.page_size - used
        return Capacity(self.num_pages, self.page_size, free, 0, in_use, wasted_slots=wasted)

    def waste(self) -> Waste:
        """Waste by kind, now. O(live sequences + free runs)."""
        used = reservation = internal = 0
        for live in self._live.values():
            slots = live.run[1] * self.page_size
            promised = live.seq.oracle_tokens or self._promise(live.seq, live.used) or live.used
            coming = max(min(promised, slots) - live.used, 0)
            used, reservation = used + live.used, reservation + coming
            internal += slots - live.used - coming
        free, largest = self._free.free_pages, self._free.largest()
        fragmentation = 1 - largest / free if free else 0.0
        return Waste(used, reservation, internal, free, largest, fragmentation, self.refused_by_fragmentation)

    def reset(self) -> bool:
        return not self._live and not self._pinned

    def check(self) -> None:
        """Lay all runs side by side: they must tile 1 .. num_pages. Raises AllocatorError with a full dump."""
        try:
            self._free.check()
            owners = [(*run, "free") for run in self._free.runs()]
            owners += [(*live.run, name) for name, live in self._live.items()]
            self._check_tiling(sorted(owners))
            free = sum(length for _, length in self._free.runs())
            if free != self._free.free_pages:
                raise AllocatorError(f"{self._free.free_pages} pages counted free, {free} are")
            for name, live in self._live.items():
                self._check_live(name, live)
        except AllocatorError as error:
            raise AllocatorError(f"{error}\n{self.dump()}") from None

    def _check_tiling(self, owners: list[tuple[int, int, str]]) -> None:
        page = 1
        for start, length, owner in owners:
            if start < page:
                raise AllocatorError(f"page {start} of {owner} has another owner too")
            if start > page:
                raise AllocatorError(f"pages {page}..{start - 1} leaked: in no run")
            page = start + length
        if page != self.num_pages + 1:
            raise AllocatorError(f"runs end at page {page - 1} of {self.num_pages}")

    def _check_live(self, name: str, live: _Live) -> None:
        slots = live.run[1] * self.page_size
        if name != live.seq.request_id or name in self._pinned:
            raise AllocatorError(f"request {name}: kept under another id, or pinned and live")
        if live.used > slots or live.seq.num_computed_tokens > slots:
            computed = live.seq.num_computed_tokens
            raise AllocatorError(f"request {name}: {live.used} asked, {computed} computed, of {slots} slots")

    def dump(self) -> str:
        """Every run and count, for error messages and notebooks."""
        runs = ", ".join(f"{start}+{length}" for start, length in self._free.runs())
        rows = [f"  {name}: {live.run[0]}+{live.run[1]}, {live.used} tokens" for name, live in self._live.items()]
        head = f"contiguous, {self.num_pages} pages of {self.page_size}: {self._free.free_pages} free"
        return "\n".join([head, f"  free runs (page+pages): {runs}", *rows, f"  pinned: {sorted(self._pinned)}"])

    def __repr__(self) -> str:
        return self.dump()

    def _promise(self, seq: Sequence, tokens: int) -> int | None:
        """Tokens that the sequence's run is sized for, at least `tokens`; None past max_model_len."""
        limit = self.design.max_model_len
        if limit is not None and tokens > limit:
            return None
        promised = max(self._guess(seq, tokens), tokens)
        return promised if limit is None else min(promised, limit)

    def _guess(self, seq: Sequence, tokens: int) -> int:
        sizing = self.design.sizing
        if sizing == "max":
            return self.design.max_model_len or tokens
        if sizing == "pow2":
            return _next_power_of_two(tokens)
        field = "declared_max_tokens" if sizing == "declared" else "oracle_tokens"
        value = getattr(seq, field)
        if value is None:
            raise ValueError(f"request {seq.request_id}: contiguous, sizing {sizing!r}, needs its {field}: found None")
        return int(value) + (seq.num_prompt_tokens if sizing == "declared" else 0)

    def _get(self, seq: Sequence) -> _Live:
        live = self._live.get(seq.request_id)
        if live is None or live.seq is not seq:
            raise ValueError(f"request {seq.request_id} is not live{'' if live is None else ', another of its id is'}")
        return live

    def _known(self, seq: Sequence) -> None:
        if self._pinned.get(seq.request_id) is not seq:
            self._get(seq)

    def _refuse(self, seq: Sequence, reason: str) -> None:
        if self.events.enabled:
            self.events.add(EventKind.REFUSE, seq.request_id, (), reason)

    def _refuse_fragmented(self, seq: Sequence) -> None:
        self.refused_by_fragmentation += 1
        self._refuse(seq, "fragmentation")


class _Undo:
    """What a refused `reserve` has to take back: runs taken, rows as they were, sequences placed."""

    def __init__(self) -> None:
        self.taken: list[Run] = []
        self.before: list[tuple[_Live, Run, int]] = []
        self.placed: list[Sequence] = []
        self.left_behind: list[Run] = []


def _pages(run: Run) -> array[int]:
    return array("i", range(run[0], run[0] + run[1]))


def _next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
