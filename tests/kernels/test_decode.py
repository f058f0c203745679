"""paged_decode against the float64 oracle: a pairwise cover of shapes and options, and what must hold beyond it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kvarena.kernels._rows import heads_joined, parts_of
from kvarena.kernels.decode import decode_config, decode_workspace_size, paged_decode
from kvarena.kernels.page_table import PageTable
from support.attention import CUDA, DEVICE, Batch, assert_attention, make_batch
from support.attention_rows import BF16, FACTORS, FP16, batch_of, name_of
from support.pairwise import pairwise

DECODE_FACTORS = FACTORS | {"num_splits": (None, 1, 3)}
COVER = pairwise(DECODE_FACTORS)


def test_the_cover_is_small_and_complete() -> None:
    assert len(COVER) <= 100
    for a, b in itertools.combinations(DECODE_FACTORS, 2):
        seen = {(row[a], row[b]) for row in COVER}
        assert len(seen) == len(DECODE_FACTORS[a]) * len(DECODE_FACTORS[b]), (a, b)


@pytest.mark.parametrize("row", COVER, ids=name_of)
def test_decode_equals_the_oracle(row: dict[str, Any]) -> None:
    batch = batch_of(row)
    assert_attention(batch, decode(batch, num_splits=row["num_splits"]))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="bfloat16 comes out wrong in Triton's interpreter")
@pytest.mark.parametrize("row", COVER, ids=name_of)
def test_decode_equals_the_oracle_in_bfloat16(row: dict[str, Any]) -> None:
    batch = batch_of(row, dtype=BF16)
    assert_attention(batch, decode(batch, num_splits=row["num_splits"]))


def decode(batch: Batch, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = paged_decode(batch.q, *batch.caches, return_lse=True, **batch.options, **changes)
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("num_splits", [1, 2, 8], ids="splits{}".format)
def test_an_empty_request_gives_zeros_and_minus_infinity_over_a_poisoned_output(num_splits: int) -> None:
    batch = make_batch(seq_lens=[0, 5, 0])
    out = torch.full((3, 8, 64), float("nan"), device=DEVICE)
    result, lse = paged_decode(batch.q, *batch.caches, out=out, return_lse=True, num_splits=num_splits)
    assert result is out
    assert_attention(batch, (out, lse))


def test_the_table_kind_changes_no_bit() -> None:
    """Same pages, named once a page and once a token: same loads, same order of sums."""
    batch = make_batch(seq_lens=[65, 16, 33], dtype=FP16)
    entries = batch.table.entries.long()[:, :, None] * 16 + torch.arange(16, device=DEVICE)
    by_token = PageTable(entries.flatten(1).int(), batch.table.rows, batch.table.seq_lens, 1)
    by_page, _ = decode(batch)
    batch.table = by_token
    assert torch.equal(by_page, decode(batch)[0])


def test_repeated_calls_agree_in_every_bit() -> None:
    batch = make_batch(seq_lens=[65, 64, 1], dtype=FP16)
    first = decode(batch, num_splits=3)
    for _ in range(3):
        again = decode(batch, num_splits=3)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize(
    ("change", "joined"),
    [
        ({}, 2),
        ({"layout": "page_major"}, 2),
        ({"layout": "fused"}, 1),
        ({"layout": "hnd"}, 1),
        ({"kv_heads": 3}, 1),
        ({"group": 16}, 1),
        ({"head_dim": 64}, 1),
        ({"dtype": torch.float32}, 1),
    ],
    ids=lambda value: str(value),
)
def test_heads_of_rows_of_192_bytes_are_read_two_at_a_time(change: dict[str, Any], joined: int) -> None:
    batch = make_batch(**({"seq_lens": [0, 64, 37], "head_dim": 96, "dtype": FP16} | change))
    key, value, _ = batch.caches
    assert heads_joined(key, value, batch.q.shape[1] // key.shape[2]) == joined
    assert_attention(batch, decode(batch, num_splits=2))


@pytest.mark.parametrize(
    ("dim", "pairs", "parts"),
    [(16, False, (16, 0)), (24, False, (16, 16)), (80, False, (64, 16)), (96, False, (64, 32)), (128, True, (64, 64))],
)
def test_a_row_is_cut_into_blocks_that_cover_it(dim: int, pairs: bool, parts: tuple[int, int]) -> None:
    assert parts_of(dim, pairs) == parts


def test_a_window_reads_no_page_before_it() -> None:
    """Sliding-window allocators give such pages back and name the padding page instead."""
    batch = make_batch(seq_lens=[65, 40], page_size=4, tokens_per_entry=4, options={"window": 7})
    want = decode(batch)[0]
    entries = batch.table.entries.clone()
    for row, length in enumerate((65, 40)):
        entries[row, : (length - 7) // 4] = 0  # the padding page, full of NaN
    batch.table = PageTable(entries, batch.table.rows, batch.table.seq_lens, 4)
    assert torch.equal(want, decode(batch)[0])


def test_out_and_strided_queries_are_honoured() -> None:
    batch = make_batch(seq_lens=[17, 3])
    wide = torch.zeros((2, 10, 64), device=DEVICE)
    wide[:, 1:9] = batch.q
    out = torch.full((2, 12, 64), 7.0, device=DEVICE)
    paged_decode(wide[:, 1:9], *batch.caches, out=out[:, 2:10])
    assert torch.equal(out[:, 2:10], decode(batch)[0])
    assert (out[:, :2] == 7).all()
    assert (out[:, 10:] == 7).all()


def test_addresses_beyond_two_billion_elements_are_reached() -> None:
    """A view whose page stride alone passes 2^31: 32-bit arithmetic would wrap."""
    stride = 2**30 + 2**20
    size = 2 * stride + 16 * 64
    try:
        storage = torch.empty(size, dtype=FP16, device=DEVICE)  # untouched pages cost no memory on a CPU
    except RuntimeError:
        pytest.skip("not enough address space for a pool of 4 GiB")
    cache = storage.as_strided((3, 16, 1, 64), (stride, 64, 64, 1))
    cache[2] = torch.randn(16, 1, 64, device=DEVICE).half()
    table = PageTable(
        *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[2]], [0], [16])), tokens_per_entry=16
    )
    q = torch.randn(1, 2, 64, device=DEVICE).half()
    got = paged_decode(q, cache, cache, table)
    weights = (q[0].double() @ cache[2, :, 0].double().T / 8).softmax(-1)
    assert torch.allclose(got[0].double(), weights @ cache[2, :, 0].double(), atol=2e-3)


def test_a_given_workspace_is_used_and_checked() -> None:
    batch = make_batch(seq_lens=[65, 33])
    size = decode_workspace_size(2, 8, 64, 4)
    workspace = torch.full((size,), float("nan"), device=DEVICE)
    assert_attention(batch, decode(batch, num_splits=4, workspace=workspace))
    assert not workspace.isnan().all()
    with pytest.raises(ValueError, match=rf"workspace: expected {size} contiguous numbers .*, found {size - 1}"):
        decode(batch, num_splits=4, workspace=workspace[1:])


@pytest.mark.parametrize("row_bytes", [64, 128, 256, 512, 1024])
def test_the_configuration_is_legal_for_every_shape(row_bytes: int) -> None:
    for batch in (1, 3, 32, 256, 4096):
        for kv_blocks in (1, 2, 8, 32):
            for capacity in (16, 1024, 8192, 131072, 2**20):
                config = decode_config(batch, kv_blocks, capacity, row_bytes)
                assert config.block_n >= 16
                assert config.num_splits * batch * kv_blocks <= max(16384, batch * kv_blocks)
                assert config.min_chunk % config.block_n == 0


def test_one_warp_a_program_where_a_second_would_only_look_up_the_same_places() -> None:
    assert decode_config(128, 8, 1024, 256).num_warps == 1
    for other in ({"block_h": 32}, {"itemsize": 1}):
        assert decode_config(128, 8, 1024, 256, **other).num_warps == 2
    assert decode_config(128, 8, 1024, 512).num_warps == 2  # longer rows need the second one's registers


def test_tables_of_more_than_2_31_tokens_are_no_problem_for_the_configuration() -> None:
    assert decode_config(1, 1, 2**40, 256).num_splits <= 16384


CASES_OF_BAD_ARGUMENTS = [
    ({"q": (3, 8, 64)}, r"q: expected shape \[2, 8, 64\], found \[3, 8, 64\]"),
    ({"q": (2, 8, 80)}, r"q: expected shape \[any, any, 64\], found \[2, 8, 80\]"),
    ({"q": (2, 7, 64)}, r"q: expected a multiple of 2 query heads, found 7"),
    ({"window": 0}, r"window: expected None or at least 1"),
    ({"softcap": 0.0}, r"softcap: expected None or a positive number, found 0.0"),
    ({"scale": -1.0}, r"scale: expected None or a positive number, found -1.0"),
    ({"num_splits": 0}, r"num_splits: expected None or at least 1, found 0"),
    ({"k_scale": 0.0}, r"k_scale: expected a positive number, found 0.0"),
    ({"alibi_slopes": (7,)}, r"alibi_slopes: expected shape \[8\], found \[7\]"),
    ({"out": (2, 8, 63)}, r"out: expected shape \[2, 8, 64\], found \[2, 8, 63\]"),
]


@pytest.mark.parametrize(("changes", "message"), CASES_OF_BAD_ARGUMENTS, ids=lambda value: str(value)[:30])
def test_a_bad_argument_is_named_with_what_was_expected_and_found(changes: dict[str, Any], message: str) -> None:
    batch = make_batch(seq_lens=[5, 3])
    arguments = {
        name: torch.zeros(value, device=DEVICE) if isinstance(value, tuple) else value
        for name, value in changes.items()
    }
    q = arguments.pop("q", batch.q)
    with pytest.raises(ValueError, match=message):
        paged_decode(q, *batch.caches, **arguments)


def test_tables_and_caches_of_a_wrong_kind_are_refused() -> None:
    batch = make_batch(seq_lens=[5, 3])
    key, value, table = batch.caches
    cases = [
        (key[:, :12], value[:, :12], table, "page_size: expected a power of two from 1 to 256, found 12"),
        (key.half(), value.half(), table, "key_cache: expected torch.float32, found torch.float16"),
        (key, value[:-1], table, "value_cache: expected shape"),
        (
            key,
            value,
            PageTable(table.entries.long(), table.rows, table.seq_lens, 16),
            "table.entries: expected torch.int32",
        ),
        (key, value, PageTable(table.entries, table.rows, table.seq_lens[:1], 16), "table.seq_lens: expected shape"),
        (
            key,
            value,
            PageTable(table.entries, table.rows, table.seq_lens, 12),
            "table.tokens_per_entry: expected a power",
        ),
        (key[0], value, table, r"key_cache: expected shape \[P, S, HKV, D\]"),
    ]
    for *caches, message in cases:
        with pytest.raises(ValueError, match=message):
            paged_decode(batch.q, *caches)
