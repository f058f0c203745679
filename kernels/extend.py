"""paged_extend: causal attention of new tokens over a cached prefix and themselves, for a ragged batch.

    out[t, h] = sum_j softmax_j(scale x q[t, h] . K[j]) V[j],   j = 0 .. position of token t

All K and V, those of the new tokens too, are read from the pool: call store_kv first. Decode rows (one new
token) and prefill rows mix freely.

Grid: (KV head of a group, tile, group), KV head fastest, long tiles first; a group is as many heads as have their K
and V in L2 together. A tile is BLOCK_M rows of one request and one KV head:
row r is token r // G, query head r % G of the group of G heads; BLOCK_M // G tokens, the remaining rows idle.
The number of tiles depends on shapes only: request b's tiles start at query_start_loc[b] // tokens + b, and each
program finds its request by counting. One more "request" holds the padding behind the last token: zeros, lse -inf.

Blocks of keys that every row of a tile sees are taken without a mask, and by descriptors (TMA) where a page holds
whole blocks; only the diagonal (and everything under a
window) is masked, with positions clamped to keys that the tile may see before they are looked up.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from kvarena.kernels._boxes import descriptors_of, takes_boxes
from kvarena.kernels._launch import (
    LOG2E,
    Launch,
    Remembered,
    call_key,
    check_attention,
    check_device,
    check_dtype,
    check_shape,
    check_slopes,
    fail,
    log2,
    next_power_of_two,
    output_like,
    scale_argument,
    table_key,
)
from kvarena.kernels._paged import find_request, finish, locate, weigh_block
from kvarena.kernels._rows import load_rows
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.tiles import BOX_ROWS, extend_config, heads_together
from torch import Tensor


@triton.jit
def _extend_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    entries_ptr,
    rows_ptr,
    lens_ptr,
    start_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_box,
    value_box,
    out_ptr,
    lse_ptr,
    num_requests,
    num_tokens,
    qk_scale,
    v_scale,
    cap,
    window,
    k_scale_stride,
    v_scale_stride,
    q_stride_t,
    q_stride_h,
    key_stride_p,
    key_stride_s,
    key_stride_h,
    value_stride_p,
    value_stride_s,
    value_stride_h,
    entries_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    key_page_rows,
    key_head_rows,
    key_head_cols,
    value_page_rows,
    value_head_rows,
    value_head_cols,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    LOG_ENTRY: tl.constexpr,
    LOG_PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BOXES: tl.constexpr,
):
    i_kv = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    i_b, i_tile = find_request(start_ptr, num_requests, tl.num_programs(1) - 1 - tl.program_id(1), TOKENS, BLOCK_B)
    is_request = i_b < num_requests
    start = tl.load(start_ptr + i_b)
    end = tl.load(start_ptr + i_b + 1, mask=is_request, other=num_tokens)
    first = i_tile * TOKENS  # token of the request with which the tile begins
    if start + first >= end:
        return
    seq_len = tl.load(lens_ptr + i_b, mask=is_request, other=0)
    prefix = seq_len - (end - start)
    high = tl.minimum(prefix + first + TOKENS, seq_len)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(prefix + first + 1 - window, 0)
    begin = low // BLOCK_N * BLOCK_N
    middle = begin
    if not HAS_WINDOW:
        middle = tl.maximum(tl.minimum(prefix + first + 1, high), 0) // BLOCK_N * BLOCK_N

    o_m = tl.arange(0, BLOCK_M)
    o_t = first + o_m // GROUP
    o_h = i_kv * GROUP + o_m % GROUP
    o_pos = prefix + o_t
    m_m = (o_m // GROUP < TOKENS) & (start + o_t < end)
    o_d = tl.arange(0, BLOCK_D)
    o_row = (start + o_t).to(tl.int64)
    p_q = q_ptr + (o_row * q_stride_t + o_h * q_stride_h)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    b_slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        b_slope = tl.load(slopes_ptr + o_h, mask=m_m, other=0.0) * 1.4426950408889634
    if k_scale_ptr is not None:
        qk_scale *= tl.load(k_scale_ptr + i_kv * k_scale_stride)
    if v_scale_ptr is not None:
        v_scale *= tl.load(v_scale_ptr + i_kv * v_scale_stride)
    p_row = entries_ptr + tl.load(rows_ptr + i_b, mask=is_request, other=0).to(tl.int64) * entries_stride
    p_key = key_ptr + i_kv.to(tl.int64) * key_stride_h
    p_value = value_ptr + i_kv.to(tl.int64) * value_stride_h

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_row, k_col = i_kv * key_head_rows, i_kv * key_head_cols
    v_row, v_col = i_kv * value_head_rows, i_kv * value_head_cols
    # The place of a block is looked up one block ahead, so that no load waits for the one before it.
    page, offset = tl.full([], 0, tl.int64), 0
    if BOXES:
        if begin < middle:
            page, offset = locate(p_row, begin, LOG_ENTRY, LOG_PAGE)
    # Without hoisting of what does not change: at 255 registers it would be spilled and read back (LOG.md, 2026-11-29).
    for i_n in tl.range(begin, middle, BLOCK_N, disable_licm=True):
        o_n = i_n + tl.arange(0, BLOCK_N)
        if BOXES:
            b_k = key_box.load([(page * key_page_rows + offset).to(tl.int32) + k_row, k_col])  # [BLOCK_N, D]
            b_v = value_box.load([(page * value_page_rows + offset).to(tl.int32) + v_row, v_col])
            page, offset = locate(p_row, tl.minimum(i_n + BLOCK_N, high - 1), LOG_ENTRY, LOG_PAGE)
        else:
            at_page, at_offset = locate(p_row, o_n, LOG_ENTRY, LOG_PAGE)
            b_k = load_rows(p_key, at_page, at_offset, key_stride_p, key_stride_s, D, BLOCK_D)
            b_v = load_rows(p_value, at_page, at_offset, value_stride_p, value_stride_s, DV, BLOCK_DV)
        p, m_i, l_i, alpha = weigh_block(
            m_i, l_i, b_q, b_k, b_slope, o_pos, o_n, high, qk_scale, cap, window,
            HAS_WINDOW, HAS_CAP, HAS_SLOPES, False,
        )  # fmt: skip
        acc = tl.dot(p.to(b_q.dtype), b_v.to(b_q.dtype), acc * alpha[:, None], input_precision="ieee")
    for i_n in tl.range(middle, high, BLOCK_N, disable_licm=True):
        o_n = i_n + tl.arange(0, BLOCK_N)
        at = tl.minimum(tl.maximum(o_n, low), high - 1)
        if BOXES:
            page, offset = locate(p_row, i_n, LOG_ENTRY, LOG_PAGE)
            b_k = key_box.load([(page * key_page_rows + offset).to(tl.int32) + k_row, k_col])
            b_v = value_box.load([(page * value_page_rows + offset).to(tl.int32) + v_row, v_col])
            b_v = tl.where((o_n < high)[:, None], b_v, 0.0)  # a weight of 0 does not undo NaN in an unowned slot
        else:
            at_page, at_offset = locate(p_row, at, LOG_ENTRY, LOG_PAGE)
            b_k = load_rows(p_key, at_page, at_offset, key_stride_p, key_stride_s, D, BLOCK_D)
            b_v = load_rows(p_value, at_page, at_offset, value_stride_p, value_stride_s, DV, BLOCK_DV)
        p, m_i, l_i, alpha = weigh_block(
            m_i, l_i, b_q, b_k, b_slope, o_pos, o_n, high, qk_scale, cap, window,
            HAS_WINDOW, HAS_CAP, HAS_SLOPES, True,
        )  # fmt: skip
        acc = tl.dot(p.to(b_q.dtype), b_v.to(b_q.dtype), acc * alpha[:, None], input_precision="ieee")

    out, lse = finish(acc, m_i, l_i, v_scale)
    o_dv = tl.arange(0, BLOCK_DV)
    p_out = out_ptr + (o_row * out_stride_t + o_h * out_stride_h)[:, None] + o_dv[None, :]
    tl.store(p_out, out.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & (o_dv < DV)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + o_row * lse_stride_t + o_h, lse * 0.6931471805599453, mask=m_m)


def _load_hopper() -> ModuleType | None:
    """The Hopper backend, or None (with one warning) where this Triton does not take it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        from kvarena.kernels import extend_gluon
    except Exception as error:  # an experimental API: any release may break it in any way
        warnings.warn(f"paged_extend: no Hopper backend with triton {triton.__version__} ({error!r})", stacklevel=2)
        return None
    return extend_gluon


