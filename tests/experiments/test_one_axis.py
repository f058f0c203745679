"""The page-size axis: what is measured, what is not, and which page size is best."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from kvarena.experiments import one_axis
from kvarena.experiments.compare import compare
from kvarena.experiments.one_axis_plots import PANELS, draw_axis
from support.commands import invoke

mpl.use("Agg")

PAGES = (1, 16, 64)


@pytest.fixture(scope="module")
def study() -> one_axis.Study:
    return one_axis.study(["chat"], pages=PAGES, requests=120, rounds=1, live=4, pool="60 %")


def test_the_study_has_what_a_comparison_has(study: one_axis.Study) -> None:
    specs = [{"kind": kind, "page_size": size} for kind in one_axis.KINDS for size in PAGES]
    options = one_axis.WORKLOADS["chat"]
    settings = {"requests": 120, "pool": "60 %", "live": 4, "outputs": "replay", "options": options}
    result = compare("chat", allocators=specs, kernel_batches=0, **settings)
    assert study.rows["token_hit_rate"].tolist() == result.summary["token_hit_rate"].tolist()
    assert [study.about["pool_bytes"]["chat"]] == result.summary["pool_bytes"].unique().tolist()


def test_what_page_size_does(study: one_axis.Study) -> None:
    for _, rows in study.rows.groupby("kind"):
        rows = rows.sort_values("page_size")
        assert rows["token_hit_rate"].is_monotonic_decreasing
        assert rows["tail_tokens"].is_monotonic_increasing
        assert rows["tail_tokens"].iloc[0] == 0
        assert (rows["host_us"] > 0).all()
        assert (rows["time_us"] > rows["host_us"]).all()


def test_concurrency_pays_its_tables_and_tails() -> None:
    fits = {size: one_axis.concurrency("block", size, "llama-3-8b", "chat") for size in (1, 16, 256)}
    assert fits[16] >= fits[256]
    assert one_axis.concurrency("token", 16, "llama-3-8b", "chat") <= fits[16]


def test_the_best_page_size_is_that_of_the_least_time() -> None:
    rows = pd.DataFrame(
        [
            ("w", "block", 1, 0.5, 0, 10, 1, 9.0),
            ("w", "block", 16, 0.5, 7, 11, 1, 7.0),
            ("w", "block", 64, 0.4, 31, 11, 1, 7.0),
        ],
        columns=list(one_axis.COLUMNS),
    )
    found = one_axis.best(rows).iloc[0]
    assert (found["least_time"], found["highest_hit_rate"], found["most_requests"]) == (64, 16, 64)


def test_kernel_times_are_those_that_were_measured(tmp_path: Path) -> None:
    found = one_axis.kernel_times()
    assert {1, 16, 64} <= set(found["block"]) == set(found["token"]) <= set(one_axis.PAGES)
    assert one_axis.kernel_times(tmp_path / "none.json") == {"block": {}, "token": {}}
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bad\.json: cannot be read as kernel times"):
        one_axis.kernel_times(tmp_path / "bad.json")


def test_a_study_reloads_and_other_files_are_refused(study: one_axis.Study, tmp_path: Path) -> None:
    again = one_axis.load(one_axis.save(study, tmp_path / "s"))
    pd.testing.assert_frame_equal(again.rows, study.rows, rtol=1e-5)
    assert again.about == study.about
    assert "for every cell" in one_axis.best_table(again).caption
    (tmp_path / "s" / "pagesize.json").write_text(json.dumps({"schema_version": 9}))
    with pytest.raises(ValueError, match="cannot be read as a page-size study"):
        one_axis.load(tmp_path / "s")


def test_the_figure_marks_what_was_not_measured(study: one_axis.Study) -> None:
    figure = draw_axis(study, {"block": {1: 950.0, 16: 940.0}, "token": {}})
    kernel = figure.axes[PANELS.index("kernel")]
    missing = next(line for line in kernel.lines if line.get_label() == "not measured")
    assert list(missing.get_xdata()) == [64]
    assert list(missing.get_ydata()) == [0]  # on the axis, where no time can be read off it
    mpl.pyplot.close(figure)


def test_the_command_shows_a_saved_study(study: one_axis.Study, tmp_path: Path) -> None:
    one_axis.save(study, tmp_path / "s")
    shown = invoke("pagesize", "--saved", tmp_path / "s", "--figure", tmp_path / "f.png")
    assert "least time" in shown.stdout
    assert (tmp_path / "f.png").stat().st_size > 20_000
    with pytest.raises(ValueError, match="has no agents"):
        invoke("pagesize", "agents", "--saved", tmp_path / "s")
    with pytest.raises(ValueError, match="--saved measures nothing"):
        invoke("pagesize", "--saved", tmp_path / "s", "--out", tmp_path / "t")
