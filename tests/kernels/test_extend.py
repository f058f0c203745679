"""paged_extend against the float64 oracle: a pairwise cover of shapes and options, and what must hold beyond it."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from kvarena.kernels import extend as extend_module
from kvarena.kernels._launch import Remembered
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import extend_config, paged_extend
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import LAYOUTS
from support.attention import CUDA, DEVICE, Batch, assert_attention, make_batch
from support.attention_rows import BF16, FACTORS, FP16, batch_of, name_of
from support.pairwise import pairwise

EXTEND_FACTORS = FACTORS | {"extend": ("all", "one", "part", "mixed"), "padding": (0, 3)}
COVER = pairwise(EXTEND_FACTORS)


def extend(batch: Batch, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"backend": "triton", "return_lse": True} | batch.options | changes
    result = paged_extend(batch.q, *batch.caches, batch.query_start_loc, **arguments)
    assert isinstance(result, tuple)
    return result


def test_the_cover_is_small_and_complete() -> None:
    assert len(COVER) <= 100
    for a, b in itertools.combinations(EXTEND_FACTORS, 2):
        seen = {(row[a], row[b]) for row in COVER}
        assert len(seen) == len(EXTEND_FACTORS[a]) * len(EXTEND_FACTORS[b]), (a, b)


@pytest.mark.parametrize("row", COVER, ids=name_of)
def test_extend_equals_the_oracle(row: dict[str, Any]) -> None:
    batch = batch_of(row)
    assert_attention(batch, extend(batch))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="bfloat16 comes out wrong in Triton's interpreter")
@pytest.mark.parametrize("row", COVER, ids=name_of)
def test_extend_equals_the_oracle_in_bfloat16(row: dict[str, Any]) -> None:
    batch = batch_of(row, dtype=BF16)
    assert_attention(batch, extend(batch))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="sequences of thousands of tokens take minutes in the interpreter")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 300])
def test_long_ragged_batches_equal_the_oracle(page_size: int, window: int | None) -> None:
    batch = make_batch(
        seq_lens=[2048, 1, 777, 1500, 0, 300],
        extend_lens=[1024, 1, 777, 3, 0, 299],
        page_size=page_size,
        tokens_per_entry=page_size,
        head_dim=128,
        dtype=BF16,
        width=2048,
        options={"window": window},
    )
    assert_attention(batch, extend(batch))
    assert_attention(batch, extend(batch, backend=None))


def test_new_tokens_see_the_past_and_themselves_only() -> None:
    """Replacing what follows a token changes nothing for it."""
    batch = make_batch(seq_lens=[40], extend_lens=[40], page_size=4, tokens_per_entry=4)
    before = extend(batch)[0]
    slots = batch.table.slots(0)[25:]
    for cache in batch.caches[:2]:
        cache[slots // 4, slots % 4] = 1000.0
    after = extend(batch)[0]
    assert torch.equal(before[:25], after[:25])
    assert not torch.equal(before[25:], after[25:])


def test_chunks_of_a_prompt_agree_with_the_whole_prompt() -> None:
    whole = make_batch(seq_lens=[49], extend_lens=[49])
    want = extend(whole)[0]
    at = 0
    for chunk in (16, 1, 20, 12):
        lens = torch.tensor([at + chunk], dtype=torch.int32, device=DEVICE)
        table = PageTable(whole.table.entries, whole.table.rows, lens, 16)
        starts = torch.tensor([0, chunk], dtype=torch.int32, device=DEVICE)
        part = Batch(whole.pool, table, whole.q[at : at + chunk], starts)
        got = extend(part)
        assert_attention(part, got)
        assert torch.allclose(got[0], want[at : at + chunk], atol=1e-5)
        at += chunk


def test_one_new_token_is_a_decode() -> None:
    batch = make_batch(seq_lens=[49, 16, 1])
    decoded = paged_decode(batch.q, *batch.caches, return_lse=True)
    extended = extend(batch)
    assert torch.allclose(decoded[0], extended[0], atol=1e-5)
    assert torch.allclose(decoded[1], extended[1], atol=1e-5)


def test_a_padded_row_with_a_token_but_no_length_is_zero() -> None:
    """CUDA graphs pad a decode batch with rows of one token and length 0."""
    batch = make_batch(seq_lens=[5, 0, 9, 0], extend_lens=[1, 1, 2, 1])
    out, lse = extend(batch, out=torch.full((5, 8, 64), float("nan"), device=DEVICE))
    assert (out[[1, 4]] == 0).all()
    assert (lse[[1, 4]] == float("-inf")).all()
    batch.query_start_loc = torch.tensor([0, 1, 1, 3, 3], dtype=torch.int32, device=DEVICE)
    batch.q = batch.q[[0, 2, 3]]
    assert_attention(batch, (out[[0, 2, 3]], lse[[0, 2, 3]]))


def test_fewer_keys_than_new_tokens_give_zeros_to_the_first() -> None:
    """A length below the number of new tokens: the surplus tokens have no position, so they see nothing."""
    batch = make_batch(seq_lens=[2], extend_lens=[2])
    table = batch.table
    batch.q = torch.cat([batch.q[:1], batch.q])
    batch.query_start_loc = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    out, lse = extend(batch)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    alone = Batch(batch.pool, table, batch.q[1:], torch.tensor([0, 2], dtype=torch.int32, device=DEVICE))
    assert_attention(alone, (out[1:], lse[1:]))


@pytest.mark.parametrize("batch_size", [1, 2, 7, 8, 9])
def test_every_request_finds_its_tiles(batch_size: int) -> None:
    """Counts around powers of two, empty requests among them, requests of more than one tile."""
    lens = [(7 * i) % 41 for i in range(batch_size)]
    batch = make_batch(seq_lens=lens, extend_lens=lens, group=1, kv_heads=1, page_size=4, tokens_per_entry=4, padding=5)
    assert_attention(batch, extend(batch))


def test_the_table_kind_changes_no_bit() -> None:
    batch = make_batch(seq_lens=[65, 16, 33], extend_lens=[9, 16, 1], dtype=FP16)
    entries = batch.table.entries.long()[:, :, None] * 16 + torch.arange(16, device=DEVICE)
    by_page, _ = extend(batch)
    batch.table = PageTable(entries.flatten(1).int(), batch.table.rows, batch.table.seq_lens, 1)
    assert torch.equal(by_page, extend(batch)[0])


def test_a_window_reads_no_page_before_it() -> None:
    batch = make_batch(seq_lens=[65, 40], extend_lens=[5, 1], page_size=4, tokens_per_entry=4, options={"window": 7})
    want = extend(batch)[0]
    entries = batch.table.entries.clone()
    for row, (length, new) in enumerate(((65, 5), (40, 1))):
        entries[row, : (length - new + 1 - 7) // 4] = 0
    batch.table = PageTable(entries, batch.table.rows, batch.table.seq_lens, 4)
    assert torch.equal(want, extend(batch)[0])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("block_d", [64, 128, 256])
def test_the_configuration_holds_a_group_of_heads_in_one_tile(block_d: int, itemsize: int) -> None:
    for tokens, batch in ((1, 1), (16, 16), (100, 3), (8192, 1)):
        for group in (1, 3, 7, 8, 16, 48, 128, 300):
            config = extend_config(tokens, batch, group, block_d, itemsize)
            assert config.block_m >= group
            assert config.block_m & (config.block_m - 1) == 0


def test_bad_arguments_are_named() -> None:
    batch = make_batch(seq_lens=[5, 3], extend_lens=[2, 1])
    q, caches, starts = batch.q, batch.caches, batch.query_start_loc
    with pytest.raises(ValueError, match=r"query_start_loc: expected shape \[3\], found \[2\]"):
        paged_extend(q, *caches, starts[:2])
    with pytest.raises(ValueError, match=r"query_start_loc: expected torch.int32, found torch.int64"):
        paged_extend(q, *caches, starts.long())
    with pytest.raises(ValueError, match=r"backend: expected None, 'triton' or 'gluon', found 'cuda'"):
        paged_extend(q, *caches, starts, backend="cuda")
    with pytest.raises(ValueError, match=r"out: expected torch.float32, found torch.float16"):
        paged_extend(q, *caches, starts, out=torch.empty_like(q, dtype=FP16))


class FaultyBackend:
    """Takes everything and fails."""

    def available(self, *tensors: object, **options: object) -> bool:
        return True

    def extend(self, *tensors: object, **options: object) -> None:
        raise AttributeError("this release renamed it")


def test_a_failing_hopper_backend_warns_once_and_leaves_the_work_to_the_plain_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_batch(seq_lens=[17], extend_lens=[4])
    monkeypatch.setattr(extend_module, "_hopper", [FaultyBackend()])
    monkeypatch.setattr(extend_module, "_takes_hopper", lambda *arguments: True)
    monkeypatch.setattr(extend_module, "_calls", Remembered())
    with pytest.warns(UserWarning, match=r"plain Triton from here on .*this release renamed it"):
        first = extend(batch, backend=None)
    assert_attention(batch, first)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(extend(batch, backend=None)[0], first[0])


def test_asking_for_the_hopper_backend_where_it_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(seq_lens=[17], extend_lens=[4])
    monkeypatch.setattr(extend_module, "_hopper", [None])
    with pytest.raises(ValueError, match="backend: expected arguments and a device that the Hopper backend takes"):
        extend(batch, backend="gluon")


@pytest.mark.parametrize("by_token", [False, True], ids=["block_table", "req_to_token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_64_come_by_descriptors_and_unowned_slots_stay_out(layout: str, by_token: bool) -> None:
    batch = make_batch(
        seq_lens=[0, 200, 65, 130],
        extend_lens=[0, 10, 2, 70],
        page_size=64,
        tokens_per_entry=1 if by_token else 64,
        group=2,
        head_dim=64,
        head_dim_v=128,
        dtype=FP16,
        layout=layout,
        width=256,
    )
    assert extend_module.takes_boxes(batch.caches[0])
    assert extend_module.takes_boxes(batch.caches[1])
    assert_attention(batch, extend(batch))
