"""One rank of a tensor-parallel run on random weights: run by two processes, or by one as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kvarena.allocators.config import make_allocator
from kvarena.experiments.engine.paged_memory import MemoryOptions
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.model.generate import ModelEngine
from kvarena.experiments.model.loading import random_model
from kvarena.experiments.model.parallel import init_ranks, shard_model


def prompts() -> dict[str, list[int]]:
    head = [(7 * i) % 251 + 1 for i in range(18)]
    return {f"r{i}": (head if i % 2 else []) + [(31 * i + 5 * j) % 251 + 1 for j in range(4 + i)] for i in range(6)}


def rank_main(rank: int, size: int, folder: str, cases: list[tuple[str, str, str]]) -> None:
    """Run each (family, allocator kind, table) and write what happened to `folder`/rank{rank}of{size}.json."""
    torch.set_num_threads(1)
    if size > 1:
        init_ranks(rank, size, f"{folder}/store", "gloo")
    logs = [run(rank, size, *case) for case in cases]
    Path(folder, f"rank{rank}of{size}.json").write_text(json.dumps(logs))
    if size > 1:
        dist.destroy_process_group()


def run(rank: int, size: int, family: str, kind: str, table: str) -> dict[str, Any]:
    """Outputs, the page table of every step, and the shape of this rank's pool."""
    model = shard_model(random_model(family), rank, size)
    limits = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6, max_model_len=64, host_pages=8)
    allocator = make_allocator({"kind": kind, "page_size": 4}, num_pages=24)
    engine = ModelEngine(model, allocator, limits=limits, options=MemoryOptions(table=table))  # type: ignore[arg-type]
    for name, prompt in prompts().items():
        engine.add(name, prompt, 8)
    tables, memory = [], engine.executor.memory
    while engine.engine.has_work:
        engine.step()
        tables.append(memory.adapter.entries.tolist())
    return {
        "outputs": {name: engine.output(name) for name in engine.requests},
        "ties": len(engine.ties),
        "preemptions": sum(request.num_preemptions for request in engine.requests.values()),
        "tables": tables,
        "kv_heads": memory.pool.num_kv_heads,
        "page_bytes": memory.pool.bytes_per_page,
    }
