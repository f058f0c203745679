"""Every measure of `metrics.py` and of latencies, computed by hand and written down as numbers; and their laws.

`tests/experiments/test_metrics.py` has the counters and the reported faults of others; here is what was left, so that
each public name of the module has an example. A test walks the module's names and says so.
"""

from __future__ import annotations

import inspect
from array import array
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Sequence
from kvarena.experiments import metrics
from kvarena.experiments.engine import latency
from kvarena.experiments.engine.latency import Latencies, Limits, TokenTimes
from kvarena.experiments.engine.scheduler import StepPlan
from kvarena.experiments.engine.simulate import Clock
from kvarena.experiments.replay import RequestRow, StepRow

HERE = Path(__file__).parent


def requests(*rows: tuple[int, int, bool]) -> list[RequestRow]:
    """(prompt, hit, admitted) of each, in order; other columns count 1, 10, 100 ... so that no sum can be mistaken."""
    return [
        RequestRow(i, f"r{i}", None, float(i), prompt, 9, admitted, hit, 1, 10, 100, 1000, 10_000)
        for i, (prompt, hit, admitted) in enumerate(rows)
    ]


def step(free: int, evictable: int, in_use: int, **fields: int | float | None) -> StepRow:
    names = ("live", "shared", "duplicates", "wasted_slots", "tail_slots", "live_tokens", "evicted_pages", "step")
    return StepRow(
        request_id="r", free=free, evictable=evictable, in_use=in_use, **{**dict.fromkeys(names, 0), **fields}
    )


def test_every_column_of_a_summary_of_requests():
    found = metrics.summarise_requests(
        requests((10, 0, True), (20, 4, True), (40, 0, True), (99, 0, False), (30, 6, True))
    )
    assert found == {
        "token_hit_rate": 10 / 100,  # 0 + 4 + 0 + 6 of 10 + 20 + 40 + 30
        "token_hit_rate_last_half": 6 / 70,  # requests 2 and 4 of 5; 3 was rejected
        "request_hit_rate": 2 / 4,
        "admitted": 4,
        "rejected": 1,
        "refusals": 5,
        "requests_with_hit": 2,
        "prompt_tokens": 100,
        "hit_tokens": 10,
        "readmitted_prompt_tokens": 0,
        "readmitted_hit_tokens": 0,
        "reply_tokens": 5000,
        "cut_output_tokens": 50_000,
        "evicted_pages": 50,
        "duplicate_pages_seen": 500,
    }


def test_every_column_of_a_summary_of_steps():
    # 8 pages of 4 slots, 10 bytes a token. The pool is 4/1/3, then 0/8/0, then 2/0/6 (free/evictable/in use).
    rows = [
        step(4, 1, 3, wasted_slots=5, tail_slots=2, duplicates=2, external_fragmentation=0.25),
        step(0, 8, 0),
        step(2, 0, 6, wasted_slots=1, tail_slots=1, external_fragmentation=0.75),
    ]
    found = metrics.summarise_steps(rows, num_pages=8, page_size=4, token_bytes=10)
    assert found == pytest.approx(
        {
            "utilisation": (3 + 0 + 6) / 24,
            "peak_in_use_pages": 6,
            "slot_utilisation": ((12 - 5) + 0 + (24 - 1)) / 96,
            "fragmentation": (5 / 12 + 1 / 24) / 2,  # the step that owns nothing has none
            "external_fragmentation": 0.5,
            "tail_waste_bytes": (2 + 0 + 1) * 10 / 3,
            "reservation_bytes": (3 + 0 + 0) * 10 / 3,
            "duplicate_bytes": 2 * 40 / 3,
            "free_share": (4 + 0 + 2) / 24,
            "evictable_share": 9 / 24,
        }
    )
    assert found["free_share"] + found["evictable_share"] + found["utilisation"] == pytest.approx(1)


def test_single_measures():
    assert metrics.utilisation(3, 12) == 0.25
    assert metrics.slot_utilisation(3, 5, 12, 4) == 7 / 48
    assert metrics.fragmentation(3, 6, 4) == 0.5
    assert metrics.ratio(1, 4) == 0.25
    assert metrics.mean([1, 2, 6]) == 3
    assert metrics.mean([]) is None
    assert metrics.percentile([10, 20, 30, 40, 50], 0.9) == 50
    assert metrics.percentile([10, 20, 30, 40, 50], 0.2) == 10
    assert metrics.percentile([10, 20, 30, 40, 50], 0.21) == 20


def test_a_counter_over_a_preemption_and_a_stranger():
    counter = metrics.HitCounter()
    for name, prompt, hit in (("a", 10, 0), ("b", 20, 16), ("a", 14, 8)):
        counter.admitted(name, prompt, hit)
    assert (counter.requests, counter.requests_with_hit) == (2, 1)
    assert (counter.prompt_tokens, counter.hit_tokens, counter.token_hit_rate) == (30, 16, 16 / 30)
    assert (counter.readmitted_prompt_tokens, counter.readmitted_hit_tokens) == (14, 8)
    assert counter.request_hit_rate == 0.5
    assert metrics.count_hits(requests((8, 4, True), (8, 4, False))).hit_tokens == 4


def test_times_of_verbs():
    rows = metrics.summarise_times({"pin": array("q", [*range(1000, 101_000, 1000)]), "release": array("q")})
    expected = {"verb": "pin", "calls": 100, "total_ms": 5.05, "mean_us": 50.5, "p50_us": 50.0, "p90_us": 90.0}
    assert rows == [{**expected, "p99_us": 99.0, "max_us": 100.0}]


