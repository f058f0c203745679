"""Times of single steps on real pools and kernels: what a step-time model is held against, out of sample.

Executor `kernels` runs a workload over each allocator: scheduler, allocator, page table, store and attention of every
layer, no model. A row is one step: what was in its batch, microseconds of the kernels (GPU time; the launches are
queued behind a wait, so that gaps between them do not count), of the page table and its upload, and of the
scheduler with its allocator. Beside them, for the rest of a step: the linear layers of a model at several numbers of
tokens, whole prefill passes, and pages on their way to the host and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from kvarena.experiments.engine.engine import Engine, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs
from kvarena.experiments.engine.kernel_executor import KernelExecutor
from kvarena.experiments.engine.paged_memory import KVShape, MemoryOptions, TableKind
from kvarena.experiments.engine.scheduler import SchedulerConfig, StepPlan
from kvarena.experiments.engine.step_time import step_amounts
from kvarena.experiments.engine.validation import (
    LIMITS,
    LOADS,
    MAX_OUTPUT,
    MAX_STEPS,
    StepLoad,
    arrivals,
    pool_of,
    run_load,
)
from torch import Tensor

WAIT_US = 15_000  # the GPU waits so long before a step: longer than its launches take


LLAMA_8B = KVShape(32, 8, 128)


@dataclass(frozen=True)
class Setup:
    """Device, backend and shape of a run; `limits` of its scheduler, `max_steps` and `max_output` to keep it short.

    wait_us  the GPU waits so long before a step; 0: it does not, so that a step takes as long as its launches
    """

    shape: KVShape = LLAMA_8B
    num_heads: int = 32
    device: str = "cuda"
    backend: str = "triton"
    dtype: torch.dtype = torch.bfloat16
    policy: str = "vllm"
    limits: SchedulerConfig = LIMITS
    max_steps: int = MAX_STEPS
    max_output: int = MAX_OUTPUT
    wait_us: int = WAIT_US

    def options(self, table: TableKind) -> MemoryOptions:
        return MemoryOptions(backend=self.backend, table=table, dtype=self.dtype, device=self.device)


def step_rows(name: str, load: StepLoad, design: str, setup: Setup) -> Iterator[dict[str, Any]]:
    """A row a step that computed something, of one workload over one allocator: the step-time model's amounts, and

    longest_decode  tokens of the longest decoding sequence; extends  [[tokens before, new tokens], ...]
    kernels_us      store and attention of all layers; host_us  page table and upload; scheduler_us  what comes before
    """
    allocator, table = pool_of(load, design)
    outputs = HiddenOutputs()
    executor = _WaitingExecutor(allocator, outputs, setup.shape, setup.num_heads, setup.limits, setup.options(table))
    executor.wait_us = setup.wait_us
    engine = Engine(make_scheduler(setup.policy, executor.allocator, setup.limits), executor)
    requests = list(arrivals(load, outputs, setup.max_output))  # made before the clock runs
    records = run_load(engine, load, iter(requests), setup.max_steps)
    while True:
        start, before = time.perf_counter(), len(executor.times.tokens)
        record = next(records, None)
        wall = time.perf_counter() - start
        if record is None:
            return
        if len(executor.times.tokens) > before:
            host, kernels = executor.times.host_s[-1], executor.times.kernels_s[-1]
            yield {
                "workload": name,
                "allocator": design,
                "step": record.step,
                **asdict(step_amounts(record.plan)),
                "longest_decode": max((e.end for e in record.plan.batch if e.num_new == 1), default=0),
                "extends": [[each.num_before, each.num_new] for each in record.plan.batch if each.num_new > 1],
                "admitted": len(record.plan.admitted),
                "preempted": len(record.plan.preempted),
                "kernels_us": round(1e6 * kernels, 1),
                "host_us": round(1e6 * host, 1),
                "scheduler_us": round(1e6 * (wall - executor.launch_s), 1),
                "launch_bound": executor.launch_bound,
                "eager": not setup.wait_us,
            }


class _WaitingExecutor(KernelExecutor):
    """On a GPU, steps are timed with their launches queued behind a wait; `launch_s` is the last launch's whole time,
    `launch_bound` says that the launches took longer than the wait."""

    launch_s = 0.0
    launch_bound = False
    wait_us = WAIT_US

    def launch(self, plan: StepPlan) -> None:
        start = time.perf_counter()
        super().launch(plan)
        self.launch_s = time.perf_counter() - start

    def _timed(self, step: Any) -> float:
        if self.memory.pool.device.type != "cuda" or not self.wait_us:
            return super()._timed(step)
        seconds, self.launch_bound = gpu_seconds(lambda: self._run(step), self.wait_us)
        return seconds


def gpu_seconds(run: Callable[[], object], wait_us: int = WAIT_US) -> tuple[float, bool]:
    """(GPU seconds of what `run` launches, whether launching took longer than the wait before it)."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(wait_us * 1980))  # cycles at the card's top clock
    begin.record()
    start = time.perf_counter()
    run()
    end.record()
    launching = time.perf_counter() - start
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, launching > 0.8e-6 * wait_us


def linear_rows(model: Any, tokens: list[int]) -> Iterator[dict[str, Any]]:
    """GPU time of all projections and MLPs of a model, and logits of 256 at most, by tokens of a batch."""
    weight = next(model.parameters())
    for count in tokens:
        hidden = torch.randn(count, model.config.hidden_size, device=weight.device).to(weight.dtype)
        us = _median_us(lambda hidden=hidden: _linear(model, hidden))  # type: ignore[misc]
        head = _median_us(lambda hidden=hidden: model.lm_head(hidden[: min(len(hidden), 256)]))  # type: ignore[misc]
        yield {"tokens": count, "us": us, "head_us": head}


def _linear(model: Any, hidden: Tensor) -> None:
    for layer in model.base_model.layers:
        attention = layer.self_attn
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            project(hidden)
        attention.o_proj(hidden.new_empty(len(hidden), attention.o_proj.in_features).fill_(0.5))
        layer.mlp(hidden)


def swap_rows(shape: KVShape, dtype: torch.dtype, device: str, pages: list[int]) -> Iterator[dict[str, Any]]:
    """Time of so many pages of 16 tokens to pinned host memory and back, all layers, one copy each way."""
    from kvarena.kernels.copy import gather_pages, scatter_pages
    from kvarena.kernels.pool import KVPool

    pool = KVPool(shape.num_layers, max(pages), 16, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    for count in pages:
        ids = list(range(1, count + 1))
        host = torch.empty((count, pool.bytes_per_page), dtype=torch.uint8, pin_memory=device != "cpu")
        yield {
            "pages": count,
            "bytes": host.numel(),
            "out_us": _median_us(lambda ids=ids, host=host: gather_pages(pool.layers, ids, host)),  # type: ignore[misc]
            "in_us": _median_us(lambda ids=ids, host=host: scatter_pages(host, pool.layers, ids)),  # type: ignore[misc]
        }


def _median_us(run: Callable[[], object], repeats: int = 5) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            if torch.cuda.is_available():
                times.append(gpu_seconds(run)[0])
            else:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
    return round(1e6 * sorted(times[1:])[repeats // 2], 1)


def describe(setup: Setup) -> dict[str, Any]:
    """What the rows were taken with."""
    loads = {name: asdict(load) for name, load in LOADS.items()}
    limits = {name: getattr(setup.limits, name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    return {
        "shape": asdict(setup.shape),
        "num_heads": setup.num_heads,
        "policy": setup.policy,
        **limits,
        "max_output": setup.max_output,
        "lists_a_step": 1,
        "loads": loads,
    }
