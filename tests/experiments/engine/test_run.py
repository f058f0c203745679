"""`kvarena run`: configs, result folders like those of a comparison, equal bytes for equal runs."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kvarena.experiments import plots as kv_plots
from kvarena.experiments.bounds_run import bounds_of_run
from kvarena.experiments.budget import format_bytes
from kvarena.experiments.cli import app
from kvarena.experiments.engine.figures import PLOTS, engine_rows
from kvarena.experiments.engine.run import declared_by, run_engine
from kvarena.experiments.engine.run_config import RunConfig, RunEngineConfig, load_run_config, run_config
from kvarena.experiments.engine.step_time import GpuTimes, save_gpu_times
from kvarena.experiments.models import model_shape
from kvarena.experiments.results import Result, load_result, merge_results
from matplotlib.axes import Axes
from typer.testing import CliRunner

REPO = Path(__file__).resolve().parents[3]
SMALL: dict[str, Any] = {
    "workload": {"trace": "chat", "requests": 40, "options": {"num_sessions": 20, "max_reply": 60, "max_turns": 6}},
    "pool": {"pool": "400 MiB"},
    "engine": {"speed": 20.0, "max_num_seqs": 8, "max_num_batched_tokens": 512, "ttft_ms": 100.0, "steps_every": 5},
}


def small(*sets: str) -> RunConfig:
    return run_config(SMALL, sets)


@pytest.fixture(scope="module")
def block() -> Result:
    return run_engine(small())


@pytest.fixture(scope="module")
def token() -> Result:
    return run_engine(small("allocator.kind=token"))


def digests(folder: Path) -> dict[str, str]:
    """Of every file that has to be equal for equal runs: measured times and the environment stand apart."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(("provenance", "timings"))
    }


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "design",
    [
        {"kind": "block", "page_size": 1},
        {"kind": "block", "page_size": 1, "publish_generated": "finish"},
        {"kind": "block", "page_size": 1, "publish": "commit"},
        {"kind": "token"},
        {"kind": "token", "page_size": 4},
        {"kind": "token", "publish_generated": "filled"},
    ],
)
def test_one_request_after_another_hits_exactly_the_ceiling_and_no_bound_is_lower(
    design: dict[str, Any], lag: int
) -> None:
    tables = {**SMALL, "pool": {"pool": "8 GiB"}, "engine": {"result_lag": lag, "speed": 0.01}, "allocator": design}
    result = run_engine(run_config(tables, []))
    rows = result.requests
    assert rows["hit_tokens"].tolist() == rows["ceiling_tokens"].tolist()
    assert result.why()[result.allocators[0]]["lost"] == 0
    row = bounds_of_run(result).iloc[0]
    assert row["policy"] == row["clairvoyant"] == row["infinite"] == result.summary["token_hit_rate"][0]


def test_panels_of_latencies_stand_side_by_side_under_a_long_name_and_their_ticks_are_apart() -> None:
    tables = {**SMALL, "allocator": {"kind": "token", "page_size": 4, "name": "a name of my own that is long"}}
    panels = kv_plots.draw("latency", run_engine(run_config(tables, ["speed=1"])), "footer").axes
    panels[0].figure.canvas.draw()
    for left, right in pairwise(panels):
        assert 0 < right.get_position().x0 - left.get_position().x1 < 0.05
    for panel in panels:
        low, high = panel.get_xlim()
        shown = [t for t in panel.get_xticklabels() if t.get_text() and low <= t.get_position()[0] <= high]
        boxes = [label.get_window_extent() for label in shown]
        assert len(boxes) >= 2
        assert all(a.x1 < b.x0 for a, b in pairwise(boxes))


def test_requests_in_are_served_or_rejected(block: Result) -> None:
    row = block.summary.iloc[0]
    assert row["requests"] == len(block.requests) == row["served"] + row["rejected"] == 40
    assert row["output_tokens"] == block.requests["output_tokens"].sum()
    assert row["hit_tokens"] == block.requests["hit_tokens"].sum()
    assert 0 < row["token_hit_rate"] <= row["token_hit_rate_ceiling"]
    assert block.requests["index"].tolist() == list(range(40))


