"""The `sglang` policy: scheduling rules of SGLang 0.5.22, over any allocator.

A pass of the loop runs a prefill batch or a decode batch, never both: prompts first, as long as any can be
admitted. Admission reserves a share of the declared output of everybody who runs (`NewTokenRatio`). When a
decode batch finds no room, requests with the fewest generated tokens go back to the end of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvarena.allocators.interface import KVAllocator, Release, Sequence
from kvarena.experiments.engine.admission_sglang import OUTPUT_CAP, Admitter
from kvarena.experiments.engine.branching import branch_samples
from kvarena.experiments.engine.order import WaitingOrder
from kvarena.experiments.engine.request import End, EngineRequest, State
from kvarena.experiments.engine.running_sglang import RETRACT_STEPS, NewTokenRatio, RunningBatch
from kvarena.experiments.engine.scheduler import Sample, Scheduled, Scheduler, SchedulerConfig, StepPlan, launched

PROMPT_SLACK = 5  # SGLang 0.5.22 turns prompts away from this close to the limit


class SglangScheduler(Scheduler):
    """SGLang 0.5.22: prefill first, future output reserved, retraction of who has generated least."""

    name = "sglang"

    def __init__(self, allocator: KVAllocator, config: SchedulerConfig) -> None:
        super().__init__(allocator, config)
        self.running = RunningBatch()
        self.ratio = NewTokenRatio(config.conservativeness)
        self.chunk_tokens = self._chunk_tokens()
        self.order = WaitingOrder(allocator, config, refreshes=True)
        self.num_rows = 0  # requests that hold a row of the page table
        self._last: StepPlan | None = None  # the batch of the pass before
        self._joining: list[EngineRequest] = []  # forked since the last pass
        self._turned_away: dict[str, str] = {}  # upstream limits: requests queued as one token, to be aborted

    def _chunk_tokens(self) -> int | None:
        """Prompt tokens of a pass, in whole pages; None: prompts are not cut."""
        if not self.config.chunked_prefill:
            return None
        size = self.allocator.page_size
        tokens = self.config.chunk_size or self.config.max_num_batched_tokens
        return max(tokens // size, 1) * size

    @property
    def running_requests(self) -> list[EngineRequest]:
        """The decode batch, then this pass's prefill batch, then the prompt in chunks; finished ones left out."""
        members = [*self.running.requests, *self._joining]
        if self._last is not None and self._last.kind == "prefill":
            members += [entry.request for entry in self._last.batch]
        return [request for request in dict.fromkeys(members) if not request.done]

    def has_row(self) -> bool:
        return self.num_rows < self.config.max_num_seqs

    def join(self, request: EngineRequest) -> None:
        self._joining.append(request)
        self.num_rows += 1

    # Arrival

    def add(self, request: EngineRequest) -> None:
        """As the base says. Raises ValueError for beams: they wait for one another, which this policy's decode batch,
        retraction and admission have no place for (SGLang 0.5.22 has no beam search either)."""
        if request.beams is not None:
            raise ValueError(f"request {request.id}: beam_width {request.beams.width}: expected policy vllm")
        if self.config.limits == "upstream":
            self._add_upstream(request)
        else:
            super().add(request)

    def admissible(self, request: EngineRequest) -> str:
        """Exact limits; cuts max_tokens to what the context and the pool can hold."""
        prompt, longest = request.seq.num_prompt_tokens, self.config.max_model_len
        if prompt >= longest:
            return f"request {request.id}: prompt of {prompt} tokens leaves no room in max_model_len {longest}"
        room = self._pool_room(request)
        if room < 1:
            return (
                f"request {request.id}: prompt of {prompt} tokens, a page of {self.allocator.page_size} and one token "
                f"to generate do not fit a pool of {self.pool_tokens()} tokens"
            )
        request.max_tokens = min(request.max_tokens, longest - prompt, room)
        return ""

    def _pool_room(self, request: EngineRequest) -> int:
        """Tokens that a request alone in the pool can generate."""
        size = self.allocator.page_size
        return self.pool_tokens() - self.pages_of(request.seq.num_prompt_tokens) * size - size - 1

    def _add_upstream(self, request: EngineRequest) -> None:
        """SGLang 0.5.22: max_tokens is cut; a prompt near the limit is queued as one token and then aborted."""
        prompt = request.seq.num_prompt_tokens
        top = min(self.config.max_model_len - 1, self.pool_tokens() - 1)
        request.max_tokens = max(min(request.max_tokens, top - prompt - 1, self._pool_room(request)), 0)
        if prompt >= top - PROMPT_SLACK:
            self._turned_away[request.id] = (
                f"request {request.id}: prompt of {prompt} tokens, the limit is {top - PROMPT_SLACK - 1} "
                f"(max_model_len {self.config.max_model_len}, pool of {self.pool_tokens()} tokens)"
            )
            given, request.samples = request.seq, 1
            request.seq = Sequence(
                request.id,
                [0],
                namespace=given.namespace,
                declared_max_tokens=given.declared_max_tokens,
                oracle_tokens=given.oracle_tokens,
            )
        self.waiting.append(request)

    # One pass

    def schedule(self) -> StepPlan:
        in_flight = self._last is not None and bool(self._last.batch) and self.config.result_lag == 1
        self._stash_chunk()
        self._merge_last()
        # With an empty decode batch every pass tries to admit: an idle one then means that the head is refused.
        alone = not (in_flight or self.running.requests)
        plan = self._prefill() or self._decode()
        while plan.kind == "idle" and alone and self._unblock():
            plan = self._prefill() or self._decode()
        if plan.kind == "idle" and not (in_flight or self.waiting or self.running.requests or self.chunked):
            self.ratio.reset()
        self._last = plan
        return plan

    def _stash_chunk(self) -> None:
        """The chunk of the pass before becomes cached, and the request's prefix."""
        if self.chunked is not None:
            self.allocator.commit([(self.chunked.seq, self.chunked.num_computed)])

    def _merge_last(self) -> None:
        """The pass before was a prefill: its members decode from now on, but for a prompt still in chunks."""
        if self.running.prefill_only:
            self.running.drop_done()
        joining, self._joining = [request for request in self._joining if not request.done], []
        if self._last is None or self._last.kind != "prefill":
            if joining:
                self.running.join(joining)
            return
        batch = self._last.batch
        members = [entry.request for entry in batch if entry.samples and not entry.request.done]
        if len(members) < len(batch):
            self.running.full = False
        if members or joining:
            self.running.join([*members, *joining])

    def _prefill(self) -> StepPlan | None:
        """A batch of prompts, or None when none can run now."""
        running = self.running
        if not running.requests:
            running.full = False
        if (running.full or not self.waiting) and self.chunked is None:
            return None
        slots = min(self.config.max_num_seqs - len(running.requests), self.config.max_num_seqs - self.num_rows)
        if slots <= 0 and self.chunked is None:
            running.full = True
            return None
        self.order.arrange(self.waiting)
        admitter = Admitter(self, slots)
        admitter.run()
        return self._launch_prefill(admitter)

    def _launch_prefill(self, admitter: Admitter) -> StepPlan | None:
        takes = admitter.reserve()
        if not takes:
            return None
        plan = StepPlan("prefill")
        self.chunked = None
        for request, n, whole in takes:
            plan.batch.append(launched(request, n, whole))
            if not whole:
                self.chunked = request
            if request.id in admitter.fresh:
                request.state = State.RUNNING
                self.num_rows += 1
                plan.admitted.append(request)
        return plan

    def _decode(self) -> StepPlan:
        """One token for everybody in the decode batch, after throwing back as many as it takes."""
        running, plan = self.running, StepPlan("idle")
        before = len(running.requests)
        if not before or running.prefill_only:
            return plan
        running.requests = [request for request in running.requests if not self._leaves(request)]
        if not running.requests:
            running.full = False
            return plan
        if self._has_room(running.requests):
            self.ratio.decay()
        elif self._ends_in_flight:
            running.full = False
            return plan
        else:
            self._retract(plan)
        if len(running.requests) < before:
            running.full = False
        return self._launch_decode(plan)

    def _leaves(self, request: EngineRequest) -> bool:
        """Finished, or (lag 1) the token in flight is its last by max_tokens."""
        in_flight = request.num_in_flight
        return request.done or (in_flight > 0 and request.num_output + in_flight >= request.max_tokens)

    @property
    def _ends_in_flight(self) -> bool:
        """A request whose last token is in flight still holds its pages."""
        last = self._last
        return last is not None and any(self._leaves(entry.request) and not entry.stale for entry in last.batch)

    def _has_room(self, requests: list[EngineRequest]) -> bool:
        """Evict for the pages that this decode must open; say whether they are there."""
        size = self.allocator.page_size
        new = 1 + self.num_drafts
        pages = sum(self.pages_of(each.num_computed + new) - self.pages_of(each.num_computed) for each in requests)
        self.allocator.evict(pages * size)
        return self.available_pages() >= pages

    def _retract(self, plan: StepPlan) -> None:
        """Throw back who has generated least (then the longest prompt, then the last), until the rest has room."""
        kept = sorted(self.running.requests, key=lambda r: (r.num_output, -r.seq.num_prompt_tokens), reverse=True)
        while len(kept) > 1:
            victim = kept.pop()
            self._throw_back(victim)
            self.allocator.evict(RETRACT_STEPS * len(kept))
            self.waiting.append(victim)
            plan.preempted.append(victim)
            if self._has_room(kept):
                break
        self.running.requests = kept
        self.ratio.after_retraction(kept)

    def _launch_decode(self, plan: StepPlan) -> StepPlan:
        requests = self.running.requests
        drafts: dict[str, tuple[int, ...]] = {}
        left = self.config.max_num_batched_tokens - len(requests)  # guesses go by the budget, which decodes do not use
        for request in requests:
            drafts[request.id] = self.drafts_of(request, left)
            left -= len(drafts[request.id])
        while requests and not self.try_reserve([(each, 1 + len(drafts[each.id])) for each in requests]):
            if len(requests) > 1:
                self._retract(plan)
            elif drafts[requests[0].id]:
                drafts[requests[0].id] = ()
            else:
                self._end_alone(requests.pop())
            requests = self.running.requests
        plan.batch = [launched(each, 1 + len(drafts[each.id]), True, drafts[each.id]) for each in requests]
        plan.kind = "decode" if plan.batch else "idle"
        return plan

    def _end_alone(self, request: EngineRequest) -> None:
        """The last one left has no room for its next token."""
        self._finish(request, End.POOL)
        request.message = (
            f"request {request.id}: {request.num_tokens} tokens fill the pool of {self.pool_tokens()} tokens"
        )
        self._ended.append(request)

    def chunk_refused(self) -> None:
        """An allocator that counts a held prefix late had no room for the next chunk; alone, the prompt starts over."""
        if self.chunked is not None and not self.running.requests:
            self._throw_back(self.chunked)
            self.waiting.append(self.chunked)
            self.chunked = None

    def send_back(self, request: EngineRequest) -> None:
        """A request that came back from the host in a batch that has no room: it holds no row yet."""
        super()._throw_back(request)

    def _unblock(self) -> bool:
        """Nothing runs and the head of the queue is refused by an idle pool: it can never be served."""
        if self.chunked is not None or not self.waiting:
            return False
        request = self.waiting.popleft()
        output = min(request.max_tokens - request.num_output, OUTPUT_CAP)
        need = request.num_tokens + output + self.allocator.page_size
        self.reject(
            request,
            f"request {request.id}: {request.num_tokens} tokens, {output} reserved for output and a page are {need} "
            f"tokens, which must be less than the pool of {self.pool_tokens()}",
        )
        return True

    def _throw_back(self, request: EngineRequest, reason: Release = Release.PREEMPT) -> None:
        super()._throw_back(request, reason)
        self.num_rows -= 1

    def _finish(self, request: EngineRequest, end: End) -> None:
        super()._finish(request, end)
        self.num_rows -= 1

    # Results

    def update(self, plan: StepPlan, samples: Seq[Sample | None]) -> list[EngineRequest]:
        finished = []
        written: list[tuple[Sequence, int]] = []
        for entry, sample in zip(plan.batch, samples, strict=True):
            request = entry.request
            if sample is None or request.done or request.epoch != entry.epoch:
                continue  # a retracted request's token is sampled again
            end = self._append_sample(entry, sample)
            if sample.others and not request.branched:
                self.allocator.commit([*written, (request.seq, entry.end)])
                written = []
                finished += branch_samples(self, entry, sample)
            if end is None:
                written.append((request.seq, min(entry.end, request.num_computed)))
                continue
            if written:  # the tree sees the batch in its order
                self.allocator.commit(written)
                written = []
            self._finish(request, end)
            finished.append(request)
        if written:
            self.allocator.commit(written)
        return finished

    def _append_sample(self, entry: Scheduled, sample: Sample) -> End | None:
        """The token, behind the drafts that were accepted; the rest of the drafts is rolled back."""
        request = entry.request
        request.num_in_flight -= 1
        for number, token in enumerate(entry.drafts[: sample.accepted]):
            request.seq.append(token)
            end = self.end_of(request, Sample(token))
            if end is not None:
                request.num_computed -= len(entry.drafts) - number
                return end
        request.num_computed -= len(entry.drafts) - sample.accepted
        request.seq.append(sample.token)
        message = self._turned_away.pop(request.id, "")
        if message:
            request.message = message
            return End.REJECTED
        return self.end_of(request, sample)

    def end_of(self, request: EngineRequest, sample: Sample) -> End | None:
        if sample.stop:
            return End.STOP
        return End.LENGTH if request.num_output >= request.max_tokens else None
