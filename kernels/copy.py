"""copy_pages, gather_pages, scatter_pages: move whole pages of all layers, one launch each.

Pages are bytes here. A pool tensor has the page first, [P, ...] (see `KVPool.layers`; per-layer views
`key(layer)`, `value(layer)` do too). What one page holds in it is a number of contiguous runs, one a layer say;
a small table on the device lists all runs of all tensors. Grid: (page, run, block of the run).

The ids come from an allocator, on the host: lists of ints or CPU tensors, checked before anything is launched.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from kvarena.kernels import _host
from kvarena.kernels._launch import (
    Launch,
    call_key,
    ceil_div,
    check_device,
    check_dtype,
    check_runnable,
    fail,
    launch,
    next_power_of_two,
)
from numpy.typing import NDArray
from torch import Tensor

Ids = Sequence[int] | Tensor
Int64s: TypeAlias = "NDArray[np.int64]"
BLOCK_BYTES = 16384  # of one program, by four warps: 3.5 and 3.4 TB/s for 1 and 32 layers on one H200
PACK_WARPS = 4


@triton.jit
def _run_of(base_ptr, table_ptr, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """(pointer, page stride, length, place in a packed page) of the run of this program, in units."""
    p_table = table_ptr + tl.program_id(1) * 4
    start = tl.multiple_of(tl.load(p_table), ALIGN)
    stride = tl.multiple_of(tl.load(p_table + 1), ALIGN)
    length = tl.load(p_table + 2)
    place = tl.multiple_of(tl.load(p_table + 3), ALIGN)
    return base_ptr.to(tl.pointer_type(UNIT)) + start, stride, length, place


@triton.jit
def _copy_kernel(base_ptr, table_ptr, ids_ptr, num_pairs, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """ids [2, n]: sources, then targets."""
    i_pair = tl.program_id(0)
    src = tl.load(ids_ptr + i_pair).to(tl.int64)
    dst = tl.load(ids_ptr + num_pairs + i_pair).to(tl.int64)
    base, stride, length, _ = _run_of(base_ptr, table_ptr, UNIT, ALIGN)
    o = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m = o < length
    tl.store(base + dst * stride + o, tl.load(base + src * stride + o, mask=m), mask=m)


@triton.jit(do_not_specialize=["first", "count"])
def _pack_kernel(
    base_ptr,
    table_ptr,
    ids_ptr,
    packed_ptr,
    page_units,
    first,
    count,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    GATHER: tl.constexpr,
):
    """packed [count, page_units]: page ids[first + i] of every run, one after the other, in row i.

    Programs take PAGES rows. Behind the last they take the last one again, which changes nothing.
    """
    row = tl.minimum(tl.program_id(0) * PAGES + tl.arange(0, PAGES), count - 1).to(tl.int64)
    page = tl.load(ids_ptr + first + row).to(tl.int64)
    base, stride, length, place = _run_of(base_ptr, table_ptr, UNIT, ALIGN)
    o = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m = (o < length)[None, :]
    p_pool = base + (page * stride)[:, None] + o[None, :]  # [PAGES, BLOCK]
    p_packed = packed_ptr.to(tl.pointer_type(UNIT)) + (row * page_units + place)[:, None] + o[None, :]
    if GATHER:
        tl.store(p_packed, tl.load(p_pool, mask=m), mask=m)
    else:
        tl.store(p_pool, tl.load(p_packed, mask=m), mask=m)


@dataclass(frozen=True)
class _Runs:
    """The contiguous runs that one page has in a set of pool tensors, and the launches over them."""

    num_runs: int
    table: Tensor  # int64 [runs, 4]: start behind the first tensor's first byte, page stride, length, place; in units
    unit: int  # bytes
    aligned: bool  # every number is a multiple of 16 bytes
    longest: int  # units
    page_bytes: int
    launches: dict[tuple[bool, ...], Launch] = field(default_factory=dict)

    @functools.cached_property
    def block(self) -> int:
        """Units of one run that a program takes."""
        return min(next_power_of_two(self.longest), BLOCK_BYTES // self.unit)

    @functools.cached_property
    def pages(self) -> int:
        """Pages of which a program takes a block when it packs; several where they are small."""
        return max(1, BLOCK_BYTES // (self.block * self.unit))

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments and options of the launch."""
        block = self.block
        return {
            "UNIT": {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[self.unit],
            "ALIGN": 16 // self.unit if self.aligned else 1,
            "BLOCK": block,
            "num_warps": max(1, block * self.unit // 4096),
        }

    @functools.cached_property
    def _shared_grid(self) -> tuple[int, int]:
        return self.num_runs, ceil_div(self.longest, self.block)

    @functools.cached_property
    def _page_units(self) -> int:
        return self.page_bytes // self.unit

    def grid(self, num_pages: int) -> tuple[int, int, int]:
        return (num_pages, *self._shared_grid)

    def pack(self, base: Tensor, ids: Tensor, first: int, count: int, packed: Tensor, gather: bool) -> None:
        """Launch `_pack_kernel` for pages ids[first : first + count]; `base` is the first of the tensors."""
        key = (gather, ids.is_cuda, ids.data_ptr() % 16 == 0, packed.data_ptr() % 16 == 0)
        call = self.launches.get(key)
        if call is None:
            constants = {**self.constants(), "PAGES": self.pages, "GATHER": gather, "num_warps": PACK_WARPS}
            call = self.launches[key] = Launch(_pack_kernel, (1, 1, 1), (), constants)
        grid = (ceil_div(count, self.pages), *self._shared_grid)
        call((base, self.table, ids, packed), grid, (self._page_units, first, count))


def _page_runs(name: str, tensor: Tensor) -> tuple[int, list[int]]:
    """(bytes of a run, byte offset of each run from the page's start) of one tensor [P, ...]."""
    size = tensor.element_size()
    run, dims = size, list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] * size == run):
        run *= dims.pop()[0]
    if dims and all(stride * size < run for _, stride in dims):
        fail(name, "pages made of runs that do not overlap", f"strides {tensor.stride()}")
    offsets = [0]
    for count, stride in dims:
        offsets = [offset + i * stride * size for offset in offsets for i in range(count)]
    return run, offsets


