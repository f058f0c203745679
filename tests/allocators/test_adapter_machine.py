"""Both adapters as state machines: after every step their device buffers equal what a rebuild from nothing gives.

The model is the allocator's own `page_ids` and a few lines of arithmetic. Hypothesis draws allocator, page size and
every verb between two batches: admissions in chunks, decodes one by one and as a batch, forks, copies before writes,
swaps, preemptions, resets, members that change and come back, padding, steps that are prepared twice.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

torch = pytest.importorskip("torch", reason="adapters need torch")

from kvarena.allocators.adapter import Batch, BlockTableAdapter, ReqToTokenAdapter  # noqa: E402
from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.allocators.host import HostTier  # noqa: E402
from kvarena.allocators.interface import Release, Reservation, Sequence, SupportsFork  # noqa: E402

MAX_REQUESTS, MAX_BATCH_TOKENS, NUM_PAGES = 5, 96, 14
SPECS: list[dict[str, Any]] = [
    {"kind": "block", "form": "hashed"},
    {"kind": "block", "form": "runs"},
    {"kind": "block", "sliding_window": 7, "retention_interval": None},
    {"kind": "token"},
    {"kind": "exact"},
    {"kind": "contiguous", "sizing": "pow2"},
]
INDEX = st.integers(0, 2**16)


class AdapterMachine(RuleBasedStateMachine):
    """One allocator, both adapters; `live` are the sequences with a row."""

    @initialize(spec=st.sampled_from(SPECS), page_size=st.sampled_from([1, 2, 3, 4, 8]))
    def build(self, spec: dict[str, Any], page_size: int) -> None:
        self.pool = make_allocator({**spec, "page_size": page_size}, num_pages=NUM_PAGES)
        width = 2 * NUM_PAGES * page_size + 200
        self.adapters = [self._adapter(kind, width) for kind in (BlockTableAdapter, ReqToTokenAdapter)]
        self.live: list[Sequence] = []
        self.away: list[Sequence] = []  # preempted, with all that was computed lost
        self.tier = HostTier(self.pool, 40)
        self.count = 0
        self.width = width
        self.size = page_size
        for tokens in ([0], [1], [1, 1], [1, 0, 1]):
            self.admit(tokens, 4, False)
        self._release(self.live[0], Release.FINISH)
        self.admit([0, 1], 4, False)  # in the first row again: rows are no longer in order of arrival

    def _adapter(self, kind: Any, width: int) -> Any:
        options = {"max_requests": MAX_REQUESTS, "max_tokens": width, "max_batch_tokens": MAX_BATCH_TOKENS}
        return kind(self.pool, **options, slots_by="torch")

    # --- what changes rows ---

    @precondition(lambda self: len(self.live) < MAX_REQUESTS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), chunk=st.integers(1, 12), late=st.booleans())
    def admit(self, tokens: list[int], chunk: int, late: bool) -> None:
        self.count += 1
        self._admit(Sequence(f"r{self.count}", tokens), chunk, late)

    @precondition(lambda self: self.away and len(self.live) < MAX_REQUESTS)
    @rule(chunk=st.integers(1, 12), late=st.booleans())
    def come_back(self, chunk: int, late: bool) -> None:
        seq = self.away.pop(0)
        seq.resume()
        self._admit(seq, chunk, late)

    def _admit(self, seq: Sequence, chunk: int, late: bool) -> None:
        """`late`: the adapters hear of it by `add` after the reservation, not by its reservation."""
        pin = self.pool.pin(seq)
        if pin is None:
            return
        first = self.pool.reserve([(seq, min(chunk, seq.num_prefill_tokens - pin.hit_tokens))])
        if first is None:
            self._refused()
            return
        for adapter in self.adapters:
            adapter.add(seq) if late else adapter.update_all(first)
        self.live.append(seq)
        self._commit([(seq, min(seq.num_computed_tokens + chunk, seq.num_prefill_tokens))])
        self._prefill(seq, chunk)

    def _prefill(self, seq: Sequence, chunk: int) -> None:
        while seq.num_computed_tokens < seq.num_prefill_tokens:
            n = min(chunk, seq.num_prefill_tokens - seq.num_computed_tokens)
            if not self._writable([seq], n) or not self._reserve([(seq, n)]):
                self._release(seq, Release.ABORT)
                return
            self._commit([(seq, seq.num_computed_tokens + n)])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 5), kept=st.integers(1, 5))
    def decode(self, data: st.DataObject, n: int, kept: int) -> None:
        """Some sequences, one token and n - 1 drafts each, of which `kept` stay; batch before commit."""
        chosen, kept = self._some(data), min(kept, n)
        for seq in chosen:
            seq.append(0)
        if not self._writable(chosen, n) or not self._reserve([(seq, n) for seq in chosen]):
            self._forget(chosen)
            return
        self._compare(chosen, [n] * len(chosen), len(chosen), len(chosen) * n)
        for seq in chosen:
            for _ in range(kept - 1):
                seq.append(1)
        self._commit([(seq, seq.num_computed_tokens + kept) for seq in chosen])

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        steps=st.integers(1, 6),
        rounds=st.sampled_from([list, tuple, lambda seqs: seqs]),
        pad=st.integers(0, 3),
        more=st.integers(0, 9),
    )
    def decode_batch(self, data: st.DataObject, steps: int, rounds: Any, pad: int, more: int) -> None:
        """A decode batch, step after step, told and batched in one call or in two; in two, the list of its members is
        the same or a new one each time."""
        chosen = self._some(data)
        batch = self.pool.decode_batch(chosen)
        for _ in range(steps):
            for seq in chosen:
                seq.append(1)
            step = batch.reserve() if self._writable(chosen, 1) else None
            if step is None:
                self._refused()
                self._forget(chosen)
                return
            ones, size, tokens = [1] * len(chosen), min(len(chosen) + pad, MAX_REQUESTS), len(chosen) + more
            at_once = data.draw(st.booleans())
            for adapter in self.adapters:
                if at_once:
                    self._expect(adapter.decode(step, pad_requests=size, pad_tokens=tokens), chosen, ones, size, tokens)
                else:
                    adapter.update_step(step)
            if not at_once or data.draw(st.booleans()):
                self._compare(rounds(chosen), ones, len(chosen), len(chosen))
            batch.commit()

    @precondition(lambda self: self.live and len(self.live) < MAX_REQUESTS and isinstance(self.pool, SupportsFork))
    @rule(index=INDEX, own=st.lists(st.integers(0, 1), max_size=4))
    def fork(self, index: int, own: list[int]) -> None:
        parent = self.live[index % len(self.live)]
        if not parent.num_computed_tokens:
            return
        self.count += 1
        child = Sequence(f"r{self.count}", [*parent.token_ids[: parent.num_computed_tokens], *own])
        made = self.pool.fork(parent, child)  # type: ignore[attr-defined]
        if made is None:
            return
        for adapter in self.adapters:
            if made.commit is not None:
                adapter.update(made.commit)
            adapter.add(child)
        self.live.append(child)
        self._prefill(child, 4)

    @precondition(lambda self: self.live)
    @rule(index=INDEX, reason=st.sampled_from(Release))
    def release(self, index: int, reason: Release) -> None:
        seq = self.live[index % len(self.live)]
        self._release(seq, reason)
        if reason is Release.PREEMPT:
            self.away.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave_and_return(self, data: st.DataObject) -> None:
        """Some are preempted and admitted again, into each other's rows; the same list is batched before and after."""
        members = list(self.live)
        self._compare(members, [0] * len(members), len(members), 0)
        for seq in data.draw(st.permutations(members)):
            self._release(seq, Release.PREEMPT)
        for seq in members:
            seq.resume()
            self._admit(seq, 8, False)
        members = [seq for seq in members if seq in self.live]
        self._compare(members, [0] * len(members), len(members), 0)

    @precondition(lambda self: self.live)
    @rule(index=INDEX)
    def swap_out_and_in(self, index: int) -> None:
        seq = self.live[index % len(self.live)]
        if self.tier.swap_out(seq) is None:
            return
        self.live.remove(seq)
        for adapter in self.adapters:
            adapter.remove(seq)
        if self.tier.swap_in(seq) is None:
            self.tier.drop(seq)
            return
        for adapter in self.adapters:
            adapter.add(seq)
        self.live.append(seq)

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens: int) -> None:
        self.pool.evict(tokens)

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset()

    @precondition(lambda self: self.live)
    @rule(index=INDEX)
    def refresh(self, index: int) -> None:
        for adapter in self.adapters:
            adapter.refresh(self.live[index % len(self.live)])

    # --- what reads them ---

    @rule(data=st.data(), pad=st.integers(0, 3), more=st.integers(0, 9))
    def batch(self, data: st.DataObject, pad: int, more: int) -> None:
        """Any members in any order, any number of new tokens that their rows hold, padded."""
        chosen = data.draw(st.permutations(self._some(data)))
        new = []
        for seq in chosen:
            covered = len(self.pool.page_ids(seq)) * self.size - seq.num_computed_tokens
            new.append(data.draw(st.integers(0, min(covered, 12))))
        size = min(len(chosen) + pad, MAX_REQUESTS)
        self._compare(chosen, new, size, min(sum(new) + more, MAX_BATCH_TOKENS))

    @rule()
    def nothing(self) -> None:
        self._compare([], [], 2, 3)

    @precondition(lambda self: self.live)
    @rule(index=INDEX)
    def misuse_changes_nothing(self, index: int) -> None:
        seq = self.live[index % len(self.live)]
        past = len(self.pool.page_ids(seq)) * self.size - seq.num_computed_tokens + 1
        for adapter in self.adapters:
            for seqs, new in (([seq], [past]), ([seq, seq], [0, 0]), ([Sequence("x", [1])], [0]), ([seq], [-1])):
                with pytest.raises(ValueError, match=r"request|sequence|num_new_tokens"):
                    adapter.batch(seqs, new)

    @invariant()
    def rows_are_the_allocators(self) -> None:
        if hasattr(self, "adapters"):
            self.pool.check()
            for adapter in self.adapters:
                adapter.check(self.live)

    # --- helpers ---

    def _some(self, data: st.DataObject) -> list[Sequence]:
        return [seq for seq in self.live if data.draw(st.booleans())] if self.live else []

    def _writable(self, seqs: list[Sequence], n: int) -> bool:
        if not isinstance(self.pool, SupportsFork):
            return True
        for seq in seqs:
            start = seq.num_computed_tokens
            copies = self.pool.prepare_write(seq, start, start + n)
            if copies is None:
                return False
            if copies:
                column = start // self.size
                self.adapters[0].refresh(seq)
                self.adapters[1].update(Reservation(seq, rewritten=(column, column + len(copies))))
        return True

    def _reserve(self, wants: list[tuple[Sequence, int]]) -> bool:
        results = self.pool.reserve(wants)
        if results is None:
            self._refused()
            return False
        for adapter in self.adapters:
            adapter.update_all(results)
        return True

    def _refused(self) -> None:
        """A refusal may have let window pages go."""
        for adapter in self.adapters:
            for seq in self.live:
                adapter.refresh(seq)

    def _commit(self, done: list[tuple[Sequence, int]]) -> None:
        results = self.pool.commit(done)
        for adapter in self.adapters:
            adapter.update_all(results)

    def _forget(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            seq.pop()

    def _release(self, seq: Sequence, reason: Release) -> None:
        self.pool.release([seq], reason)
        self.live.remove(seq)
        for adapter in self.adapters:
            adapter.remove(seq)

    def _compare(self, seqs: Any, new: list[int], size: int, tokens: int) -> None:
        members = list(seqs)
        for adapter in self.adapters:
            told = adapter.batch(seqs, new, pad_requests=size, pad_tokens=tokens)
            fresh = self._adapter(type(adapter), self.width)
            for seq in members:
                fresh.add(seq)
            self._expect(told, members, new, size, tokens)
            more = min(tokens + 4, MAX_BATCH_TOKENS)
            padded = adapter.batch(seqs, new, pad_requests=MAX_REQUESTS, pad_tokens=more)
            self._expect(padded, members, new, MAX_REQUESTS, more)
            self._expect(fresh.batch(members, new, pad_requests=size, pad_tokens=tokens), members, new, size, tokens)

    def _expect(self, told: Batch, seqs: list[Sequence], new: list[int], size: int, tokens: int) -> None:
        """All buffers against plain arithmetic on the pages that the allocator names."""
        table, pad = told.table, size - len(seqs)
        lens = [seq.num_computed_tokens + n for seq, n in zip(seqs, new, strict=True)]
        starts = [sum(new[:b]) for b in range(len(seqs) + 1)]
        positions = [p for length, n in zip(lens, new, strict=True) for p in range(length - n, length)]
        slots = [[page * self.size + i for page in self.pool.page_ids(seq) for i in range(self.size)] for seq in seqs]
        owners = [b for b, n in enumerate(new) for _ in range(n)]
        rest = tokens - sum(new)
        assert table.seq_lens.tolist() == lens + [0] * pad
        assert told.query_start_loc.tolist() == starts + [starts[-1]] * pad
        assert told.positions.tolist() == positions + [0] * rest
        wanted = [slots[b][p] for b, p in zip(owners, positions, strict=True)]
        assert told.slot_mapping.tolist() == wanted + [-1] * rest
        for b, owned in enumerate(slots):
            entries = table.entries[table.rows[b], : len(owned) // table.tokens_per_entry].tolist()
            assert entries == [slot // table.tokens_per_entry for slot in owned[:: table.tokens_per_entry]]
        for b in range(len(seqs), size):
            assert not table.entries[table.rows[b]].any()
        assert (told.num_requests, told.num_tokens) == (len(seqs), sum(new))
        assert (told.max_query_len, told.max_seq_len) == (max(new, default=0), max(lens, default=0))


TestAdapters = AdapterMachine.TestCase
TestAdapters.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
