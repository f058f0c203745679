"""A run of the engine on a simulated clock: arrivals come in, steps take the time of a model, everything is recorded.

The GPU runs the launched steps one after the other. With result_lag 0 a step ends when its own results are in: host
and GPU time add up. With 1 the host schedules the next step while the GPU runs this one, and then waits for its
results: the longer of the two counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.engine.arrivals import Arrival, Arrivals
from kvarena.experiments.engine.engine import Engine, Executor, StepRecord, make_scheduler
from kvarena.experiments.engine.executors import HiddenOutputs, ScriptedExecutor, UnnamedOutputs
from kvarena.experiments.engine.latency import Latencies, Limits, TokenTimes
from kvarena.experiments.engine.metered import MeteredAllocator
from kvarena.experiments.engine.request import End, EngineRequest, make_request
from kvarena.experiments.engine.scheduler import Scheduled, SchedulerConfig, StepPlan
from kvarena.experiments.engine.step_time import StepTimeModel

MakeExecutor = Callable[[KVAllocator, HiddenOutputs, SchedulerConfig], Executor]
IDLE_STEP_S = 1e-5  # a step that computes nothing takes this long at least, so that time goes on


@dataclass(frozen=True, slots=True)
class RequestRow:
    """What became of one request. Times are seconds on the engine's clock; None where there is no such moment.

    hit_tokens          of its first admission; `readmitted_hit_tokens` of those after preemptions
    host_hit_tokens     of its first admission, found in the host's prefix cache beyond those on the device
    recomputed_tokens   computed again after preemptions; `swapped_tokens` came back from the host instead
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

    prefill_s  of the GPU's time, what would not be there without the prompts
    step_ns    measured time in the allocator, each step
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


@dataclass(frozen=True)
class RunOptions:
    """How a run is fed and recorded.

    declare      what the scheduler is told of a request's output: (true tokens, index) -> max_tokens
    steps_every  a StepRow every so many steps
    check_every  verify the allocator every so many steps; 0: never
    """

    declare: Callable[[int, int], int]
    limits: Limits = field(default_factory=Limits)
    steps_every: int = 1
    check_every: int = 0


@dataclass(slots=True)
class _Live:
    """A request in the engine, and what its row needs."""

    arrival: Arrival
    request: EngineRequest
    times: TokenTimes
    declared: int
    admitted_s: float | None = None


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
        self.outputs = HiddenOutputs()
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
        self.record = Record(latencies=Latencies(options.limits))
        self._live: dict[str, _Live] = {}
        self._unnamed = UnnamedOutputs()
        self._evicted_before = 0
        self._preempted = 0
        self.after_step: Callable[[StepRecord, float], None] | None = None  # for whoever wants to look

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
            priority=int(traced.extra.get("priority", 0)),
            namespace=traced.namespace,
        )
        # What contiguous runs are sized by; no other design and no scheduler reads these.
        request.seq.declared_max_tokens = declared
        request.seq.oracle_tokens = traced.num_prompt_tokens + true_tokens
        named = traced.grain == 1 and traced.output_ids is not None and len(traced.output_ids) == true_tokens
        output = traced.output_ids if named else self._unnamed.take(true_tokens)
        self.outputs.add(request.id, output)  # type: ignore[arg-type]  # a NumPy array serves as a sequence
        self._live[request.id] = _Live(arrival, request, TokenTimes(arrival.arrival_s), declared)
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
        for request in (*record.finished, *record.ended):
            yield self._end(self._live.pop(request.id), now)

    def _note_token(self, entry: Scheduled, now: float) -> None:
        live = self._live.get(entry.request.id)
        # A token that was dropped (it was sampled after the end, or before a retraction) did not reach anybody.
        if live is None or not entry.samples or live.request.num_output <= live.times.num_tokens:
            return
        if live.request.end is End.REJECTED:
            return
        gap = live.times.token(now)
        if gap is not None:
            self.record.latencies.itl.append(gap)

    def _end(self, live: _Live, now: float) -> RequestRow:
        request, traced = live.request, live.arrival.request
        rejected = request.end is End.REJECTED
        generated = 0 if rejected else request.num_output
        cut = max(traced.num_output_tokens, 1) - generated
        if not rejected:
            self.record.latencies.served(live.times, whole=cut <= 0)
        self.outputs.forget(request.id)
        self.arrivals.ended(request.id, now)
        row = RequestRow(
            index=live.arrival.index,
            request_id=request.id,
            session_id=traced.session_id,
            arrival_s=live.arrival.arrival_s,
            num_prompt_tokens=traced.num_prompt_tokens,
            num_output_tokens=traced.num_output_tokens,
            declared_max_tokens=live.declared,
            admitted=bool(request.hits) and not rejected,
            hit_tokens=request.hits[0] if request.hits else 0,
            readmissions=max(len(request.hits) - 1, 0),
            readmitted_hit_tokens=sum(request.hits[1:]),
            host_hit_tokens=request.host_hits[0] if request.host_hits else 0,
            output_tokens=generated,
            cut_output_tokens=max(cut, 0),
            preemptions=request.num_preemptions,
            recomputed_tokens=request.recomputed_tokens,
            swapped_tokens=request.swapped_tokens,
            admitted_s=live.admitted_s,
            first_token_s=live.times.first_s,
            last_token_s=live.times.last_s,
            end_s=now,
            end="" if request.end is None else request.end.value,
            message=request.message,
        )
        self.record.requests.append(row)
        self.record.output_tokens += generated
        return row

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

    def _step_row(self, plan: StepPlan, tokens: int, host: float, gpu: float) -> StepRow:
        capacity, size = self.allocator.capacity(), self.allocator.page_size
        lengths = [request.num_computed for request in self.scheduler.running_requests]
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
            free=capacity.free,
            evictable=capacity.evictable,
            in_use=capacity.in_use,
            shared=capacity.shared,
            duplicates=capacity.duplicates,
            wasted_slots=capacity.wasted_slots,
            tail_slots=sum(-n % size for n in lengths),
            live_tokens=sum(lengths),
            evicted_pages=self.allocator.evicted_pages - self._evicted_before,
        )
