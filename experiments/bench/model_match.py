"""Tensor parallelism over two devices against one: the same page tables in every step, the same outputs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kvarena.allocators.config import make_allocator
from kvarena.experiments.engine.paged_memory import MemoryOptions
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.model.generate import ModelEngine
from kvarena.experiments.model.loading import random_model
from kvarena.experiments.model.parallel import init_ranks, shard_model

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}


def match_rank(rank: int, size: int, folder: str, device: str, shape: dict[str, Any]) -> None:
    """One rank, float32: outputs, page tables and preemptions of 12 requests over each design, to a file."""
    where = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    init_ranks(rank, size, f"{folder}/store{size}", "nccl" if device == "cuda" else "gloo")
    with torch.device(where):
        model = shard_model(random_model("llama", **shape), rank, size)
    logs = {kind: _run(model, kind, where) for kind in ("block", "token")}
    Path(folder, f"{rank}of{size}.json").write_text(json.dumps(logs))
    torch.distributed.destroy_process_group()


def _run(model: Any, kind: str, device: str) -> dict[str, Any]:
    limits = SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=16, max_model_len=256)
    allocator = make_allocator({"kind": kind, "page_size": 16}, num_pages=36)  # too few for all
    backend = "torch" if device == "cpu" else "triton"
    engine = ModelEngine(model, allocator, limits=limits, options=MemoryOptions(backend=backend, device=device))
    for number in range(12):
        engine.add(f"r{number}", [*range(1, 40), *range(100 * number + 41, 100 * number + 50 + 3 * number)], 32)
    tables = []
    while engine.engine.has_work:
        engine.step()
        tables.append(engine.executor.memory.adapter.entries.tolist())
    return {
        "outputs": {name: engine.output(name) for name in engine.requests},
        "tables": tables,
        "preemptions": sum(request.num_preemptions for request in engine.requests.values()),
        "ties": [asdict(tie) for tie in engine.ties],
    }


def run_match(device: str = "cuda", **fields: Any) -> dict[str, Any]:
    """Two devices against one; `fields` replace those of the model. Raises ValueError when they differ."""
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            torch.multiprocessing.spawn(match_rank, args=(size, folder, device, {**SHAPE, **fields}), nprocs=size)
        logs = [json.loads(Path(folder, f"{name}.json").read_text()) for name in ("0of1", "0of2", "1of2")]
    return {kind: compare(kind, [log[kind] for log in logs]) for kind in logs[0]}


def compare(kind: str, logs: list[dict[str, Any]]) -> dict[str, Any]:
    """What one device and both ranks of two have in common. Raises ValueError for what they should and have not."""
    alone, *ranks = logs
    found = {
        "tokens": sum(map(len, alone["outputs"].values())),
        "steps": len(alone["tables"]),
        "preemptions": alone["preemptions"],
        "page_tables_equal": all(rank["tables"] == alone["tables"] for rank in ranks),
        "ranks_equal": ranks[0]["outputs"] == ranks[1]["outputs"],
        "outputs_equal": all(rank["outputs"] == alone["outputs"] for rank in ranks),
        "ties": [tie for log in logs for tie in log["ties"]],
    }
    wrong = not (found["page_tables_equal"] and found["ranks_equal"])
    if wrong or not (found["outputs_equal"] or found["ties"]):
        raise ValueError(f"{kind}: two devices differ from one: {found}")
    return found
