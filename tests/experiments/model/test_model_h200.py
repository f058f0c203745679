"""The benchmark of the 8B shape on a CPU: what it gates on is right and can fail, and every part runs and is kept."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="models come from transformers: pip install 'kvarena[model]'")

from kvarena.experiments.bench import model_capacity, model_h200, model_match, model_steps  # noqa: E402
from kvarena.experiments.bench.model_decode import Decoder, gate  # noqa: E402
from kvarena.experiments.capacity import DESIGNS, capacity_plan, small_card  # noqa: E402
from kvarena.experiments.capacity_card import read_measured, write_measured  # noqa: E402
from kvarena.experiments.engine.paged_memory import KVShape  # noqa: E402
from kvarena.experiments.engine.validation import ALLOCATORS, StepLoad  # noqa: E402
from kvarena.experiments.model.loading import random_model  # noqa: E402
from support.threads import one_thread  # noqa: E402

SETUP = model_steps.Setup(
    shape=KVShape(1, 1, 16), num_heads=2, device="cpu", backend="torch", dtype=torch.float32, max_steps=60
)


@pytest.fixture(autouse=True)
def _threads():
    with one_thread():
        yield


def test_all_designs_compute_the_same() -> None:
    errors = gate(random_model("llama"), context=21, backend="torch")
    assert len(errors) == 3
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("design", ["token, 1", "token, 16"])
def test_a_design_that_reads_wrong_pages_does_not_pass_the_gate(monkeypatch: pytest.MonkeyPatch, design: str) -> None:
    fill = Decoder._fill

    def shifted(self, seq, context, seed):
        wrong = self.allocator.kind == "token" and self.allocator.page_size == int(design.split()[1]) and seed == 3
        fill(self, seq, context, seed + wrong)  # one request of four

    monkeypatch.setattr(Decoder, "_fill", shifted)
    with pytest.raises(ValueError, match="do not compute the same"):
        gate(random_model("llama"), context=21, backend="torch")


def test_host_times_are_taken_each_step() -> None:
    decoder = Decoder(random_model("llama"), "token, 1", 3, 10, 5, "torch")
    decoder.capture()
    assert len(decoder.run(5)) == 5
    assert len(decoder.allocator_ms) == len(decoder.adapter_ms) == 6
    assert all(seq.num_computed_tokens == 16 for seq in decoder.seqs)
    decoder.allocator.check()


@pytest.mark.parametrize("design", list(ALLOCATORS))
def test_a_row_a_step_says_what_was_computed(design: str) -> None:
    load = StepLoad("chat", {"num_sessions": 4, "sessions_per_s": 9.0}, 6, 4096)
    rows = list(model_steps.step_rows("chat", load, design, SETUP))
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert sum(row["admitted"] for row in rows) >= 6
    assert sum(row["new_tokens"] for row in rows) > 3000
    for row in rows:
        count, tokens, longest = row["num_decodes"], row["decode_tokens"], row["longest_decode"]
        assert longest <= tokens <= count * longest
        assert row["num_extends"] == len(row["extends"])
        assert row["extend_pairs"] == sum(n * before + n * (n + 1) // 2 for before, n in row["extends"])
        assert row["new_tokens"] == count + sum(n for _, n in row["extends"])
        assert row["kernels_us"] > 0
        assert row["host_us"] > 0


def test_rounds_of_a_step_become_one_with_their_median_and_the_time_launched_kernel_by_kernel() -> None:
    def row(step: int, repeat: int, us: float, *, bound: bool = False, eager: bool = False) -> dict[str, Any]:
        about = {"workload": "chat", "allocator": "token, 1", "step": step, "num_decodes": 3, "num_extends": 1}
        return {**about, "kernels_us": us, "repeat": repeat, "launch_bound": bound, "eager": eager}

    rounds = [
        row(0, 0, 9e4, bound=True),
        row(0, 1, 12.0),
        row(0, 2, 10.0),
        row(0, 3, 11.0),
        row(0, 4, 30.0, eager=True),
    ]
    (cell,) = model_h200.step_cells([*rounds, row(1, 0, 9e4, bound=True)])
    (step,) = cell["steps"]
    assert (step["kernels_us"], step["repeats_us"], step["eager_us"]) == (11.0, [12.0, 10.0, 11.0], 30.0)
    assert (cell["load"], cell["design"], cell["page_size"], cell["measured"]) == ("chat", "token-1", 1, 4)


@pytest.mark.parametrize(("design", "mib"), [("block-16", 2), ("contiguous-max", 3)])
def test_what_is_measured_to_fit_is_what_the_closed_form_promises(
    design: str, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_capacity, "BEHIND_PEAK", 3)
    shape: Any = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    limits: Any = {"loads": ["shared"], "rows": 16, "max_model_len": 4400}
    cells = capacity_plan(shape, on=small_card("CPU", mib), panels=["equal"], designs=[design], **limits)
    (row,) = model_capacity.rows(cells, model_capacity.Place("cpu", "torch"))
    assert row["measured"] == row["predicted"] > 1
    assert [burst["carried"] for burst in row["bursts"]] == [True, False]
    memory = row["memory"]
    assert memory["finite"]
    assert memory["full_steps"] > 0
    assert memory["pool_bytes"] == row["sizing"]["kv_bytes"] + row["sizing"]["padding_page_bytes"]


def test_two_devices_that_differ_from_one_are_refused() -> None:
    alone = {"outputs": {"a": [1, 2]}, "tables": [[0]], "preemptions": 0, "ties": []}
    assert model_match.compare("block", [alone] * 3)["tokens"] == 2
    for field, value in (("outputs", {"a": [1, 3]}), ("tables", [[1]])):
        other = {**alone, field: value}
        for logs in ([alone, other, other], [alone, alone, other]):
            with pytest.raises(ValueError, match="two devices differ from one"):
                model_match.compare("block", logs)
    tied = {**alone, "outputs": {"a": [1, 3]}, "ties": [{"position": 1}]}
    assert not model_match.compare("block", [alone, tied, tied])["outputs_equal"]
    with pytest.raises(ValueError, match="two devices differ from one"):  # the ranks must agree whatever is tied
        model_match.compare("block", [alone, tied, alone])


def test_parts_are_kept_and_joined(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    model_h200.main([*arguments, "--parts", "decode", "--batches", "2", "--context", "8", "--steps", "2"])
    rows = [_cell_row("chat", design) for design in DESIGNS]
    for shard in (1, 0):
        part: dict[str, Any] = {"provenance": {"torch": "2"}, "card": {"name": "CPU"}, "cells": rows[shard::2]}
        (tmp_path / f"capacity{shard}.json").write_text(json.dumps(part))
    model_h200.main([*arguments, "--merge"])
    assert read_measured(tmp_path / "capacity.json", predicted=False)["cells"] == rows
    found = json.loads((tmp_path / "model.json").read_text())["parts"]
    assert [cell["design"] for cell in found["decode"]["cells"]] == ["block, 16", "token, 1", "token, 16"]
    assert all(cell["tokens_per_s"] > 0 for cell in found["decode"]["cells"])


def test_new_cells_join_a_saved_file_and_are_sized_as_its_own(tmp_path: Path) -> None:
    old = [_cell_row("chat", design) for design in DESIGNS]
    gpu = {"name": "CPU", "total_bytes": 90, "weights_bytes": 20, "workspace_bytes": 10}
    write_measured(tmp_path / "capacity.json", old, gpu)
    assert astuple(model_h200._card_of(tmp_path / "capacity.json")) == ("CPU", 90, 20, 10)
    new = [{**old[1], "measured": 4}, _cell_row("shared", "block-16")]
    part = {"provenance": {"torch": "3"}, "card": {"name": "CPU"}, "cells": new}
    (tmp_path / "capacity0.json").write_text(json.dumps(part))
    model_h200.main(["--device", "cpu", "--out", str(tmp_path), "--merge"])
    found = read_measured(tmp_path / "capacity.json", predicted=False)
    assert found["cells"] == [old[0], new[0], *old[2:], new[1]]
    assert found["gpu"] == gpu
    assert not (tmp_path / "model.json").exists()


def _cell_row(load: str, design: str) -> dict[str, Any]:
    return {"panel": "equal", "load": load, "design": design, "measured": 3}


def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--shard: expected I below N"):
        model_h200.parse(["--device", "cpu", "--shard", "2", "2"])
    with pytest.raises(ValueError, match="cannot be written"):
        model_h200.parse(["--device", "cpu", "--out", __file__])
    with pytest.raises(ValueError, match=r"expected decode\.json"):
        model_h200.main(["--merge", "--out", str(tmp_path)])
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        model_h200.main([])
