"""The tables of `kvarena run`: the rows of its cells, what they add up to, and what is kept of an interrupted run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments import metrics
from kvarena.experiments.alike import page_notes
from kvarena.experiments.budget import Budget
from kvarena.experiments.ceilings import Reuse, measure_reuse
from kvarena.experiments.cells import Measured, about, add_ceilings, ceiling_rate, floats, keyed
from kvarena.experiments.engine.latency import Limits
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.run_config import RunConfig
from kvarena.experiments.engine.simulate import Record, RequestRow
from kvarena.experiments.engine.step_time import GpuTimes
from kvarena.experiments.loading import Workload
from kvarena.experiments.partial import Interrupted, cell_name, keep_cells
from kvarena.experiments.provenance import provenance
from kvarena.experiments.results import KEYS, Result
from kvarena.experiments.specs import AllocatorEntry

POLICY_LABELS = {"vllm": "vLLM 0.32.0 scheduling rules", "sglang": "SGLang 0.5.22 scheduling rules"}

_NO_KERNEL_CHECK = {
    "simulated": "an engine run on a simulated clock computes no attention",
    "kernels": "kernels ran on random K and V, whose results nobody compares here",
}


@dataclass(frozen=True)
class RunCell:
    """One seed and one pool size of a run."""

    workload: Workload
    pool_bytes: int
    budget: Budget


@dataclass
class Done:
    """The finished cells, and the record of the one that runs: what there is to keep at any moment."""

    cells: list[Measured[RunCell]] = field(default_factory=list)
    flying: tuple[RunCell, Record] | None = None


def keys_of(cell: RunCell, entry: AllocatorEntry) -> dict[str, Any]:
    return {"seed": cell.workload.seed, "pool_bytes": cell.pool_bytes, "allocator": entry.name}


def _reuse(config: RunConfig, entry: AllocatorEntry, workload: Workload) -> Reuse:
    if not entry.serves_last_tokens(config.engine.result_lag):
        return workload.reuse
    return measure_reuse(workload.requests, replies=True, last_token=True)


def measured(
    config: RunConfig, entry: AllocatorEntry, cell: RunCell, allocator: MeteredAllocator, record: Record
) -> Measured[RunCell]:
    keys = keys_of(cell, entry)
    requests = _with_latency(pd.DataFrame([asdict(row) for row in record.requests]))
    add_ceilings(requests, _reuse(config, entry, cell.workload), entry)
    summary = {**keys, **summarise(config, entry, cell, allocator, record, requests)}
    times = {
        **allocator.nanoseconds,
        "step": record.step_ns,
        "adapter": record.adapter_ns,
        "kernels": record.kernel_ns,
    }
    return Measured(
        cell,
        keyed(keys, requests),
        keyed(keys, pd.DataFrame([asdict(row) for row in record.steps])),
        summary,
        [{**keys, **row} for row in metrics.summarise_times(times)],
        _cell_warnings(record.requests),
    )


def tables(
    config: RunConfig, entry: AllocatorEntry, cells: list[RunCell], gpu: GpuTimes, done: Done, started: float
) -> Result:
    """What the finished cells add up to, at least one of them; `cells` are those."""
    workloads = list({cell.workload.seed: cell.workload for cell in cells}.values())
    pools = sorted({cell.pool_bytes for cell in cells})
    resolved = config.resolved()
    resolved["pool"]["pool"] = [f"{size} B" for size in pools]
    trace = workloads[0].trace
    inputs = [trace.path] if trace.path is not None and trace.path.is_file() else []
    warnings = [text for one in done.cells for text in one.warnings]
    return Result(
        resolved,
        _manifest(config, entry, cells, workloads, pools, gpu, warnings),
        pd.concat([one.requests for one in done.cells], ignore_index=True),
        pd.concat([one.steps for one in done.cells], ignore_index=True),
        floats(pd.DataFrame([one.summary for one in done.cells])),
        _timings([row for one in done.cells for row in one.timings]),
        provenance([workload.seed for workload in workloads], inputs, started),
    )


def _timings(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A row a verb; where nobody was let in and no step was taken, no row of these columns."""
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=[*KEYS, *metrics.TIME_COLUMNS])


