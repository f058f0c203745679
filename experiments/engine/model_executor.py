"""Executor `model`: a real decoder of the transformers library on our paged attention, sampling greedily.

The batch is flat: the new tokens of all requests behind one another, [1, T], with their positions. A token that the
host does not know yet (result_lag 1: it was sampled by the step in flight) is taken from the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from kvarena.allocators.interface import KVAllocator, Sequence
from kvarena.experiments.engine.backends import Step
from kvarena.experiments.engine.beams import Candidate
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


@dataclass(frozen=True)
class Ranked:
    """One position's best tokens with their logits, and the logarithm of the sum over all tokens."""

    tokens: list[int]
    logits: list[float]
    total: float


@dataclass
class _Launched:
    """Samples of a launched plan, on the device: best tokens and logits [n, ranks], totals [n]."""

    plan: StepPlan
    tokens: Tensor | None
    logits: Tensor | None
    totals: Tensor | None = None

    def ranked(self) -> list[Ranked]:
        """On the host, a row each."""
        if self.tokens is None or self.logits is None or self.totals is None:
            return []
        return [
            Ranked(*row) for row in zip(self.tokens.tolist(), self.logits.tolist(), self.totals.tolist(), strict=True)
        ]


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
        """Copies, page table, the model's forward pass, and the best tokens of each sampling entry."""
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
            known = [*seq.token_ids[entry.num_before : entry.end], *entry.drafts]
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
        """The best tokens of each sampling entry, and of each position of its drafts."""
        places: list[int] = []  # in the flat batch
        rows: list[int] = []  # of the page table
        last: list[int] = []  # each entry's own, among the places
        end, ranks = 0, 2
        for entry in plan.batch:
            end += entry.num_new
            if entry.samples:
                places += range(end - 1 - len(entry.drafts), end)
                last.append(len(places) - 1)
                rows.append(self._row(entry.request.seq))
                ranks = max(ranks, _num_ranks(entry))
        if not places:
            return _Launched(plan, None, None)
        logits = self.model.lm_head(hidden[places]).float()
        best, tokens = logits.topk(ranks)
        self._last_tokens[rows] = tokens[last, 0]
        return _Launched(plan, tokens, best, logits.logsumexp(-1))

    def collect(self, plan: StepPlan) -> list[Sample | None]:
        """A sample for each entry of the oldest launched plan that was not collected yet."""
        launched = self._launched.popleft()
        if launched.plan is not plan:
            raise ValueError("collect: plans are collected in the order in which they were launched")
        ranked = iter(launched.ranked())
        return [
            self._to_sample(entry, [next(ranked) for _ in range(1 + len(entry.drafts))]) if entry.samples else None
            for entry in plan.batch
        ]

    def _to_sample(self, entry: Scheduled, ranked: list[Ranked]) -> Sample:
        """What follows the entry's tokens; drafts count up to the first that is not the model's own choice."""
        accepted = 0
        while accepted < len(entry.drafts) and entry.drafts[accepted] == ranked[accepted].tokens[0]:
            if entry.drafts[accepted] in self.stop_tokens:
                break
            accepted += 1
        for offset, at in enumerate(ranked[: accepted + 1]):
            self._note_tie(entry, entry.end - len(entry.drafts) + offset, at)
        best, request = ranked[accepted], entry.request
        if request.beams is not None:
            return Sample(0, candidates=self._candidates(best, 2 * request.beams.width))
        others: tuple[Sample, ...] = ()
        if request.samples > 1 and not request.branched:
            others = tuple(self._plain(token) for token in best.tokens[1 : request.samples])
        return replace(self._plain(best.tokens[0]), accepted=accepted, others=others)

    def _plain(self, token: int) -> Sample:
        return Sample(token, token in self.stop_tokens)

    def _candidates(self, best: Ranked, count: int) -> tuple[Candidate, ...]:
        pairs = zip(best.tokens[:count], best.logits[:count], strict=True)
        return tuple(Candidate(token, logit - best.total, token in self.stop_tokens) for token, logit in pairs)

    def _note_tie(self, entry: Scheduled, position: int, at: Ranked) -> None:
        """Ranks that decide: the first, with samples or beams as many as there are of them."""
        wide = entry.request.beams.width if entry.request.beams is not None else entry.request.samples
        deciding = 1 if entry.request.branched else wide
        for rank in range(min(deciding, len(at.tokens) - 1)):
            gap = at.logits[rank] - at.logits[rank + 1]
            if gap < TIE:
                self.ties.append(Tie(entry.request.id, position, (at.tokens[rank], at.tokens[rank + 1]), gap))
                return


def _num_ranks(entry: Scheduled) -> int:
    """Best tokens that an entry needs: one more than it takes, so that ties show."""
    request = entry.request
    return 1 + (2 * request.beams.width if request.beams is not None else request.samples)
