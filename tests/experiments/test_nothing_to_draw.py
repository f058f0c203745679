"""What has nothing to draw is drawn empty and says so, and no table is lost to a figure."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from kvarena.experiments import plots, plots_rate, report
from kvarena.experiments.bounds import RATES, bounds, plot_bounds
from kvarena.experiments.engine import figures
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.partial import load_partial
from kvarena.experiments.plots_rate import draw_rate
from kvarena.experiments.rate import RateResult, knee, load_rate, rate_plan, run_rate
from kvarena.experiments.rate_tables import hits_table, knee_lines, rates_table
from kvarena.experiments.results import Result, load_result
from kvarena.experiments.verify_result import verify
from kvarena.experiments.verify_studies import verify_rate
from matplotlib.axes import Axes
from rich.console import Console
from support.small import shared

KEYS = ("seed", "pool_bytes", "allocator", "page_size", "num_pages", "index", "step", "share", "rate_per_s", "target")
PANEL_PLOTS: dict[str, Callable[..., Axes]] = {
    **plots.PLOTS,
    "allocator_time": plots.allocator_time,
    "difference": plots.difference,
    "hit_rate_by_page_size": plots.hit_rate_by_page_size,
}
RUN_PLOTS = {**PANEL_PLOTS, **figures.PLOTS, **{m: partial(figures.latency, measure=m) for m in figures.LATENCIES}}


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """A warning is a fault here: matplotlib warns where a logarithmic axis has nothing to show."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    plt.close("all")


def prompts(path: Path, count: int, outputs: int = 1) -> Path:
    """A trace of distinct prompts of 40 tokens, two at a time."""
    rows = [
        f'{{"token_ids": {list(range(100 * n, 100 * n + 40))}, "output_length": {outputs}, "arrival_s": {n // 2}}}'
        for n in range(count)
    ]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def one_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts(tmp_path_factory.mktemp("trace") / "one.jsonl", 4)


def ran(trace: Path, **engine: Any) -> Result:
    pool = engine.pop("pool", "64 MiB")
    return run_engine(run_config({"workload": {"trace": str(trace)}, "pool": {"pool": pool}, "engine": engine}))


@cache
def busy() -> Result:
    workload = {"trace": "chat", "requests": 12, "options": {"num_sessions": 6, "max_reply": 20}}
    return run_engine(run_config({"workload": workload, "pool": {"pool": "400 MiB"}}))


def filled(frame: pd.DataFrame, value: float) -> pd.DataFrame:
    """Every measure replaced; keys and words stay."""
    names = [name for name in frame.columns if name not in KEYS and pd.api.types.is_numeric_dtype(frame[name])]
    return frame.assign(**dict.fromkeys(names, value)) if len(frame) else frame


def hollow(result: Result, value: float | None) -> Result:
    """The result with every measure `value`; None: without rows."""
    names = ("requests", "steps", "summary", "timings")
    frames = {name: getattr(result, name) for name in names}
    made = {name: frame.iloc[:0] if value is None else filled(frame, value) for name, frame in frames.items()}
    return replace(result, **made)


HOLLOW = pytest.mark.parametrize("value", [np.nan, 0.0, None], ids=["nan", "zero", "empty"])


@HOLLOW
@pytest.mark.parametrize("name", RUN_PLOTS)
def test_a_figure_of_a_run_without_values_is_drawn(name: str, value: float | None) -> None:
    RUN_PLOTS[name](hollow(busy(), value), plt.figure(figsize=(3, 2)).subplots()).figure.canvas.draw()


@pytest.mark.parametrize("name", ["hit_rate", "difference", "latency"])
def test_a_figure_of_several_panels_or_allocators_without_values_is_drawn(name: str) -> None:
    RUN_PLOTS[name](hollow(busy() if name == "latency" else shared(), np.nan)).figure.canvas.draw()


@HOLLOW
def test_bounds_without_values_are_drawn(value: float | None) -> None:
    table = bounds(busy())
    table = table.iloc[:0] if value is None else table.assign(**dict.fromkeys(RATES, value))
    plot_bounds(busy(), table=table).figure.canvas.draw()


@pytest.mark.parametrize("name", [*figures.LATENCIES, "allocator_time"])
@HOLLOW
def test_a_logarithmic_axis_with_nothing_to_show_says_no_data(name: str, value: float | None) -> None:
    ax = RUN_PLOTS[name](hollow(busy(), value), plt.figure().subplots())
    assert "no data" in [text.get_text() for text in ax.texts]
    assert ax.get_xscale() == ax.get_yscale() == "linear"


# --- whole results ---


@pytest.mark.parametrize(
    "engine", [{}, {"pool": "9 MiB"}, {"pool": "9 MiB", "clock": "fixed"}], ids=["one-token", "rejected", "fixed"]
)
def test_a_run_with_nothing_to_tell_of_latencies_is_saved_whole_and_verifies(
    engine: dict[str, Any], one_token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "save_figure", _drawn_only)
    made = ran(one_token, **engine)
    assert made.requests["tpot_ms"].isna().all()
    assert (made.requests["end"] == "rejected").all() == bool(engine)
    assert made.summary["duration_s"].ge(0).all()
    made.save(tmp_path / "run")
    assert (tmp_path / "run/figures/latency.svg").is_file()
    assert (tmp_path / "run/report.html").is_file()
    pd.testing.assert_frame_equal(load_result(tmp_path / "run").summary, made.summary)
    assert verify(tmp_path / "run").stands


