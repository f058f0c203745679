"""`kvarena run`: one policy over one allocator on a simulated clock, and the result folder that it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from kvarena.experiments import metrics
from kvarena.experiments.budget import Budget, Tables, fit_pool
from kvarena.experiments.ceilings import ceilings
from kvarena.experiments.config import Config, ConfigError, config_from_mapping
from kvarena.experiments.engine.arrivals import Arrivals
from kvarena.experiments.engine.fixed_clock import FixedReplay, Moments, read_schedule, schedule_of
from kvarena.experiments.engine.latency import Limits
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.run_config import RunConfig, RunEngineConfig
from kvarena.experiments.engine.simulate import Record, RequestRow, RunOptions, Simulation
from kvarena.experiments.engine.step_time import HOST, GpuTimes, StepTimeModel, compute_of, load_gpu_times
from kvarena.experiments.loading import Workload, load_workloads
from kvarena.experiments.pools import pool_sizes
from kvarena.experiments.provenance import provenance
from kvarena.experiments.results import Result, refuse_foreign
from kvarena.experiments.specs import AllocatorEntry, allocator_entry

NOISE_SIGMA = 0.5  # of the logarithm, for declared = "noisy"
POLICY_LABELS = {"vllm": "vLLM 0.32.0 scheduling rules", "sglang": "SGLang 0.5.22 scheduling rules"}


@dataclass(frozen=True)
class RunCell:
    """One seed and one pool size of a run."""

    workload: Workload
    pool_bytes: int
    budget: Budget


def run_engine(
    config: RunConfig, *, source: Any = None, out: Path | None = None, tick: Callable[[], None] | None = None
) -> Result:
    """Carry out a run. `source` stands for its trace when that is an object in memory; `tick` is called once a
    request. Raises ValueError naming the field for what cannot be run."""
    started = time.time()
    if out is not None:
        refuse_foreign(out)
    entry, gpu = config.entry(), load_gpu_times(None if (path := config.engine.step_times) is None else Path(path))
    sizing, workloads = _load(config, source)
    cells = [
        RunCell(workload, size, _budget(config, entry, workload, size))
        for workload in workloads
        for size in pool_sizes(sizing, workloads, [entry])
    ]
    frames = _Frames()
    for cell in cells:
        allocator = MeteredAllocator(entry.build(cell.budget.num_pages))
        if config.engine.clock == "fixed":
            record = _fixed(config, cell, allocator, gpu)
        else:
            record = _simulation(config, entry, cell, allocator, gpu).run(tick)
        frames.add(config, entry, cell, allocator, record)
        if config.engine.clock == "both":
            again = MeteredAllocator(entry.build(cell.budget.num_pages))
            frames.summary[-1].update(fixed_columns(_fixed(config, cell, again, gpu)))
    return frames.result(config, entry, cells, gpu, started)


def _load(config: RunConfig, source: Any) -> tuple[Config, list[Workload]]:
    """The requests, and a config of the comparison that sizes pools as `kvarena compare` does.

    Replies count as reuse where the trace names their tokens; where one id stands for several, they cannot.
    """
    sizing = _compare_config(config, "replay")
    try:
        return sizing, load_workloads(sizing, source)
    except ConfigError as error:
        if error.field != "engine.outputs":
            raise
    sizing = _compare_config(config, "none")
    return sizing, load_workloads(sizing, source)


def _compare_config(config: RunConfig, outputs: str) -> Config:
    return config_from_mapping(
        {
            "workload": config.workload.model_dump(),
            "pool": config.pool.model_dump(),
            "engine": {"live": config.engine.max_num_seqs, "too_long": "reject", "outputs": outputs},
            "allocators": [config.allocator],
        }
    )


def _fixed(config: RunConfig, cell: RunCell, allocator: MeteredAllocator, gpu: GpuTimes) -> Record:
    """The cell under the fixed clock."""
    engine = config.engine
    limits = Limits(engine.ttft_ms, engine.tpot_ms, engine.e2el_ms)
    if engine.schedule is None:
        schedule = _neutral_schedule(config, cell, gpu)
    else:
        schedule = read_schedule(Path(engine.schedule), cell.workload.seed, cell.workload.requests)
    return FixedReplay(allocator, cell.workload.requests, schedule, limits, engine.steps_every).run()


def _neutral_schedule(config: RunConfig, cell: RunCell, gpu: GpuTimes) -> list[Moments]:
    """Of the same scheduler and arrivals over a pool of the same bytes in which nothing is shared or kept."""
    entry = allocator_entry({"kind": "block", "page_size": 16, "prefix_cache": False})
    budget = _budget(config, entry, cell.workload, cell.pool_bytes)
    allocator = MeteredAllocator(entry.build(budget.num_pages))
    return schedule_of(_simulation(config, entry, cell, allocator, gpu).run().requests)


def fixed_columns(record: Record) -> dict[str, float | int | None]:
    """What the fixed clock says, for a summary row of the feedback clock."""
    rows = record.requests
    return {
        "fixed_token_hit_rate": _hits(rows).token_hit_rate,
        "fixed_left_out": sum(row.end == "rejected" for row in rows),
        "fixed_cut": sum(row.end == "pool" for row in rows),
    }


def simulation_again(
    resolved: dict[str, Any], name: str, pool_bytes: int, seed: int
) -> tuple[Simulation, AllocatorEntry]:
    """One cell of a finished run, ready to run again. `resolved` is the config of its result.

    Raises ValueError naming the field for what cannot be run, a trace that was in memory among them.
    """
    table = next(entry for entry in resolved["allocators"] if entry["name"] == name)
    data = {key: value for key, value in resolved.items() if key not in ("allocators", "preset")}
    config = RunConfig(**data, allocator=table)
    entry, gpu = config.entry(), load_gpu_times(None if (path := config.engine.step_times) is None else Path(path))
    _, workloads = _load(config, None)
    workload = next(one for one in workloads if one.seed == seed)
    cell = RunCell(workload, pool_bytes, _budget(config, entry, workload, pool_bytes))
    allocator = MeteredAllocator(entry.build(cell.budget.num_pages))
    return _simulation(config, entry, cell, allocator, gpu), entry


def _budget(config: RunConfig, entry: AllocatorEntry, workload: Workload, size: int) -> Budget:
    tables = Tables(config.engine.max_num_seqs, config.engine.max_model_len)
    return fit_pool(size, entry.kind, entry.page_size, config.pool.shape, tables, tokens_per_id=workload.tokens_per_id)


def _simulation(
    config: RunConfig, entry: AllocatorEntry, cell: RunCell, allocator: MeteredAllocator, gpu: GpuTimes
) -> Simulation:
    engine, shape = config.engine, config.pool.shape
    model = StepTimeModel(
        shape,
        compute_of(config.pool.model, shape),
        entry.page_size,
        gpu,
        HOST[engine.host_table(entry.kind)],
        engine.host_base_us / 1e6,
    )
    arrivals = Arrivals(cell.workload.requests, sessions=engine.sessions, speed=engine.speed, think_s=engine.think_s)
    options = RunOptions(
        declared_by(engine, cell.workload.seed),
        Limits(engine.ttft_ms, engine.tpot_ms, engine.e2el_ms),
        engine.steps_every,
        engine.check_every,
    )
    page_bytes = shape.bytes_per_page(entry.page_size) * cell.workload.tokens_per_id
    return Simulation(allocator, engine.scheduler, engine.scheduler_config(page_bytes), model, arrivals, options)


def declared_by(engine: RunEngineConfig, seed: int) -> Callable[[int, int], int]:
    """What the scheduler is told of an output of so many tokens, for the request of that index."""
    if engine.declared == "cap":
        return lambda tokens, index: engine.declared_max_tokens
    if engine.declared == "true":
        return lambda tokens, index: tokens

    def noisy(tokens: int, index: int) -> int:
        factor = np.random.default_rng([seed, index, 0xDEC1]).lognormal(0.0, NOISE_SIGMA)
        return max(tokens, round(tokens * factor))

    return noisy


class _Frames:
    """Tables of all cells."""

    def __init__(self) -> None:
        self.requests: list[pd.DataFrame] = []
        self.steps: list[pd.DataFrame] = []
        self.summary: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def add(
        self, config: RunConfig, entry: AllocatorEntry, cell: RunCell, allocator: MeteredAllocator, record: Record
    ) -> None:
        keys = {"seed": cell.workload.seed, "pool_bytes": cell.pool_bytes, "allocator": entry.name}
        requests = _with_latency(pd.DataFrame([asdict(row) for row in record.requests]))
        reuse = cell.workload.reuse
        requests["prefix_tokens"], requests["source"] = reuse.prefix_tokens, reuse.source
        requests["ceiling_tokens"] = ceilings(
            reuse, requests["num_prompt_tokens"], entry.hit_grain, entry.last_token_rule
        )
        self.requests.append(_keyed(keys, requests))
        self.steps.append(_keyed(keys, pd.DataFrame([asdict(row) for row in record.steps])))
        self.summary.append({**keys, **summarise(config, entry, cell, allocator, record, requests)})
        times = {**allocator.nanoseconds, "step": record.step_ns}
        self.timings += [{**keys, **row} for row in metrics.summarise_times(times)]
        self.warnings += _cell_warnings(record.requests)

    def result(
        self, config: RunConfig, entry: AllocatorEntry, cells: list[RunCell], gpu: GpuTimes, started: float
    ) -> Result:
        workloads = list({cell.workload.seed: cell.workload for cell in cells}.values())
        pools = sorted({cell.pool_bytes for cell in cells})
        resolved = config.resolved()
        resolved["pool"]["pool"] = [f"{size} B" for size in pools]
        trace = workloads[0].trace
        inputs = [trace.path] if trace.path is not None and trace.path.is_file() else []
        return Result(
            resolved,
            _manifest(config, entry, cells, workloads, pools, gpu, self.warnings),
            pd.concat(self.requests, ignore_index=True),
            pd.concat(self.steps, ignore_index=True),
            pd.DataFrame(self.summary),
            pd.DataFrame(self.timings),
            provenance([workload.seed for workload in workloads], inputs, started),
        )


def summarise(
    config: RunConfig,
    entry: AllocatorEntry,
    cell: RunCell,
    allocator: MeteredAllocator,
    record: Record,
    requests: pd.DataFrame,
) -> dict[str, Any]:
    """One summary row. Conservation: requests = served + rejected; hit rates over first admissions only."""
    rows, size, pages = record.requests, entry.page_size, cell.budget.num_pages
    whole, half = _hits(rows), _hits([row for row in rows if row.index >= len(rows) // 2])
    served = [row for row in rows if row.end != "rejected"]
    span = record.duration_s - min((row.arrival_s for row in rows), default=0.0)
    admitted = requests[requests["admitted"]]
    token_bytes = config.pool.shape.bytes_per_token * cell.workload.tokens_per_id
    return {
        "label": entry.label,
        "policy": config.engine.scheduler,
        "page_size": size,
        "num_pages": pages,
        "requests": len(rows),
        "token_hit_rate_ceiling": metrics.ratio(
            int(admitted["ceiling_tokens"].sum()), int(admitted["num_prompt_tokens"].sum())
        )
        if entry.shares_prefixes
        else None,
        "token_hit_rate": whole.token_hit_rate,
        "token_hit_rate_last_half": half.token_hit_rate,
        "request_hit_rate": whole.request_hit_rate,
        "served": len(served),
        "rejected": len(rows) - len(served),
        "cut": sum(row.cut_output_tokens > 0 for row in served),
        "cut_output_tokens": sum(row.cut_output_tokens for row in served),
        "prompt_tokens": whole.prompt_tokens,
        "hit_tokens": whole.hit_tokens,
        "readmissions": sum(row.readmissions for row in rows),
        "readmitted_hit_tokens": sum(row.readmitted_hit_tokens for row in rows),
        "output_tokens": record.output_tokens,
        "preemptions": record.preemptions,
        "recomputed_tokens": sum(row.recomputed_tokens for row in rows),
        "host_hit_tokens": (from_host := sum(row.host_hit_tokens for row in rows if row.admitted)),
        "host_token_hit_rate": metrics.ratio(from_host, whole.prompt_tokens),
        "swapped_tokens": sum(row.swapped_tokens for row in rows),
        "swapped_out_bytes": record.swapped_out_pages * size * token_bytes,
        "swapped_in_bytes": record.swapped_in_pages * size * token_bytes,
        "evicted_pages": allocator.evicted_pages,
        "duplicate_pages_seen": allocator.duplicate_pages,
        "steps": record.num_steps,
        "mean_batch": metrics.ratio(record.batch_entries, record.busy_steps),
        "duration_s": span,
        "output_tokens_per_s": metrics.ratio(record.output_tokens, span),
        "requests_per_s": metrics.ratio(len(served), span),
        "gpu_share": metrics.ratio(record.gpu_s, span),
        "host_share": metrics.ratio(record.host_s, span),
        "prefill_share": metrics.ratio(record.prefill_s, span),
        **record.latencies.summary(span),
        **metrics.summarise_steps(record.steps, pages, size, token_bytes),  # type: ignore[arg-type]  # same fields
    }


def _hits(rows: list[RequestRow]) -> metrics.HitCounter:
    """First admissions alone: what a request finds of itself after a preemption is no reuse."""
    counter = metrics.HitCounter()
    for row in rows:
        if row.admitted:
            counter.admitted(str(row.index), row.num_prompt_tokens, row.hit_tokens)
    return counter


def _with_latency(requests: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds a request: TTFT, TPOT (none for one token), E2EL, which ends with the last token."""
    first, last = (requests[name].astype(float) for name in ("first_token_s", "last_token_s"))
    served = requests["end"] != "rejected"
    gaps = (requests["output_tokens"] - 1).where(requests["output_tokens"] > 1)
    requests["ttft_ms"] = 1e3 * (first - requests["arrival_s"])
    requests["tpot_ms"] = (1e3 * (last - first) / gaps).where(served)
    requests["e2el_ms"] = (1e3 * (last - requests["arrival_s"])).where(served)
    return requests


