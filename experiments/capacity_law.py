"""How many requests of a burst fit, from lengths alone, in closed form. Nothing here runs an allocator.

Request i has prompt p_i and output o_i, its prompt is done in step d_i, and it holds p_i + a tokens a steps later. With
pages of S tokens, and with f whole pages of a shared prefix that its group holds once, the pool holds in step t

    D(t) = sum over groups with a live member of f  +  sum over live i of ceil((p_i + t - d_i) / S) - f

and, until they are merged, prefixes that were computed again before the first was published; the burst is carried when
max D(t) <= pages. Live: d_i <= t <= d_i + o_i - 1 + lag (with a lag of 1 the step behind the last is scheduled before
the end is known). d_i follows from the tokens a step may have. Runs of a contiguous pool hold what their sizing
promises in place of ceil(...). SGLang's admission is followed pass by pass before (`capacity_sglang.py`): nobody is
admitted unless prompt and declared output fit behind what running requests are reckoned to need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from kvarena.experiments.capacity_loads import Ints, Load, first
from kvarena.experiments.capacity_prefill import Prefill, Rules, prefill, shared_pages
from kvarena.experiments.capacity_sglang import max_tokens, sglang_prefill

__all__ = ["Rules", "capacity", "carried", "demand", "largest", "prefill", "without"]


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
    if len(load) > rules.rows or load.prompts.max() >= rules.row_tokens:
        return False
    filled = sglang_prefill(load, rules) if rules.policy == "sglang" else prefill(load, rules)
    if filled is None:
        return False
    if filled.started.max() >= (filled.done + load.outputs + rules.lag).min() - 1:
        return False  # the first has ended before the last is there
    return int(_demand(load, rules, filled).max()) <= rules.num_pages


def demand(load: Load, rules: Rules) -> Ints:
    """D(t), int64 [steps]: pages held in each step, if there is always room. O(output tokens)."""
    return _demand(load, rules, prefill(load, rules))


def _demand(load: Load, rules: Rules, filled: Prefill) -> Ints:
    fixed, done = shared_pages(load, rules), filled.done
    lives = _lives(load, rules)
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


def _lives(load: Load, rules: Rules) -> Ints:
    """Steps in which each request holds pages that another could want."""
    outputs = np.minimum(load.outputs, np.maximum(rules.max_model_len - load.prompts, 1))
    if rules.policy == "vllm":
        return outputs + rules.lag
    most = max_tokens(load, rules)
    # SGLang 0.5.22 foresees an end by max_tokens: where pages are short it lets a step pass rather than retract.
    return np.where(outputs < most, outputs + rules.lag, most)


def _pages(tokens: Ints, prompts: Ints, rules: Rules) -> Ints:
    if rules.sizing == "max":
        tokens = np.full_like(tokens, rules.max_model_len)
    elif rules.sizing == "declared":
        tokens = np.maximum(tokens, np.minimum(prompts + rules.declared, rules.max_model_len))
    elif rules.sizing == "pow2":
        tokens = np.int64(2) ** np.ceil(np.log2(tokens)).astype(np.int64)
    return -(-tokens // rules.page_size)


def without(rules: Rules, **changes: object) -> Rules:
    """The same rules but for some fields."""
    return replace(rules, **changes)  # type: ignore[arg-type]  # names are those of Rules
