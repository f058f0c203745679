"""Aged pools: which slots do live requests have after hours of churn, and in how long runs do they lie?

A fresh pool hands out ascending slots, so every request lies in one run. Evictions and releases give slots back in
another order, and requests that decode together take turns at the free list. What is left of the runs after hours is
what a kernel really reads.

An engine serves conversations on a simulated clock with one allocator. Whenever the pool has been turned over so many
times (tokens computed / slots of the pool), the slots of all running requests are noted in position order. A run is a
stretch of positions whose slots ascend by one; a token's run length is that of the run that it lies in, so the mean
over tokens says what a reader of KV meets, not what a counter of runs does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator, Sequence
from kvarena.experiments.engine.arrivals import Arrivals
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.engine.simulate import RunOptions, Simulation
from kvarena.experiments.engine.step_time import HOST, GpuTimes, StepTimeModel, compute_of
from kvarena.experiments.models import model_shape
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.table import Table

TURNOVERS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
WARM_S = 60.0  # before that, few requests are live
LEVELS = (10, 50, 90)


@dataclass(frozen=True)
class AgeConfig:
    """How a pool is aged; every field is recorded with the layouts.

    hours           arrivals on the simulated clock
    sessions_per_s  conversations of the `chat` workload that start a second
    reply_median    median length of their replies, tokens (at most 8 times as many)
    pool_tokens     slots of the pool, the same for every allocator (a multiple of every page size)
    model           shape whose step times the simulated GPU has
    declared        max_tokens that clients ask for; schedulers see nothing else of a reply's length
    """

    hours: float = 2.0
    sessions_per_s: float = 0.35
    reply_median: int = 400
    pool_tokens: int = 262_144
    model: str = "llama-3-70b"
    max_num_seqs: int = 256
    declared: int = 3200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hours", "sessions_per_s"):
            if not 0 < getattr(self, name) < 1e4:
                raise ValueError(f"{name}: expected a number above 0 and below 10,000, found {getattr(self, name)}")
        for name in ("reply_median", "pool_tokens", "max_num_seqs", "declared"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")


@dataclass(frozen=True)
class AgedAllocator:
    """One allocator under its own upstream's scheduling rules. `saved`: its layout goes into the file."""

    name: str
    policy: str
    spec: Mapping[str, Any]
    saved: bool = True


ALLOCATORS = (
    AgedAllocator("block-16", "vllm", {"kind": "block", "page_size": 16}),
    AgedAllocator("token-1", "sglang", {"kind": "token", "page_size": 1}),
    AgedAllocator("token-16", "sglang", {"kind": "token", "page_size": 16}),
    AgedAllocator("token-1-sorted", "sglang", {"kind": "token", "page_size": 1, "need_sort": True}, saved=False),
)


@dataclass
class Aged:
    """What became of one allocator's pool.

    churn    a row a snapshot: turnovers, hours, live requests and their tokens, and run lengths over tokens
    layout   request id -> slots in position order, int32 [tokens with KV], of the last snapshot
    """

    allocator: AgedAllocator
    churn: list[dict[str, float]] = field(default_factory=list)
    layout: dict[str, NDArray[np.int32]] = field(default_factory=dict)


