"""Every kernel compiles for sm_90 without a GPU, as its launcher launches it; prints registers and spills."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "support/compile_sm90.py"
pytestmark = pytest.mark.timeout(600)  # two minutes on a core of its own
KERNELS = {
    "_store_kernel",
    "_copy_kernel",
    "_pack_kernel",
    "_slots_kernel",
    "_step_kernel",
    "_gather_kernel",
    "_decode_step_kernel",
    "_merge_kernel",
    "_decode_kernel",
    "_combine_kernel",
    "_extend_kernel",
}


@functools.cache
def report() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=570, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_compiles_for_sm_90(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report()
    with capsys.disabled():
        print(f"\n{'kernel':<16}{'warps':>6}{'stages':>7}{'regs':>6}{'spills':>7}{'stack':>7}{'shared':>8}  variant")
        for x in lines:
            print(
                f"{x['kernel']:<16}{x['warps']:>6}{x['stages']:>7}{x['reg']:>6}{x['spills']:>7}{x['stack']:>7}"
                f"{x['shared_bytes']:>8}  {x['variant']}"
            )
    assert {line["kernel"] for line in lines} == KERNELS


def test_memory_bound_kernels_do_not_spill() -> None:
    """Float32 queries over an fp8 cache may: without tensor cores the converted rows fill the registers."""
    lines = [
        line for line in report() if line["kernel"] != "_extend_kernel" and "float32-float8" not in line["variant"]
    ]
    assert [line for line in lines if line["spills"]] == []


def test_extend_spills_little() -> None:
    """Large tiles stand at the limit of 255 registers, so some spill (instructions that touch local memory).

    The most, 482, is the tile of 256 rows x 128 keys, which on one H200 was still the fastest (LOG.md, 2026-11-29).
    """
    assert [line for line in report() if line["kernel"] == "_extend_kernel" and line["spills"] > 500] == []


def test_shared_memory_fits_an_sm() -> None:
    assert max(line["shared_bytes"] for line in report()) <= 227 * 1024


def test_attention_in_half_precision_uses_tensor_cores_and_wide_asynchronous_loads() -> None:
    """16-byte copies by pointers, or boxes by TMA where pages hold whole blocks of keys."""
    for line in report():
        if line["kernel"] in ("_decode_kernel", "_extend_kernel") and "float32" not in line["variant"]:
            assert line["hgmma"] + line["hmma"] > 0, line
            assert line["ldgsts128"] + line["utmaldg"] > 0, line
