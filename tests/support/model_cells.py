"""One run of the real-model matrix: what goes in, what has to happen on the way, what must come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvarena.allocators.config import make_allocator
from kvarena.experiments.engine.paged_memory import MemoryOptions
from kvarena.experiments.engine.scheduler import SchedulerConfig
from kvarena.experiments.model.generate import ModelEngine

# page size -> pages on the device and on the host: too few for everybody's output, and a host tier that holds one
# victim but not two, so that one comes back by a copy and another is computed again.
POOLS = {1: (558, 48), 16: (50, 2), 64: (15, 2)}
NUM_SAMPLES_BEFORE_FORK = 6
TEMPLATE_TOKENS = 8  # what all chats begin with; a hit of no more is a cold one


@dataclass
class CellRun:
    """A finished run."""

    engine: ModelEngine
    outputs: dict[str, list[int]]
    chunks: int
    fork_shares: int
    counts: dict[str, int] = field(default_factory=dict)


def make_engine(model: Any, kind: str, page_size: int, table: str, **options: Any) -> ModelEngine:
    """An engine for the 18 chats, with a pool that is too small for them."""
    pages, host_pages = POOLS[page_size]
    limits = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=18, max_model_len=160, host_pages=host_pages)
    allocator = make_allocator({"kind": kind, "page_size": page_size}, num_pages=pages)
    return ModelEngine(model, allocator, limits=limits, options=MemoryOptions(table=table, **options))


def run_cell(
    engine: ModelEngine, prompts: dict[str, list[int]], num_tokens: int, fork_of: str, fork_token: int
) -> CellRun:
    """All prompts at once; `fork_of` forks after six samples, and its child goes on with another token."""
    for name, prompt in prompts.items():
        engine.add(name, prompt, num_tokens)
    chunks = shares = 0
    parent = engine.requests[fork_of]
    while engine.engine.has_work:
        record = engine.step()
        chunks += sum(not entry.samples for entry in record.plan.batch)
        engine.allocator.check()
        engine.executor.memory.adapter.check(
            [request.seq for request in engine.requests.values() if request.seq in engine.executor.memory.adapter]
        )
        if "fork" not in engine.requests and parent.num_output == NUM_SAMPLES_BEFORE_FORK and parent.num_computed:
            left = num_tokens - NUM_SAMPLES_BEFORE_FORK
            if engine.fork(fork_of, "fork", [fork_token], left) is not None:
                pages = [set(engine.allocator.page_ids(engine.requests[name].seq)) for name in (fork_of, "fork")]
                shares = len(pages[0] & pages[1])
    outputs = {name: engine.output(name) for name in engine.requests}
    return CellRun(engine, outputs, chunks, shares, _counts(engine))


def _counts(engine: ModelEngine) -> dict[str, int]:
    requests = list(engine.requests.values())
    return {
        "hit_tokens": sum(request.hits[0] for request in requests if request.hits),
        "cold": sum(request.hits[0] < TEMPLATE_TOKENS for request in requests if request.hits),
        "preemptions": sum(request.num_preemptions for request in requests),
        "swapped_tokens": sum(request.swapped_tokens for request in requests),
        "recomputed_tokens": sum(request.recomputed_tokens for request in requests),
    }
