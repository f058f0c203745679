"""The `vllm` policy: scheduling rules of vLLM 0.32.0 (v1), over any allocator.

One token budget a step. Running requests go first, in order of admission; a request out of room throws back
the last of the running list, which goes to the front of the waiting queue. Then, if nothing was thrown back,
waiting requests are admitted in order, until one does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvarena.allocators.interface import Gate, KVAllocator, Pin, Release, Sequence
from kvarena.experiments.engine.beams import Beams
from kvarena.experiments.engine.branching import beams_of, branch_beams, branch_samples, note_candidates
from kvarena.experiments.engine.order import WaitingOrder
from kvarena.experiments.engine.request import End, EngineRequest, State
from kvarena.experiments.engine.scheduler import Sample, Scheduled, Scheduler, SchedulerConfig, StepPlan, launched


class VllmScheduler(Scheduler):
    """vLLM 0.32.0: first come first served, prefix caching, preemption by recompute."""

    name = "vllm"

    def __init__(self, allocator: KVAllocator, config: SchedulerConfig) -> None:
        super().__init__(allocator, config)
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_num_seqs "
                f"{config.max_num_seqs}: a step could not decode everybody"
            )
        self.running: list[EngineRequest] = []
        self.order = WaitingOrder(allocator, config)
        self._budget = 0
        self._cap = 0
        # vLLM 0.32.0 counts the null block in: watermark x (usable + 1).
        self._watermark = int(config.watermark * (allocator.num_pages + 1))
        self._in_flight = False
        self._beams_came = False
        self._sole: Beams | None = None
        self._cleared: list[EngineRequest] = []  # thrown back to make room for beams that could not go on

    @property
    def running_requests(self) -> list[EngineRequest]:
        return self.running

    @property
    def _most_running(self) -> int:
        return self.config.max_num_active_seqs or self.config.max_num_seqs

    def has_row(self) -> bool:
        return len(self.running) < self.config.max_num_seqs

    def join(self, request: EngineRequest) -> None:
        self.running.append(request)

    def end_beam(self, request: EngineRequest, end: End) -> None:
        if request.state is not State.RUNNING:
            self.waiting.remove(request)
            self.leave_host(request)
        elif end is End.PRUNED:
            self.allocator.release([request.seq], Release.ABORT)
        else:
            self._finish(request, end)
        request.state, request.end = State.FINISHED, end

    def throw_back_beams(self, beams: Beams) -> None:
        for member in beams.members:
            if member.state is State.RUNNING:
                self.running.remove(member)
                self._throw_back(member)
                self.waiting.appendleft(member)

    def admissible(self, request: EngineRequest) -> str:
        self._beams_came |= request.beams is not None
        width, most = 0 if request.beams is None else request.beams.width, self._most_running
        if width > most:
            name = "max_num_active_seqs" if self.config.max_num_active_seqs else "max_num_seqs"
            return f"request {request.id}: {width} beams, {name} {most}"
        if self.config.limits == "upstream" and self.config.whole_prompt_gate:
            return ""  # without the gate, what can never fit would take pages again and again
        return self._too_long(request) or self._never_fits(request)

    def _too_long(self, request: EngineRequest) -> str:
        tokens, longest, budget = request.num_tokens, self.config.max_model_len, self.config.max_num_batched_tokens
        if tokens >= longest:
            return f"request {request.id}: {tokens} tokens leave no room to generate in max_model_len {longest}"
        if not self.config.chunked_prefill and tokens > budget:
            return f"request {request.id}: {tokens} tokens, max_num_batched_tokens {budget} without chunked prefill"
        return ""

    def _never_fits(self, request: EngineRequest) -> str:
        need, pages = self.pages_of(request.num_tokens), self.allocator.num_pages
        if need <= pages:
            return ""
        size = self.allocator.page_size
        return (
            f"request {request.id} needs {need} pages ({request.num_tokens} tokens, page_size {size}): pool of {pages}"
        )

    def schedule(self) -> StepPlan:
        plan = self._pass()
        while not plan.batch and not plan.preempted and not self._in_flight and self._unblock():
            plan = self._pass()
        self._in_flight = bool(plan.batch) and self.config.result_lag == 1
        plan.preempted[:0], self._cleared = self._cleared, []
        return plan

    def _pass(self) -> StepPlan:
        plan = StepPlan()
        self._budget = self.config.max_num_batched_tokens
        self._cap = self._chunk_cap()
        self._run(plan)
        if not plan.preempted:
            self._admit(plan)
        return plan

    def _chunk_cap(self) -> int:
        """Tokens one request may take in this step; 0 for no cap. A lone request has none."""
        cap, present = self.config.chunk_size or 0, len(self.running) + len(self.waiting)
        if not cap or present <= 1:
            return 0
        return max(cap, self.config.max_num_batched_tokens // present) if self.config.adaptive_cap else cap

    def _run(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running) and self._budget > 0:
            request = self.running[index]
            n = self._demand(request)
            drafts = self.drafts_of(request, self._budget - n) if self.drafter is not None else ()
            if n > 0 and not self._take(request, n, plan, drafts):
                return
            index = self._after(request, index)

    def _after(self, request: EngineRequest, index: int) -> int:
        """Index of the request behind `request`; order `priority` may have thrown back ones in front of it."""
        index = min(index, len(self.running) - 1)
        while self.running[index] is not request:
            index -= 1
        return index + 1

    def _demand(self, request: EngineRequest) -> int:
        """Tokens that a running request wants now; 0 when it has to sit out."""
        holes = request.num_in_flight
        if request.beams is not None and (holes or request.id in request.beams.results):
            return 0  # beams go on together
        if holes and request.num_computed + 2 - holes >= request.seq.num_prompt_tokens + request.max_tokens:
            return 0  # its last token is in flight
        n = self._cut(request.num_tokens + holes - request.num_computed)
        return min(n, self.config.max_model_len - request.num_computed - 1)

    def _cut(self, n: int) -> int:
        return min(n, self._cap or n, self._budget)

    def _take(self, request: EngineRequest, n: int, plan: StepPlan, drafts: tuple[int, ...] = ()) -> bool:
        """Slots for n tokens and drafts, throwing back others until they are there. False: it was itself."""
        while not self.try_reserve([(request, n + len(drafts))]):
            victim = self._victim()
            if victim is request and drafts:
                drafts = ()  # guesses never cost their own request its place
                continue
            self._preempt(victim, plan)
            if victim.beams is not None:
                self._preempt_beams(victim.beams, plan)
            if request.state is not State.RUNNING:
                return False
        self._launch(request, n, plan, drafts)
        return True

    def _launch(self, request: EngineRequest, n: int, plan: StepPlan, drafts: tuple[int, ...] = ()) -> None:
        samples = request.num_computed + n >= request.num_tokens + request.num_in_flight
        plan.batch.append(launched(request, n + len(drafts), samples, drafts))
        self._budget -= n + len(drafts)

    def _victim(self) -> EngineRequest:
        if self.config.order != "priority":
            return self.running[-1]
        return max(reversed(self.running), key=lambda request: (request.priority, request.arrival_s))

    def _preempt(self, victim: EngineRequest, plan: StepPlan) -> None:
        self.running.remove(victim)
        entry = next((entry for entry in plan.batch if entry.request is victim), None)
        if entry is not None:  # order `priority` alone: it was scheduled in this very step
            plan.batch.remove(entry)
            self._budget += entry.num_new
        # Pages that this step published for it will never be computed: ABORT takes their hash away.
        self._throw_back(victim, Release.PREEMPT if entry is None else Release.ABORT)
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _preempt_beams(self, beams: Beams, plan: StepPlan) -> None:
        """Throw back who still runs of them. Again without a step forward: next time they get the engine to themselves;
        where that did not help, they end."""
        for member in [each for each in beams.members if each.state is State.RUNNING]:
            self._preempt(member, plan)
        beams.setbacks += 1
        if self._sole_beams() is beams:
            self._end_stuck(beams)
        elif beams.setbacks > 1 and self._sole is None:
            self._sole = beams

    def _sole_beams(self) -> Beams | None:
        """Beams that have the engine to themselves until they get one step further."""
        if self._sole is not None and not (self._sole.members and self._sole.setbacks):
            self._sole = None
        return self._sole

    def _split_beams(self) -> Beams | None:
        """Beams of which some run and hold pages while they wait for others that wait: these go first, or whoever is
        admitted before them could find no room for ever."""
        for request in self.running if self._beams_came else ():
            members = () if request.beams is None else request.beams.members
            if any(member.state is not State.RUNNING for member in members):
                return request.beams
        return None

    def _admit(self, plan: StepPlan) -> None:
        limit = self._most_running
        if not (self.waiting and self._budget > 0 and len(self.running) < limit):
            return
        self.order.arrange(self.waiting)
        first = self._sole_beams() or self._split_beams()
        if first is not None:
            ordered = sorted(self.waiting, key=lambda request: request.beams is not first)  # stable
            self.waiting.clear()
            self.waiting.extend(ordered)
        while self.waiting and self._budget > 0 and len(self.running) < limit:
            if not self._admit_head(plan):
                return

    def _admit_head(self, plan: StepPlan) -> bool:
        """Admit the head of the queue, or leave it and everything behind it where it stands."""
        request = self.waiting[0]
        if self._outgrew(request) or self._kept_out(request):
            return False
        if self.on_host(request):
            return self._admit_returning(request, plan)
        pin = self._pin(request)
        if pin is None:
            return False
        rest = request.num_tokens - pin.hit_tokens
        n = min(rest, self._cap or rest)
        if not self.config.chunked_prefill and n > self._budget:
            self.allocator.release([request.seq], Release.ABORT)
            return False
        n = min(n, self._budget)
        request.num_computed = pin.hit_tokens
        if not self.try_reserve([(request, n)]):
            request.num_computed = 0
            return False
        self.admitted(request, pin.hit_tokens)
        self._start(request, n, plan)
        return True

    def _outgrew(self, request: EngineRequest) -> bool:
        """No gate would stop it, and it needs more than the pool: it would throw itself back again and again."""
        if self.config.whole_prompt_gate and not self.on_host(request):
            return False
        return self.pages_of(min(request.num_tokens, self.config.max_model_len)) > self.allocator.num_pages

    def _kept_out(self, request: EngineRequest) -> bool:
        sole = self._sole_beams()
        if sole is None:
            return False
        return request.beams is not sole or any(each.beams is not sole for each in self.running)

    def _start(self, request: EngineRequest, n: int, plan: StepPlan) -> None:
        self.waiting.popleft()
        self.running.append(request)
        request.state = State.RUNNING
        plan.admitted.append(request)
        self._launch(request, n, plan)

    def _admit_returning(self, request: EngineRequest, plan: StepPlan) -> bool:
        """As `_admit_head`, for a request whose KV comes back from the host."""
        rest = request.num_tokens - request.kept_tokens
        if not self.config.chunked_prefill and rest > self._budget:
            return False
        if not self.swap_in(request, Gate(headroom=self._watermark if self.running else 0)):
            return False
        n = self._cut(request.num_tokens - request.num_computed)
        if not self.try_reserve([(request, n)]):
            self._throw_back(request)
            return False
        self._start(request, n, plan)
        return True

    def _pin(self, request: EngineRequest) -> Pin | None:
        """Look the head of the queue up; the watermark counts only while others run (vLLM 0.32.0)."""
        request.seq.resume()
        request.seq.num_prefill_tokens = min(request.num_tokens, self.config.max_model_len)
        headroom = self._watermark if self.running else 0
        return self.allocator.pin(request.seq, Gate(whole_prompt=self.config.whole_prompt_gate, headroom=headroom))

    def _unblock(self) -> bool:
        """Nothing can run and nothing would ever change: end what is in the way. False: nothing is."""
        head = next(iter(self.running or self.waiting), None)
        if head is None:
            return False
        if head.beams is not None and head.beams.members:
            self._unblock_beams(head.beams)
        elif self.running:
            request = self.running.pop(0)
            self.allocator.release([request.seq], Release.FINISH)
            self.reject(request, self._too_long(request))
        else:
            request = self.waiting.popleft()
            self.reject(request, self._too_long(request) or self._never_fits(request) or self._refused(request))
        return True

    def _unblock_beams(self, beams: Beams) -> None:
        """Some run and wait for others that find no room: everybody else makes room; with nobody there, they end."""
        others = [request for request in self.running if request.beams is not beams]
        if self._sole_beams() is beams or not self.running:
            self._end_stuck(beams)
            return
        for request in reversed(others):
            self.running.remove(request)
            self._throw_back(request)
            self.waiting.appendleft(request)
        self._cleared += others
        self._sole, beams.setbacks = beams, max(beams.setbacks, 1)

    def _end_stuck(self, beams: Beams) -> None:
        """Some of the beams run and wait for others that find no room."""
        members, beams.members = beams.members, []
        needs = sum(self.pages_of(member.num_tokens) for member in members)
        for member in members:
            self.end_beam(member, End.POOL)
            member.message = (
                f"request {beams.root}: {len(members)} beams of {member.num_tokens} tokens, {needs} pages when they "
                f"share none, do not fit together: pool of {self.allocator.num_pages} pages"
            )
            self._ended.append(member)
        self.running = [request for request in self.running if not request.done]

    def _refused(self, request: EngineRequest) -> str:
        pages, size = self.allocator.num_pages, self.allocator.page_size
        return (
            f"request {request.id} ({request.num_tokens} tokens) is refused by an idle pool of {pages} pages of {size}"
        )

    def update(self, plan: StepPlan, samples: Seq[Sample | None]) -> list[EngineRequest]:
        finished = []
        written: list[tuple[Sequence, int]] = []
        for entry, sample in zip(plan.batch, samples, strict=True):
            request = entry.request
            if request.done:
                continue  # it ended by a stop token while this step ran
            if request.beams is not None and sample is not None:
                self._note_beam(entry, sample, written)
                continue
            end = self._append_sample(entry, sample)
            if sample is not None and sample.others and not request.branched:
                if request.epoch == entry.epoch:
                    self._note_written(entry, written)
                    self.allocator.commit(written)
                    written = []
                finished += branch_samples(self, entry, sample)
            if request.epoch != entry.epoch:
                if end is not None:  # it ended while it waits, and holds nothing on the device
                    self.waiting.remove(request)
                    self.leave_host(request)
                    request.state, request.end = State.FINISHED, end
                    finished.append(request)
                continue
            self._note_written(entry, written)
            if end is not None:
                # vLLM 0.32.0 frees at once, inside the loop: what stands before it in the batch is written by then.
                self.allocator.commit(written)
                written = []
                self._finish(request, end)
                finished.append(request)
        if written:
            self.allocator.commit(written)
        for beams in beams_of(entry.request for entry in plan.batch):
            finished += branch_beams(self, beams)
        if finished:
            self.running = [request for request in self.running if not request.done]
        return finished

    def _note_written(self, entry: Scheduled, written: list[tuple[Sequence, int]]) -> None:
        """The KV of an entry is there, rejected drafts aside."""
        request = entry.request
        if self.config.result_lag:
            request.seq.num_computed_tokens = request.num_computed  # so it knows that this result is a late one
        written.append((request.seq, min(entry.end, request.num_computed)))

    def _note_beam(self, entry: Scheduled, sample: Sample, written: list[tuple[Sequence, int]]) -> None:
        if entry.stale:
            return  # it was thrown back, and will be sampled again
        entry.request.num_in_flight -= 1
        self._note_written(entry, written)
        note_candidates(entry.request, sample)

    def _append_sample(self, entry: Scheduled, sample: Sample | None) -> End | None:
        """The token, behind the drafts that were accepted; the rest of the drafts is rolled back."""
        if sample is None:
            return None
        request = entry.request
        if request.epoch == entry.epoch:
            request.num_in_flight -= 1
        for number, token in enumerate(entry.drafts[: sample.accepted]):
            request.seq.append(token)
            end = self.end_of(request, Sample(token))
            if end is not None:
                request.num_computed -= len(entry.drafts) - number
                return end
        request.num_computed -= len(entry.drafts) - sample.accepted
        request.seq.append(sample.token)
        return self.end_of(request, sample)

    def end_of(self, request: EngineRequest, sample: Sample) -> End | None:
        if sample.stop:
            return End.STOP
        if request.num_tokens >= self.config.max_model_len or request.num_output >= request.max_tokens:
            return End.LENGTH
        return None
