"""Cases kernel-* and adapter-04: other projects' bug reports as small inputs with closed-form results.

A case gives component 0 of q and K and a constant vector per V; it runs here on every dtype that this machine has
(bfloat16 on a GPU only), with both table kinds and, beyond its own values, poison in every slot it does not name.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kvarena.kernels.copy import copy_pages
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.slots import compute_slot_mapping
from kvarena.kernels.store import store_kv
from support.attention import CUDA, DEVICE

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent.parent / "cases/cases.jsonl").read_text().splitlines())
}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
both_tables = pytest.mark.parametrize("by_token", [False, True], ids=["block_table", "req_to_token"])


def recipe(kind: Any, count: int) -> torch.Tensor:
    """One number a token, from a case's shorthand."""
    if isinstance(kind, list):
        return torch.tensor([float(value) for value in kind])
    if kind == "arange":
        return torch.arange(count).float()
    if kind == "zeros":
        return torch.zeros(count)
    if kind.startswith("const:"):
        return torch.full((count,), float(kind[6:]))
    if kind == "4*ln3":
        return torch.full((count,), 4 * math.log(3))
    raise ValueError(f"recipe: expected arange, zeros, const:x, 4*ln3 or a list, found {kind!r}")


def table_for(case: dict[str, Any], seq_lens: list[int], by_token: bool) -> PageTable:
    pages, page_size = case["block_table"], case["P"]
    if isinstance(pages, str):
        pages = [list(range(1, case["num_pages"]))]
    entries = torch.tensor(pages, dtype=torch.int32)
    if by_token:
        entries = (entries[:, :, None] * page_size + torch.arange(page_size, dtype=torch.int32)).flatten(1)
    entries, lens = entries.to(DEVICE), torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    return PageTable(
        entries, torch.arange(len(lens), dtype=torch.int32, device=DEVICE), lens, 1 if by_token else page_size
    )