def age(allocator: AgedAllocator, config: AgeConfig, tick: Callable[[], None] | None = None) -> Aged:
    """Serve the workload with one allocator and note layouts on the way. `tick` is called once a request."""
    size = dict(allocator.spec).get("page_size", 1)
    if config.pool_tokens % size:
        raise ValueError(f"pool_tokens: expected a multiple of page size {size}, found {config.pool_tokens}")
    pool = MeteredAllocator(make_allocator(allocator.spec, num_pages=config.pool_tokens // size))
    simulation = _simulation(pool, allocator.policy, config)
    aged, due = Aged(allocator), list(TURNOVERS)
    last_arrival = config.hours * 3600
    for _ in simulation.ends():
        if tick is not None:
            tick()
        simulation.record.requests.clear()  # rows of hours of requests, which nobody reads
        if simulation.clock.now_s > last_arrival:
            break  # the pool drains from here on
        turnovers = simulation.record.new_tokens / config.pool_tokens
        if simulation.clock.now_s >= WARM_S and due and turnovers >= due[0]:
            due = [goal for goal in due if goal > turnovers]
            aged.churn.append(_snapshot(simulation, aged, turnovers))
    aged.churn.append(_snapshot(simulation, aged, simulation.record.new_tokens / config.pool_tokens))
    return aged


def _simulation(pool: MeteredAllocator, policy: str, config: AgeConfig) -> Simulation:
    from kvarena.experiments.workloads import chat

    shape = chat.Shape(
        num_sessions=max(1, round(config.hours * 3600 * config.sessions_per_s)),
        sessions_per_s=config.sessions_per_s,
        reply_median=config.reply_median,
        max_reply=8 * config.reply_median,
    )
    limits = SchedulerConfig(
        max_num_batched_tokens=8192, max_num_seqs=config.max_num_seqs, max_model_len=32_768, result_lag=1
    )
    model = model_shape(config.model)
    times = StepTimeModel(model, compute_of(config.model, model), pool.page_size, GpuTimes(), HOST["none"])
    arrivals = Arrivals(chat.make(config.seed, shape))
    options = RunOptions(declare=lambda tokens, index: config.declared, steps_every=10**9)
    return Simulation(pool, policy, limits, times, arrivals, options)


def _snapshot(simulation: Simulation, aged: Aged, turnovers: float) -> dict[str, float]:
    """Note the layout of now, and what there is to say of it."""
    live = [request.seq for request in simulation.scheduler.running_requests]
    aged.layout = layout_of(simulation.allocator, live)
    return {"turnovers": turnovers, "hours": simulation.clock.now_s / 3600, **run_stats(aged.layout.values())}


def layout_of(allocator: KVAllocator, live: Iterable[Sequence]) -> dict[str, NDArray[np.int32]]:
    """Slots in position order, int32 [num_computed_tokens], of sequences that hold pages. O(tokens)."""
    size = allocator.page_size
    found: dict[str, NDArray[np.int32]] = {}
    for seq in live:
        pages = np.frombuffer(allocator.page_ids(seq), np.int32)
        slots = (pages[:, None] * np.int32(size) + np.arange(size, dtype=np.int32)).reshape(-1).astype(np.int32)
        if seq.num_computed_tokens:
            found[seq.request_id] = slots[: seq.num_computed_tokens]
    return found


def run_lengths(slots: NDArray[np.int32]) -> NDArray[np.int64]:
    """Lengths of maximal runs of slots that ascend by one, in position order.

    >>> run_lengths(np.array([5, 6, 7, 2, 3, 9], np.int32)).tolist()
    [3, 2, 1]
    """
    if not len(slots):
        return np.zeros(0, np.int64)
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    return np.diff(np.concatenate([[0], breaks, [len(slots)]]))


def token_runs(layout: Iterable[NDArray[np.int32]]) -> NDArray[np.int64]:
    """The run length of every token of all requests, ascending."""
    runs = [run_lengths(slots) for slots in layout]
    lengths = np.concatenate([np.repeat(run, run) for run in runs]) if runs else np.zeros(0, np.int64)
    return np.sort(lengths)


def run_stats(layout: Iterable[NDArray[np.int32]]) -> dict[str, float]:
    """live, tokens, runs; mean tokens a run; mean and quantiles of a token's run length; and the share of tokens whose
    next one lies in the next slot. NaN where there is no token."""
    rows = list(layout)
    runs = [run_lengths(slots) for slots in rows]
    tokens, num_runs, of_tokens = sum(map(len, rows)), sum(map(len, runs)), token_runs(rows)
    found = {"live": float(len(rows)), "tokens": float(tokens), "runs": float(num_runs)}
    found["tokens_a_run"] = tokens / num_runs if num_runs else float("nan")
    found["token_run_mean"] = float(of_tokens.mean()) if tokens else float("nan")
    found |= {f"token_run_p{q}": float(np.percentile(of_tokens, q)) if tokens else float("nan") for q in LEVELS}
    pairs = tokens - len(rows)
    found["next_slot_share"] = 1 - (num_runs - len(rows)) / pairs if pairs else float("nan")
    return found


# --- files ---

LAYOUTS = "aged.parquet"
CHURN = "aged_churn.csv"
SAVED_REQUESTS = 64  # of each allocator, so that the file stays small


def refuse_other(folder: Path) -> None:
    """Raise ValueError when the folder holds files and no aged layouts."""
    from kvarena.experiments.results import refuse_others

    refuse_others(folder, (folder / LAYOUTS).is_file(), "earlier layouts")


def save(aged: Iterable[Aged], config: AgeConfig, folder: Path) -> tuple[Path, Path]:
    """Write the layouts (allocator, page_size, request, slots) and the table over churn. Returns both paths.

    The metadata of the layouts' file holds the config. Raises ValueError when the folder holds other files.
    """
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    refuse_other(folder)
    many = list(aged)
    rows = [
        (one, name, slots)
        for one in many
        if one.allocator.saved
        for name, slots in list(one.layout.items())[:SAVED_REQUESTS]
    ]
    table = pa.table(
        {
            "allocator": pa.array([one.allocator.name for one, _, _ in rows], pa.string()),
            "page_size": pa.array([one.allocator.spec["page_size"] for one, _, _ in rows], pa.int32()),
            "request": pa.array([name for _, name, _ in rows], pa.string()),
            "slots": pa.array([slots for _, _, slots in rows], pa.list_(pa.int32())),
        }
    )
    about = {b"schema_version": b"1", b"aged": json.dumps(asdict(config)).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table.replace_schema_metadata(about),
        folder / LAYOUTS,
        compression="zstd",
        compression_level=19,
        use_dictionary=["allocator", "page_size", "request"],
        column_encoding={"slots.list.element": "DELTA_BINARY_PACKED"},
    )
    churn_table(many).to_csv(folder / CHURN, index=False, float_format="%.6g", lineterminator="\n")
    return folder / LAYOUTS, folder / CHURN


def churn_table(aged: Iterable[Aged]) -> pd.DataFrame:
    """A row an allocator and snapshot."""
    return pd.DataFrame([{"allocator": one.allocator.name, **row} for one in aged for row in one.churn])


def aged_table(churn: pd.DataFrame) -> Table:
    """First and last snapshot of each allocator, for the terminal."""
    from rich.table import Table

    table = Table(title="Runs of consecutive slots of live requests", title_justify="left")
    for name in (
        "allocator",
        "turnovers",
        "hours",
        "live",
        "tokens",
        "slots a run",
        "half the tokens in runs up to",
    ):
        table.add_column(name, justify="left" if name == "allocator" else "right")
    table.add_column("next slot follows", justify="right")
    for allocator, rows in churn.groupby("allocator", sort=False):
        for row in rows.iloc[[0, -1]].to_dict("records"):
            cells = [f"{row['turnovers']:.1f}", f"{row['hours']:.2f}", f"{row['live']:.0f}", f"{row['tokens']:,.0f}"]
            cells += [f"{row['tokens_a_run']:.2f}", f"{row['token_run_p50']:.0f}"]
            table.add_row(str(allocator), *cells, f"{100 * row['next_slot_share']:.1f} %")
    return table


def load_layouts(path: Path | None = None) -> dict[str, tuple[int, list[NDArray[np.int32]]]]:
    """Allocator -> (page size, slots of each live request in position order, int32). Default: the ones that ship.

    Raises ValueError naming the file when it is none of ours.
    """
    import pyarrow.parquet as pq

    path = path or shipped_folder() / LAYOUTS
    try:
        table = pq.read_table(path)
        names, sizes = table["allocator"].to_pylist(), table["page_size"].to_pylist()
        slots = [np.asarray(row.values, np.int32) for row in table["slots"]]
    except (OSError, KeyError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"{path}: cannot be read as layouts ({error})") from None
    found: dict[str, tuple[int, list[NDArray[np.int32]]]] = {}
    for name, size, row in zip(names, sizes, slots, strict=True):
        found.setdefault(name, (size, []))[1].append(row)
    return found


def load_churn(path: Path | None = None) -> pd.DataFrame:
    """The table over churn. Default: the one that ships."""
    return pd.read_csv(path or shipped_folder() / CHURN)


def shipped_folder() -> Path:
    """Where the layouts lie that come with the project."""
    return Path(__file__).resolve().parent / "bench" / "layouts"
