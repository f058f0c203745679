"""Concurrent requests that really fit on the card: the capacity study's bursts over pools that fill it.

A model of the given shape lies on the card, and a profile pass says what a step needs beside KV; the cells of
`capacity_plan` are sized with these measured bytes. Then each design's pool and tables are allocated, and bursts run
over them as `capacity.measure` runs them, until their demand has passed its peak: scheduler, allocator, page table, its
upload, store and attention. Every step computes one layer; in the fuller half of the pool, whenever the pages in use
have grown by 2 % of it, a step computes all layers. The result is a file that `kvarena capacity --measured` reads; each
cell says what was allocated, line by line.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.capacity import Cell, Found
from kvarena.experiments.capacity_card import measured_cell
from kvarena.experiments.capacity_law import Rules, demand, largest, prefill
from kvarena.experiments.capacity_loads import Load
from kvarena.experiments.capacity_run import Burst, run_burst
from kvarena.experiments.capacity_sizing import Card
from kvarena.experiments.engine.backends import Step
from kvarena.experiments.engine.executors import HiddenOutputs
from kvarena.experiments.engine.kernel_executor import KernelExecutor
from kvarena.experiments.engine.paged_memory import KVShape, MemoryOptions
from kvarena.experiments.engine.scheduler import SchedulerConfig, StepPlan
from kvarena.experiments.engine.step_time import GpuTimes, compute_of
from kvarena.experiments.specs import allocator_entry

ALL_LAYERS_EVERY = 0.02  # share of the pool by which the pages in use have grown
BEHIND_PEAK = 25  # steps for which a burst goes on behind the peak of its demand


@dataclass(frozen=True)
class Place:
    """Where bursts run: device and kernels."""

    device: str = "cuda"
    backend: str = "triton"


def profile(model: Any, device: str, tokens: int, total_bytes: int | None = None) -> Card:
    """The card with this model on it: weights as allocated, workspace as the peak of one pass of `tokens` tokens.

    `total_bytes`: of the card; None: as its driver says.
    """
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    if device == "cpu":
        return Card("CPU", total_bytes or 2**30, weights, 0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        hidden = model.base_model(torch.ones(1, tokens, dtype=torch.int64, device=device), use_cache=False)[0]
        model.lm_head(hidden[0, -1024:])
    peak = torch.cuda.max_memory_allocated() - before
    del hidden
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1] if total_bytes is None else total_bytes
    return Card(torch.cuda.get_device_name(), total, weights, peak)


def rows(cells: list[Cell], place: Place) -> Iterator[dict[str, Any]]:
    """A row for each cell, as `capacity_card.write_measured` writes them."""
    for cell in cells:
        start = time.perf_counter()
        found, used = measured(cell, place)
        yield measured_cell(found, used, time.perf_counter() - start)


def measured(cell: Cell, place: Place) -> tuple[Found, dict[str, Any]]:
    """The largest burst carried, from the prediction on, and what was on the card for it."""
    tried: dict[int, tuple[Burst, dict[str, Any]]] = {}

    def carried(size: int) -> bool:
        if size not in tried:
            tried[size] = _burst(until_peak(cell.burst(size), cell.rules), cell, place)
        return tried[size][0].carried

    high = largest(carried, cell.limits.max_num_seqs + 1, cell.predicted)
    bursts = tuple(tried[size][0] for size in (high, high + 1) if size in tried)
    return Found(cell, high, tried[high + 1][0].stopped, bursts), tried[high][1] if high else {}


def until_peak(load: Load, rules: Rules) -> Load:
    """The same burst with every reply cut some steps behind the peak of its demand: carried or not as before."""
    end = int(demand(load, rules).argmax()) + BEHIND_PEAK
    outputs = np.minimum(load.outputs, np.maximum(end - prefill(load, rules).done, 1))
    requests = tuple(
        replace(each, num_output_tokens=tokens, output_ids=None)
        for each, tokens in zip(load.requests, outputs.tolist(), strict=True)
    )
    return replace(load, requests=requests, outputs=outputs)


def _burst(load: Load, cell: Cell, place: Place) -> tuple[Burst, dict[str, Any]]:
    made: list[_FullCard] = []

    def make_executor(inner: KVAllocator, outputs: HiddenOutputs, config: SchedulerConfig) -> _FullCard:
        made.append(_FullCard(inner, outputs, config, cell, place))
        return made[0]

    allocator = allocator_entry(cell.spec).build(cell.sizing.num_pages)
    burst = run_burst(
        load,
        allocator,
        cell.policy,
        cell.limits,
        cell.step_times(GpuTimes()),
        declared=cell.declared,
        stop_early=True,
        make_executor=make_executor,
    )
    used = made[0].used()
    made.clear()
    gc.collect()
    if place.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return burst, used


class _FullCard(KernelExecutor):
    """Real pool and page table; one layer a step, all layers when the pool is fuller than ever by 2 %."""

    def __init__(
        self, inner: KVAllocator, outputs: HiddenOutputs, limits: SchedulerConfig, cell: Cell, place: Place
    ) -> None:
        before = _allocated(place.device)
        table = "req_to_token" if inner.kind == "token" else "block_table"
        dtype, shape = getattr(torch, cell.shape.dtype), cell.shape
        options = MemoryOptions(backend=place.backend, table=table, dtype=dtype, device=place.device)  # type: ignore[arg-type]
        # A burst has no request that waits for a row, so rows for those who run are enough.
        rows = replace(limits, max_num_seqs=-(-limits.max_num_seqs // 2))
        heads = compute_of(cell.model, shape).num_heads if place.device != "cpu" else shape.num_kv_heads
        super().__init__(
            inner, outputs, KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim), heads, rows, options
        )
        self.place, self.before, self.after = place, before, _allocated(place.device)
        self.full_at, self.full_steps, self.full_us, self.finite = inner.num_pages // 2, 0, 0.0, True

    def launch(self, plan: StepPlan) -> None:
        step = self.memory.begin(plan)
        if step is None:
            return
        in_use = self.allocator.num_pages - sum(self.allocator.room())
        if in_use - self.full_at > ALL_LAYERS_EVERY * self.allocator.num_pages:
            self.full_at, self.full_steps = in_use, self.full_steps + 1
            self.full_us = 1e6 * self._timed(step)
            self.finite &= self.last_output is not None and bool(self.last_output.isfinite().all())
        else:
            self._one_layer(step)

    def _one_layer(self, step: Step) -> None:
        tokens, caches = step.batch.num_tokens, (self.memory.pool.key(0), self.memory.pool.value(0))
        step.store(self._k[:tokens], self._v[:tokens], *caches)
        self.last_output = step.attend(self._q[:tokens], *caches)

    def used(self) -> dict[str, Any]:
        """What is on the card, bytes, and the last step of all layers."""
        peak = self.before if self.place.device == "cpu" else torch.cuda.max_memory_allocated()
        return {
            "pool_bytes": self.memory.pool.nbytes,
            "tables_bytes": self.memory.adapter.nbytes(),
            "allocated_bytes": self.after - self.before,
            "peak_bytes": peak,
            "full_steps": self.full_steps,
            "full_step_us": round(self.full_us, 1),
            "pages_at_full_step": self.full_at,
            "finite": self.finite,
        }


def _allocated(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_allocated()
