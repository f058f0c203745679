"""Packed pages on their way between device and host: in one piece, or in pieces that travel while others are packed.

`pack(ids, rows)` launches what packs pages `ids` into `rows` (or unpacks them) on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Between pool and host: up to ONE_PIECE bytes are packed, then copied, on the caller's stream. More go in pieces of
# STAGE_BYTES, one packed while the one before travels; a second stream and its events cost the host 50 us and more,
# which packing 65 MB (40 us) does not repay.
ONE_PIECE = 96 * 2**20
STAGE_BYTES = 64 * 2**20
FIRST_BYTES = 4 * 2**20  # of the piece that nothing overlaps: 0.08 ms at 54 GB/s

Pack = Callable[[Tensor, Tensor], None]


def _pieces(num_pages: int, page_bytes: int) -> list[slice]:
    """Rows of each piece that travels between device and host: a short one first, so that the copy starts soon."""
    first = max(1, FIRST_BYTES // page_bytes)
    step = max(1, STAGE_BYTES // page_bytes)
    ends = [*range(first, num_pages, step), num_pages]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]


class _Lane:
    """For host copies beside the kernels of one stream: a stream of its own, events for the two pieces in flight."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.packed = (torch.cuda.Event(), torch.cuda.Event())
        self.copied = (torch.cuda.Event(), torch.cuda.Event())


_lanes: dict[tuple[torch.device, int], _Lane] = {}


def _lane(main: torch.cuda.Stream) -> _Lane:
    key = (main.device, main.cuda_stream)
    found = _lanes.get(key)
    if found is None:
        found = _lanes[key] = _Lane(main.device)
    return found


def _stage(pieces: list[slice], page_bytes: int, device: torch.device) -> Tensor:
    """Scratch on the device, [pieces in flight, rows, bytes a page]."""
    rows = max(piece.stop - piece.start for piece in pieces)
    return torch.empty((min(2, len(pieces)), rows, page_bytes), dtype=torch.uint8, device=device)


def send(ids: Tensor, out: Tensor, pack: Pack) -> None:
    """Pack pages `ids` (on the device) and copy them to `out` [n, bytes a page] in host memory.

    In pieces: one is packed on the current stream while the one before travels on the side stream.
    """
    device = ids.device
    if out.numel() <= ONE_PIECE:
        whole = torch.empty_like(out, device=device)
        pack(ids, whole)
        out.copy_(whole, non_blocking=True)
        return
    main = torch.cuda.current_stream(device)
    lane = _lane(main)
    pieces = _pieces(*out.shape)
    stage = _stage(pieces, out.shape[1], device)
    for i, piece in enumerate(pieces):
        buffer = stage[i % 2, : piece.stop - piece.start]
        if i >= 2:
            main.wait_event(lane.copied[i % 2])
        pack(ids[piece], buffer)
        lane.packed[i % 2].record(main)
        with torch.cuda.stream(lane.stream):
            lane.stream.wait_event(lane.packed[i % 2])
            out[piece].copy_(buffer, non_blocking=True)
            lane.copied[i % 2].record(lane.stream)
    main.wait_event(lane.copied[(len(pieces) - 1) % 2])


def fetch(packed: Tensor, device: torch.device, upload: Callable[[], Tensor], unpack: Pack) -> None:
    """Copy `packed` [n, bytes a page] from host memory and unpack it into the pages that `upload` gives.

    `upload` checks the ids and puts them on the device; it is called when the first copy, into scratch memory, is
    under way, which does not need them. In pieces: one travels on the side stream while the one before is unpacked;
    the short piece comes last.
    """
    if packed.numel() <= ONE_PIECE:
        whole = packed.to(device, non_blocking=True)
        unpack(upload(), whole)
        return
    main = torch.cuda.current_stream(device)
    lane = _lane(main)
    pieces = _pieces(*packed.shape)[::-1]
    stage = _stage(pieces, packed.shape[1], device)
    lane.stream.wait_stream(main)  # the scratch memory may still be in use there
    ids = None
    for i, piece in enumerate(pieces):
        buffer = stage[i % 2, : piece.stop - piece.start]
        with torch.cuda.stream(lane.stream):
            if i >= 2:
                lane.stream.wait_event(lane.packed[i % 2])
            buffer.copy_(packed[piece], non_blocking=True)
            lane.copied[i % 2].record(lane.stream)
        if ids is None:
            try:
                ids = upload()
            except ValueError:
                main.wait_stream(lane.stream)  # the scratch memory goes back to this stream
                raise
        main.wait_event(lane.copied[i % 2])
        unpack(ids[piece], buffer)
        lane.packed[i % 2].record(main)