def interrupted(
    config: RunConfig,
    entry: AllocatorEntry,
    cells: list[RunCell],
    gpu: GpuTimes,
    done: Done,
    started: float,
    out: Path | None,
) -> Interrupted:
    """Keep the finished cells, and of the one that ran the requests that had ended."""
    finished = [one.cell for one in done.cells]
    names = [cell_name(keys_of(cell, entry)) for cell in cells]
    flying = pd.DataFrame()
    if len(finished) < len(cells) and done.flying is not None and done.flying[0] is cells[len(finished)]:
        cell, record = done.flying
        rows = pd.DataFrame([asdict(row) for row in sorted(record.requests, key=lambda row: row.index)])
        flying = keyed(keys_of(cell, entry), _with_latency(rows)) if len(rows) else rows
    result = tables(config, entry, finished, gpu, done, started) if finished else None
    count = len(finished)
    return keep_cells(out, "run", result, config.resolved(), names[:count], names[count:] or ["the tables"], flying)


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
    whole, half = metrics.count_hits(rows), metrics.count_hits(row for row in rows if row.index >= len(rows) // 2)
    served = [row for row in rows if row.end != "rejected"]
    span = record.duration_s - min((row.arrival_s for row in rows), default=0.0)
    clocked = 0.0 if config.engine.clock == "fixed" else span  # events of a fixed clock take no time: no shares of it
    token_bytes = config.pool.shape.bytes_per_token * cell.workload.tokens_per_id
    return {
        "label": entry.label,
        "policy": config.engine.scheduler,
        "page_size": size,
        "num_pages": pages,
        "requests": len(rows),
        "token_hit_rate_ceiling": ceiling_rate(requests, entry),
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
        "gpu_share": metrics.ratio(record.gpu_s, clocked),
        "host_share": metrics.ratio(record.host_s, clocked),
        "prefill_share": metrics.ratio(record.prefill_s, clocked),
        **record.latencies.summary(span),
        **metrics.summarise_steps(record.steps, pages, size, token_bytes),
    }


def _with_latency(requests: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds a request: TTFT, TPOT (none for one token), E2EL, which ends with the last token."""
    first, last = (requests[name].astype(float) for name in ("first_token_s", "last_token_s"))
    served = requests["end"] != "rejected"
    gaps = (requests["reply_tokens"] - 1).where(requests["reply_tokens"] > 1)
    requests["ttft_ms"] = 1e3 * (first - requests["arrival_s"])
    requests["tpot_ms"] = (1e3 * (last - first) / gaps).where(served)
    requests["e2el_ms"] = (1e3 * (last - requests["arrival_s"])).where(served)
    return requests


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
    if config.workload.unit == "ids":
        times += page_notes({entry.name: entry.page_size}, workloads[0].tokens_per_id)
    return {
        "kind": "run",
        "trace": trace.name,
        "visible": asdict(trace.visible),
        "policy": {"name": engine.scheduler, "label": POLICY_LABELS[engine.scheduler]},
        "step_times": asdict(gpu),
        "goodput_limits": Limits(engine.ttft_ms, engine.tpot_ms, engine.e2el_ms).text(),
        "allocators": [about(entry)],
        "pools": pools,
        "reference_pool": pools[len(pools) // 2],
        "working_set_bytes": {str(w.seed): w.working_set_tokens * shape.bytes_per_token for w in workloads},
        "tokens_per_id": workloads[0].tokens_per_id,
        "bytes_per_token": shape.bytes_per_token * workloads[0].tokens_per_id,
        "budgets": [{"seed": cell.workload.seed, "allocator": entry.name, **cell.budget.lines()} for cell in cells],
        "ceilings": [],
        "warnings": list(dict.fromkeys([*trace.warnings, *times, *oracle, *warnings])),
        "kernel_check": {"status": "not run", "reason": _NO_KERNEL_CHECK[engine.executor]},
        "divergence": None,
    }
