"""Every measure by a hand-computed example, and the reported faults of others' counters."""

from __future__ import annotations

import json

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Release, Sequence
from kvarena.experiments import metrics
from kvarena.experiments.metrics import HitCounter, Misses, fragmentation, misses, slot_utilisation, utilisation
from kvarena.experiments.replay import RequestRow, StepRow
from support.golden import CASES

CASE = {row["id"]: row for row in map(json.loads, CASES.read_text().splitlines())}


def run_ops(case, kind: str) -> tuple[HitCounter, list[bool]]:
    """Arrivals, preemptions and finishes of a case through a real allocator, counted as a replay counts."""
    given = case["input"]
    size = given["page_size"]
    allocator = make_allocator({"kind": kind, "page_size": size}, num_pages=given["num_slots"] // size)
    counter, live, done = HitCounter(), {}, []
    for op in given["ops"]:
        if op["op"] != "arrive":
            reason = Release.PREEMPT if op["op"] == "preempt" else Release.FINISH
            allocator.release([live.pop(op["id"])], reason)
            done.append(True)
            continue
        seq = Sequence(op["id"], op["tokens"])
        pin = allocator.admit(seq)
        done.append(pin is not None)
        if pin is not None:
            allocator.commit([(seq, seq.num_tokens)])
            live[op["id"]] = seq
            counter.admitted(op["id"], seq.num_prompt_tokens, pin.hit_tokens)
    return counter, done


@pytest.mark.parametrize("kind", ["block", "token"])
def test_own_pages_found_after_a_preemption_are_no_hits(kind):
    case = CASE["metrics-01"]
    counter, _ = run_ops(case, kind)
    expected = case["expect"]
    assert counter.prompt_tokens == expected["query_tokens"]
    assert counter.hit_tokens == expected["hit_tokens"]
    assert counter.token_hit_rate == pytest.approx(expected["hit_rate"], abs=1e-6)
    assert counter.readmitted_prompt_tokens == expected["preempted_query_tokens"]
    assert counter.readmitted_hit_tokens == expected["preempted_hit_tokens"]
    assert counter.first_hits == expected["cached_tokens"]


@pytest.mark.parametrize("kind", ["block", "token"])
def test_refused_tries_are_not_counted(kind):
    case = CASE["metrics-02"]
    counter, done = run_ops(case, kind)
    expected = case["expect"]
    assert done == expected["ok"]
    assert (counter.prompt_tokens, counter.hit_tokens) == (expected["query_tokens"], expected["hit_tokens"])
    assert counter.token_hit_rate == pytest.approx(expected["hit_rate"])


@pytest.mark.parametrize("kind", ["block", "token"])
def test_usage_by_pages_by_slots_and_idle_cache(kind):
    case = CASE["metrics-04"]
    given, expected = case["input"], case["expect"]
    pages = given["num_slots"] // given["page_size"]
    for state, page_usage, token_usage, idle in zip(
        given["states"], expected["page_usage"], expected["token_usage"], expected["cached_idle_share"], strict=True
    ):
        allocator = make_allocator({"kind": kind, "page_size": given["page_size"]}, num_pages=pages)
        reach(allocator, state)
        seen = allocator.capacity()
        assert utilisation(seen.in_use, pages) == pytest.approx(page_usage, abs=1e-6)
        assert slot_utilisation(seen.in_use, seen.wasted_slots, pages, 16) == pytest.approx(token_usage, abs=1e-6)
        assert seen.evictable / pages == pytest.approx(idle, abs=1e-6)


def reach(allocator, state) -> None:
    """Bring an allocator into a state of the case."""
    lengths = state.get("live_lengths")
    if "shared" in state:
        for name in ("a", "b"):
            admit(allocator, Sequence(name, [*range(32), 90 + ord(name)]))
    elif lengths:
        for place, length in enumerate(lengths):
            admit(allocator, Sequence(f"r{place}", [1000 * place + token for token in range(length)]))
    else:
        seq = Sequence("idle", range(16 * state["cached_idle_pages"]))
        admit(allocator, seq)
        allocator.release([seq], Release.FINISH)


def admit(allocator, seq) -> None:
    assert allocator.admit(seq) is not None
    allocator.commit([(seq, seq.num_tokens)])


def row(index: int, prompt: int, hit: int, *, admitted: bool = True, **fields) -> RequestRow:
    values = {"evicted_pages": 0, "duplicate_pages": 0, "reply_tokens": 0, "cut_output_tokens": 0, "refusals": 0}
    return RequestRow(index, f"r{index}", None, 0.0, prompt, 0, admitted, hit, **{**values, **fields})


def test_whole_run_and_last_half_by_hand():
    rows = [row(0, 10, 0), row(1, 10, 5), row(2, 30, 15), row(3, 99, 0, admitted=False, refusals=2)]
    found = metrics.summarise_requests(rows)
    assert found["token_hit_rate"] == 20 / 50
    assert found["token_hit_rate_last_half"] == 15 / 30
    assert found["request_hit_rate"] == 2 / 3
    assert (found["admitted"], found["rejected"], found["refusals"]) == (3, 1, 2)
    assert found["prompt_tokens"] == 50


def test_a_rate_of_nothing_is_none_and_not_zero():
    found = metrics.summarise_requests([row(0, 10, 0, admitted=False)])
    assert found["token_hit_rate"] is None
    assert found["request_hit_rate"] is None
    assert metrics.summarise_steps([], 8, 4, 100)["utilisation"] is None


def step(**fields) -> StepRow:
    names = ("live", "free", "evictable", "in_use", "shared", "duplicates", "wasted_slots", "tail_slots", "live_tokens")
    values = dict.fromkeys((*names, "evicted_pages", "step"), 0)
    return StepRow(request_id="r", **{**values, **fields})


def test_pool_measures_by_hand():
    # 10 pages of 4 tokens, 100 bytes a token; 4 then 2 pages in use, with 5 and 1 slots without a token.
    rows = [
        step(in_use=4, evictable=1, free=5, wasted_slots=5, tail_slots=3, duplicates=1),
        step(in_use=2, evictable=8, free=0, wasted_slots=1, tail_slots=1, duplicates=0),
    ]
    found = metrics.summarise_steps(rows, 10, 4, 100)
    assert found["utilisation"] == pytest.approx(0.3)
    assert found["peak_in_use_pages"] == 4
    assert found["slot_utilisation"] == pytest.approx((11 / 40 + 7 / 40) / 2)
    assert found["fragmentation"] == pytest.approx((5 / 16 + 1 / 8) / 2)
    assert found["tail_waste_bytes"] == 200
    assert found["reservation_bytes"] == 100
    assert found["duplicate_bytes"] == 200
    assert found["external_fragmentation"] is None
    assert (found["free_share"], found["evictable_share"]) == (0.25, 0.45)


def test_an_allocator_that_counts_no_waste_shows_none_instead_of_a_negative_reservation():
    found = metrics.summarise_steps([step(in_use=4, free=6, tail_slots=3)], 10, 4, 100)
    assert found["reservation_bytes"] is None
    assert found["fragmentation"] is None
    assert found["tail_waste_bytes"] == 300


def test_fragmentation_of_an_empty_pool_is_none():
    assert fragmentation(0, 0, 16) is None


@pytest.mark.parametrize(
    ("prompt", "prefix", "hit", "size", "rule", "expected"),
    [
        (40, 40, 16, 16, True, Misses(hit=16, never_seen=0, last_token=1, rounding=7, lost=16)),
        (32, 32, 16, 16, True, Misses(hit=16, never_seen=0, last_token=1, rounding=15, lost=0)),
        (32, 32, 32, 16, False, Misses(hit=32, never_seen=0, last_token=0, rounding=0, lost=0)),
        (32, 20, 20, 1, True, Misses(hit=20, never_seen=12, last_token=0, rounding=0, lost=0)),
        (1, 1, 0, 1, True, Misses(hit=0, never_seen=0, last_token=1, rounding=0, lost=0)),
        (5, 0, 0, 4, True, Misses(hit=0, never_seen=5, last_token=0, rounding=0, lost=0)),
    ],
)
def test_misses_by_hand(prompt, prefix, hit, size, rule, expected):
    assert misses(prompt, prefix, hit, size, rule) == expected


def test_misses_always_add_up_to_the_prompt():
    for prompt in range(1, 20):
        for prefix in range(prompt + 1):
            for size in (1, 3, 4):
                for rule in (True, False):
                    split = misses(prompt, prefix, 0, size, rule)
                    assert split.hit + split.never_seen + split.last_token + split.rounding + split.lost == prompt
                    assert min(split.never_seen, split.last_token, split.rounding, split.lost) >= 0


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([7], 0.5, 7), ([1, 2, 3, 4], 0.5, 2), (list(range(1, 101)), 0.99, 99), (list(range(1, 101)), 1.0, 100)],
)
def test_percentiles_by_nearest_rank(values, share, expected):
    assert metrics.percentile(values, share) == expected


def test_time_rows_by_hand():
    from array import array

    rows = metrics.summarise_times({"pin": array("q", [1000, 3000, 2000]), "commit": array("q")})
    assert rows == [
        {
            "verb": "pin",
            "calls": 3,
            "total_ms": 0.006,
            "mean_us": 2.0,
            "p50_us": 2.0,
            "p90_us": 3.0,
            "p99_us": 3.0,
            "max_us": 3.0,
        }
    ]
