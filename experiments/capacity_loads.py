"""Loads of the capacity question: bursts of requests whose lengths, sharing and outputs are known.

    chat    prompts as in Azure's 2023 conversation trace (log-normal, median 1,020), nothing shared
    long    long prompts (log-normal, median 12,000), nothing shared
    shared  a system prompt of 2,039 tokens (no page size divides it) for each of 64 groups, and a question of its own
    short   a small one for trials: 37 shared tokens, about 30 of one's own, 12 to 32 of reply

Replies are at least as long as the prefill of all prompts takes steps, so that all requests of a burst that fits are
live at once. A burst of N is the first N requests: a longer burst holds the shorter ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from kvarena.experiments.traces.base import Request
from kvarena.experiments.workloads.draws import Tokens, check_count, lognormal_lengths, request, text
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LoadShape:
    """Parameters of a load. Lengths in tokens, log-normal about their medians.

    groups, system_tokens  groups of requests behind one system prompt; 0: none
    """

    name: str
    text: str
    prompt_median: float
    prompt_sigma: float
    max_prompt: int
    reply_median: float
    reply_sigma: float = 0.5
    min_reply: int = 200
    max_reply: int = 1000
    groups: int = 0
    system_tokens: int = 0


LOADS: dict[str, LoadShape] = {
    "chat": LoadShape("chat", "chat lengths", 1020.0, 0.77, 16_000, 300.0),
    "long": LoadShape("long", "long prompts", 12_000.0, 0.5, 64_000, 300.0),
    "shared": LoadShape("shared", "shared prompts", 200.0, 0.5, 2_000, 400.0, groups=64, system_tokens=2039),
    "short": LoadShape("short", "short prompts", 30.0, 0.5, 90, 20.0, 0.3, 12, 32, groups=8, system_tokens=37),
}
STUDY = ("chat", "long", "shared")  # the loads of the capacity question


@dataclass(frozen=True)
class Load:
    """A burst. Arrays are int64 [N].

    prompts, outputs  tokens of each request
    group             its group, -1 where nothing is shared
    system_tokens     tokens that a group's prompts start with
    """

    shape: LoadShape
    requests: tuple[Request, ...]
    prompts: Ints
    outputs: Ints
    group: Ints
    system_tokens: int

    def __len__(self) -> int:
        return len(self.requests)


def load_shape(name: str) -> LoadShape:
    """The load of that name; ValueError lists the known ones."""
    if name not in LOADS:
        raise ValueError(f"load: expected one of {', '.join(LOADS)}, found {name!r}")
    return LOADS[name]


@lru_cache(maxsize=8)
def make_load(name: str, size: int, seed: int = 0) -> Load:
    """The first `size` requests of a load. The same request has the same tokens in every burst that holds it."""
    shape = load_shape(name)
    check_count("size", size)
    check_count("seed", seed, minimum=0)
    lengths = np.random.default_rng([seed, 0xCAFE])
    systems = [text(np.random.default_rng([seed, 1, g]), shape.system_tokens) for g in range(shape.groups)]
    # Drawn one request after another, so that a longer burst starts with the shorter one.
    requests = [_request(lengths, shape, systems, seed, number) for number in range(size)]
    group = np.array([each.extra["group"] for each in requests], np.int64)
    prompts = np.array([each.num_prompt_tokens for each in requests], np.int64)
    outputs = np.array([each.num_output_tokens for each in requests], np.int64)
    return Load(shape, tuple(requests), prompts, outputs, group, shape.system_tokens if shape.groups else 0)


def first(load: Load, size: int) -> Load:
    """The burst of the first `size` requests."""
    if not 1 <= size <= len(load):
        raise ValueError(f"size: expected from 1 to {len(load)}, found {size}")
    cut = slice(size)
    return Load(
        load.shape,
        load.requests[cut],
        load.prompts[cut],
        load.outputs[cut],
        load.group[cut],
        load.system_tokens,
    )


def _request(rng: np.random.Generator, shape: LoadShape, systems: list[Tokens], seed: int, number: int) -> Request:
    prompt, reply = (
        int(lognormal_lengths(rng, 1, median=median, sigma=sigma, low=low, high=high)[0])
        for median, sigma, low, high in (
            (shape.prompt_median, shape.prompt_sigma, 1, shape.max_prompt),
            (shape.reply_median, shape.reply_sigma, shape.min_reply, shape.max_reply),
        )
    )
    group = int(rng.integers(len(systems))) if systems else -1
    own = text(np.random.default_rng([seed, 2, number]), prompt)
    own[0] = 100_000 + number  # begins like no other: what is shared ends here
    tokens = np.concatenate([systems[group], own]) if systems else own
    output = np.arange(reply, dtype=np.int32)
    return request(f"r{number}", tokens, output, extra={"group": group})
