"""Request and Trace: what every reader and workload generator yields, and every replay consumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Outputs = Literal["none", "unreachable", "inferred", "recorded"]

MAX_TOKEN = 2**31 - 1
"""The largest token id: token buffers are int32."""


@dataclass(frozen=True, slots=True)
class Visible:
    """What a trace can show. A factor that it cannot show is reported as "not observable here", never as 0.

    grain         tokens that one id of the trace stands for; 1 = token ids
    publish_time  sharers of a prefix arrive so close together that the time of publishing can matter
    outputs       none: replies have no ids; unreachable: they have ids that no later prompt contains;
                  inferred: estimated; recorded: replies return verbatim in later prompts
    sessions      requests are grouped into sessions
    reuse         False: the source has lengths only, so a hit rate says nothing about it
    """

    grain: int
    publish_time: bool
    outputs: Outputs
    sessions: bool
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    arrival_s           seconds since the first request
    num_prompt_tokens   true length of the prompt
    num_output_tokens   true length of the reply (schedulers never see it)
    token_ids           int32 [num_prompt_tokens], or None when the trace has ids of `grain` tokens
    hash_ids            dense int32 ids in order of first use [ceil(num_prompt_tokens / grain)], or None
    output_ids          int32 token ids of the reply [num_output_tokens]; at grain > 1 dense ids of the full blocks
                        that the reply completes; None when the trace has none
    reply_tokens        at grain > 1: int32 ids of the reply [num_output_tokens] as it is replayed, where something is
                        assumed of replies (`outputs.py`); else None
    session_id          requests of one conversation share it
    namespace           isolates prefixes (LoRA, salt, tenant)
    extra               fields of the source that no replay needs (type, turn, parent ...)
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    grain: int = 1
    token_ids: NDArray[np.int32] | None = None
    hash_ids: NDArray[np.int32] | None = None
    output_ids: NDArray[np.int32] | None = None
    session_id: str | None = None
    namespace: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    reply_tokens: NDArray[np.int32] | None = None

    def prompt_ids(self) -> NDArray[np.int32]:
        """Token ids of the prompt, int32 [num_prompt_tokens].

        From hash ids: token = id x grain + j, the last block cut to its real length, so no two blocks share a
        token. Raises ValueError when a token passes 2^31 - 1. O(num_prompt_tokens) from hash ids, else O(1).
        """
        import numpy as np

        if self.token_ids is not None:
            return self.token_ids
        if self.hash_ids is None:
            raise ValueError(f"request {self.request_id}: the trace has lengths only, no ids")
        if self.hash_ids.size and (int(self.hash_ids.max()) + 1) * self.grain > MAX_TOKEN + 1:
            raise ValueError(
                f"request {self.request_id}: id {int(self.hash_ids.max())} x {self.grain} tokens passes 2^31 tokens"
            )
        tokens: NDArray[np.int32] = np.add.outer(
            self.hash_ids * np.int32(self.grain), np.arange(self.grain, dtype=np.int32)
        )
        return tokens.reshape(-1)[: self.num_prompt_tokens]

    def reply_ids(self) -> NDArray[np.int32] | None:
        """Token ids of the reply, int32 [num_output_tokens]; None when none are known or assumed at token grain."""
        return self.output_ids if self.grain == 1 else self.reply_tokens


@dataclass(frozen=True)
class Trace:
    """A named, re-iterable stream of requests in arrival order.

    source        file or generator description with its parameters and seed
    read          called once per pass; yields requests sorted by arrival, ties in file order
    num_requests  known count, or None before a first pass
    warnings      what the reader changed or skipped, with counts (never silent)
    """

    name: str
    visible: Visible
    read: Callable[[], Iterator[Request]]
    num_requests: int | None = None
    source: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    warnings: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Request]:
        return self.read()


def adjusted(trace: Trace, speed: float, limit: int | None) -> Trace:
    """The trace with arrivals `speed` times as fast, and only its first `limit` requests (None = all)."""
    if speed == 1.0 and limit is None:
        return trace

    def read() -> Iterator[Request]:
        for request in islice(trace.read(), limit):
            yield replace(request, arrival_s=request.arrival_s / speed)

    count = trace.num_requests if limit is None or trace.num_requests is None else min(limit, trace.num_requests)
    return replace(trace, read=read, num_requests=count, source={**trace.source, "speed": speed, "limit": limit})
