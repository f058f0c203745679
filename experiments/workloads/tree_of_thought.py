"""`tree_of_thought`: problems explored as trees of thoughts; siblings are in flight at once.

A node's prompt is the instruction (shared by all), the problem, and the thoughts on the path to it; its reply is the
next thought. Each node that is kept gets `branches` children, all asked at the same moment behind the same prompt; the
best `beam` of a level are kept. Children's prompts contain the parent's reply verbatim. The twins of a level are what
separates keeping duplicate pages from merging them, and publishing early from publishing late.
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
    check_shape,
    in_arrival_order,
    lognormal_lengths,
    poisson_arrivals,
    request,
    text,
)


@dataclass(frozen=True)
class Shape:
    """Parameters of `tree_of_thought`. Lengths are in tokens.

    num_problems, problems_per_s    trees, and how many start a second (Poisson)
    depth, branches, beam           levels, children of a kept node, nodes kept in a level
    instruction_len                 length of the shared instruction
    problem_median, thought_median  log-normal lengths (sigma 0.5)
    """

    num_problems: int = 60
    problems_per_s: float = 0.2
    depth: int = 4
    branches: int = 5
    beam: int = 2
    instruction_len: int = 407
    problem_median: float = 150.0
    thought_median: float = 80.0


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `tree_of_thought` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    check_shape(
        seed,
        shape,
        counts=("num_problems", "depth", "branches", "beam", "instruction_len"),
        positive=("problems_per_s", "problem_median", "thought_median"),
    )
    requests = in_arrival_order(_timed(np.random.default_rng([seed, 0x707]), shape))
    return trace_of("tree_of_thought", requests, {"seed": seed, **asdict(shape)})


def _timed(rng: np.random.Generator, shape: Shape) -> Timed:
    instruction = text(rng, shape.instruction_len)
    timed: Timed = []
    for number, start in enumerate(poisson_arrivals(rng, shape.num_problems, shape.problems_per_s).tolist()):
        problem = _text(rng, shape.problem_median)
        timed += _tree(rng, shape, f"q{number}", np.concatenate([instruction, problem]), start)
    return timed


def _tree(rng: np.random.Generator, shape: Shape, name: str, root: Tokens, start: float) -> Timed:
    timed: Timed = []
    kept, now = [root], start
    for level in range(shape.depth):
        thoughts = [(prompt, _text(rng, shape.thought_median)) for prompt in kept for _ in range(shape.branches)]
        for number, (prompt, thought) in enumerate(thoughts):
            extra = {"level": level}
            timed.append((now, request(f"{name}.{level}.{number}", prompt, thought, session=name, extra=extra)))
        # A level is judged when its last thought is there.
        now += max(len(thought) for _, thought in thoughts) * DECODE_S_PER_TOKEN
        best = rng.choice(len(thoughts), size=min(shape.beam, len(thoughts)), replace=False)
        kept = [np.concatenate(thoughts[index]) for index in sorted(best.tolist())]
    return timed


def _text(rng: np.random.Generator, median: float) -> Tokens:
    return text(rng, int(lognormal_lengths(rng, 1, median=median, sigma=0.5, low=1, high=4000)[0]))
