"""`mooncake_like`: an hour of chat in the shape of Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release).

The generator follows how such a trace comes about, not its curves. Conversations open at an even rate. Each has its
own inclination to go on; the next prompt is the prompt before, its reply and a message (a line, or a document), or,
for long ones, a window that keeps only the head. Prompts are then cut into blocks of 512 tokens, named as a chained
hash names them: a block keeps its id only while everything up to its end is unchanged, and the partial last block has
an id of its own. Arrivals fall on ticks of 3 s. There are no sessions and no ids of replies to see, as in the original.

Where the defaults come from, measured on the published file:
    opening quantiles    input_length of the 7,373 rows that share no more than block 0 with an earlier row
    go_on_*              7,373 / 2,265 / 949 / 484 / 284 / 167 rows at depth 0 / 1 / 2 / 3 / 4 / 5 of a chain
    gap_*                a continuation comes 42 / 66 / 123 / 264 / 483 s later (p10, p25, p50, p75, p90)
    line_*, document_*   growth beyond the reply: 9 / 26 / 355 / 4,194 / 6,921 tokens (p25, p50, p75, p90, p95)
    window_*             1, 3, 11, 31, 29, 15 % of continuations of up to 5, 10, 20, 40, 80, more blocks keep only a
                         head: 11 / 21 / 45 % of it (p25, p50, p75)
    reply quantiles      output_length of all rows

Length of the first prompt and number of turns of the conversations are drawn from a randomly shifted
lattice (a rank-1 sequence over the two), not independently: a few very long conversations carry much of an hour's
reuse, so with independent draws hit rates of two seeds differ by 3 points, with these by less than 1.
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass

import numpy as np
from kvarena.experiments.traces.base import Request, Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import check_count, check_number
from numpy.typing import NDArray

BLOCK = 512
MAX_TURNS = 43
"""The longest chain of the original has 42 continuations."""

_LEVELS = (0.0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
_OPENING_TOKENS = (891, 897, 905, 1336, 5264, 13_056, 25_559, 38_494, 89_868, 126_195)
_REPLY_TOKENS = (1, 10, 24, 156, 350, 472, 597, 698, 1118, 2000)
_LATTICE_STEP = 1.3247179572447460 ** -np.arange(1.0, 3.0)
"""Powers of the root of x^3 = x + 1: the generalised golden ratio, which fills the unit square evenly."""

_WINDOW_BLOCKS = (5, 10, 20, 40, 80)
_WINDOW_SHARE = (0.01, 0.03, 0.11, 0.31, 0.29, 0.15)


@dataclass(frozen=True)
class Shape:
    """Parameters of `mooncake_like`. Lengths are in tokens, times in seconds.

    num_requests           requests of the trace
    openings_per_s         conversations that start a second
    tick_s                 arrivals fall on multiples of it
    go_on_a, go_on_b       a conversation goes on with a probability of its own, drawn from Beta(a, b)
    gap_least_s, gap_median_s, gap_sigma    time to the next prompt: least plus log-normal
    gap_length_power       that median grows as (prompt / 20,000)^power beyond 20,000 tokens
    line_median, line_sigma    log-normal length of a short message
    document_share, document_median, document_sigma    share and log-normal length of messages that hold a document
    retry_share            share of continuations that send the same prompt again
    max_prompt             longest prompt; a conversation ends there
    """

    num_requests: int = 12_031
    openings_per_s: float = 2.06
    tick_s: float = 3.0
    go_on_a: float = 0.9
    go_on_b: float = 1.9
    gap_least_s: float = 12.0
    gap_median_s: float = 112.0
    gap_sigma: float = 1.2
    gap_length_power: float = 0.2
    line_median: float = 18.0
    line_sigma: float = 0.9
    document_share: float = 0.25
    document_median: float = 2500.0
    document_sigma: float = 1.3
    retry_share: float = 0.02
    max_prompt: int = 126_195

    def check(self) -> None:
        """Raises ValueError that names the parameter."""
        check_count("num_requests", self.num_requests, maximum=10_000_000)
        check_count("max_prompt", self.max_prompt, minimum=2 * BLOCK)
        for name in (
            "openings_per_s",
            "tick_s",
            "go_on_a",
            "go_on_b",
            "gap_median_s",
            "line_median",
            "document_median",
        ):
            check_number(name, getattr(self, name), minimum=1e-6)
        for name in ("gap_least_s", "gap_sigma", "gap_length_power", "line_sigma", "document_sigma"):
            check_number(name, getattr(self, name))
        for name in ("document_share", "retry_share"):
            check_number(name, getattr(self, name), maximum=1.0)


@dataclass(slots=True)
class _Prompt:
    """A prompt of a conversation: its length, block names, the reply it gets, the prompts that follow it."""

    num_tokens: int
    blocks: list[int]
    reply: int
    turns_left: int


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `mooncake_like` workload of that seed. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    check_count("seed", seed, minimum=0)
    shape.check()
    requests = _Generator(np.random.default_rng([seed, 0x3007]), shape).requests()
    return trace_of("mooncake_like", requests, {"seed": seed, **asdict(shape)})


class _Generator:
    """Runs the conversations in time order, so ids come out in order of first use."""

    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        self._rng = rng
        self._shape = shape
        self._next_block = 1  # block 0 is the head that all prompts share
        self._openings = 0
        self._lattice = rng.random(2)
        # P(at most t continuations), t = 0, 1 ...: each conversation goes on with a probability from Beta(a, b).
        t = np.arange(MAX_TURNS)
        self._turns = 1.0 - np.cumprod((shape.go_on_a + t) / (shape.go_on_a + shape.go_on_b + t))

    def requests(self) -> list[Request]:
        """The first `num_requests` prompts in time order, arrivals on ticks and counted from the first."""
        events: list[tuple[float, int, _Prompt | None]] = [(self._gap_to_opening(), 0, None)]
        made: list[tuple[float, _Prompt]] = []
        serial = 1
        while len(made) < self._shape.num_requests:
            now, _, previous = heapq.heappop(events)
            if previous is None:
                heapq.heappush(events, (now + self._gap_to_opening(), serial, None))
                prompt = self._opening()
            else:
                prompt = self._continuation(previous)
            made.append((now, prompt))
            if prompt.turns_left and prompt.num_tokens < self._shape.max_prompt:
                heapq.heappush(events, (now + self._gap(prompt.num_tokens), serial + 1, prompt))
            serial += 2
        return self._finish(made)

    def _gap_to_opening(self) -> float:
        return self._rng.exponential(1.0 / self._shape.openings_per_s)

    def _gap(self, num_tokens: int) -> float:
        """Time to the next prompt; readers of long prompts take longer."""
        median = self._shape.gap_median_s * max(1.0, num_tokens / 20_000) ** self._shape.gap_length_power
        return self._shape.gap_least_s + self._rng.lognormal(np.log(median), self._shape.gap_sigma)

    def _opening(self) -> _Prompt:
        length, turns = (self._lattice + self._openings * _LATTICE_STEP) % 1.0
        self._openings += 1
        num_tokens = max(2, min(_quantile(_OPENING_TOKENS, length), self._shape.max_prompt))
        return self._prompt([0], 1, num_tokens, int(np.searchsorted(self._turns, turns, side="right")))

    def _continuation(self, before: _Prompt) -> _Prompt:
        if self._rng.random() < self._shape.retry_share:
            return _Prompt(before.num_tokens, before.blocks, self._reply(), before.turns_left - 1)
        num_blocks = len(before.blocks)
        if self._rng.random() < _WINDOW_SHARE[int(np.searchsorted(_WINDOW_BLOCKS, num_blocks))]:
            keep = max(2, int(num_blocks * min(0.95, self._rng.lognormal(np.log(0.2), 0.9))))
            num_tokens = before.num_tokens + int(self._rng.normal(-1200, 4500))
            keep, num_tokens = min(keep, num_blocks - 1), max(num_tokens, (keep + 1) * BLOCK)
        else:
            keep = before.num_tokens // BLOCK
            num_tokens = before.num_tokens + before.reply + self._message()
        return self._prompt(before.blocks, keep, min(num_tokens, self._shape.max_prompt), before.turns_left - 1)

    def _message(self) -> int:
        shape = self._shape
        if self._rng.random() < shape.document_share:
            return int(self._rng.lognormal(np.log(shape.document_median), shape.document_sigma)) + 1
        return int(self._rng.lognormal(np.log(shape.line_median), shape.line_sigma)) + 1

    def _prompt(self, before: list[int], keep: int, num_tokens: int, turns_left: int) -> _Prompt:
        fresh = max(0, -(-num_tokens // BLOCK) - keep)
        blocks = [*before[:keep], *range(self._next_block, self._next_block + fresh)]
        self._next_block += fresh
        return _Prompt(num_tokens, blocks, self._reply(), turns_left)

    def _reply(self) -> int:
        return _quantile(_REPLY_TOKENS, self._rng.random())

    def _finish(self, made: list[tuple[float, _Prompt]]) -> list[Request]:
        tick = self._shape.tick_s
        first = made[0][0] // tick
        return [
            Request(
                request_id=f"r{position}",
                arrival_s=float((now // tick - first) * tick),
                num_prompt_tokens=prompt.num_tokens,
                num_output_tokens=prompt.reply,
                grain=BLOCK,
                hash_ids=_as_ids(prompt.blocks),
            )
            for position, (now, prompt) in enumerate(made)
        ]


def _quantile(tokens: tuple[int, ...], level: float) -> int:
    """The quantile at that level, its logarithm linear between the listed ones."""
    return round(float(np.exp(np.interp(level, _LEVELS, np.log(tokens)))))


def _as_ids(blocks: list[int]) -> NDArray[np.int32]:
    return np.array(blocks, dtype=np.int32)
