"""The workload on which allocators are timed: many conversations over a few shared system prompts.

20,000 requests of about 1,012 tokens on average; 64 system prompts, Zipf-distributed; 40 % of the requests continue
an open conversation with all that was said before. The pool holds 320,000 tokens. Prompts only: a request is
admitted, committed and released before the next one comes.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

NUM_REQUESTS = 20_000
POOL_TOKENS = 320_000
NUM_SYSTEMS = 64
SYSTEM_TOKENS = (128, 705)  # uniform, half open; so are the others
USER_TOKENS = (50, 651)
FOLLOW_UP_TOKENS = (160, 521)  # the reply before and the next question
FOLLOW_UP_SHARE = 0.4
OPEN_CONVERSATIONS = 200
VOCABULARY = 128_000

Prompt = NDArray[np.int32]


def replay_prompts(num_requests: int = NUM_REQUESTS, seed: int = 0) -> list[Prompt]:
    """Prompts in order of arrival, int32 [length] each; the same for equal arguments."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_SYSTEMS + 1)
    systems = [_tokens(rng, SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
    chosen = rng.choice(NUM_SYSTEMS, num_requests, p=weights / weights.sum())
    open_ones: list[Prompt] = []
    prompts = []
    for system in chosen:
        if open_ones and rng.random() < FOLLOW_UP_SHARE:
            slot = int(rng.integers(len(open_ones)))
            open_ones[slot] = np.concatenate([open_ones[slot], _tokens(rng, FOLLOW_UP_TOKENS)])
            prompts.append(open_ones[slot])
            continue
        prompts.append(np.concatenate([systems[system], _tokens(rng, USER_TOKENS)]))
        if len(open_ones) < OPEN_CONVERSATIONS:
            open_ones.append(prompts[-1])
        else:
            open_ones[int(rng.integers(OPEN_CONVERSATIONS))] = prompts[-1]
    return prompts


def page_names(prompts: list[Prompt], page_size: int) -> list[array[int]]:
    """Each prompt's pages as dense ids of everything up to the page's end, as a hashed trace has them."""
    known: dict[tuple[int, bytes], int] = {}
    named = []
    for prompt in prompts:
        data, width = prompt.tobytes(), 4 * page_size
        names, above = array("i"), -1
        for start in range(0, len(data), width):
            above = known.setdefault((above, data[start : start + width]), len(known))
            names.append(above)
        named.append(names)
    return named


def _tokens(rng: np.random.Generator, length: tuple[int, int]) -> Prompt:
    return rng.integers(0, VOCABULARY, int(rng.integers(*length)), dtype=np.int32)
