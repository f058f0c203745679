"""What a step changes on the device, from one packed buffer in one launch: page table, positions, slot mapping.

The host packs a step into int32 numbers, R = max_requests (`StepBuffers.offsets` names the places):

    rows [R] | seq_lens [R] | query_start_loc [R + 1] | page_start [R + 1] | step pages | changes

`page_start[b]` is where request b's step pages begin: the pages of its new tokens, in order. So slots come from the
buffer itself, and the launch never reads entries that it writes. `changes` are [3 or 4, n]: row, page column, page,
and for a gathered table the place of the row in the batch (-1: it has none).

Programs 0 .. B - 1 write positions and slots of a request's new tokens, program B those of the padding behind them,
further programs the changed entries.

A decode step of the same rows as the step before needs less (`apply_decode`): three numbers a request, in a buffer of
their own. A lane does all of a request: it writes the new page, if there is one, and takes the page of the new token
from it or from the entries, which nobody else writes in this launch.

    computed [R] | new page or -1 [R] | its column [R]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from kvarena.kernels._launch import Launch, ceil_div, check_dtype, check_runnable, fail
from torch import Tensor

BLOCK = 256
MAX_CHUNKS = 32  # programs that share one request's tokens
LANES = 32  # requests of a program of a decode step


@triton.jit(do_not_specialize=["num_requests", "num_out", "num_changes", "changes_at"])
def _step_kernel(
    packed_ptr,
    changes_ptr,
    entries_ptr,
    gathered_ptr,
    positions_ptr,
    slots_ptr,
    entries_stride,
    gathered_stride,
    num_requests,
    num_out,
    num_changes,
    changes_at,
    R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXPAND: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0)
    if i_b <= num_requests:
        starts_ptr = packed_ptr + 2 * R
        real = i_b < num_requests
        first = tl.load(starts_ptr + i_b)
        end = tl.load(starts_ptr + i_b + 1, mask=real, other=0)
        end = tl.where(real, end, num_out)
        shift = tl.load(packed_ptr + R + i_b, mask=real, other=0) - end  # position = shift + token
        at = tl.load(packed_ptr + 3 * R + 1 + i_b, mask=real, other=0) - (shift + first) // PAGE_SIZE
        pages_ptr = packed_ptr + 4 * R + 2 + at
        for start in range(first + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
            o_t = start + tl.arange(0, BLOCK)
            m_t = o_t < end
            m_page = o_t < tl.where(real, end, 0)
            p = tl.where(m_page, shift + o_t, 0)  # [BLOCK]
            page = tl.load(pages_ptr + p // PAGE_SIZE, mask=m_page, other=0).to(tl.int64)
            slot = tl.where(real, page * PAGE_SIZE + p % PAGE_SIZE, -1)
            tl.store(slots_ptr + o_t, slot, mask=m_t)
            tl.store(positions_ptr + o_t, p.to(tl.int64), mask=m_t)
    else:
        block = (i_b - num_requests - 1) * tl.num_programs(1) + tl.program_id(1)
        o_e = block * BLOCK + tl.arange(0, BLOCK)  # a changed page is EXPAND entries
        o_c = changes_ptr + changes_at + o_e // EXPAND
        m_e = o_e < num_changes * EXPAND
        row = tl.load(o_c, mask=m_e, other=0).to(tl.int64)
        column = tl.load(o_c + num_changes, mask=m_e, other=0)
        page = tl.load(o_c + 2 * num_changes, mask=m_e, other=0)
        inside = o_e % EXPAND
        tl.store(entries_ptr + row * entries_stride + column * EXPAND + inside, page * EXPAND + inside, mask=m_e)
        if GATHERED:
            place = tl.load(o_c + 3 * num_changes, mask=m_e, other=-1).to(tl.int64)
            tl.store(gathered_ptr + place * gathered_stride + column, page, mask=m_e & (place >= 0))


@triton.jit(do_not_specialize=["num_requests", "num_out"])
def _decode_step_kernel(
    inbox_ptr,
    packed_ptr,
    entries_ptr,
    gathered_ptr,
    positions_ptr,
    slots_ptr,
    entries_stride,
    gathered_stride,
    num_requests,
    num_out,
    R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXPAND: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lanes behind the batch's requests write padding: position 0, slot -1."""
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = o_b < num_requests
    p = tl.load(inbox_ptr + o_b, mask=real, other=0)  # [BLOCK]
    new = tl.load(inbox_ptr + R + o_b, mask=real, other=-1)
    m_new = new >= 0
    at = tl.load(inbox_ptr + 2 * R + o_b, mask=m_new, other=-1)
    row = tl.load(packed_ptr + o_b, mask=real, other=0).to(tl.int64)
    column = p // PAGE_SIZE
    p_row = entries_ptr + row * entries_stride
    held = tl.load(p_row + column * EXPAND, mask=real & (at != column), other=0) // EXPAND
    page = tl.where(at == column, new, held).to(tl.int64)
    tl.store(slots_ptr + o_b, tl.where(real, page * PAGE_SIZE + p % PAGE_SIZE, -1), mask=o_b < num_out)
    tl.store(positions_ptr + o_b, p.to(tl.int64), mask=o_b < num_out)
    tl.store(packed_ptr + R + o_b, p + 1, mask=real)  # seq_lens
    for inside in range(EXPAND):
        tl.store(p_row + at * EXPAND + inside, new * EXPAND + inside, mask=m_new)
    if GATHERED:
        tl.store(gathered_ptr + o_b.to(tl.int64) * gathered_stride + at, new, mask=m_new)