def _keyed(keys: dict[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    for place, (name, value) in enumerate(keys.items()):
        frame.insert(place, name, value)
    return frame


def _cell_warnings(rows: list[RequestRow]) -> list[str]:
    """What was refused or cut, with the numbers of the first one."""
    rejected = [row for row in rows if row.end == "rejected"]
    cut = [row for row in rows if row.cut_output_tokens and row.end != "rejected"]
    found = []
    if rejected:
        found.append(f"{len(rejected)} of {len(rows)} requests rejected; the first: {rejected[0].message}")
    if cut:
        tokens = sum(row.cut_output_tokens for row in cut)
        found.append(f"{len(cut)} of {len(rows)} requests cut short by a limit, {tokens} tokens in all")
    return found


def _manifest(
    config: RunConfig,
    entry: AllocatorEntry,
    cells: list[RunCell],
    workloads: list[Workload],
    pools: list[int],
    gpu: GpuTimes,
    warnings: list[str],
) -> dict[str, Any]:
    trace, shape, engine = workloads[0].trace, config.pool.shape, config.engine
    oracle = ["declared = 'true': the scheduler knows output lengths (oracle)"] if engine.declared == "true" else []
    times = [] if gpu.calibrated else [f"step times {gpu.source}"]
    return {
        "kind": "run",
        "trace": trace.name,
        "visible": asdict(trace.visible),
        "policy": {"name": engine.scheduler, "label": POLICY_LABELS[engine.scheduler]},
        "step_times": asdict(gpu),
        "goodput_limits": Limits(engine.ttft_ms, engine.tpot_ms, engine.e2el_ms).text(),
        "allocators": [
            {
                "name": entry.name,
                "label": entry.label,
                "kind": entry.kind,
                "page_size": entry.page_size,
                "last_token_rule": entry.last_token_rule,
                "shares_prefixes": entry.shares_prefixes,
            }
        ],
        "pools": pools,
        "reference_pool": pools[len(pools) // 2],
        "working_set_bytes": {str(w.seed): w.working_set_tokens * shape.bytes_per_token for w in workloads},
        "tokens_per_id": workloads[0].tokens_per_id,
        "bytes_per_token": shape.bytes_per_token * workloads[0].tokens_per_id,
        "budgets": [{"seed": cell.workload.seed, "allocator": entry.name, **cell.budget.lines()} for cell in cells],
        "ceilings": [],
        "warnings": list(dict.fromkeys([*trace.warnings, *times, *oracle, *warnings])),
        "kernel_check": {"status": "not run", "reason": "an engine run on a simulated clock computes no attention"},
        "divergence": None,
    }
