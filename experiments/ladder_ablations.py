"""Rules for which reasons are usually given, each with and without, on the same requests and at equal bytes.

pages without content to the head    else they queue behind cached pages, and cached content goes while pages are free
reversed release                     else a chain loses its beginning first, and the rest of it cannot be found
duplicates kept                      tables are append-only; merged: entries are rewritten, pages are saved
linked list                          a page that is hit leaves the middle of the free queue; in a deque that is a search

OUT/ablations.csv   a row a pool and design, counted     OUT/removal.csv   a row a queue and length, measured
OUT/ablations.json  what was run                         OUT/figures/      all of it as one figure
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.allocators.config import Design
from kvarena.allocators.free_queue import FreeQueue
from kvarena.allocators.general import GeneralAllocator
from kvarena.allocators.interface import Commit, Reservation, Sequence
from kvarena.experiments import metrics, partial
from kvarena.experiments.config import SCHEMA_VERSION, Config, apply_sets, config_from_mapping
from kvarena.experiments.foreign import read_json
from kvarena.experiments.loading import load_workloads
from kvarena.experiments.outputs import refuse_other_options
from kvarena.experiments.pools import Cell, plan
from kvarena.experiments.replay import Replay
from kvarena.experiments.results import refuse_others
from kvarena.experiments.specs import ID_PAGE
from kvarena.experiments.sweep import write_whole
from kvarena.experiments.wrong_kind import reads

MANIFEST = "ablations.json"
PAGE_SIZE = 16  # of both designs: their tables are compared in bytes; where a trace is replayed by its ids, an id
ENTRY_BYTES = 4  # int32, of both tables
# name -> (kind, what is switched)
DESIGNS: dict[str, tuple[str, dict[str, Any]]] = {
    "block": ("block", {}),
    "unhashed to the tail": ("block", {"unhashed_to_head": False}),
    "released forwards": ("block", {"reversed_release": False}),
    "block, merged": ("block", {"duplicates": "merge"}),
    "token": ("token", {}),
    "token, kept": ("token", {"duplicates": "keep"}),
}
LENGTHS = (1_000, 10_000, 100_000)  # pages in the queue
REMOVALS = 64  # timed together
REPEATS = 9


class CountingAllocator(GeneralAllocator):
    """The general form, and how many entries of its tables were rewritten, and how many appended."""

    def __init__(self, num_pages: int, rules: Design) -> None:
        super().__init__(num_pages, rules)
        self.rewritten = self.appended = 0

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> list[Reservation] | None:
        answers = super().reserve(wants)
        for answer in answers or ():
            self._count(answer.rewritten)
            self.appended += len(answer.page_ids)
        return answers

    def commit(self, done: Iterable[tuple[Sequence, int]]) -> list[Commit]:
        answers = super().commit(done)
        for answer in answers:
            self._count(answer.rewritten)
        return answers

    def _count(self, entries: tuple[int, int]) -> None:
        self.rewritten += entries[1] - entries[0]


@dataclass
class Ablations:
    """Finished ablations: `table` a row a pool and design, `removal` the measured cost of leaving the middle of a
    queue, `manifest` what was run."""

    manifest: dict[str, Any]
    table: pd.DataFrame
    removal: pd.DataFrame
    path: Path | None = None


def ablations(
    base: Mapping[str, Any],
    out: Path | str,
    *,
    sets: Iterable[str] = (),
    lengths: Iterable[int] = LENGTHS,
    tick: Callable[[str], None] | None = None,
) -> Ablations:
    """Run every design of DESIGNS over a config of `kvarena compare`, time the queues, and write the folder `out`.

    `tick` is told of each cell. Raises ValueError for a wrong config, and when `out` holds other files, or ablations
    with other options.
    """
    sets = list(sets)
    config = _config(base, sets, PAGE_SIZE)
    if config.workload.unit == "ids":
        config = _config(base, sets, ID_PAGE)
    _refuse_other(Path(out), config)
    partial.refuse_other_partial(partial.partial_folder(Path(out)))
    workloads = load_workloads(config)
    cells = plan(config, workloads, config.entries())
    rows = _rows(cells, config, Path(out), tick)
    trace = workloads[0].trace
    manifest = {
        "kind": "ablations",
        "trace": trace.name,
        "visible": asdict(trace.visible),
        "pools": sorted({row["pool_bytes"] for row in rows}),
        "tokens_per_id": workloads[0].tokens_per_id,
        "designs": {name: {"kind": kind, **fields} for name, (kind, fields) in DESIGNS.items()},
        "config": config.resolved(),
    }
    made = Ablations(manifest, pd.DataFrame(rows), pd.DataFrame(list(time_removals(lengths))))
    save(made, Path(out))
    return made


def _config(base: Mapping[str, Any], sets: list[str], page_size: int) -> Config:
    return config_from_mapping(apply_sets({**base, "allocators": [_spec(name, page_size) for name in DESIGNS]}, sets))


def _rows(cells: list[Cell], config: Config, out: Path, tick: Callable[[str], None] | None) -> list[dict[str, Any]]:
    """A row a cell; when interrupted, those that had finished are kept beside `out`."""
    rows: list[dict[str, Any]] = []
    try:
        for cell in cells:
            if tick is not None:
                tick(f"{cell.entry.name}, pool {cell.pool_bytes:,} bytes")
            rows.append(_row(cell, config))
    except KeyboardInterrupt:
        names = [
            partial.cell_name({"seed": c.workload.seed, "pool_bytes": c.pool_bytes, "allocator": c.entry.name})
            for c in cells
        ]
        tables = {"ablations": pd.DataFrame(rows)}
        raise partial.keep_tables(out, "ablations", tables, names[: len(rows)], names[len(rows) :]) from None
    return rows


def again_rows(made: Ablations) -> list[dict[str, Any]]:
    """Every row of finished ablations once more, from their config. Raises ValueError for a trace not at hand."""
    config = config_from_mapping(made.manifest["config"])
    return [_row(cell, config) for cell in plan(config, load_workloads(config), config.entries())]


def _spec(name: str, page_size: int) -> dict[str, Any]:
    kind, fields = DESIGNS[name]
    return {"name": name, "kind": kind, "page_size": page_size, "form": "general", **fields}


def _row(cell: Cell, config: Config) -> dict[str, Any]:
    kind, rules = cell.entry.kind, cell.entry.design
    if rules is None:
        raise ValueError(f"ablations: {cell.entry.name!r} is an allocator of the user's own; expected a design")
    allocator = CountingAllocator(cell.budget.num_pages, rules)
    lane = Replay(allocator, config.engine).run(cell.workload.requests)
    counted = metrics.summarise_requests(lane.requests)
    size, pages = cell.entry.page_size, cell.budget.num_pages
    token_bytes = config.pool.shape.bytes_per_token * cell.workload.tokens_per_id
    pool = metrics.summarise_steps(lane.steps, pages, size, token_bytes)
    # A block table names a page an entry, req_to_token a slot: one page is page_size entries there.
    entry = ENTRY_BYTES * (size if kind == "token" else 1)
    return {
        "seed": cell.workload.seed,
        "pool_bytes": cell.pool_bytes,
        "design": cell.entry.name,
        "num_pages": pages,
        "token_hit_rate": counted["token_hit_rate"],
        "hit_tokens": counted["hit_tokens"],
        "evicted_pages": counted["evicted_pages"],
        "duplicate_pages_seen": counted["duplicate_pages_seen"],
        "duplicate_bytes": pool["duplicate_bytes"],
        "refusals": counted["refusals"],
        "steps": len(lane.steps),
        "table_bytes_appended": allocator.appended * entry,
        "table_bytes_rewritten": allocator.rewritten * entry,
    }


# --- the queue ---


def time_removals(lengths: Iterable[int]) -> Iterable[dict[str, Any]]:
    """Process time of taking REMOVALS pages out of the middle of a queue, side by side, medians of REPEATS."""
    for length in lengths:
        chosen = random.Random(length).sample(range(1, length + 1), REMOVALS)
        times: dict[str, list[int]] = {"linked list": [], "deque": []}
        for _ in range(REPEATS):
            for name, queue in (("linked list", _Linked(length)), ("deque", _Plain(length))):
                times[name].append(queue.time(chosen))
        for name, values in times.items():
            middle = sorted(values)[REPEATS // 2]
            yield {"queue": name, "length": length, "ns_a_page": middle / REMOVALS}


class _Linked:
    """The free queue of the block design."""

    def __init__(self, length: int) -> None:
        self._queue = FreeQueue(length)

    def time(self, pages: list[int]) -> int:
        start = time.process_time_ns()
        self._queue.remove(pages)
        return time.process_time_ns() - start


class _Plain:
    """A deque, in which a page has to be looked for."""

    def __init__(self, length: int) -> None:
        self._queue = deque(range(1, length + 1))

    def time(self, pages: list[int]) -> int:
        start = time.process_time_ns()
        for page in pages:
            self._queue.remove(page)
        return time.process_time_ns() - start


# --- the folder ---


def _refuse_other(folder: Path, config: Config) -> None:
    refuse_others(folder, (folder / "ablations.csv").is_file(), "earlier ablations")
    if (folder / MANIFEST).is_file():
        refuse_other_options(folder, "ablations", load_ablations(folder).manifest["config"], config.resolved())


def save(made: Ablations, folder: Path) -> None:
    """Write tables and figure, each whole or not at all; the manifest last. Raises ValueError for a foreign folder."""
    from kvarena.experiments.ladder_plots import write_ablations

    refuse_others(folder, (folder / "ablations.csv").is_file(), "earlier ablations")
    write_whole(folder / "ablations.csv", made.table.to_csv(index=False, lineterminator="\n"))
    write_whole(folder / "removal.csv", made.removal.to_csv(index=False, lineterminator="\n"))
    write_ablations(made, folder / "figures")
    text = json.dumps({"schema_version": SCHEMA_VERSION, **made.manifest}, indent=1, ensure_ascii=False)
    write_whole(folder / MANIFEST, text + "\n")
    made.path = folder


@reads("ablations")
def load_ablations(path: Path | str) -> Ablations:
    """Read finished ablations. Raises ValueError when they are none, or not whole."""
    folder = Path(path)
    partial.refuse_partial(folder)
    try:
        manifest = read_json(folder / MANIFEST)
        table, removal = (pd.read_csv(folder / f"{name}.csv") for name in ("ablations", "removal"))
    except (OSError, ValueError, RecursionError, pd.errors.ParserError) as error:
        raise ValueError(f"{folder}: not finished ablations ({error})") from None
    if manifest.pop("schema_version", None) != SCHEMA_VERSION or manifest.get("kind") != "ablations":
        raise ValueError(f"{folder / MANIFEST}: expected ablations of schema_version {SCHEMA_VERSION}")
    return Ablations(manifest, table, removal, folder)
