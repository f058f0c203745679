"""Concurrent requests that really fit on the card: bursts through the engine over pools that fill it.

A model of the given shape lies on the card, and a profile pass says what a step needs beside KV. Then each design is
sized as `capacity_sizing` says, from the measured weights and workspace, its pool and its tables are allocated, and a
burst of as many requests as the closed form promises (`capacity_law`) runs over them, until its demand has passed its
peak: scheduler, allocator, page table, its upload, store and attention. Every step computes one layer; in the fuller
half of the pool, whenever the pages in use have grown by 2 % of it, a step computes all layers. A burst of one more
must not be carried; where the promise is wrong, the search goes on from there. All designs run under the `vllm` policy,
so that they differ in memory alone. A row holds the bytes, line by line as sized and as allocated.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.capacity_law import Rules, demand, prefill_ends
from kvarena.experiments.capacity_law import capacity as promised
from kvarena.experiments.capacity_loads import Load, first
from kvarena.experiments.capacity_run import Burst, run_burst
from kvarena.experiments.capacity_sizing import Card, Server, Sizing, deployed_sglang, deployed_vllm, equal_bytes
from kvarena.experiments.engine.backends import Step
from kvarena.experiments.engine.executors import HiddenOutputs
from kvarena.experiments.engine.kernel_executor import KernelExecutor
from kvarena.experiments.engine.paged_memory import KVShape, MemoryOptions
from kvarena.experiments.engine.scheduler import SchedulerConfig, StepPlan
from kvarena.experiments.engine.step_time import StepTimeModel, compute_of
from kvarena.experiments.models import ModelShape

Panel = Literal["equal bytes", "as deployed"]
PANELS: tuple[Panel, ...] = ("equal bytes", "as deployed")
DESIGNS: dict[str, dict[str, Any]] = {
    "block, 16": {"kind": "block", "page_size": 16},
    "block, 32": {"kind": "block", "page_size": 32},
    "block, 64": {"kind": "block", "page_size": 64},
    "token, 1": {"kind": "token", "page_size": 1},
    "token, 16": {"kind": "token", "page_size": 16},
    "token, 64": {"kind": "token", "page_size": 64},
    "contiguous": {"kind": "contiguous", "page_size": 16, "sizing": "max"},
}
ALL_LAYERS_EVERY = 0.02  # share of the pool by which the pages in use have grown
TRIES = 6  # bursts on either side of the promise
BEHIND_PEAK = 25  # steps for which a burst goes on behind the peak of its demand


@dataclass(frozen=True)
class Place:
    """Where bursts run: the card with what is on it, the server's limits, the model's shape, the kernels."""

    card: Card
    server: Server
    shape: ModelShape
    num_heads: int
    device: str = "cuda"
    backend: str = "triton"
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv(self) -> KVShape:
        return KVShape(self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_dim)


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


def sizing(panel: Panel, design: str, place: Place) -> Sizing:
    """Pages and tables of a design. As deployed, contiguous is sized as vLLM sizes a card: it has no upstream."""
    spec, server = DESIGNS[design], place.server
    kind, size = spec["kind"], spec["page_size"]
    if panel == "equal bytes":
        return equal_bytes(place.card, kind, size, place.shape, server)
    if kind == "token":
        return deployed_sglang(place.card, size, place.shape, server)
    return deployed_vllm(place.card, kind, size, place.shape, replace(server, rows=min(server.rows, 1024)))


def rows(place: Place, loads: list[Load], shard: int = 0, shards: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each panel, design and load: those whose number is `shard` modulo `shards`.

    A CPU has the first panel alone: SGLang's rule keeps gigabytes of a card free, more than stand for one there.
    """
    panels = PANELS[:1] if place.device == "cpu" else PANELS
    cells = [(panel, design, load) for panel in panels for load in loads for design in DESIGNS]
    for cell in cells[shard::shards]:
        yield measured(*cell, place)


