"""`no_reuse`: prompts that share nothing, not even their first token. Hit rates must be 0; what is left is overhead.

Lengths are log-normal; the defaults have median and p90 of Azure's 2023 conversation trace (1,020 and 2,735 tokens in,
129 out).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from kvarena.experiments.traces.base import Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import (
    VOCAB_SIZE,
    Timed,
    check_count,
    check_shape,
    in_arrival_order,
    lognormal_lengths,
    poisson_arrivals,
    request,
    text,
)


@dataclass(frozen=True)
class Shape:
    """Parameters of `no_reuse`: requests, how many arrive a second (Poisson), log-normal lengths in tokens."""

    num_requests: int = 2000
    request_rate: float = 5.0
    prompt_median: float = 1020.0
    prompt_sigma: float = 0.77
    max_prompt: int = 16_000
    reply_median: float = 129.0
    reply_sigma: float = 1.0
    max_reply: int = 1000


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `no_reuse` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    check_shape(
        seed,
        shape,
        counts=("max_prompt", "max_reply"),
        positive=("request_rate", "prompt_median", "reply_median"),
        numbers=("prompt_sigma", "reply_sigma"),
    )
    check_count("num_requests", shape.num_requests, maximum=10_000_000)
    requests = in_arrival_order(_timed(np.random.default_rng([seed, 0x0]), shape))
    return trace_of("no_reuse", requests, {"seed": seed, **asdict(shape)})


def _timed(rng: np.random.Generator, shape: Shape) -> Timed:
    count = shape.num_requests
    prompts = lognormal_lengths(
        rng, count, median=shape.prompt_median, sigma=shape.prompt_sigma, low=1, high=shape.max_prompt
    )
    replies = lognormal_lengths(
        rng, count, median=shape.reply_median, sigma=shape.reply_sigma, low=1, high=shape.max_reply
    )
    arrivals = poisson_arrivals(rng, count, shape.request_rate)
    timed: Timed = []
    for number in range(count):
        prompt = text(rng, int(prompts[number]))
        # A first token that no other prompt has: no prefix can be shared by chance.
        prompt[0] = VOCAB_SIZE + number
        timed.append((float(arrivals[number]), request(f"r{number}", prompt, text(rng, int(replies[number])))))
    return timed
