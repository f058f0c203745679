"""Built-in workloads: what they promise is measured on what they make."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from kvarena.experiments import workloads
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.describe import describe
from kvarena.experiments.workloads import chat
from support.lru import replay_lru
from support.traces import needs_traces, public_file

# Block hit rates of LRU on Mooncake conversation, whole run (support.lru reproduces them from the file).
REAL_LRU = {1_000: 0.0445, 10_000: 0.2112, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637}


def fingerprint(trace):
    return [
        (r.request_id, r.arrival_s, r.session_id, r.prompt_ids().tobytes(), r.num_output_tokens, r.namespace)
        for r in trace
    ]


@pytest.mark.parametrize("name", workloads.NAMES)
def test_equal_seeds_make_equal_workloads_and_others_do_not(name):
    small = {"num_requests": 60} if "num_requests" in workloads.defaults(name) else {}
    if "num_sessions" in workloads.defaults(name):
        small = {"num_sessions": 12}
    one, same, other = (workloads.make(name, seed=seed, **small) for seed in (3, 3, 4))
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)
    assert one.num_requests == len(list(one))
    assert one.source["seed"] == 3


@pytest.mark.parametrize("name", workloads.NAMES)
def test_arrivals_start_at_zero_and_never_fall(name):
    arrivals = [r.arrival_s for r in workloads.make(name, limit=2000)]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_unknown_parameters_and_bad_values_are_named(name):
    with pytest.raises(ValueError, match=r"unknown parameter 'nonsense': expected one of seed, "):
        load_trace(name, nonsense=1)
    for bad in (-1, 1.5, "x", None):
        with pytest.raises(ValueError, match="seed: expected a whole number"):
            load_trace(name, seed=bad)
    with pytest.raises(ValueError, match="format: expected none for the built-in workload"):
        load_trace(name, "mooncake")


@pytest.mark.parametrize("name", workloads.NAMES)
def test_every_numeric_parameter_refuses_what_is_no_number(name):
    for parameter, default in workloads.defaults(name).items():
        for bad in ("x", float("nan"), -1) if isinstance(default, (int, float)) else ():
            with pytest.raises(ValueError, match=f"{parameter}: expected"):
                load_trace(name, **{parameter: bad})


def test_speed_and_limit_apply_to_workloads():
    plain, fast = load_trace("chat", num_sessions=5), load_trace("chat", num_sessions=5, speed=2.0, limit=4)
    assert fast.num_requests == len(list(fast)) == 4
    assert [r.arrival_s for r in fast] == [r.arrival_s / 2 for r in plain][:4]


# chat


@pytest.fixture(scope="module")
def chat_trace():
    return load_trace("chat")


def test_chat_shows_every_factor(chat_trace):
    found = describe(chat_trace)
    assert found["cannot_show"] == []
    assert found["visible"]["outputs"] == "recorded"
    assert 2_000 < found["requests"] < 5_000
    assert 1_000 < found["input_tokens"]["mean"] < 2_200


def test_chat_replies_return_verbatim_in_the_next_prompt(chat_trace):
    turns = {(r.session_id, r.extra["turn"]): r for r in chat_trace if not r.request_id.endswith(".again")}
    followed = 0
    for (session, turn), request in turns.items():
        after = turns.get((session, turn + 1))
        if after is not None:
            said = np.concatenate([request.token_ids, request.output_ids])
            assert np.array_equal(after.token_ids[: len(said)], said)
            assert len(after.token_ids) > len(said)
            assert after.arrival_s > request.arrival_s
            followed += 1
    assert followed > 1_000


def test_chat_system_prompts_divide_by_no_page_size(chat_trace):
    first = {}
    for request in chat_trace:
        first.setdefault(request.extra["group"], []).append(request)
    assert len(first) > 8
    for members in first.values():
        prompts = [r.token_ids for r in members if r.extra["turn"] == 0]
        if len(prompts) > 2:
            shared = min(
                int(np.argmax(np.append(a[: min(len(a), len(b))] != b[: min(len(a), len(b))], True)))
                for a, b in pairwise(prompts)
                if not np.array_equal(a, b)
            )
            # The user header that follows every system prompt is shared too.
            assert (shared - len(chat.USER_HEADER)) % 2 == 1


def test_chat_sharers_overlap_in_flight(chat_trace):
    # Two sessions of one group whose first prompts come before a reply of 189 tokens at 20 ms each could be done.
    starts = {}
    close = 0
    for request in chat_trace:
        if request.extra["turn"] == 0:
            before = starts.get(request.extra["group"])
            close += before is not None and request.arrival_s - before < 3.8
            starts[request.extra["group"]] = request.arrival_s
    assert close > 100


def test_chat_twins_share_a_prompt_and_differ_in_reply(chat_trace):
    by_name = {r.request_id: r for r in chat_trace}
    twins = [r for r in chat_trace if r.request_id.endswith(".again")]
    assert len(twins) > 50
    for twin in twins:
        other = by_name[twin.request_id.removesuffix(".again")]
        assert np.array_equal(twin.token_ids, other.token_ids)
        assert 0.19 < twin.arrival_s - other.arrival_s < 1.21
        assert not np.array_equal(twin.output_ids, other.output_ids)


def test_chat_page_size_publishing_and_replies_each_move_the_ceiling(chat_trace):
    rates = {(row["published"], row["page_size"]): row["token_hit_rate"] for row in describe(chat_trace)["ceilings"]}
    assert rates["prompts", 1] - rates["prompts", 64] > 0.01
    assert rates["prompts_and_replies", 1] - rates["prompts", 1] > 0.03


# mooncake_like


@pytest.mark.parametrize("seed", range(5))
def test_mooncake_like_has_the_lru_curve_of_the_real_trace(seed):
    requests = [(r.hash_ids.tolist(), r.num_prompt_tokens) for r in load_trace("mooncake_like", seed=seed)]
    for capacity, real in REAL_LRU.items():
        assert abs(replay_lru(requests, capacity, grain=512).hit_rate - real) < 0.02


@needs_traces
@pytest.mark.trace
def test_the_lru_curve_aimed_at_is_that_of_the_real_trace():
    requests = [(r.hash_ids.tolist(), r.num_prompt_tokens) for r in load_trace(public_file("conversation_trace.jsonl"))]
    for capacity, real in REAL_LRU.items():
        assert round(replay_lru(requests, capacity, grain=512).hit_rate, 4) == real


@pytest.mark.parametrize("seed", range(5))
def test_mooncake_like_has_the_published_shape(seed):
    trace = load_trace("mooncake_like", seed=seed)
    requests = list(trace)
    lengths = [r.num_prompt_tokens for r in requests]
    uses = Counter(block for r in requests for block in r.hash_ids.tolist())
    assert trace.visible.grain == 512
    assert (trace.visible.outputs, trace.visible.sessions, trace.visible.publish_time) == ("none", False, True)
    assert len(requests) == 12_031
    assert uses[0] == 12_031
    # Published: p50 6,909, p90 27,367, mean 12,035; replies 342.6; 75.8 % of blocks used once; 3,537 s; 1,180 ticks.
    assert np.percentile(lengths, 50) == pytest.approx(6_909, rel=0.10)
    assert np.percentile(lengths, 90) == pytest.approx(27_367, rel=0.10)
    assert np.percentile(lengths, 99) == pytest.approx(85_400, rel=0.15)
    assert np.mean(lengths) == pytest.approx(12_035, rel=0.06)
    assert min(lengths) >= 891
    assert max(lengths) <= 126_195
    assert np.mean([r.num_output_tokens for r in requests]) == pytest.approx(342.6, rel=0.05)
    assert np.mean([count == 1 for count in uses.values()]) == pytest.approx(0.758, abs=0.04)
    assert requests[-1].arrival_s == pytest.approx(3_537, rel=0.05)
    assert len({r.arrival_s for r in requests}) == pytest.approx(1_180, rel=0.05)


def test_mooncake_like_ids_are_prefix_chained_and_in_order_of_first_use():
    parents, next_new = {}, 0
    for request in load_trace("mooncake_like", seed=1):
        blocks = request.hash_ids.tolist()
        assert len(blocks) == -(-request.num_prompt_tokens // 512)
        for depth, (block, parent) in enumerate(zip(blocks, [-1, *blocks], strict=False)):
            assert parents.setdefault(block, (depth, parent)) == (depth, parent)
            next_new += block == next_new
        assert max(blocks) < next_new
