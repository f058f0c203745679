"""No starvation: whatever the limits, policies and arrivals, every request ends, and one that fits is served whole."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvarena.experiments.engine.request import End
from support.engine import PAIRS, SmallEngine

CI = settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@dataclass
class Load:
    """Requests as (prompt tokens, tokens it would generate, tokens declared, steps before it arrives)."""

    rows: list[tuple[list[int], int, int, int]]


@st.composite
def loads(draw: Any) -> Load:
    rng = random.Random(draw(st.integers(0, 2**32)))
    common = [rng.randrange(3) for _ in range(30)]
    rows = []
    for _ in range(draw(st.integers(1, 14))):
        prompt = common[: rng.randint(0, 30)] + [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        output = rng.randint(1, 12)
        rows.append((prompt, output, output + rng.choice([0, 0, 5, 200]), rng.choice([0, 0, 1, 4])))
    return Load(rows)


def run(engine: SmallEngine, load: Load) -> int:
    """Arrivals between steps, until nothing is left; returns the steps. A scheduler that stalls is cut off."""
    waiting = list(enumerate(load.rows))
    most = 200 + 40 * sum(len(prompt) + output for prompt, output, _, _ in load.rows)
    pause = 0
    while waiting or engine.engine.has_work:
        if waiting and pause <= 0:
            number, (prompt, output, declared, pause) = waiting.pop(0)
            engine.add(f"r{number}", prompt, declared, num_output=output, arrival_s=float(number))
        pause -= 1
        engine.engine.step()
        engine.allocator.check()
        if engine.engine.num_steps > most:
            left = [name for name, request in engine.requests.items() if not request.done]
            raise AssertionError(f"no end after {most} steps: {left} are waiting")
    return engine.engine.num_steps


@st.composite
def limits(draw: Any, policy: str) -> dict[str, Any]:
    seqs = draw(st.integers(1, 6))
    fields: dict[str, Any] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": draw(st.integers(max(seqs, 8), 64)),
        "max_model_len": 128,
        "result_lag": draw(st.integers(0, 1)),
        "host_pages": draw(st.sampled_from([0, 0, 3, 30])),
        "chunked_prefill": True,
    }
    if policy == "vllm":
        fields["order"] = draw(st.sampled_from(["fcfs", "priority"]))
        fields["watermark"] = draw(st.sampled_from([0.0, 0.1]))
        fields["whole_prompt_gate"] = draw(st.booleans())
        fields["chunk_size"] = draw(st.none() | st.integers(1, 16))
    else:
        fields["order"] = draw(st.sampled_from(["fcfs", "lpm", "dfs-weight"]))
        fields["conservativeness"] = draw(st.sampled_from([0.3, 1.0, 2.0]))
    return fields


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@CI
@given(data=st.data())
def test_every_request_ends_and_one_that_fits_is_served_whole(policy, kind, data):
    size, load = data.draw(st.sampled_from([1, 4])), data.draw(loads())
    pages = data.draw(st.integers(20, 90)) // size
    fields = data.draw(limits(policy))
    engine = SmallEngine(policy, kind, pages, size, **fields)
    run(engine, load)
    free, evictable = engine.allocator.room()
    assert free + evictable == pages
    for number, (prompt, output, _, _) in enumerate(load.rows):
        request = engine.requests[f"r{number}"]
        assert request.done, request
        # With pages to spare for the policies' own margins, nothing may stand in its way.
        if len(prompt) + output + 2 * size + 8 <= pages * size:
            assert request.end is End.STOP or request.num_output == output, (request, request.message)


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_a_late_giant_is_not_passed_by_for_ever(policy, kind):
    """Small requests keep coming while a prompt of nearly the whole pool waits: it starts before the last of them."""
    engine = SmallEngine(policy, kind, 40, 4, max_num_seqs=4)
    rows = [([7, number] * 4, 4, 4, 1) for number in range(60)]
    rows.insert(5, ([9] * 140, 4, 4, 0))
    run(engine, Load(rows))
    giant, last = engine.requests["r5"], engine.requests["r60"]
    assert giant.num_output == 4
    assert last.num_output == 4
