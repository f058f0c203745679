"""One request as the engine and its scheduler see it.

The true output is not here: it stands with the executor, which hands out one token at a time. A scheduler
knows the prompt, the tokens generated so far, and the declared limit `max_tokens`.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kvarena.allocators.interface import Sequence
from kvarena.experiments.engine.beams import Beams


class State(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    REJECTED = "rejected"


class End(enum.Enum):
    """Why a request ended.

    STOP      it generated its last token (end of sequence)
    LENGTH    it generated max_tokens, or reached max_model_len
    POOL      alone in the pool, it needs one page more than there are
    REJECTED  it can never be served; `EngineRequest.message` has the numbers
    PRUNED    a beam whose continuations were all worse than the others'
    """

    STOP = "stop"
    LENGTH = "length"
    POOL = "pool"
    REJECTED = "rejected"
    PRUNED = "pruned"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request in the engine.

    seq             its tokens; the allocator's handle
    max_tokens      tokens that it may generate at most, as the scheduler is told (after any cut)
    requested       max_tokens as it came in
    arrival_s       seconds on the engine's clock
    priority        smaller goes first; used by order `priority` alone
    num_computed    tokens scheduled so far, those in flight included (ahead of seq.num_computed_tokens with lag)
    num_in_flight   tokens sampled by launched steps whose results are not in yet
    epoch           raised by every preemption, so that a result of before is told apart
    lost_tokens     tokens that were computed when it was last preempted
    recomputed_tokens  of those, what its re-admissions did not find cached
    kept_tokens     tokens whose KV went to the host when it was last thrown back
    swapped_tokens  tokens whose KV came back from there, over the whole run
    hits            hit tokens of each admission on the device, the first one first
    host_hits       hit tokens of each admission in a second-level cache on the host, beyond those of the device
    samples         replies that go on from its prompt, itself included
    beams           it is a beam of these
    parent          id of the request that it was forked from
    forked          it took part in a fork since it was admitted, so a page that it writes may be shared
    branched        its other samples were forked
    """

    seq: Sequence
    max_tokens: int
    requested: int = -1
    arrival_s: float = 0.0
    priority: int = 0
    state: State = State.WAITING
    num_computed: int = 0
    num_in_flight: int = 0
    epoch: int = 0
    num_preemptions: int = 0
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    kept_tokens: int = 0
    swapped_tokens: int = 0
    hits: list[int] = field(default_factory=list)
    host_hits: list[int] = field(default_factory=list)
    samples: int = 1
    beams: Beams | None = None
    parent: str | None = None
    forked: bool = False
    branched: bool = False
    end: End | None = None
    message: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens is {self.max_tokens}, expected at least 1")
        if self.samples < 1:
            raise ValueError(f"request {self.id}: samples is {self.samples}, expected at least 1")
        if self.requested < 0:
            self.requested = self.max_tokens

    @property
    def id(self) -> str:
        return self.seq.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and generated."""
        return self.seq.num_tokens

    @property
    def num_output(self) -> int:
        """Generated tokens known so far."""
        return self.seq.num_tokens - self.seq.num_prompt_tokens

    @property
    def done(self) -> bool:
        return self.end is not None

    @property
    def cut(self) -> bool:
        """It ended by a limit below what was asked for."""
        short = self.num_output < self.requested
        return self.end is End.POOL or (self.end is End.LENGTH and short)

    def admitted(self, hit_tokens: int, host_hit_tokens: int = 0) -> None:
        """One admission that went through, with what of the sequence was cached on the device and on the host."""
        self.hits.append(hit_tokens)
        self.host_hits.append(host_hit_tokens)
        self.recomputed_tokens += max(self.lost_tokens - hit_tokens - host_hit_tokens, 0)
        self.lost_tokens = 0

    def returned(self, moved_tokens: int, host_hit_tokens: int = 0) -> None:
        """An admission from the host tier: `moved_tokens` were copied back, the rest of what is computed was cached,
        `host_hit_tokens` of it in the second-level cache."""
        self.num_computed = self.seq.num_computed_tokens
        moved = min(moved_tokens, self.num_computed)
        self.swapped_tokens += moved
        self.lost_tokens = max(self.lost_tokens - moved, 0)
        self.admitted(self.num_computed - moved - host_hit_tokens, host_hit_tokens)

    def throw_back(self) -> None:
        """After a preemption: nothing is computed, what is in flight is stale."""
        self.lost_tokens = self.num_computed
        self.num_computed = 0
        self.num_in_flight = 0
        self.forked = False
        self.num_preemptions += 1
        self.epoch += 1
        self.state = State.PREEMPTED


def make_request(
    request_id: str,
    tokens: Any,
    max_tokens: int,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    namespace: Hashable = None,
    samples: int = 1,
    beam_width: int = 0,
) -> EngineRequest:
    """A request from token ids. Raises ValueError for an empty prompt, max_tokens below 1, no sample, one beam, or
    samples of beams."""
    if beam_width < 0 or beam_width == 1 or (beam_width and samples > 1):
        raise ValueError(
            f"request {request_id}: beam_width: expected 0, or at least 2 with one sample, found {beam_width} with "
            f"{samples} samples"
        )
    seq = Sequence(request_id, tokens, namespace=namespace)
    request = EngineRequest(seq, max_tokens, arrival_s=arrival_s, priority=priority, samples=samples)
    if beam_width:
        request.beams = Beams(beam_width)
    return request