def test_a_fault_in_a_figure_costs_no_table_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "save_figure", _broken)
    with pytest.raises(ValueError, match=r"be made \(RuntimeError: ink ran out\); kept 1 of 2 parts in .*run\.partial"):
        replace(busy()).save(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    kept = load_partial(tmp_path / "run.partial")
    pd.testing.assert_frame_equal(kept.requests, busy().requests)
    pd.testing.assert_frame_equal(kept.summary, busy().summary)


def _drawn_only(figure: Any, stem: Path, **_: Any) -> list[Path]:
    figure.set_dpi(20)
    figure.canvas.draw()
    stem.with_suffix(".svg").write_text("<svg/>", encoding="utf-8")
    return [stem.with_suffix(".svg")]


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("ink ran out")


# --- rates ---


@pytest.fixture(scope="module")
def rates_of_one_token(one_token: Path) -> RateResult:
    config = {"workload": {"trace": str(one_token)}, "pool": {"pool": "64 MiB"}, "rate": {"shares": [0.5, 1.0]}}
    hits = {"hit_rates": [0.0], "hit_options": {"num_requests": 4, "prompt_median": 2000.0, "prompt_sigma": 0.0}}
    return run_rate(rate_plan({**config, "rate": {**config["rate"], **hits}}))


def test_a_rate_study_of_single_tokens_is_saved_without_tpot_and_verifies(
    rates_of_one_token: RateResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second part serves nobody: the prompts are longer than the pool, so that no gain is known."""
    found = rates_of_one_token
    assert found.rates[["tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms"]].isna().all(axis=None)
    assert found.rates["ttft_p50_ms"].gt(0).all()
    assert found.hits[["gain", "token_hit_rate", "amdahl"]].isna().all(axis=None)
    monkeypatch.setattr(plots_rate, "save_figure", _drawn_only)
    found.save(tmp_path / "rate")
    pd.testing.assert_frame_equal(load_rate(tmp_path / "rate").rates, found.rates)
    assert verify_rate(tmp_path / "rate", again=False).stands
    shown = Console(width=200, file=io.StringIO())
    shown.print(rates_table(found), hits_table(found), *knee_lines(found))
    assert "nan" not in shown.file.getvalue()


@HOLLOW
def test_the_figure_of_rates_without_values_says_no_data(rates_of_one_token: RateResult, value: float | None) -> None:
    found = rates_of_one_token
    frames = {name: getattr(found, name) for name in ("rates", "hits")}
    made = {name: frame.iloc[:0] if value is None else filled(frame, value) for name, frame in frames.items()}
    figure = draw_rate(replace(found, **made))
    figure.set_dpi(20)
    figure.canvas.draw()
    said = ["no data"] * 5 + ["not run" if value is None else "no data"]
    assert [text.get_text() for ax in figure.axes for text in ax.texts] == said


def test_a_fault_in_the_figure_costs_no_table_of_a_rate_study(
    rates_of_one_token: RateResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots_rate, "save_figure", _broken)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the study is saved, but its figure could not be made .*ink ran out"):
            rates_of_one_token.save(tmp_path / "rate")
        load_rate(tmp_path / "rate")
        assert not (tmp_path / "rate/rate.svg").exists()
        (tmp_path / "rate/rate.svg").touch()  # of a study that stood there before: gone with it


def test_what_the_second_part_of_a_rate_study_cannot_run_costs_no_row_of_the_first(
    one_token: Path, tmp_path: Path
) -> None:
    tables = {"workload": {"trace": str(one_token)}, "pool": {"pool": "64 MiB"}}
    rate = {"shares": [0.5, 1.0], "hit_rates": [0.5], "hit_options": {"num_requests": 1}}
    with pytest.raises(ValueError, match=r"token_hit_rate: .*; kept 2 of 3 rates in .*out\.partial"):
        run_rate(rate_plan({**tables, "rate": rate}), out=tmp_path / "out")
    assert len(pd.read_csv(tmp_path / "out.partial/rates.csv")) == 4


def test_a_backlog_of_which_nothing_is_served_has_no_rates_and_says_why(one_token: Path) -> None:
    tables = {"workload": {"trace": str(one_token)}, "pool": {"pool": "9 MiB"}, "allocators": [{"kind": "block"}]}
    plan = rate_plan({**tables, "rate": {"hit_rates": []}})
    with pytest.raises(ValueError, match=r"vllm serves no request of a backlog.*4 of 4 requests rejected"):
        run_rate(plan)


def test_a_rate_at_which_nothing_was_served_is_no_point_of_the_knee() -> None:
    rates = pd.DataFrame({"rate_per_s": [1.0, 2.0, 3.0], "normalised_ms": [10.0, np.nan, 30.0]})
    assert knee(rates) == 2.0
    assert knee(rates.assign(normalised_ms=[np.nan, 10.0, 30.0])) is None
