"""`hit_rate`: a workload that has the token hit rate that is asked for, and proves it.

Each prompt starts with the first tokens of an earlier prompt and goes on with tokens that begin like no other, so the
prefix it shares is exactly as long as meant. How much it shares is drawn around the target and corrected by what is
still missing, so the rate is the target from the first hundred requests on, not only at the end. Shared lengths are
whole pages of `page_size` and leave at least one token, so page rounding and the last-token rule take nothing away.

The rate is that of an infinite cache that publishes prompts, over all requests. `make` measures it with a prefix tree
that knows nothing of the construction, records it as `measured_token_hit_rate`, and refuses a target that it misses by
a point or more (a target near 1 with few requests, say: someone has to be first).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from kvarena.experiments.ceilings import PrefixTree, ceiling_tokens
from kvarena.experiments.traces.base import Request, Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import (
    VOCAB_SIZE,
    Timed,
    Tokens,
    check_count,
    check_shape,
    in_arrival_order,
    lognormal_lengths,
    poisson_arrivals,
    request,
    text,
)

TOLERANCE = 0.01


@dataclass(frozen=True)
class Shape:
    """Parameters of `hit_rate`. Lengths are in tokens.

    token_hit_rate      the target, in [0, 1)
    page_size           shared lengths are multiples of it; the rate holds at this page size and at its divisors
    num_requests, request_rate    requests, and how many arrive a second (Poisson)
    prompt_median, prompt_sigma, max_prompt, reply_median    log-normal lengths (replies: sigma 0.5)
    spread              standard deviation of a prompt's shared part about the target
    """

    token_hit_rate: float = 0.5
    page_size: int = 16
    num_requests: int = 1000
    request_rate: float = 5.0
    prompt_median: float = 1000.0
    prompt_sigma: float = 0.6
    max_prompt: int = 16_000
    reply_median: float = 100.0
    spread: float = 0.2


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `hit_rate` workload of that seed. Raises ValueError for a bad parameter or a target that cannot be met."""
    shape = shape or Shape()
    check_shape(
        seed,
        shape,
        counts=("page_size", "max_prompt"),
        positive=("request_rate", "prompt_median", "reply_median"),
        numbers=("prompt_sigma", "spread"),
        shares=("token_hit_rate",),
    )
    check_count("num_requests", shape.num_requests, maximum=10_000_000)
    requests = in_arrival_order(_timed(np.random.default_rng([seed, 0x417]), shape))
    measured = measured_rate(requests, shape.page_size)
    if abs(measured - shape.token_hit_rate) >= TOLERANCE:
        raise ValueError(
            f"token_hit_rate: expected a target that {shape.num_requests} requests of about {shape.prompt_median:g} "
            f"tokens can meet at page size {shape.page_size}, found {shape.token_hit_rate}: {measured:.4f} is reached"
        )
    return trace_of("hit_rate", requests, {"seed": seed, **asdict(shape), "measured_token_hit_rate": measured})


def measured_rate(requests: list[Request], page_size: int) -> float:
    """Token hit rate of an infinite cache that publishes prompts, last-token rule on."""
    tree = PrefixTree()
    hits = total = 0
    for index, one in enumerate(requests):
        known = tree.add(one.prompt_ids(), index)[0]
        hits += ceiling_tokens(known, one.num_prompt_tokens, page_size, True)
        total += one.num_prompt_tokens
    return hits / total


def _timed(rng: np.random.Generator, shape: Shape) -> Timed:
    lengths = lognormal_lengths(
        rng, shape.num_requests, median=shape.prompt_median, sigma=shape.prompt_sigma, low=1, high=shape.max_prompt
    ).tolist()
    replies = lognormal_lengths(rng, shape.num_requests, median=shape.reply_median, sigma=0.5, low=1, high=4000)
    arrivals = poisson_arrivals(rng, shape.num_requests, shape.request_rate).tolist()
    prompts: list[Tokens] = []
    missing = 0.0
    timed: Timed = []
    for number, length in enumerate(lengths):
        missing += shape.token_hit_rate * length
        wanted = missing + rng.normal(0.0, shape.spread) * length * (shape.token_hit_rate > 0.0)
        shared = _shared(rng, prompts, int(min(wanted, length - 1)) // shape.page_size * shape.page_size)
        missing -= len(shared)
        fresh = text(rng, length - len(shared))
        fresh[0] = VOCAB_SIZE + number  # begins like no other: the shared part ends here
        prompts.append(np.concatenate([shared, fresh]))
        timed.append((arrivals[number], request(f"r{number}", prompts[-1], text(rng, int(replies[number])))))
    return timed


def _shared(rng: np.random.Generator, prompts: list[Tokens], length: int) -> Tokens:
    """The first `length` tokens of a random earlier prompt that is that long, else of the longest; none if <= 0."""
    if length <= 0 or not prompts:
        return np.zeros(0, np.int32)
    for _ in range(16):
        candidate = prompts[int(rng.integers(len(prompts)))]
        if len(candidate) >= length:
            return candidate[:length]
    return max(prompts, key=len)[:length]
