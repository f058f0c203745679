"""The rate study: knees, Amdahl's line, FLOPs, and folders that come back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.engine.step_time import Compute, GpuTimes, save_gpu_times
from kvarena.experiments.models import SHAPES
from kvarena.experiments.plots_rate import draw_rate
from kvarena.experiments.rate import RateResult, knee, load_rate, load_rate_plan, prompt_flops, rate_plan, run_rate
from typer.testing import CliRunner

REPO = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "workload": {"trace": "chat", "options": {"num_sessions": 8, "max_reply": 40, "max_turns": 3}},
    "pool": {"pool": "16 GiB"},
    "engine": {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "ttft_ms": 500.0},
    "allocators": [{"kind": "block"}, {"kind": "token"}],
    "rate": {"shares": [0.1, 1.5], "hit_rates": [0.0, 0.6], "hit_options": {"num_requests": 60, "reply_median": 20.0}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> RateResult:
    """On a clock of round numbers, whose linear layers take time by their tokens: what Amdahl's law is about."""
    path = tmp_path_factory.mktemp("rate") / "times.json"
    save_gpu_times(GpuTimes(linear_sharpness=8.0), path)
    return run_rate(rate_plan({**SMALL, "engine": {**SMALL["engine"], "step_times": str(path)}}))


def test_more_load_is_slower_and_every_request_is_served(found: RateResult) -> None:
    rows = found.rates
    assert set(rows["allocator"]) == {"vllm", "sglang"}
    for _, part in rows.groupby("allocator"):
        low, high = part.sort_values("share").to_dict("records")
        assert high["rate_per_s"] == pytest.approx(15 * low["rate_per_s"])
        assert high["normalised_ms"] > low["normalised_ms"]
        assert high["mean_batch"] > low["mean_batch"]
        assert low["requests_per_s"] == pytest.approx(low["rate_per_s"], rel=0.25)
        assert low["ttft_p50_ms"] <= low["ttft_p90_ms"] <= low["ttft_p99_ms"]
        assert low["rejected"] == high["rejected"] == 0


def test_where_memory_does_not_bind_hits_are_worth_what_amdahl_says(found: RateResult) -> None:
    """Block finds the wanted hits in a backlog; token publishes late there, and its line is at its own hit rate."""
    for row in found.hits.to_dict("records"):
        assert row["gain"] == pytest.approx(row["amdahl"], rel=0.05)
    block = found.hits[found.hits["allocator"] == "vllm"].set_index("target")
    assert block.loc[0.0, "token_hit_rate"] == 0
    assert block.loc[0.6, "token_hit_rate"] == pytest.approx(0.6, abs=0.03)
    assert block.loc[0.6, "gain"] > 1.2


def test_flops_saved_follow_the_hits() -> None:
    shape, compute = SHAPES["llama-3-8b"], Compute(32, 7.5e9)
    whole, rest = (prompt_flops(1000, hit, shape, compute) for hit in (0, 600))
    assert whole == prompt_flops(600, 0, shape, compute) + rest
    assert rest == 2 * 7.5e9 * 400 + 4 * 32 * 128 * 32 * (400 * 600 + 400 * 401 // 2)


@pytest.mark.parametrize(
    ("latencies", "where"), [([10, 12, 19], None), ([10, 20, 40], 2.0), ([10, 10, 30], 2.5), ([10, 25, 5], 1.0 + 2 / 3)]
)
def test_the_knee_is_where_the_latency_has_doubled(latencies: list[float], where: float | None) -> None:
    assert knee(pd.DataFrame({"rate_per_s": [1.0, 2.0, 3.0], "normalised_ms": latencies})) == (
        None if where is None else pytest.approx(where)
    )


def test_a_study_survives_its_folder_and_is_shown_again(found: RateResult, tmp_path: Path) -> None:
    found.save(tmp_path / "rate")
    again = load_rate(tmp_path / "rate")
    assert again.rates["normalised_ms"].tolist() == pytest.approx(found.rates["normalised_ms"].tolist())
    assert again.manifest["knee_per_s"] == found.manifest["knee_per_s"]
    shown = CliRunner().invoke(app, ["rate", "--saved", str(tmp_path / "rate")])
    assert shown.exit_code == 0, shown.output
    assert "serves a backlog at" in shown.output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="not a finished rate study"):
        found.save(tmp_path / "other")


