"""Executor `model`: a real decoder of the transformers library on our paged attention, sampling greedily.

The batch is flat: the new tokens of all requests behind one another, [1, T], with their positions. A token that the
host does not know yet (result_lag 1: it was sampled by the step in flight) is taken from the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from kvarena.allocators.interface import KVAllocator, Sequence
from kvarena.experiments.engine.backends import Step
from kvarena.experiments.engine.paged_memory import MemoryOptions, PagedMemory
from kvarena.experiments.engine.scheduler import Sample, Scheduled, SchedulerConfig, StepPlan
from kvarena.experiments.model.attention import kv_shape, paged_forward, use_paged_attention
from torch import Tensor

TIE = 1e-4  # two best logits closer than this: float32 rounding may decide which comes first


@dataclass(frozen=True)
class Tie:
    """A sampled position whose two best logits are `gap` apart, less than `TIE`."""

    request_id: str
    position: int
    tokens: tuple[int, int]
    gap: float


@dataclass
class _Launched:
    """Samples of a launched plan, on the device: the two best tokens and logits [n, 2] of each entry that samples."""

    plan: StepPlan
    tokens: Tensor | None
    logits: Tensor | None


class ModelExecutor:
    """Runs plans through `model`. `allocator` is what the scheduler has to use.

    model        a causal LM of the Llama family in the library's own class; its attention is set to ours
    stop_tokens  a sampled one of these ends its request

    `ties` lists the samples that rounding could have turned, as they are collected.
    """

    def __init__(
        self,
        model: Any,
        allocator: KVAllocator,
        limits: SchedulerConfig,
        options: MemoryOptions | None = None,
        stop_tokens: Iterable[int] = (),
    ) -> None:
        self.model = model
        self.stop_tokens = frozenset(stop_tokens)
        self.memory = PagedMemory(allocator, kv_shape(model), limits, options or MemoryOptions())
        self.allocator = self.memory.allocator
        self.cache = use_paged_attention(model, self.memory.pool)
        self.ties: list[Tie] = []
        self.num_tokens = 0  # computed so far
        self._launched: deque[_Launched] = deque()
        rows = self.memory.adapter.max_requests + 1
        self._last_tokens = torch.zeros(rows, dtype=torch.int64, device=self.memory.pool.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Copies, page table, the model's forward pass, and the two best tokens of each sampling entry."""
        step = self.memory.begin(plan)
        if step is None:
            return
        self.num_tokens += plan.num_tokens
        hidden = self._forward(plan, step)
        self._launched.append(self._sample(plan, hidden))

    def _forward(self, plan: StepPlan, step: Step) -> Tensor:
        """Hidden states of the batch, [T, hidden]."""
        return paged_forward(self.model, self.cache, self._input_ids(plan), step)

    def _input_ids(self, plan: StepPlan) -> Tensor:
        """Token ids of the batch, int64 [T]."""
        ids: list[int] = []
        unknown: list[tuple[int, int]] = []  # place in the batch, row of its request
        for entry in plan.batch:
            seq = entry.request.seq
            known = seq.token_ids[entry.num_before : entry.end].tolist()
            if len(known) < entry.num_new:
                unknown.append((len(ids) + len(known), self._row(seq)))
                known += [0] * (entry.num_new - len(known))
            ids += known
        device = self._last_tokens.device
        tokens = torch.tensor(ids, device=device)
        if unknown:
            places, rows = torch.tensor(unknown, device=device).T
            tokens[places] = self._last_tokens[rows]
        return tokens

    def _row(self, seq: Sequence) -> int:
        return self.memory.adapter.host.index(seq)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> _Launched:
        ends, rows, end = [], [], 0
        for entry in plan.batch:
            end += entry.num_new
            if entry.samples:
                ends.append(end - 1)
                rows.append(self._row(entry.request.seq))
        if not ends:
            return _Launched(plan, None, None)
        logits, tokens = self.model.lm_head(hidden[ends]).float().topk(2)
        self._last_tokens[rows] = tokens[:, 0]
        return _Launched(plan, tokens, logits)

    def collect(self, plan: StepPlan) -> list[Sample | None]:
        """A sample for each entry of the oldest launched plan that was not collected yet."""
        launched = self._launched.popleft()
        if launched.plan is not plan:
            raise ValueError("collect: plans are collected in the order in which they were launched")
        if launched.tokens is None or launched.logits is None:
            return [None] * len(plan.batch)
        pairs = iter(zip(launched.tokens.tolist(), launched.logits.tolist(), strict=True))
        return [self._to_sample(entry, *next(pairs)) if entry.samples else None for entry in plan.batch]

    def _to_sample(self, entry: Scheduled, tokens: list[int], logits: list[float]) -> Sample:
        gap = logits[0] - logits[1]
        if gap < TIE:
            self.ties.append(Tie(entry.request.id, entry.end, (tokens[0], tokens[1]), gap))
        return Sample(tokens[0], tokens[0] in self.stop_tokens)
