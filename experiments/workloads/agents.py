"""`agents`: tool-using agents with long preambles, growing contexts and sub-agents.

An agent's prompt is the preamble of its kind (system text and tool schemas, shared by all agents of the kind), its
task, and then, step by step, its own replies and the results of its tools, verbatim. Some steps start sub-agents: each
has the sub-agents' preamble, a task of its own and a short run, all of a step's sub-agents at once; the parent goes on
when the last is done, with their final replies in its context. Long prompts, much reuse, pauses while tools run.
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
    zipf_choice,
)


@dataclass(frozen=True)
class Shape:
    """Parameters of `agents`. Lengths are in tokens, times in seconds.

    num_sessions, sessions_per_s    agents, and how many start a second (Poisson)
    num_kinds, preamble_len         kinds of agents (weight 1 / rank), length of a kind's preamble
    task_median, reply_median, result_median    log-normal lengths (sigma 0.8) of a task, a reply, a tool's result
    mean_steps, max_steps           steps of an agent, geometric
    tool_median_s                   log-normal time a tool runs (sigma 1)
    subagent_share, num_subagents   share of steps that start sub-agents, and how many at once
    subagent_steps                  mean steps of a sub-agent
    """

    num_sessions: int = 60
    sessions_per_s: float = 0.2
    num_kinds: int = 4
    preamble_len: int = 3001
    task_median: float = 300.0
    reply_median: float = 120.0
    result_median: float = 400.0
    mean_steps: float = 12.0
    max_steps: int = 60
    tool_median_s: float = 3.0
    subagent_share: float = 0.05
    num_subagents: int = 3
    subagent_steps: float = 4.0


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `agents` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    check_shape(
        seed,
        shape,
        counts=("num_sessions", "num_kinds", "preamble_len", "max_steps", "num_subagents"),
        positive=("sessions_per_s", "task_median", "reply_median", "result_median", "tool_median_s"),
        shares=("subagent_share",),
    )
    for name in ("mean_steps", "subagent_steps"):
        check_shape(seed, shape, positive=(name,))
        if getattr(shape, name) < 1:
            raise ValueError(f"{name}: expected a finite number from 1 to inf, found {getattr(shape, name)!r}")
    requests = in_arrival_order(_Agents(np.random.default_rng([seed, 0xA6E7]), shape).timed())
    return trace_of("agents", requests, {"seed": seed, **asdict(shape)})


class _Agents:
    """Runs the agents one by one; all draws come from one generator."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        self._rng = rng
        self._shape = shape
        self._timed: Timed = []

    def timed(self) -> Timed:
        """(arrival, request) of every step of every agent and sub-agent."""
        shape, rng = self._shape, self._rng
        preambles = [text(rng, shape.preamble_len) for _ in range(shape.num_kinds)]
        helper = text(rng, max(1, shape.preamble_len // 2))
        kinds = zipf_choice(rng, shape.num_sessions, shape.num_kinds, 1.0)
        starts = poisson_arrivals(rng, shape.num_sessions, shape.sessions_per_s)
        for number, (kind, start) in enumerate(zip(kinds.tolist(), starts.tolist(), strict=True)):
            self._run(f"a{number}", preambles[kind], start, shape.mean_steps, helper)
        return self._timed

    def _run(
        self, name: str, preamble: Tokens, start: float, mean_steps: float, helper: Tokens | None
    ) -> tuple[float, Tokens]:
        """Adds the steps of one agent; returns when it ends and its last reply."""
        shape, rng = self._shape, self._rng
        context, now = np.concatenate([preamble, self._text(shape.task_median)]), start
        reply = context[:0]
        for step in range(min(int(rng.geometric(1.0 / mean_steps)), shape.max_steps)):
            reply = self._text(shape.reply_median)
            self._timed.append((now, request(f"{name}.{step}", context, reply, session=name, extra={"step": step})))
            now += len(reply) * DECODE_S_PER_TOKEN
            if helper is not None and rng.random() < shape.subagent_share:
                now, results = self._delegate(f"{name}.{step}", helper, now)
            else:
                now += rng.lognormal(np.log(shape.tool_median_s), 1.0)
                results = [self._text(shape.result_median)]
            context = np.concatenate([context, reply, *results])
        return now, reply

    def _delegate(self, name: str, helper: Tokens, now: float) -> tuple[float, list[Tokens]]:
        """Sub-agents at once; returns when the last ends and their last replies."""
        ends = [
            self._run(f"{name}/sub{number}", helper, now, self._shape.subagent_steps, None)
            for number in range(self._shape.num_subagents)
        ]
        return max(end for end, _ in ends), [reply for _, reply in ends]

    def _text(self, median: float) -> Tokens:
        return text(self._rng, int(lognormal_lengths(self._rng, 1, median=median, sigma=0.8, low=1, high=20_000)[0]))
