"""compute_slot_mapping: the slot that each new token is written to, from positions, on the device.

slot = entries[row, p // tokens_per_entry] * tokens_per_entry + p % tokens_per_entry for position p.
Program (b, c) takes chunks c, c + C, ... of request b's tokens; one more "request" holds the padding behind
the last real token. With decode context parallelism, tokens are dealt to `cp_size` ranks in runs of
`cp_interleave`: position p belongs to rank (p // interleave) % size, and is that rank's local position
p // (size * interleave) * interleave + p % interleave.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvarena.kernels._launch import (
    Launch,
    Remembered,
    call_key,
    ceil_div,
    check_device,
    check_dtype,
    check_runnable,
    check_shape,
    check_table,
    fail,
    log2,
    table_key,
)
from kvarena.kernels.page_table import PageTable
from torch import Tensor

BLOCK = 256
MAX_CHUNKS = 32  # programs that share one request's tokens


@triton.jit
def _slots_kernel(
    entries_ptr,
    rows_ptr,
    start_ptr,
    positions_ptr,
    out_ptr,
    num_columns,
    num_tokens,
    num_out,
    entries_stride,
    cp_rank,
    LOG_ENTRY: tl.constexpr,
    CP_SIZE: tl.constexpr,
    CP_INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0)
    num_requests = tl.num_programs(0) - 1
    step = tl.num_programs(1) * BLOCK
    first = tl.load(start_ptr + i_b)
    end = tl.minimum(tl.load(start_ptr + i_b + 1, mask=i_b < num_requests, other=num_out), num_out)
    width = tl.where(i_b < num_requests, num_columns, 0)  # padding has no columns, so its slots are -1
    row = tl.load(rows_ptr + i_b, mask=i_b < num_requests, other=0).to(tl.int64)
    for start in range(first + tl.program_id(1) * BLOCK, end, step):
        o_t = start + tl.arange(0, BLOCK)
        m_t = o_t < end
        p = tl.load(positions_ptr + o_t, mask=m_t & (o_t < num_tokens), other=-1).to(tl.int32)  # [BLOCK]
        m = p >= 0
        if CP_SIZE > 1:
            m &= (p // CP_INTERLEAVE) % CP_SIZE == cp_rank
            p = p // (CP_SIZE * CP_INTERLEAVE) * CP_INTERLEAVE + p % CP_INTERLEAVE
        column = p >> LOG_ENTRY
        m &= column < width
        entry = tl.load(entries_ptr + row * entries_stride + column, mask=m & m_t, other=0).to(tl.int64)
        slot = (entry << LOG_ENTRY) + (p & ((1 << LOG_ENTRY) - 1))
        tl.store(out_ptr + o_t, tl.where(m, slot, -1), mask=m_t)


def check_slots(
    table: PageTable,
    query_start_loc: Tensor,
    positions: Tensor,
    out: Tensor,
    cp_size: int,
    cp_rank: int,
    cp_interleave: int,
) -> int:
    """Raise ValueError for arguments that do not fit; return B."""
    batch = check_table(table, out.device)
    check_shape("query_start_loc", query_start_loc, (batch + 1,))
    check_dtype("query_start_loc", query_start_loc, (torch.int32,))
    check_shape("positions", positions, (None,))
    check_dtype("positions", positions, (torch.int64, torch.int32))
    check_shape("out", out, (None,))
    check_dtype("out", out, (torch.int64,))
    if out.shape[0] < positions.shape[0]:
        fail("out", f"at least {positions.shape[0]} slots, one a position", out.shape[0])
    for name, tensor in (("query_start_loc", query_start_loc), ("positions", positions), ("out", out)):
        check_device(name, tensor, out.device)
        if tensor.numel() and tensor.stride(0) != 1:
            fail(name, "a contiguous tensor", tensor.stride())
    if cp_size < 1 or cp_interleave < 1:
        fail("cp_size, cp_interleave", "at least 1", (cp_size, cp_interleave))
    if not 0 <= cp_rank < cp_size:
        fail("cp_rank", f"0 to {cp_size - 1}", cp_rank)
    return batch


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
    """Fill `out` with the slot of each new token and return it.

    table            its entries and rows are read, seq_lens is not
    query_start_loc  int32 [B+1]: tokens query_start_loc[b] to query_start_loc[b+1] belong to request b
    positions        int64 or int32 [T]: position of each token in its sequence, below 2^31
    out              int64 [n], n >= T. -1 for tokens behind query_start_loc[B], for a negative position,
                     for a position past the width of the table's row, and for tokens of another rank
    cp_size, cp_rank, cp_interleave  decode context parallelism; the table holds this rank's tokens only

    Cost: one launch, a few loads a token. Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    key = (call_key(query_start_loc, positions, out), table_key(table), cp_size, cp_rank, cp_interleave)
    call = _calls.get(key)
    if call is None:
        options = (cp_size, cp_rank, cp_interleave)
        call = _calls[key] = _prepare(table, query_start_loc, positions, out, *options)
    if call.grid[1]:
        call((table.entries, table.rows, query_start_loc, positions, out))
    return out


_calls = Remembered()


def _prepare(
    table: PageTable,
    query_start_loc: Tensor,
    positions: Tensor,
    out: Tensor,
    cp_size: int,
    cp_rank: int,
    cp_interleave: int,
) -> Launch:
    """Check the arguments of compute_slot_mapping and choose the launch; no chunks where there are no slots."""
    batch = check_slots(table, query_start_loc, positions, out, cp_size, cp_rank, cp_interleave)
    check_runnable(out.device)
    entries = table.entries
    numbers = (entries.shape[1], positions.shape[0], out.shape[0], entries.stride(0), cp_rank)
    constants = {
        "LOG_ENTRY": log2(table.tokens_per_entry),
        "CP_SIZE": cp_size,
        "CP_INTERLEAVE": cp_interleave,
        "BLOCK": BLOCK,
        "num_warps": 4,
    }
    grid = (batch + 1, min(ceil_div(out.shape[0], BLOCK), MAX_CHUNKS), 1)
    return Launch(_slots_kernel, grid, numbers, constants)
