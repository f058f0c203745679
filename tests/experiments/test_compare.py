"""A comparison end to end: equal bytes, paired rows, honest words about what cannot be seen."""

from __future__ import annotations

import gc
import importlib.util
import json

import numpy as np
import pandas as pd
import pytest
from kvarena.allocators.config import block, make_allocator, token
from kvarena.experiments.compare import compare
from kvarena.experiments.config import ConfigError
from kvarena.experiments.specs import AllocatorEntry
from kvarena.experiments.why import FACTORS
from kvarena.prefix import radix_tree, run_tree
from support.requests import request, trace
from support.small import OPTIONS, shared, small
from support.third_party import StackAllocator


def test_every_cell_is_there_once_and_rows_are_paired():
    result = shared()
    assert len(result.summary) == 2 * 2 * 2
    assert not result.summary.duplicated(["seed", "pool_bytes", "allocator"]).any()
    for _, cell in result.requests.groupby(["seed", "pool_bytes"]):
        a, b = (rows.reset_index(drop=True) for _, rows in cell.groupby("allocator"))
        assert list(a["request_id"]) == list(b["request_id"])
        assert (a["prefix_tokens"] == b["prefix_tokens"]).all()


def test_summary_is_what_the_rows_add_up_to():
    result = shared()
    for _, row in result.summary.iterrows():
        rows = result.requests
        for key in ("seed", "pool_bytes", "allocator"):
            rows = rows[rows[key] == row[key]]
        assert row["token_hit_rate"] == rows["hit_tokens"].sum() / rows["num_prompt_tokens"].sum()
        assert row["evicted_pages"] == rows["evicted_pages"].sum()
        assert (rows["hit_tokens"] <= rows["ceiling_tokens"]).all()


def test_an_allocator_is_gone_before_the_next_cell_builds_one(monkeypatch):
    build, alive = AllocatorEntry.build, []

    def counted(entry, num_pages):
        alive.append(sum(isinstance(one, radix_tree.Node | run_tree.Node) for one in gc.get_objects()))
        return build(entry, num_pages)

    monkeypatch.setattr(AllocatorEntry, "build", counted)
    gc.collect()
    small(allocators=["vllm", "sglang"])
    assert alive[1:] == [alive[0]] * 3


def test_pages_are_conserved_on_every_step():
    steps = shared().steps.merge(shared().summary[["seed", "pool_bytes", "allocator", "num_pages"]])
    assert (steps["free"] + steps["evictable"] + steps["in_use"] == steps["num_pages"]).all()


def test_both_designs_get_the_same_bytes_and_the_budget_adds_up():
    budgets = pd.DataFrame(shared().manifest["budgets"])
    parts = ["kv_bytes", "padding_page_bytes", "table_bytes", "slot_mapping_bytes", "unused_bytes"]
    assert (budgets[parts].sum(axis=1) == budgets["pool_bytes"]).all()
    assert (budgets.groupby(["seed", "pool_bytes"])["allocator"].nunique() == 2).all()


def test_the_default_sweep_has_eight_sizes_up_to_the_working_set():
    result = small(pool="sweep")
    assert len(result.pools) == 8
    assert result.pools[-1] >= max(result.manifest["working_set_bytes"].values())
    at_most = result.summary[result.summary["pool_bytes"] == result.pools[-1]]
    assert np.allclose(at_most["token_hit_rate"], at_most["token_hit_rate_ceiling"])


def test_pool_sizes_as_bytes_shares_and_a_list():
    result = small(pool=["1 GiB", "90 %", "1024 MiB"])
    assert len(result.pools) == 2
    assert 2**30 in result.pools


def test_a_page_count_needs_one_page_size():
    with pytest.raises(ConfigError, match=r"page count \(4096\) .* found 1, 16; give bytes"):
        small(pool=4096)
    result = small(pool=600, allocators=[block(), token(page_size=16)])
    assert set(result.summary["num_pages"]) == {600}


def test_a_request_longer_than_the_pool_stops_everything_before_it_starts(tmp_path):
    with pytest.raises(ValueError, match=r"request .* needs \d+ pages .* has \d+; give a larger pool"):
        small(pool="16 MiB", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.iterdir())


