"""How many concurrent requests does each design carry? The plan of the study, what runs it, and what it found.

    plan = capacity_plan("llama-3-8b")            # every cell, with its prediction: nothing has run
    found = [measure(cell) for cell in plan]      # the engine; with make_executor= over real pools

A cell is one design on one load in one panel. Panels:

    equal     every design gets the same bytes and pays its own tables (2,048 rows) out of them; one scheduler, `vllm`
    deployed  each upstream sizes itself, has its own number of rows and its own scheduler

The number is the largest burst whose requests are all live at once, with nobody preempted and nobody waiting for room.
It is predicted in closed form first (`capacity_law.py`), and so is what each rule of the design costs: rules are
switched on one after the other, from a pool that stores every distinct token once and nothing else, to the design as
it is. The steps add up to the whole difference, to the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from kvarena.experiments.capacity_law import Rules, capacity, largest, without
from kvarena.experiments.capacity_loads import LOADS, STUDY, Load, first, make_load
from kvarena.experiments.capacity_run import Burst, run_burst
from kvarena.experiments.capacity_sizing import (
    MIB,
    Card,
    Server,
    Sizing,
    card,
    deployed_sglang,
    deployed_vllm,
    equal_bytes,
)
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.engine.simulate import MakeExecutor
from kvarena.experiments.engine.step_time import HOST, GpuTimes, StepTimeModel, compute_of, load_gpu_times, table_of
from kvarena.experiments.models import ModelShape, model_shape
from kvarena.experiments.specs import AllocatorEntry, allocator_entry

Panel = Literal["equal", "deployed"]
PANELS: dict[str, str] = {"equal": "equal bytes, one scheduler", "deployed": "as each server is deployed"}
CONTIGUOUS_PAGE = 16  # runs are cut in pages of this size, so that the same kernels read them
BEYOND = (0.5, 1.0, 1.5)  # bursts, as shares of what block with 16 tokens a page carries
DECLARED = 4096  # max_tokens that a client states
DESIGNS: dict[str, dict[str, Any]] = {
    "block-16": {"kind": "block", "page_size": 16},
    "block-32": {"kind": "block", "page_size": 32},
    "block-64": {"kind": "block", "page_size": 64},
    "token-1": {"kind": "token", "page_size": 1},
    "token-16": {"kind": "token", "page_size": 16},
    "token-64": {"kind": "token", "page_size": 64},
    "contiguous-max": {"kind": "contiguous", "page_size": CONTIGUOUS_PAGE, "sizing": "max"},
    "contiguous-pow2": {"kind": "contiguous", "page_size": CONTIGUOUS_PAGE, "sizing": "pow2"},
    "contiguous-declared": {"kind": "contiguous", "page_size": CONTIGUOUS_PAGE, "sizing": "declared"},
}
PARTS = ("tables", "sharing", "tail", "duplicates", "reservation", "rows", "residual")


@dataclass(frozen=True)
class Cell:
    """One design on one load in one panel, ready to run.

    design     its name in DESIGNS; `spec` what `make_allocator` takes
    policy     of the scheduler; `limits` its limits
    sizing     where the card's bytes go; `rules` the same for the closed form
    ideal      requests that the design's bytes would carry if every distinct token took its own bytes and no more
    predicted  requests, in closed form
    lost       requests lost to each rule, in order; they add up to ideal - predicted
    """

    panel: Panel
    load: str
    seed: int
    design: str
    label: str
    spec: dict[str, Any]
    policy: Literal["vllm", "sglang"]
    limits: SchedulerConfig
    sizing: Sizing
    rules: Rules
    shape: ModelShape
    model: str | Mapping[str, Any]
    ideal: int
    predicted: int
    lost: dict[str, int]
    declared: int = DECLARED

    @property
    def name(self) -> str:
        return f"{self.panel}/{self.load}/{self.design}"

    def burst(self, size: int) -> Load:
        """The first `size` requests of the load."""
        return first(make_load(self.load, max(size, len_of(self)), self.seed), size)

    def step_times(self, gpu: GpuTimes | None = None) -> StepTimeModel:
        """The step-time model of the simulated clock."""
        host = HOST["ours-token" if self.spec["kind"] == "token" else "ours-block"]
        return StepTimeModel(
            self.shape,
            compute_of(self.model, self.shape),
            self.sizing.page_size,
            gpu or load_gpu_times(),
            host,
            table=table_of(self.spec["kind"]),
            table_tokens=self.limits.max_model_len,
        )


@dataclass(frozen=True)
class Found:
    """What a cell came to. `bursts` are the runs that showed it: the largest carried, the next one, and those beyond.

    measured  requests; 0 when not even one is carried
    stopped   why one more is not carried
    """

    cell: Cell
    measured: int
    stopped: str
    bursts: tuple[Burst, ...] = field(default=())

    @property
    def lost(self) -> dict[str, int]:
        """Requests lost to each part; they add up to ideal - measured, to the request."""
        return {**self.cell.lost, "residual": self.cell.predicted - self.measured}

    def row(self) -> dict[str, Any]:
        """As a row of the table."""
        cell = self.cell
        parts = {f"lost_{name}": self.lost[name] for name in PARTS}
        keys = {"panel": cell.panel, "load": cell.load, "seed": cell.seed, "design": cell.design, "label": cell.label}
        about = {"policy": cell.policy, "page_size": cell.sizing.page_size, "num_pages": cell.sizing.num_pages}
        counts = {"ideal": cell.ideal, "predicted": cell.predicted, "measured": self.measured}
        return {**keys, **about, **counts, **parts, "stopped": self.stopped}


def capacity_plan(
    model: str | Mapping[str, Any] = "llama-3-8b",
    *,
    on: Card | None = None,
    panels: Iterable[str] = tuple(PANELS),
    loads: Iterable[str] = STUDY,
    designs: Iterable[str] = tuple(DESIGNS),
    max_model_len: int = 131_072,
    declared: int = DECLARED,
    rows: int = 2048,
    step_tokens: int = 8192,
    seed: int = 0,
) -> list[Cell]:
    """Every cell of the study, with its prediction. Raises ValueError for unknown names, and when a pool cannot be.

    on  the card; default an H200 (143,771 MiB) with the model's weights in bfloat16 and 2 GiB of workspace
    """
    shape = model_shape(model)
    for names, known, what in ((panels, PANELS, "panel"), (loads, LOADS, "load"), (designs, DESIGNS, "design")):
        named = list(names)
        for name in named:
            if name not in known:
                raise ValueError(f"{what}: expected one of {', '.join(known)}, found {name!r}")
        if not named or len(set(named)) < len(named):
            raise ValueError(f"{what}: expected at least one, each once, found {', '.join(named) or 'none'}")
    if on is None and not isinstance(model, str):
        raise ValueError("on: a shape of one's own needs a card, whose weights are known")
    chosen = on or card(str(model))
    server = Server(rows, max_model_len, step_tokens, step_tokens)
    return [
        _cell(panel, load, design, model, shape, chosen, server, declared, seed)  # type: ignore[arg-type]
        for panel in panels
        for load in loads
        for design in designs
    ]


def _cell(
    panel: Panel,
    load: str,
    design: str,
    model: str | Mapping[str, Any],
    shape: ModelShape,
    on: Card,
    server: Server,
    declared: int,
    seed: int,
) -> Cell:
    spec = dict(DESIGNS[design])
    if spec.get("sizing") == "max":
        spec["max_model_len"] = server.max_model_len
    entry = allocator_entry(spec)
    policy: Literal["vllm", "sglang"] = "sglang" if panel == "deployed" and entry.kind == "token" else "vllm"
    sizing = _sized(panel, entry, shape, on, server)
    rules = Rules(
        sizing.num_pages,
        sizing.page_size,
        shares=entry.shares_prefixes,
        publish="commit" if entry.kind == "token" else "reserve",
        sizing=spec.get("sizing", "pages"),
        policy=policy,
        rows=sizing.rows,
        row_tokens=server.max_model_len,
        step_tokens=server.step_tokens,
        chunk_tokens=server.chunk_tokens,
        max_model_len=server.max_model_len,
        declared=declared,
    )
    ideal, predicted, lost = losses(load, seed, rules, sizing.budget_bytes // shape.bytes_per_token)
    limits = SchedulerConfig(
        max_num_batched_tokens=server.step_tokens if policy == "vllm" else 2 * server.step_tokens,
        chunk_size=None if policy == "vllm" else server.chunk_tokens,
        max_num_seqs=sizing.rows,
        max_model_len=server.max_model_len,
        result_lag=1,
    )
    return Cell(
        panel,
        load,
        seed,
        design,
        entry.label,
        spec,
        policy,
        limits,
        sizing,
        rules,
        shape,
        model,
        ideal,
        predicted,
        lost,
        declared,
    )


def _sized(panel: Panel, entry: AllocatorEntry, shape: ModelShape, on: Card, server: Server) -> Sizing:
    if panel == "equal":
        return equal_bytes(on, entry.kind, entry.page_size, shape, server)
    if entry.kind == "token":
        return deployed_sglang(on, entry.page_size, shape, server)
    own = Server(1024, server.max_model_len, server.step_tokens, server.chunk_tokens)
    return deployed_vllm(on, entry.kind, entry.page_size, shape, own)


def losses(load: str, seed: int, rules: Rules, budget_tokens: int) -> tuple[int, int, dict[str, int]]:
    """(ideal, predicted, requests lost to each rule): rules are switched on one after the other.

    tables       page table, slot_mapping, padding page, and bytes too few for one more page
    sharing      a shared prefix ends at a page's end, or is not shared at all
    tail         last pages that are not full
    duplicates   a prefix is computed again until the first to compute it has published it
    reservation  memory kept for tokens that may come: runs, or SGLang's admission
    rows         no row of the page table is left, or a prompt is longer than one
    """
    steps = [
        without(
            rules,
            num_pages=budget_tokens,
            page_size=1,
            shares=True,
            sizing="pages",
            publish="reserve",
            reserves=False,
            rows=2**31,
            row_tokens=2**31,
        )
    ]
    whole = rules.num_pages * rules.page_size
    steps.append(without(steps[-1], num_pages=whole))
    steps.append(without(steps[-1], share_page_size=rules.page_size, shares=rules.shares))
    steps.append(without(steps[-1], num_pages=rules.num_pages, page_size=rules.page_size))
    steps.append(without(steps[-1], publish=rules.publish))
    steps.append(without(steps[-1], sizing=rules.sizing, reserves=True))
    steps.append(rules)
    counts: list[int] = []
    for each in steps:
        counts.append(_most(load, seed, each, counts[-1] if counts else 256))
    lost = {name: before - after for name, before, after in zip(PARTS, counts, counts[1:], strict=False)}
    return counts[0], counts[-1], lost


@lru_cache(maxsize=1024)
def _law(load: str, seed: int, rules: Rules, size: int, guess: int) -> int:
    return capacity(make_load(load, size, seed), rules, guess)


def _most(load: str, seed: int, rules: Rules, guess: int) -> int:
    """The law's answer, over a burst long enough not to bound it."""
    size = 256
    while size <= guess:
        size *= 2
    while True:
        found = _law(load, seed, rules, size, guess)
        if found < size:
            return found
        size *= 2


