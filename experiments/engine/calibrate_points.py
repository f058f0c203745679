"""Measured kernels and steps as points to fit: one layer each, with what the step-time model goes by beside the time.

A point of decode has the columns of `DecodeWork`, one of extend those of `ExtendWork`, and both have

    us        measured, one layer, without the store of a step
    table     page table and page size, "block_table/16"
    source    "kernels" or the workload; `point` names it there; held out together
    weight    of its error in the fit

`lists` (extend): how often the list of tiles was made for this layer. A step of a file of measured steps is had again
from its schedule (`validation.py`), which must give the amounts that were saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments.engine.attention_time import Layout, TableKind, decode_work, extend_work
from kvarena.experiments.engine.scheduler import StepPlan
from kvarena.experiments.engine.step_time import GpuTimes, StepAmounts, layout_of, step_amounts
from kvarena.experiments.engine.validation import ALLOCATORS, LIMITS, MAX_OUTPUT, schedule_again, step_load
from kvarena.experiments.models import ModelShape, model_shape

KERNEL_WEIGHT = 5.0  # a kernel of the benchmark stands for hundreds of like steps
_UNIFORM_DECODE = re.compile(r"(\d+)x(\d+)k")
_UNIFORM_EXTEND = re.compile(r"(\d+)/(\d+)x(\d+)")


@dataclass(frozen=True)
class Points:
    """Two tables of points, and where they come from."""

    decode: pd.DataFrame
    extend: pd.DataFrame
    sources: tuple[str, ...]
    launch_us: Mapping[str, float]

    def __add__(self, other: Points) -> Points:
        return Points(
            pd.concat([self.decode, other.decode], ignore_index=True),
            pd.concat([self.extend, other.extend], ignore_index=True),
            self.sources + other.sources,
            {**self.launch_us, **other.launch_us},
        )


def read_parts(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All rows of a kernel benchmark's results, and the cards. Raises ValueError naming the file."""
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"].values()
        rows = [row for part in parts for row in part["rows"]]
        cards = sorted({part["provenance"]["card"][0] for part in parts})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as kernel benchmark results ({error})") from None
    return rows, cards


def kernel_points(path: Path) -> tuple[Points, list[dict[str, Any]]]:
    """Our attention kernels on the grid of points, on shuffled pages and those of the validation's designs; and all
    rows of the file. Raises ValueError naming the file."""
    rows, cards = read_parts(path)
    decode: list[dict[str, Any]] = []
    extend: list[dict[str, Any]] = []
    for row in rows:
        if row.get("study") != "grid" or "error" in row or not str(row.get("kernel", "")).startswith("kvarena"):
            continue
        if row["op"] == "decode":
            decode += _decode_point(row)
        elif row["op"] == "extend" and row["kernel"] == "kvarena-gluon":
            extend += _extend_point(row)
    if not decode or not extend:
        raise ValueError(f"{path}: expected decode and extend kernels on the grid, found {len(decode)}, {len(extend)}")
    host = {row["what"]: row["us"] for row in rows if row["op"] == "host" and row.get("kernel") == "kvarena"}
    launch = {}
    if {"store", "decode_split", "extend_gluon"} <= set(host):
        launch = {"decode": host["store"] + host["decode_split"], "extend": host["store"] + host["extend_gluon"]}
    source = f"{len(decode) + len(extend)} kernels of {path.name} on {', '.join(cards)}"
    return Points(pd.DataFrame(decode), pd.DataFrame(extend), (source,), launch), rows


DESIGN_TABLES = {f"{table}/{spec['page_size']}" for spec, table in ALLOCATORS.values()}


def _kernel_layout(row: Mapping[str, Any], table: TableKind, table_tokens: int) -> Layout:
    heads, kv_heads = map(int, row["heads"].split("/"))
    shape = ModelShape(num_layers=1, num_kv_heads=kv_heads, head_dim=128)
    return layout_of(shape, heads, int(row["page"]), table, table_tokens)


