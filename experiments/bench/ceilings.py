"""What the card can do at best, in the process that measures the kernels: read, copy, gather, matmul, chase."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from kvarena.experiments.bench.runner import Cell, Competition
from torch import Tensor

READ_BYTES = (2_147_483_648, 1_073_741_824, 536_870_912, 268_435_456, 134_217_728, 33_554_432)
GIB = 2**30


@triton.jit
def _read_kernel(x_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    """Sum a contiguous run of `steps` blocks; one number a program leaves, so nothing but reading counts."""
    i_p = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(steps):
        total += tl.load(x_ptr + (i_p * steps + i) * BLOCK + o)
    tl.store(out_ptr + i_p, tl.sum(total, 0))


def read_call(x: Tensor, out: Tensor, num_bytes: int) -> None:
    """Read the first `num_bytes` of float32 x once."""
    block, steps = 4096, 8
    _read_kernel[(num_bytes // 4 // block // steps,)](x, out, steps, BLOCK=block, num_warps=8)


@triton.jit
def _gather_kernel(
    x_ptr, index_ptr, out_ptr, steps, stride, ROWS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr
):
    """Read rows of FIRST + REST bf16 of one head, named by an index: decode's loads, and nothing else."""
    i_p, i_h = tl.program_id(0), tl.program_id(1)
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, FIRST)
    total = tl.zeros([ROWS, FIRST], tl.float32)
    rest = tl.zeros([ROWS, REST if REST > 0 else 1], tl.float32)
    for i in range(steps):
        row = tl.load(index_ptr + (i_p * steps + i) * ROWS + o_r).to(tl.int64)
        p_row = x_ptr + row[:, None] * stride + i_h * (FIRST + REST)
        total += tl.load(p_row + o_d[None, :]).to(tl.float32)
        if REST > 0:
            rest += tl.load(p_row + FIRST + tl.arange(0, REST)[None, :]).to(tl.float32)
    tl.store(out_ptr + i_p * tl.num_programs(1) + i_h, tl.sum(tl.sum(total, 0), 0) + tl.sum(tl.sum(rest, 0), 0))


@triton.jit
def _chase_kernel(next_ptr, at_ptr, steps):
    """One thread follows a random cycle from where the last launch stopped: every load waits for the one before."""
    at = tl.load(at_ptr)
    for _ in range(steps):
        at = tl.load(next_ptr + at)
    tl.store(at_ptr, at)


def _nothing_to_check() -> None:
    """Ceilings have no oracle: their results are sums of random numbers."""


def ceiling_cells() -> Iterator[Cell]:
    """Read-only at several sizes a launch, copy, bf16 matmul, row gather by run length, dependent loads."""
    device = "cuda"
    for num_bytes in READ_BYTES:

        def read(num_bytes: int = num_bytes) -> Competition:
            copies = max(1, min(8, (4 * GIB) // num_bytes))
            x = torch.randn(copies * num_bytes // 4, device=device)
            out = torch.empty(num_bytes // 4 // 4096, device=device)
            views = [x[i * num_bytes // 4 :] for i in range(copies)]
            calls = [functools.partial(read_call, view, out, num_bytes) for view in views]
            return Competition({"kvarena-read": calls}, _nothing_to_check, {"bytes": num_bytes}, num_bytes / 4.5e6)

        yield Cell({"op": "ceiling", "what": "read", "bytes": num_bytes}, read)
    yield Cell({"op": "ceiling", "what": "copy", "bytes": 4 * GIB}, _copy)
    yield Cell({"op": "ceiling", "what": "matmul", "size": 8192}, _matmul)
    for run in (1, 16, 64, 0):
        yield Cell({"op": "ceiling", "what": "gather", "run": run}, functools.partial(_gather, run))
    for width in (64, 96, 128, 192):  # pages of 16 tokens x 8 heads, as decode reads them
        labels = {"op": "ceiling", "what": "gather_heads", "run": 16, "row_bytes": 2 * width}
        yield Cell(labels, functools.partial(_gather, 16, width, 8))
    for mib in (1, 32, 2048):
        yield Cell({"op": "ceiling", "what": "dependent_load", "mib": mib}, functools.partial(_chase, mib))


def _copy() -> Competition:
    """2 GiB read and as much written, by an elementwise kernel (a graph would give a plain copy to a copy engine)."""
    src = torch.randn(GIB // 2, device="cuda")
    dst = torch.empty_like(src)
    calls = {"torch-mul": [lambda: torch.mul(src, 1.0, out=dst)]}
    return Competition(calls, _nothing_to_check, {"bytes": 4 * GIB}, 1000)


def _matmul() -> Competition:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls = {"torch-matmul": [lambda: torch.matmul(a, b, out=out)]}
    return Competition(calls, _nothing_to_check, {"flops": 2 * 8192**3}, 1400, pause_s=0.08)


def _gather(run: int, width: int = 128, heads: int = 1) -> Competition:
    """2.1 GB of rows of `width` bf16 in random runs of `run` rows, 0 = all in order; one program reads one head."""
    rows, steps, block = 2**23 // heads * 128 // width // 2048 * 2048, 32, 64
    x = torch.randn(rows * heads * width, device="cuda", dtype=torch.bfloat16)
    if run:
        starts = torch.randperm(rows // run, device="cuda") * run
        index = (starts[:, None] + torch.arange(run, device="cuda")).reshape(-1).int()
    else:
        index = torch.arange(rows, device="cuda", dtype=torch.int32)
    programs = rows // steps // block
    out = torch.empty(programs * heads, device="cuda")
    first = 1 << (width.bit_length() - 1)

    def call() -> None:
        sizes = {"ROWS": block, "FIRST": first, "REST": width - first}
        _gather_kernel[(programs, heads)](x, index, out, steps, heads * width, **sizes, num_warps=4)

    return Competition({"kvarena-gather": [call]}, _nothing_to_check, {"bytes": 2.0 * rows * heads * width}, 500)


def _chase(mib: int) -> Competition:
    """A random cycle through `mib` MiB, one int32 a 128-byte line, read once before; us is the time of 1,000 loads."""
    lines = mib * 2**20 // 128
    order = torch.randperm(lines, device="cuda")
    chain = torch.zeros(lines * 32, dtype=torch.int32, device="cuda")
    chain[order * 32] = (torch.roll(order, -1) * 32).int()
    at = torch.zeros(1, dtype=torch.int32, device="cuda")
    chain.sum()
    calls = {"kvarena-chase": [lambda: _chase_kernel[(1,)](chain, at, 1000, num_warps=1)]}
    return Competition(calls, _nothing_to_check, {}, 600)
