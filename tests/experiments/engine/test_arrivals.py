"""Arrivals: open streams, closed sessions with think time, latency figures of one request and of many."""

from __future__ import annotations

import doctest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvarena.experiments.engine import latency
from kvarena.experiments.engine.arrivals import NOMINAL_S_PER_TOKEN, Arrivals, priority_of
from kvarena.experiments.engine.latency import Latencies, Limits, TokenTimes
from kvarena.experiments.traces.base import Request


def request(name: str, arrival_s: float, prompt: int, reply: int = 10, session: str | None = None) -> Request:
    return Request(name, arrival_s, prompt, reply, token_ids=np.arange(prompt, dtype=np.int32), session_id=session)


TURNS = [
    request("t0", 0.0, 10, 10, "s"),
    request("other", 0.5, 7),
    request("t1", 5.0, 30, 20, "s"),
    request("t1.again", 5.4, 30, 20, "s"),
    request("t2", 9.0, 60, 5, "s"),
]


def drain(arrivals: Arrivals, now: float) -> list[tuple[str, float]]:
    return [(arrival.request.request_id, pytest.approx(arrival.arrival_s)) for arrival in arrivals.due(now)]


def test_an_open_stream_keeps_the_traces_times_and_speed_scales_them() -> None:
    arrivals = Arrivals(TURNS, speed=2.0)
    assert arrivals.next_s == 0.0
    assert drain(arrivals, 0.25) == [("t0", 0.0), ("other", 0.25)]
    assert drain(arrivals, 100) == [("t1", 2.5), ("t1.again", 2.7), ("t2", 4.5)]
    assert arrivals.next_s is None


def test_a_closed_session_waits_for_the_turn_before_and_its_think_time() -> None:
    arrivals = Arrivals(TURNS, sessions="closed")
    assert drain(arrivals, 100) == [("t0", 0.0), ("other", 0.5)]
    arrivals.ended("t0", 50.0)
    think = 5.0 - 10 * NOMINAL_S_PER_TOKEN  # the trace's gap less the reply's nominal time
    assert drain(arrivals, 1000) == [("t1", 50 + think), ("t1.again", 50 + think + 0.4)]
    # A retry has the same prompt: the next turn follows the later one.
    arrivals.ended("t1", 60.0)
    assert drain(arrivals, 1000) == []
    arrivals.ended("t1.again", 70.0)
    assert [name for name, _ in drain(arrivals, 1000)] == ["t2"]


def test_a_delay_that_the_trace_states_is_the_think_time() -> None:
    """Of mooncake and llmservingsim: it counts from the reply, whose own time is not in the trace."""
    turns = [request("a", 0.0, 10, 500, "s"), replace(request("b", 3.0, 20, 1, "s"), extra={"delay_s": 3.0})]
    arrivals = Arrivals(turns, sessions="closed", speed=2.0)
    arrivals.due(0.0)
    arrivals.ended("a", 10.0)
    assert drain(arrivals, 100) == [("b", 11.5)]


@pytest.mark.parametrize("value", [0, -2, 7.0])
def test_priority_is_the_traces_field(value: float) -> None:
    assert priority_of(replace(request("a", 0.0, 10), extra={"priority": value})) == value
    assert priority_of(request("a", 0.0, 10)) == 0


@pytest.mark.parametrize("value", ["high", 1.5, True, float("inf")])
def test_a_priority_that_is_no_whole_number_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="request a: priority: expected a whole number, found"):
        priority_of(replace(request("a", 0.0, 10), extra={"priority": value}))


def test_think_time_by_hand_replaces_the_traces() -> None:
    arrivals = Arrivals(TURNS, sessions="closed", think_s=3.0, speed=2.0)
    arrivals.due(1.0)
    arrivals.ended("t0", 10.0)
    assert drain(arrivals, 100) == [("t1", 11.5), ("t1.again", 11.5)]


def test_think_time_is_never_negative() -> None:
    turns = [request("a", 0.0, 10, 1000, "s"), request("b", 1.0, 20, 1, "s")]
    arrivals = Arrivals(turns, sessions="closed")
    arrivals.due(0.0)
    arrivals.ended("a", 2.0)
    assert drain(arrivals, 2.0) == [("b", 2.0)]


def test_requests_without_a_session_are_open_in_a_closed_stream() -> None:
    arrivals = Arrivals([request("a", 0.0, 10), request("b", 1.0, 20)], sessions="closed")
    assert [name for name, _ in drain(arrivals, 5.0)] == ["a", "b"]


def test_limit_takes_the_first_requests() -> None:
    assert Arrivals(TURNS, limit=2).num_requests == 2


def times(*tokens: float, arrival: float = 0.0) -> TokenTimes:
    made = TokenTimes(arrival)
    for at in tokens:
        made.token(at)
    return made


def test_latency_doctests() -> None:
    assert doctest.testmod(latency).failed == 0


def test_one_token_has_no_tpot_and_meets_its_limit() -> None:
    one = times(2.0)
    assert (one.ttft_s, one.tpot_s, one.e2el_s) == (2.0, None, 2.0)
    assert Limits(tpot_ms=0.001).met(one)


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({}, True),
        ({"ttft_ms": 1000.0}, True),
        ({"ttft_ms": 999.0}, False),
        ({"tpot_ms": 500.0}, True),
        ({"tpot_ms": 499.0}, False),
        ({"e2el_ms": 2000.0}, True),
        ({"e2el_ms": 1999.0}, False),
        ({"ttft_ms": 1000.0, "tpot_ms": 499.0}, False),
    ],
)
def test_goodput_needs_every_limit(limits: dict[str, Any], met: bool) -> None:
    assert Limits(**limits).met(times(1.0, 1.5, 2.0)) is met


def test_goodput_is_printed_with_its_limits() -> None:
    assert Limits(ttft_ms=200.0, tpot_ms=25.5).text() == "TTFT <= 200 ms, TPOT <= 25.5 ms"
    assert Limits().text() == "no limit"


def test_a_summary_by_hand() -> None:
    found = Latencies(Limits(ttft_ms=1500.0))
    for made, whole in ((times(1.0, 2.0, 3.0), True), (times(2.0, 2.5), True), (times(1.0), False)):
        found.served(made, whole)
    found.itl.extend([1.0, 1.0, 0.5])
    row = found.summary(duration_s=10.0)
    assert row["ttft_mean_ms"] == pytest.approx(4000 / 3)
    assert row["ttft_p50_ms"] == 1000.0
    assert row["ttft_p99_ms"] == 2000.0
    assert row["tpot_p50_ms"] == 500.0
    assert row["tpot_mean_ms"] == 750.0
    assert row["itl_mean_ms"] == pytest.approx(2500 / 3)
    assert row["e2el_p99_ms"] == 3000.0
    assert row["goodput_per_s"] == 0.1  # one met the limit; one was late, one cut


def test_nothing_served_is_no_number() -> None:
    row = Latencies().summary(0.0)
    assert set(row.values()) == {None}
