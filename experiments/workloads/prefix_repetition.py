"""`prefix_repetition`: a few prefixes, many suffixes, with the parameters of vLLM's benchmark data set of that name.

Parameter names and defaults are those of `vllm bench serve --dataset-name prefix_repetition` (vLLM 0.32.0): every
request is one of the prefixes and a suffix of its own, in random order. num_prompts is cut to a multiple of the number
of prefixes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from kvarena.experiments.traces.base import Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import Timed, check_shape, in_arrival_order, poisson_arrivals, request, text


@dataclass(frozen=True)
class Shape:
    """Parameters of `prefix_repetition`. Lengths are in tokens; request_rate in requests a second, Poisson."""

    num_prompts: int = 1000
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_output_len: int = 128
    request_rate: float = 10.0


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `prefix_repetition` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    counts = [name for name in asdict(shape) if name != "request_rate"]
    check_shape(seed, shape, counts=counts, positive=("request_rate",))
    if shape.num_prompts < shape.prefix_repetition_num_prefixes:
        raise ValueError(
            f"num_prompts: expected at least prefix_repetition_num_prefixes = {shape.prefix_repetition_num_prefixes}, "
            f"found {shape.num_prompts}"
        )
    requests = in_arrival_order(_timed(np.random.default_rng([seed, 0x4E9]), shape))
    return trace_of("prefix_repetition", requests, {"seed": seed, **asdict(shape)})


def _timed(rng: np.random.Generator, shape: Shape) -> Timed:
    num_prefixes = shape.prefix_repetition_num_prefixes
    prefixes = [text(rng, shape.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    order = rng.permutation(np.repeat(np.arange(num_prefixes), shape.num_prompts // num_prefixes))
    timed: Timed = []
    for number, (prefix, arrival) in enumerate(
        zip(order.tolist(), poisson_arrivals(rng, len(order), shape.request_rate).tolist(), strict=True)
    ):
        prompt = np.concatenate([prefixes[prefix], text(rng, shape.prefix_repetition_suffix_len)])
        reply = text(rng, shape.prefix_repetition_output_len)
        timed.append((arrival, request(f"r{number}", prompt, reply, extra={"prefix": prefix})))
    return timed
