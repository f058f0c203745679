"""Rows of head_dim numbers on their way between memory and the tensor cores: how they are cut, read, widened, written.

Blocks are powers of two. A row of another length comes as two blocks (96 = 64 + 32), so that little is loaded and
multiplied for nothing. Rows of one-byte numbers come as pairs: 16-bit numbers reach the tensor cores by matrix loads,
single bytes would be read one by one. The even numbers of all pairs are then one block, the odd ones the other.
Narrow rows of two neighbouring KV heads are read as one (`heads_joined`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvarena.kernels._launch import INTERPRETED, is_power_of_two
from torch import Tensor

PACKED = tl.constexpr(not INTERPRETED)  # the interpreter takes no assembly


def parts_of(dim: int, pairs: bool) -> tuple[int, int]:
    """(BLOCK_D, TAIL_D): the two blocks of a row of `dim` numbers, at least 16 each; TAIL_D 0: one block is all.

    >>> parts_of(128, False), parts_of(96, False), parts_of(80, False), parts_of(128, True)
    ((128, 0), (64, 32), (64, 16), (64, 64))
    """
    if pairs:
        return dim // 2, dim // 2
    block = 1 << max(dim.bit_length() - 1, 4)
    return block, 0 if dim <= block else max(16, 1 << (dim - block - 1).bit_length())


def comes_in_pairs(cache: Tensor) -> bool:
    """Whether the one-byte numbers of a cache [P, S, HKV, D] can be read in pairs: dtype, shape, strides, address."""
    dim = cache.shape[3]
    even = cache.data_ptr() % 2 == 0 and not any(stride % 2 for stride in cache.stride()[:3])
    return cache.element_size() == 1 and even and dim >= 32 and is_power_of_two(dim)


def strides_of(cache: Tensor, pairs: bool, join: int) -> tuple[int, int, int]:
    """Strides of page, slot and (joined) head, in pairs of numbers where those are read."""
    page, slot, head = (stride // (2 if pairs else 1) for stride in cache.stride()[:3])
    return page, slot, head * join


def heads_joined(key_cache: Tensor, value_cache: Tensor, group: int) -> int:
    """How many neighbouring KV heads a program takes as one: 2 where that makes rows whole lines of 128 bytes, else 1.

    Rows of 192 bytes (head_dim 96) make poor reads, two of them beside each other are three lines: 3.73 -> 4.11 TB/s on
    one H200. Queries then hold zeros in the columns of the other head, and outputs drop them: tl.dot pads 4 query
    heads to 16 rows anyway. NaN or infinity in the keys of one of the two heads reaches the other's output.
    """
    joined = key_cache.shape[2] % 2 == 0 and 2 * group <= 16 and key_cache.shape[3] == value_cache.shape[3]
    for cache in (key_cache, value_cache):
        row = cache.shape[3] * cache.element_size()
        joined = joined and cache.element_size() == 2 and cache.stride(2) == cache.shape[3]
        joined = joined and row % 128 != 0 and 2 * row % 128 == 0
    return 2 if joined else 1


@triton.jit
def load_rows(
    base,
    page,
    offset,
    stride_page,
    stride_slot,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row of `DIM` a slot, padded with zeros to [BN, BLOCK_D]."""
    o_d = tl.arange(0, BLOCK_D)
    p = base + (page * stride_page + offset * stride_slot)[:, None] + o_d[None, :]
    if DIM == BLOCK_D:
        return tl.load(p)
    return tl.load(p, mask=(o_d < DIM)[None, :], other=0.0)


