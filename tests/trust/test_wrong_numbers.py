"""Places where a wrong number could hide: no requests, one page, no output, one id twice, other versions, interruptions
of the count by preemption. Each outcome is worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvarena.experiments.compare import compare
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.report import result_footer
from kvarena.experiments.results import Result, merge_results
from kvarena.experiments.verify_result import verify_tables
from support.requests import request, trace

BOTH = [{"kind": "block", "page_size": 4}, {"kind": "token", "page_size": 4}]


def compared(*requests, **fields):
    base = {"allocators": BOTH, "pool": "1 GiB", "kernel_batches": 0}
    return compare(trace(requests), **{**base, **fields})


@pytest.mark.parametrize("carry_out", [
    lambda: compared(), lambda: run_engine(run_config({}, ["pool='1 GiB'"]), source=trace([]))])  # fmt: skip
def test_a_trace_without_requests_is_an_error_and_no_table_of_nothing(carry_out):
    with pytest.raises(ValueError, match="by hand has no requests"):
        carry_out()


def test_a_pool_of_one_page_serves_prompts_of_a_page_one_after_the_other():
    """Each finds the page of the one before cached, may not use it (its last token is there), and evicts it."""
    result = compared(*(request(name, range(4)) for name in "abc"), pool=1)
    assert result.summary["num_pages"].tolist() == [1, 1]
    for column, expected in (("admitted", 3), ("hit_tokens", 0), ("evicted_pages", 2), ("refusals", 0)):
        assert result.summary[column].tolist() == [expected] * 2, column
    assert result.steps[["free", "in_use", "evictable"]].to_numpy().tolist() == [[0, 1, 0]] * 6
    assert verify_tables(result).problems == []


def test_a_prompt_of_two_pages_is_rejected_by_a_pool_of_one_and_changes_no_other():
    given = [request("a", range(4)), request("b", range(10, 18)), request("c", range(20, 23))]
    result = compared(*given, pool=1, too_long="reject")
    assert result.summary[["admitted", "rejected", "refusals"]].to_numpy().tolist() == [[2, 1, 1]] * 2
    assert result.summary["prompt_tokens"].tolist() == [7, 7]  # of those that were admitted
    assert verify_tables(result).problems == []


def test_requests_without_output_get_one_token_each_and_no_time_between_tokens():
    given = [request("a", range(9)), request("b", range(30, 31)), request("c", range(40, 49), [7, 8, 9])]
    result = run_engine(run_config({}, ["pool='1 GiB'", "steps_every=1"]), source=trace(given))
    rows = result.requests.set_index("request_id")
    assert rows["output_tokens"].to_dict() == {"a": 1, "b": 1, "c": 3}
    assert rows["tpot_ms"].isna().to_dict() == {"a": True, "b": True, "c": False}
    assert (rows["ttft_ms"] == rows["e2el_ms"]).to_dict() == {"a": True, "b": True, "c": False}
    summary = result.summary.iloc[0]
    assert summary["output_tokens"] == 5
    assert summary["tpot_mean_ms"] == rows.loc["c", "tpot_ms"]
    assert verify_tables(result).problems == []


def test_an_id_that_comes_back_is_another_request_in_every_table():
    """a: 8 new tokens. a again: its first page is cached, its last token is not asked for. a, shorter: one page."""
    result = compared(request("a", range(8)), request("a", range(8)), request("a", range(6)))
    rows = result.requests[result.requests["allocator"] == result.allocators[0]]
    assert rows["hit_tokens"].tolist() == [0, 4, 4]
    assert rows["index"].tolist() == [0, 1, 2]
    assert result.summary["token_hit_rate"].tolist() == [8 / 22] * 2
    assert verify_tables(result).problems == []
    with pytest.raises(ValueError, match="ids must be unique while requests overlap"):
        compared(request("a", range(8)), request("a", range(8)), live=2)


# --- results of other versions ---


def one(name: str, **code: object) -> Result:
    result = compared(request("a", range(8)), request("b", range(8)), allocators=[name])
    return replace(result, provenance={**result.provenance, "kvarena": {"version": "0.1.0", **code}})


def test_results_of_other_versions_are_laid_over_each_other_with_a_word():
    old, new = one("vllm", commit="a" * 40, dirty=False), one("sglang", commit="b" * 40, dirty=False)
    merged = merge_results([old, new])
    said = "made by other code, 0.1.0 at aaaaaaaaaa and 0.1.0 at bbbbbbbbbb: a difference may be one between these"
    assert said in merged.warnings[-1]
    assert result_footer(merged).endswith("made by more than one version")
    again = merge_results([merged, one("exact", commit="a" * 40, dirty=False)])
    assert result_footer(again).endswith("made by more than one version")


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ({"commit": "a" * 40, "dirty": False}, {"commit": "a" * 40, "dirty": False}, False),
        ({"commit": None, "dirty": None}, {"commit": None, "dirty": None}, False),  # installed, no checkout
        ({"commit": "a" * 40, "dirty": True}, {"commit": "a" * 40, "dirty": True}, True),
        ({"commit": "a" * 40, "dirty": False}, {"commit": "a" * 40, "dirty": True}, True),
        ({"commit": None, "version": "0.1.0"}, {"commit": None, "version": "0.2.0"}, True),
    ],
)
def test_the_same_code_is_not_mentioned(mine, theirs, said):
    merged = merge_results([one("vllm", **mine), one("sglang", **theirs)])
    assert bool(merged.manifest["other_code"]) == said
    assert ("more than one version" in result_footer(merged)) == said


def test_an_allocator_that_decided_otherwise_in_another_version_is_not_taken_twice():
    both = compared(request("a", range(8)), request("b", range(8)), allocators=["vllm", "sglang"])
    other = one("vllm")
    edited = replace(other, summary=other.summary.assign(hit_tokens=1))
    with pytest.raises(ValueError, match=r"has other numbers in the two results \(hit_tokens\): they were made by"):
        merge_results([edited, both])
