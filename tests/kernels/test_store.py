"""store_kv: bit for bit the reference, in every layout; padding and foreign slots stay untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvarena.kernels import reference
from kvarena.kernels.pool import LAYOUTS, KVPool
from kvarena.kernels.store import store_kv
from support.attention import CUDA, DEVICE
from support.pairwise import pairwise

FP32, FP16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FACTORS = {
    "dtype": (FP32, FP16, BF16),
    "kv_dtype": (None, E4M3, E5M2, INT8),
    "heads": (1, 2, 3, 8),
    "dims": ((64, 64), (80, 64), (96, 96), (192, 128), (256, 256)),
    "page_size": (1, 4, 16, 256),
    "layout": LAYOUTS,
    "scales": (None, "numbers", "one", "heads"),
    "slot_dtype": (torch.int64, torch.int32),
}
COVER = pairwise(FACTORS)


def scale_of(kind: str | None, heads: int, first: float) -> Any:
    if kind in (None, "numbers"):
        return None if kind is None else first
    values = torch.full((1 if kind == "one" else heads,), first, device=DEVICE)
    return values * 2.0 ** torch.arange(len(values), device=DEVICE)


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Numbers that every cache dtype holds exactly, after a division by a power of two too."""
    return torch.randint(-7, 8, shape, generator=generator).to(dtype).to(DEVICE)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, for comparison bit by bit (NaN equals NaN)."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("row", COVER, ids=lambda row: "-".join(str(v).replace("torch.", "") for v in row.values()))
def test_store_equals_the_reference_bit_for_bit(row: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, (dim, dim_v), page_size = row["heads"], row["dims"], row["page_size"]
    kv_dtype = row["kv_dtype"] or row["dtype"]
    num_pages = max(2, 16 // page_size)
    pools = [KVPool(2, num_pages, page_size, heads, dim, dim_v, kv_dtype, DEVICE, row["layout"]) for _ in range(2)]
    k = whole_numbers((9, heads, dim), row["dtype"], generator)
    v = whole_numbers((9, heads, dim_v), row["dtype"], generator)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:8] + page_size
    slots[3] = -1
    slots[5] = (num_pages + 1) * page_size  # past the pool
    scales: dict[str, Any] = {}
    if row["kv_dtype"] is not None:
        scales = {"k_scale": scale_of(row["scales"], heads, 0.5), "v_scale": scale_of(row["scales"], heads, 2.0)}
    for pool, op in zip(pools, (store_kv, reference.store_kv), strict=True):
        pool.fill_(9)
        op(k, v, pool.key(1), pool.value(1), slots.to(row["slot_dtype"]).to(DEVICE), **scales)
    for view in ("key", "value"):
        for layer in (0, 1):
            got, want = (getattr(pool, view)(layer) for pool in pools)
            assert torch.equal(raw(got), raw(want)), (view, layer)


@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2], ids=str)
def test_what_does_not_fit_is_saturated_and_zero_keeps_zero(dtype: torch.dtype) -> None:
    pool = KVPool(1, 1, 4, 1, 64, dtype=dtype, device=DEVICE)
    k = torch.zeros((1, 1, 64), device=DEVICE)
    k[0, 0, :4] = torch.tensor([1e9, -1e9, float("inf"), 3.0], device=DEVICE)
    store_kv(k, k, pool.key(0), pool.value(0), torch.tensor([5], device=DEVICE), k_scale=1.0, v_scale=1.0)
    largest = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}[dtype]
    assert pool.key(0)[1, 1, 0, :5].float().tolist() == [largest, -largest, largest, 3.0, 0.0]


