"""KVPool: four layouts, one logical view."""

from __future__ import annotations

import pytest
import torch
from kvarena.kernels.pool import LAYOUTS, KVPool


def pool_of(layout: str, **changes: object) -> KVPool:
    sizes = {"num_layers": 3, "num_pages": 4, "page_size": 8, "num_kv_heads": 2, "head_dim": 96, "head_dim_v": 64}
    return KVPool(**(sizes | changes), dtype=torch.float16, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_the_logical_shape_and_cover_every_element_once(layout: str) -> None:
    pool = pool_of(layout)
    number = 1.0
    for layer in range(3):
        assert pool.key(layer).shape == (5, 8, 2, 96)
        assert pool.value(layer).shape == (5, 8, 2, 64)
        for view in (pool.key(layer), pool.value(layer)):
            assert (view == 0).all(), "no other view has written here"
            view.fill_(number)
            number += 1
    assert all((tensor != 0).all() for tensor in pool.layers)
    assert [float(view.mean()) for layer in range(3) for view in (pool.key(layer), pool.value(layer))] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_of_all_layers_is_one_row_of_the_layer_tensors(layout: str) -> None:
    pool = pool_of(layout)
    for tensor in pool.layers:
        assert tensor.shape[0] == 5
        assert tensor.stride(2) == 1
        tensor[3] = 7
    for layer in range(3):
        for view in (pool.key(layer), pool.value(layer)):
            assert (view[3] == 7).all()
            assert (view[[0, 1, 2, 4]] == 0).all()
    assert sum(tensor[3].numel() for tensor in pool.layers) * 2 == pool.bytes_per_page


def test_contiguity_is_what_each_layout_promises() -> None:
    assert pool_of("split").key(1)[2].is_contiguous()
    assert pool_of("hnd").key(1)[2, :, 1].is_contiguous()
    fused = pool_of("fused")
    assert fused.value(1).data_ptr() - fused.key(1).data_ptr() == 96 * 2
    assert pool_of("page_major").layers[0][2].is_contiguous()
    assert len(pool_of("page_major").layers) == len(fused.layers) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_bytes_follow_the_formula(layout: str, dtype: torch.dtype) -> None:
    pool = KVPool(3, 4, 8, 2, 96, 64, dtype=dtype, layout=layout)
    assert pool.bytes_per_page == 3 * 2 * 8 * (96 + 64) * dtype.itemsize
    assert pool.nbytes == 5 * pool.bytes_per_page == sum(s.untyped_storage().nbytes() for s in pool._storage)
    assert all((storage.float() == 0).all() for storage in pool._storage)


def test_poison_reaches_every_element() -> None:
    pool = pool_of("fused").fill_(float("nan"))
    assert all(tensor.isnan().all() for tensor in pool.layers)


def test_the_repr_states_sizes() -> None:
    assert repr(pool_of("hnd")) == (
        "KVPool(hnd, 3 layers, 4 + 1 pages of 8 tokens, 2 heads x (96 + 64), torch.float16, 0.1 MiB on cpu)"
    )


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="layout: expected one of split, fused, hnd, page_major, found 'nhd'"):
        pool_of("nhd")
    with pytest.raises(ValueError, match="page_size: expected a power of two from 1 to 256, found 12"):
        pool_of("split", page_size=12)
    with pytest.raises(ValueError, match="num_pages: expected at least 1, found 0"):
        pool_of("split", num_pages=0)
    with pytest.raises(ValueError, match=r"dtype: expected .*, found torch.int32"):
        KVPool(1, 1, 1, 1, 64, dtype=torch.int32)
    with pytest.raises(IndexError, match="layer: expected 0 to 2, found 3"):
        pool_of("split").key(3)
