"""The kernel benchmark without a card: placements, tables, gates that can fail, results, targets, figures."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvarena.experiments.bench import gate, kernel_plots, peers, shapes, tables, timing
from support.commands import invoke

SAVED = Path(__file__).parents[2] / "results" / "h200" / "kernels.json"


@pytest.mark.parametrize("placement", shapes.PLACEMENTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_placement_names_different_pages_of_the_pool(placement: str, page_size: int) -> None:
    pages = shapes.place_pages(1000, 65_536 // page_size, page_size, placement, seed=3)
    assert len(set(pages.tolist())) == 1000
    assert pages.min() >= 0
    assert pages.max() < 65_536 // page_size


def test_groups_are_runs_and_windows_stay_in_their_window() -> None:
    groups = shapes.place_pages(1024, 65_536, 1, "groups16", seed=0).reshape(-1, 16)
    assert (np.diff(groups, axis=1) == 1).all()
    assert (np.diff(groups[:, 0]) != 16).any()
    windows = shapes.place_pages(1024, 65_536, 1, "window64", seed=0)
    assert (windows // 64 == np.arange(1024) // 64).all()
    assert (np.diff(windows) != 1).any()


def test_an_unknown_placement_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match="placement: expected one of shuffled, in_order"):
        shapes.place_pages(4, 8, 1, "sorted", seed=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_both_kinds_of_table_name_the_same_slots(page_size: int) -> None:
    lens = (40, 7, 33)
    options: dict[str, Any] = {"pool_slots": 1024, "device": "cpu"}
    block = shapes.make_table(lens, page_size, "shuffled", 5, **options)
    token = shapes.make_table(lens, page_size, "shuffled", 5, kind="req_to_token", **options)
    assert token.tokens_per_entry == 1
    for request in range(3):
        assert torch.equal(block.slots(request), token.slots(request))


def test_one_entry_a_request_is_the_identity_placement() -> None:
    lens = (64,) * 3
    flat = shapes.make_table(lens, 16, "identity", 0, kind="one_entry", device="cpu")
    paged = shapes.make_table(lens, 16, "identity", 0, pool_slots=1024, device="cpu")
    assert flat.entries.shape == (3, 1)
    for request in range(3):
        assert torch.equal(flat.slots(request), paged.slots(request))
    with pytest.raises(ValueError, match="equal powers of two"):
        shapes.make_table((64, 32), 16, "identity", 0, kind="one_entry", device="cpu")


def test_flops_count_every_visible_pair() -> None:
    shape = shapes.ExtendShape((3, 1), (2, 0))
    pairs = (3 + 4 + 5) + 1
    assert shape.flops(num_heads=2) == 4 * 2 * shapes.HEAD_DIM * pairs


def test_median_and_spread_of_samples() -> None:
    timed = timing.Timed((4.0, 1.0, 2.0, 3.0, 100.0))
    assert timed.us == 3.0
    assert timed.spread > 0
    assert timing.Timed((2.0,)).spread == 0.0


def attention_case() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    table = shapes.make_table((50,), 16, "shuffled", 1, pool_slots=256, device="cpu")
    k, v = (torch.randn(16, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    for cache in (k, v):
        gate.poison(cache, [table])
    index, positions = gate.sample_positions(20, 50, 4, torch.device("cpu"))
    q = torch.randn(20, 4, 128, dtype=torch.bfloat16)
    return q[index], gate.oracle(q[index], k, v, table, 0, positions)


def test_the_gate_passes_the_rounded_truth_and_fails_what_is_wrong() -> None:
    _, wanted = attention_case()
    good = wanted[0].to(torch.bfloat16)
    assert gate.check_rows("good", good, wanted, wanted[2].float()) <= 0.6
    for planted in (good * 1.05, torch.where(torch.arange(128) == 7, math.nan, good), good.roll(1, 0)):
        with pytest.raises(ValueError, match="planted: expected outputs inside their bound"):
            gate.check_rows("planted", planted.to(torch.bfloat16), wanted)
    with pytest.raises(ValueError, match="expected lse within"):
        gate.check_rows("lse", good, wanted, wanted[2].float() + 1e-3)


def test_poison_leaves_owned_slots_alone() -> None:
    table = shapes.make_table((20, 3), 4, "shuffled", 2, pool_slots=64, device="cpu")
    cache = torch.ones(16, 4, 1, 2)
    gate.poison(cache, [table])
    owned = torch.cat([table.slots(0), table.slots(1)])
    assert cache.view(64, 2)[owned].eq(1).all()
    assert cache.isnan().any(dim=-1).sum() == 64 - 23


def result(**changes: Any) -> dict[str, Any]:
    """A results file of two kernels at one decode point and one extend shape."""
    decode = {"op": "decode", "study": "grid", "point": "64x16k", "page": 16, "placement": "shuffled"}
    extend = {"op": "extend", "study": "grid", "point": "8192/0x1", "page": 16, "placement": "shuffled"}
    rows = [
        {"op": "ceiling", "what": "read", "gbps": 4500.0, "us": 1.0, "kernel": "kvarena-read"},
        {**decode, "kernel": "kvarena-block_table", "us": 980.0, "gbps": 4400.0} | changes,
        {**decode, "kernel": "fa3", "us": 990.0, "gbps": 4350.0},
        {**extend, "kernel": "kvarena-gluon", "us": 1.0, "tflops": 700.0},
        {**extend, "kernel": "fa3", "us": 1.1, "tflops": 640.0},
    ]
    info = {"card": ["Card", "1.2"], "torch": "2", "triton": "3.6.0", "kvarena": {"commit": "abc"}}
    return {"schema_version": 1, "parts": {"decode": {"provenance": info, "rows": rows}}}


def test_targets_say_what_was_wanted_found_and_met() -> None:
    found = {target.name: target for target in tables.targets(result())}
    over = found["decode 64x16k page 16: time over the faster of fa3"]
    assert (over.met, over.found, over.wanted) == (True, "0.990", "<= 1.005")
    assert found["decode 64x16k page 16: share of the read ceiling"].met
    assert found["extend 8192/0x1 page 16: speed over FA3"].found == "1.094"
    slow = {t.name: t for t in tables.targets(result(us=1000.0, gbps=4300.0))}
    assert not slow["decode 64x16k page 16: time over the faster of fa3"].met
    assert not slow["decode 64x16k page 16: share of the read ceiling"].met


def test_a_page_of_targets_counts_each_once_and_names_those_not_met() -> None:
    whole = result(us=1000.0, gbps=4300.0)
    found = tables.targets(whole)
    missed = [target for target in found if not target.met]
    text = tables.targets_markdown(whole)
    assert f"| all | {len(found)} | {len(found) - len(missed)} |" in text
    assert [line for line in text.splitlines() if "| decode |" in line or "| extend |" in line]
    assert all(f"| {target.name} | {target.wanted} | {target.found} |" in text for target in missed)
    assert missed


def test_page_one_in_runs_of_64_may_be_no_slower_than_page_16() -> None:
    for us, met in ((984.0, True), (986.0, False)):
        whole = result()
        labels = {"op": "decode", "study": "placement", "placement": "groups64", "page": 1, "point": "64x16k"}
        whole["parts"]["decode"]["rows"].append({**labels, "kernel": "kvarena-block_table", "us": us, "gbps": 4400.0})
        found = {target.name: target.met for target in tables.targets(whole)}
        assert found["decode 64x16k: page 1 in runs of 64 slots over page 16"] is met


def test_beside_host_bound_targets_stands_what_bounds_them() -> None:
    swap = {"op": "swap", "page": 16, "mb": 66, "way": "out"}
    rows = [{**swap, "kernel": kernel, "gbps": rate} for kernel, rate in (("kvarena", 49.0), ("one copy", 54.0))]
    rows.append({**swap, "kernel": "one copy", "gbps": 1.0, "way": "in"})
    for what, us in (("decode", 70.0), ("lists", 90.0), ("floor", 15.0), ("prefill", 99.0)):
        rows.append({"op": "host", "what": f"adapter_{what}", "table": "block_table", "page": 16, "us": us})
    whole = {"schema_version": 1, "parts": {"rest": {"rows": rows}}}
    found = {target.name: (target.met, target.beside) for target in tables.targets(whole)}
    assert found == {
        "swap out page 16: GB/s": (False, "one copy: 54.0"),
        "host time of adapter_decode, block_table page 16: us": (
            False,
            "its copy and launch alone: 15.0, by update_step and batch: 90.0",
        ),
    }
    assert "| swap out page 16: GB/s | >= 50 | 49.0 | one copy: 54.0 |" in tables.targets_markdown(whole)


def test_rows_with_errors_are_left_out_of_tables() -> None:
    assert tables.rows_of(result(error="late"), op="decode", kernel="kvarena-block_table") == []


def test_a_part_replaces_only_itself(tmp_path: Path) -> None:
    from kvarena.experiments.bench.kernels import merge

    path = tmp_path / "card" / "kernels.json"
    merge(path, "check", [{"op": "check"}], {"card": ["a"]})
    merge(path, "decode", [{"op": "decode", "us": 2.0}], {"card": ["b"]})
    merge(path, "decode", [{"op": "decode", "us": 1.0}], {"card": ["c"]})
    whole = json.loads(path.read_text())
    assert whole["parts"]["check"]["rows"] == [{"op": "check"}]
    assert whole["parts"]["decode"] == {"provenance": {"card": ["c"]}, "rows": [{"op": "decode", "us": 1.0}]}
    assert list(path.parent.iterdir()) == [path]


def test_peers_that_cannot_run_are_named_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(peers.FA3_ENV, raising=False)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found, skipped = peers.load_peers(["fa3", "sdpa"])
    assert list(found) == ["sdpa"]
    assert skipped["fa3"] == f"ImportError: vLLM is not installed and {peers.FA3_ENV} is not set"


@pytest.mark.parametrize("name", kernel_plots.FIGURES)
def test_figures_redraw_from_the_saved_results(name: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ax = kernel_plots.FIGURES[name](kernel_plots.load_kernels(SAVED))
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.lines or ax.patches
    assert ax.get_legend() is not None
    plt.close(ax.figure)


def test_saved_results_hold_no_failed_row_and_say_where_they_come_from() -> None:
    whole = kernel_plots.load_kernels(SAVED)
    for part in whole["parts"].values():
        assert [row for row in part["rows"] if "error" in row] == []
        assert {"card", "torch", "triton", "kvarena", "extend"} <= set(part["provenance"])
    assert "H200" in kernel_plots.footer(whole)


def test_the_benchmark_imports_torch_triton_numpy_and_ours_only() -> None:
    script = """if True:
        import sys, numpy, torch, triton
        before = set(sys.modules)
        from kvarena.experiments.bench import kernels, sanitize
        from kvarena.allocators import adapter
        more = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
        allowed = {"kvarena", "numpy", "torch", "triton", "cython_runtime"}
        print(sorted(name for name in more - allowed if not name.startswith("_cython")))
    """
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"schema_version": 2}')
    with pytest.raises(ValueError, match="schema_version: expected 1, found 2"):
        kernel_plots.load_kernels(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        kernel_plots.load_kernels(path)


def test_plots_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvarena.experiments.bench.kernel_plots"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_shows_saved_results_and_draws(tmp_path: Path) -> None:
    from kvarena.experiments.cli import app
    from typer.testing import CliRunner

    outcome = CliRunner().invoke(app, ["bench", "kernels", "--saved", str(SAVED), "--figures", str(tmp_path / "f")])
    assert outcome.exit_code == 0, outcome.output
    assert "read ceiling" in outcome.output
    assert len(list((tmp_path / "f").iterdir())) == 3 * len(kernel_plots.FIGURES) + 1
    assert "| all |" in (tmp_path / "f" / "targets.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_without_a_card_or_a_file_the_command_says_so() -> None:
    from kvarena.experiments.cli import app
    from typer.testing import CliRunner

    for arguments, message in (([], "expected one of them"), (["--part", "decode"], "expected a CUDA device")):
        outcome = CliRunner().invoke(app, ["bench", "kernels", *arguments])
        assert isinstance(outcome.exception, ValueError)
        assert message in str(outcome.exception)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("safety.json", "safety: random calls of decode: 4,550 checked, 0 wrong"),
        ("sanitizer.json", "compute-sanitizer: memcheck, all kernels: 0 findings over"),
    ],
)
def test_a_saved_safety_report_is_shown_without_empty_tables(name: str, words: str) -> None:
    shown = invoke("bench", "kernels", "--saved", SAVED.parent / name).stdout
    assert words in shown
    assert "nan" not in shown
    assert "targets" not in shown


def test_a_broken_safety_row_is_counted() -> None:
    rows = [{"op": "safety", "check": "guards", "what": "slots", "passed": False}]
    rows += [{"op": "decode", "draws": 50, "error": "ValueError: wrong"}, {"op": "decode", "draws": 50}]
    text = io.StringIO()
    tables.print_tables({"parts": {"safety": {"rows": rows}, "sanitize": {"rows": [{"error": "not found"}]}}}, text)
    assert "guards: 1 checked, 1 wrong" in text.getvalue()
    assert "random calls of decode: 100 checked, 1 wrong" in text.getvalue()
    assert "kernels: not found" in text.getvalue()


def test_measurements_of_another_benchmark_are_told_by_their_missing_rows() -> None:
    with pytest.raises(ValueError, match=r"model\.json: parts\.decode: expected rows of `kvarena bench kernels`"):
        invoke("bench", "kernels", "--saved", SAVED.parent / "model.json")
