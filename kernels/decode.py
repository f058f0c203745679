"""paged_decode: attention of one new token a request over all its tokens in the pool (split KV).

    out[b, h] = sum_j softmax_j(scale x q[b, h] . K[j]) V[j],   j over the positions of request b

Grid of the first kernel: (KV head x head block, split, request), KV head fastest. A program takes the
BLOCK_H query heads of one KV head (padded to 16 rows for tl.dot) and one chunk of positions, with a running
softmax. With several splits, a second kernel weighs the partial results by their lse.

The number of splits depends on shapes only (requests, heads, table width), so results are reproducible; the
length of a chunk depends on the request's own length. Positions are clamped to the request's own tokens before
they are looked up: what lies in other slots is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from kvarena.kernels._combine import chunk_bounds, combine_launch
from kvarena.kernels._launch import (
    LOG2E,
    Launch,
    Remembered,
    call_key,
    ceil_div,
    check_attention,
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
from kvarena.kernels._paged import cap_scores, finish, locate, softmax_step
from kvarena.kernels._rows import (
    comes_in_pairs,
    heads_joined,
    load_parts,
    load_query,
    parts_of,
    store_part,
    strides_of,
    widen,
)
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.tiles import decode_config
from torch import Tensor


@triton.jit
def _largest(b):
    return tl.max(tl.max(tl.abs(b.to(tl.float32)), 1), 0)


@triton.jit
def _to_half(b_q, b_t, qk_scale):
    """bfloat16 queries as float16, times a power of two that makes the largest about 1: exact, and undone in qk_scale.

    One-byte numbers become float16 in one instruction for two, bfloat16 in several slow ones for each.
    """
    largest = tl.maximum(_largest(b_q), _largest(b_t))
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27)  # biased by 127
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    down = (exponent << 23).to(tl.float32, bitcast=True)
    return (b_q.to(tl.float32) * up).to(tl.float16), (b_t.to(tl.float32) * up).to(tl.float16), qk_scale * down


@triton.jit
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    entries_ptr,
    rows_ptr,
    lens_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    qk_scale,
    v_scale,
    cap,
    window,
    min_chunk,
    k_scale_stride,
    v_scale_stride,
    q_stride_b,
    q_stride_h,
    key_stride_p,
    key_stride_s,
    key_stride_h,
    value_stride_p,
    value_stride_s,
    value_stride_h,
    entries_stride,
    out_stride_b,
    out_stride_h,
    out_stride_split,
    lse_stride_b,
    lse_stride_h,
    GROUP: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TAIL_DV: tl.constexpr,
    LOG_ENTRY: tl.constexpr,
    LOG_PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    TO_HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    JOIN: tl.constexpr,
):
    stored: tl.constexpr = key_ptr.dtype.element_ty
    i_kv = tl.program_id(0) // HEAD_BLOCKS
    i_split = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(lens_ptr + i_b)
    low, start, chunk = chunk_bounds(seq_len, window, tl.num_programs(1), min_chunk, HAS_WINDOW, BLOCK_N)
    begin = start + i_split * chunk
    end = tl.minimum(begin + chunk, seq_len)
    if SPLIT:
        if begin >= seq_len:
            return

    o_g = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    o_h = i_kv * GROUP + o_g
    m_h = o_g < GROUP
    p_q = q_ptr + i_b * q_stride_b + o_h * q_stride_h
    b_q, b_t = load_query(p_q, o_g, GROUP, D, BLOCK_D, TAIL_D, PAIRS, JOIN)  # [BLOCK_H, BLOCK_D], [BLOCK_H, TAIL_D]
    if TO_HALF:
        b_q, b_t, qk_scale = _to_half(b_q, b_t, qk_scale)
    if k_scale_ptr is not None:
        qk_scale *= tl.load(k_scale_ptr + i_kv * k_scale_stride)
    if v_scale_ptr is not None:
        v_scale *= tl.load(v_scale_ptr + i_kv * v_scale_stride)
    if slopes_ptr is not None:
        b_slope = tl.load(slopes_ptr + o_h, mask=m_h, other=0.0) * 1.4426950408889634
    p_row = entries_ptr + tl.load(rows_ptr + i_b).to(tl.int64) * entries_stride
    if PAIRS:
        key_ptr, value_ptr = key_ptr.to(tl.pointer_type(tl.int16)), value_ptr.to(tl.pointer_type(tl.int16))
    p_key = key_ptr + i_kv.to(tl.int64) * key_stride_h
    p_value = value_ptr + i_kv.to(tl.int64) * value_stride_h

    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    acc_t = tl.zeros([BLOCK_H, TAIL_DV if TAIL_DV > 0 else 1], tl.float32)
    for i_n in range(begin, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        at = tl.minimum(o_n, end - 1)
        if HAS_WINDOW:
            m_n &= o_n >= low
            at = tl.maximum(at, low)
        page, offset = locate(p_row, at, LOG_ENTRY, LOG_PAGE)
        b_k, b_kt = load_parts(p_key, page, offset, key_stride_p, key_stride_s, JOIN * D, BLOCK_D, TAIL_D, PAIRS)
        b_v, b_vt = load_parts(
            p_value, page, offset, value_stride_p, value_stride_s, JOIN * DV, BLOCK_DV, TAIL_DV, PAIRS
        )
        s = tl.dot(b_q, tl.trans(widen(b_k, b_q.dtype, stored, PAIRS, False)), input_precision="ieee")
        if TAIL_D > 0:
            s = tl.dot(b_t, tl.trans(widen(b_kt, b_q.dtype, stored, PAIRS, True)), s, input_precision="ieee")
        factor = qk_scale
        if HAS_CAP:
            s = cap_scores(s * qk_scale, cap)
            factor = 1.0
        if slopes_ptr is not None:
            s = s * factor
            factor = 1.0
            s += b_slope[:, None] * (o_n - (seq_len - 1))[None, :]
        s = tl.where(m_n[None, :], s, float("-inf"))
        p, m_i, l_i, alpha = softmax_step(s, factor, m_i, l_i, False)
        p = p.to(b_q.dtype)
        b_v = widen(b_v, b_q.dtype, stored, PAIRS, False)
        acc = acc * alpha[:, None] + tl.dot(p, b_v, input_precision="ieee")
        if TAIL_DV > 0:
            b_vt = widen(b_vt, b_q.dtype, stored, PAIRS, True)
            acc_t = acc_t * alpha[:, None] + tl.dot(p, b_vt, input_precision="ieee")

    out, lse = finish(acc, m_i, l_i, v_scale)
    p_out = out_ptr + i_b * out_stride_b + i_split * out_stride_split + o_h * out_stride_h
    store_part(p_out, out, o_g, 0, GROUP, DV, BLOCK_DV, PAIRS, JOIN)
    if TAIL_DV > 0:
        out_t, _ = finish(acc_t, m_i, l_i, v_scale)
        store_part(p_out, out_t, o_g, 1 if PAIRS else BLOCK_DV, GROUP, DV, TAIL_DV, PAIRS, JOIN)
    if lse_ptr is not None:
        if SPLIT:
            tl.store(lse_ptr + i_b * lse_stride_b + o_h * lse_stride_h + i_split, lse, mask=m_h)
        else:
            tl.store(lse_ptr + i_b * lse_stride_b + o_h * lse_stride_h, lse * 0.6931471805599453, mask=m_h)


def decode_workspace_size(num_requests: int, num_heads: int, head_dim_v: int, num_splits: int) -> int:
    """float32 numbers that split decode keeps between its two kernels; 0 with one split."""
    return 0 if num_splits == 1 else num_requests * num_heads * num_splits * (head_dim_v + 1)


_workspaces: dict[tuple[torch.device, int], Tensor] = {}


def _workspace(size: int, device: torch.device) -> Tensor:
    """Scratch memory, kept between calls: one for each device and stream.

    Inside a CUDA graph capture it is the graph's own, so that replays never share it with later eager calls.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.float32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    held = _workspaces.get(key)
    if held is None or held.numel() < size:
        held = _workspaces[key] = torch.empty(next_power_of_two(size), dtype=torch.float32, device=device)
    return held


