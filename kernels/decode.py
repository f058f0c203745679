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
from typing import Any

import torch
import triton
import triton.language as tl
from kvarena.kernels._launch import (
    LOG2E,
    Remembered,
    call_key,
    ceil_div,
    check_attention,
    check_dtype,
    check_shape,
    check_slopes,
    fail,
    launch,
    log2,
    next_power_of_two,
    output_like,
    scale_argument,
)
from kvarena.kernels._paged import cap_scores, finish, load_rows, locate, softmax_step
from kvarena.kernels.page_table import PageTable
from torch import Tensor

MAX_PROGRAMS = 16384  # splits stop here: wide tables of short requests would launch mostly empty programs


@triton.jit
def _chunk_bounds(seq_len, window, num_splits, min_chunk, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first visible position, start of the first chunk, tokens a chunk) of one request."""
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(seq_len - window, 0)
    start = low // BLOCK_N * BLOCK_N
    per_split = tl.cdiv(seq_len - start, num_splits)
    return low, start, tl.maximum(tl.cdiv(per_split, BLOCK_N) * BLOCK_N, min_chunk)


@triton.jit
def _to_half(b_q, qk_scale):
    """bfloat16 queries as float16, times a power of two that makes the largest about 1: exact, and undone in qk_scale.

    One-byte numbers become float16 in one instruction for two, bfloat16 in several slow ones for each.
    """
    largest = tl.max(tl.max(tl.abs(b_q.to(tl.float32)), 1), 0)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27)  # biased by 127
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    down = (exponent << 23).to(tl.float32, bitcast=True)
    return (b_q.to(tl.float32) * up).to(tl.float16), qk_scale * down


@triton.jit
def _widen(b_kv, dtype: tl.constexpr, TO_HALF: tl.constexpr):
    """A block of K or V in the dtype of the dot.

    int8 to float16 by its bits: 0x6400 + u is 1024 + u, and flipping the sign bit of the byte adds 128.
    """
    if TO_HALF:
        if b_kv.dtype == tl.int8:
            bits = b_kv.to(tl.uint8, bitcast=True).to(tl.uint16) ^ 0x6480
            return bits.to(tl.float16, bitcast=True) - 1152.0
    return b_kv.to(dtype)


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
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    LOG_ENTRY: tl.constexpr,
    LOG_PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    TO_HALF: tl.constexpr,
):
    i_kv = tl.program_id(0) // HEAD_BLOCKS
    i_split = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(lens_ptr + i_b)
    low, start, chunk = _chunk_bounds(seq_len, window, tl.num_programs(1), min_chunk, HAS_WINDOW, BLOCK_N)
    begin = start + i_split * chunk
    end = tl.minimum(begin + chunk, seq_len)
    if SPLIT:
        if begin >= seq_len:
            return

    o_g = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    o_h = i_kv * GROUP + o_g
    m_h = o_g < GROUP
    o_d = tl.arange(0, BLOCK_D)
    p_q = q_ptr + i_b * q_stride_b + o_h[:, None] * q_stride_h + o_d[None, :]
    b_q = tl.load(p_q, mask=m_h[:, None] & (o_d < D)[None, :], other=0.0)  # [BLOCK_H, BLOCK_D]
    if TO_HALF:
        b_q, qk_scale = _to_half(b_q, qk_scale)
    if k_scale_ptr is not None:
        qk_scale *= tl.load(k_scale_ptr + i_kv * k_scale_stride)
    if v_scale_ptr is not None:
        v_scale *= tl.load(v_scale_ptr + i_kv * v_scale_stride)
    if slopes_ptr is not None:
        b_slope = tl.load(slopes_ptr + o_h, mask=m_h, other=0.0) * 1.4426950408889634
    p_row = entries_ptr + tl.load(rows_ptr + i_b).to(tl.int64) * entries_stride
    p_key = key_ptr + i_kv.to(tl.int64) * key_stride_h
    p_value = value_ptr + i_kv.to(tl.int64) * value_stride_h

    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for i_n in range(begin, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        at = tl.minimum(o_n, end - 1)
        if HAS_WINDOW:
            m_n &= o_n >= low
            at = tl.maximum(at, low)
        page, offset = locate(p_row, at, LOG_ENTRY, LOG_PAGE)
        b_k = load_rows(p_key, page, offset, key_stride_p, key_stride_s, D, BLOCK_D)
        b_v = load_rows(p_value, page, offset, value_stride_p, value_stride_s, DV, BLOCK_DV)
        s = tl.dot(b_q, tl.trans(_widen(b_k, b_q.dtype, TO_HALF)), input_precision="ieee")  # [BLOCK_H, BLOCK_N]
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
        acc = acc * alpha[:, None] + tl.dot(p.to(b_q.dtype), _widen(b_v, b_q.dtype, TO_HALF), input_precision="ieee")

    out, lse = finish(acc, m_i, l_i, v_scale)
    o_dv = tl.arange(0, BLOCK_DV)
    p_out = out_ptr + i_b * out_stride_b + i_split * out_stride_split + o_h[:, None] * out_stride_h + o_dv[None, :]
    tl.store(p_out, out.to(out_ptr.dtype.element_ty), mask=m_h[:, None] & (o_dv < DV)[None, :])
    if lse_ptr is not None:
        if SPLIT:
            tl.store(lse_ptr + i_b * lse_stride_b + o_h * lse_stride_h + i_split, lse, mask=m_h)
        else:
            tl.store(lse_ptr + i_b * lse_stride_b + o_h * lse_stride_h, lse * 0.6931471805599453, mask=m_h)


@triton.jit
def _combine_kernel(
    part_ptr,
    part_lse_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    window,
    min_chunk,
    num_splits,
    num_heads,
    out_stride_b,
    out_stride_h,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Weigh the splits of one (head, request): part [B, HQ, NS, Dv] float32, part_lse [B, HQ, NS] in log2 units."""
    i_h = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(lens_ptr + i_b)
    _, start, chunk = _chunk_bounds(seq_len, window, num_splits, min_chunk, HAS_WINDOW, BLOCK_N)
    used = tl.cdiv(seq_len - start, chunk)
    row = (i_b * num_heads + i_h) * num_splits
    o_dv = tl.arange(0, BLOCK_DV)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for i_s in range(0, used, BLOCK_S):
        o_s = i_s + tl.arange(0, BLOCK_S)
        m_s = o_s < used
        b_lse = tl.load(part_lse_ptr + row + o_s, mask=m_s, other=float("-inf"))  # [BLOCK_S]
        p_part = part_ptr + (row + o_s)[:, None] * DV + o_dv[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & (o_dv < DV)[None, :], other=0.0)  # [BLOCK_S, BLOCK_DV]
        m_new = tl.maximum(m_i, tl.max(b_lse, 0))
        alpha = tl.exp2(m_i - m_new)
        weight = tl.exp2(b_lse - m_new)
        l_i = l_i * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(weight[:, None] * b_part, 0)
        m_i = m_new
    out = acc / tl.where(used > 0, l_i, 1.0)
    tl.store(out_ptr + i_b * out_stride_b + i_h * out_stride_h + o_dv, out.to(out_ptr.dtype.element_ty), mask=o_dv < DV)
    if lse_ptr is not None:
        lse = tl.where(used > 0, (m_i + tl.log2(tl.where(used > 0, l_i, 1.0))) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + i_b * num_heads + i_h, lse)


