"""Which step computes which prompt of a burst, and which prefixes are found by then, if there is always room.

Shared by the closed form (`capacity_law.py`) and SGLang's admission (`capacity_sglang.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from kvarena.experiments.capacity_loads import Ints, Load

Sizing = Literal["pages", "max", "pow2", "declared"]
Twice = tuple[int, int, int]  # a prefix computed again: from this step, until it is merged in that one, so many tokens
Chunk = tuple[
    int, int, int
]  # a prompt that is not done: in this step it holds so many tokens, of which so many are hits


@dataclass(frozen=True)
class Rules:
    """What a design does with memory, as far as the count of requests depends on it.

    num_pages      pages that requests can own
    page_size      tokens a page; 1 with `share_page_size` 16 is a design that shares by 16 and wastes no tail
    share_page_size  grain at which a prefix is shared; None: page_size
    shares         prefixes are shared
    sizing         pages as they fill, or runs of a contiguous pool
    policy         "vllm": token budget a step, decodes first; "sglang": prompts first, future output reserved
    publish        "reserve": a prefix is found in the step that computes it; "commit": when that step's result is in
    reserves       False: the sglang policy without its reservation
    row_tokens     a prompt this long or longer is turned away
    declared       max_tokens that every client declares
    """

    num_pages: int
    page_size: int
    share_page_size: int | None = None
    shares: bool = True
    sizing: Sizing = "pages"
    publish: Literal["reserve", "commit"] = "reserve"
    policy: Literal["vllm", "sglang"] = "vllm"
    reserves: bool = True
    rows: int = 2**31
    row_tokens: int = 2**31
    step_tokens: int = 8192
    chunk_tokens: int = 8192
    max_model_len: int = 131_072
    declared: int = 4096
    lag: int = 1


@dataclass(frozen=True)
class Prefill:
    """When prompts are computed, if there is always room. Arrays are int64 [N].

    started, done  the steps in which each prompt is admitted, and done
    twice          what was computed twice; chunks: what prompts hold that are not done yet
    """

    started: Ints
    done: Ints
    twice: list[Twice]
    chunks: list[Chunk]


def prefill(load: Load, rules: Rules) -> Prefill:
    """The prompts of a burst, one after the other through the tokens that a step may have.

    A prompt in chunks holds what is computed of it; in the step that admits it, room for all of it has to be there.
    """
    ends = np.zeros(len(load), np.int64)
    if rules.policy == "sglang":
        return Prefill(ends, ends, [], [])  # no decode runs before the last prompt is done
    started, chunks = ends.copy(), list[Chunk]()
    prefixes = Prefixes(load, rules)
    step, budget = 0, rules.step_tokens
    for number in range(len(load)):
        if budget <= 0:
            step, budget = _next_step(step, ends[:number], load.outputs[:number], rules)
        left = prefixes.new_tokens(number, step)
        started[number], prompt = step, int(load.prompts[number])
        while left > budget:
            left -= budget
            whole = step == started[number]
            chunks.append((step, prompt if whole else prompt - left, prefixes.hits(number)))
            prefixes.part(number, step, prompt - left)
            step, budget = _next_step(step, ends[:number], load.outputs[:number], rules)
        budget -= left
        ends[number] = step
        prefixes.computed(number, step)
    return Prefill(started, ends, prefixes.twice, chunks)


def _next_step(step: int, ends: Ints, outputs: Ints, rules: Rules) -> tuple[int, int]:
    """The step behind, and its tokens behind those of everybody who decodes in it."""
    step += 1
    decoding = int((step <= ends + outputs - 1 + rules.lag).sum())
    return step, max(rules.step_tokens - decoding, 1)


class Prefixes:
    """How much of a group's prefix is found from which step on."""

    def __init__(self, load: Load, rules: Rules) -> None:
        self.load = load
        self.page_size = rules.page_size
        self.fixed = shared_pages(load, rules) * rules.page_size
        self.delay = 1 + rules.lag if rules.publish == "commit" else 0
        self._found: dict[int, list[tuple[int, int, int]]] = {}  # group -> (from step, tokens, by whom)
        self._hits: dict[int, int] = {}
        self._covered: dict[int, int] = {}  # request -> from when a chunk that reached the end is merged
        self.twice: list[Twice] = []

    def new_tokens(self, number: int, step: int) -> int:
        """Prompt tokens that a request admitted in this step has to compute."""
        prompt = int(self.load.prompts[number])
        known = self._found.get(int(self.load.group[number]), ())
        self._hits[number] = max((tokens for since, tokens, _ in known if since <= step), default=0)
        return prompt - min(self._hits[number], prompt - 1)

    def found(self, number: int) -> int:
        """Prompt tokens that the request found when it was admitted."""
        return min(self._hits[number], int(self.load.prompts[number]) - 1)

    def hits(self, number: int) -> int:
        """Whole pages of tokens that the request found when it was admitted."""
        return min(self._hits[number], self.fixed) // self.page_size * self.page_size

    def chunk(self, number: int, step: int, computed: int) -> None:
        """SGLang: the first `computed` new tokens of a prompt are checkpointed before the step behind this one."""
        tokens = self._hits[number] + computed
        if tokens >= self.fixed:
            self._covered.setdefault(number, step + 1)
        self._publish(number, step + 1, min(tokens, self.fixed) // self.page_size * self.page_size)

    def part(self, number: int, step: int, tokens: int) -> None:
        """A chunk that ends behind so many tokens of the prompt is computed in this step."""
        if tokens >= self.fixed:
            self._covered.setdefault(number, step + self.delay)
        self._publish(number, step + self.delay, min(tokens, self.fixed) // self.page_size * self.page_size)

    def computed(self, number: int, step: int) -> None:
        """A request's prompt is done in this step; what another has published by then is merged when the step that
        computed the prefix is over."""
        since, known = step + self.delay, self._found.get(int(self.load.group[number]), ())
        merged = self._covered.get(number, since)
        others = max((tokens for _, tokens, by in known if by != number), default=0)
        if others > self._hits[number]:
            self.twice.append((step, merged, others - self._hits[number]))
        self._publish(number, since, self.fixed)

    def _publish(self, number: int, since: int, tokens: int) -> None:
        known = self._found.setdefault(int(self.load.group[number]), [])
        if tokens and not any(before <= since and held >= tokens for before, held, _ in known):
            known.append((since, tokens, number))

    def merged(self, step: int) -> int:
        """Slots that have come back by now, of prefixes that were computed more than once."""
        return sum(tokens for _, until, tokens in self.twice if until <= step)


def shared_pages(load: Load, rules: Rules) -> int:
    """Whole pages of the prefix that a group holds once, in units of page_size."""
    if not (rules.shares and load.system_tokens and rules.sizing == "pages"):
        return 0
    grain = rules.share_page_size or rules.page_size
    return load.system_tokens // grain * grain // rules.page_size