@triton.jit
def load_parts(
    base,
    page,
    offset,
    stride_page,
    stride_slot,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One row of `DIM` numbers a slot in two blocks, [BN, BLOCK_D] and [BN, TAIL_D].

    PAIRS: `base` points at pairs, and both blocks are the same pairs, [BN, DIM / 2]; without a tail they are alike too.
    """
    WHOLE: tl.constexpr = DIM if TAIL_D == 0 else BLOCK_D
    b_first = load_rows(base, page, offset, stride_page, stride_slot, BLOCK_D if PAIRS else WHOLE, BLOCK_D)
    b_tail = b_first
    if TAIL_D > 0 and not PAIRS:
        b_tail = load_rows(base + BLOCK_D, page, offset, stride_page, stride_slot, DIM - BLOCK_D, TAIL_D)
    return b_first, b_tail


@triton.jit
def _half_of_pairs(b_pairs, stored: tl.constexpr, ODD: tl.constexpr):
    """The even, or the ODD, one-byte numbers of pairs, as float16: exact.

    int8 by its bits: 0x6400 + u is 1024 + u, and flipping the sign bit of the byte adds 128.
    """
    byte = ((b_pairs >> 8) if ODD else b_pairs) & 0xFF
    if stored == tl.int8:
        return (byte ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    return byte.to(tl.uint8).to(stored, bitcast=True).to(tl.float16)


@triton.jit
def _half_of_pairs_packed(b_pairs, stored: tl.constexpr, ODD: tl.constexpr):
    """As `_half_of_pairs`, two numbers an instruction."""
    if stored == tl.int8:
        first: tl.constexpr = "shr.u32 x, $1, 8;" if ODD else "mov.b32 x, $1;"
        # lop3 0x6A: (x & mask) ^ bits; 0xE480 is -1152
        second: tl.constexpr = "lop3.b32 x, x, 0x00FF00FF, 0x64806480, 0x6A; mov.b32 y, 0xE480E480;"
        third: tl.constexpr = "add.rn.f16x2 $0, x, y;"
    else:
        first: tl.constexpr = "prmt.b32 x, $1, 0, 0x4431;" if ODD else "prmt.b32 x, $1, 0, 0x4420;"  # type: ignore[no-redef]
        second: tl.constexpr = "cvt.u16.u32 h, x; cvt.rn.f16x2."  # type: ignore[no-redef]
        third: tl.constexpr = "e4m3x2 $0, h;" if stored == tl.float8e4nv else "e5m2x2 $0, h;"  # type: ignore[no-redef]
    source: tl.constexpr = "{ .reg .b32 x, y; .reg .b16 h; " + first + second + third + " }"
    return tl.inline_asm_elementwise(source, "=r,r", [b_pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def widen(b_kv, dtype: tl.constexpr, stored: tl.constexpr, PAIRS: tl.constexpr, ODD: tl.constexpr):
    """A block of `load_parts` in the dtype of the dot. `stored`: dtype of the cache."""
    if PAIRS and PACKED:
        b_kv = _half_of_pairs_packed(b_kv, stored, ODD)
    elif PAIRS:
        b_kv = _half_of_pairs(b_kv, stored, ODD)
    return b_kv.to(dtype)


@triton.jit
def _columns(o_d, o_g, GROUP: tl.constexpr, DIM: tl.constexpr, JOIN: tl.constexpr):
    """(column within its own head [rows, BLOCK], whether it is of the row's own KV head) of columns of joined heads."""
    column = (o_d % DIM if JOIN > 1 else o_d)[None, :]
    m_d = (o_d < DIM * JOIN)[None, :]
    if JOIN > 1:
        m_d = (o_d // DIM)[None, :] == (o_g // (GROUP // JOIN))[:, None]
    return column, m_d


@triton.jit
def _load_part(
    p_q,
    o_g,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    JOIN: tl.constexpr,
):
    o_d = FIRST + tl.arange(0, BLOCK) * (2 if PAIRS else 1)
    column, m_d = _columns(o_d, o_g, GROUP, DIM, JOIN)
    return tl.load(p_q[:, None] + column, mask=(o_g < GROUP)[:, None] & m_d, other=0.0)


@triton.jit
def load_query(
    p_q,
    o_g,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    PAIRS: tl.constexpr,
    JOIN: tl.constexpr,
):
    """Rows of q in the two blocks of `load_parts`; zeros behind the group, and in columns of another KV head."""
    b_q = _load_part(p_q, o_g, 0, GROUP, DIM, BLOCK_D, PAIRS, JOIN)
    b_tail = b_q
    if TAIL_D > 0:
        b_tail = _load_part(p_q, o_g, 1 if PAIRS else BLOCK_D, GROUP, DIM, TAIL_D, PAIRS, JOIN)
    return b_q, b_tail


@triton.jit
def store_part(
    p_out,
    out,
    o_g,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    JOIN: tl.constexpr,
):
    """Write one of the two blocks of output rows: numbers FIRST, FIRST + 1 (PAIRS: + 2), ... of the row's own head."""
    o_d = FIRST + tl.arange(0, BLOCK) * (2 if PAIRS else 1)
    column, m_d = _columns(o_d, o_g, GROUP, DIM, JOIN)
    out = out.to(p_out.dtype.element_ty)
    tl.store(p_out[:, None] + column, out, mask=(o_g < GROUP)[:, None] & m_d)
