"""One scheduling rule broken at a time: some recorded log must notice. A rule that no log notices would be untested."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvarena.experiments.engine import admission_sglang, order, policy_sglang, policy_vllm, running_sglang
from kvarena.experiments.engine.admission_sglang import Admitter
from kvarena.experiments.engine.order import WaitingOrder
from kvarena.experiments.engine.policy_sglang import SglangScheduler
from kvarena.experiments.engine.policy_vllm import VllmScheduler
from kvarena.experiments.engine.request import EngineRequest
from kvarena.experiments.engine.running_sglang import NewTokenRatio, RunningBatch
from kvarena.experiments.engine.scenario import read_sched_scenario, run_sched_scenario
from kvarena.experiments.engine.scheduler import StepPlan
from support.sched import first_difference, golden_scheds, load_jsonl

LOGS = {log.id: log for log in golden_scheds()}
Patch = pytest.MonkeyPatch


def differs(log_id: str) -> bool:
    """Whether ours departs from the recorded log (a crash or an endless run is a departure too)."""
    log = LOGS[log_id]
    golden = load_jsonl(log.path)[1:]
    lines = run_sched_scenario(read_sched_scenario(log.scenario), log.policy, **log.options)
    next(lines)
    try:
        for theirs in golden:
            mine = next(lines, None)
            if mine is None or first_difference(theirs, mine, log.policy) is not None:
                return True
    except (RuntimeError, ValueError, IndexError):
        return True
    return next(lines, None) is not None


# --- vllm ---


def admits_after_a_preemption(patch: Patch) -> None:
    original = VllmScheduler._run

    def run(self: VllmScheduler, plan: StepPlan) -> None:
        original(self, plan)
        self._thrown, plan.preempted = plan.preempted, []  # type: ignore[attr-defined]

    def admit(self: VllmScheduler, plan: StepPlan) -> None:
        admit_head(self, plan)
        plan.preempted = self._thrown  # type: ignore[attr-defined]

    admit_head = VllmScheduler._admit
    patch.setattr(VllmScheduler, "_run", run)
    patch.setattr(VllmScheduler, "_admit", admit)


def first_is_the_victim(patch: Patch) -> None:
    patch.setattr(VllmScheduler, "_victim", lambda self: self.running[0])


def victims_go_to_the_back(patch: Patch) -> None:
    class Back(deque[EngineRequest]):
        def appendleft(self, item: EngineRequest) -> None:
            self.append(item)

    original = VllmScheduler.__init__

    def init(self: VllmScheduler, *arguments: Any) -> None:
        original(self, *arguments)
        self.waiting = Back()

    patch.setattr(VllmScheduler, "__init__", init)


def caps_a_lone_request(patch: Patch) -> None:
    patch.setattr(VllmScheduler, "_chunk_cap", lambda self: self.config.chunk_size or 0)


def cap_counts_the_running_alone(patch: Patch) -> None:
    patch.setattr(
        VllmScheduler, "_chunk_cap", lambda self: (self.config.chunk_size or 0) if len(self.running) > 1 else 0
    )


def no_whole_prompt_gate(patch: Patch) -> None:
    patch.setattr(policy_vllm, "Gate", lambda **fields: order_gate(**{**fields, "whole_prompt": False}))


order_gate = policy_vllm.Gate


def gate_adds_a_page(patch: Patch) -> None:
    patch.setattr(policy_vllm, "Gate", lambda **fields: order_gate(**{**fields, "headroom": fields["headroom"] + 1}))


def unchunked_prompts_are_cut(patch: Patch) -> None:
    original = VllmScheduler.__init__

    def init(self: VllmScheduler, allocator: Any, config: Any) -> None:
        original(self, allocator, replace(config, chunked_prefill=True))

    patch.setattr(VllmScheduler, "__init__", init)


def last_token_in_flight_is_not_skipped(patch: Patch) -> None:
    def demand(self: VllmScheduler, request: EngineRequest) -> int:
        n = self._cut(request.num_tokens + request.num_in_flight - request.num_computed)
        return min(n, self.config.max_model_len - request.num_computed - 1)

    patch.setattr(VllmScheduler, "_demand", demand)


def stale_tokens_are_dropped(patch: Patch) -> None:
    original = VllmScheduler._append_sample
    patch.setattr(
        VllmScheduler,
        "_append_sample",
        lambda self, entry, sample: original(self, entry, None if entry.stale else sample),
    )


def results_publish_nothing(patch: Patch) -> None:
    """Lag 1: the allocator is not told that the result is a late one."""
    from kvarena.allocators.block import BlockAllocator

    patch.setattr(BlockAllocator, "commit", lambda self, done: [])


def the_batch_ends_back_to_front(patch: Patch) -> None:
    original = VllmScheduler.update

    def update(self: VllmScheduler, plan: StepPlan, samples: Any) -> Any:
        turned = StepPlan(plan.kind, plan.batch[::-1])
        return original(self, turned, samples[::-1])

    patch.setattr(VllmScheduler, "update", update)


VLLM: list[tuple[Callable[[Patch], None], list[str]]] = [
    (admits_after_a_preemption, ["vllm_lag1-decode_overload", "vllm-identical_requests"]),
    (first_is_the_victim, ["vllm-decode_overload"]),
    (victims_go_to_the_back, ["vllm-decode_overload"]),
    (caps_a_lone_request, ["vllm-chunk_cap"]),
    (cap_counts_the_running_alone, ["vllm-chunk_cap_burst"]),
    (no_whole_prompt_gate, ["vllm-whole_prompt_gate"]),
    (gate_adds_a_page, ["vllm-page4"]),
    (unchunked_prompts_are_cut, ["vllm-unchunked"]),
    (last_token_in_flight_is_not_skipped, ["vllm_lag1-chunk_cap"]),
    (stale_tokens_are_dropped, ["vllm_lag1-early_stop"]),
    (results_publish_nothing, ["vllm_lag1-page1_budget_seqs"]),
    (the_batch_ends_back_to_front, ["vllm-chunk_cap"]),
]


# --- sglang ---


def most_generated_go_first(patch: Patch) -> None:
    """The victim is taken from the other end of the keep-order."""
    patch.setattr(policy_sglang, "sorted", lambda *items, **options: sorted(*items, **options)[::-1], raising=False)


def no_extra_eviction(patch: Patch) -> None:
    patch.setattr(policy_sglang, "RETRACT_STEPS", 0)


def ratio_after_retraction_without_head_room(patch: Patch) -> None:
    patch.setattr(running_sglang, "RETRACT_STEPS", 0)


def ratio_never_decays(patch: Patch) -> None:
    patch.setattr(NewTokenRatio, "decay", lambda self: None)


def ratio_is_not_reset(patch: Patch) -> None:
    patch.setattr(NewTokenRatio, "reset", lambda self: None)


def no_page_on_top(patch: Patch) -> None:
    def charge(self: Admitter, n: int, output: int) -> None:
        tokens = self._whole_pages(n)
        self.reserved += tokens + output
        self.taken += tokens
        self.input_left -= tokens
        if self.chunk_left is not None:
            self.chunk_left -= tokens

    patch.setattr(Admitter, "_charge", charge)


def equal_is_enough_room(patch: Patch) -> None:
    gate = admission_sglang.Gate
    patch.setattr(admission_sglang, "Gate", lambda **fields: gate(**{**fields, "strict": False}))


def output_is_not_reserved(patch: Patch) -> None:
    patch.setattr(admission_sglang, "OUTPUT_CAP", 0)


def finished_leave_the_batch_at_once(patch: Patch) -> None:
    original = SglangScheduler._prefill

    def prefill(self: SglangScheduler) -> StepPlan | None:
        self.running.drop_done()
        return original(self)

    patch.setattr(SglangScheduler, "_prefill", prefill)


def the_flag_is_never_set(patch: Patch) -> None:
    patch.setattr(RunningBatch, "full", property(lambda self: False, lambda self, value: None))


def retracted_go_to_the_front(patch: Patch) -> None:
    class Front(deque[EngineRequest]):
        def append(self, item: EngineRequest) -> None:
            if item.num_preemptions:
                self.appendleft(item)
            else:
                super().append(item)

    original = SglangScheduler.__init__

    def init(self: SglangScheduler, *arguments: Any) -> None:
        original(self, *arguments)
        self.waiting = Front()

    patch.setattr(SglangScheduler, "__init__", init)


def the_batch_keeps_its_old_order(patch: Patch) -> None:
    original = SglangScheduler._retract

    def retract(self: SglangScheduler, plan: StepPlan) -> None:
        before = self.running.requests
        original(self, plan)
        kept = set(map(id, self.running.requests))
        self.running.requests = [request for request in before if id(request) in kept]

    patch.setattr(SglangScheduler, "_retract", retract)


def ends_in_flight_are_not_foreseen(patch: Patch) -> None:
    patch.setattr(SglangScheduler, "_leaves", lambda self, request: request.done)


def nobody_is_deferred(patch: Patch) -> None:
    patch.setattr(order, "_shares", lambda request, seen: False)


def deferral_needs_33_tokens(patch: Patch) -> None:
    patch.setattr(order, "DEFERRAL_TOKENS", 33)


def long_queues_are_sorted_too(patch: Patch) -> None:
    patch.setattr(order, "LPM_LIMIT", 10_000)


def the_head_is_not_refreshed(patch: Patch) -> None:
    patch.setattr(WaitingOrder, "_refresh", lambda self, waiting: None)


def chunks_are_not_stashed(patch: Patch) -> None:
    patch.setattr(SglangScheduler, "_stash_chunk", lambda self: None)


P1, P16 = "sglang-{}.p1.fcfs", "sglang-{}.p16.fcfs"
# The recorded logs in which requests are retracted.
RETRACTING = [f"sglang-stress_1.{name}" for name in ("p16.lpm", "p1.lpm", "p1.fcfs.lag1", "p16.fcfs.lag1")]
SGLANG: list[tuple[Callable[[Patch], None], list[str]]] = [
    (most_generated_go_first, RETRACTING),
    (no_extra_eviction, RETRACTING),
    (ratio_after_retraction_without_head_room, RETRACTING),
    (ratio_never_decays, [P1.format("decode_overload")]),
    (ratio_is_not_reset, [P1.format("sg_exact"), P1.format("sg_limits"), P1.format("light_load")]),
    (no_page_on_top, [P16.format("decode_overload")]),
    (equal_is_enough_room, [P1.format("sg_exact")]),
    (output_is_not_reserved, [P1.format("decode_overload")]),
    (finished_leave_the_batch_at_once, [P1.format("early_stop"), P1.format("max_seqs")]),
    (the_flag_is_never_set, [P1.format("decode_overload"), P1.format("head_of_line")]),
    (retracted_go_to_the_front, RETRACTING),
    (the_batch_keeps_its_old_order, RETRACTING),
    (ends_in_flight_are_not_foreseen, [P1.format("max_seqs") + ".lag1"]),
    (nobody_is_deferred, ["sglang-sg_lpm.p16.lpm"]),
    (deferral_needs_33_tokens, ["sglang-sg_lpm.p16.lpm", "sglang-sg_lpm.p1.lpm"]),
    (long_queues_are_sorted_too, ["sglang-stress_1.p1.lpm"]),
    (the_head_is_not_refreshed, [P1.format("stress_1"), P16.format("decode_overload"), P1.format("decode_overload")]),
    (chunks_are_not_stashed, [P1.format("identical_requests"), P1.format("stress_1"), P16.format("stress_1")]),
]


@pytest.mark.parametrize(("fault", "logs"), [*VLLM, *SGLANG], ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_is_noticed(fault: Callable[[Patch], None], logs: list[str], monkeypatch: Patch) -> None:
    assert not differs(logs[0])
    fault(monkeypatch)
    assert any(differs(log_id) for log_id in logs)
