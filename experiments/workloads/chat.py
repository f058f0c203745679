"""`chat`: multi-turn conversations at token grain, in which every difference of the two designs can show.

Each conversation is one growing token buffer:

    [system prompt of its group][user header, message, end][assistant header, reply, end][user header, ...

The prompt of turn t is the buffer up to the assistant header, its reply is what follows, so the next prompt starts
with prompt and reply, token for token. System prompts have odd lengths (no page size divides them), are shared by
groups of conversations whose popularity falls like 1 / rank, and arrivals overlap: many sharers are in flight before
the first of them is done. A share of the prompts is sent twice within a second or so (the user asks for another
answer): twins in flight, whose replies differ.

Sizes follow published chat figures in kind, not in number: short messages, replies of a few hundred tokens, a think
time of tens of seconds, a number of turns that falls geometrically. They are parameters; all lengths are in tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from kvarena.experiments.traces.base import Request, Trace
from kvarena.experiments.workloads import trace_of
from kvarena.experiments.workloads.draws import (
    DECODE_S_PER_TOKEN,
    Timed,
    Tokens,
    check_count,
    check_number,
    check_shape,
    in_arrival_order,
    lognormal_lengths,
    poisson_arrivals,
    request,
    text,
    zipf_choice,
)
from numpy.typing import NDArray

USER_HEADER = (1, 3, 4, 2)
ASSISTANT_HEADER = (1, 5, 2)
END_OF_TURN = 6
FIRST_TEXT_TOKEN = 16
"""Ids below are the chat template's."""


@dataclass(frozen=True)
class Shape:
    """Parameters of `chat`; every one is recorded with a result. Lengths are in tokens.

    num_sessions        conversations; `sessions_per_s` of them start a second, Poisson
    num_system_prompts  groups; conversation -> group with weight 1 / rank^system_zipf
    system_prompt_*     lengths of system prompts, uniform, made odd
    mean_turns          turns of a conversation, geometric, at most max_turns
    message_*, reply_*  log-normal lengths (median, sigma of the logarithm), at most max_*
    think_*             log-normal pause after a reply, seconds (the reply takes DECODE_S_PER_TOKEN a token)
    retry_share         share of turns that are sent twice, 0.2 to 1.2 s apart, each with a reply of its own
    vocab_size          text tokens are uniform in [FIRST_TEXT_TOKEN, vocab_size)
    """

    num_sessions: int = 600
    sessions_per_s: float = 2.0
    num_system_prompts: int = 16
    system_zipf: float = 1.0
    system_prompt_min: int = 151
    system_prompt_max: int = 1151
    mean_turns: float = 5.0
    max_turns: int = 20
    message_median: float = 48.0
    message_sigma: float = 1.0
    reply_median: float = 150.0
    reply_sigma: float = 0.7
    max_message: int = 2000
    max_reply: int = 800
    think_median_s: float = 20.0
    think_sigma: float = 0.8
    retry_share: float = 0.05
    vocab_size: int = 32_000


def make(seed: int = 0, shape: Shape | None = None) -> Trace:
    """The `chat` workload of that seed, about 3,100 requests by default. Raises ValueError for a bad parameter."""
    shape = shape or Shape()
    check_shape(
        seed,
        shape,
        counts=("num_sessions", "num_system_prompts", "max_turns", "max_message", "max_reply", "system_prompt_min"),
        positive=("sessions_per_s", "message_median", "reply_median", "think_median_s"),
        numbers=("system_zipf", "message_sigma", "reply_sigma", "think_sigma"),
        shares=("retry_share",),
    )
    check_count("system_prompt_max", shape.system_prompt_max, minimum=shape.system_prompt_min)
    check_count("vocab_size", shape.vocab_size, minimum=FIRST_TEXT_TOKEN + 2)
    check_number("mean_turns", shape.mean_turns, minimum=1.0)
    rng = np.random.default_rng([seed, 0xC4A7])
    return trace_of("chat", _requests(rng, shape), {"seed": seed, **asdict(shape)})