@triton.jit(do_not_specialize=["num_requests", "num_columns"])
def _gather_kernel(
    rows_ptr, entries_ptr, gathered_ptr, entries_stride, gathered_stride, num_requests, num_columns, BLOCK: tl.constexpr
):
    """Rows behind the batch's are cleared in their whole width."""
    i_b = tl.program_id(0).to(tl.int64)
    real = i_b < num_requests
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i_b, mask=real, other=0).to(tl.int64)
    m_page = o_c < tl.where(real, num_columns, 0)
    page = tl.load(entries_ptr + row * entries_stride + o_c, mask=m_page, other=0)
    width = tl.where(real, num_columns, gathered_stride)
    tl.store(gathered_ptr + i_b * gathered_stride + o_c, page, mask=o_c < width)


@dataclass(frozen=True)
class StepBuffers:
    """An adapter's device buffers; contiguous, on one device, at the same addresses for its whole life.

    packed     int32 [n]; the step's numbers
    entries    int32 [R + 1, C]; a page is `expand` entries of a row
    gathered   int32 [R, C]; the batch's rows in order, or None for a table that is read through rows
    positions, slots   int64 [T]
    expand     entries a page: 1, or page_size for one entry a token

    Raises ValueError for dtypes or shapes that do not fit. slots_by="torch" is the same rule without Triton;
    "nobody" leaves all buffers as they are, to measure what the host does.
    """

    packed: Tensor
    entries: Tensor
    gathered: Tensor | None
    positions: Tensor
    slots: Tensor
    max_requests: int
    page_size: int
    expand: int
    slots_by: Literal["triton", "torch", "nobody"] = "triton"
    _step: Launch = field(init=False, repr=False, compare=False)
    _gather: Launch = field(init=False, repr=False, compare=False)
    _decode: Launch = field(init=False, repr=False, compare=False)
    _fixed: tuple[Any, ...] = field(init=False, repr=False, compare=False)  # tensors and strides of every step

    def __post_init__(self) -> None:
        for name, tensor in (("packed", self.packed), ("entries", self.entries)):
            check_dtype(name, tensor, (torch.int32,))
        for name, tensor in (("positions", self.positions), ("slots", self.slots)):
            check_dtype(name, tensor, (torch.int64,))
        if self.expand not in (1, self.page_size):
            fail("expand", f"1 or the page size, {self.page_size}", self.expand)
        if self.gathered is not None and self.expand != 1:
            fail("gathered", "None where a page is several entries", tuple(self.gathered.shape))
        if self.slots_by == "triton":
            check_runnable(self.packed.device)
        second = self.entries if self.gathered is None else self.gathered
        tensors = (self.packed, self.packed, self.entries, second, self.positions, self.slots)
        constants = {
            "R": self.max_requests,
            "PAGE_SIZE": self.page_size,
            "EXPAND": self.expand,
            "GATHERED": self.gathered is not None,
            "BLOCK": BLOCK,
            "num_warps": 4,
        }
        strides = (self.entries.stride(0), second.stride(0))
        object.__setattr__(self, "_fixed", (tensors, strides))
        object.__setattr__(self, "_step", Launch(_step_kernel, (1, 1, 1), (), constants))
        decode = constants | {"BLOCK": LANES, "num_warps": 1}
        object.__setattr__(self, "_decode", Launch(_decode_step_kernel, (1, 1, 1), (), decode))
        gather = {"BLOCK": BLOCK, "num_warps": 4}
        object.__setattr__(self, "_gather", Launch(_gather_kernel, (1, 1, 1), (), gather))

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Where rows, seq_lens, query_start_loc, page_start and the step pages begin in `packed`."""
        requests = self.max_requests
        return 0, requests, 2 * requests, 3 * requests + 1, 4 * requests + 2


def apply_step(
    buffers: StepBuffers,
    num_requests: int,
    num_out: int,
    longest_query: int,
    num_changes: int,
    changes_at: int,
    changes: Tensor | None = None,
) -> None:
    """Write changed entries, and positions and slots [num_out] of the step that was packed.

    num_requests   B without padding; -1: write changed entries only
    longest_query  most tokens of a request, padding included: how many programs share a request
    changes_at     where the changes begin in `packed`, or in `changes` (int32 [n]) where those travelled apart

    Cost: one launch, nothing is checked, allocated or waited for.
    """
    if buffers.slots_by == "torch":
        _apply_by_torch(buffers, num_requests, num_out, num_changes, changes_at, changes)
        return
    if buffers.slots_by == "nobody":
        return
    tensors, strides = buffers._fixed
    chunks = min(max(ceil_div(longest_query, BLOCK), 1), MAX_CHUNKS)
    programs = num_requests + 1 + ceil_div(num_changes * buffers.expand, BLOCK * chunks)
    if programs == 0:
        return
    if changes is not None:
        tensors = (tensors[0], changes, *tensors[2:])
    buffers._step(tensors, (programs, chunks, 1), (*strides, num_requests, num_out, num_changes, changes_at))


def apply_decode(buffers: StepBuffers, inbox: Tensor, num_requests: int, num_out: int) -> None:
    """Carry out a decode step of the rows that the last step had: one new token each, one new page at most.

    inbox    int32 [3 R], as the module says; columns where there is no new page are not read
    num_out  positions and slots to write, padding included

    seq_lens in `packed` are raised to computed + 1. Cost: one launch, nothing is checked, allocated or waited for.
    """
    if buffers.slots_by == "torch":
        _decode_by_torch(buffers, inbox, num_requests, num_out)
    elif buffers.slots_by == "triton":
        tensors, strides = buffers._fixed
        programs = ceil_div(max(num_requests, num_out), LANES)
        buffers._decode((inbox, *tensors[1:]), (programs, 1, 1), (*strides, num_requests, num_out))


def gather_rows(buffers: StepBuffers, num_requests: int, num_columns: int, num_filled: int) -> None:
    """Copy the first `num_columns` entries of the step's rows to `gathered`, and clear its rows up to `num_filled`.

    Cost: one launch.
    """
    gathered, entries = buffers.gathered, buffers.entries
    if gathered is None:
        raise ValueError("gather_rows: the table has no gathered rows")
    if buffers.slots_by == "torch":
        rows = buffers.packed[:num_requests]
        gathered[:num_requests, :num_columns] = entries[:, :num_columns].index_select(0, rows)
        gathered[num_requests:num_filled] = 0
        return
    if buffers.slots_by == "nobody":
        return
    columns = gathered.shape[1] if num_filled > num_requests else num_columns
    grid = (max(num_requests, num_filled), ceil_div(columns, BLOCK), 1)
    if not grid[0] or not grid[1]:
        return
    numbers = (*buffers._fixed[1], num_requests, num_columns)
    buffers._gather((buffers.packed, entries, gathered), grid, numbers)


def _decode_by_torch(buffers: StepBuffers, inbox: Tensor, num_requests: int, num_out: int) -> None:
    size, expand, limit = buffers.page_size, buffers.expand, buffers.max_requests
    computed, new, at = inbox.view(3, limit)[:, :num_requests]
    rows = buffers.packed[:num_requests]
    fresh = (new >= 0).nonzero().flatten()
    place = fresh.to(torch.int32)
    _scatter_by_torch(buffers, torch.stack([rows[fresh], at[fresh], new[fresh], place]))
    pages = buffers.entries[rows.long(), (computed // size).long() * expand].long() // expand
    buffers.positions[:num_out] = 0
    buffers.slots[:num_out] = -1
    buffers.positions[:num_requests] = computed
    buffers.slots[:num_requests] = pages * size + computed % size
    buffers.packed[limit : limit + num_requests] = computed + 1


def _apply_by_torch(
    buffers: StepBuffers, num_requests: int, num_out: int, num_changes: int, changes_at: int, changes: Tensor | None
) -> None:
    """What the kernel does, in torch, for a CPU without the interpreter."""
    if num_changes:
        source = buffers.packed if changes is None else changes
        rows = 4 if buffers.gathered is not None else 3
        _scatter_by_torch(buffers, source[changes_at : changes_at + rows * num_changes].view(rows, num_changes))
    if num_requests >= 0:
        _slots_by_torch(buffers, num_requests, num_out)


def _scatter_by_torch(buffers: StepBuffers, changes: Tensor) -> None:
    inside = torch.arange(buffers.expand, dtype=torch.int32, device=changes.device)
    row, column, page = changes[0].long(), changes[1].long(), changes[2]
    columns = column[:, None] * buffers.expand + inside
    buffers.entries[row[:, None], columns] = page[:, None] * buffers.expand + inside
    if buffers.gathered is not None:
        held = changes[3] >= 0
        buffers.gathered[changes[3][held].long(), column[held]] = page[held]


def _slots_by_torch(buffers: StepBuffers, num_requests: int, num_out: int) -> None:
    _, lens_at, starts_at, pages_at, data_at = buffers.offsets
    size, packed = buffers.page_size, buffers.packed
    starts = packed[starts_at : starts_at + num_requests + 1]
    num_tokens = int(starts[-1])
    buffers.slots[num_tokens:num_out] = -1
    buffers.positions[num_tokens:num_out] = 0
    shift = packed[lens_at : lens_at + num_requests] - starts[1:]
    at = packed[pages_at : pages_at + num_requests] - (shift + starts[:-1]) // size
    token = torch.arange(num_tokens, dtype=torch.int32, device=packed.device)
    request = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    position = shift[request] + token
    page = packed[(data_at + at[request] + position // size).long()].long()
    buffers.positions[:num_tokens] = position
    buffers.slots[:num_tokens] = page * size + position % size
