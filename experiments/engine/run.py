"""`kvarena run`: one policy over one allocator on a simulated clock, and the result folder that it writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments import metrics
from kvarena.experiments.budget import Budget, Tables, fit_pool
from kvarena.experiments.config import Config, ConfigError, config_from_mapping
from kvarena.experiments.engine.arrivals import Arrivals
from kvarena.experiments.engine.fixed_clock import FixedReplay, Moments, read_schedule, schedule_of
from kvarena.experiments.engine.latency import Limits
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.run_config import RunConfig, RunEngineConfig
from kvarena.experiments.engine.run_executors import executor_of
from kvarena.experiments.engine.run_tables import Done, RunCell, interrupted, measured, tables
from kvarena.experiments.engine.simulate import Record, RunOptions, Simulation
from kvarena.experiments.engine.step_time import HOST, GpuTimes, StepTimeModel, compute_of, load_gpu_times, table_of
from kvarena.experiments.loading import Workload, load_workloads
from kvarena.experiments.partial import partial_folder, refuse_other_partial
from kvarena.experiments.pools import pool_sizes
from kvarena.experiments.results import Result, refuse_foreign
from kvarena.experiments.specs import AllocatorEntry, allocator_entry
from kvarena.experiments.traces.base import Request

NOISE_SIGMA = 0.5  # of the logarithm, for declared = "noisy"


def run_engine(
    config: RunConfig, *, source: Any = None, out: Path | None = None, tick: Callable[[], None] | None = None
) -> Result:
    """Carry out a run. `source` stands for its trace when that is an object in memory; `tick` is called once a
    request. Raises ValueError naming the field for what cannot be run."""
    started = time.time()
    if out is not None:
        refuse_foreign(out)
        refuse_other_partial(partial_folder(out))
    entry, gpu = config.entry(), load_gpu_times(None if (path := config.engine.step_times) is None else Path(path))
    sizing, workloads = _load(config, source)
    cells = [
        RunCell(workload, size, _budget(config, entry, workload, size))
        for workload in workloads
        for size in pool_sizes(sizing, workloads, [entry])
    ]
    done = Done()
    try:
        for cell in cells:
            _run_cell(config, entry, cell, gpu, done, tick)
        return tables(config, entry, cells, gpu, done, started)
    except KeyboardInterrupt:
        raise interrupted(config, entry, cells, gpu, done, started, out) from None


def _run_cell(
    config: RunConfig, entry: AllocatorEntry, cell: RunCell, gpu: GpuTimes, done: Done, tick: Callable[[], None] | None
) -> None:
    """Run one cell into `done`: whole, or at an interruption as far as it got."""
    allocator = MeteredAllocator(entry.build(cell.budget.num_pages))
    if config.engine.clock == "fixed":
        fixed = _fixed(config, cell, allocator, gpu)
        done.flying = (cell, fixed.record)
        fixed.run()
    else:
        simulation = _simulation(config, entry, cell, allocator, gpu)
        done.flying = (cell, simulation.record)
        simulation.run(tick)
    found = measured(config, entry, cell, allocator, done.flying[1])
    if config.engine.clock == "both":
        again = MeteredAllocator(entry.build(cell.budget.num_pages))
        found.summary.update(fixed_columns(_fixed(config, cell, again, gpu).run()))
    done.cells.append(found)
    done.flying = None


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


def _fixed(config: RunConfig, cell: RunCell, allocator: MeteredAllocator, gpu: GpuTimes) -> FixedReplay:
    """The cell under the fixed clock, ready to run."""
    engine = config.engine
    limits = Limits(engine.ttft_ms, engine.tpot_ms, engine.e2el_ms)
    if engine.schedule is None:
        schedule = _neutral_schedule(config, cell, gpu)
    else:
        schedule = read_schedule(Path(engine.schedule), cell.workload.seed, cell.workload.requests)
    return FixedReplay(allocator, cell.workload.requests, schedule, limits, engine.steps_every)


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
        "fixed_token_hit_rate": metrics.count_hits(rows).token_hit_rate,
        "fixed_left_out": sum(row.end == "rejected" for row in rows),
        "fixed_cut": sum(row.end == "pool" for row in rows),
    }


Watch = Callable[[KVAllocator, AllocatorEntry, Sequence[Request]], KVAllocator]


def simulation_again(
    resolved: dict[str, Any], name: str, pool_bytes: int, seed: int
) -> tuple[Simulation, AllocatorEntry]:
    """One cell of a finished run, ready to run again. `resolved` is the config of its result.

    Raises ValueError naming the field for what cannot be run, a trace that was in memory among them.
    """
    config, entry, cell, gpu = _cell_again(resolved, name, pool_bytes, seed)
    allocator = MeteredAllocator(entry.build(cell.budget.num_pages))
    return _simulation(config, entry, cell, allocator, gpu), entry


def record_again(
    resolved: dict[str, Any], name: str, pool_bytes: int, seed: int, *, watch: Watch
) -> tuple[Record, AllocatorEntry, list[Request]]:
    """Run one cell of a finished run again, on its clock, over an allocator that `watch` may wrap. Raises as
    `simulation_again`."""
    config, entry, cell, gpu = _cell_again(resolved, name, pool_bytes, seed)
    requests = cell.workload.requests
    allocator = MeteredAllocator(watch(entry.build(cell.budget.num_pages), entry, requests))
    if config.engine.clock == "fixed":
        return _fixed(config, cell, allocator, gpu).run(), entry, requests
    return _simulation(config, entry, cell, allocator, gpu).run(), entry, requests


def cells_of(resolved: dict[str, Any]) -> Iterator[tuple[AllocatorEntry, Workload, int, int]]:
    """Every cell of a finished run from the config of its result: allocator, requests, pool bytes, pages."""
    for table in resolved["allocators"]:
        config = _config_again(resolved, table)
        entry = config.entry()
        sizing, workloads = _load(config, None)
        for workload in workloads:
            for size in pool_sizes(sizing, workloads, [entry]):
                yield entry, workload, size, _budget(config, entry, workload, size).num_pages


def _config_again(resolved: dict[str, Any], table: dict[str, Any]) -> RunConfig:
    return RunConfig(**{k: v for k, v in resolved.items() if k not in ("allocators", "preset")}, allocator=table)


def _cell_again(
    resolved: dict[str, Any], name: str, pool_bytes: int, seed: int
) -> tuple[RunConfig, AllocatorEntry, RunCell, GpuTimes]:
    config = _config_again(resolved, next(entry for entry in resolved["allocators"] if entry["name"] == name))
    entry, gpu = config.entry(), load_gpu_times(None if (path := config.engine.step_times) is None else Path(path))
    _, workloads = _load(config, None)
    workload = next(one for one in workloads if one.seed == seed)
    return config, entry, RunCell(workload, pool_bytes, _budget(config, entry, workload, pool_bytes)), gpu


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
        table_of(entry.kind),
        engine.max_model_len,
    )
    arrivals = Arrivals(cell.workload.requests, sessions=engine.sessions, speed=engine.speed, think_s=engine.think_s)
    options = RunOptions(
        declared_by(engine, cell.workload.seed),
        Limits(engine.ttft_ms, engine.tpot_ms, engine.e2el_ms),
        engine.steps_every,
        engine.check_every,
        engine.samples,
        engine.beam_width,
    )
    page_bytes = shape.bytes_per_page(entry.page_size) * cell.workload.tokens_per_id
    limits = engine.scheduler_config(page_bytes)
    made = executor_of(config, cell.budget.num_pages, entry.page_size, cell.workload.tokens_per_id)
    return Simulation(allocator, engine.scheduler, limits, model, arrivals, options, made)


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
