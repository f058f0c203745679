"""The public traces themselves, where held: numbers that were measured apart from this project must come out."""

import json
from pathlib import Path

import numpy as np
import pytest
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.describe import describe
from support.lru import replay_lru
from support.traces import TRACES, needs_traces, public_file

pytestmark = [pytest.mark.trace, needs_traces]

# Traces README: policies table, block rate of the whole run, first-to-last touch.
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)
LRU_FORWARD = {
    "conversation_trace.jsonl": (0.0445, 0.2112, 0.3257, 0.3546, 0.3637),
    "synthetic_trace.jsonl": (0.0825, 0.4235, 0.6242, 0.6396, 0.6396),
}
# Shares of the distinct blocks 1, 5, 10, 25, 50, 100 %; last-to-first touch.
LRU_REVERSE = {
    "conversation_trace.jsonl": (0.0525, 0.1958, 0.2789, 0.3535, 0.3631, 0.3664),
    "synthetic_trace.jsonl": (0.0381, 0.1566, 0.2623, 0.4441, 0.5888, 0.6396),
}
SHARES = (0.01, 0.05, 0.10, 0.25, 0.50, 1.00)


def requests_of(name):
    return [(r.hash_ids.tolist(), r.num_prompt_tokens) for r in load_trace(public_file(name))]


@pytest.mark.parametrize("name", LRU_FORWARD)
def test_plain_lru_gives_the_reference_rates(name):
    requests = requests_of(name)
    found = [replay_lru(requests, capacity, grain=512).hit_rate for capacity in CAPACITIES]
    assert [round(rate, 4) for rate in found] == list(LRU_FORWARD[name])


@pytest.mark.parametrize("name", LRU_REVERSE)
def test_plain_lru_in_reverse_gives_the_reference_rates(name):
    requests = requests_of(name)
    distinct = len({block for blocks, _ in requests for block in blocks})
    found = [replay_lru(requests, round(distinct * s), grain=512, reverse=True).hit_rate for s in SHARES]
    assert [round(rate, 4) for rate in found] == list(LRU_REVERSE[name])


@pytest.mark.parametrize("kind", ["conversation", "synthetic"])
def test_plain_lru_equals_the_reference_file_to_the_digit(kind):
    reference = Path(TRACES).resolve().parent / "reference" / "mooncake_lru_full.json"
    if not reference.is_file():
        pytest.skip("reference/mooncake_lru_full.json is not beside KVARENA_TRACES")
    expected = json.loads(reference.read_text())[kind]
    requests = requests_of(f"{kind}_trace.jsonl")
    assert len(requests) == expected["requests"]
    assert sum(tokens for _, tokens in requests) == expected["input_tokens"]
    for row in expected["rows"]:
        for order in ("forward", "reverse"):
            found = replay_lru(requests, row["capacity_blocks"], grain=512, reverse=order == "reverse")
            wanted = row[order]
            assert found.hit_rate == wanted["hit_rate"]
            assert found.token_rate == pytest.approx(wanted["tok_rate"], abs=1e-15)
            assert found.evictions == wanted["evictions"]


@pytest.mark.parametrize(
    ("name", "requests", "mean_input", "whole", "last_half", "spread"),
    [
        ("conversation_trace.jsonl", 12_031, 12_035, 0.3736, 0.3981, 2e-4),
        ("synthetic_trace.jsonl", 3_993, 15_325, 0.6512, 0.863, 5e-4),
    ],
)
def test_mooncake_facts_and_ceilings(name, requests, mean_input, whole, last_half, spread):
    trace = load_trace(public_file(name))
    found = describe(trace)
    assert trace.visible.outputs == "none"
    assert not trace.visible.sessions
    assert found["requests"] == requests
    assert round(found["input_tokens"]["mean"]) == mean_input
    own = next(row for row in found["ceilings"] if row["page_size"] == 512)
    assert own["token_hit_rate"] == pytest.approx(whole, abs=5e-5)
    assert own["token_hit_rate_last_half"] == pytest.approx(last_half, abs=5e-4)
    finest = max(row["token_hit_rate"] for row in found["ceilings"])
    # Page size moves the ceiling of these traces by 0.02 and 0.05 points at most: they cannot show rounding.
    assert finest - min(row["token_hit_rate"] for row in found["ceilings"]) < spread


@pytest.mark.parametrize(
    ("name", "requests", "dropped", "sessions", "ceiling"),
    [
        ("miniswe_blksz_16.jsonl", 402, 0, 20, 0.9342),
        ("taubench_blksz_16.jsonl", 471, 0, 24, 0.8469),
        ("magagent_blksz_16.jsonl", 693, 53, 25, None),
    ],
)
def test_in_agent_traces_no_reply_returns_by_its_ids(name, requests, dropped, sessions, ceiling):
    trace = load_trace(public_file(name))
    found = describe(trace)
    assert trace.visible.outputs == "unreachable"
    assert found["replies_with_ids"] > 0
    assert found["replies_that_return"] == 0
    assert (found["requests"], found["sessions"]["count"]) == (requests, sessions)
    assert sum(trace.source["dropped"].values()) == dropped
    if ceiling is not None:
        own = next(row for row in found["ceilings"] if row["page_size"] == 16)
        assert own["token_hit_rate"] == pytest.approx(ceiling, abs=5e-5)


def test_llmservingsim_example_has_token_ids():
    trace = load_trace(public_file("example_trace.jsonl"))
    assert trace.visible.grain == 1
    assert trace.num_requests == 10
    assert all(len(r.reply_ids()) == r.num_output_tokens for r in trace)


def test_ids_of_mooncake_are_prefix_chained():
    parents = {}
    for blocks, _ in requests_of("synthetic_trace.jsonl"):
        for depth, (block, parent) in enumerate(zip(blocks, [-1, *blocks], strict=False)):
            assert parents.setdefault(block, (depth, parent)) == (depth, parent)
    assert len(parents) == np.max(list(parents)) + 1


def reference_of_slices():
    if not TRACES:
        return {}
    file = Path(TRACES).resolve().parent / "reference" / "slice_expected_lru.json"
    return json.loads(file.read_text()) if file.is_file() else {}


@pytest.mark.parametrize("name", list(reference_of_slices()) or [pytest.param("", marks=pytest.mark.skip("no slices"))])
def test_every_slice_gives_the_reference_to_the_digit(name):
    expected = reference_of_slices()[name]
    derived = name.startswith("weka")
    trace = load_trace(public_file(name.removesuffix(".gz")), **({"full_blocks": True} if derived else {}))
    grain = trace.visible.grain
    # The slice derived from WEKA lists full blocks only; its reference counts those.
    requests = [
        (r.hash_ids.tolist()[: r.num_prompt_tokens // grain] if derived else r.hash_ids.tolist(), r.num_prompt_tokens)
        for r in trace
    ]
    assert len(requests) == expected["requests"]
    assert sum(len(blocks) for blocks, _ in requests) == expected["block_accesses"]
    for row in expected["rows"]:
        for order in ("forward", "reverse"):
            found = replay_lru(requests, row["capacity_blocks"], grain=grain, reverse=order == "reverse")
            assert found.hit_rate == row[order]["hit_rate"]
            assert found.evictions == row[order]["evictions"]
