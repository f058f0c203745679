"""The main job: the same requests through several allocators, at equal bytes, and everything measured.

A cell is one seed, one pool size and one allocator. Cells run one after the other, each on a fresh allocator, so the
memory of a run is that of its largest cell.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from kvarena.allocators.config import Design
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments import metrics
from kvarena.experiments.alike import page_notes, unlike_requests
from kvarena.experiments.cells import Measured, about, add_ceilings, ceiling_rate, floats, keyed
from kvarena.experiments.config import SECTION_OF, Config, config_from_keywords, load_config
from kvarena.experiments.loading import Workload, load_workloads
from kvarena.experiments.outputs import as_path
from kvarena.experiments.partial import Interrupted, cell_name, keep_cells, partial_folder, refuse_other_partial
from kvarena.experiments.pools import Cell, plan
from kvarena.experiments.progress import ProgressBar
from kvarena.experiments.provenance import provenance
from kvarena.experiments.replay import Lane, Replay
from kvarena.experiments.results import Result, refuse_foreign
from kvarena.experiments.samples import Samples
from kvarena.experiments.specs import AllocatorEntry, allocator_entry
from kvarena.experiments.traces.outputs import with_outputs


@dataclass
class _Done:
    """The finished cells, and the one that runs: what there is to keep at any moment."""

    cells: list[Measured[Cell]] = field(default_factory=list)
    flying: tuple[Cell, Replay] | None = None


def compare(
    trace: Any = None,
    *,
    allocators: Any = None,
    pool: str | int | Sequence[str | int] | None = None,
    model: str | Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    requests: int | None = None,
    format: str | None = None,
    unit: Literal["tokens", "ids"] | None = None,
    replies: Literal["trace", "none", "unreachable", "inferred", "recorded", "band"] | None = None,
    resample: int | None = None,
    options: Mapping[str, Any] | None = None,
    live: int | None = None,
    outputs: Literal["none", "replay"] | None = None,
    reply_chunk: int | None = None,
    declared_max_tokens: int | None = None,
    too_long: Literal["error", "reject"] | None = None,
    steps_every: int | None = None,
    kernel_batches: int | None = None,
    config: Config | Path | str | None = None,
    out: Path | str | None = None,
    progress: bool = False,
) -> Result:
    """Replay one trace through several allocators and return the tables.

    trace       a built-in workload, a held trace's name, a path, a DataFrame, a list of token lists, or a Trace
    allocators  preset names, tables, `kv.block(...)`, `kv.token(...)`, KVAllocator classes or instances; one or several
    config      a Config or the path of a TOML file; every other keyword is a field of it (see `config.py`) and wins
    out         folder to write the finished result to (`Result.save`)
    progress    a bar with the time left, on stderr

    Raises ValueError naming the field for a bad argument, and for a request that no pool of the run can hold.
    """
    given = locals()
    folder = None if out is None else as_path(out, "out")
    fields = {name: given[name] for name in SECTION_OF if name != "trace"}
    base = load_config(Path(config)) if isinstance(config, str | Path) else config
    if not isinstance(base, Config | None):
        raise ValueError(f"config: expected a Config or the path of a TOML file, found {config!r}")
    read_as = unit or (base or Config()).workload.unit
    entries = None if allocators is None else [allocator_entry(spec, read_as) for spec in _several(allocators)]
    named = {} if trace is None else {"trace": str(trace) if isinstance(trace, str | Path) else "in memory"}
    specs = None if entries is None else tuple(_config_table(entry) for entry in entries)
    chosen = config_from_keywords({**fields, **named, "allocators": specs}, base)
    result = run(chosen, source=trace, progress=progress, out=folder)
    if folder is not None:
        result.save(folder)
    return result


_ONE = (str, Mapping, Design, type, KVAllocator)


def _several(allocators: Any) -> Iterable[Any]:
    """One allocator is a list of one."""
    return allocators if isinstance(allocators, Iterable) and not isinstance(allocators, _ONE) else [allocators]


def _config_table(entry: AllocatorEntry) -> dict[str, Any]:
    return {"source": entry.source} if entry.design is None else entry.as_toml()


def run(config: Config, *, source: Any = None, progress: bool = False, out: Path | None = None) -> Result:
    """Carry out a config. `source` stands for its trace when that is an object in memory."""
    started = time.time()
    if out is not None:
        refuse_foreign(out)
        refuse_other_partial(partial_folder(out))
    entries = config.entries()
    workloads = load_workloads(config, source)
    cells = plan(config, workloads, entries)
    done, samples = _Done(), Samples(config, cells)
    try:
        with ProgressBar(cells, progress) as bar:
            for cell in cells:
                _run_cell(cell, config, samples, bar, done)
                gc.collect()  # a tree's nodes name their parents, so an allocator goes by collection alone
        return _result(config, workloads, cells, done, samples.check(), started)
    except KeyboardInterrupt:
        raise _interrupted(config, workloads, cells, done, started, out) from None


def _run_cell(cell: Cell, config: Config, samples: Samples, bar: ProgressBar, done: _Done) -> None:
    """On an allocator of its own, gone before the next cell builds one."""
    replay = Replay(cell.entry.build(cell.budget.num_pages), config.engine, sample_steps=samples.steps(cell))
    done.flying = (cell, replay)
    lane = replay.run(cell.workload.requests, bar.tick(cell))
    samples.add(cell, lane)
    done.cells.append(_measured(cell, lane, config, _lower_edge(cell, config)))
    done.flying = None


def _lower_edge(cell: Cell, config: Config) -> Lane | None:
    """With replies = "band": the cell once more, with replies that take room and serve nothing."""
    if config.workload.replies != "band":
        return None
    workload = cell.workload
    requests, _ = with_outputs(
        workload.requests, workload.trace.visible, "unreachable", tokens_per_id=workload.tokens_per_id
    )
    engine = config.engine.model_copy(update={"outputs": "replay", "steps_every": len(requests) + 1})
    return Replay(cell.entry.build(cell.budget.num_pages), engine).run(requests)


# --- collecting ---


def _keys(cell: Cell) -> dict[str, Any]:
    return {"seed": cell.workload.seed, "pool_bytes": cell.pool_bytes, "allocator": cell.entry.name}


def _measured(cell: Cell, lane: Lane, config: Config, lower: Lane | None) -> Measured[Cell]:
    keys = _keys(cell)
    size, pages = cell.entry.page_size, cell.budget.num_pages
    requests = pd.DataFrame([asdict(row) for row in lane.requests])
    add_ceilings(requests, cell.workload.reuse, cell.entry)
    if lower is not None:
        requests["hit_tokens_unreachable"] = [row.hit_tokens for row in lower.requests]
    token_bytes = config.pool.shape.bytes_per_token * cell.workload.tokens_per_id
    summary = {
        **keys,
        "label": cell.entry.label,
        "page_size": size,
        "num_pages": pages,
        "requests": len(lane.requests),
        "token_hit_rate_ceiling": ceiling_rate(requests, cell.entry),
        **metrics.summarise_requests(lane.requests),
        **({} if lower is None else _unreachable(lower)),
        **metrics.summarise_steps(lane.steps, pages, size, token_bytes),
    }
    steps = keyed(keys, pd.DataFrame([asdict(row) for row in lane.steps]))
    timings = [{**keys, **row} for row in metrics.summarise_times(lane.nanoseconds)]
    return Measured(cell, keyed(keys, requests), steps, summary, timings)


def _unreachable(lane: Lane) -> dict[str, float | None]:
    found = metrics.summarise_requests(lane.requests)
    return {f"{name}_unreachable": found[name] for name in ("token_hit_rate", "token_hit_rate_last_half")}


def _result(
    config: Config,
    workloads: list[Workload],
    cells: list[Cell],
    done: _Done,
    kernel_check: dict[str, Any],
    started: float,
) -> Result:
    from kvarena.experiments.divergence import record_divergence

    result = _tables(config, workloads, cells, done, kernel_check, started)
    result.manifest["divergence"] = record_divergence(result, config, workloads[0], cells)
    return result


def _tables(
    config: Config,
    workloads: list[Workload],
    cells: list[Cell],
    done: _Done,
    kernel_check: dict[str, Any],
    started: float,
) -> Result:
    """What the finished cells add up to, at least one of them."""
    manifest = {**_manifest(config, workloads, cells), "kernel_check": kernel_check, "divergence": None}
    manifest["warnings"] += unlike_requests(one.requests for one in done.cells)
    resolved = config.resolved()
    resolved["pool"]["pool"] = [f"{size} B" for size in manifest["pools"]]
    path = workloads[0].trace.path
    inputs = [path] if path is not None and path.is_file() else []
    return Result(
        resolved,
        manifest,
        pd.concat([one.requests for one in done.cells], ignore_index=True),
        floats(pd.concat([one.steps for one in done.cells], ignore_index=True)),
        floats(pd.DataFrame([one.summary for one in done.cells])),
        pd.DataFrame([row for one in done.cells for row in one.timings]),
        provenance([w.seed for w in workloads], inputs, started),
    )


def _interrupted(
    config: Config, workloads: list[Workload], cells: list[Cell], done: _Done, started: float, out: Path | None
) -> Interrupted:
    """Keep the finished cells, and of the one that ran the requests that had ended."""
    finished = [one.cell for one in done.cells]
    missing = [cell_name(_keys(cell)) for cell in cells[len(finished) :]]
    flying = pd.DataFrame()
    if missing and done.flying is not None and done.flying[0] is cells[len(finished)]:
        cell, replay = done.flying
        flying = keyed(_keys(cell), pd.DataFrame([asdict(row) for row in replay.ended()]))
    result = None
    if finished:
        result = _tables(config, workloads, finished, done, {"status": "not run", "reason": "interrupted"}, started)
    names = [cell_name(_keys(cell)) for cell in finished]
    return keep_cells(out, "compare", result, config.resolved(), names, missing or ["kernel check"], flying)


def _manifest(config: Config, workloads: list[Workload], cells: list[Cell]) -> dict[str, Any]:
    """What a reader of the tables needs beside them."""
    pools = sorted({cell.pool_bytes for cell in cells})
    token_bytes = config.pool.shape.bytes_per_token
    return {
        "kind": "compare",
        "trace": workloads[0].trace.name,
        "visible": asdict(workloads[0].trace.visible),
        "allocators": [about(entry) for entry in {cell.entry.name: cell.entry for cell in cells}.values()],
        "pools": pools,
        "reference_pool": pools[len(pools) // 2],
        "working_set_bytes": {str(w.seed): w.working_set_tokens * token_bytes for w in workloads},
        "tokens_per_id": workloads[0].tokens_per_id,
        "bytes_per_token": token_bytes * workloads[0].tokens_per_id,
        "budgets": [{"seed": c.workload.seed, "allocator": c.entry.name, **c.budget.lines()} for c in cells],
        "warnings": _warnings(config, workloads, list({cell.entry.name: cell.entry for cell in cells}.values())),
    }


def _warnings(config: Config, workloads: list[Workload], entries: list[AllocatorEntry]) -> list[str]:
    found = [text for w in workloads for text in w.trace.warnings]
    if len(workloads) < len(config.workload.seed_list):
        found.append(f"{workloads[0].trace.name} has no randomness: 1 run in place of {len(config.workload.seed_list)}")
    visible = workloads[0].trace.visible
    if not visible.reuse:
        found.append("the trace has lengths only: its hit rates say nothing about it")
    if visible.grain > 1:
        found.append(
            f"page rounding below {visible.grain} tokens is not observable here: one id of the trace stands for "
            f"{visible.grain} tokens"
        )
    if config.workload.unit == "ids":
        found += page_notes({entry.name: entry.page_size for entry in entries}, workloads[0].tokens_per_id)
    if config.workload.replies == "band":
        found.append(
            "replies without ids: rates lie between none (prompts alone fill the cache) and unreachable (replies take "
            "room and serve nothing)"
        )
    elif config.engine.outputs == "none" and visible.outputs == "recorded":
        found.append("prompts only: the trace's replies were not replayed (outputs = 'replay' does)")
    elif visible.outputs in ("none", "unreachable"):
        found.append(f"hits on generated tokens are not observable here: the trace's outputs are {visible.outputs!r}")
    if config.engine.live == 1:
        found.append("publishing time is not observable here: one live request at a time (live = N overlaps them)")
    elif not visible.publish_time:
        found.append("publishing time is not observable here: sharers of a prefix do not arrive close together")
    return list(dict.fromkeys(found))
