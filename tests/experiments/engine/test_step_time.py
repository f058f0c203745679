"""The step-time model: hand-computed times, what calibration finds, what its files say, and how it ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kvarena.experiments.engine.attention_time import (
    DecodeTimes,
    ExtendTimes,
    Layout,
    decode_us,
    decode_work,
    extend_us,
    extend_work,
    list_us,
    page_factor,
)
from kvarena.experiments.engine.calibrate import fit_decode, fit_extend, kernel_errors, main
from kvarena.experiments.engine.calibrate_points import Points, read_steps
from kvarena.experiments.engine.calibrate_steps import error_table, misranked, rank_lines, rank_table, step_frame
from kvarena.experiments.engine.request import make_request
from kvarena.experiments.engine.scheduler import Scheduled, StepPlan
from kvarena.experiments.engine.simulate import IDLE_STEP_S, Clock
from kvarena.experiments.engine.step_time import (
    HOST,
    Compute,
    GpuTimes,
    HostTimes,
    StepTimeModel,
    compute_of,
    load_gpu_times,
    save_gpu_times,
)
from kvarena.experiments.models import SHAPES, ModelShape

RESULTS = Path(__file__).resolve().parents[3] / "results/h200"
SHAPE = ModelShape(num_layers=2, num_kv_heads=1, head_dim=64)  # 512 bytes of KV a token, 256 a layer
# A sharpness of 1 adds what would overlap, so that sums can be made by hand.
GPU = GpuTimes(
    decode=DecodeTimes(3.0, 4.0, {"128": 0.1, "64": 0.1, "32": 0.01}, 0.5, 1.0, 1.0, 1.0),
    extend=ExtendTimes(5.0, 132.0, 0.01, 1.32, 1.0, 1.0, 6.0, 30.0),
    linear_gbps=2.0,
    linear_tflops=1e-3,
    linear_sharpness=1.0,
    step_us=7.0,
    sample_us=0.5,
    store_us=1.0,
    store_gbps=1.0,
)
MODEL = StepTimeModel(SHAPE, Compute(num_heads=4, parameters=1000), 16, GPU, HostTimes(2.0, 0.5, 0.25), 1e-6)
LLAMA = Layout(8, 4, 256, 512, 256)


def entry(num_new: int, num_before: int) -> Scheduled:
    return Scheduled(make_request("r", range(num_before + num_new), 4), num_new, num_before, True, 0)


def test_a_decode_step_by_hand() -> None:
    plan = StepPlan("decode", [entry(1, 99), entry(1, 199)])
    # step 7, two samples 1; weights 2000 B / 2 GB/s = 1 us and 2 x 1000 x 2 / 1e9 flop/s = 4 us; stores 2 layers x 1 us
    # and 2 tokens x 512 B / 1 GB/s = 1.024 us. A layer: 3 + 4 (split); the longer program reads 200 tokens of half the
    # usual bytes, 0.01 us each, 2 of 1584 places taken; both read 300 tokens x 256 B at 1 GB/s.
    layer = 3 + 4 + 0.01 * 100 * (1 + 0.5 * 2 / 1584) + 76.8
    assert MODEL.gpu_s(plan) == pytest.approx((7 + 1 + 1 + 4 + 2 + 1.024 + 2 * layer) / 1e6)


def test_a_prefix_that_is_shared_is_read_from_memory_once() -> None:
    model = replace(MODEL, gpu=replace(GPU, decode=replace(GPU.decode, l2_gbps=1e3)))
    shared, apart = (StepPlan("decode", [entry(1, 511)] * 4, pages_in_use=pages) for pages in (32, 128))
    assert model.gpu_s(apart) - model.gpu_s(shared) == pytest.approx(2 * (128 - 32) * 16 * 256 / 1e3 / 1e6)
    assert model.gpu_s(apart) == model.gpu_s(StepPlan("decode", apart.batch))


def test_a_prefill_step_by_hand() -> None:
    plan = StepPlan("prefill", [entry(40, 100)])
    # Two tiles of 32 tokens that see 132 and 140 of the keys, whole steps of 128: 256 each. Width is half the usual.
    layer = 5 + 2 * 132 / 132 + 0.01 * 256 / 2 + 1.32 * 512 / 132 / 2 + 140 * 256 / 1e3
    stores = 2 + 40 * 512 / 1e3
    assert MODEL.gpu_s(plan) == pytest.approx((7 + 0.5 + 1 + 80 + stores + 2 * layer + 6) / 1e6)


def test_a_decode_beside_a_prompt_has_a_tile_to_itself() -> None:
    alone, beside = (extend_work(entries, LLAMA) for entries in ([(0, 64)], [(0, 64), (4000, 1)]))
    assert (alone.tiles * 132 / 8, beside.tiles * 132 / 8) == pytest.approx((2, 3))
    assert beside.longest == 4096 > alone.longest == 128


def test_the_list_of_tiles_is_made_once_a_step_and_is_longer_from_64_sequences_on() -> None:
    few, many = (StepPlan("mixed", [entry(2, 9)] * count) for count in (63, 64))
    assert MODEL.kernels_us(few, lists=32) - MODEL.kernels_us(few) == pytest.approx(31 * 6)
    assert MODEL.kernels_us(many, lists=32) - MODEL.kernels_us(many) == pytest.approx(31 * 36)


def test_chunks_go_by_the_kernels_own_rule() -> None:
    """One sequence behind a table of 16,384 tokens and two pages: the pages decide whether chunks are of 256 or 512."""
    short, long = (decode_work([1397], replace(LLAMA, table_tokens=16_384 + 2 * size), 2**62) for size in (1, 64))
    assert (short.span, long.span) == (256, 512)


def test_programs_that_find_no_place_wait() -> None:
    """Three programs a multiprocessor, eight KV heads: 49 sequences run at once."""
    layout = replace(LLAMA, table_tokens=16_416)
    spans = [decode_work([2000] * count, layout, 2**62).span for count in (40, 49, 50, 98, 99)]
    assert spans == [2000, 2000, 4000, 4000, 6000]


def test_a_step_launched_kernel_by_kernel_takes_no_less_than_its_launches() -> None:
    gpu = replace(GPU, launch_us={"decode": 1e6, "extend": 1.0})
    model = replace(MODEL, gpu=gpu)
    decode, mixed = StepPlan("decode", [entry(1, 9)]), StepPlan("mixed", [entry(2, 9)])
    assert model.launched_us(decode) == 2e6
    assert model.launched_us(mixed) == model.kernels_us(mixed)
    assert model.launched_us(StepPlan()) == 0


def test_host_time_by_hand() -> None:
    plan = StepPlan("mixed", [entry(1, 9), entry(20, 0)])
    plan.admitted = [plan.batch[1].request]
    assert MODEL.host_s(plan) == pytest.approx(1e-6 + (2 + 2 * 0.5 + 20 * 0.25) / 1e6)


def test_the_page_tables_host_time_goes_by_steps_and_new_pages() -> None:
    """And the table of the H200's host says of a prefill what was measured there (179 and 166 us)."""
    model = replace(MODEL, host=HostTimes(0.0, 0.0, 0.0, 10.0, 3.0), host_base_s=0.0)
    assert model.host_s(StepPlan("mixed", [entry(1, 9), entry(31, 0)])) == pytest.approx((10 + 2 * 3) / 1e6)
    assert model.host_s(StepPlan()) == 0
    for name, measured in (("ours-block", 178.8), ("ours-token", 165.5)):
        table = HOST[name].table_us + HOST[name].table_page_us * 8192 / 16
        assert table == pytest.approx(measured, rel=0.06)


