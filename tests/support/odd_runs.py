"""Small engines in odd settings, drawn from a seed: pools of a page, budgets below one, replies, beams, guesses, host
tiers, all orders and limits at once. Every law of the engine is checked after every step.

What a seed means must stay: the tests keep seeds of faults that were found.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kvarena.allocators.config import make_allocator
from kvarena.experiments.engine.engine import Engine, StepRecord, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor
from kvarena.experiments.engine.request import End, EngineRequest, make_request
from kvarena.experiments.engine.scheduler import SchedulerConfig
from support.truth import MemoryOptions, TruthExecutor, beam_model


@dataclass
class Ask:
    """A request: what it brings, and how many steps pass before the next one."""

    prompt: list[int]
    output: int
    declared: int
    pause: int
    samples: int
    beam_width: int
    priority: int
    namespace: str | None


@dataclass
class OddRun:
    """Everything that a seed decides."""

    seed: int
    policy: str
    spec: dict[str, Any]
    num_pages: int
    fields: dict[str, Any]
    drafts: int
    right: float
    asks: list[Ask] = field(default_factory=list)


def draw(seed: int) -> OddRun:
    """The setting and the requests of a seed."""
    rng = random.Random(seed)
    policy, spec = rng.choice(["vllm", "sglang"]), _allocator(rng)
    fields = _limits(rng, policy, spec)
    drafts = rng.choice([0, 0, 1, 3]) if fields["result_lag"] == 0 else 0
    pages = rng.choice([1, 2, 3, 5, 8, 12, 20, 40, 100])
    run = OddRun(seed, policy, spec, pages, fields, drafts, rng.random())
    common = [rng.randrange(3) for _ in range(40)]
    for _ in range(rng.randint(1, 12)):
        run.asks.append(_ask(rng, policy, common, run.asks))
    return run


def _allocator(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["block", "token", "block", "token", "block", "token", "contiguous", "exact"])
    spec: dict[str, Any] = {"kind": kind, "page_size": rng.choice([1, 1, 2, 3, 4, 4, 16])}
    if kind == "contiguous":
        spec["sizing"] = rng.choice(["max", "pow2", "declared", "oracle"])
    if kind in ("contiguous", "exact"):
        return spec
    odd = rng.choice(["", "", "", "no cache", "general", "form", "half pages"])
    if odd == "no cache":
        spec["prefix_cache"] = False
    elif odd == "general" or (odd == "form" and kind == "block"):
        spec["form"] = "general" if odd == "general" else rng.choice(["hashed", "runs"])
    elif odd == "half pages" and kind == "block" and spec["page_size"] % 2 == 0:
        spec["hash_unit"] = spec["page_size"] // 2
    return spec


def _limits(rng: random.Random, policy: str, spec: dict[str, Any]) -> dict[str, Any]:
    seqs, budget = rng.choice([1, 1, 2, 3, 4, 6, 8]), rng.choice([1, 2, 3, 5, 8, 16, 64])
    longest = rng.choice([2, 8, 16, 33, 64, 128])
    if spec["kind"] == "contiguous":
        spec["max_model_len"] = longest
    return {
        "max_num_batched_tokens": max(budget, seqs) if policy == "vllm" else budget,
        "max_num_seqs": seqs,
        "max_model_len": longest,
        "chunked_prefill": rng.random() < 0.8,
        "chunk_size": rng.choice([None, None, 1, 3, 8, 16]),
        "result_lag": rng.choice([0, 1]),
        "order": rng.choice(["fcfs", "lpm", "dfs-weight", "priority"]),
        "prefix_deferral": rng.choice([None, None, True, False]),
        "limits": rng.choice(["exact", "exact", "upstream"]),
        "host_pages": rng.choice([0, 0, 1, 3, 30]),
        "host_cache_pages": 0 if "hash_unit" in spec else rng.choice([0, 0, 0, 1, 5, 30]),
        "watermark": rng.choice([0.0, 0.0, 0.1, 0.5, 0.9]),
        "whole_prompt_gate": rng.random() < 0.7,
        "max_num_active_seqs": rng.choice([None, None, max(seqs // 2, 1)]),
        "adaptive_cap": rng.random() < 0.3,
        "conservativeness": rng.choice([0.0, 0.0, 0.3, 1.0, 2.0]),
    }


def _ask(rng: random.Random, policy: str, common: list[int], before: list[Ask]) -> Ask:
    prompt = common[: rng.choice([0, 0, rng.randint(0, 40), 40])]
    prompt += [rng.randrange(3) for _ in range(rng.choice([1, 2, 3, rng.randint(1, 30), rng.randint(1, 90)]))]
    if before and rng.random() < 0.2:
        prompt = list(rng.choice(before).prompt)
    output, ways = rng.randint(1, 14), rng.random()
    return Ask(
        prompt,
        output,
        max(output + rng.choice([0, 0, 0, 5, 200, -3]), 1),
        pause=rng.choice([0, 0, 1, 4, 9]),
        samples=rng.choice([2, 3, 5]) if ways < 0.15 else 1,
        beam_width=rng.choice([2, 3]) if policy == "vllm" and 0.15 <= ways < 0.3 else 0,
        priority=rng.choice([0, 0, 1, -2]),
        namespace=rng.choice([None, None, None, "x"]),
    )


class OddEngine:
    """One drawn run, stepped to its end. `truth`: real copies and K, V that say which token they are of."""

    def __init__(self, run: OddRun, *, truth: bool = False) -> None:
        self.run, self.config = run, SchedulerConfig(**run.fields)
        self.outputs = HiddenOutputs(beam_model(run.seed, 0.05))
        self.inner = self.allocator = make_allocator(run.spec, num_pages=run.num_pages)
        executor: Any = ScriptedExecutor(self.outputs)
        if truth:
            executor = TruthExecutor(self.inner, self.outputs, self.config, MemoryOptions())
            self.allocator = executor.allocator
        self.scheduler = make_scheduler(run.policy, self.allocator, self.config)
        if run.drafts:
            self.scheduler.speculate(self.outputs.drafter(run.right, run.seed), run.drafts)
        self.engine = Engine(self.scheduler, executor)
        self.requests: dict[str, EngineRequest] = {}
        self.hidden: dict[str, list[int]] = {}
        self.log: list[tuple[Any, ...]] = []

    def finish(self) -> list[tuple[Any, ...]]:
        """Until all have ended; returns what was decided in each step. Raises AssertionError with what is wrong."""
        asks, pause = list(enumerate(self.run.asks)), 0
        tokens = sum(len(a.prompt) + a.output * max(a.samples, a.beam_width, 1) for a in self.run.asks)
        while asks or self.engine.has_work:
            while asks and pause <= 0:
                pause = self._add(*asks.pop(0))
            pause -= 1
            self._note(self.engine.step())
            assert self.engine.num_steps <= 400 + 60 * tokens, f"no end: {self._left()}"
        self._check_end()
        return self.log

    def _left(self) -> list[str]:
        return [name for name, request in self.requests.items() if not request.done]

    def _add(self, number: int, ask: Ask) -> int:
        name = f"r{number}"
        for each in range(ask.samples):
            fork, first = (f"{name}/{each}" if each else name), 1000 * (each + 1) + 50 * number
            self.hidden[fork] = list(range(first, first + max(ask.output - each % 2, 1)))
            self.outputs.add(fork, self.hidden[fork])
        request = make_request(
            name,
            ask.prompt,
            ask.declared,
            arrival_s=float(number),
            priority=ask.priority,
            namespace=ask.namespace,
            samples=ask.samples,
            beam_width=ask.beam_width,
        )
        request.seq.declared_max_tokens, request.seq.oracle_tokens = ask.declared, len(ask.prompt) + ask.output
        self.requests[name] = request
        self.engine.add(request)
        return ask.pause

    def _note(self, record: StepRecord) -> None:
        self.requests.update({child.id: child for child in record.children})
        for part in (self.inner, self.scheduler.host, self.scheduler.cache):
            if part is not None:
                part.check()
        self._check_step(record)
        groups = record.plan.admitted, record.plan.preempted, record.finished, record.ended, self.scheduler.waiting
        batch = [(e.request.id, e.num_new, e.num_before, e.samples, e.drafts) for e in record.plan.batch]
        names = [tuple(request.id for request in group) for group in groups]
        self.log.append((batch, *names, self.allocator.room(), record.plan.moves))

    def _check_step(self, record: StepRecord) -> None:
        running, waiting = self.scheduler.running_requests, self.scheduler.waiting
        batch = [entry.request.id for entry in record.plan.batch]
        queues = [request.id for request in (*running, *waiting)]
        assert len(set(batch)) == len(batch), f"twice in a batch: {batch}"
        assert len(set(queues)) == len(queues), f"twice in the queues: {queues}"
        assert len(running) <= self.config.max_num_seqs
        if self.run.policy == "vllm":
            assert record.plan.num_tokens <= self.config.max_num_batched_tokens
        for request in running:
            slots = len(self.allocator.page_ids(request.seq)) * self.allocator.page_size
            assert slots >= request.num_computed, f"{request.id}: {request.num_computed} tokens in {slots} slots"

    def _check_end(self) -> None:
        free, evictable = self.allocator.room()
        assert free + evictable == self.allocator.num_pages
        assert self.inner.reset()
        if self.scheduler.host is not None:
            assert self.scheduler.host.capacity().free == self.config.host_pages
        for name, request in self.requests.items():
            assert request.done, name
            if request.end in (End.REJECTED, End.POOL):
                assert name.split("^")[0].split("/")[0] in request.message, f"{name}: {request.message!r}"
            if request.beams is None:
                self._check_output(name, request)
            elif request.parent is None and request.end in (End.STOP, End.LENGTH):
                assert request.beams.finished, f"{name}: beams without a hypothesis"

    def _check_output(self, name: str, request: EngineRequest) -> None:
        forks = sum(each.startswith(f"{name}/") for each in self.requests)
        if request.end is End.REJECTED:
            assert not forks, f"{name}: rejected, and forked"
            return
        found = list(request.seq.token_ids[request.seq.num_prompt_tokens :])
        wanted = self.hidden[name]
        assert found == (wanted if request.end is End.STOP else wanted[: len(found)]), f"{name}: {found}"
        assert not found or forks == request.samples - 1, f"{name}: {forks} forks"
