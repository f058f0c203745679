"""Every op again in slow, obvious torch, same signatures: what the kernels are compared with.

Attention here is the textbook's "gather, then attend": copy a request's K and V out of the pool into
contiguous tensors, then compute softmax(QK^T)V on them. Arithmetic runs in float32, or in float64 when
`dtype=torch.float64` is given. Everything synchronises the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from kvarena.kernels._launch import LARGEST, QUANTISED
from kvarena.kernels.copy import Ids, check_copy, check_packed, check_page_ids, page_rows
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.store import check_store
from torch import Tensor


def quantise(x: Tensor, dtype: torch.dtype, scale: float | Tensor | None) -> Tensor:
    """x [T, HKV, D] as a quantised cache of `dtype` stores it: round(x / scale), saturated."""
    x = x.float() / _per_head(scale)
    if dtype == torch.int8:
        x = x.round()
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def _per_head(scale: float | Tensor | None) -> float | Tensor:
    """A scale that multiplies [T, HKV, D]."""
    if scale is None:
        return 1.0
    return scale.reshape(-1, 1) if isinstance(scale, Tensor) else scale


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
    """As kernels.store.store_kv, one token after the other."""
    check_store(k, v, key_cache, value_cache, slot_mapping)
    page_size = key_cache.shape[1]
    if key_cache.dtype in QUANTISED:
        k, v = quantise(k, key_cache.dtype, k_scale), quantise(v, value_cache.dtype, v_scale)
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < key_cache.shape[0] * page_size:
            key_cache[slot // page_size, slot % page_size] = k[token]
            value_cache[slot // page_size, slot % page_size] = v[token]


def gather(cache: Tensor, table: PageTable, request: int) -> Tensor:
    """One request's rows of `cache` [P, S, HKV, D] in position order: a contiguous copy [n, HKV, D]."""
    slots = table.slots(request)
    page_size = cache.shape[1]
    return cache[slots // page_size, slots % page_size]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Textbook attention: q [t, HQ, D] at `positions` [t] over contiguous k [n, HKV, D], v [n, HKV, Dv].

    Returns out [t, HQ, Dv] and lse [t, HQ] in the dtype of the inputs. A row that sees no key gives zeros, -inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,nhd->htn", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(k.shape[0], device=q.device)
    distance = keys[None, :] - positions[:, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype)[:, None, None] * distance
    hidden = distance > 0
    if window is not None:
        hidden = hidden | (distance <= -window)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return torch.einsum("htn,nhd->thd", weights, v), lse.T


def paged_extend(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """As kernels.extend.paged_extend; `dtype` is that of the arithmetic, and of the result unless `out` is given."""
    result = torch.zeros((*q.shape[:2], value_cache.shape[3]), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        k = gather(key_cache, table, request).to(dtype) * _per_head(k_scale)
        v = gather(value_cache, table, request).to(dtype) * _per_head(v_scale)
        positions = len(k) - (end - start) + torch.arange(end - start, device=q.device)
        result[start:end], lse[start:end] = attend(
            q[start:end].to(dtype),
            k,
            v,
            positions,
            scale=q.shape[2] ** -0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
    out = result if out is None else out.copy_(result)
    return (out, lse) if return_lse else out


def paged_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """As kernels.decode.paged_decode: an extend of one token a request. `num_splits`, `workspace` change nothing."""
    query_start_loc = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_extend(
        q,
        key_cache,
        value_cache,
        table,
        query_start_loc,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        return_lse=return_lse,
        dtype=dtype,
    )


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels.merge.merge_states."""
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(lse.isinf(), 0.0, lse)
    merged = torch.zeros_like(out_a, dtype=lse.dtype)
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part - base)[..., None]
        merged += torch.where(weight == 0, 0.0, weight * out.to(lse.dtype))
    return merged.to(out_a.dtype), lse


def copy_pages(pool_tensors: Tensor | Sequence[Tensor], src_ids: Ids, dst_ids: Ids) -> None:
    """As kernels.copy.copy_pages: every source is read before any target is written."""
    tensors, src, dst = check_copy(pool_tensors, src_ids, dst_ids)
    for tensor in tensors:
        tensor[dst] = tensor[src]


def gather_pages(pool_tensors: Tensor | Sequence[Tensor], page_ids: Ids, out: Tensor | None = None) -> Tensor:
    """As kernels.copy.gather_pages: each page's bytes, tensor after tensor, one page a row."""
    tensors, ids = check_page_ids(pool_tensors, page_ids)
    packed = torch.cat([page_rows(tensor)[ids] for tensor in tensors], 1)
    return packed if out is None else check_packed("out", out, tensors, len(ids)).copy_(packed)


def scatter_pages(packed: Tensor, pool_tensors: Tensor | Sequence[Tensor], page_ids: Ids) -> None:
    """As kernels.copy.scatter_pages."""
    tensors, ids = check_page_ids(pool_tensors, page_ids)
    packed = check_packed("packed", packed, tensors, len(ids)).to(tensors[0].device)
    start = 0
    for tensor in tensors:
        size = page_rows(tensor).shape[1]
        rows = packed[:, start : start + size].contiguous().view(tensor.dtype)
        tensor[ids] = rows.view(len(ids), *tensor.shape[1:])
        start += size


def compute_slot_mapping(
    table: PageTable,
    query_start_loc: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> Tensor:
    """As kernels.slots.compute_slot_mapping, one token after the other."""
    out.fill_(-1)
    per_entry = table.tokens_per_entry
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        row = table.entries[int(table.rows[request])].tolist()
        for token in range(start, end):
            position = int(positions[token])
            rank = position // cp_interleave % cp_size
            local = position // (cp_size * cp_interleave) * cp_interleave + position % cp_interleave
            if position >= 0 and rank == cp_rank and local // per_entry < len(row):
                out[token] = row[local // per_entry] * per_entry + local % per_entry
    return out