@dataclass(frozen=True)
class DecodeConfig:
    """Tile of one program and the number of programs that share a request."""

    block_n: int  # positions a step
    num_warps: int
    num_stages: int  # loads in flight
    min_chunk: int  # tokens a split, at least
    num_splits: int


def decode_config(batch: int, kv_blocks: int, capacity: int, row_bytes: int, itemsize: int = 2) -> DecodeConfig:
    """Tile sizes from shapes alone.

    batch      requests
    kv_blocks  KV heads x blocks of query heads
    capacity   tokens that a row of the table can name (or the window, if smaller)
    row_bytes  bytes of one K row in the pool
    itemsize   bytes of one number in the pool

    From runs on one H200 (results/h200). A program takes 256 to 4,096 tokens, chosen so that all of them are just
    under two waves of what the multiprocessors hold at once, or many: one program with 128-token blocks (the most
    bytes in flight, where a chunk is long or work is plenty), two or three with 64, four with 32 where requests are
    short. From 2^24 tokens on chunks are shorter again: a long request in a mixed batch must not end last.
    Blocks are for rows of 256 bytes: longer ones halve them so that loads in flight fit in shared memory, rows of
    128 bytes (one-byte caches, head_dim 64) want more programs and stages.
    """
    programs = batch * kv_blocks
    work = programs * capacity
    odd_rows = 256 < row_bytes < 512  # head_dim 192: three quarters of what a block of 256 numbers holds
    chunk = min(4096, max(256, next_power_of_two(work // 512)))
    if work >= 2**20:
        chunk = 4096 if work < 2**21 else min(4096, max(1024, next_power_of_two(work // 2048)))
    if work >= 2**24 or odd_rows:
        chunk = min(chunk, 2048)
    num_splits = max(1, min(ceil_div(capacity, chunk), MAX_PROGRAMS // max(programs, 1)))
    length = min(chunk, capacity)
    if work <= 2**17:
        block_n, num_warps, num_stages = 32, 2, 5
    elif odd_rows and work >= 2**20:
        return DecodeConfig(32, 2, 4, chunk, num_splits)
    elif work >= 2**21:
        block_n, num_warps, num_stages = (128, 4, 4) if row_bytes > 128 else (64, 2, 4 if itemsize > 1 else 6)
    elif length >= 4096:
        block_n, num_warps, num_stages = (128, 4, 4) if row_bytes > 128 else (128, 4, 6)
    elif work >= 2**20 and length <= 1024:
        block_n, num_warps, num_stages = 32, 2, 4
    else:
        block_n, num_warps, num_stages = 64, 2, 3
    while row_bytes > 256 and block_n > 16:
        row_bytes //= 2
        block_n //= 2
    return DecodeConfig(block_n, num_warps, num_stages, chunk, num_splits)


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
    tables = (table.entries, table.rows, table.seq_lens)
    k_tensor = k_scale if isinstance(k_scale, Tensor) else None
    v_tensor = v_scale if isinstance(v_scale, Tensor) else None
    factors = (k_scale if k_tensor is None else None, v_scale if v_tensor is None else None)
    aligned = workspace is None or workspace.data_ptr() % 16 == 0
    key = (
        call_key(q, key_cache, value_cache, *tables, alibi_slopes, k_tensor, v_tensor, out),
        (table.tokens_per_entry, scale, window, softcap, *factors, return_lse, num_splits, aligned),
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
    if call.splits > 1:
        part, part_lse = _partials(workspace, (*call.shape[:2], call.splits, call.shape[2]), q.device)
    tensors = (q, key_cache, value_cache, *tables, alibi_slopes, k_tensor, v_tensor, part, part_lse)
    launch(_decode_kernel, call.grid, (*tensors, *call.numbers), call.constants, key)
    if call.splits > 1:
        states = (part, part_lse, table.seq_lens, out, lse)
        numbers = (*call.combine_numbers, out.stride(0), out.stride(1))
        launch(_combine_kernel, call.combine_grid, (*states, *numbers), call.combine_constants, key)
    return (out, lse) if lse is not None else out


@dataclass(frozen=True)
class _Call:
    """What calls of one shape share: grids, numbers and compile-time arguments of the one or two kernels."""

    shape: tuple[int, int, int]
    splits: int
    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    combine_grid: tuple[int, int, int]
    combine_numbers: tuple[float, ...]
    combine_constants: dict[str, Any]


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

    group = num_heads // num_kv_heads
    block_h = min(64, max(16, next_power_of_two(group)))
    head_blocks = ceil_div(group, block_h)
    capacity = table.entries.shape[1] * table.tokens_per_entry
    visible = capacity if window is None else min(capacity, window)
    itemsize = key_cache.element_size()
    config = decode_config(batch, num_kv_heads * head_blocks, visible, head_dim * itemsize, itemsize)
    if num_splits is not None and num_splits < 1:
        fail("num_splits", "None or at least 1", num_splits)
    splits = num_splits or config.num_splits
    min_chunk = config.block_n if num_splits else config.min_chunk
    k_number, _, k_scale_stride = scale_argument("k_scale", k_scale, num_kv_heads, q.device)
    v_number, _, v_scale_stride = scale_argument("v_scale", v_scale, num_kv_heads, q.device)
    qk_scale = (head_dim**-0.5 if scale is None else scale) * k_number
    lse_strides = (num_heads * splits, splits) if splits > 1 else (num_heads, 1) if return_lse else (0, 0)
    part_strides = (num_heads * splits * head_dim_v, splits * head_dim_v, head_dim_v)
    block_s = min(32, next_power_of_two(splits))
    widths = {"DV": head_dim_v, "BLOCK_DV": next_power_of_two(head_dim_v), "BLOCK_N": config.block_n}
    return _Call(
        shape=shape,
        splits=splits,
        grid=(num_kv_heads * head_blocks, splits, batch),
        numbers=(
            qk_scale * LOG2E if softcap is None else qk_scale / softcap,
            v_number,
            0.0 if softcap is None else softcap * LOG2E,
            window or 0,
            min_chunk,
            k_scale_stride,
            v_scale_stride,
            *q.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            table.entries.stride(0),
            *(part_strides if splits > 1 else (*out_strides[:2], 0)),
            *lse_strides,
        ),
        constants={
            **widths,
            "GROUP": group,
            "HEAD_BLOCKS": head_blocks,
            "BLOCK_H": block_h,
            "D": head_dim,
            "BLOCK_D": next_power_of_two(head_dim),
            "LOG_ENTRY": log2(table.tokens_per_entry),
            "LOG_PAGE": log2(page_size),
            "HAS_WINDOW": window is not None,
            "HAS_CAP": softcap is not None,
            "SPLIT": splits > 1,
            "TO_HALF": itemsize == 1 and q.dtype == torch.bfloat16,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        },
        combine_grid=(num_heads, batch, 1),
        combine_numbers=(window or 0, min_chunk, splits, num_heads),
        combine_constants={
            **widths,
            "BLOCK_S": block_s,
            "HAS_WINDOW": window is not None,
            "num_warps": max(1, block_s * next_power_of_two(head_dim_v) // 4096),  # small programs start sooner
        },
    )


def _partials(
    workspace: Tensor | None, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Partial outputs [B, HQ, NS, Dv] and their lse [B, HQ, NS], cut from the workspace."""
    batch, num_heads, splits, head_dim_v = shape
    rows = batch * num_heads * splits
    size = decode_workspace_size(batch, num_heads, head_dim_v, splits)
    if workspace is None:
        workspace = _workspace(size, device)
    else:
        check_dtype("workspace", workspace, (torch.float32,))
        if workspace.numel() < size or workspace.device != device or not workspace.is_contiguous():
            fail("workspace", f"{size} contiguous numbers on {device}", f"{workspace.numel()} on {workspace.device}")
    flat = workspace.view(-1)
    part = flat[: rows * head_dim_v].view(shape)
    return part, flat[rows * head_dim_v : size].view(batch, num_heads, splits)
