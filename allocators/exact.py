"""The textbook prefix cache: whole prompts are registered with a user count and freed with their last user.

Pages are handed out, lowest ids first, from a stack of free pages; those of a leaving request come back on top, so
that its first page goes next. A request whose whole prompt equals a registered one takes that prompt's pages, up to
the last page border before its last token (one token is always left to compute); anything less than the whole
prompt is a miss. A prompt is registered when its KV is written (`commit`). Nothing outlives its users, so nothing is
evictable: on shortage a request is refused. Generated tokens are never shared.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvarena.allocators._arguments import check_reason, refuse_twice, whole
from kvarena.allocators._room import admits, pages_for
from kvarena.allocators.config import Design
from kvarena.allocators.config import exact as exact_design
from kvarena.allocators.interface import (
    AllocatorError,
    Capacity,
    Commit,
    EventKind,
    EventLog,
    Gate,
    KVAllocator,
    Pin,
    Release,
    Released,
    Reservation,
    Sequence,
)
from kvarena.prefix.exact import ExactIndex, Prompt, PromptKey


def _no_pages() -> array[int]:
    return array("i")


@dataclass(slots=True)
class _Holder:
    """A pinned or live sequence.

    row       pages in position order; the first `shared` of them are its prompt's
    prompt    the registered prompt that it uses, as its owner or as a sharer
    twin      somebody else's equal prompt, found when this one was to be registered
    used      tokens for which slots were asked
    """

    seq: Sequence
    row: array[int] = field(default_factory=_no_pages)
    shared: int = 0
    prompt: Prompt | None = None
    twin: Prompt | None = None
    used: int = 0

    def private(self) -> array[int]:
        return self.row[self.shared :]


class ExactAllocator(KVAllocator):
    """Pages held by one sequence, or by one registered prompt that counts its users.

    Conservation law, checked by `check()`: free + in use = num_pages, nothing is evictable; every page is free, a
    prompt's, or one sequence's; a prompt's user count equals the sequences that hold it and is never 0; no row
    names a free page.

    >>> from kvarena.allocators.config import exact
    >>> pool = ExactAllocator(8, exact(page_size=4))
    >>> a, b, c = Sequence("a", range(9)), Sequence("b", range(9)), Sequence("c", range(8))
    >>> pool.admit(a).hit_tokens, pool.commit([(a, 9)])[0].published
    (0, (1, 2))
    >>> pool.admit(b).hit_tokens, list(pool.page_ids(b)), pool.admit(c).hit_tokens   # c's prompt is another one
    (8, [1, 2, 4], 0)
    >>> pool.release([a], Release.FINISH).freed, pool.release([b], Release.FINISH).freed
    ((3,), (1, 2, 4))
    """

    kind = "exact"

    def __init__(self, num_pages: int, design: Design | None = None, *, hash_fn: Any = None) -> None:
        self.design = design or exact_design()
        self.num_pages = num_pages
        self.page_size = self.design.page_size
        self.events = EventLog()
        self._index = ExactIndex() if hash_fn is None else ExactIndex(hash_fn)
        self._free = array("i", range(num_pages, 0, -1))  # taken from the end
        self._pinned: dict[str, _Holder] = {}
        self._live: dict[str, _Holder] = {}

    def pin(self, seq: Sequence, gate: Gate | None = None) -> Pin | None:
        """Find the whole prompt, test the room for the rest, count this user. A refusal changes nothing."""
        if seq.request_id in self._live or seq.request_id in self._pinned:
            raise ValueError(f"request {seq.request_id} is live already")
        gate = gate or self.design.gate
        prompt = self._index.find(_key(seq))
        pages = 0 if prompt is None else min(len(prompt.page_ids), (seq.num_prefill_tokens - 1) // self.page_size)
        hit = pages * self.page_size
        new = seq.num_prefill_tokens - hit if gate.whole_prompt else 0
        if not admits(gate, new, self.page_size, len(self._free)):
            self._log(EventKind.REFUSE, seq, (), "capacity")
            return None
        holder = _Holder(seq)
        if prompt is not None and pages:
            prompt.users += 1
            holder = _Holder(seq, prompt.page_ids[:pages], pages, prompt, used=hit)
            self._log(EventKind.HIT, seq, holder.row)
        self._pinned[seq.request_id] = holder
        seq.num_computed_tokens = hit
        return Pin(seq, hit, holder.row[:])

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        """Pages off the stack, sequence after sequence. None: not enough for all, and nothing was taken."""
        ends = [(self._holder(seq), self._end(seq, n)) for seq, n in wants]
        refuse_twice(holder.seq for holder, _ in ends)
        if self._demand(ends) > len(self._free):
            self._refuse(ends)
            return None
        return [self._take(holder, end) for holder, end in ends]

    def _end(self, seq: Sequence, n: int) -> int:
        return seq.num_computed_tokens + whole(n, f"request {seq.request_id!r}: tokens to reserve")

    def _demand(self, ends: list[tuple[_Holder, int]]) -> int:
        return sum(max(pages_for(end, self.page_size) - len(holder.row), 0) for holder, end in ends)

    def _refuse(self, ends: list[tuple[_Holder, int]]) -> None:
        for holder, _ in ends:
            self._log(EventKind.REFUSE, holder.seq, (), "capacity")
            if self._pinned.pop(holder.seq.request_id, None) is not None:
                self._leave_prompt(holder)

    def _take(self, holder: _Holder, end: int) -> Reservation:
        name = holder.seq.request_id
        if self._pinned.pop(name, None) is not None:
            self._live[name] = holder
        need = max(pages_for(end, self.page_size) - len(holder.row), 0)
        pages = array("i", [self._free.pop() for _ in range(need)])
        holder.row.extend(pages)
        holder.used = max(holder.used, end)
        self._log(EventKind.RESERVE, holder.seq, pages)
        return Reservation(holder.seq, pages)

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        """Note how far the KV is written; a prompt that is complete is registered, if no equal one is."""
        return [self._commit_one(seq, n) for seq, n in done]

    def _commit_one(self, seq: Sequence, n: int) -> Commit:
        holder = self._get(seq)
        slots = len(holder.row) * self.page_size
        written = whole(n, f"request {seq.request_id!r}: tokens to commit")
        if written > slots:
            raise ValueError(f"request {seq.request_id}: commit of {n} tokens, its pages have {slots} slots")
        seq.num_computed_tokens = max(seq.num_computed_tokens, written)
        pages = seq.num_prompt_tokens // self.page_size
        if holder.prompt is not None or holder.twin is not None or not pages or n < seq.num_prompt_tokens:
            return Commit(seq)
        return self._register(holder, pages)

    def _register(self, holder: _Holder, pages: int) -> Commit:
        key = _key(holder.seq)
        holder.twin = self._index.find(key)
        if holder.twin is not None:
            self._log(EventKind.DUPLICATE, holder.seq, holder.row[:pages])
            return Commit(holder.seq)
        holder.prompt = self._index.insert(key, holder.row[:pages])
        holder.shared = pages
        self._log(EventKind.PUBLISH, holder.seq, holder.row[:pages])
        return Commit(holder.seq, tuple(holder.row[:pages]))

    def release(self, seqs: Iterable[Sequence], reason: Release) -> Released:
        """Give back each sequence's own pages, and its prompt's with the last user; the reason makes no difference."""
        check_reason(reason)
        leaving = list(seqs)
        holders = [self._holder(seq) for seq in leaving]
        refuse_twice(leaving)
        freed = array("i")
        for holder in holders:
            name = holder.seq.request_id
            if self._live.pop(name, None) is None:
                self._pinned.pop(name)
            left = self._leave_prompt(holder) + holder.private()
            freed.extend(left)
            holder.seq.num_computed_tokens = 0
            self._log(EventKind.RELEASE, holder.seq, left, reason.value)
            self._free.extend(reversed(holder.private()))
        return Released(tuple(freed))

    def _leave_prompt(self, holder: _Holder) -> array[int]:
        """One user less; the last one gives the prompt's pages back. Returns the pages that came free."""
        prompt = holder.prompt
        if prompt is None:
            return array("i")
        prompt.users -= 1
        if prompt.users:
            return array("i")
        self._index.remove(prompt)
        self._free.extend(reversed(prompt.page_ids))
        return prompt.page_ids

    def evict(self, num_tokens: int) -> list[int]:
        """Nothing is cached without a user, so nothing can go."""
        whole(num_tokens, "num_tokens")
        return []

    def page_ids(self, seq: Sequence) -> array[int]:
        return self._get(seq).row[:]

    def capacity(self) -> Capacity:
        """O(live sequences + registered prompts)."""
        free, prompts = len(self._free), self._index.prompts()
        holders = [*self._pinned.values(), *self._live.values()]
        in_use = self.num_pages - free
        filled = sum(len(prompt.page_ids) for prompt in prompts) * self.page_size
        filled += sum(max(holder.used - holder.shared * self.page_size, 0) for holder in holders)
        return Capacity(
            self.num_pages,
            self.page_size,
            free,
            0,
            in_use,
            shared=sum(len(prompt.page_ids) for prompt in prompts if prompt.users > 1),
            duplicates=sum(map(self._duplicates, holders)),
            wasted_slots=in_use * self.page_size - filled,
        )

    def _duplicates(self, holder: _Holder) -> int:
        """Own pages with content that a registered prompt holds: a twin's, or the last page of a full hit."""
        if holder.twin is not None:
            return len(holder.twin.page_ids) if holder.twin.users else 0
        if holder.prompt is None or len(holder.row) == holder.shared:
            return 0
        return len(holder.prompt.page_ids) - holder.shared

    def reset(self) -> bool:
        return not self._live and not self._pinned

    def check(self) -> None:
        """Count every page's owners from rows, prompts and the free stack. Raises AllocatorError with a full dump."""
        try:
            self._check_rows()
            self._check_prompts()
            self._check_pages()
        except AllocatorError as error:
            raise AllocatorError(f"{error}\n{self.dump()}") from None

    def _check_rows(self) -> None:
        free = set(self._free)
        for name, holder in [*self._pinned.items(), *self._live.items()]:
            if name != holder.seq.request_id or (name in self._pinned and name in self._live):
                raise AllocatorError(f"request {name}: kept under another id, or pinned and live")
            if stale := free.intersection(holder.row):
                raise AllocatorError(f"request {name}: its row names free pages {sorted(stale)}")
            prompt = holder.prompt.page_ids if holder.prompt is not None else array("i")
            if holder.row[: holder.shared] != prompt[: holder.shared] or holder.shared > len(prompt):
                raise AllocatorError(f"request {name}: row {list(holder.row)} does not start with {list(prompt)}")
            slots = len(holder.row) * self.page_size
            if max(holder.used, holder.seq.num_computed_tokens) > slots:
                raise AllocatorError(f"request {name}: {holder.used} tokens asked, {slots} slots")

    def _check_prompts(self) -> None:
        users = Counter(id(h.prompt) for h in (*self._pinned.values(), *self._live.values()) if h.prompt is not None)
        for prompt in self._index.prompts():
            if prompt.users != users.pop(id(prompt), 0) or prompt.users < 1:
                raise AllocatorError(f"prompt of pages {list(prompt.page_ids)}: {prompt.users} users counted wrongly")
        if users:
            raise AllocatorError("a sequence holds a prompt that is not registered")
        if problems := self._index.problems():
            raise AllocatorError("; ".join(problems))

    def _check_pages(self) -> None:
        owners: Counter[int] = Counter(self._free)
        for prompt in self._index.prompts():
            owners.update(prompt.page_ids)
        for holder in (*self._pinned.values(), *self._live.values()):
            owners.update(holder.private())
        pages = range(1, self.num_pages + 1)
        if several := [page for page, count in owners.items() if count > 1 or page not in pages]:
            raise AllocatorError(f"pages {sorted(several)} are in more than one state, or outside the pool")
        if leaked := [page for page in pages if page not in owners]:
            raise AllocatorError(f"pages {leaked} leaked: not free, not a prompt's, in no row")

    def dump(self) -> str:
        """Every row, prompt and free page, for error messages and notebooks."""
        lines = [f"exact, {self.num_pages} pages of {self.page_size}: {len(self._free)} free"]
        lines += [f"  free, next first: {list(reversed(self._free))}"]
        lines += [f"  prompt of pages {list(p.page_ids)}: {p.users} users" for p in self._index.prompts()]
        for state, holders in (("pinned", self._pinned), ("live", self._live)):
            lines += [
                f"  {state} {name}: pages {list(holder.row)}, the first {holder.shared} shared, {holder.used} tokens"
                for name, holder in holders.items()
            ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.dump()

    def _holder(self, seq: Sequence) -> _Holder:
        pinned = self._pinned.get(seq.request_id)
        return pinned if pinned is not None and pinned.seq is seq else self._get(seq)

    def _get(self, seq: Sequence) -> _Holder:
        holder = self._live.get(seq.request_id)
        if holder is None or holder.seq is not seq:
            raise ValueError(
                f"request {seq.request_id} is not live{'' if holder is None else ', another of its id is'}"
            )
        return holder

    def _log(self, kind: EventKind, seq: Sequence, pages: Iterable[int], reason: str = "") -> None:
        if self.events.enabled:
            self.events.add(kind, seq.request_id, pages, reason)


def _key(seq: Sequence) -> PromptKey:
    if seq.page_hashes is not None:
        return PromptKey(seq.page_hashes, seq.num_prompt_tokens, True, seq.namespace, seq.extra_keys)
    ids = seq.token_ids[: seq.num_prompt_tokens]
    return PromptKey(ids, seq.num_prompt_tokens, False, seq.namespace, seq.extra_keys)