def test_requests_that_do_not_fit_are_counted_where_the_config_says_so():
    result = small(pool="100 MiB", too_long="reject")
    assert (result.summary["rejected"] > 0).all()
    assert (result.summary["admitted"] + result.summary["rejected"] == result.summary["requests"]).all()


def test_seeds_are_runs_of_their_own():
    result = shared()
    a, b = (rows["token_hit_rate"].tolist() for _, rows in result.summary.groupby("seed"))
    assert a != b
    again = small(seeds=[1], live=4, outputs="replay", pool=[f"{size} B" for size in result.pools])
    assert again.summary["token_hit_rate"].tolist() == b


def test_a_trace_without_randomness_runs_once_and_says_so():
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 9]]
    result = compare(rows, pool=64, allocators=["sglang"], seeds=5, kernel_batches=0)
    assert result.summary["seed"].tolist() == [0]
    assert any("1 run in place of 5" in text for text in result.warnings)


@pytest.mark.parametrize("form", ["lists", "frame", "trace", "file"])
def test_a_trace_may_be_lists_a_dataframe_a_trace_or_a_file(form, tmp_path):
    prompts = [list(range(40)), list(range(40)), [7, 8, 9]]
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps({"token_ids": p, "output_length": 1}) + "\n" for p in prompts))
    given = {
        "lists": prompts,
        "frame": pd.DataFrame({"token_ids": prompts, "output_length": 1}),
        "trace": trace([request(f"r{i}", p, [1]) for i, p in enumerate(prompts)]),
        "file": path,
    }[form]
    result = compare(given, pool="1 GiB", kernel_batches=0)
    hits = {name: rows["hit_tokens"].tolist() for name, rows in result.requests.groupby("allocator")}
    assert hits == {"vllm": [0, 32, 0], "sglang": [0, 39, 0]}
    assert [item["name"] for item in result.provenance["inputs"]] == (["tokens.jsonl"] if form == "file" else [])


def test_a_class_and_an_instance_of_one_s_own_stand_beside_the_designs():
    result = small(allocators=["vllm", StackAllocator])
    assert result.allocators == ["vllm", "StackAllocator"]
    assert (result.summary.loc[result.summary["allocator"] == "StackAllocator", "token_hit_rate"] == 0).all()
    own = make_allocator("vllm", num_pages=700)
    result = small(allocators=[own, "vllm"], pool=700)
    a, b = (rows["hit_tokens"].tolist() for _, rows in result.requests.groupby("allocator", sort=False))
    assert a == b
    with pytest.raises(ValueError, match="has 700 pages, the pool 701"):
        small(allocators=[own], pool=701)


@pytest.mark.parametrize("one", ["sglang", {"kind": "token"}, token(), StackAllocator, StackAllocator(64)])
def test_one_allocator_needs_no_list(one):
    assert len(compare([[1, 2, 3]], allocators=one, pool=64, kernel_batches=0).allocators) == 1


def test_a_config_of_another_type_is_refused():
    with pytest.raises(ValueError, match="config: expected a Config or the path of a TOML file, found 3"):
        compare([[1]], config=3)


def test_the_same_config_gives_the_same_tables():
    again = small(seeds=2, live=4, outputs="replay")
    for name in ("requests", "steps", "summary"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(shared(), name))
    assert again.manifest == shared().manifest


def test_ids_replay_one_token_an_id():
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]} for _ in range(2)]
    result = compare(
        rows, format="mooncake", unit="ids", allocators=[block(page_size=1), token()], pool=8, kernel_batches=0
    )
    assert result.requests["num_prompt_tokens"].tolist() == [2, 2, 2, 2]
    assert result.manifest["bytes_per_token"] == 512 * 128 * 1024
    with pytest.raises(ConfigError, match="'ids' needs a trace with hash ids"):
        small(unit="ids")


def test_replies_of_a_hashed_trace_cannot_be_replayed():
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}]
    with pytest.raises(ConfigError, match=r"one id of .* stands for 512 tokens"):
        compare(rows, format="mooncake", outputs="replay", kernel_batches=0)


# --- what cannot be seen ---


