"""Every op again in vectorised torch: what runs quickly where there is no GPU and Triton would be interpreted.

Same signatures as the kernels. Attention gathers K and V of the whole batch into padded tensors, [b, L, HKV, D],
and runs two matrix products and a softmax on them. Requests of one new token and longer ones form a group each, so
that a long chunk does not pad everybody. Where the tokens lie is worked out once a step, in a `GatherPlan` that the
layers share. Copies are those of `reference`, which are vectorised already.

Memory: gathered K and V, and scores of HQ x Q x L numbers a request, Q and L the longest of its group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvarena.kernels._launch import QUANTISED, fail
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.reference import (
    compute_slot_mapping,
    copy_pages,
    gather_pages,
    merge_states,
    quantise,
    scatter_pages,
)
from kvarena.kernels.store import check_store
from torch import Tensor

__all__ = [
    "GatherPlan",
    "compute_slot_mapping",
    "copy_pages",
    "gather_pages",
    "merge_states",
    "paged_decode",
    "paged_extend",
    "plan_decode",
    "plan_gather",
    "scatter_pages",
    "store_kv",
]


@dataclass(frozen=True)
class Group:
    """b requests of similar query length, padded to Q new tokens and L tokens in all.

    queries   int64 [b, Q]; row of q for each new token, a padded one repeats the request's first
    fresh     bool [b, Q]; False for padded ones
    slots     int64 [b, L]; 0 behind the request's end
    owned     bool [b, L]; False there
    distance  int64 [b, Q, L]; key position - query position
    """

    queries: Tensor
    fresh: Tensor
    slots: Tensor
    owned: Tensor
    distance: Tensor


@dataclass(frozen=True)
class GatherPlan:
    """Where a step's tokens lie; made by `plan_gather`, the same for all layers."""

    groups: tuple[Group, ...]


def plan_gather(table: PageTable, query_start_loc: Tensor) -> GatherPlan:
    """Work out which slots each request reads, for new tokens at query_start_loc int32 [B + 1]. Synchronises."""
    starts = query_start_loc.long()
    new, lens = starts.diff(), table.seq_lens.long()
    if bool((new > lens).any()):
        fail("query_start_loc", "at most seq_lens new tokens a request", f"{new.tolist()} of {lens.tolist()}")
    single, several = (new == 1) & (lens > 0), (new > 1) & (lens > 0)
    members = [which.nonzero()[:, 0] for which in (single, several)]
    return GatherPlan(tuple(_group(table, starts, m) for m in members if len(m)))


def plan_decode(table: PageTable) -> GatherPlan:
    """As `plan_gather`, for one query a request, padded rows of length 0 included. Synchronises."""
    members = (table.seq_lens > 0).nonzero()[:, 0]
    each = torch.arange(len(table.seq_lens) + 1, device=table.seq_lens.device)
    return GatherPlan((_group(table, each, members),) if len(members) else ())


def _group(table: PageTable, starts: Tensor, members: Tensor) -> Group:
    device, lens = starts.device, table.seq_lens[members].long()
    new = starts[members + 1] - starts[members]
    longest = int(lens.max())
    at = torch.arange(longest, device=device)
    owned = at < lens[:, None]
    row = table.entries[table.rows[members].long()].long()
    column = (at // table.tokens_per_entry).clamp(max=row.shape[1] - 1)
    slots = row[:, column] * table.tokens_per_entry + at % table.tokens_per_entry
    ahead = torch.arange(int(new.max()), device=device)
    fresh = ahead < new[:, None]
    ahead = torch.where(fresh, ahead, 0)
    positions = (lens - new)[:, None] + ahead
    return Group(
        starts[members][:, None] + ahead, fresh, torch.where(owned, slots, 0), owned, at - positions[:, :, None]
    )


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
    """As kernels.store.store_kv, in two indexed writes. Synchronises."""
    check_store(k, v, key_cache, value_cache, slot_mapping)
    pages, page_size = key_cache.shape[:2]
    if key_cache.dtype in QUANTISED:
        k, v = quantise(k, key_cache.dtype, k_scale), quantise(v, value_cache.dtype, v_scale)
    wanted = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
    slots, tokens = slot_mapping[wanted].long(), wanted.nonzero()[:, 0]
    at = slots // page_size, slots % page_size
    for cache, new in ((key_cache, k), (value_cache, v)):
        if cache.dtype in QUANTISED:  # indexed writes of one-byte floats are not implemented
            cache.view(torch.uint8)[at] = new[tokens].view(torch.uint8)
        else:
            cache[at] = new[tokens]


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
    plan: GatherPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As kernels.extend.paged_extend; `plan` spares each layer of a step the work of `plan_gather`.

    Arithmetic in float32. Synchronises when no plan is given.
    """
    plan = plan_gather(table, query_start_loc) if plan is None else plan
    result = torch.zeros((*q.shape[:2], value_cache.shape[3]), dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for group in plan.groups:
        k = _gathered(key_cache, group, k_scale)
        v = _gathered(value_cache, group, v_scale)
        scores = _scores(q, k, group, q.shape[2] ** -0.5 if scale is None else scale, softcap, alibi_slopes)
        hidden = _hidden(group, window)[:, None, None]
        scores = scores.masked_fill(hidden, float("-inf"))  # [b, HKV, G, Q, L]
        each = torch.einsum("bhgql,blhd->bqhgd", scores.softmax(-1), v).flatten(2, 3)
        rows = group.queries[group.fresh]
        result[rows] = each[group.fresh]
        if return_lse:
            lse[rows] = scores.logsumexp(-1).permute(0, 3, 1, 2).flatten(2)[group.fresh]
    out = result.to(q.dtype) if out is None else out.copy_(result)
    return (out, lse) if return_lse else out


def _gathered(cache: Tensor, group: Group, scale: float | Tensor | None) -> Tensor:
    """K or V of a group, float32 [b, L, HKV, D]; zeros behind a request's end, whatever the pool holds there."""
    page_size = cache.shape[1]
    at = group.slots // page_size, group.slots % page_size
    if cache.dtype in QUANTISED:
        rows = cache.view(torch.uint8)[at].view(cache.dtype).float()
        rows = rows * (1.0 if scale is None else scale.reshape(-1, 1) if isinstance(scale, Tensor) else scale)
    else:
        rows = cache[at].float()
    return rows.masked_fill(~group.owned[:, :, None, None], 0.0)


def _scores(
    q: Tensor, k: Tensor, group: Group, scale: float, softcap: float | None, alibi_slopes: Tensor | None
) -> Tensor:
    """Scores before the mask, float32 [b, HKV, G, Q, L]."""
    heads = k.shape[2]
    queries = q[group.queries].float().unflatten(2, (heads, -1))
    scores = torch.einsum("bqhgd,blhd->bhgql", queries, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.view(heads, -1, 1, 1) * group.distance[:, None, None]
    return scores


def _hidden(group: Group, window: int | None) -> Tensor:
    """Keys that a query must not see, bool [b, Q, L]. It always sees itself."""
    hidden = (group.distance > 0) | ~group.owned[:, None]
    return hidden if window is None else hidden | (group.distance <= -window)


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
    plan: GatherPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As kernels.decode.paged_decode: an extend of one token a request. `num_splits`, `workspace` change nothing."""
    each = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    plan = plan_decode(table) if plan is None else plan
    return paged_extend(
        q,
        key_cache,
        value_cache,
        table,
        each,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        return_lse=return_lse,
        plan=plan,
    )
