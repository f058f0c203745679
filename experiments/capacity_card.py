"""The capacity question on a real card: the same bursts over real pools, page tables and kernels, no model.

    python -m kvarena.experiments.capacity_card --out results/h200/capacity.json

Each cell's pool has the pages of the plan; the burst is decided by the same schedulers and allocators, its KV is
written and read by the kernels in every layer (random K, V and queries). Saved: the largest burst carried beside its
prediction, what of the card's memory pool and tables really took, and the measured time of every step with the amounts
that the step-time model goes by. `kvarena capacity --measured FILE` shows them beside a simulation;
`python -m kvarena.experiments.engine.calibrate results/h200/kernels.json --steps FILE` holds the model against them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvarena.experiments.capacity import Cell, Found, capacity_plan, measure
from kvarena.experiments.capacity_sizing import Card, card
from kvarena.experiments.engine.simulate import MakeExecutor
from kvarena.experiments.engine.step_time import compute_of
from kvarena.experiments.foreign import read_json
from kvarena.experiments.wrong_kind import reads

SCHEMA_VERSION = 1
# What is asked of a card by default: both upstreams' designs on every load, and what stands between them on one.
CARD_CELLS = (
    "equal/chat/block-16",
    "equal/chat/token-1",
    "equal/chat/contiguous-declared",
    "equal/long/block-16",
    "equal/long/token-1",
    "equal/shared/block-16",
    "equal/shared/token-1",
    "equal/chat/block-64",
)


def card_plan(names: Iterable[str] = CARD_CELLS, model: Any = "llama-3-8b", **options: Any) -> list[Cell]:
    """The cells of those names (panel/load/design), in that order; `options` are those of `capacity_plan`. Raises
    ValueError for an unknown one."""
    cells = []
    for name in names:
        parts = name.split("/")
        if len(parts) != 3:
            raise ValueError(f"cells: expected PANEL/LOAD/DESIGN, found {name!r}")
        panel, load, design = parts
        cells += capacity_plan(model, panels=[panel], loads=[load], designs=[design], **options)
    return cells


def kernels_of(
    cell: Cell, device: str = "cuda", backend: str = "triton", seen: dict[str, Any] | None = None
) -> MakeExecutor:
    """What `measure` needs to run a cell over real pools. `seen` is told the bytes that each pool took."""
    import torch
    from kvarena.experiments.engine.kernel_executor import KernelExecutor
    from kvarena.experiments.engine.paged_memory import KVShape, MemoryOptions

    shape = cell.shape
    dtype = getattr(torch, shape.dtype)
    table: Any = "req_to_token" if cell.spec["kind"] == "token" else "block_table"
    options = MemoryOptions(backend=backend, table=table, dtype=dtype, device=device)
    heads = compute_of(cell.model, shape).num_heads

    def make(allocator: Any, outputs: Any, limits: Any) -> Any:
        cuda = device.startswith("cuda")
        if cuda:
            torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0] if cuda else 0
        executor = KernelExecutor(
            allocator,
            outputs,
            KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim),
            heads,
            limits,
            options,
        )
        if cuda and seen is not None:
            seen["free_bytes_before"], seen["free_bytes_after"] = before, torch.cuda.mem_get_info()[0]
        return executor

    return make


def measured_cell(found: Found, memory: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """One cell of the file. `steps` are those of the largest carried burst."""
    bursts = [burst.row() for burst in found.bursts]
    steps = next((list(burst.steps) for burst in found.bursts if burst.carried and burst.steps), [])
    about = {"sizing": found.cell.sizing.lines(), "memory": memory, "wall_s": round(wall_s, 1)}
    return {**found.row(), "model": found.cell.model, **about, "bursts": bursts, "steps": steps}


def write_measured(path: Path, cells: list[dict[str, Any]], gpu: dict[str, Any]) -> None:
    """The whole file, with what the card is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"schema_version": SCHEMA_VERSION, "kind": "capacity", "gpu": gpu, "cells": cells}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(data, indent=0, separators=(",", ":")) + "\n", encoding="utf-8")
    partial.replace(path)


@reads("capacity on a card")
def read_measured(path: Path, predicted: bool = True) -> dict[str, Any]:
    """A saved file. Raises ValueError naming it when it is not one. `predicted`: whether each cell has to say what was
    predicted; files of step times have cells that ran bursts of a stated size."""
    counts = ("measured", "predicted") if predicted else ("measured",)
    try:
        data = read_json(path)
        rows = [
            (cell["panel"], cell["load"], cell["design"], *(int(cell[count]) for count in counts))
            for cell in data["cells"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as capacity results of a card ({error})") from None
    if data.get("schema_version") != SCHEMA_VERSION or data.get("kind") != "capacity" or not rows:
        raise ValueError(f"{path}: expected schema_version {SCHEMA_VERSION}, kind 'capacity' and at least one cell")
    return data


def _gpu() -> dict[str, Any]:
    import torch
    import triton

    seen = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"name": seen.name, "total_bytes": seen.total_memory, **versions}


def main(arguments: list[str] | None = None) -> int:
    """See the module's head. Cells that no longer fit into --seconds are left out and said so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--cells", nargs="+", default=list(CARD_CELLS), help="PANEL/LOAD/DESIGN")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--memory-mib", type=int, help="plan for a card of so much memory without weights (a trial)")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=131_072)
    parser.add_argument("--seconds", type=float, default=500.0, help="no cell is started after so many seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton")
    options = parser.parse_args(arguments)
    started, cells = time.monotonic(), []
    on = None if options.memory_mib is None else Card("trial", options.memory_mib * 2**20, 0, 0)
    gpu = _gpu() if options.device.startswith("cuda") else {"name": options.device}
    sizes: dict[str, Any] = {"rows": options.rows, "max_model_len": options.max_model_len}
    for cell in card_plan(options.cells, options.model, on=on or card(options.model), **sizes):
        begun = time.monotonic()
        if begun - started > options.seconds:
            print(f"{cell.name}: left out, {options.seconds:g} s are over", file=sys.stderr)
            continue
        memory: dict[str, Any] = {}
        found = measure(cell, make_executor=kernels_of(cell, options.device, options.backend, memory))
        cells.append(measured_cell(found, memory, time.monotonic() - begun))
        write_measured(options.out, cells, gpu)
        print(
            f"{cell.name}: predicted {cell.predicted}, measured {found.measured}, {cells[-1]['wall_s']} s", flush=True
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
