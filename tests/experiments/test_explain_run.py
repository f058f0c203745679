"""Engine runs are explained too: every prompt token of every first admission, re-admissions apart, all adding up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from kvarena.allocators.config import block, token
from kvarena.allocators.interface import AllocatorError
from kvarena.allocators.interface import Sequence as KVSequence
from kvarena.experiments.bounds import bounds, plot_bounds
from kvarena.experiments.cli import app
from kvarena.experiments.compare import compare
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.explain import REASONS, explain, summarise
from kvarena.experiments.explain_run import RunLedger, as_run
from kvarena.experiments.ledger import WatchedAllocator
from kvarena.experiments.page_names import name_pages
from kvarena.experiments.results import Result, finished_folder
from kvarena.experiments.specs import allocator_entry
from support.requests import request
from typer.testing import CliRunner

CHAT = {"trace": "chat", "options": {"num_sessions": 7, "max_message": 120, "max_reply": 120}}
ENGINE = {"speed": 60.0, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1500, "steps_every": 50}


def ran(workload: dict[str, Any] | None = None, allocator: dict[str, Any] | None = None, **engine: Any) -> Result:
    pool = engine.pop("pool", "260 MiB")
    config = {"workload": workload or CHAT, "pool": {"pool": pool}, "engine": {**ENGINE, **engine}}
    return run_engine(run_config({**config, "allocator": allocator or {"kind": "block", "page_size": 16}}))


def assert_adds_up(result: Result, found: Any) -> None:
    """First admissions cover their prompts, later ones what they had to have, span by span and in the sums."""
    for table in (found.table, found.readmitted):
        assert (table["hit_tokens"] + table[list(REASONS)].sum(axis=1) == table["num_prompt_tokens"]).all()
    rows = result.requests
    admitted = found.table[found.table["admitted"]]
    assert admitted["hit_tokens"].tolist() == rows.loc[rows["admitted"], "hit_tokens"].tolist()
    assert found.table["num_prompt_tokens"].tolist() == rows["num_prompt_tokens"].tolist()
    assert len(found.readmitted) == rows["readmissions"].sum()
    for row, own in zip(found.table.itertuples(), found.spans, strict=True):
        covered = [at for span in own for at in range(span.start, span.end)]
        assert covered == list(range(row.hit_tokens if row.admitted else 0, row.num_prompt_tokens))


@pytest.mark.parametrize("scheduler", ["vllm", "sglang"])
@pytest.mark.parametrize("design", [("block", 16), ("block", 1), ("token", 1), ("token", 16)], ids=str)
@pytest.mark.parametrize("engine", [{}, {"result_lag": 1, "order": "lpm"}, {"clock": "fixed"}], ids=str)
def test_reasons_of_a_run_add_up_for_every_request(scheduler, design, engine):
    result = ran(allocator={"kind": design[0], "page_size": design[1]}, scheduler=scheduler, **engine)
    (found,) = explain(result)
    assert_adds_up(result, found)
    assert found.table["first_seen"].sum() > 0
    assert found.table["refused"].sum() == result.requests.loc[~result.requests["admitted"], "num_prompt_tokens"].sum()


def test_the_run_has_what_the_reasons_are_about():
    result = ran()
    (found,) = explain(result)
    totals = found.table[list(REASONS)].sum()
    assert totals["evicted"] > 0
    assert totals["rounding"] > 0
    assert totals["refused"] > 0
    assert result.requests["readmissions"].sum() > 0
    assert (found.readmitted["hit_tokens"] > 0).any()
    text = found.tell(found.readmitted["request_id"].iloc[0])
    assert any(line == "admission 2, after a preemption (apart from all hit rates)" for line in text)


@pytest.mark.parametrize("tier", [{"host_cache": "200 MiB"}, {"host_pool": "200 MiB"}], ids=str)
@pytest.mark.parametrize("kind", ["block", "token"])
def test_a_host_tier_is_a_reason_of_its_own_and_the_rest_still_adds_up(tier, kind):
    result = ran(allocator={"kind": kind, "page_size": 16}, **tier)
    (found,) = explain(result)
    assert_adds_up(result, found)
    rows = result.requests
    assert found.table["host"].sum() == rows.loc[rows["admitted"], "host_hit_tokens"].sum()
    assert (found.table["host"].sum() > 0) == ("host_cache" in tier)


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_outputs_without_ids_and_ids_of_many_tokens_are_explained(page_size):
    options = {"num_requests": 30, "max_prompt": 3000, "openings_per_s": 3.0}
    allocator = {"kind": "block", "page_size": page_size}
    result = ran({"trace": "mooncake_like", "options": options}, allocator, pool="700 MiB", max_model_len=4000)
    (found,) = explain(result)
    assert_adds_up(result, found)
    assert result.visible["grain"] > 1


def test_a_replay_with_replies_of_ids_of_many_tokens_is_explained():
    options = {"num_requests": 30, "max_prompt": 3000, "openings_per_s": 3.0}
    fields: dict[str, Any] = {"replies": "unreachable", "outputs": "replay", "live": 3, "kernel_batches": 0}
    result = compare("mooncake_like", options=options, pool="900 MiB", too_long="reject", **fields)
    for found in explain(result):
        assert (found.table["hit_tokens"] + found.table[list(REASONS)].sum(axis=1)).sum() == sum(
            found.table["num_prompt_tokens"]
        )


def test_a_burst_on_one_prompt_says_that_the_prompt_was_being_computed():
    """Two requests in one look-up round: the second finds nothing written, and the first has it all in its prompt."""
    rows = [request("a", range(40), [1] * 3), request("b", [*range(32), 7, 8], [2] * 3)]
    for design in (block(page_size=4), token(page_size=4)):
        entry = allocator_entry(design)
        names = name_pages(as_run(rows), 4, replies=True)
        ledger = RunLedger(names, 64, entry, rows)
        watched = WatchedAllocator(entry.build(64), ledger)
        a, b = (KVSequence(r.request_id, r.prompt_ids()) for r in rows)
        watched.pin(a)
        assert watched.reserve([(a, 8)]) is not None  # a chunk of it
        watched.commit([(a, 8)])
        watched.pin(b)
        assert watched.reserve([(b, 26)]) is not None
        (told,) = ledger.admissions[1]
        assert told.hit_tokens == 8
        assert [(s.start, s.end, s.reason) for s in told.spans] == [(8, 32, "in_progress"), (32, 34, "first_seen")]
        assert told.spans[0].source == 0


def test_a_look_up_that_got_no_slots_is_no_admission():
    entry = allocator_entry(block(page_size=4))
    rows = [request("a", range(20), [1] * 3), request("b", range(100, 120), [2] * 3)]
    ledger = RunLedger(name_pages(as_run(rows), 4, replies=True), 8, entry, rows)
    watched = WatchedAllocator(entry.build(8), ledger)
    a, b = (KVSequence(r.request_id, r.prompt_ids()) for r in rows)
    watched.admit(a)
    assert watched.admit(b) is None
    assert [len(found) for found in ledger.admissions] == [1, 0]


def test_a_changed_result_is_noticed():
    result = ran()
    changed = result.requests.copy()
    at = changed.index[changed["admitted"]][3]
    changed.loc[at, "hit_tokens"] += 1
    with pytest.raises(ValueError, match="does not come out again"):
        explain(replace(result, requests=changed))


def test_a_ledger_that_lost_a_token_is_noticed(monkeypatch):
    result = ran()
    whole = RunLedger._admitted

    def lossy(self, seq, found):
        whole(self, seq, found)
        found.spans = found.spans[:-1]

    monkeypatch.setattr(RunLedger, "_admitted", lossy)
    with pytest.raises(AllocatorError, match="reasons up to token"):
        explain(result)


@pytest.mark.parametrize("kind", ["block", "token"])
def test_bounds_of_a_run_are_marks_in_the_order_of_admission(kind):
    result = ran(pool=["260 MiB", "4 GiB"], allocator={"kind": kind, "page_size": 16})
    table = bounds(result).set_index("pool_bytes")
    assert not table["proven"].any()
    small, large = (table.loc[pool] for pool in result.pools)
    assert small["policy"] == pytest.approx(result.summary["token_hit_rate"].iloc[0])
    assert small["random"] < small["clairvoyant"] <= large["clairvoyant"]
    assert large["clairvoyant"] == pytest.approx(large["infinite"])
    assert small["regret"] == pytest.approx(100 * (small["clairvoyant"] - small["policy"]))


def test_marks_of_a_single_pool_can_be_seen_in_the_figure():
    result = ran()
    table = bounds(result)
    ax = plot_bounds(result, table=table)
    seen = {line.get_marker(): float(line.get_ydata()[0]) for line in ax.lines if len(line.get_xdata()) == 1}
    assert seen["2"] == pytest.approx(100 * table["clairvoyant"].iloc[0])
    assert seen["1"] == pytest.approx(100 * table["random"].iloc[0])


def test_the_commands_take_the_folder_of_a_run(tmp_path):
    folder, runner = tmp_path / "run", CliRunner()
    with finished_folder(folder) as partial:
        ran()._write_tables(partial)
    done = runner.invoke(app, ["explain", str(folder), "--quiet", "--out", str(tmp_path / "reasons.csv")])
    assert done.exit_code == 0, done.output
    assert "Where the prompt tokens of" in done.output
    assert "Apart: tokens of" in done.output
    table = pd.read_csv(tmp_path / "reasons.csv")
    assert (table["hit_tokens"] + table[list(REASONS)].sum(axis=1) == table["num_prompt_tokens"]).all()
    assert table["admission"].notna().sum() > 0
    done = runner.invoke(app, ["bounds", str(folder), "--figure", str(tmp_path / "bounds.png")])
    assert done.exit_code == 0, done.output
    assert "a mark here, not a bound" in done.output
    assert (tmp_path / "bounds.png").stat().st_size > 10_000


def test_the_sum_over_a_run_is_what_the_summary_says():
    result = ran()
    totals = summarise(explain(result))["vllm"]
    assert totals["served"] == result.summary["hit_tokens"].iloc[0]
    misses = totals.sum() - totals["served"] - totals["refused"]
    assert misses == result.summary["prompt_tokens"].iloc[0] - result.summary["hit_tokens"].iloc[0]
