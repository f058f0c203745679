"""Batches for the attention kernels, a float64 oracle, and error bounds derived from rounding.

Pools are poisoned: every slot that no request owns holds NaN (int8: the largest number), and table entries behind a
row's end name a page that nobody owns. Nothing of it may reach an output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from kvarena.kernels import reference
from kvarena.kernels._launch import QUANTISED
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import KVPool
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LAYER = 1  # of two: a kernel that forgets the layer's offset reads the other one, which is poisoned throughout
OWNERS_PAGE = 1  # pages that requests own start here; page 0 is the padding page


@dataclass
class Batch:
    """One call of an attention kernel, ready to make."""

    pool: KVPool
    table: PageTable
    q: Tensor
    query_start_loc: Tensor  # decode: one token a request
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def caches(self) -> tuple[Tensor, Tensor, PageTable]:
        return self.pool.key(LAYER), self.pool.value(LAYER), self.table

    def oracle(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """(out, lse) of the textbook reference in `dtype`."""
        options = {name: value for name, value in self.options.items() if name != "num_splits"}
        result = reference.paged_extend(
            self.q, *self.caches, self.query_start_loc, return_lse=True, dtype=dtype, **options
        )
        assert isinstance(result, tuple)
        return result


def page_order(num_pages: int, order: str, generator: torch.Generator) -> Tensor:
    """Ids of the pages that requests own, in the order in which they are handed out."""
    ids = torch.arange(OWNERS_PAGE, OWNERS_PAGE + num_pages)
    if order == "reverse":
        return ids.flip(0)
    return ids[torch.randperm(num_pages, generator=generator)] if order == "random" else ids


def make_table(
    seq_lens: list[int],
    page_size: int,
    tokens_per_entry: int,
    order: str,
    width: int,
    generator: torch.Generator,
    row_index: bool | None = None,
) -> tuple[PageTable, int]:
    """A table over fresh pages and the number of pages of its pool.

    Pages are handed out in groups of max(page size, tokens per entry) tokens. Entries behind a row's end name the last
    page, which nobody owns. With `row_index` (default: entries of one token) rows stand in a larger array, shuffled.
    """
    row_index = tokens_per_entry == 1 if row_index is None else row_index
    group = max(page_size, tokens_per_entry)
    groups = [math.ceil(n / group) for n in seq_lens]
    ids = page_order(sum(groups), order, generator)
    num_groups = OWNERS_PAGE + len(ids) + 1
    rows = len(seq_lens) + 3 if row_index else len(seq_lens)
    index = torch.randperm(rows, generator=generator)[: len(seq_lens)] if row_index else torch.arange(len(seq_lens))
    columns = math.ceil(width / group) * (group // tokens_per_entry)
    entries = torch.full((rows, columns), (num_groups - 1) * group // tokens_per_entry, dtype=torch.int32)
    at = 0
    for row, count in zip(index.tolist(), groups, strict=True):
        first = ids[at : at + count] * (group // tokens_per_entry)
        mine = first[:, None] + torch.arange(group // tokens_per_entry)
        entries[row, : mine.numel()] = mine.flatten()
        at += count
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    table = PageTable(entries.to(DEVICE), index.int().to(DEVICE), lens.to(DEVICE), tokens_per_entry)
    return table, num_groups * group // page_size


def poisoned_pool(
    num_pages: int, page_size: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype, layout: str
) -> KVPool:
    """Two layers of NaN (int8: 127)."""
    pool = KVPool(2, num_pages - 1, page_size, kv_heads, *dims, dtype=dtype, device=DEVICE, layout=layout)
    return pool.fill_(127 if dtype == torch.int8 else float("nan"))


def random_kv(num_tokens: int, heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers as a cache of `dtype` can hold them (int8: whole numbers, standard deviation 32)."""
    x = torch.randn((num_tokens, heads, dim), generator=generator)
    if dtype == torch.int8:
        x = (x * 32).round().clamp(-127, 127)
    return x.to(dtype).to(DEVICE)


