"""The tree that never forgets, against comparing every pair of prompts."""

from __future__ import annotations

import numpy as np
import pytest
from kvarena.allocators.config import make_allocator
from kvarena.experiments.ceilings import PrefixTree, ceiling_tokens, ceilings, measure_reuse
from kvarena.experiments.config import EngineConfig
from kvarena.experiments.replay import Replay
from kvarena.experiments.traces.base import Request
from kvarena.experiments.workloads import make
from support.requests import request


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_and_distinct_ids_match_brute_force(seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 3, rng.integers(1, 12)).astype(np.int32) for _ in range(40)]
    tree, prefixes = PrefixTree(), set()
    for index, prompt in enumerate(prompts):
        known, source = tree.add(prompt, index)
        assert known == max((common(prompt, other) for other in prompts[:index]), default=0)
        assert (source >= 0) == (known > 0)
        if known:
            assert common(prompts[source], prompt) >= known
            assert all(common(other, prompt) < known for other in prompts[:source])
        prefixes |= {tuple(prompt[: n + 1]) for n in range(len(prompt))}
        assert tree.num_ids == len(prefixes)


@pytest.mark.parametrize("seed", range(20))
def test_texts_that_grow_step_by_step_are_known_as_if_each_step_were_compared_with_all(seed):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 2, 12).astype(np.int32) for _ in range(6)]
    tree, seen = PrefixTree(), []
    for _ in range(60):
        user = int(rng.integers(len(texts)))
        step = texts[user][: int(rng.integers(1, 13))]
        known, source = tree.add(step, user)
        assert known == max((common(step, other) for other, _ in seen), default=0)
        assert source == next((who for other, who in seen if known and common(step, other) >= known), -1)
        seen.append((step, user))


def test_a_text_that_grows_step_by_step_stays_one_edge():
    tree, text = PrefixTree(), np.arange(50, dtype=np.int32)
    for end in range(1, 51):
        tree.add(text[:end], 7)
    assert [node.ids for node in tree._roots[None].children.values()] == [text.tobytes()]
    assert tree.num_ids == 50


def test_namespaces_are_apart():
    reuse = measure_reuse([request("a", [1, 2]), request("b", [1, 2], namespace="x"), request("c", [1, 2])])
    assert reuse.prefix_tokens == [0, 0, 2]
    assert reuse.distinct_tokens == 4


def test_replies_count_but_their_last_token():
    rows = [request("a", [1, 2], [3, 4, 5]), request("b", [1, 2, 3, 4, 5, 6])]
    assert measure_reuse(rows).prefix_tokens == [0, 2]
    assert measure_reuse(rows, replies=True).prefix_tokens == [0, 4]


@pytest.mark.parametrize("seed", range(10))
def test_an_id_that_is_cut_off_in_one_prompt_and_longer_in_another_serves_what_both_have(seed):
    rng = np.random.default_rng(seed)
    made = []
    for index in range(30):
        chain = int(rng.integers(3))
        num_ids = int(rng.integers(1, 5))
        ids = np.arange(num_ids, dtype=np.int32) + 10 * chain
        lengths = {"num_prompt_tokens": num_ids * 8 - int(rng.integers(8)), "num_output_tokens": 1}
        made.append(
            Request(f"r{index}", float(index), **lengths, hash_ids=ids, grain=8, namespace=int(rng.integers(2)))
        )
    expected = [
        max(
            (common(a.prompt_ids(), b.prompt_ids()) for b in made[:i] if b.namespace == a.namespace),
            default=0,
        )
        for i, a in enumerate(made)
    ]
    assert measure_reuse(made).prefix_tokens == expected


def test_a_hashed_trace_is_counted_in_tokens():
    def hashed(name, ids, tokens):
        return Request(name, 0.0, tokens, 1, grain=4, hash_ids=np.asarray(ids, np.int32))

    rows = [hashed("a", [0, 1, 2], 10), hashed("b", [0, 1, 3], 12), hashed("c", [0, 1, 2], 10)]
    reuse = measure_reuse(rows)
    assert reuse.prefix_tokens == [0, 8, 10]
    assert reuse.distinct_tokens == 16


@pytest.mark.parametrize(
    ("prefix", "prompt", "size", "rule", "expected"),
    [
        (1003, 2000, 16, True, 992),
        (32, 32, 16, True, 16),
        (32, 32, 1, True, 31),
        (32, 32, 16, False, 32),
        (0, 5, 1, True, 0),
    ],
)
def test_ceilings_by_hand(prefix, prompt, size, rule, expected):
    assert ceiling_tokens(prefix, prompt, size, rule) == expected


@pytest.mark.parametrize(("kind", "size"), [("block", 1), ("block", 16), ("token", 1), ("token", 16)])
@pytest.mark.parametrize("outputs", ["none", "replay"])
def test_a_pool_that_never_evicts_hits_exactly_the_ceiling(kind, size, outputs):
    requests = list(make("chat", num_sessions=12, num_system_prompts=3, max_message=80, max_reply=80))
    lane = Replay(
        make_allocator({"kind": kind, "page_size": size}, num_pages=200_000 // size), EngineConfig(outputs=outputs)
    ).run(requests)
    reuse = measure_reuse(requests, replies=outputs == "replay")
    expected = ceilings(reuse, [r.num_prompt_tokens for r in requests], size, True)
    assert [row.hit_tokens for row in lane.requests] == expected
    assert sum(row.evicted_pages for row in lane.requests) == 0
