"""The step-time model: hand-computed times, what calibration finds, what its files say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kvarena.experiments.engine.calibrate import benchmark_rows, calibrate, main
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
    step_amounts,
)
from kvarena.experiments.models import SHAPES, ModelShape

SHAPE = ModelShape(num_layers=2, num_kv_heads=1, head_dim=64)  # 512 bytes of KV a token
GPU = GpuTimes(
    decode_us=3.0,
    decode_gbps=1.0,
    extend_us=5.0,
    extend_tflops=1e-3,
    linear_gbps=2.0,
    linear_tflops=1e-3,
    step_us=7.0,
    store_us=1.0,
    store_gbps=1.0,
)
MODEL = StepTimeModel(SHAPE, Compute(num_heads=4, parameters=1000), 16, GPU, HostTimes(2.0, 0.5, 0.25), 1e-6)


def entry(num_new: int, num_before: int) -> Scheduled:
    return Scheduled(make_request("r", range(num_before + num_new), 4), num_new, num_before, True, 0)


def test_a_decode_step_by_hand() -> None:
    plan = StepPlan("decode", [entry(1, 99), entry(1, 199)])
    # step 7; weights 2000 B / 2 GB/s = 1 us against 2 x 1000 x 2 / 1e9 flop/s = 4 us; 2 layers x 3 us;
    # 300 tokens x 512 B / 1 GB/s = 153.6 us; stores 2 layers x 1 us + 2 tokens x 512 B / 1 GB/s = 3.024 us
    assert MODEL.gpu_s(plan) == pytest.approx((7 + 4 + 6 + 153.6 + 3.024) / 1e6)


def test_a_prefill_step_by_hand() -> None:
    plan = StepPlan("prefill", [entry(4, 10)])
    pairs = 32 * 10 + 32 * 64 // 2 + 32 * 64  # 4 queries fill a tile of 32; keys end in half a tile of 128 on average
    attention = 4 * 4 * 64 * pairs * 2 / 1e3  # us at 1e9 flop/s
    stores = 2 + 4 * 512 / 1e3
    assert MODEL.gpu_s(plan) == pytest.approx((7 + 8 + 2 * 5 + attention + stores) / 1e6)


def test_a_prefill_step_that_reads_more_than_it_computes_takes_the_time_of_reading() -> None:
    gpu = replace(GPU, extend_tflops=1e3, decode_gbps=1e-3)
    model = StepTimeModel(SHAPE, MODEL.compute, 16, gpu)
    amounts = step_amounts(StepPlan("prefill", [entry(4, 10)]))
    assert amounts.extend_tokens == 14
    assert model.kernels_us(amounts) == pytest.approx(2 * 5 + 2 + 4 * 512 / 1e3 + 14 * 512 / 1e-3 / 1e3)


def test_host_time_by_hand() -> None:
    plan = StepPlan("mixed", [entry(1, 9), entry(20, 0)])
    plan.admitted = [plan.batch[1].request]
    assert MODEL.host_s(plan) == pytest.approx(1e-6 + (2 + 2 * 0.5 + 20 * 0.25) / 1e6)


def test_an_empty_step_costs_the_gpu_nothing() -> None:
    assert MODEL.gpu_s(StepPlan()) == 0.0


def steps(model: StepTimeModel, lag: int, count: int) -> list[float]:
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
    assert steps(model, 0, 5) == pytest.approx([host + gpu] * 4)
    assert steps(model, 1, 6)[1:] == pytest.approx([max(host, gpu)] * 4)


def test_time_goes_on_when_a_step_computes_nothing() -> None:
    clock = Clock(StepTimeModel(SHAPE, MODEL.compute, 16, GPU), 0)
    clock.step(StepPlan())
    assert clock.now_s == IDLE_STEP_S


def rows(noise: float = 0.0) -> list[dict[str, object]]:
    """Benchmark rows of a machine with 4 us + bytes / 4 TB/s and 6 us + flops / 600 TFLOP/s."""
    rng = np.random.default_rng(3)
    made: list[dict[str, object]] = []
    for size in (1, 16):
        for megabytes in (1, 10, 50, 200, 500, 2000):
            us = (4 + megabytes * 1e6 / 4e6) * (1 + noise * rng.standard_normal())
            made.append({"op": "decode", "page_size": size, "bytes": megabytes * 1e6, "us": us})
        for gigaflops in (1, 10, 100, 400, 1000, 4000):
            us = (6 + gigaflops * 1e9 / 600e6) * (1 + noise * rng.standard_normal())
            made.append({"op": "extend", "page_size": size, "flops": gigaflops * 1e9, "us": us})
    return made


def test_calibration_finds_the_coefficients_it_was_made_from() -> None:
    found = calibrate(rows(), "synthetic")
    assert found.calibrated
    assert found.decode_us == pytest.approx(4, rel=1e-3)
    assert found.decode_gbps == pytest.approx(4000, rel=1e-3)
    assert found.extend_us == pytest.approx(6, rel=1e-3)
    assert found.extend_tflops == pytest.approx(600, rel=1e-3)
    assert found.error["decode"][1] < 1e-3


def test_the_stated_error_is_out_of_sample_and_grows_with_the_noise() -> None:
    little, much = (calibrate(rows(noise), "synthetic").error["decode"] for noise in (0.01, 0.2))
    assert 0 < little[0] <= little[1]
    assert much[1] > 5 * little[1] > 0


def test_page_sizes_measured_apart_have_their_own_bandwidth() -> None:
    slow = [{**row, "us": 2 * float(str(row["us"]))} if row["page_size"] == 1 else row for row in rows()]
    found = calibrate(slow, "synthetic")
    assert found.decode_gbps_by_page["16"] == pytest.approx(2 * found.decode_gbps_by_page["1"], rel=1e-2)
    plan = StepPlan("decode", [entry(1, 9999)])
    times = {size: StepTimeModel(SHAPE, MODEL.compute, size, found).gpu_s(plan) for size in (1, 4, 16, 64)}
    assert times[1] == times[4] > times[16] == times[64]


def test_too_few_rows_raise() -> None:
    with pytest.raises(ValueError, match="at least 2 decode rows"):
        calibrate([], "none")


def test_without_a_calibration_the_times_say_so() -> None:
    assert "not calibrated" in GpuTimes().source
    assert not GpuTimes().calibrated


def test_coefficients_survive_their_file(tmp_path: Path) -> None:
    found = calibrate(rows(0.05), "synthetic")
    save_gpu_times(found, tmp_path / "times.json")
    assert load_gpu_times(tmp_path / "times.json") == found


@pytest.mark.parametrize(
    ("change", "says"),
    [({"schema_version": 9}, "schema_version"), ({"watts": 1}, "watts"), ({"decode_us": -1}, "decode_us")],
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


def test_recorded_host_times_rank_as_they_were_recorded() -> None:
    plan = StepPlan("decode", [entry(1, 9) for _ in range(256)])
    took = {name: StepTimeModel(SHAPE, MODEL.compute, 16, GPU, times).host_s(plan) for name, times in HOST.items()}
    assert took["none"] == 0 < took["ours-token"] < took["ours-block"] < took["sglang"] < took["vllm"]


def benchmark(tmp_path: Path) -> Path:
    """A results file as the kernel benchmark writes it, with peers, other studies and a failed row among the rows."""
    made = []
    for index, row in enumerate(rows(0.02)):
        us, page, point = float(str(row["us"])), row["page_size"], f"p{index}"
        rate = {"gbps": row["bytes"] / us / 1e3} if "bytes" in row else {"tflops": row["flops"] / us / 1e6}  # type: ignore[operator]
        shared = {"op": row["op"], "point": point, "page": page, "study": "grid"}
        made.append({**shared, "kernel": "kvarena-block_table", "us": us, **rate})
        made.append({**shared, "kernel": "kvarena-req_to_token", "us": 3 * us, **{k: v / 3 for k, v in rate.items()}})
        made.append({**shared, "kernel": "fa3", "us": us / 2, **rate})
        made.append({**shared, "study": "heads", "kernel": "kvarena-block_table", "us": us / 9, **rate})
    made.append({"op": "decode", "point": "late", "page": 16, "study": "grid", "error": "no time left"})
    path = tmp_path / "kernels.json"
    part = {"provenance": {"card": ["NVIDIA H200"]}, "rows": made}
    path.write_text(json.dumps({"schema_version": 1, "parts": {"decode": part}}))
    return path


def test_benchmark_results_become_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = benchmark(tmp_path)
    taken, source = benchmark_rows(path)
    assert len(taken) == len(rows())  # the fastest of ours at each point; no peer, no other study, no failure
    assert "NVIDIA H200" in source
    assert main([str(path)]) == 0
    times = load_gpu_times(tmp_path / "step_times.json")
    assert times.calibrated
    assert times.decode_gbps == pytest.approx(4000, rel=0.1)
    assert times.extend_tflops == pytest.approx(600, rel=0.1)
    assert 0 < times.error["decode"][0] <= times.error["decode"][1] < 0.2
    assert json.loads(capsys.readouterr().out)["error"] == times.error
    assert {"step_times.pdf", "step_times.svg", "step_times.png"} <= {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize("text", ["", "{}", '{"parts": {"decode": {"rows": []}}}', '{"parts": {}}'])
def test_broken_benchmark_results_are_one_error(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert "calibrate:" in capsys.readouterr().err
    assert not (tmp_path / "step_times.json").exists()