_hopper: list[ModuleType | None] = []  # empty until first asked


def hopper_backend() -> ModuleType | None:
    """`kvarena.kernels.extend_gluon` where it can run on this machine, else None."""
    if not _hopper:
        _hopper.append(_load_hopper())
    return _hopper[0]


def _drop_hopper(error: Exception) -> None:
    """From here on, the plain Triton kernel."""
    _hopper[:] = [None]
    warnings.warn(f"paged_extend: Hopper backend failed, plain Triton from here on ({error!r})", stacklevel=3)


def paged_extend(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    plan: object | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the new tokens of each request over all its tokens.

    q                [T, HQ, D] float32, float16 or bfloat16; HQ a multiple of HKV
    key_cache        [P, S, HKV, D], a view of any layout; dtype of q, or fp8 / int8. Holds the new tokens too
    value_cache      [P, S, HKV, Dv]
    table            where the tokens lie; seq_lens counts the new tokens, 0 for a padded row
    query_start_loc  int32 [B+1], starting at 0: tokens query_start_loc[b] to query_start_loc[b+1] are the last
                     tokens of request b. Rows of q behind the last one are padding: zeros, lse -inf
    scale            positive factor of q . k; default D ** -0.5
    window           tokens that are visible, the current one included
    softcap          scores become softcap x tanh(score / softcap), before ALiBi and mask
    alibi_slopes     float32 [HQ]; adds slope x (key position - query position)
    k_scale          quantised caches: K = stored x k_scale; number, or float32 tensor, one element or [HKV]
    v_scale          likewise for V
    out              [T, HQ, Dv], dtype of q
    return_lse       also return lse, float32 [T, HQ], natural log
    backend          None (fastest that takes these arguments), "triton" or "gluon" (ValueError if it does not)
    plan             work list of `extend_gluon.plan_extend` for these lengths, shared by the layers of a step (each
                     call makes its own otherwise); the plain kernel needs none

    Returns out, or (out, lse). No host sync; safe in CUDA graphs.
    Cost: 2 x HQ x (D + Dv) flops for each visible (token, key) pair.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    k_tensor = k_scale if isinstance(k_scale, Tensor) else None
    v_tensor = v_scale if isinstance(v_scale, Tensor) else None
    factors = (k_scale if k_tensor is None else None, v_scale if v_tensor is None else None)
    key = (
        call_key(q, key_cache, value_cache, query_start_loc, alibi_slopes, k_tensor, v_tensor, out),
        table_key(table),
        (scale, window, softcap, *factors, return_lse, backend),
    )
    tensors = (q, key_cache, value_cache, table, query_start_loc)
    call = _calls.get(key)
    if call is None:
        options = {"scale": scale, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes}
        options |= {"k_scale": k_scale, "v_scale": v_scale}
        call = _calls[key] = _prepare(tensors, options, out, return_lse, backend)
    if out is None:
        out = q.new_empty(call.shape)
    lse = torch.empty(call.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    if q.shape[0] and not (call.hopper and _extend_hopper(tensors, call, out, lse, backend, plan)):
        tables = (table.entries, table.rows, table.seq_lens, query_start_loc)
        boxes = (key_cache, value_cache) if call.boxed else (None, None)
        call.plain((q, key_cache, value_cache, *tables, alibi_slopes, k_tensor, v_tensor, *boxes, out, lse))
    return (out, lse) if lse is not None else out


_Tensors = tuple[Tensor, Tensor, Tensor, PageTable, Tensor]


@dataclass(frozen=True)
class _Call:
    """What calls of one shape share: the backend, and the launch of the plain kernel."""

    shape: tuple[int, int, int]
    hopper: bool  # the Hopper backend takes these arguments
    scale: float | None
    kept: dict[object, Any]  # what the Hopper backend keeps between calls of this shape
    plain: Launch
    boxed: bool  # descriptors read K and V


_calls = Remembered()


def _check(tensors: _Tensors, options: dict[str, Any], backend: str | None) -> tuple[int, int]:
    """Raise ValueError for arguments of paged_extend that do not fit; return (B, Dv)."""
    q, key_cache, value_cache, table, query_start_loc = tensors
    limits = (options["scale"], options["window"], options["softcap"])
    _, _, head_dim_v, batch = check_attention(q, key_cache, value_cache, table, *limits)
    check_shape("query_start_loc", query_start_loc, (batch + 1,))
    check_dtype("query_start_loc", query_start_loc, (torch.int32,))
    check_device("query_start_loc", query_start_loc, q.device)
    check_slopes(options["alibi_slopes"], q.shape[1], q.device)
    if backend not in (None, "triton", "gluon"):
        fail("backend", "None, 'triton' or 'gluon'", repr(backend))
    return batch, head_dim_v


def _prepare(
    tensors: _Tensors, options: dict[str, Any], out: Tensor | None, return_lse: bool, backend: str | None
) -> _Call:
    """Check the arguments of paged_extend; choose the backend and the plain kernel's tiles."""
    batch, head_dim_v = _check(tensors, options, backend)
    q, key_cache, value_cache, table, _ = tensors
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = key_cache.shape[1:3]
    shape = (num_tokens, num_heads, head_dim_v)
    out_strides = (num_heads * head_dim_v, head_dim_v) if out is None else output_like(q, head_dim_v, out).stride()[:2]
    group = num_heads // num_kv_heads
    block_d, block_dv = next_power_of_two(head_dim), next_power_of_two(head_dim_v)
    scale, window, softcap = options["scale"], options["window"], options["softcap"]
    plain = softcap is None and options["alibi_slopes"] is None and key_cache.dtype == q.dtype
    boxed = plain and window is None and takes_boxes(key_cache) and takes_boxes(value_cache)
    capacity = table.entries.shape[1] * table.tokens_per_entry
    widest = max(block_d, block_dv)
    config = extend_config(num_tokens, batch, group, widest, q.element_size(), plain, boxed, capacity)
    boxed = boxed and config.block_n <= BOX_ROWS
    descriptors, geometry = descriptors_of(key_cache, value_cache, config.block_n) if boxed else ({}, [0] * 6)
    tokens = config.block_m // group
    k_number, _, k_scale_stride = scale_argument("k_scale", options["k_scale"], num_kv_heads, q.device)
    v_number, _, v_scale_stride = scale_argument("v_scale", options["v_scale"], num_kv_heads, q.device)
    qk_scale = (head_dim**-0.5 if scale is None else scale) * k_number
    numbers = (
        batch,
        num_tokens,
        qk_scale * LOG2E if softcap is None else qk_scale / softcap,
        v_number,
        0.0 if softcap is None else softcap * LOG2E,
        window or 0,
        k_scale_stride,
        v_scale_stride,
        *q.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        table.entries.stride(0),
        *out_strides,
        num_heads,
        *geometry,
    )
    constants = {
        "GROUP": group,
        "TOKENS": tokens,
        "BLOCK_B": next_power_of_two(batch + 1),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "D": head_dim,
        "BLOCK_D": block_d,
        "DV": head_dim_v,
        "BLOCK_DV": block_dv,
        "LOG_ENTRY": log2(table.tokens_per_entry),
        "LOG_PAGE": log2(page_size),
        "HAS_WINDOW": window is not None,
        "HAS_CAP": softcap is not None,
        "HAS_SLOPES": options["alibi_slopes"] is not None,
        "BOXES": boxed,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    together = heads_together(num_kv_heads, capacity * (head_dim + head_dim_v) * key_cache.element_size())
    grid = (together, num_tokens // tokens + batch + 1, num_kv_heads // together)
    return _Call(
        shape=shape,
        hopper=_takes_hopper(tensors, options, backend),
        scale=scale,
        kept={},
        plain=Launch(_extend_kernel, grid, numbers, constants, descriptors),
        boxed=boxed,
    )


def _takes_hopper(tensors: _Tensors, options: dict[str, Any], backend: str | None) -> bool:
    """Whether the Hopper backend is there and takes these arguments; ValueError where it must and does not."""
    hopper = hopper_backend() if backend != "triton" and tensors[0].is_cuda else None
    takes = hopper is not None and tensors[0].shape[0] > 0 and bool(hopper.available(*tensors, **options))
    if backend == "gluon" and not takes:
        fail("backend", "arguments and a device that the Hopper backend takes", "others")
    return takes


def _extend_hopper(
    tensors: _Tensors, call: _Call, out: Tensor, lse: Tensor | None, backend: str | None, plan: object | None
) -> bool:
    """Run the Hopper backend; False if it failed and the plain kernel has to, from here on."""
    hopper = hopper_backend()
    if hopper is None:
        return False
    try:
        hopper.extend(*tensors, out=out, lse=lse, scale=call.scale, plan=plan, kept=call.kept)
    except Exception as error:
        if backend == "gluon":
            raise
        _drop_hopper(error)
        return False
    return True
