"""Bounds: nothing beats clairvoyance, it is reached, and public tables come out to the digit."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from kvarena.allocators.config import block, contiguous, token
from kvarena.experiments.bounds import POLICIES, RATES, bound_curve, bounds, plot_bounds, replay_bound
from kvarena.experiments.compare import compare
from kvarena.experiments.page_names import name_pages
from kvarena.experiments.study import bounds_table, write_table
from kvarena.experiments.traces import load_trace
from kvarena.experiments.traces.base import Request
from kvarena.experiments.verify_files import verify_bounds
from rich.console import Console
from support.lru import replay_lru
from support.plain_lru import lru_hits
from support.requests import request
from support.small import small
from support.traces import needs_traces, public_file


def prompts(seed: int, count: int = 12, branch: int = 3, longest: int = 4) -> list[Request]:
    """Short random prompts over few ids: much sharing, and prompts that end inside others."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(1, branch + 1, draw.integers(1, longest + 1)) for _ in range(count)]
    return [request(f"r{i}", [10 * depth + int(x) for depth, x in enumerate(row)]) for i, row in enumerate(rows)]


def best_by_trying(names, capacity: int) -> int:
    """Most pages of contiguous prefixes that any choice of what to keep can hit: all sets are tried."""
    starts = names.starts()
    states = {frozenset(): 0}
    for number, limit in enumerate(names.limits):
        pages = names.pages(number, starts).tolist()
        following: dict[frozenset[int], int] = {}
        for kept, score in states.items():
            found = next((at for at, page in enumerate(pages[:limit]) if page not in kept), limit)
            there = kept | set(pages)
            for chosen in combinations(sorted(there), min(capacity, len(there))):
                state = frozenset(chosen)
                following[state] = max(following.get(state, -1), score + found)
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [1, 2, 4])
@pytest.mark.parametrize("last_token_rule", [False, True])
def test_clairvoyance_is_the_best_of_all_choices(seed, capacity, last_token_rule):
    names = name_pages(prompts(seed, count=8), 1, last_token_rule=last_token_rule)
    found = replay_bound(names, capacity, "clairvoyant")
    assert sum(found.hit_pages) == found.any_hit_pages == best_by_trying(names, capacity)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_no_policy_beats_clairvoyance_and_leaves_reach_it_without_the_last_token_rule(seed, page_size):
    requests = prompts(seed, count=60, longest=12)
    for rule in (False, True):
        names = name_pages(requests, page_size, last_token_rule=rule)
        for capacity in (1, 3, 10, 30):
            totals = {policy: sum(replay_bound(names, capacity, policy).hit_pages) for policy in POLICIES}
            assert max(totals.values()) == totals["clairvoyant"]
            if not rule:
                assert totals["clairvoyant_leaf"] == totals["clairvoyant"]


def test_with_room_for_everything_all_policies_hit_the_infinite_cache():
    names = name_pages(prompts(3, count=80, longest=10), 2)
    hits = [replay_bound(names, names.num_pages, policy).hit_pages for policy in POLICIES]
    assert all(row == hits[0] for row in hits)


def test_one_page_of_room_and_one_page_prompts():
    names = name_pages([request(f"r{i}", [x, 9]) for i, x in enumerate([1, 2, 1, 2, 1])], 1)
    assert names.limits == [1] * 5
    assert replay_bound(names, 1, "clairvoyant").hit_pages == [0, 0, 1, 0, 1]
    assert sum(replay_bound(names, 1, "lru").hit_pages) == 0


@pytest.mark.parametrize("reverse", [False, True])
def test_lru_agrees_with_a_plain_one(reverse):
    requests = prompts(5, count=200, branch=4, longest=9)
    names = name_pages(requests, 1, last_token_rule=False)
    starts = names.starts()
    rows = [(names.pages(i, starts).tolist(), names.tokens[i]) for i in range(len(requests))]
    expected = replay_lru(rows, 12, grain=1, reverse=reverse)
    found = replay_bound(names, 12, "lru", reverse=reverse)
    assert (found.block_rate(names), found.token_rate(names)) == (expected.hit_rate, expected.token_rate)
    if reverse:
        assert found.hit_pages == lru_hits([np.array(pages) for pages, _ in rows], 12)


