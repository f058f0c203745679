"""A cache as rows that descriptors (TMA) fetch in boxes, where its strides allow that."""

from __future__ import annotations

import functools

import torch
from kvarena.kernels._direct import Descriptors
from kvarena.kernels._launch import fail
from kvarena.kernels.tiles import BOX_ROWS
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

FIRST_BOX = 10  # of the plain extend kernel's arguments: key_box, then value_box


def box_view(cache: Tensor) -> tuple[list[int], list[int], int, int] | None:
    """[P, S, HKV, D] as rows of one stride: (shape, strides, rows a head, columns a head), or None.

    Heads beside each other are columns (split, fused); heads before slots (hnd) are rows.
    """
    pages, page_size, heads, dim = cache.shape
    stride_page, stride_slot, stride_head, _ = cache.stride()
    if heads == 1:
        stride_head = 0
    head_rows = head_cols = 0
    if stride_head < stride_slot:
        head_cols = stride_head
    elif stride_head % stride_slot == 0:
        head_rows = stride_head // stride_slot
    else:
        return None
    if stride_page % stride_slot:
        return None
    rows = (pages - 1) * (stride_page // stride_slot) + (heads - 1) * head_rows + page_size
    return [rows, (heads - 1) * head_cols + dim], [stride_slot, 1], head_rows, head_cols


def takes_boxes(cache: Tensor) -> bool:
    """Whether blocks of this cache [P, S, HKV, D] can be read by descriptors: shapes, strides, device."""
    if cache.shape[1] < BOX_ROWS or cache.shape[3] not in (64, 128, 256) or cache.element_size() != 2:
        return False
    if cache.data_ptr() % 16 or any(stride % 8 for stride in cache.stride()[:3]) or box_view(cache) is None:
        return False
    return cache.device.type != "cuda" or torch.cuda.get_device_capability(cache.device) >= (9, 0)


def descriptors_of(key_cache: Tensor, value_cache: Tensor, block_n: int) -> tuple[Descriptors, list[int]]:
    """How to make the descriptors of K and V, and for each: rows a page, rows a head, columns a head."""
    made: Descriptors = {}
    geometry: list[int] = []
    for i, cache in enumerate((key_cache, value_cache)):
        view = box_view(cache)
        if view is None:
            fail("cache", "pages a whole number of rows apart", f"strides {cache.stride()}")
        shape, strides, head_rows, head_cols = view
        block = [block_n, cache.shape[3]]
        made[FIRST_BOX + i] = functools.partial(TensorDescriptor, shape=shape, strides=strides, block_shape=block)
        geometry += [cache.stride(0) // cache.stride(1), head_rows, head_cols]
    return made, geometry