@pytest.fixture(scope="module")
def shipped() -> RateResult:
    return load_rate(REPO / "results" / "rate")


def test_dashes_say_what_is_drawn_and_colour_and_marker_of_which_allocator(shipped: RateResult) -> None:
    panels = draw_rate(shipped).axes
    names = len(shipped.manifest["allocators"])
    for ax, dashed in ((panels[0], 0), (panels[1], 2), (panels[2], 2), (panels[3], 1), (panels[4], 0)):
        marked = [line for line in ax.get_lines() if line.get_marker() != "None"]
        looks = {(line.get_color(), line.get_marker(), line.get_markerfacecolor()) for line in marked}
        assert len(looks) == names
        assert len({look[:2] for look in looks}) == names  # hollow or not is no difference at a glance
        assert sum(line.get_linestyle() == "--" for line in marked) == dashed * names
    plt.close("all")


def test_every_axis_of_latency_has_several_numbers(shipped: RateResult) -> None:
    figure = draw_rate(shipped)
    figure.draw_without_rendering()
    for ax in figure.axes[:3]:
        low, high = ax.get_ylim()
        shown = [tick for tick in ax.get_yticks() if low <= tick <= high]
        assert 3 < len(shown) < 13
    plt.close("all")


def test_the_shipped_config_is_a_plan() -> None:
    plan = load_rate_plan(REPO / "experiments/configs/rate.toml", ["pool=4 GiB", "rate.shares=[0.5, 1.0]"])
    assert plan.rate.shares == [0.5, 1.0]
    assert plan.config(plan.allocators[0]).pool.pool == "4 GiB"
    assert [plan.config(each).entry().name for each in plan.allocators] == ["vllm", "sglang", "block, no cache"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rate": {"shares": [1.0, 0.5]}}, r"rate\.shares: expected ascending"),
        ({"rate": {"shares": [0.5]}}, r"rate\.shares"),
        ({"rate": {"speeds": [1]}}, r"rate\.speeds"),
        ({"allocators": []}, "allocators: expected"),
        ({"allocators": [{"kind": "block"}, {"kind": "block"}]}, "two have one name"),
        ({"engine": {"schedule": "x"}}, "schedule is replayed by clock"),
    ],
)
def test_a_wrong_plan_names_the_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rate_plan({**SMALL, **change})


def test_an_attention_backend_fixes_the_page_size() -> None:
    assert run_config({}, ["attention=flash_mla"]).entry().page_size == 64
    assert run_config({}, ["attention=flash_attn", "allocator.kind=token"]).entry().page_size == 16
    with pytest.raises(ValueError, match="flash_mla reads 64, found 16"):
        run_config({}, ["attention=flash_mla", "allocator.page_size=16"])
    with pytest.raises(ValueError, match="attention: expected one of"):
        run_config({}, ["attention=paper"])


def test_a_sweep_of_its_config_says_which_command_runs_it(tmp_path: Path) -> None:
    config = REPO / "experiments/configs/rate.toml"
    answer = CliRunner().invoke(app, ["sweep", str(config), "--out", str(tmp_path / "out")])
    assert answer.exit_code != 0
    assert "`kvarena rate` runs it" in str(answer.exception or answer.output)


def test_the_shipped_grid_goes_from_a_tenth_to_one_and_a_half_and_is_close_at_the_knee() -> None:
    shares = load_rate_plan(REPO / "experiments/configs/rate.toml").rate.shares
    assert {round(0.1 * tenth, 1) for tenth in range(1, 16)} <= set(shares)
    assert all(b - a < 0.051 for a, b in pairwise([s for s in shares if 0.2 <= s <= 0.7]))
