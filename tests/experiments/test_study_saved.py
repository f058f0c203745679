"""The saved study: both designs are the reference's LRU where only eviction is left, and all reasons add up."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.explain import REASONS
from kvarena.experiments.report_pages import from_rich
from kvarena.experiments.results import finished_folder
from kvarena.experiments.study import explain_sweep, load_reasons, study_page, sweep_reasons_table, write_table
from kvarena.experiments.sweep import sweep
from kvarena.experiments.sweep_points import shown, varied
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


def printed(table: pd.DataFrame) -> list[list[str]]:
    """Cells of the printed table, heads first."""
    shown = from_rich(sweep_reasons_table(table))
    return [shown.columns, *shown.rows]


SWEPT = {
    "an option and an engine field": [{"options.num_sessions": 2, "live": 1}, {"options.num_sessions": 3, "live": 2}],
    "a page size of one allocator": {"allocators.0.page_size": [16, 32]},
    "the same names with other rules": [
        {"allocators": [{"name": "a", "kind": "block", "page_size": 16}]},
        {"allocators": [{"name": "a", "kind": "block", "page_size": 32}]},
    ],
    "a field that one cell leaves out": [{"options.num_sessions": 3}, {"options.max_message": 30}],
}


@pytest.mark.parametrize("swept", SWEPT.values(), ids=SWEPT)
def test_every_row_of_an_explained_sweep_says_which_cell_it_is_of(swept, tmp_path):
    options = {**OPTIONS, "num_sessions": 3}
    base = {"workload": {"trace": "chat", "options": options, "requests": 8}, "pool": {"pool": "1 GiB"}}
    made = sweep({**base, "allocators": [{"name": "vllm"}, {"name": "sglang"}], "sweep": swept}, tmp_path / "s", jobs=1)
    table = explain_sweep(tmp_path / "s")
    heads, *rows = printed(table)
    places = [place for place, head in enumerate(heads) if "%" not in head]
    assert len({tuple(row[place] for place in places) for row in rows}) == len(rows)
    points = table.drop_duplicates("cell").set_index("cell")
    beside = made.table.drop_duplicates("cell").set_index("cell")
    varying = [name for name in beside if name.startswith("sweep.") and beside[name].nunique(dropna=False) > 1]
    assert [name for name in points if name.startswith("sweep.")] == varying
    assert varying
    write_table(table, tmp_path / "r.csv")
    text = pd.read_csv(tmp_path / "r.csv", dtype=str, keep_default_na=False).drop_duplicates("cell").set_index("cell")
    same = pd.read_csv(tmp_path / "s" / "sweep.csv", dtype=str, keep_default_na=False).drop_duplicates("cell")
    assert text[varying].equals(same.set_index("cell")[varying])
    write_table(table, tmp_path / "r.parquet")
    assert printed(load_reasons(tmp_path / "r.csv")) == printed(load_reasons(tmp_path / "r.parquet")) == [heads, *rows]
    heads_of_page = [line for line in study_page(table).splitlines() if line.startswith("**")]
    if "options.num_sessions" in str(swept):
        assert len(set(heads_of_page)) == len(made.cells)


def test_fields_that_do_not_vary_and_those_of_the_row_get_no_column_of_their_own():
    points = {"a": {"trace": "chat", "live": 1}, "b": {"trace": "agents", "live": 1}}
    assert varied(points) == {"a": {"sweep.trace": "chat"}, "b": {"sweep.trace": "agents"}}
    assert shown(pd.DataFrame([varied(points)["a"]])) == {}
    two = pd.DataFrame([{"sweep.engine.x": 1, "sweep.options.x": 2, "sweep.pool": "1 GiB"}])
    assert shown(two) == {"sweep.engine.x": "engine.x", "sweep.options.x": "options.x"}


def test_the_saved_study_is_shown_without_columns_that_it_was_not_written_with(saved):
    assert printed(saved)[0][:4] == ["trace", "pool", "allocator", "served, %"]
    assert len(printed(saved)) == 1 + 304


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
