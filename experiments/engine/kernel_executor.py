"""Executor `kernels`: real pools, page tables and kernels on random K, V and queries; no model.

Tokens come from the hidden outputs, as with the simulated executor, so that scheduler and allocator decide the same.
What a step costs is measured: host time of page table and upload, and the time of store and attention.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

import torch
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.engine.backends import Step
from kvarena.experiments.engine.executors import HiddenOutputs
from kvarena.experiments.engine.paged_memory import KVShape, MemoryOptions, PagedMemory
from kvarena.experiments.engine.scheduler import Sample, SchedulerConfig, StepPlan
from torch import Tensor


@dataclass
class StepTimes:
    """Seconds of each step that ran something: `host_s` copies' launch, rows and upload; `kernels_s` the kernels
    (GPU: between events, else wall time)."""

    tokens: list[int] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    kernels_s: list[float] = field(default_factory=list)

    def note(self, tokens: int, host_s: float, kernels_s: float) -> None:
        self.tokens.append(tokens)
        self.host_s.append(host_s)
        self.kernels_s.append(kernels_s)


class KernelExecutor:
    """Runs each plan's store and attention in every layer. `allocator` is what the scheduler has to use.

    num_heads  query heads; KV heads, layers and head_dim are the pool's
    seed       of the random K, V and queries: one pool of them, as many tokens as a step can have
    """

    def __init__(
        self,
        allocator: KVAllocator,
        outputs: HiddenOutputs,
        shape: KVShape,
        num_heads: int,
        limits: SchedulerConfig,
        options: MemoryOptions | None = None,
        seed: int = 0,
    ) -> None:
        self.outputs = outputs
        self.memory = PagedMemory(allocator, shape, limits, options or MemoryOptions())
        self.allocator = self.memory.allocator
        self.times = StepTimes()
        # The same in whole nanoseconds, as the tables of a run want them.
        self.step_ns, self.kernel_ns = array("q"), array("q")
        self.last_output: Tensor | None = None  # of the last layer, [T, HQ, D]
        device, dtype = self.memory.pool.device, self.memory.options.dtype
        generator = torch.Generator(device).manual_seed(seed)
        tokens, heads = self.memory.adapter.max_batch_tokens, shape.num_kv_heads
        k, v = torch.randn(2, tokens, heads, shape.head_dim, generator=generator, device=device).to(dtype)
        self._k, self._v = k, v
        self._q = torch.randn(tokens, num_heads, shape.head_dim, generator=generator, device=device).to(dtype)

    def launch(self, plan: StepPlan) -> None:
        """Copies, page table, then store and attention of every layer."""
        start = time.perf_counter()
        step = self.memory.begin(plan)
        if step is None:
            return
        host_s = time.perf_counter() - start
        kernels_s = self._timed(step)
        self.times.note(plan.num_tokens, host_s, kernels_s)
        self.step_ns.append(round(1e9 * host_s))
        self.kernel_ns.append(round(1e9 * kernels_s))

    def _timed(self, step: Step) -> float:
        if self.memory.pool.device.type != "cuda":
            start = time.perf_counter()
            self._run(step)
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._run(step)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _run(self, step: Step) -> None:
        tokens = step.batch.num_tokens
        for layer in range(self.memory.pool.num_layers):
            caches = self.memory.pool.key(layer), self.memory.pool.value(layer)
            step.store(self._k[:tokens], self._v[:tokens], *caches)
            self.last_output = step.attend(self._q[:tokens], *caches)

    def collect(self, plan: StepPlan) -> list[Sample | None]:
        return [self.outputs.sample(entry) for entry in plan.batch]