def test_pages_have_one_name_exactly_if_all_tokens_up_to_their_end_agree():
    requests = [*prompts(7, count=120, branch=2, longest=11), request("other", [1, 11, 21], namespace="x")]
    for size in (1, 2, 3):
        names = name_pages(requests, size)
        starts, texts = names.starts(), {}
        for number, r in enumerate(requests):
            ids = r.token_ids.tolist()
            for at, page in enumerate(names.pages(number, starts).tolist()):
                assert texts.setdefault(page, (r.namespace, ids[: (at + 1) * size])) == (
                    r.namespace,
                    ids[: (at + 1) * size],
                )
        assert len(texts) == len({(n, *ids) for n, ids in texts.values()}) == names.num_pages


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_hash_ids_give_the_pages_that_their_tokens_give(page_size):
    rows = [Request(f"r{i}", 0.0, n, 0, grain=8, hash_ids=np.array(ids, np.int32))
            for i, (n, ids) in enumerate([(24, [0, 1, 2]), (19, [0, 1, 3]), (24, [0, 1, 2]), (5, [4])])]  # fmt: skip
    expanded = [request(r.request_id, r.prompt_ids().tolist()) for r in rows]
    by_id, by_token = name_pages(rows, page_size), name_pages(expanded, page_size)
    assert by_id.limits == by_token.limits
    for policy in POLICIES:
        assert replay_bound(by_id, 3, policy).hit_pages == replay_bound(by_token, 3, policy).hit_pages


def test_bad_arguments_name_themselves():
    names = name_pages(prompts(0), 1)
    with pytest.raises(ValueError, match="capacity_pages: expected at least 1, found 0"):
        replay_bound(names, 0, "lru")
    with pytest.raises(ValueError, match="policy: expected one of lru, fifo"):
        replay_bound(names, 1, "belady")
    with pytest.raises(ValueError, match="page_size: expected at least 1"):
        name_pages(prompts(0), 0)
    with pytest.raises(ValueError, match="partial pages need hash ids of 4 tokens"):
        name_pages(prompts(0), 4, partial=True)


# --- beside a result ---


@cache
def pressed(**fields):
    return small(
        pool=["250 MiB", "450 MiB"],
        allocators=["vllm", "sglang", block(page_size=64), token(page_size=16)],
        too_long="reject",
        **fields,
    )


@pytest.mark.parametrize("fields", [{}, {"live": 4}, {"outputs": "replay"}, {"outputs": "replay", "live": 4}])
def test_every_allocator_stands_between_nothing_and_its_bounds(fields):
    result = pressed(**fields)
    table = bounds(result)
    assert len(table) == len(result.summary)
    assert table["proven"].tolist() == [fields.get("live", 1) == 1 or "outputs" not in fields] * len(table)
    proven = table[table["proven"]]
    assert (proven["policy"] <= proven["clairvoyant"]).all()
    assert (table["clairvoyant_leaf"] <= table["clairvoyant"]).all()
    assert (table["random"] <= table["clairvoyant"]).all()
    assert (table["clairvoyant"] <= table["infinite"] + 1e-12).all()
    assert np.allclose(table["regret"], 100 * (table["clairvoyant"] - table["policy"]))
    assert (table["regret"] > 0).any()
    merged = table.merge(result.summary, on=["seed", "pool_bytes", "allocator"])
    assert (merged["policy"] == merged["token_hit_rate"]).all()
    assert (merged["infinite"] == merged["token_hit_rate_ceiling"]).all()


def test_designs_that_share_no_prefixes_have_their_own_rate_and_no_bounds_to_regret(tmp_path):
    off = block(prefix_cache=False)
    designs = ["exact", contiguous(max_model_len=2048), off, "vllm"]
    result = small(pool="450 MiB", too_long="reject", allocators=designs)
    table = bounds(result)
    bounded = ["random", "clairvoyant_leaf", "clairvoyant", "infinite", "regret"]
    assert table.loc[:2, bounded].isna().all(axis=None)
    assert table.loc[:2, ["policy", "no_cache"]].eq(0).all(axis=None)
    assert table.loc[3, bounded].notna().all()
    write_table(table, tmp_path / "bounds.csv")
    assert verify_bounds(tmp_path / "bounds.csv", again=False).stands


def test_without_an_admitted_request_the_regret_is_blank_and_no_nan_is_printed():
    result = small(pool="20 MiB", too_long="reject")
    table = bounds(result)
    assert not result.requests["admitted"].any()
    assert table[list(RATES)].isna().all(axis=None)
    shown = Console(file=io.StringIO(), width=160)
    shown.print(bounds_table(result, table))
    assert "nan" not in shown.file.getvalue()
    ax = plot_bounds(result, table=table)
    ax.figure.canvas.draw()
    plt.close(ax.figure)


def test_no_line_of_the_bounds_looks_like_one_of_an_allocator():
    """Four designs of one kind and page: all dashes and one marker of allocators are in use."""
    result = pressed()
    entries = [{**result.manifest["allocators"][0], "name": f"same{n}", "label": f"same {n}"} for n in range(4)]
    frames = [bounds(result).query("allocator == 'vllm'").assign(allocator=each["name"]) for each in entries]
    made = replace(result, manifest={**result.manifest, "allocators": entries})
    ax = plot_bounds(made, table=pd.concat(frames))
    labels = {line.get_label(): line for line in ax.get_lines()}
    own = [labels[each["label"]] for each in entries]
    for name in ("clairvoyant", "random eviction"):
        bound = labels[name]
        assert bound.get_marker() not in {line.get_marker() for line in own}
        assert bound._unscaled_dash_pattern not in [line._unscaled_dash_pattern for line in own]
        # The one in the legend is the one that is drawn.
        drawn = [line for line in ax.get_lines() if line.get_marker() == bound.get_marker() and len(line.get_xdata())]
        assert len(drawn) == 4
        assert all(line._unscaled_dash_pattern == bound._unscaled_dash_pattern for line in drawn)
    plt.close(ax.figure)


