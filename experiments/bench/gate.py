"""The gate before any timing: attention against a float64 oracle with derived bounds, writes and copies bit for bit.

Bound of one output element, u the unit roundoff of the output type (2^-8 bf16, 2^-11 fp16): the kernels round the
probabilities to that type before PV (at most u x sum_j p_j |v_j|), round the result (u x |out|), and do all else in
float32, whose errors (scores of 128 products, exp2, sums) stay under a tenth of that for the lengths used here.
"""

from __future__ import annotations

import math

import torch
from kvarena.kernels.page_table import PageTable
from torch import Tensor

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LSE_TOLERANCE = 1e-4


def oracle(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, table: PageTable, request: int, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one request in float64: (out [t, HQ, D], sum_j p_j |v_j|, lse [t, HQ]); q [t, HQ, D] at `positions`."""
    slots = table.slots(request)
    page_size = key_cache.shape[1]
    group = q.shape[1] // key_cache.shape[2]
    k = key_cache[slots // page_size, slots % page_size].double().repeat_interleave(group, 1)
    v = value_cache[slots // page_size, slots % page_size].double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * q.shape[2] ** -0.5
    keys = torch.arange(len(slots), device=q.device)
    scores = scores.masked_fill(keys[None, None, :] > positions[None, :, None], -math.inf)
    p = scores.softmax(-1)
    out = torch.einsum("htn,nhd->thd", p, v)
    return out, torch.einsum("htn,nhd->thd", p, v.abs()), torch.logsumexp(scores, -1).T


def check_rows(name: str, out: Tensor, wanted: tuple[Tensor, Tensor, Tensor], lse: Tensor | None = None) -> float:
    """Raise ValueError unless every element is inside its bound; returns the largest share of a bound that was used."""
    exact, weight, exact_lse = wanted
    bound = 1.1 * ROUNDOFF[out.dtype] * (exact.abs() + weight) + 1e-7
    share = ((out.double() - exact).abs() / bound).nan_to_num(math.inf).max().item()
    if share > 1:
        raise ValueError(f"{name}: expected outputs inside their bound, found one at {share:.2f} of it")
    if lse is not None:
        error = (lse.double() - exact_lse).abs().nan_to_num(math.inf).max().item()
        if error > LSE_TOLERANCE:
            raise ValueError(f"{name}: expected lse within {LSE_TOLERANCE}, found an error of {error:.1e}")
    return share


def sample_positions(new: int, length: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last `rows` of a request's new tokens: (index among them, position)."""
    index = torch.arange(new, device=device)
    index = torch.cat([index[:rows], index[-rows:]]).unique()
    return index, index + (length - new)


def poison(cache: Tensor, tables: list[PageTable]) -> None:
    """Fill every slot that no table owns with NaN: what lies there may never reach an output."""
    pages, page_size = cache.shape[:2]
    free = torch.ones(pages * page_size, dtype=torch.bool, device=cache.device)
    for table in tables:
        for request in range(len(table.seq_lens)):
            free[table.slots(request)] = False
    cache[free.view(pages, page_size)] = math.nan
