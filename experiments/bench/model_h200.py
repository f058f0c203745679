"""A model of 8B shape with random weights on one H200, or two: what decoding costs, what steps take, what fits.

    decode    tokens a second under CUDA graphs at batch 1 to 256, with the share of allocator and adapter
    linear    the linear layers by tokens in a batch, whole prefill passes, and pages to the host and back
    steps     single steps of executor `kernels` on validation workloads, for the step-time model
    capacity  concurrent requests that really fit, for each design, at equal bytes and as deployed
    match     tensor parallelism over two GPUs through NCCL against one

    python -m kvarena.experiments.bench.model_h200 --parts decode linear steps capacity --out out/h200    # one GPU
    python -m kvarena.experiments.bench.model_h200 --parts match --out out/h200                           # two GPUs
    python -m kvarena.experiments.bench.model_h200 --merge --out out/h200                                 # model.json
    python -m kvarena.experiments.bench.model_h200 --parts capacity --out out/h200 --like results/h200/capacity.json \
        --cells deployed/shared/block-32 equal/shared/token-1                       # these, sized as that file's cells

`--merge` adds the cells of shards to a capacity.json that is there already, or puts them in place of its own.
Each part is written as soon as it is done. `--device cpu` runs the same code on a tiny model, in a minute or two.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from kvarena.experiments.bench import model_capacity, model_decode, model_match, model_steps
from kvarena.experiments.capacity import DESIGNS, PANELS, capacity_plan, small_card
from kvarena.experiments.capacity_card import card_plan, read_measured, write_measured
from kvarena.experiments.capacity_loads import LOADS
from kvarena.experiments.capacity_sizing import Card
from kvarena.experiments.engine.paged_memory import KVShape
from kvarena.experiments.engine.validation import ALLOCATORS as STEP_DESIGNS
from kvarena.experiments.engine.validation import LOADS as STEP_LOADS
from kvarena.experiments.outputs import refuse_unwritable
from kvarena.experiments.provenance import code_version

PARTS = ("decode", "linear", "steps", "capacity", "match")
MERGED = ("decode", "linear", "match")


def run_decode(options: argparse.Namespace) -> dict[str, Any]:
    """Gate, then every cell."""
    model = _model(options)
    errors = model_decode.gate(model, context=64, backend=options.backend)
    print(f"designs against the first, relative error of logits: {errors}", flush=True)
    cells = []
    for cell in model_decode.rows(model, options.batches, options.context, options.steps, options.backend):
        cells.append(asdict(cell))
        print(model_decode.line(cell), flush=True)
    return {"layers": options.layers, "gate": errors, "cells": cells}


def run_linear(options: argparse.Namespace) -> dict[str, Any]:
    """What a step has beside attention."""
    model, shape = _model(options), _setup(options).shape
    counts = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    linear = list(model_steps.linear_rows(model, counts if options.device != "cpu" else counts[:3]))
    pages = [1, 8, 64, 512] if options.device != "cpu" else [1, 4]
    swap = (
        [] if options.backend == "torch" else list(model_steps.swap_rows(shape, torch.bfloat16, options.device, pages))
    )
    return {"linear": linear, "swap": swap}


def run_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Every validation workload over every design, so many times; with --eager once more without waits."""
    setup = _setup(options)
    rows: list[dict[str, Any]] = []
    # Kernels are compiled in the first round, which is kept too; later ones need not wait as long for their launches.
    waits = [setup.wait_us, *[min(setup.wait_us, 8_000)] * (options.repeats - 1), *[0] * options.eager]
    for repeat, wait_us in enumerate(waits):
        for name, load in STEP_LOADS.items():
            for design in STEP_DESIGNS:
                start, before = time.perf_counter(), len(rows)
                own = model_steps.step_rows(name, load, design, replace(setup, wait_us=wait_us))
                rows += [{**row, "repeat": repeat} for row in own]
                print(_steps_line(f"{repeat} {name:>15} {design:>10}", rows[before:], start), flush=True)
                _tidy(options)
        _write(options, "steps", {**model_steps.describe(setup), "rows": rows})
    return {**model_steps.describe(setup), "rows": rows}


def _steps_line(what: str, rows: list[dict[str, Any]], start: float) -> str:
    own = [row for row in rows if not row["launch_bound"]]
    total = sum(row["kernels_us"] for row in own) / 1e3
    return f"{what}: {len(own)} of {len(rows)} steps, {total:9.1f} ms, {time.perf_counter() - start:5.1f} s"


