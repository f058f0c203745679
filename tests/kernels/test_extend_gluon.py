"""The Gluon extend kernel without a GPU: what it takes, how it sees a pool, and that it compiles for sm_90."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kvarena.kernels import extend_gluon
from kvarena.kernels.pool import LAYOUTS, KVPool
from support.triton36 import environment

SUPPORT = Path(__file__).parent.parent / "support"


@functools.cache
def report() -> list[dict[str, Any]]:
    variables, reason = environment()
    if reason:
        pytest.skip(reason)
    script = [sys.executable, str(SUPPORT / "compile_gluon.py")]
    result = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_every_variant_compiles_for_sm_90_and_fits_one_sm(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in report() if line["kernel"] == "extend_kernel"]
    with capsys.disabled():
        for line in lines:
            print("\n" + " ".join(f"{name}={value}" for name, value in line.items()), end="")
    assert len(lines) == 9
    assert max(line["shared_bytes"] for line in lines) <= 227 * 1024


def test_products_run_on_wgmma_and_loads_by_tma_or_16_byte_copies() -> None:
    for line in report():
        if line["kernel"] != "extend_kernel":
            continue
        assert line["hgmma"] == 96, line  # two consumers x (first, masked, plain and last block)
        boxes, rows = line["utmaldg"] > 2, line["ldgsts"] > 0  # two TMA loads are the queries'
        assert (boxes, rows) == ((True, False) if line["page"] >= 8 else (False, True)), line


def test_gathered_rows_do_not_spill_and_boxes_only_outside_the_products() -> None:
    lines = [line for line in report() if line["kernel"] == "extend_kernel"]
    assert [line for line in lines if line["page"] < 8 and line["spills"]] == []
    assert [line for line in lines if line["spills"] > 80] == []


def test_all_other_kernels_compile_under_triton_3_6_too() -> None:
    variables, reason = environment()
    if reason:
        pytest.skip(reason)
    words = ["store-", "copy-", "gather", "scatter", "slots-", "merge", "bfloat16-bfloat16-D128-128-H32-8-S16-E16"]
    script = [sys.executable, str(SUPPORT / "compile_sm90.py"), *words]
    result = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = {json.loads(line)["kernel"] for line in result.stdout.splitlines() if line.startswith("{")}
    assert {"_store_kernel", "_decode_kernel", "_extend_kernel", "_merge_kernel", "_slots_kernel"} <= kernels


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize("heads", [1, 2])
def test_box_view_addresses_every_slot(layout: str, page_size: int, heads: int) -> None:
    pool = KVPool(2, 3, page_size, heads, 16, dtype=torch.float32, layout=layout)
    for cache in (pool.key(1), pool.value(1)):
        cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).view(cache.shape))
        view = extend_gluon.box_view(cache)
        assert view is not None
        shape, strides, head_rows, head_cols = view
        flat = torch.as_strided(cache, shape, strides)  # raises where the view leaves the storage
        rows_a_page = cache.stride(0) // cache.stride(1)
        for page, head in ((0, 0), (2, heads - 1), (3, 0)):
            row, col = page * rows_a_page + head * head_rows, head * head_cols
            assert torch.equal(flat[row : row + page_size, col : col + 16], cache[page, :, head])


def case(**changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "heads": 32, "kv_heads": 8, "dim": 128, "page": 16}
    options |= {name: changes.pop(name) for name in list(changes) if name in options}
    pool = KVPool(1, 3, options["page"], options["kv_heads"], options["dim"], dtype=options["dtype"])
    q = torch.zeros(4, options["heads"], options["dim"], dtype=options["dtype"])
    return {"q": q, "key_cache": pool.key(0), "value_cache": pool.value(0), **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 8}, "window is set"),
        ({"softcap": 30.0}, "softcap is set"),
        ({"alibi_slopes": torch.ones(32)}, "alibi_slopes is set"),
        ({"k_scale": 2.0}, "k_scale is set"),
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"dim": 64}, "head_dim 64"),
        ({"heads": 24}, "3 query heads a KV head"),
        ({"heads": 128, "kv_heads": 1}, "128 query heads a KV head"),
        ({"scale": -1.0}, "scale -1.0"),
        ({}, "not a Hopper GPU"),
    ],
)
def test_cases_left_to_plain_triton_are_named(changes: dict[str, Any], reason: str) -> None:
    found = extend_gluon.why_not(**case(**dict(changes)))
    if torch.cuda.is_available() and reason.startswith("not a"):
        pytest.skip("this machine has a GPU")
    assert found is not None
    assert found.startswith(reason)


def test_another_triton_is_told_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_gluon, "_loaded", {})
    monkeypatch.setattr(extend_gluon.triton, "__version__", "3.99.0")
    with pytest.warns(UserWarning, match=r"written for Triton 3\.6, found 3\.99\.0"):
        assert extend_gluon.load_module() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extend_gluon.load_module() is None