def test_bounds_need_the_trace_when_it_was_in_memory():
    rows = [[1, 2, 3, 4], [1, 2, 3, 5]]
    result = compare(rows, pool="1 GiB", kernel_batches=0)
    with pytest.raises(ValueError, match="in memory; pass it again"):
        bounds(result)
    assert len(bounds(result, source=rows)) == 2
    with pytest.raises(ValueError, match="requests are not those of the result"):
        bounds(result, source=[*rows, [7, 8]])


def test_the_figure_draws_every_allocator_between_its_bounds():
    result = pressed()
    ax = plot_bounds(result, table=bounds(result))
    texts = [text.get_text().replace("\n", " ") for text in ax.get_legend().get_texts()]
    assert {"clairvoyant", "random eviction", "no cache", *result.labels.values()} <= set(texts)
    ylabel = ax.get_ylabel()
    plt.close(ax.get_figure())
    assert ylabel == "token hit rate (%)"
    empty = plot_bounds(result, table=pd.DataFrame(bounds(result).iloc[:0]))
    assert any(text.get_text() == "no data" for text in empty.texts)
    plt.close(empty.get_figure())


# --- the public traces (policies table and section C of the traces' reference numbers) ---

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)
WHOLE = {  # block hit rate, whole run, first-to-last touch
    "conversation": {
        "lru": (0.0445, 0.2112, 0.3257, 0.3546, 0.3637),
        "fifo": (0.0434, 0.1815, 0.2944, 0.3335, 0.3563),
        "clairvoyant": (0.1907, 0.3664, 0.3664, 0.3664, 0.3664),
    },
    "synthetic": {
        "lru": (0.0825, 0.4235, 0.6242, 0.6396, 0.6396),
        "fifo": (0.0787, 0.3989, 0.5941, 0.6396, 0.6396),
        "clairvoyant": (0.2767, 0.6180, 0.6396, 0.6396, 0.6396),
    },
}
LAST_HALF = {  # token hit rate in percent, last half: FIFO, LRU with last-to-first touch, clairvoyant
    "conversation": {
        102: (3.8, 4.54, 7.4),
        819: (4.5, 4.65, 18.0),
        6_553: (14.3, 15.30, 38.6),
        13_107: (21.6, 25.02, 39.8),
        26_214: (29.0, 33.00, 39.8),
        52_428: (34.9, 37.8, 39.8),
    },
    "synthetic": {
        102: (0.7, 1.03, 9.8),
        819: (11.0, 11.69, 33.4),
        6_553: (45.6, 48.79, 73.9),
        13_107: (63.9, 67.70, 86.3),
    },
}


@cache
def mooncake(kind: str) -> list[Request]:
    return list(load_trace(public_file(f"{kind}_trace.jsonl")))


@pytest.mark.trace
@needs_traces
@pytest.mark.parametrize("kind", WHOLE)
def test_public_table_of_policies_comes_out_whole_run(kind):
    table = bound_curve(mooncake(kind), CAPACITIES, reverse=False)
    table = table[table["measure"] == "whole"].set_index(["policy", "capacity_pages"])["block_hit_rate"]
    for policy, expected in WHOLE[kind].items():
        assert tuple(round(table[policy, capacity], 4) for capacity in CAPACITIES) == expected


@pytest.mark.trace
@needs_traces
@pytest.mark.parametrize("kind", LAST_HALF)
def test_public_table_of_policies_comes_out_last_half(kind):
    table = bound_curve(mooncake(kind), LAST_HALF[kind])
    table = table[table["measure"] == "last_half"].set_index(["policy", "capacity_pages"])["token_hit_rate"]
    for capacity, expected in LAST_HALF[kind].items():
        for policy, wanted in zip(("fifo", "lru", "clairvoyant"), expected, strict=True):
            assert 100 * table[policy, capacity] == pytest.approx(wanted, abs=0.0501)


@pytest.mark.trace
@needs_traces
@pytest.mark.parametrize("kind", WHOLE)
def test_on_the_public_traces_leaves_reach_the_bound_and_it_is_a_contiguous_prefix(kind):
    names = name_pages(mooncake(kind), 512, last_token_rule=False, partial=True)
    for capacity in (102, 819, 6_553):
        flat, leaf = (replay_bound(names, capacity, policy) for policy in ("clairvoyant", "clairvoyant_leaf"))
        assert sum(flat.hit_pages) == flat.any_hit_pages == sum(leaf.hit_pages)
