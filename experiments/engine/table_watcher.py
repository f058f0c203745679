"""A page table that keeps up with an allocator, and how long it takes to, where nothing else runs."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Any

from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter, SlotsBy
from kvarena.allocators.interface import Commit, Fork, KVAllocator, Reservation, Sequence
from kvarena.experiments.engine.attention_time import TableKind
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor
from kvarena.experiments.engine.scheduler import SchedulerConfig, StepPlan
from kvarena.experiments.engine.watched import WatchedAllocator


class TableWatcher:
    """Tells an adapter what the allocator did (`PageWatcher`)."""

    adapter: BlockTableAdapter | ReqToTokenAdapter

    def reserved(self, reservations: ListLike[Reservation]) -> None:
        self.adapter.update_all(reservations)

    def refused(self, seqs: ListLike[Sequence]) -> None:
        for seq in seqs:
            if seq in self.adapter:
                self.adapter.refresh(seq)

    def committed(self, commits: ListLike[Commit]) -> None:
        self.adapter.update_all(commits)

    def released(self, seqs: ListLike[Sequence]) -> None:
        for seq in seqs:
            if seq in self.adapter:
                self.adapter.remove(seq)

    def forked(self, fork: Fork) -> None:
        self.adapter.add(fork.child)
        if fork.commit is not None:
            self.adapter.update(fork.commit)

    def unshared(self, seq: Sequence) -> None:
        self.adapter.refresh(seq)


def adapter_of(
    table: TableKind, allocator: KVAllocator, limits: SchedulerConfig, device: str, slots_by: SlotsBy
) -> BlockTableAdapter | ReqToTokenAdapter:
    """The page table of an engine with these limits."""
    make = BlockTableAdapter if table == "block_table" else ReqToTokenAdapter
    return make(
        allocator,
        # A request that ended may keep its row until the result of the step in flight is processed.
        max_requests=2 * limits.max_num_seqs,
        max_tokens=row_tokens(allocator, limits),
        max_batch_tokens=step_tokens(allocator, limits),
        device=device,
        slots_by=slots_by,
    )


def step_tokens(allocator: KVAllocator, limits: SchedulerConfig) -> int:
    """Tokens that a step can have at most. SGLang 0.5.22 takes the first prompt of a batch whole where prompts are not
    cut, and cuts them to no less than a page."""
    prompt = max(limits.chunk_size or 0, allocator.page_size) if limits.chunked_prefill else limits.max_model_len
    return max(limits.max_num_batched_tokens, prompt) + 2 * limits.max_num_seqs


def row_tokens(allocator: KVAllocator, limits: SchedulerConfig) -> int:
    """Tokens a row holds: the longest request, with the page that a reservation may take ahead; or the whole pool
    where an allocator reserves runs past the longest request, or nobody refuses a prompt that is longer."""
    pool = allocator.num_pages * allocator.page_size
    unbounded = allocator.kind == "contiguous" or limits.limits == "upstream"
    return pool if unbounded else min(limits.max_model_len + 2 * allocator.page_size, pool)


class TimedTable(TableWatcher):
    """A watcher that adds up the time of what it is told; `pending_ns` since it was last taken."""

    def __init__(self, adapter: BlockTableAdapter | ReqToTokenAdapter) -> None:
        self.adapter = adapter
        self.pending_ns = 0

    def _timed(self, verb: Callable[[Any], None], what: Any) -> None:
        start = time.perf_counter_ns()
        verb(what)
        self.pending_ns += time.perf_counter_ns() - start

    def reserved(self, reservations: ListLike[Reservation]) -> None:
        self._timed(super().reserved, reservations)

    def refused(self, seqs: ListLike[Sequence]) -> None:
        self._timed(super().refused, seqs)

    def committed(self, commits: ListLike[Commit]) -> None:
        self._timed(super().committed, commits)

    def released(self, seqs: ListLike[Sequence]) -> None:
        self._timed(super().released, seqs)

    def forked(self, fork: Fork) -> None:
        self._timed(super().forked, fork)

    def unshared(self, seq: Sequence) -> None:
        self._timed(super().unshared, seq)


class TableExecutor(ScriptedExecutor):
    """Scripted outputs, with the host's part of a real page table beside them; nothing reaches a device.

    allocator  what the scheduler has to use, so that rows keep up
    step_ns    of each step that computes something: rows brought up to date since the one before, and its batch
    """

    def __init__(
        self, allocator: KVAllocator, outputs: HiddenOutputs, limits: SchedulerConfig, table: TableKind
    ) -> None:
        super().__init__(outputs)
        self.table = TimedTable(adapter_of(table, allocator, limits, "cpu", "nobody"))
        self.allocator = WatchedAllocator(allocator, self.table)
        self.step_ns: array[int] = array("q")

    def launch(self, plan: StepPlan) -> None:
        """Make the step's batch, in the time that it takes."""
        if not plan.batch:
            return
        start = time.perf_counter_ns()
        seqs = [entry.request.seq for entry in plan.batch]
        self.table.adapter.batch(seqs, [entry.num_new for entry in plan.batch])
        self.step_ns.append(time.perf_counter_ns() - start + self.table.pending_ns)
        self.table.pending_ns = 0
