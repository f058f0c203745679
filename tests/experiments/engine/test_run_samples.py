"""Several replies to a prompt, and beams, as fields of a run's config."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.results import Result
from kvarena.experiments.tables import time_table

CONFIG = Path(__file__).resolve().parents[3] / "experiments/configs/run-samples.toml"


def run(*sets: str) -> Result:
    base: dict[str, Any] = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    base["workload"]["options"] = {"num_sessions": 4, "max_reply": 40, "max_turns": 3}
    return run_engine(run_config(base, ["check_every=25", *sets]))


@pytest.mark.parametrize("scheduler", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["block", "token"])
def test_every_prompt_gets_so_many_replies_and_one_row(scheduler: str, kind: str) -> None:
    one, four = (run(f'scheduler="{scheduler}"', f"allocator.kind={kind}", f"samples={n}") for n in (1, 4))
    ours, alone = four.requests, one.requests
    assert len(ours) == len(alone) > 5
    assert (ours["output_tokens"] == 4 * alone["output_tokens"]).all()
    assert (ours["num_output_tokens"] == 4 * alone["num_output_tokens"]).all()
    assert (ours["reply_tokens"] == alone["output_tokens"]).all()
    assert (ours["cut_output_tokens"] == 0).all()
    assert four.summary["mean_batch"].iloc[0] > 2.5 * one.summary["mean_batch"].iloc[0]
    assert four.steps["shared"].max() > one.steps["shared"].max()
    # Four replies go on side by side: a reply's time a token is one step, not a quarter.
    assert four.summary["tpot_p50_ms"].iloc[0] > 0.8 * one.summary["tpot_p50_ms"].iloc[0]


def test_forks_of_a_prompt_take_less_than_four_requests_of_it_would() -> None:
    one, four = run("samples=1"), run("samples=4")
    assert one.steps["in_use"].max() < four.steps["in_use"].max() < 3 * one.steps["in_use"].max()


def test_beams_go_on_to_the_end_of_the_reply_and_those_that_are_left_count() -> None:
    found, alone = run("samples=1", "beam_width=3").requests, run("samples=1").requests
    assert (found["reply_tokens"] == alone["output_tokens"]).all()
    assert (found["output_tokens"] == 3 * alone["output_tokens"]).all()
    assert set(found["end"]) == {"stop"}


@pytest.mark.parametrize("sets", [("samples=6",), ("samples=1", "beam_width=5")])
def test_replies_that_are_thrown_back_come_to_their_end(sets: tuple[str, ...]) -> None:
    found = run("pool='300 MiB'", "max_model_len=2048", "speed=1000", *sets)
    assert found.summary["preemptions"].iloc[0] > 0
    assert found.summary["recomputed_tokens"].iloc[0] > 0
    rows = found.requests
    assert (rows["output_tokens"] + rows["cut_output_tokens"] == rows["num_output_tokens"]).all()
    assert (rows.loc[rows["end"] == "stop", "cut_output_tokens"] == 0).all()
    assert (rows["end"] == "stop").mean() > 0.5


def test_a_run_with_samples_is_the_same_twice() -> None:
    first, again = (run("samples=1", "beam_width=4") for _ in range(2))
    assert first.requests.equals(again.requests)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["samples=0"], "samples"),
        (["samples=1", "beam_width=1"], "beam_width: expected 0, or at least 2"),
        (["beam_width=2"], "with samples 1, found 2 with 4"),
        (["samples=1", "beam_width=2", "scheduler=sglang"], "has no beams"),
        (["clock=both"], "replays one reply"),
        (["samples=1000"], "at most max_num_seqs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sets: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_config(tomllib.loads(CONFIG.read_text(encoding="utf-8")), sets)


@pytest.mark.parametrize("table", ["block_table", "req_to_token"])
@pytest.mark.parametrize("kind", ["block", "token"])
def test_the_page_tables_part_of_a_step_is_timed_where_it_is_asked_for(table: str, kind: str) -> None:
    pytest.importorskip("torch")
    with_table, without = (run(f"allocator.kind={kind}", *sets) for sets in ([f"adapter={table}"], []))
    assert with_table.requests.equals(without.requests)
    times = with_table.timings.set_index("verb")
    busy = round(float(with_table.summary["mean_batch"].iloc[0] ** -1 * with_table.steps["batch"].sum()))
    assert 0 < times.loc["adapter", "p50_us"] <= times.loc["adapter", "p90_us"] <= times.loc["adapter", "p99_us"]
    assert busy <= times.loc["adapter", "calls"] <= with_table.summary["steps"].iloc[0]
    assert "adapter" not in set(without.timings["verb"])
    shown = {row[0]: row[1] for row in time_table(without).rows}
    assert shown["adapter"] == "not measured"
    assert time_table(with_table).rows[-1][1] != "not measured"
