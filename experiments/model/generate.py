"""A real model behind the engine: prompts in, greedy text out, with what the allocator did for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.engine.engine import Engine, StepRecord, make_scheduler
from kvarena.experiments.engine.model_executor import ModelExecutor, Tie
from kvarena.experiments.engine.paged_memory import MemoryOptions
from kvarena.experiments.engine.policy_vllm import VllmScheduler
from kvarena.experiments.engine.request import EngineRequest, State, make_request
from kvarena.experiments.engine.scheduler import SchedulerConfig

MAX_IDLE_STEPS = 1000  # of an engine that has work and computes nothing


class ModelEngine:
    """One engine with executor `model`.

    >>> from kvarena.allocators.config import make_allocator
    >>> from kvarena.experiments.model.loading import random_model
    >>> engine = ModelEngine(random_model("llama"), make_allocator({"kind": "token", "page_size": 4}, num_pages=32))
    >>> _ = engine.add("a", [5, 6, 7, 8, 9], max_tokens=3); engine.run()
    >>> _ = engine.add("b", [5, 6, 7, 8, 9], max_tokens=3); engine.run()
    >>> engine.requests["a"].hits, engine.requests["b"].hits, engine.output("a") == engine.output("b")
    ([0], [4], True)
    """

    def __init__(
        self,
        model: Any,
        allocator: KVAllocator,
        *,
        policy: str = "vllm",
        limits: SchedulerConfig | None = None,
        options: MemoryOptions | None = None,
        stop_tokens: Iterable[int] = (),
    ) -> None:
        limits = limits or SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=32, max_model_len=512)
        self.executor = ModelExecutor(model, allocator, limits, options, stop_tokens)
        self.allocator = self.executor.allocator
        self.engine = Engine(make_scheduler(policy, self.allocator, limits), self.executor)
        self.requests: dict[str, EngineRequest] = {}

    def add(self, request_id: str, token_ids: Sequence[int], max_tokens: int, **fields: Any) -> EngineRequest:
        """A prompt arrives. `fields`: those of `make_request`, such as samples or beam_width."""
        request = self.requests[request_id] = make_request(request_id, token_ids, max_tokens, **fields)
        self.engine.add(request)
        return request

    def fork(self, parent_id: str, child_id: str, tokens: Sequence[int], max_tokens: int) -> EngineRequest | None:
        """A running request goes on in two ways: the child has its tokens up to those computed, then `tokens`.

        None: no room. ValueError: policy sglang, or result_lag 1, where what is computed is not known yet.
        """
        scheduler, parent = self.engine.scheduler, self.requests[parent_id]
        if not isinstance(scheduler, VllmScheduler) or scheduler.config.result_lag:
            raise ValueError("fork: expected policy vllm with result_lag 0")
        computed = parent.seq.num_computed_tokens
        child = make_request(child_id, [*parent.seq.token_ids[:computed], *tokens], max_tokens)
        child.forked = parent.forked = True
        made = self.allocator.fork(parent.seq, child.seq)
        if made is None:
            return None
        scheduler.note_copies(made.copies)
        child.state, child.num_computed = State.RUNNING, child.seq.num_computed_tokens
        scheduler.running.append(child)
        self.requests[child_id] = child
        return child

    def step(self) -> StepRecord:
        """One step of the engine; requests that it forked are in `requests` from now on."""
        record = self.engine.step()
        self.requests.update((child.id, child) for child in record.children)
        return record

    def run(self) -> None:
        """Until all requests have ended. Raises RuntimeError when the engine stops making progress."""
        idle = 0
        while self.engine.has_work:
            idle = 0 if self.step().plan.batch else idle + 1
            if idle > MAX_IDLE_STEPS:
                raise RuntimeError(f"the engine has work and computed nothing in {idle} steps")

    def output(self, request_id: str) -> list[int]:
        """The tokens generated so far."""
        seq = self.requests[request_id].seq
        return seq.token_ids[seq.num_prompt_tokens :].tolist()

    @property
    def ties(self) -> list[Tie]:
        return self.executor.ties


@dataclass(frozen=True)
class Generated:
    """One prompt's answer. `seconds`: of the whole run of this prompt; `pages`: held when it ended."""

    text: str
    num_prompt_tokens: int
    hit_tokens: int
    output: list[int] = field(repr=False)
    pages: int
    seconds: float
    message: str = ""

    @property
    def tokens_per_second(self) -> float:
        return len(self.output) / self.seconds if self.seconds else 0.0


def answer(engine: ModelEngine, name: str, prompt: Sequence[int], max_tokens: int, decode: Any) -> Generated:
    """Run one prompt to its end; `decode` turns output ids into text."""
    request = engine.add(name, prompt, max_tokens)
    start, pages = time.perf_counter(), 0
    while engine.engine.has_work:
        engine.step()
        if request.end is None and request.hits:
            pages = len(engine.allocator.page_ids(request.seq))
    seconds = time.perf_counter() - start
    output = engine.output(name)
    hit = request.hits[0] if request.hits else 0
    return Generated(decode(output), len(prompt), hit, output, pages, seconds, request.message)
