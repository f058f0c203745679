"""`generated_shared_prefix`: groups of prompts behind one system prompt, with the parameters of SGLang's bench_serving.

Parameter names and defaults are those of its data set of that name (SGLang 0.5.22, --gsp-*): every request is the
system prompt of its group and a question; with more turns the conversation grows by reply and question. Replies return
verbatim in the next turn.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from kvarena.experiments.traces.base import Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import (
    DECODE_S_PER_TOKEN,
    Timed,
    Tokens,
    check_number,
    check_shape,
    in_arrival_order,
    poisson_arrivals,
    request,
    text,
    zipf_choice,
)
from numpy.typing import NDArray


@dataclass(frozen=True)
class Shape:
    """Parameters of `generated_shared_prefix`. Lengths are in tokens.

    gsp_num_groups          system prompts
    gsp_prompts_per_group   prompts (conversations) of a group; the mean of it when groups are drawn by zipf
    gsp_system_prompt_len, gsp_question_len, gsp_output_len    full lengths
    gsp_range_ratio         lengths are uniform in [ratio x full, full]
    gsp_num_turns           turns of a conversation
    gsp_group_distribution  uniform: every group has the same number; zipf: weight 1 / rank^gsp_zipf_alpha
    request_rate            conversations that start a second, Poisson, in random order
    """

    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256
    gsp_range_ratio: float = 1.0
    gsp_num_turns: int = 1
    gsp_group_distribution: str = "uniform"
    gsp_zipf_alpha: float = 1.0
    request_rate: float = 10.0


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `generated_shared_prefix` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    counts = ("num_groups", "prompts_per_group", "system_prompt_len", "question_len", "output_len", "num_turns")
    check_shape(
        seed,
        shape,
        counts=[f"gsp_{name}" for name in counts],
        positive=("request_rate",),
        numbers=("gsp_zipf_alpha",),
    )
    check_number("gsp_range_ratio", shape.gsp_range_ratio, maximum=1.0)
    if shape.gsp_group_distribution not in ("uniform", "zipf"):
        raise ValueError(f"gsp_group_distribution: expected uniform or zipf, found {shape.gsp_group_distribution!r}")
    requests = in_arrival_order(_timed(np.random.default_rng([seed, 0x659]), shape))
    return trace_of("generated_shared_prefix", requests, {"seed": seed, **asdict(shape)})


def _timed(rng: np.random.Generator, shape: Shape) -> Timed:
    systems = [text(rng, _length(rng, shape, shape.gsp_system_prompt_len)) for _ in range(shape.gsp_num_groups)]
    groups = _groups(rng, shape)
    starts = poisson_arrivals(rng, len(groups), shape.request_rate)
    timed: Timed = []
    for number, (group, start) in enumerate(zip(groups.tolist(), starts.tolist(), strict=True)):
        timed += _conversation(rng, shape, systems[group], f"p{number}", group, start)
    return timed


def _groups(rng: np.random.Generator, shape: Shape) -> NDArray[np.int64]:
    """The group of every conversation, in order of arrival."""
    total = shape.gsp_num_groups * shape.gsp_prompts_per_group
    if shape.gsp_group_distribution == "zipf":
        return zipf_choice(rng, total, shape.gsp_num_groups, shape.gsp_zipf_alpha)
    return rng.permutation(np.repeat(np.arange(shape.gsp_num_groups), shape.gsp_prompts_per_group))


def _conversation(rng: np.random.Generator, shape: Shape, system: Tokens, name: str, group: int, start: float) -> Timed:
    timed: Timed = []
    prompt, now = system, start
    for turn in range(shape.gsp_num_turns):
        prompt = np.concatenate([prompt, text(rng, _length(rng, shape, shape.gsp_question_len))])
        reply = text(rng, _length(rng, shape, shape.gsp_output_len))
        extra = {"group": group, "turn": turn}
        timed.append((now, request(f"{name}.t{turn}", prompt, reply, session=name, extra=extra)))
        prompt = np.concatenate([prompt, reply])
        now += len(reply) * DECODE_S_PER_TOKEN
    return timed


def _length(rng: np.random.Generator, shape: Shape, full: int) -> int:
    return int(rng.integers(max(1, int(full * shape.gsp_range_ratio)), full, endpoint=True))