def test_summary_latencies_are_those_of_the_rows(block: Result) -> None:
    row, rows = block.summary.iloc[0], block.requests
    assert row["ttft_mean_ms"] == pytest.approx(rows["ttft_ms"].mean())
    assert row["tpot_mean_ms"] == pytest.approx(rows["tpot_ms"].mean())
    assert row["e2el_mean_ms"] == pytest.approx(rows["e2el_ms"].mean())
    assert row["ttft_p50_ms"] == pytest.approx(rows["ttft_ms"].sort_values().iloc[19])
    good = rows[(rows["ttft_ms"] <= 100.0) & (rows["cut_output_tokens"] == 0)]
    assert row["goodput_per_s"] == pytest.approx(len(good) / row["duration_s"])


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("clock", ["feedback", "fixed"])
def test_the_duration_goes_to_the_last_token_and_the_step_behind_it_where_results_lag(lag: int, clock: str) -> None:
    """As docs/metrics.md defines it; throughput and goodput are over it."""
    result = run_engine(small(f"result_lag={lag}", f"clock={clock}", "steps_every=1", "requests=8"))
    row, rows, steps = result.summary.iloc[0], result.requests, result.steps
    begun, last = rows["arrival_s"].min(), rows["last_token_s"].max()
    until = rows["end_s"].max() if clock == "fixed" else steps["time_s"].max()
    assert row["duration_s"] == pytest.approx(until - begun)
    assert (steps["time_s"] > last + 1e-9).sum() == (lag if clock == "feedback" else 0)
    assert row["requests_per_s"] == pytest.approx(row["served"] / row["duration_s"])
    assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["duration_s"])


def test_the_table_has_rows_of_that_part_of_the_host_tier_that_a_run_has() -> None:
    swaps = "tokens of preempted requests copied back instead"
    cache = "token hit rate of the host's cache, beyond the device's"
    moved = ["copied to the host, swaps and cache", "copied back from the host, swaps and cache"]
    for sets, there in (
        ([], []),
        (["host_pool=1 GiB"], [swaps, *moved]),
        (["host_cache=1 GiB"], [cache, *moved]),
        (["host_pool=1 GiB", "host_cache=1 GiB"], [swaps, cache, *moved]),
    ):
        result = run_engine(small("requests=12", *sets))
        table = dict(engine_rows(result))
        assert [name for name in (swaps, cache, *moved) if name in table] == there
        if there:
            row = result.summary.iloc[0]
            assert [table[name] for name in moved] == [
                format_bytes(row[f"swapped_{way}_bytes"]) for way in ("out", "in")
            ]


def test_pool_states_add_up_in_every_step(block: Result) -> None:
    steps = block.steps
    assert (steps["free"] + steps["evictable"] + steps["in_use"] == block.summary.iloc[0]["num_pages"]).all()
    assert steps["time_s"].is_monotonic_increasing


def test_two_allocators_differ_in_nothing_else_and_lie_over_each_other(block: Result, token: Result) -> None:
    both = merge_results([block, token])
    assert both.allocators == ["vllm", "sglang"]
    assert len(both.summary) == 2
    other = run_engine(small("allocator.kind=token", "max_num_seqs=4"))
    with pytest.raises(ValueError, match=r"engine\.max_num_seqs"):
        merge_results([block, other])


