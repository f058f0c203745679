"""Packed pages on their way between device and host, piece by piece: one travels while another is packed.

Copies run on the caller's stream, so that the first needs no event; packing of all pieces but the first runs on a
stream beside it. Kernels read page ids in pinned memory, where they are written. Whatever a transfer needs is made once
a stream and kept: a call costs a few launches, of which few come before the first byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
from kvarena.kernels._launch import Remembered
from numpy.typing import NDArray
from torch import Tensor

# Pieces that nothing overlaps. Out, the first is packed before anything travels; its 0.3 ms on the way let a slow host
# prepare the rest. In, the last is unpacked when all have travelled.
FIRST_BYTES = 16 * 2**20
LAST_BYTES = 4 * 2**20
STAGE_BYTES = 64 * 2**20  # of other pieces; two of them are kept on the device, no larger than needed

# pack(ids, first, count, rows): launch what packs pages ids[first : first + count] into `rows`, or unpacks them, on the
# current stream. `ids` is int32, in pinned memory.
Pack = Callable[[Tensor, int, int, Tensor], None]
# checked(piece): the ids of some rows, int64 on the host; raises ValueError for one that is none of the pool
Checked = Callable[[slice], "NDArray[np.int64]"]


def _pieces(num_pages: int, page_bytes: int, short_bytes: int) -> list[slice]:
    """Rows of each piece that travels between device and host, the short one first."""
    first = max(1, short_bytes // page_bytes)
    if num_pages <= first:
        return [slice(0, num_pages)]
    step = max(1, STAGE_BYTES // page_bytes)
    ends = [*range(first, num_pages, step), num_pages]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]


class _Ids:
    """Page ids as int32 in pinned buffers that take turns: a list stays until it was read."""

    TURNS = 4

    def __init__(self) -> None:
        self._pinned: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * self.TURNS
        self._arrays = [held.numpy() for held in self._pinned]
        self._read = [torch.cuda.Event() for _ in range(self.TURNS)]
        self._turn = 0

    def begin(self, count: int) -> Tensor:
        """Pinned memory for a list of `count` ids; waits where the list of four calls ago is still read."""
        turn = self._turn = (self._turn + 1) % self.TURNS
        self._read[turn].synchronize()
        if len(self._arrays[turn]) < count:
            self._pinned[turn] = torch.empty(max(2**14, 1 << count.bit_length()), dtype=torch.int32, pin_memory=True)
            self._arrays[turn] = self._pinned[turn].numpy()
        return self._pinned[turn]

    def put(self, piece: slice, ids: NDArray[np.int64]) -> None:
        """Write a piece of the list."""
        self._arrays[self._turn][piece] = ids

    def done(self, stream: torch.cuda.Stream) -> None:
        """`stream` has waited for all that reads the list."""
        self._read[self._turn].record(stream)


class _Beside:
    """`with` this, work goes to a stream's neighbour. Cheaper than torch's own context for streams."""

    def __init__(self, main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        self.main, self.side = main, side

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.side)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.main)


class _Plan(NamedTuple):
    """The pieces of one size of transfer, and scratch memory for each, uint8 [rows, bytes a page]."""

    pieces: list[slice]
    stages: list[Tensor]


class _Lane:
    """What transfers of one stream share: the stream beside it, events, ids, scratch memory for two pieces.

    At the end of every transfer `main` has waited for `side`, and `side` begins by waiting for `main`.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        self.main, self.side = main, torch.cuda.Stream(main.device)
        self.beside = _Beside(self.main, self.side)
        self.begun = torch.cuda.Event()
        self.packed = (torch.cuda.Event(), torch.cuda.Event())
        self.moved = (torch.cuda.Event(), torch.cuda.Event())
        self.ids = _Ids()
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * 2
        self._plans = Remembered(64)

    def plan(self, rows: Tensor, backwards: bool) -> _Plan:
        """How `rows`, uint8 [n, bytes a page], travel; backwards: the short piece last."""
        key = (*rows.shape, backwards)
        found: _Plan | None = self._plans.get(key)
        if found is None:
            count, width = rows.shape
            pieces = _pieces(count, width, LAST_BYTES)[::-1] if backwards else _pieces(count, width, FIRST_BYTES)
            found = self._plans[key] = _Plan(pieces, self._stages(pieces, width))
        return found

    def _stages(self, pieces: list[slice], width: int) -> list[Tensor]:
        """Scratch for pieces of rows of `width` bytes: even pieces share the first half, odd ones the second."""
        for half in (0, 1):
            size = max((piece.stop - piece.start for piece in pieces[half::2]), default=0) * width
            if len(self._scratch[half]) < size:
                self._scratch[half] = torch.empty(size, dtype=torch.uint8, device=self.main.device)
                self._plans.clear()  # they name the memory that was
        counts = [piece.stop - piece.start for piece in pieces]
        return [self._scratch[i % 2][: count * width].view(count, width) for i, count in enumerate(counts)]