def run_capacity(options: argparse.Namespace) -> dict[str, Any]:
    """This shard of the cells, written as they come: the file that `kvarena capacity --measured` reads."""
    model = _model(options)
    card = model_capacity.profile(model, options.device, 8192)
    if options.device == "cpu":
        cells = capacity_plan(
            {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32"},
            on=small_card("CPU", 6),
            panels=["equal"],
            loads=["chat", "shared"],
            rows=64,
            max_model_len=17_000,
        )
    else:
        on = card if options.like is None else _card_of(options.like)
        cells = card_plan(options.cells, on=on) if options.cells else capacity_plan("llama-3-8b", on=on)
    place = model_capacity.Place(options.device, options.backend)
    found = []
    shard, shards = options.shard
    for row in model_capacity.rows(cells[shard::shards], place):
        found.append({**row, "commit": code_version()["commit"]})
        print(
            f"{row['panel']}/{row['load']}/{row['design']}: predicted {row['predicted']}, measured {row['measured']}, "
            f"{row['num_pages']} pages, {row['wall_s']} s",
            flush=True,
        )
        _write(options, f"capacity{shard}", {"card": asdict(card), "cells": found})
    return {"card": asdict(card), "cells": found}


def _card_of(path: Path) -> Card:
    """The card that a saved file's cells were sized for, so that more cells get pools of the same bytes."""
    gpu = read_measured(path, predicted=False)["gpu"]
    return Card(gpu["name"], gpu["total_bytes"], gpu["weights_bytes"], gpu["workspace_bytes"])


def run_match(options: argparse.Namespace) -> dict[str, Any]:
    """Two devices against one."""
    small = {"num_hidden_layers": 2, "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 128, "head_dim": 16}
    found = model_match.run_match(options.device, **(small if options.device == "cpu" else {}))
    for kind, result in found.items():
        print(kind, result, flush=True)
    return found


RUN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "decode": run_decode,
    "linear": run_linear,
    "steps": run_steps,
    "capacity": run_capacity,
    "match": run_match,
}


def _model(options: argparse.Namespace) -> Any:
    """The model, built once for all parts, with the library's own attention."""
    if options.model is None:
        fields = model_decode.TINY if options.device == "cpu" else {}
        options.model = model_decode.build(options.layers, options.device, **fields)
    options.model.set_attn_implementation("sdpa")
    return options.model


def _setup(options: argparse.Namespace) -> model_steps.Setup:
    setup = model_steps.Setup()
    if options.device != "cpu":
        return setup
    tiny = {"shape": KVShape(1, 1, 16), "num_heads": 2, "device": "cpu", "dtype": torch.float32}
    return replace(setup, **tiny, backend=options.backend, max_steps=12)  # type: ignore[arg-type]


def _tidy(options: argparse.Namespace) -> None:
    gc.collect()
    if options.device != "cpu":
        torch.cuda.empty_cache()


def _write(options: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.json"
    path.write_text(json.dumps({"provenance": provenance(options.device), **result}) + "\n")


def provenance(device: str) -> dict[str, Any]:
    """Card and versions of a part."""
    import platform

    import transformers
    import triton

    card = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    return {
        "card": card,
        "kvarena": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def merge(folder: Path) -> dict[str, Any]:
    """One document of the parts in a folder; shards of the capacity part and the steps become files of their own."""
    parts = {name: json.loads(path.read_text()) for name in MERGED if (path := folder / f"{name}.json").is_file()}
    shards = [json.loads(path.read_text()) for path in sorted(folder.glob("capacity[0-9]*.json"))]
    if shards:
        _merge_capacity(folder / "capacity.json", shards)
    if (path := folder / "steps.json").is_file():
        steps = json.loads(path.read_text())
        about = {name: value for name, value in steps.items() if name != "rows"}
        write_measured(
            folder / "step_cells.json", step_cells(steps["rows"]), {"name": about["provenance"]["card"], **about}
        )
    if not parts and not shards and not path.is_file():
        raise ValueError(f"{folder}: expected {', '.join(f'{name}.json' for name in MERGED)}, found none")
    return {"schema_version": 1, "parts": parts}


def _merge_capacity(path: Path, shards: list[dict[str, Any]]) -> None:
    """Cells of the shards, beside those that the file has and no shard measured again."""
    saved = read_measured(path, predicted=False) if path.exists() else None
    cells = {_place(cell): cell for part in [saved, *shards] if part for cell in part["cells"]}
    gpu = saved["gpu"] if saved else {**shards[0]["provenance"], **shards[0]["card"]}
    write_measured(path, [cells[place] for place in sorted(cells)], gpu)


def step_cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured steps as cells that `calibrate --steps` reads: one for each workload and design.

    A step has the amounts of its batch, `repeats_us` of the rounds in which its launches did not take longer than the
    GPU (kernels were compiled, say), their median `kernels_us`, and `eager_us` where a round was launched kernel by
    kernel. A step without any is left out.
    """
    cells: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        design = row["allocator"].replace(", ", "-")
        about = {name: value for name, value in row.items() if name not in _OF_A_ROUND}
        step = cells.setdefault((row["workload"], design), {}).setdefault(row["step"], {**about, "repeats_us": []})
        if row["eager"]:
            step["eager_us"] = row["kernels_us"]
        elif not row["launch_bound"]:
            step["repeats_us"].append(row["kernels_us"])
    return [_step_cell(load, design, list(steps.values())) for (load, design), steps in cells.items()]


_OF_A_ROUND = ("workload", "allocator", "launch_bound", "eager", "repeat", "kernels_us")


def _step_cell(load: str, design: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [{**step, "kernels_us": statistics.median(step["repeats_us"])} for step in steps if step["repeats_us"]]
    most = max((step["num_decodes"] + step["num_extends"] for step in kept), default=0)
    keys = {"panel": "validation", "load": load, "design": design, "model": "llama-3-8b"}
    return {**keys, "page_size": int(design.split("-")[1]), "measured": most, "steps": kept}


def _place(cell: dict[str, Any]) -> tuple[int, int, int]:
    lists = (list(PANELS), list(LOADS), list(DESIGNS))
    return tuple(names.index(cell[key]) for names, key in zip(lists, ("panel", "load", "design"), strict=True))  # type: ignore[return-value]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises ValueError for a shard that does not exist, and without a GPU unless it is to run on a
    CPU, and where nothing can be written at --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:-1]))
    parser.add_argument("--out", type=Path, help="folder for a JSON file a part")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("triton", "torch"), help="default: triton, on a CPU torch")
    parser.add_argument("--layers", type=int, default=None, help="of the model; default 32, on a CPU 2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each decoded sequence")
    parser.add_argument("--steps", type=int, default=32, help="measured decode steps a cell")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of the validation workloads")
    parser.add_argument("--eager", action="store_true", help="one more round, each step launched kernel by kernel")
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="of the capacity cells")
    parser.add_argument("--cells", nargs="+", metavar="PANEL/LOAD/DESIGN", help="capacity: these; default all")
    parser.add_argument("--like", type=Path, metavar="FILE", help="capacity: sized for the card of a saved file")
    parser.add_argument("--merge", action="store_true", help="join the parts in --out into model.json, run nothing")
    options = parser.parse_args(arguments)
    if not 0 <= options.shard[0] < options.shard[1]:
        raise ValueError(f"--shard: expected I below N, found {options.shard}")
    if options.out is not None:
        refuse_unwritable(options.out / "model.json")
    if not options.merge and options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model_h200 needs a CUDA device; --device cpu runs it on a tiny model")
    options.backend = options.backend or ("torch" if options.device == "cpu" else "triton")
    options.model = None
    options.layers = options.layers or (2 if options.device == "cpu" else 32)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.merge:
        if options.out is None:
            raise ValueError("--merge: expected --out with a folder of parts")
        merged = merge(options.out)
        if merged["parts"]:
            (options.out / "model.json").write_text(json.dumps(merged, indent=1) + "\n")
        return
    failed = []
    for part in options.parts:
        start = time.perf_counter()
        name = f"capacity{options.shard[0]}" if part == "capacity" else part
        try:
            _write(options, name, RUN[part](options))
        except Exception:  # a card is held for minutes: the other parts run all the same
            traceback.print_exc()
            failed.append(part)
        _tidy(options)
        print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
    if failed:
        raise RuntimeError(f"parts that failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