def paged_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last token of each request over the request's tokens.

    q             [B, HQ, D] float32, float16 or bfloat16; HQ a multiple of HKV
    key_cache     [P, S, HKV, D], a view of any layout; dtype of q, or fp8 / int8
    value_cache   [P, S, HKV, Dv]
    table         where the tokens lie; seq_lens counts the current token, 0 for a padded row
    scale         positive factor of q . k; default D ** -0.5
    window        tokens that are visible, the current one included
    softcap       scores become softcap x tanh(score / softcap), before ALiBi and mask
    alibi_slopes  float32 [HQ]; adds slope x (key position - query position)
    k_scale       quantised caches: K = stored x k_scale; number, or float32 tensor, one element or [HKV]
    v_scale       likewise for V
    out           [B, HQ, Dv], dtype of q
    return_lse    also return lse, float32 [B, HQ], natural log
    num_splits    programs that share a request; None = `decode_config`
    workspace     float32, at least `decode_workspace_size` numbers; None = kept by this module

    Returns out, or (out, lse). A request of length 0 gives zeros and lse -inf. No host sync; safe in CUDA graphs.
    Cost: K and V of each visible token are read once a KV head (once for each 64 query heads of it).
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    k_tensor = k_scale if isinstance(k_scale, Tensor) else None
    v_tensor = v_scale if isinstance(v_scale, Tensor) else None
    factors = (k_scale if k_tensor is None else None, v_scale if v_tensor is None else None)
    key = (
        call_key(q, key_cache, value_cache, alibi_slopes, k_tensor, v_tensor, out, workspace),
        table_key(table),
        (scale, window, softcap, *factors, return_lse, num_splits),
    )
    call = _calls.get(key)
    if call is None:
        options = (scale, window, softcap, alibi_slopes, k_scale, v_scale, out, return_lse, num_splits)
        call = _calls[key] = _prepare(q, key_cache, value_cache, table, *options)
    if out is None:
        out = q.new_empty(call.shape)
    lse = torch.empty(call.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    if q.shape[0] == 0:
        return (out, lse) if lse is not None else out
    part, part_lse = out, lse
    if call.combine is not None:
        part, part_lse = _partials(workspace, call.part_numbers, call.workspace_size, q.device)
    tables = (table.entries, table.rows, table.seq_lens)
    call.attend((q, key_cache, value_cache, *tables, alibi_slopes, k_tensor, v_tensor, part, part_lse))
    if call.combine is not None:
        call.combine((part, part_lse, table.seq_lens, out, lse))
    return (out, lse) if lse is not None else out


@dataclass(frozen=True)
class _Call:
    """What calls of one shape share: the launches of the one or two kernels, and what lies between them."""

    shape: tuple[int, int, int]
    attend: Launch
    combine: Launch | None  # with several splits
    part_numbers: int  # numbers of all partial outputs; their lse come behind them
    workspace_size: int


_calls = Remembered()


def _prepare(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    num_splits: int | None,
) -> _Call:
    """Check the arguments of paged_decode and choose tiles and splits."""
    page_size, num_kv_heads, head_dim_v, batch = check_attention(
        q, key_cache, value_cache, table, scale, window, softcap
    )
    num_heads, head_dim = q.shape[1:]
    check_shape("q", q, (batch, num_heads, head_dim))
    check_slopes(alibi_slopes, num_heads, q.device)
    shape = (batch, num_heads, head_dim_v)
    out_strides = output_like(q, head_dim_v, out).stride() if out is not None else (num_heads * head_dim_v, head_dim_v)

    single_scales = not any(isinstance(x, Tensor) and x.numel() > 1 for x in (k_scale, v_scale))
    join = heads_joined(key_cache, value_cache, num_heads // num_kv_heads) if single_scales else 1
    kv_blocks = num_kv_heads // join
    group = num_heads // kv_blocks
    block_h = min(64, max(16, next_power_of_two(group)))
    head_blocks = ceil_div(group, block_h)
    capacity = table.entries.shape[1] * table.tokens_per_entry
    visible = capacity if window is None else min(capacity, window)
    itemsize = key_cache.element_size()
    config = decode_config(batch, kv_blocks * head_blocks, visible, join * head_dim * itemsize, itemsize, block_h)
    if num_splits is not None and num_splits < 1:
        fail("num_splits", "None or at least 1", num_splits)
    splits = num_splits or config.num_splits
    min_chunk = config.block_n if num_splits else config.min_chunk
    k_number, _, k_scale_stride = scale_argument("k_scale", k_scale, num_kv_heads, q.device)
    v_number, _, v_scale_stride = scale_argument("v_scale", v_scale, num_kv_heads, q.device)
    qk_scale = (head_dim**-0.5 if scale is None else scale) * k_number
    pairs = comes_in_pairs(key_cache) and comes_in_pairs(value_cache)
    block_d, tail_d = parts_of(join * head_dim, pairs)
    block_dv, tail_dv = parts_of(join * head_dim_v, pairs)
    lse_strides = (num_heads * splits, splits) if splits > 1 else (num_heads, 1) if return_lse else (0, 0)
    part_strides = (num_heads * splits * head_dim_v, splits * head_dim_v, head_dim_v)
    numbers = (
        qk_scale * LOG2E if softcap is None else qk_scale / softcap,
        v_number,
        0.0 if softcap is None else softcap * LOG2E,
        window or 0,
        min_chunk,
        k_scale_stride,
        v_scale_stride,
        *q.stride()[:2],
        *strides_of(key_cache, pairs, join),
        *strides_of(value_cache, pairs, join),
        table.entries.stride(0),
        *(part_strides if splits > 1 else (*out_strides[:2], 0)),
        *lse_strides,
    )
    constants = {
        "GROUP": group,
        "HEAD_BLOCKS": head_blocks,
        "BLOCK_H": block_h,
        "BLOCK_N": config.block_n,
        "D": head_dim,
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "DV": head_dim_v,
        "BLOCK_DV": block_dv,
        "TAIL_DV": tail_dv,
        "LOG_ENTRY": log2(table.tokens_per_entry),
        "LOG_PAGE": log2(page_size),
        "HAS_WINDOW": window is not None,
        "HAS_CAP": softcap is not None,
        "SPLIT": splits > 1,
        "TO_HALF": itemsize == 1 and q.dtype == torch.bfloat16,
        "PAIRS": pairs,
        "JOIN": join,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return _Call(
        shape=shape,
        attend=Launch(_decode_kernel, (kv_blocks * head_blocks, splits, batch), numbers, constants),
        combine=combine_launch(shape, splits, window, min_chunk, config.block_n, out_strides) if splits > 1 else None,
        part_numbers=batch * num_heads * splits * head_dim_v,
        workspace_size=decode_workspace_size(batch, num_heads, head_dim_v, splits),
    )


def _partials(workspace: Tensor | None, outputs: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial outputs [B, HQ, NS, Dv] and their lse [B, HQ, NS], flat, cut from the workspace."""
    if workspace is None:
        workspace = _workspace(size, device)
    else:
        check_dtype("workspace", workspace, (torch.float32,))
        if workspace.numel() < size or workspace.device != device or not workspace.is_contiguous():
            fail("workspace", f"{size} contiguous numbers on {device}", f"{workspace.numel()} on {workspace.device}")
        workspace = workspace.view(-1)
    return workspace, workspace[outputs:]
