"""An executor whose KV says which token it is of: after every step each request must read its own, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import torch
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.engine.beams import Candidate
from kvarena.experiments.engine.engine import Engine, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs, LanguageModel
from kvarena.experiments.engine.paged_memory import KVShape, MemoryOptions, PagedMemory
from kvarena.experiments.engine.request import EngineRequest, make_request
from kvarena.experiments.engine.scheduler import Sample, Scheduled, SchedulerConfig, StepPlan
from torch import Tensor


class TruthExecutor:
    """Real pool, page table and copies; K of a token is (token, position, layer), V its negative."""

    def __init__(
        self, allocator: KVAllocator, outputs: HiddenOutputs, limits: SchedulerConfig, options: MemoryOptions
    ) -> None:
        self.outputs = outputs
        self.memory = PagedMemory(allocator, KVShape(2, 1, 4), limits, options)
        for layer in range(2):  # what nobody wrote must never be read
            self.memory.pool.key(layer).fill_(float("nan"))
            self.memory.pool.value(layer).fill_(float("nan"))
        self.allocator = self.memory.allocator
        self.num_checked = 0

    def launch(self, plan: StepPlan) -> None:
        step = self.memory.begin(plan)
        if step is None:
            return
        for layer in range(2):
            rows = [self.rows(entry, entry.num_before, layer) for entry in plan.batch]
            k = torch.cat(rows)[:, None]
            step.store(k, -k, self.memory.pool.key(layer), self.memory.pool.value(layer))
        for entry in plan.batch:
            self.check(entry)

    def rows(self, entry: Scheduled, start: int, layer: int) -> Tensor:
        """What the positions from `start` on hold, float32 [n, 4]."""
        tokens = [self.token(entry, position) for position in range(start, entry.end)]
        positions = torch.arange(start, entry.end)
        found = torch.zeros(len(tokens), 4)
        found[:, 0], found[:, 1], found[:, 2] = torch.tensor(tokens), positions, layer
        return found

    def token(self, entry: Scheduled, position: int) -> int:
        """Of a position; one that the engine does not know yet is a draft or the hidden output's."""
        seq = entry.request.seq
        if position >= entry.end - len(entry.drafts):
            return entry.drafts[position - entry.end]
        if position < seq.num_tokens:
            return seq.token_ids[position]
        return self.outputs._at(entry.request.id, position - seq.num_prompt_tokens).token

    def check(self, entry: Scheduled) -> None:
        """Every token of the request, through its page ids."""
        pool, size = self.memory.pool, self.memory.pool.page_size
        positions = torch.arange(entry.end)
        pages = torch.tensor(self.allocator.page_ids(entry.request.seq))[positions // size].long()
        for layer in range(2):
            wanted = self.rows(entry, 0, layer)
            found = pool.key(layer)[pages, positions % size, 0], -pool.value(layer)[pages, positions % size, 0]
            for each in found:
                if not torch.equal(each, wanted):
                    at = int((each != wanted).any(1).nonzero()[0, 0])
                    raise AssertionError(
                        f"request {entry.request.id}, position {at}, layer {layer}: holds {each[at].tolist()}, "
                        f"wrote {wanted[at].tolist()}"
                    )
        self.num_checked += entry.end

    def collect(self, plan: StepPlan) -> list[Sample | None]:
        return [self.outputs.sample(entry) for entry in plan.batch]


class TruthEngine:
    """A small engine over a `TruthExecutor`, with every request that it was given or forked."""

    def __init__(
        self,
        policy: str,
        spec: dict[str, Any],
        num_pages: int,
        language_model: LanguageModel | None = None,
        options: MemoryOptions | None = None,
        **fields: Any,
    ) -> None:
        config = SchedulerConfig(
            **{"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 256, "conservativeness": 0.0, **fields}
        )
        self.outputs = HiddenOutputs(language_model)
        self.inner = make_allocator(spec, num_pages=num_pages)
        self.executor = TruthExecutor(self.inner, self.outputs, config, options or MemoryOptions())
        self.scheduler = make_scheduler(policy, self.executor.allocator, config)
        self.engine = Engine(self.scheduler, self.executor)
        self.requests: dict[str, EngineRequest] = {}
        self.ended: list[str] = []

    def add(self, name: str, tokens: Any, max_tokens: int, samples: int = 1, **fields: Any) -> EngineRequest:
        """A request; its hidden outputs are 1000, 1001, ..., those of its other samples 2000, ..., 3000, ..."""
        request = self.requests[name] = make_request(name, list(tokens), max_tokens, samples=samples, **fields)
        for number in range(samples):
            first, count = 1000 * (number + 1) + 10 * (len(self.requests) % 50), max(max_tokens - number % 2, 1)
            self.outputs.add(f"{name}/{number}" if number else name, range(first, first + count))
        self.engine.add(request)
        return request

    def step(self) -> Any:
        record = self.engine.step()
        for child in record.children:
            self.requests[child.id] = child
        self.ended += [request.id for request in (*record.finished, *record.ended)]
        self.inner.check()
        if self.scheduler.host is not None:
            self.scheduler.host.check()
        return record

    def run(self, most: int = 3000) -> None:
        start = self.engine.num_steps
        while self.engine.has_work:
            self.step()
            if self.engine.num_steps > start + most:
                raise AssertionError(f"no end after {most} steps")
        free, evictable = self.inner.room()
        assert free + evictable == self.inner.num_pages

    def output(self, name: str) -> list[int]:
        seq = self.requests[name].seq
        return list(seq.token_ids[seq.num_prompt_tokens :])


def beam_model(seed: int, stops: float = 0.0) -> Any:
    """A random language model: candidates of a beam, best first, fixed by what it has generated."""

    def candidates(root: str, generated: tuple[int, ...], width: int) -> list[Candidate]:
        draw = random.Random(f"{seed}/{root}/{generated}")
        logprobs = sorted((-draw.expovariate(0.5) for _ in range(2 * width)), reverse=True)
        tokens = draw.sample(range(500), 2 * width)
        return [
            Candidate(token, logprob, draw.random() < stops) for token, logprob in zip(tokens, logprobs, strict=True)
        ]

    return candidates
