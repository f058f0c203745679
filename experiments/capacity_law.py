"""How many requests of a burst fit, from lengths alone, in closed form. Nothing here runs an allocator.

Request i has prompt p_i and output o_i, its prompt is done in step d_i, and it holds p_i + a tokens a steps later. With
pages of S tokens, and with f whole pages of a shared prefix that its group holds once, the pool holds in step t

    D(t) = sum over groups with a live member of f  +  sum over live i of ceil((p_i + t - d_i) / S) - f

and the burst is carried when max D(t) <= pages. Live: d_i <= t <= d_i + o_i - 1 + lag (with a lag of 1 the step behind
the last is scheduled before the end is known). d_i follows from the tokens a step may have. Runs of a contiguous pool
hold what their sizing promises in place of ceil(...). SGLang's admission adds that nobody is admitted unless prompt and
declared output fit behind what running requests are reckoned to need (`sglang_admits`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from kvarena.experiments.capacity_loads import Ints, Load, first

Sizing = Literal["pages", "max", "pow2", "declared"]
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
    reserves       False: the sglang policy without its reservation
    declared       max_tokens that every client declares
    """

    num_pages: int
    page_size: int
    share_page_size: int | None = None
    shares: bool = True
    sizing: Sizing = "pages"
    policy: Literal["vllm", "sglang"] = "vllm"
    reserves: bool = True
    rows: int = 2**31
    step_tokens: int = 8192
    chunk_tokens: int = 8192
    max_model_len: int = 131_072
    declared: int = 4096
    lag: int = 1


def capacity(load: Load, rules: Rules) -> int:
    """The largest burst that is carried, at most len(load). Costs about 0.1 s for 2,000 requests."""
    low, high = 0, min(len(load), rules.rows)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if carried(first(load, middle), rules) else (low, middle - 1)
    return low


def carried(load: Load, rules: Rules) -> bool:
    """Whether nobody of the burst is preempted or waits for room."""
    if len(load) > rules.rows:
        return False
    if rules.policy == "sglang" and rules.reserves and not sglang_admits(load, rules):
        return False
    return int(demand(load, rules).max()) <= rules.num_pages


def demand(load: Load, rules: Rules) -> Ints:
    """D(t), int64 [steps]: pages held in each step, if there is always room."""
    done = prefill_ends(load, rules)
    fixed = _shared_pages(load, rules)
    last = done + load.outputs - 1 + rules.lag
    held = np.zeros(int(last.max()) + 1, np.int64)
    for t in range(len(held)):
        live = (done <= t) & (t <= last)
        tokens = load.prompts[live] + t - done[live]
        held[t] = (_pages(tokens, load.prompts[live], rules) - fixed).sum() + fixed * _live_groups(load, live)
    return held


def _live_groups(load: Load, live: np.ndarray) -> int:
    return len(np.unique(load.group[live])) if load.system_tokens else 0


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


def prefill_ends(load: Load, rules: Rules) -> Ints:
    """d_i, int64 [N]: the step in which each prompt is done, if there is always room."""
    if rules.policy == "sglang":
        return np.zeros(len(load), np.int64)  # no decode runs before the last prompt is done
    todo = _new_tokens(load, rules)
    ends = np.zeros(len(load), np.int64)
    step, running, budget = 0, 0, rules.step_tokens
    started: list[int] = []  # of those running, when their last token is sampled
    for number, left in enumerate(todo.tolist()):
        while left > budget:
            left -= budget
            step += 1
            running = sum(step <= end for end in started)
            budget = max(rules.step_tokens - running, 1)
        budget -= left
        ends[number] = step
        started.append(step + int(load.outputs[number]))
    return ends


def _new_tokens(load: Load, rules: Rules) -> Ints:
    """Prompt tokens to compute: all of a group's first request, of the others what is not shared."""
    fixed = _shared_pages(load, rules) * rules.page_size
    todo = load.prompts.copy()
    if fixed:
        _, firsts = np.unique(load.group, return_index=True)
        others = np.setdiff1d(np.arange(len(load)), firsts)
        todo[others] -= np.minimum(fixed, todo[others] - 1)
    return todo


def sglang_admits(load: Load, rules: Rules) -> bool:
    """SGLang 0.5.22: whether all prompts are admitted one pass after the other, with nobody waiting for room.

    A prompt needs its new tokens, its declared output (at most 4,096) and a page, strictly less than what is free
    behind the reserve: 0.7 of the declared output of everybody who runs, and all of this pass's.
    """
    output, size = min(rules.declared, SGLANG_OUTPUT_CAP), rules.page_size
    free = rules.num_pages * size
    todo, whole = _new_tokens(load, rules).tolist(), -(-_new_tokens(load, rules) // size) * size
    reserve = passing = taken = 0.0
    left = rules.chunk_tokens
    for number, need in enumerate(todo):
        if left <= 0:
            reserve, free = reserve + SGLANG_RATIO * output * passing, free - taken
            passing, taken, left = 0, 0.0, rules.chunk_tokens
        in_pass = taken + passing * (size + output)
        if need + output + size + int(reserve + in_pass) >= free:
            return False
        passing, taken, left = passing + 1, taken + int(whole[number]), left - int(whole[number])
    return True


def without(rules: Rules, **changes: object) -> Rules:
    """The same rules but for some fields."""
    return replace(rules, **changes)  # type: ignore[arg-type]  # names are those of Rules
