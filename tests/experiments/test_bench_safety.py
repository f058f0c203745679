"""The safety part without a card: which draws are made, and what is read out of compute-sanitizer's text."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kvarena.experiments.bench import draws, peers, peers_triton, safety, sanitize

LAUNCHED = "launched decode, store\n"


def test_variants_are_bounded_different_and_always_the_same() -> None:
    found = draws.variants()
    assert len(set(found)) == len(found) == 200
    assert found == draws.variants()
    assert {v.op for v in found} == {"decode", "extend-triton", "extend-gluon"}
    assert {v.kv_dtype for v in found} == set(draws.DTYPES)
    assert {v.page_size for v in found} == {2**i for i in range(9)}
    assert not any(v.op == "extend-gluon" for v in draws.variants(50, gluon=False))


@pytest.mark.parametrize("index", [0, 7, 60, 199])
def test_lengths_reach_the_edges_and_fit_the_call(index: int) -> None:
    variant = draws.variants()[index]
    seen = set()
    for seed in range(200):
        lens, new = draws._lengths(variant, np.random.default_rng(seed))
        assert len(lens) == len(new) == variant.batch
        assert max(lens) <= variant.width
        seen |= set(lens)
        if variant.op != "decode":
            assert sum(new) <= variant.tokens
            assert all(count <= length for count, length in zip(new, lens, strict=True))
    assert {0, 1, variant.width, variant.width - 1} <= seen
    assert variant.page_size in seen or variant.page_size > variant.width


def test_every_part_of_the_draws_adds_up_to_all_of_them() -> None:
    counts = [safety.DRAWS // draws.VARIANTS + (i < safety.DRAWS % draws.VARIANTS) for i in range(draws.VARIANTS)]
    assert sum(counts) == 10_000


def test_equal_bits_are_told_from_equal_numbers() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    safety.expect_equal("same", nan, nan.clone())
    with pytest.raises(ValueError, match="zero: expected the same bits"):
        safety.expect_equal("zero", torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(ValueError, match="shape: expected the same bits"):
        safety.expect_equal("shape", torch.zeros(2), torch.zeros(3))


def test_a_check_that_fails_is_a_row_that_says_why() -> None:
    def fails() -> None:
        raise ValueError("expected this, found that")

    row = safety._row({"check": "guards"}, fails)
    assert row["error"] == "ValueError: expected this, found that"
    assert "passed" not in row


@pytest.mark.parametrize(
    ("tool", "kernels", "text", "wanted"),
    [
        ("memcheck", "all", "========= ERROR SUMMARY: 0 errors", {"findings": 0}),
        (
            "memcheck",
            "all",
            "========= Invalid __global__ read of size 4 bytes\\n========= ERROR SUMMARY: 1 error",
            {"findings": 1, "shown": ["Invalid __global__ read of size 4 bytes"], "error": "1 findings"},
        ),
        (
            "racecheck",
            "plain",
            "========= RACECHECK SUMMARY: 2 hazards displayed",
            {"findings": 2, "error": "2 findings"},
        ),
        (
            "racecheck",
            "gluon",
            "========= Error: Race at k+0x1 in _hopper.py:96\\n========= RACECHECK SUMMARY: 1 hazard displayed",
            {"findings": 1, "places": {"_hopper.py:96": 1}, "explained": sanitize.MBARRIERS},
        ),
    ],
)
def test_findings_are_counted_shown_and_only_mbarriers_explained(
    tool: str, kernels: str, text: str, wanted: dict[str, object]
) -> None:
    row = sanitize.summary_of(tool, kernels, LAUNCHED + text.replace("\\n", "\n"))
    assert row["launched"] == ["decode", "store"]
    assert {name: row[name] for name in wanted} == wanted
    assert ("error" in row) == ("error" in wanted)


@pytest.mark.parametrize("text", ["", LAUNCHED, "========= ERROR SUMMARY: 0 errors"])
def test_a_run_without_a_summary_or_without_launches_is_an_error(text: str) -> None:
    assert sanitize.summary_of("memcheck", "all", text)["error"].startswith("no summary from compute-sanitizer")


def test_without_the_tool_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert list(sanitize.sanitize_rows()) == [
        {"op": "sanitize", "error": "compute-sanitizer is not on the PATH"},
    ]


def test_triton_peers_without_package_or_files_are_named_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(peers_triton.FILES_ENV, raising=False)
    found, skipped = peers.load_peers(["vllm"])
    assert bool(found) != bool(skipped)
    monkeypatch.setenv(peers_triton.FILES_ENV, str(tmp_path))
    found, skipped = peers.load_peers(["vllm", "sglang"])
    assert found == {}
    assert skipped["vllm"] == f"ImportError: {peers_triton.FILES_ENV}={tmp_path} holds no folder vllm"


def test_files_of_a_package_are_imported_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "peerpackage" / "ops"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("from peerpackage.settings import LEVEL\nANSWER = LEVEL + 1\n")
    monkeypatch.setenv(peers_triton.FILES_ENV, str(tmp_path))
    for name in ("peerpackage", "peerpackage.ops", "peerpackage.ops.one", "peerpackage.settings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    stand_ins = {"peerpackage.settings": peers_triton._module("peerpackage.settings", LEVEL=41)}
    assert peers_triton._import("peerpackage.ops.one", lambda: stand_ins).ANSWER == 42
