"""store_kv: write the K and V of new tokens into the slots they were given.

One program copies the heads of a few tokens: key_cache[slot // S, slot % S] = k[token], value_cache likewise.
Slot -1 (padding) writes nothing; so does a slot past the pool, which would land in someone else's memory.
Quantised caches hold round(x / scale), saturated at the largest finite value of their dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvarena.kernels._launch import (
    FLOATS,
    LARGEST,
    QUANTISED,
    Launch,
    Remembered,
    call_key,
    ceil_div,
    check_cache,
    check_device,
    check_dtype,
    check_runnable,
    check_shape,
    fail,
    log2,
    next_power_of_two,
    scale_argument,
)
from torch import Tensor

ELEMENTS_PER_PROGRAM = 4096  # of K; a token's heads are split over programs beyond that


@triton.jit
def _quantise(x, scale, LARGEST: tl.constexpr, TO_INT: tl.constexpr):
    x = tl.math.div_rn(x.to(tl.float32), scale)
    if TO_INT:
        x = (x + 12582912.0) - 12582912.0  # adding 1.5 x 2^23 rounds to the nearest even integer
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _copy_rows(
    src,
    dst,
    o_h,
    m_load,
    m,
    scale,
    scale_ptr,
    scale_stride,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
    TO_INT: tl.constexpr,
):
    """Rows of `DIM` numbers from pointers `src` to pointers `dst`, both [rows], where m is set.

    Loads wait for `m_load` alone, not for the slot.
    """
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < DIM)[None, :]
    b = tl.load(src[:, None] + o_d[None, :], mask=m_load[:, None] & m_d)  # [rows, BLOCK_D]
    if LARGEST > 0:
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + o_h * scale_stride, mask=m, other=1.0)[:, None]
        b = _quantise(b, scale, LARGEST, TO_INT)
    tl.store(dst[:, None] + o_d[None, :], b.to(dst.dtype.element_ty), mask=m[:, None] & m_d)


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    key_ptr,
    value_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_scale,
    v_scale,
    num_tokens,
    num_slots,
    k_scale_stride,
    v_scale_stride,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    key_stride_p,
    key_stride_s,
    key_stride_h,
    value_stride_p,
    value_stride_s,
    value_stride_h,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LOG_PAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    TO_INT: tl.constexpr,
):
    o_r = tl.arange(0, TOKENS * BLOCK_H)  # a row is one head of one token
    o_t = tl.program_id(0).to(tl.int64) * TOKENS + o_r // BLOCK_H
    o_h = tl.program_id(1) * BLOCK_H + o_r % BLOCK_H
    m_row = (o_t < num_tokens) & (o_h < HEADS)
    slot = tl.load(slot_ptr + o_t, mask=m_row, other=-1).to(tl.int64)
    m = (slot >= 0) & (slot < num_slots)
    page = slot >> LOG_PAGE
    offset = slot & (PAGE_SIZE - 1)
    p_k = k_ptr + o_t * k_stride_t + o_h * k_stride_h
    p_key = key_ptr + page * key_stride_p + offset * key_stride_s + o_h * key_stride_h
    _copy_rows(p_k, p_key, o_h, m_row, m, k_scale, k_scale_ptr, k_scale_stride, D, BLOCK_D, LARGEST, TO_INT)
    p_v = v_ptr + o_t * v_stride_t + o_h * v_stride_h
    p_value = value_ptr + page * value_stride_p + offset * value_stride_s + o_h * value_stride_h
    _copy_rows(p_v, p_value, o_h, m_row, m, v_scale, v_scale_ptr, v_scale_stride, DV, BLOCK_DV, LARGEST, TO_INT)


def check_store(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raise ValueError for tensors that do not fit together."""
    _, num_kv_heads, head_dim_v = check_cache(key_cache, value_cache)
    check_shape("k", k, (None, num_kv_heads, key_cache.shape[3]))
    check_shape("v", v, (k.shape[0], num_kv_heads, head_dim_v))
    check_dtype("k", k, FLOATS)
    check_dtype("v", v, (k.dtype,))
    if key_cache.dtype not in QUANTISED:
        check_dtype("key_cache", key_cache, (k.dtype,))
    check_shape("slot_mapping", slot_mapping, (None,))
    check_dtype("slot_mapping", slot_mapping, (torch.int64, torch.int32))
    if slot_mapping.shape[0] > k.shape[0]:
        fail("slot_mapping", f"at most {k.shape[0]} slots, one a token", slot_mapping.shape[0])
    for name, tensor in (("k", k), ("v", v)):
        if tensor.stride(2) != 1:
            fail(name, "a last dimension of stride 1", tensor.stride())
    for name, tensor in (("v", v), ("key_cache", key_cache), ("slot_mapping", slot_mapping)):
        check_device(name, tensor, k.device)