def _decode_point(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    found, table = _UNIFORM_DECODE.fullmatch(row["point"]), str(row["kernel"]).removeprefix("kvarena-")
    key = f"{table}/{row['page']}"
    if found is None or key not in DESIGN_TABLES:
        return []
    batch, length = int(found[1]), 1024 * int(found[2])
    work = decode_work([length] * batch, _kernel_layout(row, table, length), batch * length)  # type: ignore[arg-type]
    about = {"us": row["us"], "table": key, "source": "kernels", "point": row["point"], "weight": KERNEL_WEIGHT}
    return [{**asdict(work), **about}]


def _extend_point(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = _UNIFORM_EXTEND.fullmatch(row["point"])
    keys = sorted(key for key in DESIGN_TABLES if key.endswith(f"/{row['page']}"))
    if found is None or not keys:
        return []
    new, prefix, batch = map(int, found.groups())
    work = extend_work([(prefix, new)] * batch, _kernel_layout(row, "block_table", new + prefix))
    about = {"us": row["us"], "table": keys[0], "source": "kernels", "point": row["point"], "weight": KERNEL_WEIGHT}
    return [{**asdict(work), "lists": 0.0, **about}]  # made beforehand in the benchmark


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a file, its plan had again.

    lists    how often the list of tiles was made in it
    repeats  measured microseconds of each round; eager: launched kernel by kernel
    """

    load: str
    design: str
    number: int
    plan: StepPlan
    layout: Layout
    shape: ModelShape
    model: str
    lists: int
    measured_us: float
    repeats: tuple[float, ...] = ()
    eager_us: float | None = None

    @property
    def cell(self) -> str:
        return f"{self.load}/{self.design}"

    @property
    def kind(self) -> str:
        amounts = step_amounts(self.plan)
        if not amounts.num_extends:
            return "decode"
        return "mixed" if amounts.num_decodes else "extend"


def read_steps(path: Path) -> list[MeasuredStep]:
    """Every step of a file of measured steps. Raises ValueError naming the file when it has none, or when its schedule
    can no longer be had again."""
    from kvarena.experiments.capacity_card import read_measured

    data = read_measured(path, predicted=False)
    steps = [step for cell in data["cells"] for step in _cell_steps(path, cell, data["gpu"])]
    if not steps:
        raise ValueError(f"{path}: expected cells with steps, found none")
    return steps


def _cell_steps(path: Path, cell: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[MeasuredStep]:
    shape, model = model_shape(cell["model"]), cell["model"]
    design = str(cell["design"]).replace("-", ", ")
    if not cell["steps"]:
        return
    if design not in ALLOCATORS or cell["load"] not in about.get("loads", {}):
        raise ValueError(f"{path}: no validation workload {cell['load']!r} over {design!r}")
    names = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
    limits = replace(LIMITS, **{name: about[name] for name in names})
    load = step_load(about["loads"][cell["load"]])
    plans = schedule_again(load, design, about["policy"], limits, about.get("max_output", MAX_OUTPUT))
    size, table = int(cell["page_size"]), ALLOCATORS[design][1]
    row_tokens = min(limits.max_model_len + 2 * size, load.pool_tokens)
    layout = layout_of(shape, int(about["num_heads"]), size, table, row_tokens)
    lists = int(about.get("lists_a_step", shape.num_layers))
    for step in cell["steps"]:
        plan = plans.get(step["step"])
        _check_again(path, cell, step, plan)
        yield MeasuredStep(
            cell["load"],
            cell["design"],
            int(step["step"]),
            plan or StepPlan(),
            layout,
            shape,
            model,
            lists,
            float(step["kernels_us"]),
            tuple(step.get("repeats_us", ())),
            step.get("eager_us"),
        )


def _check_again(path: Path, cell: Mapping[str, Any], step: Mapping[str, Any], plan: StepPlan | None) -> None:
    again = {} if plan is None else asdict(step_amounts(plan))
    for name in (entry.name for entry in fields(StepAmounts)):
        if again.get(name) != step[name]:
            raise ValueError(
                f"{path}: {cell['load']}/{cell['design']}, step {step['step']}: {name} {step[name]} saved, "
                f"{again.get(name)} by the schedule of today"
            )


def step_points(steps: list[MeasuredStep], times: GpuTimes) -> Points:
    """The attention of each step, one layer, the store taken off by `times`."""
    decode, extend = [], []
    for step in steps:
        plan, layers = step.plan, step.shape.num_layers
        held = 2**62 if plan.pages_in_use is None else plan.pages_in_use * step.layout.page_size
        stored = plan.num_tokens * step.shape.bytes_per_token / layers / times.store_gbps / 1e3 + times.store_us
        us = step.measured_us / layers - stored
        key = f"{step.layout.table}/{step.layout.page_size}"
        about = {"us": us, "table": key, "source": step.load, "point": step.number, "weight": 1.0}
        if step.kind == "decode":
            work = decode_work([entry.end for entry in plan.batch], step.layout, held)
            decode.append({**asdict(work), **about})
        else:
            tiles = extend_work([(entry.num_before, entry.num_new) for entry in plan.batch], step.layout)
            extend.append({**asdict(tiles), "lists": step.lists / layers, **about})
    return Points(pd.DataFrame(decode), pd.DataFrame(extend), (f"{len(steps)} steps",), {})
