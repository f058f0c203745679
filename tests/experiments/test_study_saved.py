"""The saved study: both designs are the reference's LRU where only eviction is left, and all reasons add up."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.explain import REASONS
from kvarena.experiments.results import finished_folder
from kvarena.experiments.study import explain_sweep, load_reasons, study_page
from kvarena.experiments.sweep import sweep
from support.small import OPTIONS
from typer.testing import CliRunner

REPO = Path(__file__).resolve().parents[2]
# Public tables: LRU that releases a request's blocks in reverse, capacity in ids -> hit ids of all ids.
PUBLIC = {
    "mooncake-conversation": {1828: 0.0525, 9140: 0.1958, 18279: 0.2789, 45698: 0.3535, 91395: 0.3631, 182790: 0.3664},
    "mooncake-synthetic": {439: 0.0381, 2196: 0.1566, 4392: 0.2623, 10981: 0.4441, 21962: 0.5888, 43924: 0.6396},
}


@pytest.fixture(scope="module")
def saved() -> pd.DataFrame:
    return load_reasons(REPO / "results" / "study" / "reasons.csv")


def test_at_an_id_a_page_both_designs_have_the_public_rates(saved):
    ids = saved[saved["unit"] == "ids"]
    wide = ids.pivot_table(index=["trace", "num_pages"], columns="allocator", values="token_hit_rate")
    assert (wide["block"] == wide["token"]).all()
    assert len(wide) == 16
    for trace, rates in PUBLIC.items():
        assert wide.loc[trace]["block"].round(4)[list(rates)].to_dict() == rates


def test_every_cell_of_the_study_is_there_and_its_reasons_add_up(saved):
    assert (saved["hit_tokens"] + saved[list(REASONS)].sum(axis=1) == saved["prompt_tokens"]).all()
    assert saved.groupby("cell")["pool_bytes"].nunique().tolist() == [8] * 9
    pages = saved[saved["live"] == 8].groupby("trace")["page_size"].unique()
    assert {tuple(sorted(sizes)) for sizes in pages} == {(1, 16, 64)}
    assert set(pages.index) == {"chat", "recording", "lmcache-miniswe", "lmcache-taubench", "lmcache-magagent"}


def test_a_sweep_is_explained_whole_and_shown_again(tmp_path):
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": ["300 MiB", "450 MiB"]}}
    sweep({**base, "engine": {"too_long": "reject"}, "sweep": {"live": [1, 3]}}, tmp_path / "s", jobs=1)
    runner = CliRunner()
    done = runner.invoke(app, ["explain", str(tmp_path / "s"), "--out", str(tmp_path / "r.csv"), "--quiet"])
    assert done.exit_code == 0, done.output
    assert "8 cells, every request adds up" in done.output
    table = load_reasons(tmp_path / "r.csv")
    pd.testing.assert_frame_equal(table, explain_sweep(tmp_path / "s"), check_dtype=False)
    done = runner.invoke(app, ["explain", "--saved", str(tmp_path / "r.csv"), "--out", str(tmp_path / "r.md")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.md").read_text() == study_page(table)
    for arguments, message in (
        ([str(tmp_path / "s"), "--request", "s0.t0"], "a sweep is explained whole"),
        (["--saved", str(tmp_path / "r.csv"), "--pool", "1 GiB"], "no other option goes with it"),
        (["--saved", str(tmp_path / "r.md")], "cannot be read as the reasons of a sweep"),
    ):
        done = runner.invoke(app, ["explain", *arguments])
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)


def test_a_sweep_whose_result_was_changed_is_noticed(tmp_path):
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}
    made = sweep({**base, "sweep": {"live": [1]}}, tmp_path / "s", jobs=1)
    key = made.cells[0]["key"]
    result = made.result(key)
    result.requests.loc[5, "hit_tokens"] += 1
    with finished_folder(tmp_path / "s" / "cells" / key) as partial:
        result._write_tables(partial)
    with pytest.raises(ValueError, match="does not come out again"):
        explain_sweep(tmp_path / "s")


def test_the_cost_of_the_study_is_stated_and_within_what_was_asked():
    cost = json.loads((REPO / "results" / "study" / "provenance.json").read_text())
    assert cost["sweep"]["wall_s"] < 3600
    assert cost["sweep"]["peak_memory_bytes_of_a_process"] < 4 << 30
    assert cost["explain"]["peak_memory_bytes"] < 4 << 30
