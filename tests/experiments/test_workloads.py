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
from support.traces import common_prefix, needs_traces, public_file

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


# generators with other people's parameters


def test_generated_shared_prefix_does_what_the_parameters_say():
    trace = workloads.make(
        "generated_shared_prefix",
        gsp_num_groups=5,
        gsp_prompts_per_group=7,
        gsp_system_prompt_len=100,
        gsp_question_len=11,
        gsp_output_len=13,
        gsp_num_turns=3,
    )
    requests = list(trace)
    assert len(requests) == 5 * 7 * 3
    assert {r.num_prompt_tokens for r in requests} == {111, 135, 159}
    assert {r.num_output_tokens for r in requests} == {13}
    assert set(Counter(r.extra["group"] for r in requests).values()) == {21}
    heads = {(r.extra["group"], r.token_ids[:100].tobytes()) for r in requests}
    assert len(heads) == 5
    assert trace.visible.outputs == "recorded"
    assert workloads.make("generated_shared_prefix", gsp_num_groups=5).visible.outputs == "unreachable"


def test_generated_shared_prefix_ranges_and_zipf():
    ranged = list(workloads.make("generated_shared_prefix", gsp_range_ratio=0.5))
    assert {r.num_prompt_tokens - 1024 >= 64 for r in ranged} == {True}
    assert len({r.num_prompt_tokens for r in ranged}) > 100
    skewed = workloads.make("generated_shared_prefix", gsp_group_distribution="zipf", gsp_zipf_alpha=1.5)
    sizes = Counter(r.extra["group"] for r in skewed)
    assert sum(sizes.values()) == 64 * 16
    assert sizes[0] > 5 * 16
    with pytest.raises(ValueError, match="gsp_group_distribution: expected uniform or zipf, found 'x'"):
        workloads.make("generated_shared_prefix", gsp_group_distribution="x")


def test_prefix_repetition_does_what_the_parameters_say():
    trace = workloads.make(
        "prefix_repetition",
        num_prompts=103,
        prefix_repetition_num_prefixes=10,
        prefix_repetition_prefix_len=50,
        prefix_repetition_suffix_len=20,
        prefix_repetition_output_len=7,
    )
    requests = list(trace)
    assert len(requests) == 100
    assert {(r.num_prompt_tokens, r.num_output_tokens) for r in requests} == {(70, 7)}
    assert len({r.token_ids[:50].tobytes() for r in requests}) == 10
    assert len({r.token_ids[50:].tobytes() for r in requests}) == 100
    own = next(row for row in describe(trace)["ceilings"] if row["page_size"] == 1)
    assert own["token_hit_rate"] == pytest.approx(90 * 50 / (100 * 70), abs=2e-3)


# the others


def test_agents_grow_by_reply_and_result_and_wait_for_sub_agents():
    trace = workloads.make("agents", num_sessions=30, subagent_share=0.3)
    by_session = {}
    for request in trace:
        by_session.setdefault(request.session_id, []).append(request)
    subs = [name for name in by_session if "/sub" in name]
    assert len(subs) >= 3
    for requests in by_session.values():
        for before, after in pairwise(requests):
            said = np.concatenate([before.token_ids, before.output_ids])
            assert np.array_equal(after.token_ids[: len(said)], said)
            assert len(after.token_ids) > len(said)
    for name in subs:
        parent, step = name.split("/")[0].rsplit(".", 1)
        later = [r for r in by_session[parent] if r.extra["step"] > int(step)]
        last = by_session[name][-1]
        if later:
            assert later[0].arrival_s >= last.arrival_s
            assert last.output_ids.tobytes() in later[0].token_ids.tobytes()


def test_few_shot_prompts_share_by_the_smaller_number_of_examples():
    requests = list(workloads.make("few_shot", num_requests=300))
    by_task = {}
    for request in requests:
        by_task.setdefault(request.extra["task"], []).append(request)
    for members in by_task.values():
        for one, other in pairwise(members):
            few, many = sorted((one, other), key=lambda r: r.extra["shots"])
            same = few.extra["shots"] == many.extra["shots"]
            shared = common_prefix(few.token_ids.tolist(), many.token_ids.tolist())
            assert shared >= 61
            assert same or shared < few.num_prompt_tokens


