"""Second kernel of split decode: partial results of one (request, head), weighed by their lse.

Beside it what both kernels must agree on: how a request is cut into chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvarena.kernels._launch import Launch, next_power_of_two


@triton.jit
def chunk_bounds(seq_len, window, num_splits, min_chunk, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first visible position, start of the first chunk, tokens a chunk) of one request."""
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(seq_len - window, 0)
    start = low // BLOCK_N * BLOCK_N
    per_split = tl.cdiv(seq_len - start, num_splits)
    return low, start, tl.maximum(tl.cdiv(per_split, BLOCK_N) * BLOCK_N, min_chunk)


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
    _, start, chunk = chunk_bounds(seq_len, window, num_splits, min_chunk, HAS_WINDOW, BLOCK_N)
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


def combine_launch(
    shape: tuple[int, int, int],
    splits: int,
    window: int | None,
    min_chunk: int,
    block_n: int,
    out_strides: tuple[int, ...],
) -> Launch:
    """The second kernel of split decode."""
    batch, num_heads, head_dim_v = shape
    block_s = min(32, next_power_of_two(splits))
    constants = {
        "DV": head_dim_v,
        "BLOCK_DV": next_power_of_two(head_dim_v),
        "BLOCK_N": block_n,
        "BLOCK_S": block_s,
        "HAS_WINDOW": window is not None,
        "num_warps": max(1, block_s * next_power_of_two(head_dim_v) // 4096),  # small programs start sooner
    }
    numbers = (window or 0, min_chunk, splits, num_heads, *out_strides[:2])
    return Launch(_combine_kernel, (num_heads, batch, 1), numbers, constants)
