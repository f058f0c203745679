"""What decode and extend share on the device: addresses in the pool, scores, the running softmax.

Scores are kept in units of log2(e), so that exp2 and log2 do all the work; only lse leaves as a natural log.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(entries_ptr, o_n, LOG_ENTRY: tl.constexpr, LOG_PAGE: tl.constexpr):
    """(page int64, offset) of positions `o_n` of the row that `entries_ptr` points at.

    Where a page spans several entries only its first is read: the slots of a page are consecutive.
    """
    offset = o_n & ((1 << LOG_PAGE) - 1)
    if LOG_ENTRY == LOG_PAGE:
        page = tl.load(entries_ptr + (o_n >> LOG_PAGE))
    elif LOG_ENTRY < LOG_PAGE:
        first = (o_n >> LOG_PAGE) << (LOG_PAGE - LOG_ENTRY)
        page = tl.load(entries_ptr + first) >> (LOG_PAGE - LOG_ENTRY)
    else:
        entry = tl.load(entries_ptr + (o_n >> LOG_ENTRY)).to(tl.int64)
        page = (entry << (LOG_ENTRY - LOG_PAGE)) + ((o_n >> LOG_PAGE) & ((1 << (LOG_ENTRY - LOG_PAGE)) - 1))
    return page.to(tl.int64), offset


@triton.jit
def cap_scores(s, cap):
    """cap x tanh(s), where s is already divided by the cap and `cap` carries log2(e).

    tanh from exp of a number that is never positive: nothing overflows.
    """
    t = tl.exp2(-2.8853900817779268 * tl.abs(s))  # exp(-2 |s|)
    tanh = (1.0 - t) / (1.0 + t)
    return cap * tl.where(s < 0, -tanh, tanh)


@triton.jit
def softmax_step(s, factor, m_i, l_i, GUARD: tl.constexpr):
    """One block of the running softmax over scores s x factor, factor > 0.

    Returns (weights [M, N], new maximum, new sum, factor for what was summed so far). Scaling inside the exponent
    costs nothing: it is one fused multiply-add.
    GUARD: a row may have seen no key yet, and -inf minus -inf must not become NaN.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
    m_safe = m_new
    if GUARD:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    return p, m_new, l_i * alpha + tl.sum(p, 1), alpha


@triton.jit
def finish(acc, m_i, l_i, v_scale):
    """(output, lse in log2 units) of rows; a row that saw no key gives zeros and -inf."""
    empty = m_i == float("-inf")
    l_safe = tl.where(empty, 1.0, l_i)
    return acc * (v_scale / l_safe)[:, None], m_i + tl.log2(l_safe)


@triton.jit
def find_request(start_ptr, num_requests, i_tile, TOKENS: tl.constexpr, BLOCK_B: tl.constexpr):
    """(request of a tile, number of the tile within it); request `num_requests` is the padding."""
    o_b = tl.arange(0, BLOCK_B)
    start = tl.load(start_ptr + o_b, mask=o_b <= num_requests, other=0)  # [BLOCK_B]
    first = tl.where(o_b <= num_requests, start // TOKENS + o_b, i_tile + 1)
    i_b = tl.sum((first <= i_tile).to(tl.int32), 0) - 1
    return i_b, i_tile - tl.load(start_ptr + i_b) // TOKENS - i_b


@triton.jit
def weigh_block(
    m_i,
    l_i,
    b_q,
    b_k,
    b_slope,
    o_pos,
    o_n,
    high,
    qk_scale,
    cap,
    window,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Running softmax over one block of keys, at positions o_n: as `softmax_step`."""
    s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    factor = qk_scale
    if HAS_CAP:
        s = cap_scores(s * qk_scale, cap)
        factor = 1.0
    if HAS_SLOPES:
        s = s * factor + b_slope[:, None] * (o_n[None, :] - o_pos[:, None])
        factor = 1.0
    if MASKED:
        m = (o_n[None, :] <= o_pos[:, None]) & (o_n < high)[None, :]
        if HAS_WINDOW:
            m &= o_n[None, :] > o_pos[:, None] - window
        s = tl.where(m, s, float("-inf"))
    return softmax_step(s, factor, m_i, l_i, MASKED)
