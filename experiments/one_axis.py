"""One axis: everything that the page size decides, from 1 to 256 tokens, for both designs, on one figure.

    hit rate      token hit rate of a replay at one pool, sized in bytes
    tail waste    mean free slots in the last page of a live request, tokens
    concurrency   largest burst that fits the same bytes (closed form of `capacity_law.py`, tables paid from the bytes)
    kernel time   decode on an H200, from saved measurements; page sizes that were not measured are gaps
    host time     CPU time of the allocator for each request, median over rounds; this machine's

The best page size of a workload is that of the least time a request: prefill of the tokens that were not served (by the
step-time model), and the allocator's time. It leaves out the kernel: its time is that of a batch of 64 requests,
and moves by 2 % over all sizes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments import partial
from kvarena.experiments.budget import PoolTooSmallError, format_bytes
from kvarena.experiments.capacity_law import Rules, capacity
from kvarena.experiments.capacity_loads import make_load
from kvarena.experiments.capacity_sizing import MIB, Card, Server, equal_bytes
from kvarena.experiments.config import Config, config_from_keywords
from kvarena.experiments.engine.step_time import compute_of, load_gpu_times
from kvarena.experiments.foreign import read_json
from kvarena.experiments.models import model_shape
from kvarena.experiments.specs import allocator_entry
from kvarena.experiments.wrong_kind import reads

if TYPE_CHECKING:
    from kvarena.experiments.pools import Cell
    from rich.table import Table

SCHEMA_VERSION = 1
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KINDS = ("block", "token")
ROUNDS = 3
WORKLOADS: dict[str, dict[str, Any]] = {
    "chat": {"num_sessions": 120},
    "agents": {"num_sessions": 16},
    "generated_shared_prefix": {},
    "few_shot": {},
    "recording": {},
}
"""Built-in workloads with the options that keep a study of 18 cells within minutes."""
LIVE = 16
POOL = "40 %"
KERNEL_POINT = "64x16k"
TABLES = {"block": "block_table", "token": "req_to_token"}
COLUMNS = ("workload", "kind", "page_size", "token_hit_rate", "tail_tokens", "concurrency", "host_us", "time_us")


@dataclass(frozen=True)
class Study:
    """rows: see COLUMNS; about: pool, model and load of the study, and when a kernel was measured."""

    rows: pd.DataFrame
    about: dict[str, Any]


def study(
    workloads: Iterable[str] = tuple(WORKLOADS),
    *,
    pages: Sequence[int] = PAGES,
    pool: str = POOL,
    live: int = LIVE,
    model: str = "llama-3-8b",
    requests: int | None = None,
    rounds: int = ROUNDS,
    load: str = "chat",
    tick: Callable[[], None] | None = None,
    out: Path | None = None,
) -> Study:
    """Measure every page size for both designs.

    tick  is called once a cell
    out   where the study will be saved: beside it the finished workloads are kept when it is interrupted

    Raises ValueError for unknown names.
    """
    workloads = list(workloads)
    if out is not None:
        partial.refuse_other_partial(partial.partial_folder(out))
    fits = {(kind, size): concurrency(kind, size, model, load) for kind in KINDS for size in pages}
    rows: list[dict[str, Any]] = []
    outputs: dict[str, str] = {}
    pool_bytes: dict[str, int] = {}
    fixed = {"pool": pool, "live": live, "outputs": "replay", "model": model, "requests": requests, "kernel_batches": 0}
    allocators = [{"kind": kind, "page_size": size} for kind in KINDS for size in pages]
    try:
        for workload in workloads:
            options = WORKLOADS.get(workload, {})
            config = config_from_keywords({**fixed, "trace": workload, "allocators": allocators, "options": options})
            made, outputs[workload], pool_bytes[workload] = _rows(config, workload, fits, model, rounds, tick)
            rows += made
    except KeyboardInterrupt:
        done = list(dict.fromkeys(row["workload"] for row in rows))
        tables = {"pagesize": pd.DataFrame(rows, columns=list(COLUMNS))}
        missing = partial.names_left(workloads, done)
        raise partial.keep_tables(out, "pagesize", tables, done, missing, "workloads") from None
    about = {"pool": pool, "live": live, "model": model, "load": load, "rounds": rounds, "pages": list(pages)}
    about |= {"outputs": outputs, "pool_bytes": pool_bytes}
    return Study(pd.DataFrame(rows, columns=list(COLUMNS)), about)


def _rows(
    config: Config,
    workload: str,
    fits: dict[tuple[str, int], int],
    model: str,
    rounds: int,
    tick: Callable[[], None] | None,
) -> tuple[list[dict[str, Any]], str, int]:
    """(a row a cell, what the workload has of replies, bytes of the pool)."""
    from kvarena.experiments.loading import load_workloads
    from kvarena.experiments.pools import plan

    try:
        cells = plan(config, load_workloads(config), config.entries())
    except PoolTooSmallError as error:
        wrong = str(error).partition("; give a larger pool")[0]  # what else that advises is no option here
        advice = "give a larger --pool or more --requests"
        raise ValueError(f"pagesize: {workload}, pool {config.pool.pool}: {wrong}; {advice}") from None
    times: dict[str, list[float]] = {cell.entry.name: [] for cell in cells}
    found: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for cell in cells:  # alternating, so that whatever else the machine does falls on all of them
            seconds, found[cell.entry.name] = _replayed(cell, config)
            times[cell.entry.name].append(seconds)
            if tick is not None:
                tick()
    rows = []
    for cell in cells:
        seen, count = found[cell.entry.name], len(cell.workload.requests)
        host_us = 1e6 * statistics.median(times[cell.entry.name]) / count
        computed = seen.pop("computed_tokens") / count
        key = (cell.entry.kind, cell.entry.page_size)
        rows.append(
            {
                "workload": workload,
                "kind": key[0],
                "page_size": key[1],
                **seen,
                "concurrency": fits[key],
                "host_us": host_us,
                "time_us": host_us + computed * prefill_us(model),
            }
        )
    return rows, cells[0].workload.trace.visible.outputs, cells[0].pool_bytes


def _replayed(cell: Cell, config: Config) -> tuple[float, dict[str, float]]:
    """(CPU seconds of the replay, what it showed)."""
    from kvarena.experiments import metrics
    from kvarena.experiments.replay import Replay

    replay = Replay(cell.entry.build(cell.budget.num_pages), config.engine)
    start = time.process_time()
    lane = replay.run(cell.workload.requests)
    seconds = time.process_time() - start
    hits = metrics.count_hits(lane.requests)
    live = sum(step.live for step in lane.steps)
    tails = sum(step.tail_slots for step in lane.steps)
    return seconds, {
        "token_hit_rate": hits.token_hit_rate or 0.0,
        "tail_tokens": tails / live if live else 0.0,
        "computed_tokens": float(hits.prompt_tokens - hits.hit_tokens),
    }


def prefill_us(model: str) -> float:
    """Microseconds of one prompt token in a full step, linear layers alone."""
    shape = model_shape(model)
    flops = 2 * compute_of(model, shape).parameters
    return flops / load_gpu_times().linear_tflops / 1e6


def concurrency(kind: str, page_size: int, model: str, load: str, total_mib: int = 16_384) -> int:
    """Requests of a burst that fit 16 GiB, tables included, in closed form."""
    entry = allocator_entry({"kind": kind, "page_size": page_size})
    server = Server(rows=1024, max_model_len=32_768, step_tokens=8192, chunk_tokens=8192)
    sizing = equal_bytes(Card("16 GiB", total_mib * MIB, 0, 0), kind, page_size, model_shape(model), server)
    rules = Rules(
        sizing.num_pages,
        page_size,
        shares=entry.shares_prefixes,
        publish="commit" if kind == "token" else "reserve",
        rows=sizing.rows,
        max_model_len=server.max_model_len,
    )
    return capacity(make_load(load, 512), rules, 80)


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """For each workload and design the page size with the least time, the highest hit rate and the most requests;
    equal values go to the larger page, whose tables are smaller."""
    found = []
    for (workload, kind), part in rows.groupby(["workload", "kind"], sort=False):
        cells = sorted(part.to_dict("records"), key=lambda cell: -cell["page_size"])
        least = min(cells, key=lambda cell: cell["time_us"])
        found.append(
            {
                "workload": workload,
                "kind": kind,
                "least_time": int(least["page_size"]),
                "time_us": float(least["time_us"]),
                "highest_hit_rate": int(max(cells, key=lambda cell: cell["token_hit_rate"])["page_size"]),
                "most_requests": int(max(cells, key=lambda cell: cell["concurrency"])["page_size"]),
            }
        )
    return pd.DataFrame(found)


def best_table(made: Study) -> Table:
    """The best page sizes for the terminal."""
    from rich.table import Table

    about = made.about
    title = f"Best page size: {about['live']} live, pool {about['pool']}, {about['model']}"
    table = Table(title=title, title_justify="left")
    for head in ("workload", "design", "least time", "µs a request", "highest hit rate", "most requests"):
        table.add_column(head, justify="left" if head in ("workload", "design") else "right")
    for row in best(made.rows).to_dict("records"):
        numbers = (f"{row['time_us']:,.0f}", str(row["highest_hit_rate"]), str(row["most_requests"]))
        table.add_row(str(row["workload"]), str(row["kind"]), str(row["least_time"]), *numbers)
    table.caption = (
        "least time: prefill of what was not served, and the allocator; kernels apart; equal values: the largest page"
        + "".join(
            f"\n{name}: {format_bytes(size)} for every cell" for name, size in about.get("pool_bytes", {}).items()
        )
    )
    return table


def kernel_times(path: Path | None = None, point: str = KERNEL_POINT) -> dict[str, dict[int, float]]:
    """Measured decode times, microseconds, by design and page size. Raises ValueError naming the file.

    path  kernels.json of a card; default: the checkout's; none there: nothing is known
    """
    import kvarena

    path = path or Path(kvarena.__file__).resolve().parent.parent / "results" / "h200" / "kernels.json"
    found: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    if not path.is_file():
        return found
    try:
        parts = read_json(path)["parts"]
        for row in parts["decode"]["rows"]:
            if (row.get("op"), row.get("point")) != ("decode", point) or row.get("study") not in ("grid", "pages"):
                continue
            for kind, table in TABLES.items():
                if row["kernel"] == f"kvarena-{table}" and row["placement"] == "shuffled":
                    found[kind][int(row["page"])] = float(row["us"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as kernel times ({error})") from None
    return found


# --- files ---


def save(made: Study, folder: Path) -> Path:
    """Write pagesize.csv and pagesize.json. Returns the folder. Raises ValueError when it holds other files."""
    refuse_other(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made.rows.to_csv(folder / "pagesize.csv", index=False, float_format="%.6g", lineterminator="\n")
    about = {"schema_version": SCHEMA_VERSION, **made.about}
    (folder / "pagesize.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return folder


def refuse_other(folder: Path) -> None:
    """Raise ValueError when the folder holds files and no study."""
    from kvarena.experiments.results import refuse_others

    refuse_others(folder, (folder / "pagesize.json").is_file(), "an earlier page-size study")


@reads("page-size study")
def load(folder: Path) -> Study:
    """Read a saved study. Raises ValueError naming the folder."""
    partial.refuse_partial(folder)
    try:
        about = read_json(folder / "pagesize.json")
        rows = pd.read_csv(folder / "pagesize.csv")
        if about.pop("schema_version") != SCHEMA_VERSION or list(rows.columns) != list(COLUMNS):
            raise ValueError("another schema")
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"{folder}: cannot be read as a page-size study ({error})") from None
    return Study(rows, about)
