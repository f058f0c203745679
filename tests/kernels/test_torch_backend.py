"""The vectorised torch backend against the same oracle, over the same shapes and options, as the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvarena.kernels import reference, torch_backend
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import KVPool
from support.attention import DEVICE, Batch, assert_attention, make_batch
from support.attention_rows import FACTORS, batch_of, name_of
from support.pairwise import pairwise

EXTEND = pairwise(FACTORS | {"extend": ("all", "one", "part", "mixed"), "padding": (0, 3)})
DECODE = pairwise(FACTORS)[::4]  # decode is an extend of one token, which the rows above cover


@pytest.mark.parametrize("row", EXTEND, ids=name_of)
def test_extend_equals_the_oracle(row: dict[str, Any]) -> None:
    batch = batch_of(row)
    result = torch_backend.paged_extend(batch.q, *batch.caches, batch.query_start_loc, return_lse=True, **batch.options)
    assert_attention(batch, result)


@pytest.mark.parametrize("row", DECODE, ids=name_of)
def test_decode_equals_the_oracle(row: dict[str, Any]) -> None:
    batch = batch_of(row)
    assert_attention(batch, torch_backend.paged_decode(batch.q, *batch.caches, return_lse=True, **batch.options))


def ragged() -> Batch:
    return make_batch(seq_lens=[40, 3, 0, 17, 9], extend_lens=[40, 1, 0, 5, 1], page_size=4, tokens_per_entry=4)


def test_a_plan_shared_by_layers_changes_nothing() -> None:
    batch = ragged()
    plan = torch_backend.plan_gather(batch.caches[2], batch.query_start_loc)
    alone = torch_backend.paged_extend(batch.q, *batch.caches, batch.query_start_loc)
    assert torch.equal(torch_backend.paged_extend(batch.q, *batch.caches, batch.query_start_loc, plan=plan), alone)


def test_more_new_tokens_than_tokens_are_refused() -> None:
    table = PageTable(torch.ones(1, 2, dtype=torch.int32), *(torch.tensor([n], dtype=torch.int32) for n in (0, 3)), 4)
    with pytest.raises(ValueError, match="query_start_loc: expected at most seq_lens new tokens"):
        torch_backend.plan_gather(table, torch.tensor([0, 4], dtype=torch.int32))


@pytest.mark.parametrize("layout", ["split", "fused", "hnd", "page_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_store_writes_what_the_reference_writes(layout: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([7, -1, 4, 23, 99, 12], device=DEVICE)
    float_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    k, v = torch.randn(2, 6, 2, 16, generator=generator).to(DEVICE, float_dtype)
    scales = {} if dtype.itemsize > 1 else {"k_scale": 0.05, "v_scale": torch.tensor([0.04, 0.06], device=DEVICE)}
    pools = [KVPool(1, 5, 4, 2, 16, dtype=dtype, layout=layout, device=DEVICE) for _ in range(2)]
    for pool, store in zip(pools, (torch_backend.store_kv, reference.store_kv), strict=True):
        store(k, v, pool.key(0), pool.value(0), slots, **scales)
    for view in ("key", "value"):
        ours, wanted = (getattr(pool, view)(0) for pool in pools)
        assert torch.equal(ours.float(), wanted.float())
        assert ours.float().any()