@pytest.mark.parametrize(
    "ties", [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (126.5, 126), (0.49, 0)], ids=str
)
def test_int8_rounds_to_the_nearest_even(ties: tuple[float, int]) -> None:
    pool = KVPool(1, 1, 1, 1, 64, dtype=INT8, device=DEVICE)
    k = torch.full((1, 1, 64), ties[0], device=DEVICE)
    store_kv(k, k, pool.key(0), pool.value(0), torch.tensor([1], device=DEVICE))
    assert (pool.key(0)[1] == ties[1]).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="the interpreter truncates instead of rounding to fp8")
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_fp8_rounds_as_torch_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    k = (torch.randn((64, 8, 128), generator=generator) * torch.logspace(-4, 3, 128)).to(DEVICE)
    pool = KVPool(1, 4, 16, 8, 128, dtype=dtype, device=DEVICE)
    store_kv(k, k, pool.key(0), pool.value(0), torch.arange(16, 80, device=DEVICE), k_scale=0.37)
    want = reference.quantise(k, dtype, 0.37)
    assert torch.equal(raw(pool.key(0)[1:].flatten(0, 1)), raw(want))


def test_nan_is_stored_where_it_belongs_and_nowhere_else() -> None:
    pool = KVPool(1, 2, 4, 2, 64, dtype=FP16, device=DEVICE)
    k = torch.ones((3, 2, 64), dtype=FP16, device=DEVICE)
    k[1] = float("nan")
    store_kv(k, k, pool.key(0), pool.value(0), torch.tensor([4, -1, 6], device=DEVICE))
    assert not pool.key(0).isnan().any()
    store_kv(k, k, pool.key(0), pool.value(0), torch.tensor([4, 7, 6], device=DEVICE))
    assert pool.key(0)[1, 3].isnan().all()
    assert pool.key(0).isnan().sum() == 2 * 64


def test_strided_inputs_are_read_by_their_strides() -> None:
    """K and V cut from one fused projection, as models hand them over."""
    qkv = torch.randn((5, 10, 64), device=DEVICE)
    pool = KVPool(1, 2, 4, 2, 64, dtype=FP32, device=DEVICE)
    store_kv(qkv[:, 6:8], qkv[:, 8:], pool.key(0), pool.value(0), torch.arange(4, 9, device=DEVICE))
    assert torch.equal(pool.key(0)[1:].flatten(0, 1)[:5], qkv[:, 6:8])
    assert torch.equal(pool.value(0)[1:].flatten(0, 1)[:5], qkv[:, 8:])


def test_no_tokens_is_no_work() -> None:
    pool = KVPool(1, 1, 4, 1, 64, dtype=FP32, device=DEVICE)
    empty = torch.zeros((0, 1, 64), device=DEVICE)
    store_kv(empty, empty, pool.key(0), pool.value(0), torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert (pool.key(0) == 0).all()


BAD = [
    ({"k": (3, 2, 80)}, r"k: expected shape \[any, 2, 64\], found \[3, 2, 80\]"),
    ({"v": (2, 2, 64)}, r"v: expected shape \[3, 2, 64\], found \[2, 2, 64\]"),
    ({"slots": 4}, r"slot_mapping: expected at most 3 slots, one a token, found 4"),
    ({"kv_dtype": FP16}, r"key_cache: expected torch.float32, found torch.float16"),
    ({"kv_dtype": INT8, "k_scale": -1.0}, r"k_scale: expected a positive number, found -1.0"),
    ({"kv_dtype": INT8, "k_scale": torch.ones(3)}, r"k_scale: expected shape \[2\], found \[3\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_argument_is_named_with_what_was_expected_and_found(changes: dict[str, Any], message: str) -> None:
    pool = KVPool(1, 2, 4, 2, 64, dtype=changes.get("kv_dtype", FP32), device=DEVICE)
    k = torch.zeros(changes.get("k", (3, 2, 64)), device=DEVICE)
    v = torch.zeros(changes.get("v", (3, 2, 64)), device=DEVICE)
    slots = torch.arange(changes.get("slots", 3), device=DEVICE)
    scale = changes.get("k_scale")
    scale = scale.to(DEVICE) if isinstance(scale, torch.Tensor) else scale
    with pytest.raises(ValueError, match=message):
        store_kv(k, v, pool.key(0), pool.value(0), slots, k_scale=scale)
