"""Intervals of paired differences: they cover the truth, and a study can be carried on and read back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kvarena.allocators.config import make_allocator
from kvarena.experiments.config import EngineConfig, config_from_mapping
from kvarena.experiments.families import group, resample
from kvarena.experiments.metrics import summarise_requests
from kvarena.experiments.replay import Replay
from kvarena.experiments.resample import interval, intervals, open_replicates, plot_intervals, replicate
from support.requests import request

STUDIES, DRAWS, PAGES = 200, 12, 48
DESIGNS = ({"kind": "block", "page_size": 4}, {"kind": "token", "page_size": 1})


def draw_trace(rng: np.random.Generator):
    """30 sessions of 1 to 4 turns whose order and lengths are drawn: their pages do not all fit."""
    rows = []
    for s in range(30):
        start, time = int(rng.integers(3, 9)), float(rng.uniform(0, 30))
        for turn in range(int(rng.integers(1, 5))):
            prompt = [1, 2, 3, *(100 * (s + 1) + i for i in range(start + 3 * turn))]
            rows.append(request(f"{s}.{turn}", prompt, session_id=f"s{s}", arrival_s=time))
            time += float(rng.exponential(4))
    return sorted(rows, key=lambda r: r.arrival_s)


def rate_difference(rows) -> float:
    """Points between the two designs at one pool of 192 tokens."""
    rates = []
    for design in DESIGNS:
        pages = PAGES * 4 // design["page_size"]
        lane = Replay(make_allocator(design, num_pages=pages), EngineConfig()).run(rows)
        rates.append(summarise_requests(lane.requests)["token_hit_rate"])
    return 100 * (rates[1] - rates[0])


def test_95_percent_intervals_cover_the_truth_in_92_to_98_percent_of_200_studies():
    truth = np.mean([rate_difference(draw_trace(np.random.default_rng([9, i]))) for i in range(800)])
    covered = 0
    for study in range(STUDIES):
        rows = draw_trace(np.random.default_rng([5, study]))
        groups = group(rows)
        values = [rate_difference(rows), *(rate_difference(resample(rows, d, groups)) for d in range(1, DRAWS + 1))]
        found = interval(pd.Series(values))
        covered += found["low"] <= truth <= found["high"]
    assert 0.92 * STUDIES <= covered <= 0.98 * STUDIES, (covered, truth)


def test_an_interval_by_hand():
    found = interval(pd.Series([2.0, 1.0, 2.0, 3.0, 2.0, 2.0]))
    half = 2.7764451 * np.sqrt(0.5)  # t(4, 0.975) times the deviation of the five draws
    assert found["low"] == pytest.approx(2 - half)
    assert found["high"] == pytest.approx(2 + half)
    assert not found["within_noise"]
    assert interval(pd.Series([1.9, 1.0, 2.0, 3.0, 2.0, 2.0]))["within_noise"]


@pytest.mark.parametrize(("value", "p", "noise"), [(0.0, 1.0, True), (1.5, 0.0, False)])
def test_draws_that_are_all_alike_are_certain(value, p, noise):
    found = interval(pd.Series([value] * 12))
    assert (found["p"], found["within_noise"]) == (p, noise)


def test_q_is_never_below_p_and_grows_with_the_table():
    rng = np.random.default_rng(3)
    base = [
        {
            "resample": r,
            "pool_bytes": pool,
            "allocator": name,
            "token_hit_rate": 0.5 + (name == "b") * rng.normal(0.01, 0.01),
        }
        for r in range(21)
        for pool in range(1, 9)
        for name in "ab"
    ]
    table = pd.DataFrame(base)
    table["token_hit_rate_last_half"] = table["token_hit_rate"]
    wide, narrow = intervals(table, ["a", "b"]), intervals(table[table["pool_bytes"] == 1], ["a", "b"])
    assert (wide["q"] >= wide["p"]).all()
    first = wide[wide["pool_bytes"] == 1]
    assert first["q"].tolist() >= narrow["q"].tolist()


def small_config():
    return config_from_mapping(
        {
            "workload": {"trace": "chat", "options": {"num_sessions": 24}, "requests": 60},
            "pool": {"pool": ["10 %"]},
            "engine": {"kernel_batches": 0},
        }
    )


def test_a_study_reads_back_as_it_was_and_is_not_run_twice(tmp_path):
    found = replicate(small_config(), tmp_path / "study", replicates=10, jobs=1)
    assert sorted(set(found.table["resample"])) == list(range(11))
    assert found.unit == "24 session groups"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / "cells").rglob("*.parquet")}
    again = replicate(small_config(), tmp_path / "study", replicates=10, jobs=1)
    pd.testing.assert_frame_equal(again.intervals, open_replicates(tmp_path / "study").intervals)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / "cells").rglob("*.parquet")}
    assert found.table["pool_bytes"].nunique() == 1


@pytest.mark.parametrize("content", ["", "{}", '{"trace": "x"}', '{"schema_version": 9}'])
def test_a_damaged_study_is_refused(tmp_path, content):
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(ValueError, match=r"study\.json"):
        open_replicates(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"allocators": ({"name": "vllm"},)}, "needs two"),
        ({"workload": {"trace": "chat", "resample": 2}}, "set by this study"),
        ({"workload": {"trace": "chat", "seeds": 2}}, r"workload\.seeds: expected one seed, found 2"),
        ({"workload": {"trace": "chat", "seeds": [0, 3]}}, r"expected one seed, found \[0, 3\]"),
        ({"workload": {"trace": "chat", "options": {"num_sessions": 19}}}, "has 19 session groups; at least 20"),
        ({"workload": {"trace": "LENGTHS"}}, "lengths only"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused_before_it_runs(tmp_path, change, text):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "100,10\n" * 40)
    fields = {**small_config().model_dump(), **change}
    if fields["workload"]["trace"] == "LENGTHS":
        fields["workload"] = {"trace": str(lengths)}
    config = config_from_mapping(fields)
    with pytest.raises(ValueError, match=text):
        replicate(config, tmp_path / "out", replicates=10)
    assert not (tmp_path / "out").exists()


def test_one_pool_stands_in_the_middle_of_its_figure():
    found = open_replicates(Path(__file__).resolve().parents[2] / "results" / "paper" / "chat-resampled")
    pool = found.intervals["pool_bytes"].min()
    rows = found.intervals[found.intervals["pool_bytes"] == pool].reset_index(drop=True)
    low, high = plot_intervals(replace(found, intervals=rows)).get_xlim()
    assert 0.8 * pool < low < 0.95 * pool
    assert 1.05 * pool < high < 1.2 * pool
    wide = plot_intervals(found).get_xlim()
    assert wide[0] < pool
    assert wide[1] > found.intervals["pool_bytes"].max()
