"""Experiments with an engine: a scheduler on a simulated clock, or an allocator's own time beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarena.experiments.results import Result

REPEATS = 5  # runs of which an allocator's time is the median


def allocator_share(requests: int, seed: int) -> dict[str, float]:
    """Time of all allocator calls, measured here, over the simulated run's time (H200, Llama-3-8B), chat."""
    designs = {"token": {"name": "sglang"}, "block": {"name": "vllm"}}
    return {
        f"share_{kind}": _allocator_seconds(design, "chat", requests, seed)
        / _run_seconds(design, "chat", requests, seed)
        for kind, design in designs.items()
    }


def zero_hit_cost(requests: int, seed: int) -> dict[str, float]:
    """Allocator time with the prefix cache on minus off, over the simulated run's time, prompts that share nothing."""
    values = {}
    for kind, name in (("block", "vllm"), ("token", "sglang")):
        on, off = (
            _allocator_seconds({"name": name, "prefix_cache": cache}, "no_reuse", requests, seed)
            for cache in (True, False)
        )
        values[f"cost_{kind}"] = max(0.0, on - off) / _run_seconds({"name": name}, "no_reuse", requests, seed)
    return values


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


def _run_seconds(allocator: Mapping[str, Any], workload: str, requests: int, seed: int) -> float:
    """Time in which a server is busy: all requests at once, host time left out."""
    summary = _run(allocator, workload, requests, seed, pool="16 GiB", speed=1e6, host="none", result_lag=0).summary
    return float(summary["duration_s"].iloc[0])


def _allocator_seconds(allocator: Mapping[str, Any], workload: str, requests: int, seed: int) -> float:
    """Time of all allocator calls of the same run, the median of five."""
    runs = [
        _run(allocator, workload, requests, seed, pool="16 GiB", speed=1e6, host="none", result_lag=0)
        .timings["total_ms"]
        .sum()
        for _ in range(REPEATS)
    ]
    return median(float(run) for run in runs) / 1e3
