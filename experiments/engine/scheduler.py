"""What both scheduling policies share: limits, the plan of a step, queues, arrivals, ends.

A step: `schedule()` gives a `StepPlan` and takes its slots from the allocator; an executor runs it; `update()`
brings the sampled tokens back, commits, and ends what is finished. With `result_lag` 1 the update of a step
comes after the next one is scheduled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from kvarena.allocators.host import HostTier
from kvarena.allocators.host_cache import HostCache
from kvarena.allocators.interface import Gate, KVAllocator, PageMove, Release
from kvarena.experiments.engine.beams import Beams, Candidate
from kvarena.experiments.engine.branching import can_fork
from kvarena.experiments.engine.request import End, EngineRequest, State

Order = Literal["fcfs", "lpm", "dfs-weight", "priority"]
ORDERS: tuple[str, ...] = ("fcfs", "lpm", "dfs-weight", "priority")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and options of a scheduler; each policy reads those it knows.

    max_num_batched_tokens  tokens a step (vllm); prompt tokens of a prefill batch (sglang)
    max_num_seqs            requests that run at once
    max_model_len           tokens of a prompt and its output together, at most
    chunked_prefill         a prompt may be computed in pieces
    chunk_size              tokens: cap of one request's chunk while others are there (vllm); prompt tokens
                            of a whole pass (sglang; None: max_num_batched_tokens)
    result_lag              1: a step is scheduled before the result of the one before is known
    order                   order of the waiting queue
    prefix_deferral         sglang: requests that share 32 uncached tokens with one ahead of them go last
                            (None: on for lpm alone, as upstream)
    limits                  `exact`: what can never fit is rejected on arrival and prompt + output may reach
                            max_model_len; `upstream`: the upstream's own arrival rules, and what would block
                            the queue for ever is rejected when it does (vllm: with whole_prompt_gate)
    host_pages              pages of a host tier: who is thrown back is copied there and comes back by a copy, not by
                            computing again (0: no such tier)
    host_cache_pages        pages of a second-level prefix cache on the host: what the device evicts goes there and is
                            copied back on a hit (0: none)
    watermark               vllm: share of the pool that an admission leaves free while others run
    whole_prompt_gate       vllm: a prompt is admitted only if all of it fits now
    max_num_active_seqs     vllm: replaces max_num_seqs at admission
    adaptive_cap            vllm: chunk cap = max(cap, budget // requests)
    conservativeness        sglang: scales the share of declared output that running requests reserve
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    chunked_prefill: bool = True
    chunk_size: int | None = None
    result_lag: Literal[0, 1] = 0
    order: Order = "fcfs"
    prefix_deferral: bool | None = None
    limits: Literal["exact", "upstream"] = "exact"
    host_pages: int = 0
    host_cache_pages: int = 0
    watermark: float = 0.0
    whole_prompt_gate: bool = True
    max_num_active_seqs: int | None = None
    adaptive_cap: bool = False
    conservativeness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "chunk_size", "max_num_active_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")
        for name, allowed in (("order", ORDERS), ("result_lag", (0, 1)), ("limits", ("exact", "upstream"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, found {getattr(self, name)!r}")
        for name in ("host_pages", "host_cache_pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, found {getattr(self, name)}")
        if (self.max_num_active_seqs or 0) > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs: expected at most max_num_seqs, {self.max_num_seqs}, "
                f"found {self.max_num_active_seqs}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark: expected 0 <= watermark < 1, found {self.watermark}")
        if self.conservativeness < 0:
            raise ValueError(f"conservativeness: expected at least 0, found {self.conservativeness}")


@dataclass(slots=True)
class Scheduled:
    """A request's part of a step: tokens [num_before, num_before + num_new) are computed.

    samples  its last token yields a new one; False for a chunk in the middle of a prompt
    epoch    the request's epoch when it was scheduled
    drafts   the last of its new tokens, which are guesses and not the sequence's until they are accepted
    """

    request: EngineRequest
    num_new: int
    num_before: int
    samples: bool
    epoch: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.num_before + self.num_new

    @property
    def stale(self) -> bool:
        """The request was preempted or ended after this was launched."""
        return self.request.done or self.request.epoch != self.epoch


Moves = tuple[Literal["out", "in", "copy"], tuple[PageMove, ...]]


@dataclass(slots=True)
class StepPlan:
    """What one step computes, in batch order, and what scheduling it did to the queues.

    moves  copies to carry out before anything is computed, in order, since a page may be in several: ("out", device
           page to host page), ("in", host page to device page), and ("copy", device page to device page): runs that
           moved, pages in which a hit ends, shared pages that are written, what forks could not share
    pages_in_use  of the device's pool when the step is launched, shared ones once; None: nobody looked
    """

    kind: Literal["mixed", "prefill", "decode", "idle"] = "mixed"
    batch: list[Scheduled] = field(default_factory=list)
    admitted: list[EngineRequest] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    moves: list[Moves] = field(default_factory=list)
    pages_in_use: int | None = None

    @property
    def num_moved_pages(self) -> int:
        """Pages that cross between device and host."""
        return sum(len(moves) for direction, moves in self.moves if direction != "copy")

    @property
    def num_copied_pages(self) -> int:
        """Pages copied on the device."""
        return sum(len(moves) for direction, moves in self.moves if direction == "copy")

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new for entry in self.batch)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled token.

    stop        the request's own end (end of sequence)
    others      the first tokens of the prompt's other replies
    candidates  of a beam, in place of a token: its best continuations, best first
    accepted    draft tokens that come before the token
    """

    token: int
    stop: bool = False
    others: tuple[Sample, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    accepted: int = 0


Drafter = Callable[[EngineRequest, int], Iterable[int]]  # a request, how many -> guesses of its next tokens


class Scheduler(ABC):
    """Common part of the two policies. The engine calls `add`, `schedule`, `update` in turn."""

    name: str
    chunked: EngineRequest | None = None  # sglang: the prompt in chunks, the last of which the next pass commits

    def __init__(self, allocator: KVAllocator, config: SchedulerConfig) -> None:
        self._moves: list[Moves] = []
        self.cache: HostCache | None = None
        if config.host_cache_pages:
            allocator = self.cache = HostCache(
                allocator, config.host_cache_pages, self._move, first_page=config.host_pages + 1
            )
        self.allocator = allocator
        self.config = config
        self.waiting: deque[EngineRequest] = deque()
        self.host = HostTier(allocator, config.host_pages) if config.host_pages else None
        # Requests that ended outside `update` (rejected, or out of pool), until `drain_ended`.
        self._ended: list[EngineRequest] = []
        # Forks: requests made since the last `take_children`, how many shared pages, pages copied so far.
        self.children: list[EngineRequest] = []
        self.forks = self.copied_pages = 0
        self.drafter: Drafter | None = None
        self.num_drafts = 0

    def speculate(self, drafter: Drafter, num_drafts: int) -> None:
        """Let each decoding request compute up to `num_drafts` guessed tokens a step; those that the model confirms
        stay. Raises ValueError with result_lag 1, where a step starts before it is known which guesses held."""
        if num_drafts < 1:
            raise ValueError(f"num_drafts: expected at least 1, found {num_drafts}")
        if self.config.result_lag:
            raise ValueError("speculate: expected result_lag 0, found 1")
        self.drafter, self.num_drafts = drafter, num_drafts

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Plan one step and reserve its slots. An empty batch: nothing can run now."""

    @abstractmethod
    def update(self, plan: StepPlan, samples: Seq[Sample | None]) -> list[EngineRequest]:
        """Results of a plan, one per batch entry (None: the entry samples nothing). Returns what finished."""

    @property
    @abstractmethod
    def running_requests(self) -> list[EngineRequest]:
        """Admitted and unfinished requests, in the policy's own order."""

    @abstractmethod
    def has_row(self) -> bool:
        """One more request may run."""

    @abstractmethod
    def join(self, request: EngineRequest) -> None:
        """A request that was forked runs from the next step on."""

    @abstractmethod
    def end_of(self, request: EngineRequest, sample: Sample) -> End | None:
        """Why the request ends with this sample, which is its last token; None: it goes on."""

    def end_beam(self, request: EngineRequest, end: End) -> None:
        """End a beam, which may wait; what of it is computed stays cached unless it was pruned."""
        raise ValueError(f"policy {self.name} has no beams")

    def throw_back_beams(self, beams: Beams) -> None:
        """All beams of a request wait: one of them found no room, and none goes on alone."""
        raise ValueError(f"policy {self.name} has no beams")

    def take_children(self) -> list[EngineRequest]:
        """Requests that were forked since the last call."""
        children, self.children = self.children, []
        return children

    def drafts_of(self, request: EngineRequest, limit: int) -> tuple[int, ...]:
        """Guesses of a decoding request's next tokens: never more than it may generate behind them."""
        if self.drafter is None or request.beams is not None or not request.num_output:
            return ()  # the first token is the prompt's, with which other replies fork
        if request.num_computed + 1 != request.num_tokens:
            return ()
        room = self.config.max_model_len - request.num_tokens - 1
        count = min(self.num_drafts, limit, room, request.max_tokens - request.num_output - 1)
        return tuple(self.drafter(request, count))[: max(count, 0)] if count > 0 else ()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running_requests)

    def add(self, request: EngineRequest) -> None:
        """A request arrives: checked against the limits, then it waits."""
        message = self.admissible(request)
        if message:
            self.reject(request, message)
        else:
            self.waiting.append(request)

    @abstractmethod
    def admissible(self, request: EngineRequest) -> str:
        """Empty if the request can be served when it is alone, else why not, with the numbers."""

    def reject(self, request: EngineRequest, message: str) -> None:
        """End a request that holds nothing and can never be served: cut short if it has output, else rejected."""
        if request.num_output:
            request.state, request.end = State.FINISHED, End.POOL
        else:
            request.state, request.end = State.REJECTED, End.REJECTED
        request.message = message
        self.leave_host(request)
        self._ended.append(request)

    def drain_ended(self) -> list[EngineRequest]:
        """Requests that ended while a step was scheduled or at arrival, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def pool_tokens(self) -> int:
        return self.allocator.num_pages * self.allocator.page_size

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.allocator.page_size)

    def available_pages(self) -> int:
        """Pages that can be taken now: free, or evictable."""
        free, evictable = self.allocator.room()
        return free + evictable

    def try_reserve(self, wants: Iterable[tuple[EngineRequest, int]]) -> bool:
        """Slots for n more tokens of each request, all or nothing."""
        pairs = []
        for request, n in wants:
            request.seq.num_computed_tokens = request.num_computed
            if request.forked and not self._unshare(request, n):
                return False
            pairs.append((request.seq, n))
        reservations = self.allocator.reserve(pairs)
        for reservation in reservations or ():
            if reservation.moves:
                self.note_copies(reservation.moves)
        return reservations is not None

    def _unshare(self, request: EngineRequest, n: int) -> bool:
        """Pages of its own for what it writes next. A copy stays made when the reservation is refused after it."""
        if not can_fork(self.allocator):
            return True
        start = request.num_computed
        copies = self.allocator.prepare_write(request.seq, start, start + n)  # type: ignore[attr-defined]
        self.note_copies(copies or ())
        return copies is not None

    def note_copies(self, copies: Iterable[PageMove]) -> None:
        """Pages to copy on the device before the next step computes, behind the moves noted so far."""
        pages = tuple(copies)
        if pages:
            self.copied_pages += len(pages)
            self._moves.append(("copy", pages))

    def take_moves(self) -> list[Moves]:
        """Copies since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves

    def _move(self, direction: Literal["out", "in"], pages: tuple[PageMove, ...]) -> None:
        self._moves.append((direction, pages))

    def admitted(self, request: EngineRequest, hit_tokens: int) -> None:
        """One admission that went through; `hit_tokens` of both tiers together."""
        from_host = 0 if self.cache is None else self.cache.hit_tokens(request.seq)
        request.admitted(hit_tokens - from_host, from_host)

    def on_host(self, request: EngineRequest) -> bool:
        """Its KV waits in the host tier (and was not dropped there for room)."""
        return self.host is not None and request.seq in self.host

    def leave_host(self, request: EngineRequest) -> None:
        """Give up what the host tier holds of a request that ends while it waits."""
        if self.host is not None and request.seq in self.host:
            self.host.drop(request.seq)

    def swap_in(self, request: EngineRequest, gate: Gate) -> bool:
        """Admit a request from the host tier, with what it had computed. False: no room, it stays there."""
        moves = None if self.host is None else self.host.swap_in(request.seq, gate)
        if moves is None:
            return False
        self.note_copies(self.host.copies if self.host is not None else ())
        self._moves.append(("in", tuple(moves)))
        from_host = 0 if self.cache is None else self.cache.hit_tokens(request.seq)
        request.returned(len(moves) * self.allocator.page_size, from_host)
        return True

    def _swap_out(self, request: EngineRequest) -> bool:
        if self.host is None:
            return False
        # One token is left to compute, so that the next one can be sampled when it comes back.
        request.kept_tokens = min(request.num_computed, request.num_tokens - 1)
        request.seq.num_computed_tokens = request.kept_tokens
        moved = self.host.swap_out(request.seq)
        if moved is None:
            return False
        self._moves.append(("out", moved.moves))
        return True

    def _throw_back(self, request: EngineRequest, reason: Release = Release.PREEMPT) -> None:
        if reason is not Release.PREEMPT or not self._swap_out(request):
            self.allocator.release([request.seq], reason)
        if request.beams is not None:
            request.beams.results.pop(request.id, None)
        request.throw_back()

    def _finish(self, request: EngineRequest, end: End) -> None:
        """End a request that holds pages; what of it has KV stays cached."""
        request.seq.num_computed_tokens = min(request.num_computed, request.num_tokens)
        self.allocator.release([request.seq], Release.FINISH)
        request.state, request.end = State.FINISHED, end


def launched(request: EngineRequest, num_new: int, samples: bool, drafts: tuple[int, ...] = ()) -> Scheduled:
    """The plan entry of a request whose slots are taken; moves the request on."""
    entry = Scheduled(request, num_new, request.num_computed, samples, request.epoch, drafts)
    request.num_computed += num_new
    request.num_in_flight += samples
    return entry
