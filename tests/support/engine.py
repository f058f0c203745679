"""Small engines for tests: an allocator, a policy and scripted outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvarena.allocators.config import make_allocator
from kvarena.experiments.engine.engine import Engine, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor
from kvarena.experiments.engine.request import EngineRequest, make_request
from kvarena.experiments.engine.scheduler import SchedulerConfig

MAX_STEPS = 10_000
PAIRS = [("vllm", "block"), ("vllm", "token"), ("sglang", "token"), ("sglang", "block")]


def limits(**fields: Any) -> SchedulerConfig:
    """A scheduler config with room for small tests."""
    return SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 256, **fields})


class SmallEngine:
    """One engine over `num_pages` pages, with the requests that were given to it."""

    def __init__(self, policy: str, kind: str, num_pages: int, page_size: int, **fields: Any) -> None:
        self.allocator = make_allocator({"kind": kind, "page_size": page_size}, num_pages=num_pages)
        self.scheduler = make_scheduler(policy, self.allocator, limits(**fields))
        self.outputs = HiddenOutputs()
        self.engine = Engine(self.scheduler, ScriptedExecutor(self.outputs))
        self.requests: dict[str, EngineRequest] = {}

    def add(
        self, request_id: str, tokens: Iterable[int], max_tokens: int, num_output: int | None = None, **fields: Any
    ) -> EngineRequest:
        """A request that would generate 1000, 1001, ... (`num_output` of them; default max_tokens)."""
        request = make_request(request_id, list(tokens), max_tokens, **fields)
        self.outputs.add(request_id, range(1000, 1000 + (max_tokens if num_output is None else num_output)))
        self.requests[request_id] = request
        self.engine.add(request)
        return request

    def run(self) -> None:
        """Step until all requests have ended, with every invariant checked after every step."""
        while self.engine.has_work:
            self.engine.step()
            self.allocator.check()
            if self.engine.num_steps > MAX_STEPS:
                raise RuntimeError(f"no end after {MAX_STEPS} steps")
        free, evictable = self.allocator.room()
        if free + evictable != self.allocator.num_pages:
            raise RuntimeError(f"{free} free + {evictable} evictable of {self.allocator.num_pages} pages after the end")
