"""merge_states: join attention over two disjoint sets of keys, from their outputs and lse.

    lse = ln(exp(lse_a) + exp(lse_b));   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

One program merges one row (token, head) of D numbers, padded to a power of two. lse is a natural log.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvarena.kernels._launch import (
    FLOATS,
    ceil_div,
    check_device,
    check_dtype,
    check_runnable,
    check_shape,
    fail,
    next_power_of_two,
)
from torch import Tensor

BLOCK_ROWS = 4


@triton.jit
def _merge_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < num_rows
    m = m_r[:, None] & (o_d < DIM)[None, :]
    p = o_r[:, None] * DIM + o_d[None, :]
    lse_a = tl.load(lse_a_ptr + o_r, mask=m_r, other=float("-inf"))  # [BLOCK_R]
    lse_b = tl.load(lse_b_ptr + o_r, mask=m_r, other=float("-inf"))
    largest = tl.maximum(lse_a, lse_b)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    w_a = tl.exp(lse_a - base)
    w_b = tl.exp(lse_b - base)
    total = w_a + w_b
    safe = tl.where(total == 0, 1.0, total)
    b_a = tl.load(out_a_ptr + p, mask=m, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_D]
    b_b = tl.load(out_b_ptr + p, mask=m, other=0.0).to(tl.float32)
    # A side without keys carries no weight, whatever its output holds: 0 x NaN would be NaN.
    b_a = tl.where(w_a[:, None] == 0, 0.0, b_a)
    b_b = tl.where(w_b[:, None] == 0, 0.0, b_b)
    merged = b_a * (w_a / safe)[:, None] + b_b * (w_b / safe)[:, None]
    tl.store(out_ptr + p, merged.to(out_ptr.dtype.element_ty), mask=m)
    tl.store(lse_ptr + o_r, tl.where(total == 0, float("-inf"), base + tl.log(safe)), mask=m_r)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two partial attention results over disjoint keys.

    out_a, out_b  [N, H, D] of one float dtype
    lse_a, lse_b  float32 [N, H], natural log; -inf where a side saw no key (its output is then ignored)

    Returns (out [N, H, D], lse float32 [N, H]); where neither side saw a key, zeros and -inf.
    Cost: both outputs read, one written. Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    check_shape("out_a", out_a, (None, None, None))
    check_dtype("out_a", out_a, FLOATS)
    check_shape("out_b", out_b, out_a.shape)
    check_dtype("out_b", out_b, (out_a.dtype,))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_shape(name, lse, out_a.shape[:2])
        check_dtype(name, lse, (torch.float32,))
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_device(name, tensor, out_a.device)
        if not tensor.is_contiguous():
            fail(name, "a contiguous tensor", tensor.stride())
    check_runnable(out_a.device)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    num_rows = lse.numel()
    if num_rows and out.shape[2]:
        _merge_kernel[(ceil_div(num_rows, BLOCK_ROWS),)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            num_rows,
            DIM=out.shape[2],
            BLOCK_D=next_power_of_two(out.shape[2]),
            BLOCK_R=BLOCK_ROWS,
            num_warps=4,
        )
    return out, lse
