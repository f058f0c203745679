"""What an executor with real KV holds: the pool, the page table, the host pages, and the copies between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from kvarena.allocators.interface import (
    AllocatorError,
    KVAllocator,
    PageMove,
)
from kvarena.experiments.engine.attention_time import TableKind as TableKind
from kvarena.experiments.engine.backends import Backend, Step, load_backend
from kvarena.experiments.engine.scheduler import SchedulerConfig, StepPlan
from kvarena.experiments.engine.table_watcher import TableWatcher, adapter_of
from kvarena.experiments.engine.watched import WatchedAllocator
from kvarena.kernels.pool import KVPool
from torch import Tensor


@dataclass(frozen=True)
class MemoryOptions:
    """How KV is stored and read.

    backend  triton, torch or sdpa (`backends.py`)
    table    which page table the kernels are given
    layout   of the pool (`kernels/pool.py`)
    """

    backend: str = "torch"
    table: TableKind = "block_table"
    layout: str = "split"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.table not in ("block_table", "req_to_token"):
            raise ValueError(f"table: expected block_table or req_to_token, found {self.table!r}")


@dataclass(frozen=True)
class KVShape:
    """KV of one rank: layers, its KV heads, numbers a head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class PagedMemory(TableWatcher):
    """Pool and page table of one engine; `allocator` is what its scheduler has to use, so that rows keep up.

    A plan's copies are carried out by `begin`, in the plan's order and before anything is computed.
    """

    def __init__(self, allocator: KVAllocator, shape: KVShape, limits: SchedulerConfig, options: MemoryOptions) -> None:
        self.options = options
        self.backend: Backend = load_backend(options.backend)
        self.allocator = WatchedAllocator(allocator, self)
        self.pool = KVPool(
            shape.num_layers,
            allocator.num_pages,
            allocator.page_size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=options.dtype,
            device=options.device,
            layout=options.layout,
        )
        self.adapter = adapter_of(options.table, allocator, limits, options.device, self.backend.slots_by)
        self.host = self._host_pages(limits.host_pages + limits.host_cache_pages)
        self.moved_pages = 0

    def _host_pages(self, count: int) -> Tensor:
        """uint8 [count + 1, bytes a page]; pages from 1, as on the device."""
        pinned = self.pool.device.type == "cuda"
        return torch.empty((count + 1, self.pool.bytes_per_page), dtype=torch.uint8, pin_memory=pinned)

    # What a step does

    def begin(self, plan: StepPlan) -> Step | None:
        """Carry out a plan's copies and make its batch; None for an empty one."""
        self._carry_out(plan)
        if not plan.batch:
            return None
        for entry in plan.batch:
            if entry.request.seq.num_computed_tokens != entry.num_before:
                raise AllocatorError(
                    f"request {entry.request.id}: {entry.num_before} tokens before this step, its sequence says "
                    f"{entry.request.seq.num_computed_tokens}"
                )
        batch = self.adapter.batch([entry.request.seq for entry in plan.batch], [entry.num_new for entry in plan.batch])
        return Step(self.backend, batch)

    def _carry_out(self, plan: StepPlan) -> None:
        for direction, pages in plan.moves:
            {"out": self._to_host, "in": self._from_host, "copy": self.copy}[direction](pages)

    def copy(self, moves: Iterable[PageMove]) -> None:
        """Copy device pages, all layers in one launch; what a fork or a copy-on-write asks for as well."""
        pairs = [(move.src, move.dst) for move in moves if move.src != move.dst]
        if pairs:
            self.backend.copy_pages(self.pool.layers, *(list(ids) for ids in zip(*pairs, strict=True)))

    def _to_host(self, moves: ListLike[PageMove]) -> None:
        """One copy of each page: straight into its place, for runs of consecutive host pages together."""
        for run in _runs(moves, [move.dst for move in moves]):
            out = self.host[run[0].dst : run[-1].dst + 1]
            self.backend.gather_pages(self.pool.layers, [move.src for move in run], out)
        self.moved_pages += len(moves)

    def _from_host(self, moves: ListLike[PageMove]) -> None:
        """One copy of each page, straight from its place."""
        for run in _runs(moves, [move.src for move in moves]):
            packed = self.host[run[0].src : run[-1].src + 1]
            self.backend.scatter_pages(packed, self.pool.layers, [move.dst for move in run])
        self.moved_pages += len(moves)


def _runs(moves: ListLike[PageMove], host_pages: ListLike[int]) -> Iterator[list[PageMove]]:
    """The moves in order, cut where host pages do not follow one another."""
    run: list[PageMove] = []
    for at, move in enumerate(moves):
        if run and host_pages[at] != host_pages[at - 1] + 1:
            yield run
            run = []
        run.append(move)
    if run:
        yield run