def _requests(rng: np.random.Generator, shape: Shape) -> list[Request]:
    systems = _system_prompts(rng, shape)
    groups = zipf_choice(rng, shape.num_sessions, shape.num_system_prompts, shape.system_zipf)
    starts = poisson_arrivals(rng, shape.num_sessions, shape.sessions_per_s)
    turns = np.minimum(rng.geometric(1.0 / shape.mean_turns, shape.num_sessions), shape.max_turns)
    timed: Timed = []
    for session in range(shape.num_sessions):
        system = systems[groups[session]]
        timed += _conversation(rng, shape, session, int(groups[session]), system, starts[session], int(turns[session]))
    return in_arrival_order(timed)


def _system_prompts(rng: np.random.Generator, shape: Shape) -> list[Tokens]:
    lengths = rng.integers(shape.system_prompt_min, shape.system_prompt_max, shape.num_system_prompts, endpoint=True)
    return [_text(rng, shape, int(length) | 1) for length in lengths]


def _text(rng: np.random.Generator, shape: Shape, length: int) -> Tokens:
    return text(rng, length, first=FIRST_TEXT_TOKEN, vocab_size=shape.vocab_size)


def _conversation(
    rng: np.random.Generator,
    shape: Shape,
    session: int,
    group: int,
    system: Tokens,
    start_s: float,
    num_turns: int,
) -> Timed:
    """(arrival, request) of every turn; token ids and replies are views of one buffer."""
    messages = lognormal_lengths(
        rng, num_turns, median=shape.message_median, sigma=shape.message_sigma, low=1, high=shape.max_message
    )
    replies = lognormal_lengths(
        rng, num_turns, median=shape.reply_median, sigma=shape.reply_sigma, low=1, high=shape.max_reply
    )
    thinks = rng.lognormal(np.log(shape.think_median_s), shape.think_sigma, num_turns)
    retried = rng.random(num_turns) < shape.retry_share
    buffer, ends = _transcript(rng, shape, system, messages, replies)
    timed: Timed = []
    now = start_s
    for turn, (prompt_end, reply_end) in enumerate(ends):
        output = buffer[prompt_end:reply_end]
        name, prompt = f"s{session}.t{turn}", buffer[:prompt_end]
        about: dict[str, Any] = {"session": f"s{session}", "extra": {"turn": turn, "group": group}}
        timed.append((now, request(name, prompt, output, **about)))
        if retried[turn]:
            other = _text(rng, shape, len(output))
            later = now + rng.uniform(0.2, 1.2)
            timed.append((later, request(f"{name}.again", prompt, other, **about)))
        now += len(output) * DECODE_S_PER_TOKEN + thinks[turn]
    return timed


def _transcript(
    rng: np.random.Generator,
    shape: Shape,
    system: Tokens,
    messages: NDArray[np.int64],
    replies: NDArray[np.int64],
) -> tuple[Tokens, list[tuple[int, int]]]:
    """The whole conversation, int32 [n], and (end of prompt, end of reply) of every turn."""
    parts: list[Tokens] = [system]
    ends: list[tuple[int, int]] = []
    length = len(system)
    for message, reply in zip(messages.tolist(), replies.tolist(), strict=True):
        parts += [_ids(USER_HEADER), _text(rng, shape, message), _ids((END_OF_TURN,)), _ids(ASSISTANT_HEADER)]
        prompt_end = length + len(USER_HEADER) + message + 1 + len(ASSISTANT_HEADER)
        parts += [_text(rng, shape, reply - 1), _ids((END_OF_TURN,))]
        length = prompt_end + reply
        ends.append((prompt_end, length))
    return np.concatenate(parts), ends


def _ids(values: tuple[int, ...]) -> Tokens:
    return np.array(values, np.int32)