@given(
    prompt=st.integers(1, 200),
    prefix=st.integers(0, 200),
    pages=st.integers(0, 50),
    size=st.integers(1, 17),
    rule=st.booleans(),
)
def test_hit_and_misses_add_up_to_the_prompt_and_none_is_negative(prompt, prefix, pages, size, rule):
    prefix = min(prefix, prompt)
    most = min(prefix, prompt - 1 if rule else prompt) // size
    hit = min(pages, most) * size
    split = metrics.misses(prompt, prefix, hit, size, rule)
    parts = (split.hit, split.never_seen, split.last_token, split.rounding, split.lost)
    assert sum(parts) == prompt
    assert min(parts) >= 0
    assert split.rounding < size
    assert split.lost % size == 0


# --- latency ---


def times(arrival: float, *tokens: float) -> TokenTimes:
    seen = TokenTimes(arrival)
    for at in tokens:
        seen.token(at)
    return seen


def test_latencies_of_one_request():
    seen = times(1.0, 1.5, 2.0, 4.5)
    assert (seen.ttft_s, seen.tpot_s, seen.e2el_s) == (0.5, 1.5, 3.5)
    one = times(1.0, 3.0)
    assert (one.ttft_s, one.tpot_s, one.e2el_s) == (2.0, None, 2.0)
    none = times(1.0)
    assert (none.ttft_s, none.tpot_s, none.e2el_s) == (None, None, None)


def test_goodput_counts_whole_replies_that_meet_every_limit():
    good = Latencies(Limits(ttft_ms=500.0, tpot_ms=1500.0))
    good.served(times(1.0, 1.5, 2.0, 4.5), whole=True)  # TTFT and TPOT exactly at their limits
    good.served(times(1.0, 1.5, 2.0, 4.5), whole=False)  # cut
    good.served(times(1.0, 1.501, 1.6), whole=True)  # first token too late
    good.served(times(1.0, 1.2), whole=True)  # one token has no TPOT to miss
    assert good.num_good == 2
    assert good.summary(4.0)["goodput_per_s"] == 0.5
    assert good.summary(0.0)["goodput_per_s"] is None


def test_means_and_percentiles_in_milliseconds():
    found = Latencies()
    for number in range(1, 11):
        found.served(times(0.0, number, 2.0 * number), whole=True)
        found.itl.append(float(number))
    row = found.summary(10.0)
    assert (row["ttft_mean_ms"], row["ttft_p50_ms"], row["ttft_p90_ms"], row["ttft_p99_ms"]) == (
        5500,
        5000,
        9000,
        10_000,
    )
    assert (row["tpot_p50_ms"], row["e2el_p50_ms"], row["itl_p50_ms"]) == (5000, 10_000, 5000)
    assert row["goodput_per_s"] == 1.0
    assert Latencies().summary(1.0)["ttft_p50_ms"] is None


@dataclass
class Times:
    """A step-time model of two numbers."""

    host: float
    gpu: float

    def host_s(self, plan: object) -> float:
        return self.host

    def gpu_s(self, plan: object) -> float:
        return self.gpu


@pytest.mark.parametrize(
    ("lag", "host", "gpu", "moments"),
    [
        (0, 1.0, 5.0, [6.0, 12.0, 18.0]),  # host and GPU add up
        (1, 1.0, 5.0, [1.0, 6.0, 11.0]),  # the host schedules ahead, and waits for the step before
        (1, 5.0, 1.0, [5.0, 10.0, 15.0]),  # a slow host hides the GPU
    ],
)
def test_a_clock_adds_host_and_gpu_or_takes_the_longer(lag, host, gpu, moments):
    clock = Clock(Times(host, gpu), lag)  # type: ignore[arg-type]
    plan = StepPlan(batch=[object()])  # type: ignore[list-item]
    found = []
    for _ in moments:
        clock.step(plan)
        found.append(clock.now_s)
    assert found == moments
    assert (clock.host_s, clock.gpu_s) == (3 * host, 3 * gpu)


def test_limits_as_text():
    assert Limits().text() == "no limit"
    assert Limits(ttft_ms=500, e2el_ms=2.5).text() == "TTFT <= 500 ms, E2EL <= 2.5 ms"


def test_pool_fields_count_slots_that_are_being_written_as_full():
    """8 pages of 4. Prompt of 10: 3 pages, tail 2. Its first 6 tokens are committed, the other 4 a step is writing."""
    pool = make_allocator({"kind": "block", "page_size": 4}, num_pages=8)
    seq = Sequence("a", range(10))
    assert pool.admit(seq) is not None
    pool.commit([(seq, 6)])
    fields = metrics.pool_fields(pool, [10], in_flight=4)
    assert (fields["free"], fields["evictable"], fields["in_use"]) == (5, 0, 3)
    assert (fields["wasted_slots"], fields["tail_slots"], fields["live_tokens"]) == (2, 2, 10)
    assert metrics.pool_fields(pool, [10])["wasted_slots"] == 6


def test_every_public_name_has_an_example():
    text = Path(__file__).read_text() + (HERE.parent / "experiments" / "test_metrics.py").read_text()
    for module in (metrics, latency):
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", "") == module.__name__
            and (inspect.isfunction(value) or inspect.isclass(value))
        ]
        assert len(names) >= 3
        assert [name for name in names if name not in text] == []