_runs_cache: dict[tuple[object, ...], _Runs] = {}


def _runs(tensors: list[Tensor]) -> _Runs:
    """The runs of `tensors`, checked and kept between calls for as long as addresses and shapes stay."""
    key = tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])  # an address is on one device
    found = _runs_cache.get(key)
    if found is None:
        if len(_runs_cache) >= 64:
            _runs_cache.clear()
        found = _runs_cache[key] = _build_runs(_check_tensors(tensors))
    return found


def _build_runs(tensors: list[Tensor]) -> _Runs:
    rows: list[tuple[int, int, int, int]] = []
    base, place = tensors[0].data_ptr(), 0
    for i, tensor in enumerate(tensors):
        run, offsets = _page_runs(f"pool_tensors[{i}]", tensor)
        for offset in offsets:
            rows.append((tensor.data_ptr() - base + offset, tensor.stride(0) * tensor.element_size(), run, place))
            place += run
    divisor = math.gcd(16, base, place, *(number for row in rows for number in row))
    unit = min(divisor, 8)
    table = torch.tensor([[number // unit for number in row] for row in rows], dtype=torch.int64)
    longest = max(row[2] for row in rows) // unit
    return _Runs(len(rows), table.to(tensors[0].device), unit, divisor == 16, longest, place)


def _tensors(pool_tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [pool_tensors] if isinstance(pool_tensors, Tensor) else list(pool_tensors)


def _check_tensors(tensors: list[Tensor]) -> list[Tensor]:
    if not tensors:
        fail("pool_tensors", "at least one tensor", "none")
    for i, tensor in enumerate(tensors):
        check_device(f"pool_tensors[{i}]", tensor, tensors[0].device)
        if tensor.dim() < 2 or tensor.shape[0] != tensors[0].shape[0] or tensor.numel() == 0:
            fail(f"pool_tensors[{i}]", f"shape [{tensors[0].shape[0]} pages, ...]", list(tensor.shape))
    return tensors


def _host_ids(name: str, ids: Ids, num_pages: int) -> Tensor:
    """Page ids as int64 [n] on the host, each checked against the pool; whole lists at a time, since they are long."""
    array = _id_array(name, ids)
    _check_inside(name, array, num_pages)
    return torch.from_numpy(array)


def _id_array(name: str, ids: Ids) -> Int64s:
    """Page ids as int64 [n], a view where they are that already; numpy, because torch would wake its threads.

    ValueError: not whole numbers, not on the host, not [n].
    """
    if not isinstance(ids, Tensor):
        ids = _listed(name, ids)
    if not ids.is_cpu:
        fail(name, "ints or a CPU tensor: ids are checked on the host before anything is written", ids.device)
    if ids.dtype is not torch.int64 or ids.dim() != 1:
        if ids.dim() != 1 or ids.is_floating_point():
            fail(name, "integers [n]", f"{ids.dtype} {list(ids.shape)}")
        ids = ids.long()
    array: Int64s = ids.numpy()
    return array


def _check_inside(name: str, ids: Int64s, num_pages: int) -> None:
    """ValueError for an id outside the pool. As unsigned numbers: one pass finds those below 0 too."""
    numbers = ids.view(np.uint64)
    if len(numbers) and numbers.item(numbers.argmax()) >= num_pages:
        outside = ids[(ids < 0) | (ids >= num_pages)]
        fail(name, f"page ids from 0 to {num_pages - 1}", int(outside[0]))


def _listed(name: str, ids: Sequence[int]) -> Tensor:
    """A sequence of ints as int64 [n]."""
    try:
        return torch.tensor([operator.index(page) for page in ids], dtype=torch.int64)
    except TypeError:
        fail(name, "whole numbers", next(page for page in ids if not hasattr(page, "__index__")))


def check_page_ids(pool_tensors: Tensor | Sequence[Tensor], page_ids: Ids) -> tuple[list[Tensor], Tensor]:
    """Raise ValueError for tensors or ids that do not fit; return the tensors listed, and the ids as int64 [n]."""
    tensors = _check_tensors(_tensors(pool_tensors))
    return tensors, _host_ids("page_ids", page_ids, tensors[0].shape[0])


def check_copy(
    pool_tensors: Tensor | Sequence[Tensor], src_ids: Ids, dst_ids: Ids
) -> tuple[list[Tensor], list[int], list[int]]:
    """Raise ValueError for a copy that is not well defined; return tensors, sources and targets as lists."""
    tensors = _check_tensors(_tensors(pool_tensors))
    src = _host_ids("src_ids", src_ids, tensors[0].shape[0])
    dst = _host_ids("dst_ids", dst_ids, tensors[0].shape[0])
    if len(src) != len(dst):
        fail("dst_ids", f"{len(src)} targets, one a source", len(dst))
    _check_distinct("dst_ids", dst.numpy(), tensors[0].shape[0])
    return tensors, src.tolist(), dst.tolist()


def _check_distinct(name: str, ids: Int64s, num_pages: int) -> None:
    """Mark each target: cheaper than sorting thousands of them. numpy, because torch would wake its threads."""
    marked = np.zeros(num_pages, dtype=np.bool_)
    marked[ids] = True
    if np.count_nonzero(marked) != len(ids):
        twice = ids[np.bincount(ids)[ids] > 1]
        raise ValueError(f"{name}: target {twice[0]} named twice")


def check_packed(name: str, packed: Tensor, tensors: list[Tensor], num_pages: int) -> Tensor:
    """Raise ValueError unless `packed` is a contiguous uint8 [num_pages, bytes a page]."""
    return _check_rows(name, packed, num_pages, sum(t.numel() // t.shape[0] * t.element_size() for t in tensors))


def _check_rows(name: str, packed: Tensor, num_pages: int, page_bytes: int) -> Tensor:
    check_dtype(name, packed, (torch.uint8,))
    if packed.shape != (num_pages, page_bytes) or not packed.is_contiguous():
        fail(name, f"a contiguous [{num_pages}, {page_bytes}]", f"{list(packed.shape)}, strides {packed.stride()}")
    return packed


def page_rows(tensor: Tensor) -> Tensor:
    """The bytes of each page, uint8 [P, bytes]; a copy where a page is not one run."""
    return tensor.reshape(tensor.shape[0], -1).contiguous().view(torch.uint8)


def _upload(ids: Tensor, device: torch.device) -> Tensor:
    """Ids on the device, int32; the copy is queued, not waited for.

    A short list goes from pageable memory: the driver takes it over at once, which is sooner than to pin it.
    """
    host = torch.from_numpy(ids.numpy().astype(np.int32))  # numpy, because torch would wake its threads
    if device.type == "cuda" and host.numel() > 16384:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def copy_pages(pool_tensors: Tensor | Sequence[Tensor], src_ids: Ids, dst_ids: Ids) -> None:
    """Copy page src_ids[i] to page dst_ids[i], for all i at once, in all tensors.

    pool_tensors  tensors [P, ...] with the page first, of one pool: `KVPool.layers`, or views of single layers
    src_ids       n page ids, on the host
    dst_ids       n page ids, on the host, all different

    All copies read before any of them writes: where a source is also a target (chains, cycles), that source goes
    through scratch memory (n pages at most, two launches more). Otherwise one launch for all layers.
    Raises ValueError, before anything is written, for a target named twice, an id outside the pool, lists of
    different length, or ids on the device.
    """
    tensors, src, dst = check_copy(pool_tensors, src_ids, dst_ids)
    device = tensors[0].device
    check_runnable(device)
    targets = set(dst)
    staged = [(s, d) for s, d in zip(src, dst, strict=True) if s != d and s in targets]
    direct = [(s, d) for s, d in zip(src, dst, strict=True) if s not in targets]
    kept = gather_pages(tensors, [s for s, _ in staged]) if staged else None
    if direct:
        runs = _runs(tensors)
        ids = _upload(torch.tensor([s for s, _ in direct] + [d for _, d in direct]), device)
        key = (runs.unit, runs.aligned, runs.longest, call_key(tensors[0], ids))
        args = (tensors[0], runs.table, ids, len(direct))
        launch(_copy_kernel, runs.grid(len(direct)), args, runs.constants(), key)
    if kept is not None:
        scatter_pages(kept, tensors, [d for _, d in staged])


def gather_pages(pool_tensors: Tensor | Sequence[Tensor], page_ids: Ids, out: Tensor | None = None) -> Tensor:
    """Pack pages for swap: row i of the result holds the bytes of page page_ids[i], tensor after tensor.

    pool_tensors  as for `copy_pages`
    page_ids      n page ids, on the host
    out           uint8 [n, bytes a page], contiguous; on the pool's device (default: new), or in host memory
                  (pinned, else the copy waits), where it is packed and copied piece by piece, overlapping, through
                  up to 128 MiB of scratch memory, kept for each stream

    Stream ordered: a host `out` is complete when the current stream has reached this point.
    Raises ValueError for ids outside the pool, or an `out` that does not fit; a long `out` in host memory may hold some
    pages by then, since ids are checked while others travel.
    """
    tensors = _tensors(pool_tensors)
    runs, base = _runs(tensors), tensors[0]
    device, count = base.device, _count(page_ids)
    check_runnable(device)
    if out is None:
        out = torch.empty((count, runs.page_bytes), dtype=torch.uint8, device=device)
    _check_rows("out", out, count, runs.page_bytes)
    if out.device != device and count:
        array = _id_array("page_ids", page_ids)

        def checked(piece: slice) -> Int64s:
            _check_inside("page_ids", array[piece], base.shape[0])
            return array[piece]

        _host.send(out, device, checked, functools.partial(runs.pack, base, gather=True))
        return out
    ids = _host_ids("page_ids", page_ids, base.shape[0])
    if count:
        runs.pack(base, _upload(ids, device), 0, count, out, gather=True)
    return out


def _count(page_ids: Ids) -> int:
    return page_ids.numel() if isinstance(page_ids, Tensor) else len(page_ids)


def scatter_pages(packed: Tensor, pool_tensors: Tensor | Sequence[Tensor], page_ids: Ids) -> None:
    """Undo `gather_pages`: write row i of `packed` into page page_ids[i]. The ids must be different.

    packed  uint8 [n, bytes a page], contiguous, on the pool's device or in (pinned) host memory

    Raises ValueError, before anything is written, for a page named twice, ids outside the pool, or a `packed`
    that does not fit.
    """
    tensors = _tensors(pool_tensors)
    runs, base = _runs(tensors), tensors[0]
    _check_rows("packed", packed, _count(page_ids), runs.page_bytes)
    device = base.device
    check_runnable(device)

    def checked(piece: slice) -> Int64s:
        ids = _id_array("page_ids", page_ids[piece])
        _check_inside("page_ids", ids, base.shape[0])
        _check_distinct("page_ids", ids, base.shape[0])
        return ids

    if packed.device == device or not len(packed):
        ids = torch.from_numpy(checked(slice(None)))
        if len(ids):
            runs.pack(base, _upload(ids, device), 0, len(ids), packed, gather=False)
    else:
        _host.fetch(packed, device, checked, functools.partial(runs.pack, base, gather=False))
