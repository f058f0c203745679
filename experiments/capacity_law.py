"""How many requests of a burst fit, from lengths alone, in closed form. Nothing here runs an allocator.

Request i has prompt p_i and output o_i, its prompt is done in step d_i, and it holds p_i + a tokens a steps later. With
pages of S tokens, and with f whole pages of a shared prefix that its group holds once, the pool holds in step t

    D(t) = sum over groups with a live member of f  +  sum over live i of ceil((p_i + t - d_i) / S) - f

and, until they are merged, prefixes that were computed again before the first was published; the burst is carried when
max D(t) <= pages. Live: d_i <= t <= d_i + o_i - 1 + lag (with a lag of 1 the step behind
the last is scheduled before the end is known). d_i follows from the tokens a step may have. Runs of a contiguous pool
hold what their sizing promises in place of ceil(...). SGLang's admission adds that nobody is admitted unless prompt and
declared output fit behind what running requests are reckoned to need (`sglang_admits`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from kvarena.experiments.capacity_loads import Ints, Load, first

Sizing = Literal["pages", "max", "pow2", "declared"]
Twice = tuple[int, int, int]  # a prefix computed again: from this step, until it is merged in that one, so many tokens
Chunk = tuple[
    int, int, int
]  # a prompt that is not done: in this step it holds so many tokens, of which so many are hits
SGLANG_RATIO = 0.7  # share of the declared output that a request is reckoned to need at first
SGLANG_OUTPUT_CAP = 4096


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
    step_tokens: int = 8192
    chunk_tokens: int = 8192
    max_model_len: int = 131_072
    declared: int = 4096
    lag: int = 1


def capacity(load: Load, rules: Rules, guess: int | None = None) -> int:
    """The largest burst that is carried, at most len(load); quick when `guess` is near it."""
    return largest(lambda size: carried(first(load, size), rules), min(len(load), rules.rows), guess)


def largest(carried: Callable[[int], bool], most: int, guess: int | None = None) -> int:
    """The largest size up to `most` that is carried, where every smaller one is too; 0 when none is. Looks around
    `guess` by steps that double, then halves.

    >>> asked = []
    >>> largest(lambda size: asked.append(size) or size <= 622, 2000, guess=622), asked
    (622, [622, 623])
    """
    low, high, step = 0, most + 1, 1
    at = min(max(most if guess is None else guess, 1), most)
    while low < at < high:
        if carried(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if carried(middle) else (low, middle)
    return low


def carried(load: Load, rules: Rules) -> bool:
    """Whether all of the burst are live at once, and nobody is preempted or waits for room."""
    if len(load) > rules.rows:
        return False
    if rules.policy == "sglang" and rules.reserves and not sglang_admits(load, rules):
        return False
    filled = prefill(load, rules)
    if filled.started.max() >= (filled.done + load.outputs + rules.lag).min() - 1:
        return False  # the first has ended before the last is there
    return int(_demand(load, rules, filled).max()) <= rules.num_pages


def demand(load: Load, rules: Rules) -> Ints:
    """D(t), int64 [steps]: pages held in each step, if there is always room. O(output tokens)."""
    return _demand(load, rules, prefill(load, rules))


def _demand(load: Load, rules: Rules, filled: Prefill) -> Ints:
    fixed, done = _shared_pages(load, rules), filled.done
    lives = load.outputs + rules.lag
    age = np.arange(lives.sum()) - np.repeat(np.cumsum(lives) - lives, lives)
    prompts, step = np.repeat(load.prompts, lives), np.repeat(done, lives) + age
    held = np.bincount(step, _pages(prompts + age, prompts, rules) - fixed).astype(np.int64)
    if fixed:
        for group in np.unique(load.group):
            mine = load.group == group
            # A group's requests come close together: its prefix is held from the first to the last of them.
            held[done[mine].min() : (done + lives)[mine].max()] += fixed
    for since, until, tokens in filled.twice:
        held[since:until] += tokens // rules.page_size
    for step_of, tokens, hits in filled.chunks:
        held[step_of] += int(_pages(np.array([tokens]), np.array([tokens]), rules)[0]) - hits // rules.page_size
    return held


def _shared_pages(load: Load, rules: Rules) -> int:
    """Whole pages of the prefix that a group holds once, in units of page_size."""
    if not (rules.shares and load.system_tokens and rules.sizing == "pages"):
        return 0
    grain = rules.share_page_size or rules.page_size
    return load.system_tokens // grain * grain // rules.page_size


def _pages(tokens: Ints, prompts: Ints, rules: Rules) -> Ints:
    if rules.sizing == "max":
        tokens = np.full_like(tokens, rules.max_model_len)
    elif rules.sizing == "declared":
        tokens = np.maximum(tokens, np.minimum(prompts + rules.declared, rules.max_model_len))
    elif rules.sizing == "pow2":
        tokens = np.int64(2) ** np.ceil(np.log2(tokens)).astype(np.int64)
    return -(-tokens // rules.page_size)


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
    prefixes = _Prefixes(load, rules)
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


class _Prefixes:
    """How much of a group's prefix is found from which step on."""

    def __init__(self, load: Load, rules: Rules) -> None:
        self.load = load
        self.page_size = rules.page_size
        self.fixed = _shared_pages(load, rules) * rules.page_size
        self.delay = 1 + rules.lag if rules.publish == "commit" else 0
        self._found: dict[int, list[tuple[int, int, int]]] = {}  # group -> (from step, tokens, by whom)
        self._hits: dict[int, int] = {}
        self._covered: dict[int, int] = {}  # request -> the step in which a chunk reached the prefix's end
        self.twice: list[Twice] = []

    def new_tokens(self, number: int, step: int) -> int:
        """Prompt tokens that a request admitted in this step has to compute."""
        prompt = int(self.load.prompts[number])
        known = self._found.get(int(self.load.group[number]), ())
        self._hits[number] = max((tokens for since, tokens, _ in known if since <= step), default=0)
        return prompt - min(self._hits[number], prompt - 1)

    def hits(self, number: int) -> int:
        """Whole pages of tokens that the request found when it was admitted."""
        return min(self._hits[number], self.fixed) // self.page_size * self.page_size

    def chunk(self, number: int, step: int, computed: int) -> None:
        """SGLang: the first `computed` new tokens of a prompt are checkpointed before the step behind this one."""
        tokens = min(self._hits[number] + computed, self.fixed) // self.page_size * self.page_size
        self._publish(number, step + 1, tokens)

    def part(self, number: int, step: int, tokens: int) -> None:
        """A chunk that ends behind so many tokens of the prompt is computed in this step."""
        if tokens >= self.fixed:
            self._covered.setdefault(number, step)
        self._publish(number, step + self.delay, min(tokens, self.fixed) // self.page_size * self.page_size)

    def computed(self, number: int, step: int) -> None:
        """A request's prompt is done in this step; what another has published by then is merged when the step that
        computed the prefix is over."""
        since, known = step + self.delay, self._found.get(int(self.load.group[number]), ())
        merged = self._covered.get(number, step) + self.delay
        others = max((tokens for _, tokens, by in known if by != number), default=0)
        if others > self._hits[number] and merged > step:
            self.twice.append((step, merged, others - self._hits[number]))
        self._publish(number, since, self.fixed)

    def _publish(self, number: int, since: int, tokens: int) -> None:
        if tokens:
            self._found.setdefault(int(self.load.group[number]), []).append((since, tokens, number))

    def merged(self, step: int) -> int:
        """Slots that have come back by now, of prefixes that were computed more than once."""
        return sum(tokens for _, until, tokens in self.twice if until <= step)


def sglang_admits(load: Load, rules: Rules) -> bool:
    """SGLang 0.5.22: whether all prompts are admitted one pass after the other, with nobody waiting for room.

    A prompt needs its new tokens, its declared output (at most 4,096) and a page, strictly less than what is free
    behind the reserve: 0.7 of the declared output of everybody who runs, and all of this pass's.
    """
    output, size = min(rules.declared, SGLANG_OUTPUT_CAP), rules.page_size
    free = rules.num_pages * size
    prefixes, step = _Prefixes(load, rules), 0
    reserve = in_pass = 0.0
    passing, taken, left = 0, 0, rules.chunk_tokens
    for number in range(len(load)):
        if left <= 0:
            step, reserve, free = step + 1, reserve + SGLANG_RATIO * output * passing, free - taken
            passing, taken, left, in_pass = 0, 0, rules.chunk_tokens, 0.0
        need = prefixes.new_tokens(number, step)
        if need + output + size + int(reserve + in_pass) >= free + prefixes.merged(step):
            return False
        whole, before = -(-need // size) * size, 0
        while whole > left:  # a prompt in chunks joins those who run when its last chunk is done
            step, reserve = step + 1, reserve + SGLANG_RATIO * output * passing
            free, whole, before = free - taken - left, whole - left, before + left
            prefixes.chunk(number, step - 1, before)
            passing, taken, left, in_pass = 0, 0, rules.chunk_tokens, 0.0
        passing, taken, left, in_pass = passing + 1, taken + whole, left - whole, in_pass + whole + size + output
        prefixes.computed(number, step)
    return True


def without(rules: Rules, **changes: object) -> Rules:
    """The same rules but for some fields."""
    return replace(rules, **changes)  # type: ignore[arg-type]  # names are those of Rules