def store_kv(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write new tokens into the pool.

    k             [T, HKV, D] float; last dimension contiguous
    v             [T, HKV, Dv], dtype of k
    key_cache     [P, S, HKV, D], a view of any layout; dtype of k, or fp8 / int8
    value_cache   [P, S, HKV, Dv], dtype of key_cache
    slot_mapping  int64 or int32 [n], n <= T: slot of each of the first n tokens, -1 = write nothing
    k_scale       quantised caches: number, or float32 tensor with one element or [HKV]. Stored = k / k_scale
    v_scale       likewise for v

    A slot named twice keeps one of its tokens, no telling which. Cost: 2 x T rows read and written once.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    k_tensor = k_scale if isinstance(k_scale, Tensor) else None
    v_tensor = v_scale if isinstance(v_scale, Tensor) else None
    factors = (k_scale if k_tensor is None else None, v_scale if v_tensor is None else None)
    tensors = (k, v, key_cache, value_cache, slot_mapping, k_tensor, v_tensor)
    key = (call_key(*tensors), factors)
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = _prepare(k, v, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    if call.grid[0]:
        call(tensors)


_calls = Remembered()


def _prepare(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> Launch:
    """Check the arguments of store_kv and choose the launch."""
    check_store(k, v, key_cache, value_cache, slot_mapping)
    check_runnable(k.device)
    page_size, num_kv_heads, head_dim = key_cache.shape[1:]
    head_dim_v = value_cache.shape[3]
    k_number, _, k_scale_stride = scale_argument("k_scale", k_scale, num_kv_heads, k.device)
    v_number, _, v_scale_stride = scale_argument("v_scale", v_scale, num_kv_heads, k.device)
    if k_scale_stride == v_scale_stride == 0 and all(_is_one_row(x) for x in (k, v, key_cache, value_cache)):
        num_kv_heads, head_dim, head_dim_v = 1, num_kv_heads * head_dim, num_kv_heads * head_dim_v
    block_d, block_dv = next_power_of_two(head_dim), next_power_of_two(head_dim_v)
    tokens, block_h, num_warps = store_tile(num_kv_heads, max(block_d, block_dv))
    num_tokens = slot_mapping.shape[0]
    numbers = (
        k_number,
        v_number,
        num_tokens,
        key_cache.shape[0] * page_size,
        k_scale_stride,
        v_scale_stride,
        *k.stride()[:2],
        *v.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
    )
    constants = {
        "HEADS": num_kv_heads,
        "TOKENS": tokens,
        "BLOCK_H": block_h,
        "D": head_dim,
        "BLOCK_D": block_d,
        "DV": head_dim_v,
        "BLOCK_DV": block_dv,
        "PAGE_SIZE": page_size,
        "LOG_PAGE": log2(page_size),
        "LARGEST": LARGEST.get(key_cache.dtype, 0.0),
        "TO_INT": key_cache.dtype == torch.int8,
        "num_warps": num_warps,
    }
    grid = (ceil_div(num_tokens, tokens), ceil_div(num_kv_heads, block_h), 1)
    return Launch(_store_kernel, grid, numbers, constants)


def _is_one_row(x: Tensor) -> bool:
    """Whether the heads [..., HKV, D] of a token lie beside each other: one long row."""
    return x.shape[-2] == 1 or x.stride(-2) == x.shape[-1]


def store_tile(num_kv_heads: int, block_d: int) -> tuple[int, int, int]:
    """(tokens, heads, warps) of one program: 2,048 numbers of K in all, 16 a thread.

    On one H200, 8 heads of 128: two tokens with 4 warps 1,050 / 3,540 / 3,908 GB/s for 256 / 8,192 / 65,536 tokens,
    one token with 2 warps 974 / 3,414 / 3,873.
    """
    block_h = min(next_power_of_two(num_kv_heads), max(1, ELEMENTS_PER_PROGRAM // block_d))
    tokens = max(1, min(16, ELEMENTS_PER_PROGRAM // (2 * block_h * block_d)))
    return tokens, block_h, min(8, max(1, tokens * block_h * block_d // 512))