def test_an_empty_step_costs_the_gpu_nothing() -> None:
    assert MODEL.gpu_s(StepPlan()) == 0.0


def gaps(model: StepTimeModel, lag: int, count: int) -> list[float]:
    clock = Clock(model, lag)
    plan = StepPlan("decode", [entry(1, 99)])
    ends = []
    for _ in range(count):
        clock.step(plan)
        ends.append(clock.now_s)
    return [after - before for before, after in pairwise(ends)]


@pytest.mark.parametrize("host_us", [5.0, 5000.0])
def test_lag_0_adds_host_and_gpu_and_lag_1_takes_the_longer(host_us: float) -> None:
    model = StepTimeModel(SHAPE, MODEL.compute, 16, GPU, HostTimes(host_us, 0.0, 0.0))
    gpu = model.gpu_s(StepPlan("decode", [entry(1, 99)]))
    host = host_us / 1e6
    assert gpu > IDLE_STEP_S
    assert gaps(model, 0, 5) == pytest.approx([host + gpu] * 4)
    assert gaps(model, 1, 6)[1:] == pytest.approx([max(host, gpu)] * 4)


def test_time_goes_on_when_a_step_computes_nothing() -> None:
    clock = Clock(StepTimeModel(SHAPE, MODEL.compute, 16, GPU), 0)
    clock.step(StepPlan())
    assert clock.now_s == IDLE_STEP_S


TRUE_DECODE = DecodeTimes(
    9.0, 1.0, {"128": 0.016, "64": 0.026, "32": 0.026}, 0.4, 9000.0, 4500.0, 3.0, {"block_table/16": 1.1}
)
TRUE_EXTEND = ExtendTimes(6.0, 1.5, 0.004, 0.013, 5000.0, 2.0, 8.0, 40.0, {"block_table/16": 0.95})
TABLES = ("req_to_token/1", "block_table/16")