def test_what_a_trace_cannot_show_is_said():
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]} for _ in range(2)]
    result = compare(rows, format="mooncake", pool="4 GiB", kernel_batches=0)
    said = " ".join(result.warnings)
    assert "page rounding below 512 tokens is not observable here" in said
    assert "generated tokens are not observable here" in said
    assert "publishing time is not observable here" in said
    assert result.why().loc["rounding", "note"] != ""
    assert result.visible["grain"] == 512


def test_a_trace_that_shows_everything_has_no_such_warning():
    assert not any("not observable" in text for text in shared().warnings)


def test_why_adds_up_exactly():
    result = shared()
    for pool in result.pools:
        table = result.why(pool=pool)
        assert list(table.index) == list(FACTORS)
        for name in result.allocators:
            assert table[name].sum() == pytest.approx(1, abs=1e-12)
        assert table["sglang - vllm"].sum() == pytest.approx(0, abs=1e-12)
        rates = result.requests[result.requests["pool_bytes"] == pool].groupby("allocator")
        for name, rows in rates:
            assert table.loc["hit", name] == pytest.approx(rows["hit_tokens"].sum() / rows["num_prompt_tokens"].sum())


def test_why_refuses_what_it_cannot_split():
    with pytest.raises(ValueError, match="expected 'token_hit_rate', found 'ttft'"):
        shared().why("ttft")
    with pytest.raises(ValueError, match="pool: expected one of"):
        shared().why(pool=1)


# --- the first difference ---


def test_the_first_difference_by_rounding():
    rows = [request("a", range(40)), request("b", [*range(39), 99, 98])]
    result = compare(trace(rows), pool="1 GiB", kernel_batches=0)
    found = result.first_divergence()
    assert (found.request_id, found.index, found.prefix_tokens, found.source) == ("b", 1, 39, "a")
    assert [(side.allocator, side.hit_tokens) for side in found.sides] == [("vllm", 32), ("sglang", 39)]
    assert "7 tokens do not fill a page of 16" in str(found)


def test_the_first_difference_by_eviction_names_the_page_and_who_took_its_room():
    # Three pages of four tokens. "x" pushes a out; the token design takes the whole leaf, the block design one page.
    rows = [request("a", range(8)), request("x", range(100, 108)), request("b", [*range(8), 50])]
    result = compare(
        trace(rows), allocators=[block(page_size=4), token(page_size=4, demand_slack=0)], pool=3, kernel_batches=0
    )
    found = result.first_divergence()
    assert found.request_id == "b"
    hits = {side.allocator.split("-")[0]: side for side in found.sides}
    assert (hits["block"].hit_tokens, hits["token"].hit_tokens) == (4, 0)
    assert hits["block"].evidence == "page 2 with tokens 4 and on, last used by a, was evicted to make room for x"
    assert "last used by a, was evicted to make room for x" in hits["token"].evidence
    assert "evicted to make room for x" in str(found)


def test_no_difference_is_none():
    result = compare(trace([request("a", range(32)), request("b", range(100, 132))]), pool="1 GiB", kernel_batches=0)
    assert result.first_divergence() is None


def test_any_pair_and_pool_can_be_asked():
    result = shared()
    found = result.first_divergence("sglang", "vllm", pool=result.pools[0])
    assert [side.allocator for side in found.sides] == ["sglang", "vllm"]
    with pytest.raises(ValueError, match="'lmcache' is not in this result"):
        result.first_divergence("lmcache")


# --- the kernels ---


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_batches_of_the_replay_agree_in_the_real_kernels():
    rows = [request("a", range(21)), request("b", [*range(18), 77, 78, 79]), request("c", range(200, 219))]
    result = compare(trace(rows), pool="1 GiB", live=2, kernel_batches=1)
    report = result.manifest["kernel_check"]
    assert report["status"] == "agreed"
    assert report["samples"] == 1
    assert {row["label"] for row in report["comparisons"]} == {"vllm", "sglang"}


def test_without_batches_the_report_says_why():
    assert shared().manifest["kernel_check"] == {"status": "not run", "reason": "kernel_batches = 0"}


def test_options_reach_the_workload_and_a_wrong_one_is_named():
    assert len(small(options={**OPTIONS, "num_sessions": 3}).requests) < len(small().requests)
    with pytest.raises(ValueError, match="num_sesions"):
        small(options={"num_sesions": 3})
