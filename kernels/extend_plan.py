"""The work list of one extend step, sorted on the device: which tiles there are, and in which order they are taken.

Made from `query_start_loc` and `seq_lens` without waiting for them: one small kernel, once a step for all layers. Sizes
of the list and the grid depend on shapes only, so a captured CUDA graph stays right when lengths change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from kvarena.kernels._launch import (
    Launch,
    Remembered,
    call_key,
    ceil_div,
    next_power_of_two,
    table_key,
)
from kvarena.kernels.page_table import PageTable
from torch import Tensor

HEAD_DIM = 128
TILE_ROWS = 128  # query rows a tile: tokens times the query heads of one KV head
RECORD = 8
L2_GROUP_BYTES = 24 * 2**20  # K and V that tiles in flight share: fits the 50-60 MB L2 with room for the next group


@triton.jit
def _tiles_from(extent, prefix, total, tiles, TT: tl.constexpr):
    """How many of a sequence's tiles reach at least `extent` keys."""
    below = (tl.maximum(extent - prefix, 0) + TT - 1) // TT - 1
    count = tiles - tl.minimum(tl.maximum(below, 0), tl.maximum(tiles - 1, 0))
    return tl.where((total >= extent) & (tiles > 0), count, 0)


@triton.jit
def _plan_kernel(
    start_ptr,
    rows_ptr,
    seq_ptr,
    tiles_ptr,
    batch,
    num_tokens,
    state_at,
    GROUP_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TT: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Grid (candidates / BLOCK, HEADS): each program places BLOCK tiles of one KV head at their rank in the list.

    Order: groups of (sequence, KV head) pairs whose K and V fit L2; inside a group most keys first; ties by pair.
    Tokens behind the last request are one more sequence, of length 0.
    """
    head = tl.program_id(1)
    o_b = tl.arange(0, BATCH)
    m_b = o_b <= batch
    start = tl.load(start_ptr + o_b, mask=m_b, other=num_tokens)
    new = tl.load(start_ptr + o_b + 1, mask=o_b < batch, other=num_tokens) - start
    total = tl.load(seq_ptr + o_b, mask=o_b < batch, other=0)
    size = tl.maximum(total, 1)
    tiles = tl.where(m_b, (new + TT - 1) // TT, 0)
    ends = tl.cumsum(tiles, 0)
    pairs = (tl.cumsum(tl.where(m_b, size, 0), 0) - size) * HEADS  # tokens of K in all pairs before this sequence's
    if (tl.program_id(0) == 0) & (head == 0):
        state_ptr = tiles_ptr + state_at
        tl.store(state_ptr, tl.sum(tiles, 0) * HEADS)
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr + 2, 0)

    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_i = i < tl.sum(tiles, 0)
    b = tl.sum((i[:, None] >= ends[None, :]).to(tl.int32), 1)  # [BLOCK]: sequence of each tile
    b = tl.minimum(b, batch)
    mine = o_b[None, :] == b[:, None]  # [BLOCK, BATCH]
    t = i - tl.sum(tl.where(mine, (ends - tiles)[None, :], 0), 1)
    my_start = tl.sum(tl.where(mine, start[None, :], 0), 1)
    my_new = tl.sum(tl.where(mine, new[None, :], 0), 1)
    my_total = tl.sum(tl.where(mine, total[None, :], 0), 1)
    my_pair = tl.sum(tl.where(mine, (pairs + head * size)[None, :], 0), 1)
    extent = my_total - my_new + tl.minimum((t + 1) * TT, my_new)

    group = (my_pair // GROUP_TOKENS) * GROUP_TOKENS
    first = tl.maximum(group[:, None] - pairs[None, :], 0)
    first = tl.minimum((first + size[None, :] - 1) // size[None, :], HEADS)  # heads in earlier groups
    last = tl.maximum(group[:, None] + GROUP_TOKENS - pairs[None, :], 0)
    last = tl.minimum((last + size[None, :] - 1) // size[None, :], HEADS)
    longer = extent[:, None] + (o_b[None, :] >= b[:, None]).to(tl.int32)
    longer = _tiles_from(longer, (total - new)[None, :], total[None, :], tiles[None, :], TT)
    rank = first * tiles[None, :] + (last - first) * longer + tl.where(mine, head - first, 0)
    record = tiles_ptr + tl.sum(tl.where(m_b[None, :], rank, 0), 1) * RECORD
    tl.store(record, my_start + t * TT, mask=m_i)
    tl.store(record + 1, tl.minimum(my_new - t * TT, TT), mask=m_i)
    tl.store(record + 2, my_total - my_new + t * TT, mask=m_i)
    tl.store(record + 3, my_total, mask=m_i)
    tl.store(record + 4, tl.load(rows_ptr + b, mask=m_i & (b < batch), other=0), mask=m_i)
    tl.store(record + 5, tl.zeros([BLOCK], tl.int32) + head, mask=m_i)


@dataclass(frozen=True)
class ExtendPlan:
    """Work list of one step, for every layer of one model; not for two streams at once (they would share a counter).

    buffer           int32 [most tiles + 1, 8]: the tiles, and behind them the state
    tokens_per_tile  128 / (HQ / HKV)
    num_kv_heads     HKV
    """

    buffer: Tensor
    tokens_per_tile: int
    num_kv_heads: int

    @property
    def tiles(self) -> Tensor:
        """int32 [most tiles, 8]: first query token, tokens, position, seq_len, table row, KV head."""
        return self.buffer[:-1]

    @property
    def state(self) -> Tensor:
        """int32 [8]: tiles in the list, next tile, CTAs done; the rest is not used."""
        return self.buffer[-1]


def plan_extend(
    table: PageTable, query_start_loc: Tensor, num_tokens: int, num_heads: int, num_kv_heads: int
) -> ExtendPlan:
    """Sort the tiles of T = `num_tokens` new tokens on the device: no host sync, sizes from shapes only.

    query_start_loc  int32 [B + 1]
    Cost: one kernel, 3 to 10 us for up to 2,000 tiles; O(tiles x B) work.
    """
    key = (call_key(query_start_loc), table_key(table), num_tokens, num_heads, num_kv_heads)
    call = _plans.get(key)
    if call is None:
        call = _plans[key] = _prepare_plan(table.seq_lens.shape[0], num_tokens, num_heads, num_kv_heads)
    rows, tokens_per_tile, fill = call
    buffer = torch.empty((rows, RECORD), dtype=torch.int32, device=query_start_loc.device)
    fill((query_start_loc, table.rows, table.seq_lens, buffer))
    return ExtendPlan(buffer, tokens_per_tile, num_kv_heads)


_plans = Remembered()


def _prepare_plan(batch: int, num_tokens: int, num_heads: int, num_kv_heads: int) -> tuple[int, int, Launch]:
    """(rows of the buffer, tokens a tile, launch) of plans of one shape."""
    tokens_per_tile = TILE_ROWS // (num_heads // num_kv_heads)
    most = num_tokens // tokens_per_tile + batch + 1
    padded = next_power_of_two(batch + 1)
    block = max(1, min(64, 8192 // padded))
    constants = {
        "GROUP_TOKENS": L2_GROUP_BYTES // (2 * HEAD_DIM * 2),
        "HEADS": num_kv_heads,
        "TT": tokens_per_tile,
        "BATCH": padded,
        "BLOCK": block,
        "RECORD": RECORD,
        "num_warps": 4,
    }
    rows = ceil_div(most * num_kv_heads, 2) * 2  # so that the state's place is a multiple of 16, whatever the batch
    numbers = (batch, num_tokens, rows * RECORD)
    grid = (ceil_div(most, block), num_kv_heads, 1)
    return rows + 1, tokens_per_tile, Launch(_plan_kernel, grid, numbers, constants)