def points(noise: float = 0.0) -> Points:
    """What a machine of known coefficients takes for random batches and a few uniform ones."""
    rng = np.random.default_rng(3)
    decode, extend = [], []
    for number in range(240):
        table = TABLES[number % 2]
        source, weight = ("kernels", 5.0) if number < 40 else (f"w{number % 3}", 1.0)
        lengths = [int(n) for n in rng.integers(50, 6000, int(rng.integers(1, 130)))]
        about = {"table": table, "source": source, "point": number // 2, "weight": weight}
        factor = 1 + noise * rng.standard_normal()
        work = decode_work(lengths, replace(LLAMA, table_tokens=16_400), int(rng.integers(2000, 200_000)))
        us = decode_us(TRUE_DECODE, work, TRUE_DECODE.token_us[str(work.block)], TRUE_DECODE.pages.get(table, 1.0))
        decode.append({**asdict(work), "us": us * factor, **about})
        tiles = extend_work([(n, int(rng.integers(1, 300))) for n in lengths], LLAMA)
        lists = float(number % 4 > 0)
        us = extend_us(TRUE_EXTEND, tiles, TRUE_EXTEND.pages.get(table, 1.0))
        us += lists * list_us(TRUE_EXTEND, tiles.sequences)
        extend.append({**asdict(tiles), "lists": lists, "us": us * factor, **about})
    return Points(pd.DataFrame(decode), pd.DataFrame(extend), ("made up",), {})


def test_calibration_finds_the_machine_it_was_made_from() -> None:
    given = points()
    decode, extend = fit_decode(given.decode), fit_extend(given.extend)
    assert decode.pages["block_table/16"] == pytest.approx(1.1, rel=0.02)
    assert extend.pages["block_table/16"] == pytest.approx(0.95, rel=0.02)
    assert (decode.base_us, decode.dram_gbps) == pytest.approx((9.0, 4500.0), rel=0.15)
    assert (extend.key_us, extend.long_list_us) == pytest.approx((0.013, 40.0), rel=0.05)
    for batch in ([300], [2000] * 60, list(range(50, 5000, 50))):
        work = decode_work(batch, replace(LLAMA, table_tokens=16_400), 50_000)
        token = [times.token_us[str(work.block)] for times in (TRUE_DECODE, decode)]
        assert decode_us(decode, work, token[1], 1.0) == pytest.approx(
            decode_us(TRUE_DECODE, work, token[0], 1.0), 0.02
        )


def test_the_stated_error_is_out_of_sample_and_grows_with_the_noise() -> None:
    little, much = (kernel_errors(points(noise), GpuTimes(), folds=2) for noise in (0.01, 0.2))
    for what in ("decode", "extend"):
        assert 0 < little[what][0] <= little[what][1]
        assert much[what][1] > 3 * little[what][1]


def test_page_sizes_that_were_not_measured_take_the_next_smaller_one() -> None:
    pages = {"block_table/16": 1.1, "block_table/64": 1.2, "req_to_token/1": 1.0}
    found = [page_factor(pages, "block_table", size) for size in (1, 16, 32, 64, 256)]
    assert found == [1.1, 1.1, 1.1, 1.2, 1.2]
    assert page_factor({}, "req_to_token", 16) == 1.0


def test_too_few_points_raise() -> None:
    with pytest.raises(ValueError, match="at least 12 decode points, found 3"):
        fit_decode(points().decode.head(3))


def test_without_a_calibration_the_times_say_so() -> None:
    assert "not calibrated" in GpuTimes().source
    assert not GpuTimes().calibrated


def test_coefficients_survive_their_file(tmp_path: Path) -> None:
    found = replace(GPU, decode=TRUE_DECODE, calibrated=True, source="made up", error={"decode": [0.1, 0.2]})
    save_gpu_times(found, tmp_path / "times.json")
    assert load_gpu_times(tmp_path / "times.json") == found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 9}, "schema_version"),
        ({"watts": 1}, "watts"),
        ({"step_us": -1}, "step_us"),
        ({"swap_gbps": 0}, "swap_gbps"),
        ({"decode": {"watts": 1}}, r"decode\.watts"),
        ({"extend": {"key_us": "x"}}, r"extend\.key_us"),
        ({"extend": 3}, r"extend\."),
    ],
)
def test_a_broken_file_names_the_field(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = tmp_path / "times.json"
    save_gpu_times(GpuTimes(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=says):
        load_gpu_times(path)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_no_object_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"times\.json"):
        load_gpu_times(path)


def test_every_named_model_has_its_compute() -> None:
    for name, shape in SHAPES.items():
        compute = compute_of(name, shape)
        assert compute.num_heads % shape.num_kv_heads == 0
        assert compute.parameters > 1e8
    assert compute_of(SHAPE, SHAPE).num_heads == 4


OWN = [ModelShape(num_layers=2, num_kv_heads=2, head_dim=dim) for dim in (16, 64, 80, 96, 128, 160, 192, 256, 320, 576)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [*SHAPES.values(), *OWN], ids=str)
def test_every_shape_has_its_times(shape: ModelShape, dtype: str) -> None:
    """Latent heads of 576 numbers and other wide rows read in blocks that no table of times names."""
    shape = shape.model_copy(update={"dtype": dtype})
    model = StepTimeModel(shape, compute_of(shape, shape), 16, load_gpu_times())
    for size in (1, 8, 64, 300):
        for plan in (StepPlan("decode", [entry(1, 700)] * size), StepPlan("mixed", [entry(40, 0)] * size)):
            assert 0 < model.gpu_s(plan) < 10


def test_recorded_host_times_rank_as_they_were_recorded() -> None:
    plan = StepPlan("decode", [entry(1, 9) for _ in range(256)])
    took = {name: StepTimeModel(SHAPE, MODEL.compute, 16, GPU, times).host_s(plan) for name, times in HOST.items()}
    assert took["none"] == 0 < took["ours-token"] < took["ours-block"] < took["sglang"] < took["vllm"]


@pytest.fixture(scope="module")
def steps() -> pd.DataFrame:
    """Every step that the card ran, beside its prediction by the saved fit that has not seen its workload."""
    measured = read_steps(RESULTS / "steps.json")
    loads = dict.fromkeys(step.load for step in measured)
    held_out = {load: load_gpu_times(RESULTS / f"step_times_without_{load}.json") for load in loads}
    return step_frame(measured, held_out, load_gpu_times(RESULTS / "step_times.json"))


def test_the_simulated_clock_ranks_the_allocators_as_the_card_does(steps: pd.DataFrame) -> None:
    """On each workload, by a fit that has not seen it. What differs by less than the card does from round to round is
    a tie."""
    ranks = rank_table(steps)
    assert len(ranks) == 12
    assert 0 < ranks["spread"].max() < 0.005
    assert misranked(ranks) == [], rank_lines(ranks)


def test_the_stated_errors_of_steps_are_those_of_the_saved_fits(steps: pd.DataFrame) -> None:
    stated = load_gpu_times(RESULTS / "step_times.json").error
    found = error_table(steps)
    for kind, pair in found.items():
        assert stated[f"steps, {kind}"] == pytest.approx(pair, abs=2e-3)
    assert found["all"][0] < 0.06
    assert found["all"][1] < 0.16


def test_a_rank_is_wrong_only_beyond_the_cards_own_spread() -> None:
    rows = [("a", 100.0, 110.0, (60.0, 62.0)), ("b", 101.0, 105.0, (60.0, 60.5)), ("c", 120.0, 104.0, (70.0, 70.0))]
    frame = pd.DataFrame(
        [
            {"load": "w", "design": d, "measured_us": 1e3 * m, "predicted_us": 1e3 * p, "repeats_us": r}
            for d, m, p, r in rows
        ]
    )
    ranks = rank_table(frame)
    assert ranks["spread"].max() == pytest.approx(62 / 60 - 1)
    assert [pair[1:3] for pair in misranked(ranks)] == [("a", "c"), ("b", "c")]  # a and b are a tie
    assert any("the model behind it" in line for line in rank_lines(ranks))


def test_a_schedule_that_is_no_longer_the_measured_one_is_noticed(tmp_path: Path) -> None:
    data = json.loads((RESULTS / "steps.json").read_text())
    cell = data["cells"][0]
    cell["steps"] = cell["steps"][:20]
    wrong = cell["steps"][7]
    wrong["decode_tokens"] += 1
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({**data, "cells": [cell]}))
    found = f"step {wrong['step']}: decode_tokens {wrong['decode_tokens']} saved, {wrong['decode_tokens'] - 1} by"
    with pytest.raises(ValueError, match=found):
        read_steps(path)


def test_where_nothing_can_be_written_nothing_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "kernels.json"), "--out", str(tmp_path / "file" / "step_times.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", '{"parts": {"decode": {"rows": []}}}', '{"parts": {}}'])
def test_broken_benchmark_results_are_one_error(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert "calibrate:" in capsys.readouterr().err
    assert not (tmp_path / "step_times.json").exists()
