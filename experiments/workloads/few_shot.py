"""`few_shot`: questions behind the worked examples of their task, with varying numbers of examples.

A task has an instruction and a list of examples. A request takes the instruction, the first k examples of the list (k
varies) and a question of its own, so requests of a task share prefixes of different lengths that end inside pages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from kvarena.experiments.traces.base import Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import (
    Timed,
    check_count,
    check_shape,
    in_arrival_order,
    lognormal_lengths,
    poisson_arrivals,
    request,
    text,
    zipf_choice,
)


@dataclass(frozen=True)
class Shape:
    """Parameters of `few_shot`. Lengths are in tokens.

    num_requests, request_rate    requests, and how many arrive a second (Poisson)
    num_tasks, task_zipf          tasks, chosen with weight 1 / rank^task_zipf
    instruction_len               length of a task's instruction
    min_shots, max_shots          number of examples, uniform
    example_median, question_median, reply_median    log-normal lengths (sigma 0.5)
    """

    num_requests: int = 2000
    request_rate: float = 10.0
    num_tasks: int = 12
    task_zipf: float = 0.8
    instruction_len: int = 61
    min_shots: int = 2
    max_shots: int = 8
    example_median: float = 90.0
    question_median: float = 60.0
    reply_median: float = 40.0


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `few_shot` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    check_shape(
        seed,
        shape,
        counts=("num_requests", "num_tasks", "instruction_len"),
        positive=("request_rate", "example_median", "question_median", "reply_median"),
        numbers=("task_zipf",),
    )
    check_count("min_shots", shape.min_shots, minimum=0)
    check_count("max_shots", shape.max_shots, minimum=shape.min_shots)
    requests = in_arrival_order(_timed(np.random.default_rng([seed, 0xF57]), shape))
    return trace_of("few_shot", requests, {"seed": seed, **asdict(shape)})


def _timed(rng: np.random.Generator, shape: Shape) -> Timed:
    def lengths(size: int, median: float) -> list[int]:
        return lognormal_lengths(rng, size, median=median, sigma=0.5, low=1, high=4000).tolist()

    examples = [lengths(shape.max_shots, shape.example_median) for _ in range(shape.num_tasks)]
    ends = [shape.instruction_len + np.concatenate([[0], np.cumsum(sizes)]).astype(int) for sizes in examples]
    contexts = [text(rng, int(end[-1])) for end in ends]
    tasks = zipf_choice(rng, shape.num_requests, shape.num_tasks, shape.task_zipf).tolist()
    shots = rng.integers(shape.min_shots, shape.max_shots, shape.num_requests, endpoint=True).tolist()
    questions, replies = (lengths(shape.num_requests, m) for m in (shape.question_median, shape.reply_median))
    arrivals = poisson_arrivals(rng, shape.num_requests, shape.request_rate).tolist()
    timed: Timed = []
    for number, (task, k) in enumerate(zip(tasks, shots, strict=True)):
        prompt = np.concatenate([contexts[task][: ends[task][k]], text(rng, questions[number])])
        reply = text(rng, replies[number])
        timed.append((arrivals[number], request(f"r{number}", prompt, reply, extra={"task": task, "shots": k})))
    return timed
