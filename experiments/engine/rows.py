"""Rows and counts of an engine run, whichever clock it runs on."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvarena.experiments.engine.latency import Latencies

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Request


@dataclass(frozen=True, slots=True)
class RequestRow:
    """What became of one request. Times are seconds on the engine's clock; None where there is no such moment.

    hit_tokens          of its first admission; `readmitted_hit_tokens` of those after preemptions
    host_hit_tokens     of its first admission, found in the host's prefix cache beyond those on the device
    recomputed_tokens   computed again after preemptions; `swapped_tokens` came back from the host instead
    num_output_tokens   of the trace; of all replies where a prompt has several
    output_tokens       of all replies; `reply_tokens` of the longest one
    declared_max_tokens what the scheduler was told, before any cut
    admitted_s          when the step of its first admission began
    last_token_s        before `end_s` where the engine ended it later than its last token came (out of pool)
    end                 stop, length, pool, rejected
    cut_output_tokens   tokens of the true output that a limit cut off (all of them when rejected)
    message             the numbers, when it was rejected or out of pool
    """

    index: int
    request_id: str
    session_id: str | None
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    declared_max_tokens: int
    admitted: bool
    hit_tokens: int
    readmissions: int
    readmitted_hit_tokens: int
    host_hit_tokens: int
    output_tokens: int
    reply_tokens: int
    cut_output_tokens: int
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    admitted_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    end_s: float
    end: str
    message: str


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step and the pool after it. `tail_slots` and `live_tokens` are of the running requests."""

    step: int
    time_s: float
    kind: str
    batch: int
    new_tokens: int
    admitted: int
    preempted: int
    running: int
    waiting: int
    gpu_ms: float
    host_ms: float
    free: int
    evictable: int
    in_use: int
    shared: int
    duplicates: int
    wasted_slots: int
    tail_slots: int
    live_tokens: int
    evicted_pages: int
    external_fragmentation: float | None = None


@dataclass
class Record:
    """Everything a run yields.

    duration_s when nothing was left to do, on the engine's clock: with a result lag of 1 the step that was in flight
               when the last token came is waited for
    prefill_s  of the GPU's time, what would not be there without the prompts
    step_ns    measured time in the allocator, each step; adapter_ns in the page table, each step that ran something,
               where one was built; kernel_ns of the kernels of such a step, where they ran
    """

    requests: list[RequestRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    latencies: Latencies = field(default_factory=Latencies)
    num_steps: int = 0
    busy_steps: int = 0
    batch_entries: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    gpu_s: float = 0.0
    host_s: float = 0.0
    prefill_s: float = 0.0
    step_ns: array[int] = field(default_factory=lambda: array("q"))
    adapter_ns: array[int] = field(default_factory=lambda: array("q"))
    kernel_ns: array[int] = field(default_factory=lambda: array("q"))


def request_row(
    traced: Request, end: str, *, output_tokens: int, replies: int = 1, admitted_s: float | None, **rest: Any
) -> RequestRow:
    """The row of a traced request that ended so, with so many tokens of output in all its replies.

    `rest`: the other fields, but for those that follow: who was rejected was not admitted and got no output.
    """
    rejected = end == "rejected"
    generated = 0 if rejected else output_tokens
    wanted = replies * max(traced.num_output_tokens, 1)
    return RequestRow(
        request_id=traced.request_id,
        session_id=traced.session_id,
        num_prompt_tokens=traced.num_prompt_tokens,
        num_output_tokens=traced.num_output_tokens if replies == 1 else wanted,
        output_tokens=generated,
        cut_output_tokens=max(wanted - generated, 0),
        admitted_s=admitted_s,
        end=end,
        **rest,
    )
