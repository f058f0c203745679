"""A toy pool that holds what was really written, and random users that fork, write, end, move away and come back.

Each slot holds the whole text up to the token that was written to it, so "its own KV" is compared by value: a read is
true when the slot holds exactly the reader's tokens up to that position. Device and host are two such pools; copies
and moves are carried out, all sources of a call read before any target is written.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from kvarena.allocators.host import HostTier
from kvarena.allocators.interface import KVAllocator, Release, Sequence


class Memory(dict):
    """Slot -> (namespace, tokens up to there)."""

    def write(self, pages: Any, size: int, seq: Sequence, start: int, tokens: list[int]) -> None:
        known = [*seq.token_ids[:start], *tokens]
        for position in range(start, len(known)):
            slot = pages[position // size] * size + position % size
            self[slot] = (seq.namespace, tuple(known[: position + 1]))

    def copy_from(self, source: Memory, moves: Any, size: int) -> None:
        targets = [move.dst for move in moves]
        assert len(targets) == len(set(targets)), f"a page is the target of two copies: {targets}"
        read = [[source.get(move.src * size + i) for i in range(size)] for move in moves]
        for move, contents in zip(moves, read, strict=True):
            self.update({move.dst * size + i: content for i, content in enumerate(contents)})


class Users:
    """Random users of one allocator that can fork; `step()` acts once, `verify()` reads all live sequences.

    prepare_first  prepare_write before reserve, as an engine may do it; else after
    """

    WEIGHTS: ClassVar = {
        "arrive": 5,
        "fork": 5,
        "decode": 10,
        "draft": 3,
        "finish": 3,
        "abort": 2,
        "preempt": 2,
        "swap_out": 2,
        "come_back": 3,
        "evict": 1,
    }

    def __init__(self, allocator: KVAllocator, seed: int, *, prepare_first: bool = True, adapter: Any = None) -> None:
        self.allocator: Any = allocator
        self.size = allocator.page_size
        self.rng = random.Random(seed)
        self.prepare_first = prepare_first
        self.adapter = adapter
        self.host = HostTier(allocator, num_pages=allocator.num_pages // 2)
        self.device, self.host_memory = Memory(), Memory()
        self.live: list[Sequence] = []
        self.away: list[Sequence] = []
        self.seen: dict[str, int] = {}
        self.answers: list[Any] = []
        self.count = 0

    def step(self) -> None:
        act = self.rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0]
        getattr(self, f"_{act}")()

    def verify(self) -> None:
        """Every token that a live sequence may read is its own; `check`, and the adapter, agree."""
        for seq in self.live:
            pages = self.allocator.page_ids(seq)
            for position in range(seq.num_computed_tokens):
                held = self.device.get(pages[position // self.size] * self.size + position % self.size)
                wanted = (seq.namespace, tuple(seq.token_ids[: position + 1]))
                assert held == wanted, f"{seq}, position {position}, page {pages[position // self.size]}: {held}"
        self.allocator.check()
        self.host.check()
        if self.adapter is not None:
            self.adapter.check(self.live)

    # --- acts ---

    def _arrive(self) -> None:
        if len(self.live) < 7:
            self.count += 1
            tokens = [self.rng.randrange(2)] * self.rng.randrange(1, 2 * self.size + 2)
            tokens += [self.rng.randrange(2) for _ in range(self.rng.randrange(4))]
            self._admit(Sequence(f"r{self.count}", tokens, namespace=self.rng.choice([None, None, "tenant"])))

    def _come_back(self) -> None:
        if self.away and len(self.live) < 7:
            seq = self.away.pop(0)
            if seq in self.host:
                self._swap_in(seq)
            else:
                seq.resume()
                self._admit(seq)

    def _admit(self, seq: Sequence) -> None:
        pin = self.allocator.admit(seq)
        self.answers.append(None if pin is None else pin.hit_tokens)
        if pin is None:
            return
        self.live.append(seq)
        if self.adapter is not None:
            self.adapter.add(seq)
        self._write(seq, list(seq.token_ids[pin.hit_tokens :]))
        self._note("arrive")

    def _swap_in(self, seq: Sequence) -> None:
        moves = self.host.swap_in(seq)
        if moves is None:
            self.away.append(seq)
            return
        self.device.copy_from(self.host_memory, moves, self.size)
        self.live.append(seq)
        if self.adapter is not None:
            self.adapter.add(seq)
        self._note("swap_in")

    def _fork(self) -> None:
        if not self.live or len(self.live) >= 7:
            return
        self.count += 1
        parent = self.rng.choice(self.live)
        own = [self.rng.randrange(2) for _ in range(self.rng.choice([0, 0, 1, 3]))]
        tokens = [*parent.token_ids[: parent.num_computed_tokens], *own]
        child = Sequence(f"r{self.count}", tokens, namespace=parent.namespace)
        fork = self.allocator.fork(parent, child)
        self.answers.append(None if fork is None else fork.copies)
        if fork is None:
            self._note("fork refused")
            return
        self.device.copy_from(self.device, fork.copies, self.size)
        self.live.append(child)
        if self.adapter is not None:
            self.adapter.update(fork.commit)
            self.adapter.add(child)
        self._note("fork")
        self.verify()
        if own and self._slots([(child, len(own))]):
            self._write(child, own)
        elif own:
            self._end(child, Release.ABORT)

    def _decode(self) -> None:
        """One token more for some, whose slots come in one call; the last of them goes until the others fit."""
        members = [seq for seq in self.live if self.rng.random() < 0.7]
        for seq in members:
            seq.append(self.rng.randrange(2))
        while members and not self._slots([(seq, 1) for seq in members]):
            self._end(members.pop(), Release.PREEMPT)
            self._note("preempted for room")
        for seq in members:
            self._write(seq, [seq.token_ids[-1]])

    def _draft(self) -> None:
        """Draft tokens are written and some are rejected; what was rejected is then written over."""
        if not self.live:
            return
        seq, n = self.rng.choice(self.live), self.rng.randrange(2, 5)
        if not self._slots([(seq, n)]):
            return
        start = seq.num_computed_tokens
        drafts = [self.rng.randrange(2) for _ in range(n)]
        self.device.write(self.allocator.page_ids(seq), self.size, seq, start, drafts)
        for token in drafts[: self.rng.randrange(n)]:
            seq.append(token)
        self._commit(seq)
        self._note("draft")

    def _finish(self) -> None:
        if self.live:
            self._end(self.rng.choice(self.live), Release.FINISH)

    def _abort(self) -> None:
        if self.live:
            self._end(self.rng.choice(self.live), Release.ABORT)

    def _preempt(self) -> None:
        if self.live:
            self._end(self.live[-1], Release.PREEMPT)

    def _swap_out(self) -> None:
        if not self.live:
            return
        seq = self.rng.choice(self.live)
        out = self.host.swap_out(seq)
        if out is not None:
            self.host_memory.copy_from(self.device, out.moves, self.size)
            self.live.remove(seq)
            self.away.append(seq)
            if self.adapter is not None:
                self.adapter.remove(seq)
            self._note("swap_out")

    def _evict(self) -> None:
        self.allocator.evict(self.rng.randrange(1, 3 * self.size))

    # --- parts of acts ---

    def _slots(self, wants: list[tuple[Sequence, int]]) -> bool:
        """Slots that the sequences may write to; copies are carried out at once."""
        if self.prepare_first and not self._prepare(wants):
            return False
        reservations = self.allocator.reserve(wants)
        self.answers.append(reservations is None)
        if reservations is None:
            return False
        if self.adapter is not None:
            self.adapter.update_all(reservations)
        return self.prepare_first or self._prepare(wants)

    def _prepare(self, wants: list[tuple[Sequence, int]]) -> bool:
        for seq, n in wants:
            start = seq.num_computed_tokens
            copies = self.allocator.prepare_write(seq, start, start + n)
            self.answers.append(copies)
            if copies is None:
                self._note("copy refused")
                return False
            self.device.copy_from(self.device, copies, self.size)
            if copies:
                self._note("copy")
                if self.adapter is not None:
                    self.adapter.refresh(seq)
        return True

    def _write(self, seq: Sequence, tokens: list[int]) -> None:
        start = seq.num_computed_tokens
        self.device.write(self.allocator.page_ids(seq), self.size, seq, start, tokens)
        self._commit(seq)

    def _commit(self, seq: Sequence) -> None:
        commits = self.allocator.commit([(seq, seq.num_tokens)])
        if self.adapter is not None:
            self.adapter.update_all(commits)

    def _end(self, seq: Sequence, reason: Release) -> None:
        self.live.remove(seq)
        self.allocator.release([seq], reason)
        if self.adapter is not None:
            self.adapter.remove(seq)
        if reason is Release.PREEMPT:
            self.away.append(seq)

    def _note(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1