def measured(panel: Panel, design: str, load: Load, place: Place) -> dict[str, Any]:
    """One cell: the promise, what was carried, and the bytes."""
    size = sizing(panel, design, place)
    spec = dict(DESIGNS[design])
    if spec["kind"] == "contiguous":
        spec["max_model_len"] = place.server.max_model_len
    rules = _rules(size, spec, place)
    law = promised(load, rules)
    start = time.perf_counter()
    largest, burst, used = _search(law, load, rules, lambda part: _burst(part, spec, size, place))
    return {
        "panel": panel,
        "load": load.shape.name,
        "design": design,
        "sizing": size.lines(),
        "promised": law,
        "measured": largest,
        "seconds": round(time.perf_counter() - start, 1),
        **({} if burst is None else {"carried": burst.row()}),
        **used,
    }


def _rules(size: Sizing, spec: dict[str, Any], place: Place) -> Rules:
    contiguous = spec["kind"] == "contiguous"
    return Rules(
        num_pages=size.num_pages,
        page_size=size.page_size,
        shares=not contiguous,
        sizing="max" if contiguous else "pages",
        rows=size.rows,
        step_tokens=place.server.step_tokens,
        chunk_tokens=place.server.chunk_tokens,
        max_model_len=place.server.max_model_len,
    )


Attempt = tuple[Burst, dict[str, Any]]


def until_peak(load: Load, rules: Rules) -> Load:
    """The same burst with every reply cut some steps behind the peak of its demand: carried or not as before."""
    end = int(demand(load, rules).argmax()) + BEHIND_PEAK
    outputs = np.minimum(load.outputs, np.maximum(end - prefill_ends(load, rules), 1))
    requests = tuple(
        replace(each, num_output_tokens=tokens, output_ids=None)
        for each, tokens in zip(load.requests, outputs.tolist(), strict=True)
    )
    return replace(load, requests=requests, outputs=outputs)


def _search(
    law: int, load: Load, rules: Rules, run: Callable[[Load], Attempt]
) -> tuple[int | None, Burst | None, dict[str, Any]]:
    """(largest burst carried, its outcome, its bytes): from the promise up while bursts are carried, else down.

    None where the largest is further off than the tries go.
    """
    size, best = max(law, 1), None
    for _ in range(TRIES):
        if not 1 <= size <= len(load):
            break
        burst, used = run(until_peak(first(load, size), rules))
        if burst.carried:
            best = (size, burst, used)
            size += 1
        elif best is not None:
            return best[0], best[1], {**best[2], "refused": {"size": size, "stopped": burst.stopped}}
        else:
            size -= 1
    return (None, None, {}) if best is None else (best[0], best[1], best[2])


def _burst(load: Load, spec: dict[str, Any], size: Sizing, place: Place) -> Attempt:
    allocator = make_allocator(spec, num_pages=size.num_pages)
    server = place.server
    limits = SchedulerConfig(
        max_num_batched_tokens=max(server.step_tokens, size.rows),
        max_num_seqs=size.rows,
        max_model_len=server.max_model_len,
        result_lag=1,
    )
    model = StepTimeModel(place.shape, compute_of("llama-3-8b", place.shape), size.page_size)
    made: list[_FullCard] = []

    def make_executor(inner: KVAllocator, outputs: HiddenOutputs, config: SchedulerConfig) -> _FullCard:
        made.append(_FullCard(inner, outputs, config, place))
        return made[0]

    burst = run_burst(load, allocator, "vllm", limits, model, stop_early=True, make_executor=make_executor)
    used = made[0].used()
    made.clear()
    gc.collect()
    if place.device != "cpu":
        torch.cuda.empty_cache()
    return burst, used


class _FullCard(KernelExecutor):
    """Real pool and page table; one layer a step, all layers when the pool is fuller than ever by 2 %."""

    def __init__(self, inner: KVAllocator, outputs: HiddenOutputs, limits: SchedulerConfig, place: Place) -> None:
        before = _allocated(place.device)
        table = "req_to_token" if inner.kind == "token" else "block_table"
        options = MemoryOptions(backend=place.backend, table=table, dtype=place.dtype, device=place.device)  # type: ignore[arg-type]
        # A burst has no request that waits for a row, so rows for those who run are enough.
        rows = replace(limits, max_num_seqs=-(-limits.max_num_seqs // 2))
        super().__init__(inner, outputs, place.kv, place.num_heads, rows, options)
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
