"""What is assumed of replies: whether they have ids, and whether later prompts contain them.

    none         no reply is published: prompts alone fill the cache
    unreachable  replies are published under ids that no prompt has: they take room and serve nothing
    inferred     in a session, a reply is what the next prompt has behind this one
    recorded     replies are in the trace, and later prompts contain them (measured)

A trace without ids of replies is somewhere between the first two, whatever the truth: `none` leaves out what replies
push out of the cache, `unreachable` leaves out what they would have served. Report both, as a band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from kvarena.experiments.traces.base import MAX_TOKEN, Request, Visible
from numpy.typing import NDArray

Assumed = Literal["trace", "none", "unreachable", "inferred", "recorded", "band"]
ASSUMED: tuple[str, ...] = get_args(Assumed)


def with_outputs(
    requests: Sequence[Request], visible: Visible, assumed: str, *, tokens_per_id: int = 1
) -> tuple[list[Request], Visible]:
    """The requests under an assumption on their replies, and what they then show. O(tokens of the replies).

    assumed        "trace": as they are; "band" counts as none
    tokens_per_id  tokens that one replayed token stands for (a trace replayed by its ids)

    Raises ValueError where the trace does not allow it: recorded without returning replies, inferred without sessions.
    """
    if assumed == "trace":
        return list(requests), visible
    if assumed == "recorded":
        if visible.outputs != "recorded":
            raise ValueError(
                f"'recorded' needs replies that return in later prompts; this trace's are {visible.outputs!r}"
            )
        return list(requests), visible
    if assumed in ("none", "band"):
        bare = [replace(request, output_ids=None, reply_tokens=None) for request in requests]
        return bare, replace(visible, outputs="none")
    if assumed == "unreachable":
        return _unreachable(requests, tokens_per_id), replace(visible, outputs="unreachable")
    if assumed != "inferred":
        raise ValueError(f"expected one of {', '.join(ASSUMED)}, found {assumed!r}")
    if not visible.sessions or tokens_per_id > 1:
        raise ValueError("'inferred' needs sessions, and tokens as the unit: a reply is what the next prompt adds")
    return _inferred(requests), replace(visible, outputs="inferred")


def _unreachable(requests: Sequence[Request], tokens_per_id: int) -> list[Request]:
    """Ids below zero, each once: no prompt of any trace has them."""
    found, taken = [], 0
    for request in requests:
        length = -(-request.num_output_tokens // tokens_per_id)
        if taken + length > MAX_TOKEN:
            raise ValueError(f"request {request.request_id}: the replies before it have 2^31 tokens")
        found.append(_replying(request, -1 - np.arange(taken, taken + length, dtype=np.int32)))
        taken += length
    return found


def _replying(request: Request, tokens: NDArray[np.int32] | None) -> Request:
    if request.grain == 1:
        return replace(request, output_ids=tokens, reply_tokens=None)
    return replace(request, output_ids=None, reply_tokens=tokens)


def _inferred(requests: Sequence[Request]) -> list[Request]:
    found: list[Request] = [_replying(request, None) for request in requests]
    last: dict[tuple[object, str], int] = {}
    for index, request in enumerate(requests):
        if request.session_id is None:
            continue
        before = last.get((request.namespace, request.session_id))
        if before is not None:
            found[before] = _answered(found[before], request)
        last[request.namespace, request.session_id] = index
    return found


def _answered(request: Request, later: Request) -> Request:
    """The request with the reply that the later prompt has behind it; as it is where that does not follow on.

    Where an id stands for several tokens, the prompt's partial last id becomes the whole one of the later prompt: they
    name the same tokens, and the later one is what can be found again.
    """
    start, end = request.num_prompt_tokens, request.num_prompt_tokens + request.num_output_tokens
    whole = start // request.grain
    ids, theirs = _ids(request), _ids(later)
    if end > later.num_prompt_tokens or end == start or not np.array_equal(ids[:whole], theirs[:whole]):
        return request
    if request.grain > 1 and len(ids) > whole:
        request = replace(request, hash_ids=np.concatenate([ids[:whole], theirs[whole : whole + 1]]))
    return _replying(request, later.prompt_ids()[start:end].copy())


def _ids(request: Request) -> NDArray[np.int32]:
    ids = request.token_ids if request.hash_ids is None else request.hash_ids
    if ids is None:
        raise ValueError(f"request {request.request_id}: the trace has lengths only, no ids")
    return ids
