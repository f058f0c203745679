"""Experiments with an engine: a scheduler on a simulated clock, or an allocator's own time beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarena.allocators.interface import KVAllocator
    from kvarena.experiments.results import Result

REPEATS = 5  # runs of which an allocator's CPU time is the median


def allocator_share(requests: int, seed: int) -> dict[str, float]:
    """CPU time in all allocator calls, measured here, over the simulated run's time (H200, Llama-3-8B), chat."""
    values: dict[str, float] = {}
    for kind, design in (("token", {"name": "sglang"}), ("block", {"name": "vllm"})):
        whole = _busy(design, "chat", requests, seed)
        seconds = float(whole.summary["duration_s"].iloc[0])
        values |= _with_range(f"share_{kind}", [_allocator_seconds(whole) / seconds for _ in range(REPEATS)])
    return values


def zero_hit_cost(requests: int, seed: int) -> dict[str, float]:
    """Allocator CPU time with the prefix cache on minus off, over the simulated run's time, prompts that share nothing.
    On and off run in turns."""
    values: dict[str, float] = {}
    for kind, name in (("block", "vllm"), ("token", "sglang")):
        on, off = (_busy({"name": name, "prefix_cache": cache}, "no_reuse", requests, seed) for cache in (True, False))
        seconds = float(on.summary["duration_s"].iloc[0])
        costs = [(_allocator_seconds(on) - _allocator_seconds(off)) / seconds for _ in range(REPEATS)]
        values |= _with_range(f"cost_{kind}", costs)
        values[f"cost_{kind}"] = max(0.0, values[f"cost_{kind}"])
    return values


def _with_range(measure: str, found: Sequence[float]) -> dict[str, float]:
    """The median, and beside it the range of the repeats, which the table shows."""
    return {measure: median(found), f"{measure}.low": min(found), f"{measure}.high": max(found)}


def swap_against_recompute(requests: int, seed: int, sizes: Sequence[int]) -> dict[str, float]:
    """Mean end-to-end latency with recomputation over that with swapping, vLLM's rules, at a pool that preempts."""
    values = {}
    for size in sizes:
        allocator = {"kind": "block", "page_size": size}
        recompute, swap = (
            _run(allocator, "chat", requests, seed, speed=50.0, declared_max_tokens=1024, **tier).summary.iloc[0]
            for tier in ({}, {"host_pool": "64 GiB"})
        )
        if not (recompute["preemptions"] and swap["swapped_tokens"]):
            raise ValueError(f"swap_against_recompute: nothing was preempted at pages of {size}; the pool is too large")
        values[f"ratio_{size}"] = float(recompute["e2el_mean_ms"] / swap["e2el_mean_ms"])
    return values


def order(requests: int, seed: int, workloads: Sequence[str]) -> dict[str, float]:
    """Hit rate under longest-prefix-match order over the infinite-cache ceiling, token design, overloaded."""
    values = {}
    for name in workloads:
        summary = _run(
            {"name": "sglang"}, name, requests, seed, pool="10 %", scheduler="sglang", order="lpm", speed=50.0
        ).summary.iloc[0]
        values[f"lpm_of_ceiling_{name}"] = float(summary["token_hit_rate"] / summary["token_hit_rate_ceiling"])
    return values


def _run(
    allocator: Mapping[str, Any], workload: str, requests: int, seed: int, pool: str = "2 GiB", **engine: Any
) -> Result:
    from kvarena.experiments.engine.run import run_engine
    from kvarena.experiments.engine.run_config import run_config

    config = {
        "workload": {"trace": workload, "requests": requests, "seeds": [seed]},
        "pool": {"pool": pool, "model": "llama-3-8b"},
        "engine": engine,
        "allocator": dict(allocator),
    }
    return run_engine(run_config(config))


def _busy(allocator: Mapping[str, Any], workload: str, requests: int, seed: int) -> Result:
    """A run in which the server is never idle: all requests at once, host time left out."""
    return _run(allocator, workload, requests, seed, pool="16 GiB", speed=1e6, host="none", result_lag=0)


def _allocator_seconds(result: Result) -> float:
    """CPU seconds of this process in all allocator calls of the same run, run again: what else the machine does counts
    for little."""
    from kvarena.experiments.engine.run import record_again
    from kvarena.experiments.ladder_times import CpuClock

    clocks: list[CpuClock] = []

    def watch(inner: KVAllocator, *_: Any) -> KVAllocator:
        clocks.append(CpuClock(inner))
        return clocks[-1]

    seed = int(result.summary["seed"].iloc[0])
    record_again(result.config, result.allocators[0], result.pools[0], seed, watch=watch)
    return clocks[-1].nanoseconds / 1e9