def len_of(cell: Cell) -> int:
    """Requests to draw for a cell, so that its bursts are cut from one list."""
    return max(2 * max(cell.ideal, 1), 256)


def measure(
    cell: Cell,
    *,
    beyond: Iterable[int] = (),
    gpu: GpuTimes | None = None,
    make_executor: MakeExecutor | None = None,
) -> Found:
    """Run bursts around the prediction until the largest carried one is found; then those `beyond`, to their end.

    Two runs where the prediction holds. Costs seconds a run: about 4 us a request and step.
    """
    tried: dict[int, Burst] = {}

    def carried(size: int) -> bool:
        if size not in tried:
            tried[size] = run_cell(cell, size, gpu=gpu, stop_early=True, make_executor=make_executor)
        return tried[size].carried

    high = largest(carried, cell.limits.max_num_seqs + 1, cell.predicted)
    stopped = tried[high + 1].stopped
    runs = [tried[size] for size in (high, high + 1) if size in tried]
    runs += [run_cell(cell, size, gpu=gpu, make_executor=make_executor) for size in beyond]
    return Found(cell, high, stopped, tuple(runs))


def run_cell(
    cell: Cell,
    size: int,
    *,
    gpu: GpuTimes | None = None,
    stop_early: bool = False,
    make_executor: MakeExecutor | None = None,
) -> Burst:
    """One burst of a cell."""
    allocator = allocator_entry(cell.spec).build(cell.sizing.num_pages)
    return run_burst(
        cell.burst(size),
        allocator,
        cell.policy,
        cell.limits,
        cell.step_times(gpu),
        declared=cell.declared,
        stop_early=stop_early,
        make_executor=make_executor,
    )


def beyond_sizes(plan: Iterable[Cell]) -> dict[str, list[int]]:
    """Sizes of the bursts beyond capacity, for each load the same ones for all designs."""
    anchors: dict[str, int] = {}
    for cell in plan:
        if cell.panel == "equal" and (cell.design == "block-16" or cell.load not in anchors):
            anchors[cell.load] = cell.predicted
    return {load: sorted({max(1, round(share * anchor)) for share in BEYOND}) for load, anchor in anchors.items()}


def small_card(model: str, total_mib: int, workspace_mib: int = 0) -> Card:
    """A card without weights, for tests and quick looks."""
    return Card(f"{total_mib} MiB", total_mib * MIB, 0, workspace_mib * MIB)
