"""A run of the engine on a simulated clock: arrivals come in, steps take the time of a model, everything is recorded.

The GPU runs the launched steps one after the other. With result_lag 0 a step ends when its own results are in: host
and GPU time add up. With 1 the host schedules the next step while the GPU runs this one, and then waits for its
results: the longer of the two counts.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.engine.arrivals import Arrival, Arrivals, priority_of
from kvarena.experiments.engine.beams import Candidate
from kvarena.experiments.engine.engine import Engine, Executor, StepRecord, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor, UnnamedOutputs
from kvarena.experiments.engine.latency import Latencies, Limits, TokenTimes
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.request import End, EngineRequest, make_request
from kvarena.experiments.engine.rows import Record as Record
from kvarena.experiments.engine.rows import RequestRow as RequestRow
from kvarena.experiments.engine.rows import StepRow as StepRow
from kvarena.experiments.engine.rows import request_row
from kvarena.experiments.engine.scheduler import Scheduled, SchedulerConfig, StepPlan
from kvarena.experiments.engine.step_time import StepTimeModel
from kvarena.experiments.metrics import pool_fields

MakeExecutor = Callable[[KVAllocator, HiddenOutputs, SchedulerConfig], Executor]
BEAM_GAP_NATS = 2.0  # between the log-probabilities of neighbouring ranks, on average
IDLE_STEP_S = 1e-5  # a step that computes nothing takes this long at least, so that time goes on


@dataclass(frozen=True)
class RunOptions:
    """How a run is fed and recorded.

    declare      what the scheduler is told of a request's output: (true tokens, index) -> max_tokens
    steps_every  a StepRow every so many steps
    check_every  verify the allocator every so many steps; 0: never
    samples      replies to each prompt, each as long as the trace's
    beam_width   beams of each request, which go on as long as the trace's reply; 0: none
    """

    declare: Callable[[int, int], int]
    limits: Limits = field(default_factory=Limits)
    steps_every: int = 1
    check_every: int = 0
    samples: int = 1
    beam_width: int = 0


@dataclass(slots=True)
class _Live:
    """A request in the engine, and what its row needs.

    replies  itself and its forks, by id, with the times of their tokens; open: those that have not ended
    """

    arrival: Arrival
    request: EngineRequest
    declared: int
    replies: dict[str, tuple[EngineRequest, TokenTimes]]
    open: set[str]
    admitted_s: float | None = None

    def merged(self) -> TokenTimes:
        """First token of any reply, last token of any, tokens of the longest."""
        times = [each for _, each in self.replies.values()]
        first = [each.first_s for each in times if each.first_s is not None]
        last = [each.last_s for each in times if each.last_s is not None]
        tokens = max(each.num_tokens for each in times)
        return TokenTimes(self.arrival.arrival_s, min(first, default=None), max(last, default=None), tokens)


class Clock:
    """Simulated time of one host and one GPU."""

    def __init__(self, model: StepTimeModel, lag: int) -> None:
        self.model = model
        self.lag = lag
        self.now_s = 0.0
        self.host_s = 0.0
        self.gpu_s = 0.0
        self._gpu_free_s = 0.0
        self._pending_s = 0.0  # when the step in flight is done

    def step(self, plan: StepPlan) -> tuple[float, float]:
        """Advance over one step of the engine; returns its (host, GPU) seconds."""
        host, gpu = self.model.host_s(plan), self.model.gpu_s(plan)
        scheduled = self.now_s + host
        done_before = self._pending_s
        self._gpu_free_s = max(self._gpu_free_s, scheduled) + gpu
        if plan.batch:
            self._pending_s = self._gpu_free_s
        end = max(scheduled, done_before) if self.lag else max(scheduled, self._pending_s)
        self.now_s = max(end, self.now_s + IDLE_STEP_S)
        self.host_s += host
        self.gpu_s += gpu
        return host, gpu

    def wait_until(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)


class Simulation:
    """One allocator, one policy, one stream of arrivals."""

    def __init__(
        self,
        allocator: MeteredAllocator,
        policy: str,
        config: SchedulerConfig,
        model: StepTimeModel,
        arrivals: Arrivals,
        options: RunOptions,
        make_executor: MakeExecutor | None = None,
    ) -> None:
        """`make_executor`: real pools in place of scripted outputs; the scheduler uses the executor's `allocator`."""
        self.allocator = allocator
        self.outputs = HiddenOutputs(self._candidates if options.beam_width else None)
        executor: Executor = ScriptedExecutor(self.outputs)
        watched: KVAllocator = allocator
        if make_executor is not None:
            executor = make_executor(allocator, self.outputs, config)
            watched = getattr(executor, "allocator", allocator)
        self.executor = executor
        self.scheduler = make_scheduler(policy, watched, config)
        self.engine = Engine(self.scheduler, executor)
        self.clock = Clock(model, config.result_lag)
        self.arrivals = arrivals
        self.options = options
        self.record = Record(
            latencies=Latencies(options.limits),
            adapter_ns=getattr(executor, "step_ns", array("q")),
            kernel_ns=getattr(executor, "kernel_ns", array("q")),
        )
        self._live: dict[str, _Live] = {}
        self._root: dict[str, str] = {}  # fork -> the request that it began as
        self._unnamed = UnnamedOutputs()
        self._evicted_before = 0
        self._preempted = 0
        self.after_step: Callable[[StepRecord, float], None] | None = None  # for whoever wants to look

    def _candidates(self, root: str, generated: tuple[int, ...], width: int) -> list[Candidate]:
        """A random language model: what the beams of a request could go on with, all ending where the trace's reply
        does."""
        rng = random.Random(f"{root}/{hash(generated)}")  # of whole numbers, so that every process draws the same
        last = len(generated) + 1 >= max(self._live[root].arrival.request.num_output_tokens, 1)
        gap, token = rng.expovariate(1 / BEAM_GAP_NATS), UnnamedOutputs.FIRST + rng.randrange(2**28)
        return [Candidate(token + rank, -gap * rank, last) for rank in range(width)]

    def run(self, tick: Callable[[], None] | None = None) -> Record:
        """Until every request has ended; `tick` is called once for each."""
        for _ in self.ends():
            if tick is not None:
                tick()
        return self.record

    def ends(self) -> Iterator[RequestRow]:
        """Run, yielding each request's row when it ends."""
        while self._next_step():
            before = self.allocator.total_ns
            record = self.engine.step()
            self.record.step_ns.append(self.allocator.total_ns - before)
            self._note_admitted(record.plan)
            host, gpu = self.clock.step(record.plan)
            yield from self._results(record)
            self._note_step(record, host, gpu)
            if self.after_step is not None:
                self.after_step(record, self.clock.now_s)
        self.record.requests.sort(key=lambda row: row.index)
        self.record.duration_s = self.clock.now_s
        self.record.gpu_s, self.record.host_s = self.clock.gpu_s, self.clock.host_s

    def _next_step(self) -> bool:
        """Let in who has arrived; skip to the next arrival when nothing is left to do. False: all have ended."""
        self._admit_due()
        if self.engine.has_work or self._live:
            return True
        upcoming = self.arrivals.next_s
        if upcoming is None:
            return False
        self.engine.step()  # the idle pass that upstream's loop makes when it has drained
        self.clock.wait_until(upcoming)
        self._admit_due()
        return True

    def _admit_due(self) -> None:
        for arrival in self.arrivals.due(self.clock.now_s):
            self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        traced = arrival.request
        if traced.request_id in self._live:
            raise ValueError(f"request {traced.request_id}: already live; ids must be unique while requests overlap")
        true_tokens = max(traced.num_output_tokens, 1)
        declared = self.options.declare(true_tokens, arrival.index)
        request = make_request(
            traced.request_id,
            traced.prompt_ids(),
            declared,
            arrival_s=arrival.arrival_s,
            priority=priority_of(traced),
            namespace=traced.namespace,
            samples=self.options.samples,
            beam_width=self.options.beam_width,
        )
        # What contiguous runs are sized by; no other design and no scheduler reads these.
        request.seq.declared_max_tokens = declared
        request.seq.oracle_tokens = traced.num_prompt_tokens + true_tokens
        named = traced.grain == 1 and traced.output_ids is not None and len(traced.output_ids) == true_tokens
        output = traced.output_ids if named else self._unnamed.take(true_tokens)
        self.outputs.add(request.id, output)  # type: ignore[arg-type]  # a NumPy array serves as a sequence
        for number in range(1, self.options.samples):
            self.outputs.add(f"{request.id}/{number}", self._unnamed.take(true_tokens))
        replies = {request.id: (request, TokenTimes(arrival.arrival_s))}
        self._live[request.id] = _Live(arrival, request, declared, replies, {request.id})
        self.engine.add(request)

    def _note_admitted(self, plan: StepPlan) -> None:
        for request in plan.admitted:
            live = self._live.get(request.id)
            if live is not None and live.admitted_s is None:
                live.admitted_s = self.clock.now_s

    def _results(self, record: StepRecord) -> Iterator[RequestRow]:
        now = self.clock.now_s
        if record.due is not None:
            for entry in record.due.batch:
                self._note_token(entry, now)
        for child in record.children:
            self._join(child, now)
        for request in (*record.finished, *record.ended):
            live = self._live[self._root.get(request.id, request.id)]
            live.open.discard(request.id)
            if request.beams is not None and request.end is End.STOP:
                self._token(live.replies[request.id][1], now)  # its last one ends the search and is not appended
            if not live.open:
                yield self._end(live, now)

    def _join(self, child: EngineRequest, now: float) -> None:
        """A fork, whose first token of its own came with its parent's."""
        root = self._root[child.id] = self._root.get(child.parent or "", child.parent or "")
        live = self._live[root]
        before = live.replies[child.parent or root][1]
        times = TokenTimes(live.arrival.arrival_s, before.first_s, now, child.num_output)
        live.replies[child.id] = child, times
        live.open.add(child.id)

    def _note_token(self, entry: Scheduled, now: float) -> None:
        live = self._live.get(self._root.get(entry.request.id, entry.request.id))
        if live is None or not entry.samples or entry.request.end is End.REJECTED:
            return
        request, times = live.replies[entry.request.id]
        # A token that was dropped (it was sampled after the end, or before a retraction) did not reach anybody.
        if request.num_output <= times.num_tokens:
            return
        self._token(times, now)

    def _token(self, times: TokenTimes, now: float) -> None:
        gap = times.token(now)
        if gap is not None:
            self.record.latencies.itl.append(gap)

    def _end(self, live: _Live, now: float) -> RequestRow:
        request, traced = live.request, live.arrival.request
        rejected = request.end is End.REJECTED
        replies = [reply for reply, _ in live.replies.values()]
        kept = [reply for reply in replies if reply.end is not End.PRUNED] if request.beams is not None else replies
        times, wanted = live.merged(), self.options.samples if request.beams is None else len(kept)
        row = request_row(
            traced,
            "" if request.end is None else _end_of(kept).value,
            index=live.arrival.index,
            arrival_s=live.arrival.arrival_s,
            declared_max_tokens=live.declared,
            admitted=bool(request.hits) and not rejected,
            hit_tokens=request.hits[0] if request.hits else 0,
            readmissions=sum(len(reply.hits) for reply in replies) - bool(request.hits),
            readmitted_hit_tokens=sum(sum(reply.hits) for reply in replies) - sum(request.hits[:1]),
            host_hit_tokens=request.host_hits[0] if request.host_hits else 0,
            output_tokens=sum(map(_tokens, kept)),
            replies=wanted,
            reply_tokens=0 if rejected else max(map(_tokens, kept)),
            preemptions=sum(reply.num_preemptions for reply in replies),
            recomputed_tokens=sum(reply.recomputed_tokens for reply in replies),
            swapped_tokens=sum(reply.swapped_tokens for reply in replies),
            admitted_s=live.admitted_s,
            first_token_s=times.first_s,
            last_token_s=times.last_s,
            end_s=now,
            message=next((reply.message for reply in replies if reply.message), ""),
        )
        if not rejected:
            self.record.latencies.served(times, whole=row.cut_output_tokens <= 0)
        self._forget(live)
        self.arrivals.ended(request.id, now)
        self.record.requests.append(row)
        self.record.output_tokens += row.output_tokens
        return row

    def _forget(self, live: _Live) -> None:
        del self._live[live.request.id]
        self.outputs.forget(live.request.id)
        for number in range(1, self.options.samples):
            self.outputs.forget(f"{live.request.id}/{number}")
        for name in live.replies:
            self._root.pop(name, None)

    def _note_step(self, record: StepRecord, host: float, gpu: float) -> None:
        plan, out = record.plan, self.record
        tokens = plan.num_tokens
        out.num_steps += 1
        out.busy_steps += bool(plan.batch)
        out.batch_entries += len(plan.batch)
        out.new_tokens += tokens
        out.prefill_s += self.clock.model.prefill_s(plan)
        out.preemptions += len(plan.preempted)
        self._preempted += len(plan.preempted)
        for direction, moves in plan.moves:
            if direction == "out":
                out.swapped_out_pages += len(moves)
            elif direction == "in":
                out.swapped_in_pages += len(moves)
        if self.options.check_every and out.num_steps % self.options.check_every == 0:
            self.check()
        if (out.num_steps - 1) % self.options.steps_every == 0:
            out.steps.append(self._step_row(plan, tokens, host, gpu))
            self._evicted_before, self._preempted = self.allocator.evicted_pages, 0

    def check(self) -> None:
        """Verify the allocator and the host tier."""
        self.allocator.check()
        if self.scheduler.host is not None:
            self.scheduler.host.check()
        if self.scheduler.cache is not None:
            self.scheduler.cache.check()

    def _uncommitted(self, plan: StepPlan) -> list[Scheduled]:
        """What was launched and not committed: the step in flight (lag 1), or a chunk that the next pass stashes."""
        if self.engine.lag:
            return [] if self.engine.in_flight is None else [e for e in self.engine.in_flight.batch if not e.stale]
        return [each for each in plan.batch if each.request is self.scheduler.chunked]

    def _step_row(self, plan: StepPlan, tokens: int, host: float, gpu: float) -> StepRow:
        lengths = [request.num_computed for request in self.scheduler.running_requests]
        in_flight = sum(each.num_new for each in self._uncommitted(plan))
        return StepRow(
            step=self.record.num_steps - 1,
            time_s=self.clock.now_s,
            kind=plan.kind if plan.batch else "idle",
            batch=len(plan.batch),
            new_tokens=tokens,
            admitted=len(plan.admitted),
            preempted=self._preempted,
            running=len(lengths),
            waiting=len(self.scheduler.waiting),
            gpu_ms=1e3 * gpu,
            host_ms=1e3 * host,
            **pool_fields(self.allocator, lengths, in_flight),
            evicted_pages=self.allocator.evicted_pages - self._evicted_before,
        )


def _end_of(replies: list[EngineRequest]) -> End:
    """Of several replies: the end that cut one of them short, else that of the first."""
    ends = [reply.end for reply in replies if reply.end is not None]
    return next((end for end in (End.POOL, End.LENGTH) if end in ends and len(ends) > 1), ends[0])


def _tokens(reply: EngineRequest) -> int:
    """Generated tokens; a beam's last one ends the search and is in its hypothesis alone."""
    return reply.num_output + (reply.beams is not None and reply.end is End.STOP)
