"""Every tolerance of the attention tests has a planted fault that exceeds it.

A mutant is a copy of a kernel module with one piece of source replaced. Each is run on probe inputs that the true
kernel passes; the check that the other tests use must refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kvarena.kernels import decode, extend
from kvarena.kernels.page_table import PageTable
from support.attention import CUDA, DEVICE, Batch, assert_attention, make_batch
from support.mutants import mutate

pytestmark = pytest.mark.skipif(CUDA, reason="faults are planted in the interpreter: on a GPU they read foreign memory")


@dataclass(frozen=True)
class Fault:
    probe: str  # input that shows it
    swaps: tuple[tuple[str, str], ...]  # source replaced
    helper: str | None  # module at fault, if not the kernel's own
    splits: int | None


def fault(probe: str, *swaps: tuple[str, str], helper: str | None = None, splits: int | None = 1) -> Fault:
    return Fault(probe, swaps, helper, splits)


def probes(extending: bool) -> dict[str, Batch]:
    """Inputs that reach every branch of the kernels: a few requests each, all with a full last page among them."""
    slopes = torch.linspace(0.1, 0.5, 8, device=DEVICE)
    fp8 = torch.float8_e4m3fn
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    by_head = {"k_scale": torch.tensor([0.5, 0.25], device=DEVICE), "v_scale": torch.tensor([2.0, 4.0], device=DEVICE)}

    def batch(options: dict[str, Any], **changes: Any) -> Batch:
        shape: dict[str, Any] = {"seq_lens": [0, 64, 37, 16], "width": 80}
        if extending:
            shape["extend_lens"] = [0, 40, 5, 16]
        return make_batch(**(shape | changes), options=options)

    return {
        "plain": batch({}),
        "half": batch({}, dtype=torch.float16),
        "token": batch({}, tokens_per_entry=1),
        "wide": batch({}, tokens_per_entry=64),
        "window": batch({"window": 9}),
        "softcap": batch({"softcap": 1.5}),
        "alibi": batch({"alibi_slopes": slopes}),
        "scale": batch({"scale": 0.31}),
        "fp8": batch(scales, kv_dtype=fp8),
        "fp8 by head": batch(by_head, kv_dtype=fp8),
        "narrow window": batch({"window": 4}),
        "joined": batch({}, dtype=torch.float16, head_dim=96),
        "odder head_dim": batch({}, head_dim=72, page_size=1, tokens_per_entry=1),
        "odd head_dim": batch({}, head_dim=80, page_size=1, tokens_per_entry=1),
        "fused": batch({}, head_dim=80, head_dim_v=64, layout="fused"),
    }


def run_decode(module: ModuleType, batch: Batch, num_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((*batch.q.shape[:2], batch.pool.head_dim_v), float("nan"), dtype=batch.q.dtype, device=DEVICE)
    return module.paged_decode(batch.q, *batch.caches, out=out, return_lse=True, num_splits=num_splits, **batch.options)


def run_extend(module: ModuleType, batch: Batch, num_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((*batch.q.shape[:2], batch.pool.head_dim_v), float("nan"), dtype=batch.q.dtype, device=DEVICE)
    arguments = {"out": out, "return_lse": True, "backend": "triton"} | batch.options
    return module.paged_extend(batch.q, *batch.caches, batch.query_start_loc, **arguments)


def refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


DECODE_FAULTS = {
    "last page skipped": fault(
        "plain",
        (
            "low, start, chunk = chunk",
            ("seq_len = tl.maximum(seq_len - 1, 0) >> LOG_PAGE << LOG_PAGE\n    low, start, chunk = chunk"),
        ),
    ),
    "last-page length is n % S": fault(
        "plain",
        (
            "low, start, chunk = chunk",
            (
                "seq_len = tl.where(seq_len % 16 == 0, tl.maximum(seq_len - 16, 0), seq_len)\n"
                "    low, start, chunk = chunk"
            ),
        ),
    ),
    "mask dropped": fault("plain", ('        s = tl.where(m_n[None, :], s, float("-inf"))\n', "")),
    "positions not clamped": fault("plain", ("at = tl.minimum(o_n, end - 1)", "at = o_n")),
    "maximum raised without rescaling the sum": fault(
        "plain", ("l_i * alpha + tl.sum(p, 1), alpha", "l_i + tl.sum(p, 1), alpha"), helper="_paged"
    ),
    "maximum raised without rescaling the output": fault(
        "plain", ("acc = acc * alpha[:, None] + tl.dot", "acc = acc + tl.dot")
    ),
    "KV indexed by query head": fault(
        "plain",
        ("p_key = key_ptr + i_kv.to(tl.int64)", "p_key = key_ptr + (i_kv * GROUP % 2).to(tl.int64)"),
        ("p_value = value_ptr + i_kv.to(tl.int64)", "p_value = value_ptr + (i_kv * GROUP % 2).to(tl.int64)"),
    ),
    "values of the first head for all": fault(
        "plain", ("p_value = value_ptr + i_kv.to(tl.int64)", "p_value = value_ptr + (i_kv * 0).to(tl.int64)")
    ),
    "scale ignored": fault("scale", ("(head_dim**-0.5 if scale is None else scale) *", "head_dim**-0.5 *")),
    "scale missing altogether": fault("plain", ("(head_dim**-0.5 if scale is None else scale) *", "1.0 *")),
    "k_scale ignored": fault("fp8", ("else scale) * k_number", "else scale)")),
    "v_scale ignored": fault("fp8", ("(v_scale / l_safe)", "(1.0 / l_safe)"), helper="_paged"),
    "k_scale of another head": fault("fp8 by head", ("k_scale_ptr + i_kv * k_scale_stride", "k_scale_ptr")),
    "v_scale of another head": fault("fp8 by head", ("v_scale_ptr + i_kv * v_scale_stride", "v_scale_ptr")),
    "softcap after the mask": fault(
        "softcap",
        ('        s = tl.where(m_n[None, :], s, float("-inf"))\n', ""),
        (
            ("        if HAS_CAP:\n            s = cap_scores(s * qk_scale, cap)\n            factor = 1.0\n"),
            (
                '        s = tl.where(m_n[None, :], s, float("-inf"))\n'
                "        if HAS_CAP:\n"
                "            s = cap_scores(s * qk_scale, cap)\n"
                "            factor = 1.0\n"
            ),
        ),
    ),
    "softcap without its factor": fault("softcap", ("softcap * LOG2E", "LOG2E")),
    "tanh of half the score": fault("softcap", ("-2.8853900817779268", "-1.4426950408889634"), helper="_paged"),
    "window one short": fault("window", ("seq_len - window, 0)", "seq_len - window + 1, 0)"), helper="_combine"),
    "window one long": fault("window", ("seq_len - window, 0)", "seq_len - window - 1, 0)"), helper="_combine"),
    "window ignored": fault("window", ("low = tl.maximum(seq_len - window, 0)", "low = 0"), helper="_combine"),
    "alibi without log2(e)": fault("alibi", (" * 1.4426950408889634", "")),
    "alibi of one head for all": fault("alibi", ("slopes_ptr + o_h,", "slopes_ptr + o_h * 0,")),
    "alibi distance off by one": fault("alibi", ("o_n - (seq_len - 1)", "o_n - seq_len")),
    "lse in base 2": fault("plain", ("lse * 0.6931471805599453, mask=m_h", "lse, mask=m_h")),
    "lse without the sum": fault("plain", ("m_i + tl.log2(l_safe)", "m_i"), helper="_paged"),
    "empty requests divide by zero": fault(
        "plain", ("l_safe = tl.where(empty, 1.0, l_i)", "l_safe = l_i"), helper="_paged"
    ),
    "empty requests left as they were": fault(
        "plain",
        (("    if SPLIT:\n        if begin >= seq_len:"), ("    if HEAD_BLOCKS > 0:\n        if begin >= seq_len:")),
    ),
    "weights kept in fp8": fault("plain", ("p = p.to(b_q.dtype)", "p = p.to(tl.float8e5).to(b_q.dtype)")),
    "weights kept in half precision": fault("plain", ("p = p.to(b_q.dtype)", "p = p.to(tl.float16).to(b_q.dtype)")),
    "even and odd numbers of pairs mistaken": fault(
        "fp8", ("(b_pairs >> 8) if ODD else b_pairs", "b_pairs if ODD else (b_pairs >> 8)"), helper="_rows"
    ),
    "second block of a row forgotten in scores": fault(
        "odd head_dim", ("        if TAIL_D > 0:\n", "        if TAIL_D > 999:\n")
    ),
    "second block of a row forgotten in outputs": fault(
        "odd head_dim", ("            acc_t = acc_t * alpha", "            acc_t = acc_t * 0 * alpha")
    ),
    "queries of joined heads not kept apart": fault(
        "joined", ("== (o_g // (GROUP // JOIN))[:, None]", ">= (o_g * 0)[:, None]"), helper="_rows"
    ),
    "last split dropped": fault(
        "plain",
        ("used = tl.cdiv(seq_len - start, chunk)", "used = tl.cdiv(seq_len - start, chunk) - 1"),
        helper="_combine",
        splits=3,
    ),
    "splits weighed alike": fault(
        "plain", ("weight = tl.exp2(b_lse - m_new)", "weight = tl.where(m_s, 1.0, 0.0)"), helper="_combine", splits=3
    ),
    "unused splits counted": fault(
        "plain",
        ("m_s = o_s < used", "m_s = o_s < num_splits"),
        ("for i_s in range(0, used, BLOCK_S)", "for i_s in range(0, num_splits, BLOCK_S)"),
        helper="_combine",
        splits=8,
    ),
    "first entry of a page of tokens mistaken": fault(
        "token", ("first = (o_n >> LOG_PAGE) << (LOG_PAGE - LOG_ENTRY)", "first = o_n >> LOG_PAGE"), helper="_paged"
    ),
    "page within a wide entry forgotten": fault(
        "wide", (" + ((o_n >> LOG_PAGE) & ((1 << (LOG_ENTRY - LOG_PAGE)) - 1))", ""), helper="_paged"
    ),
    "offset within the page forgotten": fault(
        "plain", ("offset = o_n & ((1 << LOG_PAGE) - 1)", "offset = o_n * 0"), helper="_paged"
    ),
    "row index ignored": fault(
        "token", ("tl.load(rows_ptr + i_b).to(tl.int64) * entries_stride", "i_b * entries_stride")
    ),
    "components behind head_dim read": fault(
        "odder head_dim",
        ("mask=(o_d < DIM)[None, :], other=0.0", "mask=(o_d < BLOCK_D)[None, :], other=0.0"),
        helper="_rows",
    ),
    "mask one token short": fault("plain", ("m_n = o_n < end\n", "m_n = o_n < end - 1\n")),
}

EXTEND_FAULTS = {
    "not causal": fault(
        "plain",
        ("(o_n[None, :] <= o_pos[:, None]) & ", "(o_n[None, :] <= o_pos[:, None] + 1000) & "),
        helper="_paged",
    ),
    "causal one short": fault(
        "plain", ("o_n[None, :] <= o_pos[:, None])", "o_n[None, :] < o_pos[:, None])"), helper="_paged"
    ),
    "causal one long": fault(
        "plain", ("o_n[None, :] <= o_pos[:, None])", "o_n[None, :] <= o_pos[:, None] + 1)"), helper="_paged"
    ),
    "cached prefix forgotten": fault("plain", ("prefix = seq_len - (end - start)", "prefix = seq_len * 0")),
    "diagonal block taken without a mask": fault(
        "plain", ("middle = tl.maximum(tl.minimum(prefix + first + 1, high), 0)", "middle = tl.maximum(high, 0)")
    ),
    "diagonal block dropped": fault(
        "plain", ("for i_n in tl.range(middle, high, BLOCK_N,", "for i_n in tl.range(middle, middle, BLOCK_N,")
    ),
    "last block dropped": fault(
        "plain", ("for i_n in tl.range(middle, high, BLOCK_N,", "for i_n in tl.range(middle, high - BLOCK_N, BLOCK_N,")
    ),
    "positions not clamped": fault("plain", ("at = tl.minimum(tl.maximum(o_n, low), high - 1)", "at = o_n")),
    "last tile not launched": fault(
        "plain", ("num_tokens // tokens + batch + 1, num_kv", "num_tokens // tokens + 1, num_kv")
    ),
    "tile found one request early": fault(
        "plain",
        (
            "tl.sum((first <= i_tile).to(tl.int32), 0) - 1",
            "tl.maximum(tl.sum((first < i_tile).to(tl.int32), 0) - 1, 0)",
        ),
        helper="_paged",
    ),
    "heads and tokens of a tile swapped": fault(
        "plain", ("o_h = i_kv * GROUP + o_m % GROUP", "o_h = i_kv * GROUP + o_m // TOKENS % GROUP")
    ),
    "window one short": fault(
        "window",
        ("o_n[None, :] > o_pos[:, None] - window", "o_n[None, :] > o_pos[:, None] - window + 1"),
        helper="_paged",
    ),
    "window one long": fault(
        "window",
        ("o_n[None, :] > o_pos[:, None] - window", "o_n[None, :] >= o_pos[:, None] - window"),
        helper="_paged",
    ),
    "window starts one late": fault("window", ("prefix + first + 1 - window", "prefix + first + 1 - window + 16")),
    "rows that saw no key yet turn NaN": fault(
        "narrow window", ("    if GUARD:\n", "    if GUARD and False:\n"), helper="_paged"
    ),
    "softcap after the mask": fault(
        "softcap",
        (
            "        m = (o_n[None, :] <= o_pos[:, None]) & (o_n < high)[None, :]\n",
            (
                "        m = (o_n[None, :] <= o_pos[:, None]) & (o_n < high)[None, :]\n"
                '        cap_late = cap_scores(tl.where(m, s / 100.0, float("-inf")), cap)\n'
            ),
        ),
        ('        s = tl.where(m, s, float("-inf"))', "        s = tl.where(m, s, cap_late)"),
        helper="_paged",
    ),
    "scale ignored": fault("scale", ("(head_dim**-0.5 if scale is None else scale) *", "head_dim**-0.5 *")),
    "k_scale ignored": fault("fp8", ("else scale) * k_number", "else scale)")),
    "v_scale ignored": fault("fp8", ("(v_scale / l_safe)", "(1.0 / l_safe)"), helper="_paged"),
    "k_scale of another head": fault("fp8 by head", ("k_scale_ptr + i_kv * k_scale_stride", "k_scale_ptr")),
    "v_scale of another head": fault("fp8 by head", ("v_scale_ptr + i_kv * v_scale_stride", "v_scale_ptr")),
    "alibi distance from the tile's first row": fault(
        "alibi", ("(o_n[None, :] - o_pos[:, None])", "(o_n[None, :] - tl.min(o_pos, 0))"), helper="_paged"
    ),
    "KV indexed by query head": fault(
        "plain", ("p_key = key_ptr + i_kv.to(tl.int64)", "p_key = key_ptr + (i_kv * GROUP % 2).to(tl.int64)")
    ),
    "maximum raised without rescaling the sum": fault(
        "plain", ("l_i * alpha + tl.sum(p, 1), alpha", "l_i + tl.sum(p, 1), alpha"), helper="_paged"
    ),
    "maximum raised without rescaling the output": fault(
        "plain", ('acc * alpha[:, None], input_precision="ieee")\n    for', 'acc, input_precision="ieee")\n    for')
    ),
    "weights kept in half precision": fault(
        "plain", ("return p, m_new,", "return p.to(tl.float16), m_new,"), helper="_paged"
    ),
    "lse in base 2": fault("plain", ("lse * 0.6931471805599453, mask=m_m", "lse, mask=m_m")),
    "padding left as it was": fault(
        "padded", ("if start + first >= end:", "if (start + first >= end) | (i_b == num_requests):")
    ),
    "components behind head_dim read": fault(
        "odd head_dim",
        ("mask=(o_d < DIM)[None, :], other=0.0", "mask=(o_d < BLOCK_D)[None, :], other=0.0"),
        helper="_rows",
    ),
}


passed: set[object] = set()  # probes that the true kernel has passed


@pytest.fixture(scope="module")
def decode_probes() -> dict[str, Batch]:
    return probes(extending=False)


@pytest.fixture(scope="module")
def extend_probes() -> dict[str, Batch]:
    found = probes(extending=True)
    found["padded"] = make_batch(seq_lens=[5, 3], extend_lens=[5, 1], padding=3)
    return found


@pytest.mark.parametrize("name", DECODE_FAULTS)
def test_a_fault_in_decode_is_caught(name: str, decode_probes: dict[str, Batch], tmp_path: Path) -> None:
    planted = DECODE_FAULTS[name]
    batch = decode_probes[planted.probe]
    if (planted.probe, planted.splits) not in passed:
        assert_attention(batch, run_decode(decode, batch, planted.splits))
        passed.add((planted.probe, planted.splits))
    faulty = mutate(tmp_path, "decode", *planted.swaps, helper=planted.helper)
    assert refused(lambda: assert_attention(batch, run_decode(faulty, batch, planted.splits)))


@pytest.mark.parametrize("name", EXTEND_FAULTS)
def test_a_fault_in_extend_is_caught(name: str, extend_probes: dict[str, Batch], tmp_path: Path) -> None:
    planted = EXTEND_FAULTS[name]
    batch = extend_probes[planted.probe]
    if planted.probe not in passed:
        assert_attention(batch, run_extend(extend, batch))
        passed.add(planted.probe)
    faulty = mutate(tmp_path, "extend", *planted.swaps, helper=planted.helper)
    assert refused(lambda: assert_attention(batch, run_extend(faulty, batch)))


@pytest.mark.parametrize(
    "swap",
    [
        ("l_i * alpha + tl.sum(p, 1), alpha", "(l_i * alpha + tl.sum(p, 1)).to(tl.float16).to(tl.float32), alpha"),
        ("return p, m_new,", "return p.to(tl.float8e5), m_new,"),
    ],
    ids=["sum in float16", "weights in fp8"],
)
def test_low_precision_shows_in_long_contexts(swap: tuple[str, str], tmp_path: Path) -> None:
    """4,096 keys, V = 1; the first key weighs 1, the others 0.3: sums that float16 cannot hold."""
    length = 4096
    key = torch.zeros((length // 16 + 1, 16, 1, 64), dtype=torch.float16, device=DEVICE)
    key[..., 0] = math.log(0.3)
    key[1, 0, 0, 0] = 0
    lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    entries = torch.arange(1, length // 16 + 1, dtype=torch.int32, device=DEVICE)[None]
    table = PageTable(entries, torch.zeros_like(lens), lens, 16)
    q = torch.zeros((1, 1, 64), dtype=torch.float16, device=DEVICE)
    q[..., 0] = 1
    want = math.log(1 + (length - 1) * math.exp(float(key[2, 0, 0, 0])))
    faulty = mutate(tmp_path, "decode", swap, helper="_paged")
    for module, right in ((decode, True), (faulty, False)):
        out, lse = module.paged_decode(q, key, torch.ones_like(key), table, scale=1.0, return_lse=True, num_splits=1)
        assert (abs(float(out[0, 0, 0]) - 1) <= 0.004 and abs(float(lse) - want) <= 1e-4) == right


def test_a_replacement_that_does_not_match_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mutant of decode: expected one occurrence of 'no such text', found 0"):
        mutate(tmp_path, "decode", ("no such text", ""))
