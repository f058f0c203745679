"""Experiments with an engine: a scheduler on a simulated clock, or an allocator's own time beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.again import IN_MEMORY

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.allocators.interface import KVAllocator
    from kvarena.experiments.results import Result
    from kvarena.experiments.traces.base import Request, Trace

AT_ONCE: dict[str, Any] = {"speed": 1e6, "host": "none", "result_lag": 0}  # the server is never idle, no host time
FIRST_TURNS = {"prompt_median": 117.0, "reply_median": 245.0}  # of ShareGPT's lengths, means 161 and 338
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
    tiers: tuple[dict[str, Any], ...] = ({}, {"host_pool": "64 GiB"})
    for size in sizes:
        allocator = {"kind": "block", "page_size": size}
        common: dict[str, Any] = {"speed": 50.0, "declared_max_tokens": 1024}
        recompute, swap = (
            _run(allocator, "chat", requests, seed, **{**common, **tier}).summary.iloc[0] for tier in tiers
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


def best_block_size(lengths: str, sizes: Sequence[int], requests: int, seed: int) -> dict[str, float]:
    """Mean end-to-end latency at each page size over that of the best one, block, vLLM's rules."""
    rows = _drawn(lengths, requests, seed)
    found = {size: _together({"kind": "block", "page_size": size}, rows, pool="1 GiB") for size in sizes}
    latency = {size: float(one["e2el_mean_ms"]) for size, one in found.items()}
    return {f"latency_{size}": value / min(latency.values()) for size, value in latency.items()}


def over_contiguous(systems: Sequence[int], question: int, reply: int, requests: int) -> dict[str, float]:
    """Throughput of block with its prefix cache over contiguous runs of the true length, requests behind one prompt."""
    from kvarena.experiments.claims.allocation import _behind_one_prompt

    values = {}
    for system in systems:
        rows = [replace(row, num_output_tokens=reply) for row in _behind_one_prompt(requests, system, question)]
        block, runs = (_together(one, rows) for one in ({"name": "vllm"}, {"kind": "contiguous", "sizing": "oracle"}))
        values[f"gain_{system}"] = float(block["output_tokens_per_s"] / runs["output_tokens_per_s"])
    return values


def free_order(workloads: Sequence[str], requests: int, seed: int) -> dict[str, float]:
    """Throughput with pages without a hash freed to the head of the queue, over freed to its tail like all others."""
    values = {}
    for name in workloads:
        head, tail = (
            _run({"kind": "block", "unhashed_to_head": to_head}, name, requests, seed, pool="10 %", **AT_ONCE)
            for to_head in (True, False)
        )
        values[f"gain_{name}"] = _throughput(head) / _throughput(tail)
    return values


def cache_net(requests: int, seed: int) -> dict[str, float]:
    """Time that the token design's cache saves minus what the allocator takes more, over the run without it."""
    values: dict[str, float] = {}
    for name, workload, options in (("first_turns", "no_reuse", FIRST_TURNS), ("chat", "chat", {})):
        on, off = (
            _busy({"name": "sglang", "prefix_cache": cache}, workload, requests, seed, **options)
            for cache in (True, False)
        )
        longer, shorter = (float(one.summary["duration_s"].iloc[0]) for one in (off, on))
        costs = [_allocator_seconds(on) - _allocator_seconds(off) for _ in range(REPEATS)]
        values |= _with_range(f"net_{name}", [(longer - shorter - cost) / longer for cost in costs])
    return values


def cache_gain(workloads: Sequence[str], requests: int, seed: int) -> dict[str, float]:
    """Throughput with the token design's cache over without it, and latency without over with it; `best_` of all."""
    values: dict[str, float] = {}
    for name in workloads:
        on, off = (
            _run({"name": "sglang", "prefix_cache": cache}, name, requests, seed, pool="16 GiB", **AT_ONCE)
            for cache in (True, False)
        )
        latency = [float(one.summary["e2el_mean_ms"].iloc[0]) for one in (off, on)]
        values |= {f"throughput_{name}": _throughput(on) / _throughput(off), f"latency_{name}": latency[0] / latency[1]}
    for what in ("throughput", "latency"):
        values[f"best_{what}"] = max(values[f"{what}_{name}"] for name in workloads)
    return values


def gain_at_hits(rate: float, replies: Sequence[int], requests: int, seed: int) -> dict[str, float]:
    """Prompt tokens a second with the block design's cache over without it, at a hit rate that is asked for."""
    from kvarena.experiments.workloads import hit_rate

    rows = list(hit_rate.make(seed, hit_rate.Shape(token_hit_rate=rate, num_requests=requests)))
    values = {}
    for reply in replies:
        asked = [replace(row, num_output_tokens=reply, output_ids=None) for row in rows]
        on, off = (_together({"name": "vllm", "prefix_cache": cache}, asked, pool="64 GiB") for cache in (True, False))
        values[f"gain_{reply}"] = float(off["duration_s"] / on["duration_s"])
    return values


def page_tpot(requests: int, seed: int) -> dict[str, float]:
    """Mean time per output token at pages of 16 over pages of 64, chat at the trace's own rate."""
    values = {}
    for kind in ("block", "token"):
        small, large = (
            _run({"kind": kind, "page_size": size}, "chat", requests, seed, pool="16 GiB").summary["tpot_mean_ms"]
            for size in (16, 64)
        )
        values[f"{kind}_16_over_64"] = float(small.iloc[0] / large.iloc[0])
    return values


def _drawn(lengths: str, requests: int, seed: int) -> list[Request]:
    """Requests of these lengths that share nothing."""
    from kvarena.experiments.claims.allocation import _request
    from kvarena.experiments.forking import ALPACA, SHAREGPT

    one = {shape.name: shape for shape in (ALPACA, SHAREGPT)}[lengths]
    rows, start = [], 0
    for index, (prompt, reply) in enumerate(one.draw(np.random.default_rng(seed), requests)):
        ids = np.arange(start, start + prompt, dtype=np.int32)
        rows.append(replace(_request(index, ids), num_output_tokens=reply))
        start += prompt
    return rows


def _together(allocator: Mapping[str, Any], rows: list[Request], pool: str = "2 GiB") -> pd.Series[Any]:
    """The summary of a run in which all requests come at once."""
    from kvarena.experiments.claims.allocation import _trace

    return _run(allocator, _trace(rows, "drawn"), len(rows), 0, pool=pool, **AT_ONCE).summary.iloc[0]


def _throughput(result: Result) -> float:
    return float(result.summary["output_tokens_per_s"].iloc[0])


def _run(
    allocator: Mapping[str, Any],
    workload: str | Trace,
    requests: int,
    seed: int,
    pool: str = "2 GiB",
    options: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Result:
    from kvarena.experiments.engine.run import run_engine
    from kvarena.experiments.engine.run_config import run_config

    source = None if isinstance(workload, str) else workload
    config = {
        "workload": {
            "trace": IN_MEMORY if source else workload,
            "requests": requests,
            "seeds": [seed],
            "options": dict(options or {}),
        },
        "pool": {"pool": pool, "model": "llama-3-8b"},
        "engine": engine,
        "allocator": dict(allocator),
    }
    return run_engine(run_config(config), source=source)


def _busy(allocator: Mapping[str, Any], workload: str, requests: int, seed: int, **options: Any) -> Result:
    """A run in which the server is never idle: all requests at once, host time left out."""
    return _run(allocator, workload, requests, seed, pool="16 GiB", options=options, **AT_ONCE)


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