_lanes: dict[tuple[int, int], _Lane] = {}


@functools.cache
def _stream_of() -> Callable[[int], int]:
    """What tells a device's current stream; looked up once, since Triton's way to it takes longer than its answer."""
    found: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    return found


def _lane(device: torch.device) -> _Lane:
    index = device.index
    key = (index, _stream_of()(index))
    found = _lanes.get(key)
    if found is None:
        found = _lanes[key] = _Lane(torch.cuda.current_stream(device))
    return found


def send(out: Tensor, device: torch.device, checked: Checked, pack: Pack) -> None:
    """Pack pages of `device` and copy them to `out` [n, bytes a page] in host memory.

    Ids of the first piece are checked before it goes, the others while it travels.
    """
    lane, count = _lane(device), out.shape[0]
    main, side, (pieces, stages) = lane.main, lane.side, lane.plan(out, backwards=False)
    first = pieces[0]
    listed = lane.ids.begin(count)
    lane.ids.put(first, checked(first))
    pack(listed, 0, first.stop, stages[0])
    if len(pieces) > 1:
        lane.begun.record(main)
    try:
        out[first].copy_(stages[0], non_blocking=True)
        if len(pieces) > 2:
            lane.moved[0].record(main)
        for i, piece in enumerate(pieces[1:], 1):
            if i == 1:
                rest = slice(first.stop, count)
                lane.ids.put(rest, checked(rest))
            with lane.beside:
                side.wait_event(lane.begun if i == 1 else lane.moved[i % 2])
                pack(listed, piece.start, piece.stop - piece.start, stages[i])
            lane.packed[i % 2].record(side)
            main.wait_event(lane.packed[i % 2])
            out[piece].copy_(stages[i], non_blocking=True)
            if i + 2 < len(pieces):
                lane.moved[i % 2].record(main)
    finally:
        lane.ids.done(main)


def fetch(packed: Tensor, device: torch.device, checked: Checked, unpack: Pack) -> None:
    """Copy `packed` [n, bytes a page] from host memory and unpack it into pages of `device`.

    Ids are checked when the first copy, into scratch memory, is under way, which does not need them. The short piece
    comes last.
    """
    lane, count = _lane(device), packed.shape[0]
    main, side, (pieces, stages) = lane.main, lane.side, lane.plan(packed, backwards=True)
    for i, piece in enumerate(pieces):
        if i >= 2:
            main.wait_event(lane.packed[i % 2])
        stages[i].copy_(packed[piece], non_blocking=True)
        lane.moved[i % 2].record(main)
        if i == 0:
            whole = slice(0, count)
            ids = checked(whole)
            listed = lane.ids.begin(count)
            lane.ids.put(whole, ids)
        with lane.beside:
            side.wait_event(lane.moved[i % 2])
            unpack(listed, piece.start, piece.stop - piece.start, stages[i])
        lane.packed[i % 2].record(side)
    main.wait_event(lane.packed[(len(pieces) - 1) % 2])
    lane.ids.done(main)