def make_batch(
    *,
    seq_lens: list[int],
    extend_lens: list[int] | None = None,
    page_size: int = 16,
    tokens_per_entry: int = 16,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: str = "split",
    order: str = "random",
    padding: int = 0,
    width: int = 80,
    seed: int = 0,
    options: dict[str, Any] | None = None,
) -> Batch:
    """A poisoned pool in which each request's tokens hold random K and V, its table, and random queries.

    extend_lens  new tokens a request (default one each: decode); padding  rows of q behind the last token
    """
    generator = torch.Generator().manual_seed(seed)
    dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    table, num_pages = make_table(seq_lens, page_size, tokens_per_entry, order, width, generator)
    pool = poisoned_pool(num_pages, page_size, kv_heads, dims, kv_dtype, layout)
    for request, length in enumerate(seq_lens):
        slots = table.slots(request)
        for cache, dim in zip((pool.key(LAYER), pool.value(LAYER)), dims, strict=True):
            cache[slots // page_size, slots % page_size] = random_kv(length, kv_heads, dim, kv_dtype, generator)
    extend_lens = [1] * len(seq_lens) if extend_lens is None else extend_lens
    starts = torch.tensor([0, *extend_lens]).cumsum(0).int().to(DEVICE)
    q = torch.randn((sum(extend_lens) + padding, group * kv_heads, head_dim), generator=generator)
    options = dict(options or {})
    if kv_dtype == torch.int8:
        options = {"k_scale": 1 / 32, "v_scale": 1 / 32} | options
    return Batch(pool, table, q.to(dtype).to(DEVICE), starts, options)


def rounded_attention(batch: Batch) -> tuple[Tensor, Tensor]:
    """The low-precision reference: the oracle's steps, with rounding where any kernel rounds.

    Products and sums in float32; weights relative to the largest, rounded to q's dtype before they meet V; the
    result rounded to q's dtype.
    """
    out, lse = batch.oracle(torch.float32)
    if batch.q.dtype != torch.float32:
        out = _with_rounded_weights(batch)
    return out.to(batch.q.dtype), lse


def _with_rounded_weights(batch: Batch) -> Tensor:
    """Attention in which the weights of all keys are rounded to q's dtype."""
    exact = reference.attend
    dtype = batch.q.dtype

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        eye = torch.eye(len(k), device=k.device, dtype=k.dtype)[:, None].expand(-1, k.shape[1], -1)
        weights, lse = exact(q, k, eye, positions, **options)  # V = identity: the output is the weights
        peak = weights.amax(-1, keepdim=True) if len(k) else torch.ones_like(lse)[..., None]
        peak = torch.where(peak == 0, 1.0, peak)
        rounded = (weights / peak).to(dtype).float()
        group = q.shape[1] // k.shape[1]
        return torch.einsum("thn,nhd->thd", rounded, v.repeat_interleave(group, 1)) * peak, lse

    reference.attend = attend
    try:
        return batch.oracle(torch.float32)[0]
    finally:
        reference.attend = exact


def magnitude(batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum_j w_j |V_j| a row, largest |score| a row): what rounding errors are proportional to."""
    exact = reference.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, _ = exact(q, k, v.abs(), positions, **options)
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,nhd->thn", q.abs(), k.abs().repeat_interleave(group, 1)) * options["scale"]
        slopes = options.get("alibi_slopes")
        size = scores.amax(-1) if len(k) else torch.zeros(q.shape[:2], device=q.device, dtype=q.dtype)
        if slopes is not None:
            size = size + slopes.to(size.dtype) * len(k)
        return out, size

    reference.attend = attend
    try:
        return batch.oracle(torch.float64)
    finally:
        reference.attend = exact


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def assert_attention(batch: Batch, result: tuple[Tensor, Tensor]) -> None:
    """Compare (out, lse) with the oracle: each row, and all rows together.

    A row's error may be twice the low-precision reference's own, plus a floor: u of the weights and u of the result
    (q's dtype) on sum_j w_j |V_j|, and 8 float32 roundings on every weight, which carry the score's size (a score is
    a float32 sum whose terms add up to that size). Rows without a visible key are exactly zero, lse -inf.
    """
    out, lse = result
    want_out, want_lse = batch.oracle()
    ref_out, ref_lse = rounded_attention(batch)
    weighted, size = magnitude(batch)
    size = torch.where(want_lse.isinf(), 0.0, size.clamp(min=0))
    weighted, size = weighted.nan_to_num(0.0), size.nan_to_num(0.0)
    empty = want_lse.isinf()
    assert torch.equal(lse.isinf() & (lse < 0), empty), "lse is -inf exactly where no key is visible"
    assert (out[empty] == 0).all(), "a row that sees no key is zero"
    relative = 2 * unit_roundoff(batch.q.dtype) * (batch.q.dtype != torch.float32) + 8 * 2**-24 * (2 + size)
    floor = relative[..., None] * weighted
    error = _norm(out.double() - want_out)
    own = _norm(ref_out.double() - want_out)
    bound = 2 * own + _norm(floor)
    worst = (error / bound.clamp(min=1e-30)).nan_to_num(math.inf)[~empty]
    assert (error <= bound)[~empty].all(), f"worst row: error {worst.max():.3g} of its bound"
    total, total_bound = _norm(error.flatten()), 2 * _norm(own.flatten()) + _norm(floor.flatten())
    assert total <= total_bound, f"all rows: error {total:.3g}, bound {total_bound:.3g}"
    lse_error = (lse.double() - want_lse).abs()[~empty]
    lse_bound = 2 * (ref_lse.double() - want_lse).abs()[~empty] + (8 * 2**-24 * (2 + size))[~empty]
    assert (lse_error <= lse_bound).all(), f"lse: error {lse_error.max():.3g}"


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double(), dim=-1)


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in QUANTISED