@pytest.fixture(scope="module")
def folders(block: Result, token: Result, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("results")
    return block.save(root / "block"), token.save(root / "token")


@pytest.mark.parametrize("plot", PLOTS.values(), ids=list(PLOTS))
def test_lines_are_told_apart_without_colours(folders: tuple[Path, Path], plot: Callable[..., Axes]) -> None:
    for axes in plot(merge_results([load_result(folder) for folder in folders])).figure.axes:
        styles = [(line.get_marker(), line.get_markerfacecolor(), line.get_linestyle()) for line in axes.lines]
        assert len({(marker, face == "white", dashes) for marker, face, dashes in styles}) == len(styles) >= 2
        assert all(line.get_markevery() is not None for line in axes.lines)


def test_a_result_folder_is_whole_and_comes_back(folders: tuple[Path, Path], block: Result) -> None:
    names = {path.name for path in folders[0].iterdir()}
    assert names >= {"config.toml", "provenance.json", "summary.csv", "report.html", "result.json"}
    assert names >= {"requests.parquet", "steps.parquet", "timings.parquet"}
    figures = {path.name for path in (folders[0] / "figures").iterdir()}
    assert {f"{name}.{kind}" for name in ("latency", "load", "occupancy") for kind in ("pdf", "svg", "png")} <= figures
    back = load_result(folders[0])
    assert back.manifest["kind"] == "run"
    assert back.requests.equals(block.requests)
    assert merge_results([back, load_result(folders[1])]).allocators == ["vllm", "sglang"]


def test_equal_configs_give_equal_bytes(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Also when the config is the resolved one that a finished run wrote."""
    run_engine(load_run_config(folders[1] / "config.toml")).save(tmp_path / "again")
    assert digests(folders[1]) == digests(tmp_path / "again")


def test_what_is_not_calibrated_or_an_oracle_says_so(tmp_path: Path) -> None:
    save_gpu_times(GpuTimes(), tmp_path / "times.json")
    result = run_engine(small("declared=true", "requests=10", f"step_times={tmp_path / 'times.json'}"))
    assert any("not calibrated" in text for text in result.warnings)
    assert any("oracle" in text for text in result.warnings)


def test_rejected_requests_are_reported_with_the_first_ones_numbers() -> None:
    result = run_engine(small("max_model_len=600", "max_num_seqs=4"))
    row = result.summary.iloc[0]
    assert row["rejected"] > 0
    assert row["served"] + row["rejected"] == 40
    assert any(f"{row['rejected']} of 40 requests rejected" in text and "600" in text for text in result.warnings)


def test_a_host_tier_is_counted_in_bytes_and_its_tokens_are_no_hits() -> None:
    tight = ("pool=120 MiB", "max_num_seqs=8", "max_model_len=4096", "speed=1000", "host=none")
    swapped, computed = (run_engine(small(*tight, *more)).summary.iloc[0] for more in (("host_pool=1 GiB",), ()))
    assert computed["preemptions"] > 0
    assert computed["swapped_tokens"] == computed["swapped_out_bytes"] == 0
    assert swapped["swapped_in_bytes"] > 0
    assert swapped["swapped_tokens"] * 128 * 1024 <= swapped["swapped_in_bytes"]
    assert swapped["recomputed_tokens"] < computed["recomputed_tokens"]


@pytest.mark.parametrize("pool", ["12 %", '["300 MiB", "500 MiB"]'])
def test_pools_are_sized_as_in_a_comparison(pool: str) -> None:
    result = run_engine(small(f"pool={pool}", "requests=10"))
    assert len(result.summary) == (2 if pool.startswith("[") else 1)
    assert (result.summary["num_pages"] > 0).all()


def test_declared_lengths() -> None:
    by = {name: declared_by(RunEngineConfig(declared=name), 0) for name in ("cap", "true", "noisy")}  # type: ignore[arg-type]
    assert [by["cap"](7, index) for index in range(3)] == [4096] * 3
    assert [by["true"](7, index) for index in range(3)] == [7] * 3
    noisy = [by["noisy"](100, index) for index in range(200)]
    assert min(noisy) == 100
    assert len(set(noisy)) > 50
    assert noisy == [by["noisy"](100, index) for index in range(200)]


def test_a_preset_is_a_whole_server_and_what_is_stated_wins() -> None:
    chosen = run_config({"preset": "sglang-0.5.22", "engine": {"max_num_seqs": 64}})
    assert (chosen.engine.scheduler, chosen.engine.result_lag, chosen.engine.max_num_seqs) == ("sglang", 1, 64)
    assert chosen.entry().kind == "token"
    assert run_config({"preset": "vllm-0.32.0"}).entry().kind == "block"
    assert run_config({"preset": "vllm-0.32.0"}, ["allocator.kind=token"]).entry().kind == "token"


def test_a_preset_sizes_the_pool_as_its_upstream_does_unless_a_size_is_stated() -> None:
    # One H200, Llama-3-8B in bfloat16. SGLang: 143,771 MiB x its share of 0.907 - 16.06 GB, in tokens of 128 KiB.
    shape = model_shape("llama-3-8b")
    token = run_config({"preset": "sglang-0.5.22"})
    assert token.pool.pool == int(143_771 * 2**20 * 0.907 - 16.06e9) // shape.bytes_per_page(1)
    block = run_config({"preset": "vllm-0.32.0"})
    rest = 143_771 * 2**20 * 0.92 - 16.06e9 - 2 * 2**30
    assert rest * 0.997 < int(block.pool.pool) * shape.bytes_per_page(16) < rest  # tables take the difference
    assert run_config(block.resolved()).pool == block.pool
    assert run_config({"preset": "vllm-0.32.0", "pool": {"pool": "1 GiB"}}).pool.pool == "1 GiB"
    assert run_config({"preset": "vllm-0.32.0"}, ["pool=5000"]).pool.pool == 5000
    assert run_config({"preset": "vllm-0.32.0"}, ["model=llama-3-70b", "pool=9"]).pool.model == "llama-3-70b"
    assert run_config({}).pool.pool == "16 GiB"
    with pytest.raises(ValueError, match="too small"):
        run_config({"preset": "vllm-0.32.0"}, ["model=llama-3-70b"])


@pytest.mark.parametrize(("preset", "kind"), [("vllm-0.32.0", "block"), ("sglang-0.5.22", "token"), (None, "block")])
def test_a_field_of_the_allocator_alone_changes_that_field_alone(preset: str | None, kind: str) -> None:
    data = {} if preset is None else {"preset": preset}
    for chosen in (run_config(data, ["allocator.page_size=32"]), run_config({**data, "allocator": {"page_size": 32}})):
        assert (chosen.entry().kind, chosen.entry().page_size) == (kind, 32)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"engine": {"schedular": "vllm"}}, r"engine\.schedular: unknown key; known: scheduler"),
        ({"engine": {"scheduler": "orca"}}, r"engine\.scheduler"),
        ({"engine": {"max_num_seqs": 0}}, r"engine\.max_num_seqs"),
        ({"engine": {"max_num_seqs": 2.5}}, r"engine\.max_num_seqs"),
        ({"engine": {"max_num_seqs": 512, "max_num_batched_tokens": 64}}, "less than max_num_seqs"),
        ({"engine": {"speed": -1.0}}, r"engine\.speed"),
        ({"engine": {"speed": math.inf}}, r"engine\.speed"),
        ({"engine": {"think_s": math.inf}}, r"engine\.think_s"),
        ({"allocator": "vllm"}, r"allocator"),
        ({"pool": {"pool": "16"}}, r"pool\.pool"),
        ({"preset": "orca"}, "preset"),
        ({"colour": 1}, "colour: unknown key"),
        ({"allocator": {"name": "nobody"}}, "nobody"),
        ({"allocators": [{"name": "vllm"}, {"name": "sglang"}]}, r"takes one \[allocator\]"),
    ],
)
def test_a_bad_config_names_the_field(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_config(data)


@pytest.mark.parametrize("key", ["options.num_sessions", "workload.options.num_sessions"])
def test_a_field_inside_a_table_is_set_as_in_compare_and_the_given_mapping_stays(key: str) -> None:
    data = {"workload": {"trace": "chat", "options": {"num_sessions": 4, "max_reply": 9}}}
    assert run_config(data, [f"{key}=7"]).workload.options == {"num_sessions": 7, "max_reply": 9}
    assert data["workload"]["options"] == {"num_sessions": 4, "max_reply": 9}


@pytest.mark.parametrize(
    ("item", "says"), [("speed", "key=value"), ("colour=1", "colour"), ("engine.x.y=1", "unknown")]
)
def test_a_bad_set_names_itself(item: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_config({}, [item])


def test_a_broken_config_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    with pytest.raises(ValueError, match=r"c\.toml"):
        load_run_config(path)
    path.write_text("[engine\n")
    with pytest.raises(ValueError, match="not TOML"):
        load_run_config(path)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_tables_and_writes_a_folder(tmp_path: Path) -> None:
    sets = ["requests=20", "options={num_sessions = 8}", "speed=20", "max_num_seqs=8", "pool=400 MiB"]
    flags = [part for item in sets for part in ("--set", item)]
    config = REPO / "experiments" / "configs" / "run-chat.toml"
    done = invoke("run", str(config), *flags, "--quiet", "--out", str(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    assert "goodput, requests a second" in done.stdout
    assert "TTFT p99, ms" in done.stdout
    assert "host" not in done.stdout  # there is none, which is not 0
    assert "differences" not in done.stdout  # one allocator has none
    assert not re.search(r"\d%", done.stdout)
    assert load_result(tmp_path / "a").manifest["policy"]["name"] == "vllm"


def test_configs_of_runs_are_shown_and_compared(folders: tuple[Path, Path]) -> None:
    shown = invoke("config", "show", str(REPO / "experiments" / "configs" / "run-chat.toml"))
    assert 'scheduler = "vllm"' in shown.stdout
    differing = invoke("config", "diff", *(str(folder / "config.toml") for folder in folders))
    assert differing.exit_code == 1
    assert differing.stdout
    assert all(line.startswith("allocators.0.") for line in differing.stdout.splitlines())


def test_a_folder_with_other_files_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match="holds other files"):
        run_engine(small(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