def test_tree_of_thought_siblings_are_in_flight_at_once_behind_one_prompt():
    requests = list(workloads.make("tree_of_thought", num_problems=3, depth=3, branches=4, beam=2))
    assert len(requests) == 3 * (4 + 8 + 8)
    groups = {}
    for r in requests:
        groups.setdefault((r.session_id, r.extra["level"]), []).append(r)
    for (session, level), members in groups.items():
        assert len({r.arrival_s for r in members}) == 1
        assert {Counter(r.token_ids.tobytes() for r in members)[m.token_ids.tobytes()] for m in members} == {4}
        if level:
            parents = [np.concatenate([p.token_ids, p.output_ids]).tobytes() for p in groups[session, level - 1]]
            assert all(r.token_ids.tobytes() in parents for r in members)


def test_long_document_questions_share_the_document_and_come_apart():
    requests = list(workloads.make("long_document_qa", num_documents=20))
    by_document = {}
    for r in requests:
        by_document.setdefault(r.extra["document"], []).append(r)
    assert len(by_document) == 20
    for members in by_document.values():
        for one, other in pairwise(members):
            shared = common_prefix(one.token_ids.tolist(), other.token_ids.tolist())
            assert shared > 0.9 * one.num_prompt_tokens or one.num_prompt_tokens < 2000
    gaps = [b.arrival_s - a.arrival_s for members in by_document.values() for a, b in pairwise(members)]
    assert np.mean(gaps) > 30


@pytest.mark.parametrize("seed", range(3))
def test_no_reuse_prompts_share_no_first_token(seed):
    trace = workloads.make("no_reuse", seed=seed, num_requests=500)
    assert len({int(r.token_ids[0]) for r in trace}) == 500
    assert describe(trace)["reuse"]["requests_that_share"] == 0


# the requested hit rate


@pytest.mark.parametrize("target", [0.0, 0.01, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize(("seed", "page_size"), [(0, 1), (1, 16), (2, 64)])
def test_the_requested_hit_rate_is_met_within_a_point(target, seed, page_size):
    trace = workloads.make("hit_rate", seed=seed, token_hit_rate=target, page_size=page_size)
    requests = [r.token_ids.tolist() for r in trace]
    # An oracle apart from the tree that the workload uses: whole pages of all prefixes in a set.
    seen, hits, total = set(), 0, 0
    for prompt in requests:
        keys = chained(prompt, page_size)
        hits += sum(key in seen for key in keys[: (len(prompt) - 1) // page_size]) * page_size
        seen.update(keys)
        total += len(prompt)
    assert abs(hits / total - target) < 0.01
    assert trace.source["measured_token_hit_rate"] == pytest.approx(hits / total, abs=1e-12)


def chained(prompt, page_size):
    """One key for each whole page, equal exactly when it and all before it are equal (tuples, no hashing of ours)."""
    keys, parent = [], 0
    for start in range(0, len(prompt) - page_size + 1, page_size):
        parent = hash((parent, tuple(prompt[start : start + page_size])))
        keys.append(parent)
    return keys


def test_the_requested_rate_holds_early_and_late():
    trace = workloads.make("hit_rate", token_hit_rate=0.6)
    rates = describe(trace)["ceilings"]
    own = next(row for row in rates if row["page_size"] == 16)
    assert own["token_hit_rate"] == pytest.approx(0.6, abs=0.01)
    assert own["token_hit_rate_last_half"] == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize(
    "parameters",
    [{"token_hit_rate": 0.99, "num_requests": 5}, {"token_hit_rate": 0.5, "page_size": 4096}, {"token_hit_rate": 1.0}],
)
def test_a_rate_that_cannot_be_met_is_refused(parameters):
    with pytest.raises(ValueError, match=r"token_hit_rate: expected a target that .* can meet"):
        workloads.make("hit_rate", **parameters)