def first_component(values: torch.Tensor, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, heads, dim]: component 0 holds the value, the others 0."""
    x = torch.zeros((len(values), heads, dim))
    x[..., 0] = values[:, None]
    return x.to(dtype).to(DEVICE)


def filled_cache(
    case: dict[str, Any], table: PageTable, dtype: torch.dtype, poison: float
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (case["num_pages"], case["P"], case["Hkv"], case["D"])
    key = torch.full(shape, poison, device=DEVICE).to(dtype)
    value = torch.full(shape, poison, device=DEVICE).to(dtype)
    for request, length in enumerate(table.seq_lens.tolist()):
        slots = table.slots(request)
        at = (slots // case["P"], slots % case["P"])
        key[at] = first_component(recipe(case["k_dim0"], length)[:length], case["Hkv"], case["D"], dtype)
        numbers = recipe(case["v_const"], length)[:length].to(dtype).to(DEVICE)
        value[at] = numbers[:, None, None].expand(-1, case["Hkv"], case["D"])
    return key, value


def decode_case(
    case: dict[str, Any], dtype: torch.dtype, by_token: bool, poison: float = math.nan
) -> tuple[torch.Tensor, torch.Tensor]:
    table = table_for(case, case["seq_lens"], by_token)
    key, value = filled_cache(case, table, dtype, poison)
    q = first_component(recipe(case["q_dim0"], len(case["seq_lens"])), case["Hq"], case["D"], dtype)
    slopes = case.get("alibi_slopes")
    splits = case.get("num_splits", 1)
    out, lse = paged_decode(
        q,
        key,
        value,
        table,
        scale=case["scale"],
        softcap=case.get("softcap"),
        window=case.get("window"),
        alibi_slopes=None if slopes is None else torch.tensor(slopes, device=DEVICE),
        num_splits=splits,
        return_lse=True,
        out=torch.full_like(q, math.nan),
    )
    assert (out == out[..., :1]).all(), "V is constant over the components, so is the output"
    return out[..., 0].float().cpu(), lse.cpu()


def check(got: torch.Tensor, want: list, atol: float) -> None:
    want = torch.tensor([[float(x) for x in row] for row in want])
    assert torch.equal(got.isinf(), want.isinf())
    assert ((got - want).abs()[~want.isinf()] <= atol).all(), (got, want)


@both_tables
@every_dtype
@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["kernel-03", "kernel-05", "kernel-06"])
def test_decode_cases(name: str, poison: float, dtype: torch.dtype, by_token: bool) -> None:
    case, expect = CASES[name]["input"], CASES[name]["expect"]
    out, lse = decode_case(case, dtype, by_token, poison)
    check(out, expect["out"], expect["atol"])
    check(lse, expect["lse"], 1e-4)


@both_tables
@every_dtype
def test_empty_splits_equal_one_split(dtype: torch.dtype, by_token: bool) -> None:
    case = CASES["kernel-06"]["input"]
    many, one = (decode_case(case | {"num_splits": n}, dtype, by_token) for n in (8, 1))
    assert torch.allclose(many[0], one[0], atol=CASES["kernel-06"]["expect"]["atol"])
    assert torch.allclose(many[1], one[1], atol=1e-5)


@both_tables
@every_dtype
def test_kernel_09_tiles_masked_before_the_first_visible_key(dtype: torch.dtype, by_token: bool) -> None:
    case, expect = CASES["kernel-09"]["input"], CASES["kernel-09"]["expect"]
    (prefix,), (new,) = case["prefix_lens"], case["q_lens"]
    table = table_for(case, [prefix + new], by_token)
    key, value = filled_cache(case, table, dtype, math.nan)
    q = first_component(recipe(case["q_dim0"], new), case["Hq"], case["D"], dtype)
    starts = torch.tensor([0, new], dtype=torch.int32, device=DEVICE)
    out = paged_extend(q, key, value, table, starts, scale=case["scale"], window=case["window"])
    atol = expect["atol"] if dtype == torch.bfloat16 else 0.05 if dtype == torch.float16 else expect["atol_fp32"]
    check(out[:, 0, :1].float().cpu(), [[x] for x in expect["out"]], atol)


@both_tables
@every_dtype
def test_kernel_10_softcap_neither_overflows_nor_unmasks(dtype: torch.dtype, by_token: bool) -> None:
    case, expect = CASES["kernel-10"]["input"], CASES["kernel-10"]["expect"]
    for variant, want in zip(case["variants"], expect["out"], strict=True):
        out, _ = decode_case(case["base"] | variant, dtype, by_token)
        check(out, [[want]], expect["atol"])


@both_tables
@every_dtype
def test_kernel_11_alibi_counts_from_the_query_and_takes_any_number_of_heads(
    dtype: torch.dtype, by_token: bool
) -> None:
    case, expect = CASES["kernel-11"]["input"], CASES["kernel-11"]["expect"]
    out, _ = decode_case(case, dtype, by_token)
    check(out, expect["out"], expect["atol"])


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=str)
@every_dtype
def test_kernel_13_slot_minus_one_writes_nothing(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    case, expect = CASES["kernel-13"]["input"], CASES["kernel-13"]["expect"]
    values = torch.tensor([float(x) for x in case["token_values"]])
    tokens = values[:, None, None].repeat(1, case["Hkv"], case["D"]).to(dtype).to(DEVICE)
    slots = torch.tensor(case["slot_mapping"], dtype=slot_dtype, device=DEVICE)
    for count in (len(slots), len(slots) - 1):  # a mapping shorter than the padded tokens does as well
        cache = torch.full(
            (case["num_pages"], case["P"], case["Hkv"], case["D"]), case["cache_fill"], device=DEVICE
        ).to(dtype)
        other = cache.clone()
        store_kv(tokens, tokens, cache, other, slots[:count])
        for written in (cache, other):
            assert written[..., 0, 0].flatten().tolist() == expect["slots"]
            assert (written == written[..., :1]).all()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@every_dtype
def test_kernel_16_scales_of_a_quantised_cache_reach_cached_and_new_tokens(
    dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """New tokens pass through the cache here: store_kv divides by the scale, reading multiplies.

    So a stored 1 means 0.25 (K) or 0.5 (V), and a new V of 10 is 10 when it is read: the case's numbers.
    """
    decode, extend = CASES["kernel-16"]["input"]["variants"]
    want = CASES["kernel-16"]["expect"]["out"]
    scales = {"k_scale": decode["k_scale"], "v_scale": decode["v_scale"]}
    lens = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    table = PageTable(torch.ones_like(lens)[None], torch.zeros_like(lens), lens, 4)
    poison = 127.0 if kv_dtype == torch.int8 else math.nan
    caches = [torch.full((2, 4, 1, 64), poison, device=DEVICE).to(kv_dtype) for _ in range(2)]
    q = first_component(recipe(decode["q_dim0"], 1), 1, 64, dtype)
    tolerance = CASES["kernel-16"]["expect"]["atol"] if dtype != torch.float32 else 1e-4

    for cache, numbers, vector in zip(caches, (decode["k_stored"], decode["v_stored"]), (False, True), strict=True):
        cache[1, :2] = stored(numbers, vector).to(kv_dtype)
    out = paged_decode(q, *caches, table, scale=decode["scale"], **scales)
    check(out[:, 0, :1].float().cpu(), [[want[0]]], tolerance)

    for cache, numbers, vector in zip(
        caches, (extend["prefix_k_stored"], extend["prefix_v_stored"]), (False, True), strict=True
    ):
        cache[1] = poison
        cache[1, :1] = stored(numbers, vector).to(kv_dtype)
    new = [stored(extend[name], vector).to(dtype) for name, vector in (("new_k", False), ("new_v", True))]
    store_kv(*new, *caches, torch.tensor([5], device=DEVICE), **scales)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    out = paged_extend(q, *caches, table, starts, scale=extend["scale"], **scales)
    check(out[:, 0, :1].float().cpu(), [[want[1]]], tolerance)


def stored(numbers: list[float], vector: bool) -> torch.Tensor:
    """[n, 1, 64]: V holds the number in every component, K in component 0."""
    values = torch.tensor([float(x) for x in numbers])
    if vector:
        return values[:, None, None].repeat(1, 1, 64).to(DEVICE)
    return first_component(values, 1, 64, torch.float32)


@pytest.mark.parametrize("num_splits", [1, 8] if CUDA else [8], ids="splits{}".format)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda dtype: str(dtype)[6:])
def test_kernel_18_sums_of_a_long_context_do_not_stall(dtype: torch.dtype, num_splits: int) -> None:
    case, expect = CASES["kernel-18"]["input"], CASES["kernel-18"]["expect"]
    out, lse = decode_case(case | {"num_splits": num_splits}, dtype, by_token=False)
    check(out, expect["out"], expect["atol"])
    check(lse, expect["lse"], 1e-4)


@pytest.mark.parametrize("run", range(4))
def test_kernel_20_copies_are_simultaneous_and_targets_distinct(run: int) -> None:
    case, expect = CASES["kernel-20"]["input"], CASES["kernel-20"]["expect"]["runs"][run]
    values = torch.tensor(case["page_values"], dtype=torch.float32, device=DEVICE)
    layers = values[:, None, None].expand(-1, 3, 40).contiguous()
    pairs = case["runs"][run]["pairs"]
    src, dst = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if "error" in expect:
        with pytest.raises(ValueError, match="target 1 named twice"):
            copy_pages(layers, src, dst)
        assert layers[:, 0, 0].tolist() == case["page_values"]
    else:
        copy_pages(layers, src, dst)
        assert layers[:, 0, 0].tolist() == expect["pages"]
        assert (layers == layers[:, :1, :1]).all()


def test_adapter_04_a_position_past_the_row_gets_no_slot() -> None:
    case = CASES["adapter-04"]["input"]
    table = PageTable(
        torch.tensor(case["block_table"], dtype=torch.int32, device=DEVICE),
        torch.tensor([case["req"]], dtype=torch.int32, device=DEVICE),
        torch.tensor([case["computed"] + case["new"]], dtype=torch.int32, device=DEVICE),
        case["page_size"],
    )
    positions = torch.arange(case["computed"], case["computed"] + case["new"], device=DEVICE)
    starts = torch.tensor([0, case["new"]], dtype=torch.int32, device=DEVICE)
    out = compute_slot_mapping(table, starts, positions, torch.zeros_like(positions))
    assert out.tolist() == [4 * 4 + 3, -1]
    assert not set(out.tolist()) & set(CASES["adapter-04"]["expect"]["never"])
