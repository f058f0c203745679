"""Writes, copies, slots (graphs), and what is measured by a host clock: swap, launch cost, the adapter's step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kvarena.experiments.bench.adapter_cells import adapter_rows
from kvarena.experiments.bench.attention_cells import pool_views
from kvarena.experiments.bench.runner import Cell, Competition
from kvarena.experiments.bench.shapes import EXTEND_SHAPES, POOL_SLOTS, make_starts, make_table
from kvarena.experiments.bench.timing import host_all, wall_all
from kvarena.kernels import copy, extend_gluon, reference
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.pool import KVPool
from kvarena.kernels.slots import compute_slot_mapping
from kvarena.kernels.store import store_kv
from torch import Tensor

ROW_BYTES = 8 * 128 * 2  # one token's K (or V): 8 heads of 128 in bf16
SWAP_BYTES = 65_536_000


def memory_cells() -> Iterator[Cell]:
    """store_kv, copy_pages and compute_slot_mapping, timed on the device."""
    for tokens in (256, 8192, 65_536):
        for placement in ("shuffled", "in_order"):
            labels = {"op": "store", "tokens": tokens, "placement": placement}
            yield Cell(labels, functools.partial(store_competition, tokens, placement))
    for layers in (1, 32):
        labels = {"op": "copy_pages", "pages": 1000 if layers == 1 else 100, "page": 16, "layers": layers}
        yield Cell(labels, functools.partial(copy_competition, layers))
    for batch, new in ((256, 1), (1, 8192)):
        for kind in ("block_table", "req_to_token"):
            labels = {"op": "slot_mapping", "point": f"{batch}x{new}", "table": kind, "page": 16}
            yield Cell(labels, functools.partial(slots_competition, batch, new, kind))
    for shape in ("8192/0x1", "mix16"):
        yield Cell({"op": "plan_extend", "point": shape}, functools.partial(plan_competition, shape))


def store_competition(tokens: int, placement: str) -> Competition:
    """K and V rows of new tokens into slots of a page-1 pool; 16 sources and slot lists in rotation."""
    k_cache, v_cache = pool_views(1)
    sets = max(1, min(16, 2**20 // tokens))
    calls, first = [], None
    for seed in range(sets):
        k, v = (torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        slots = make_table((tokens,), 1, placement, seed).slots(0)
        calls.append(functools.partial(store_kv, k, v, k_cache, v_cache, slots))
        first = first or (k, v, slots)

    def gate() -> None:
        assert_equal("store_kv", first, calls[0], (k_cache, v_cache))

    return Competition({"kvarena": calls}, gate, {"bytes": 4.0 * tokens * ROW_BYTES}, max(2.0, tokens * 2.1e-3))


def assert_equal(
    name: str, case: tuple[Tensor, Tensor, Tensor] | None, call: Callable[[], object], caches: tuple[Tensor, Tensor]
) -> None:
    """Run a store and compare the rows that it wrote, bit for bit, and the sum of all others."""
    if case is None:
        raise ValueError(f"{name}: nothing to check")
    call()
    for source, cache in zip(case[:2], caches, strict=True):
        written = cache.view(-1, *cache.shape[2:])[case[2]]
        if not torch.equal(written, source):
            raise ValueError(f"{name}: expected the rows of the source, found others")


def copy_competition(layers: int) -> Competition:
    """Random pages to random others, K and V of all layers in one launch; ids uploaded beforehand."""
    pages, count = (32_768, 1000) if layers == 1 else (4096, 100)
    pool = KVPool(layers, pages, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    for tensor in pool.layers:
        tensor.normal_()
    runs = copy._runs(list(pool.layers))
    generator = torch.Generator("cuda").manual_seed(0)
    ids = [torch.randperm(pages, device="cuda", generator=generator)[: 2 * count].int() for _ in range(8)]
    calls = [
        lambda i=i: copy._copy_kernel[runs.grid(count)](pool.layers[0], runs.table, i, count, **runs.constants())
        for i in ids
    ]

    def gate() -> None:
        wanted = [tensor.clone() for tensor in pool.layers]
        reference.copy_pages(wanted, ids[0][:count].tolist(), ids[0][count:].tolist())
        copy.copy_pages(pool.layers, ids[0][:count].tolist(), ids[0][count:].tolist())
        if not all(torch.equal(a, b) for a, b in zip(wanted, pool.layers, strict=True)):
            raise ValueError("copy_pages: expected the reference's pool, found another")

    num_bytes = 2.0 * count * pool.bytes_per_page
    return Competition({"kvarena": calls}, gate, {"bytes": num_bytes}, num_bytes / 3.4e6)


def slots_competition(batch: int, new: int, kind: str) -> Competition:
    """One step's slot mapping: a decode batch, or one prefill chunk."""
    lens = (4096,) * batch if new == 1 else (new,)
    table = make_table(lens, 16, "shuffled", 0, kind=kind)
    starts = make_starts((new,) * batch)
    positions = torch.arange(new, device="cuda").repeat(batch) + (lens[0] - new)
    out, wanted = (torch.empty(batch * new, dtype=torch.int64, device="cuda") for _ in range(2))

    def call() -> None:
        compute_slot_mapping(table, starts, positions, out)

    def gate() -> None:
        call()
        reference.compute_slot_mapping(table, starts, positions, wanted)
        if not torch.equal(out, wanted):
            raise ValueError("compute_slot_mapping: expected the reference's slots, found others")

    return Competition({"kvarena": [call]}, gate, {}, 3.0)


def plan_competition(shape_name: str) -> Competition:
    """The extend work list of one step."""
    shape = EXTEND_SHAPES[shape_name]
    table, starts = make_table(shape.lens, 16, "shuffled", 0), make_starts(shape.new)
    tokens = sum(shape.new)

    def gate() -> None:
        plan = extend_gluon.plan_extend(table, starts, tokens, 32, 8)
        listed = plan.tiles[: int(plan.state[0]), 1].sum().item()
        if listed != 8 * tokens:
            raise ValueError(f"plan_extend: expected {8 * tokens} (token, KV head) pairs, found {listed}")

    call = lambda: extend_gluon.plan_extend(table, starts, tokens, 32, 8)  # noqa: E731
    return Competition({"kvarena": [call]}, gate, {}, 6.0)


def swap_rows() -> Iterator[dict[str, Any]]:
    """Wall clock between pool and pinned memory, each way, 65 MB and eight times that, beside what bounds it.

    "one copy" is a plain copy of as many bytes; "pack and copy" one launch and one copy, with nothing checked and the
    ids on the device beforehand: what a transfer would take if the host had nothing to do and nothing overlapped. Both
    page sizes take turns, so that a slow moment of the host meets all of them.
    """
    for num_bytes, rounds in ((SWAP_BYTES, 20), (8 * SWAP_BYTES, 8)):
        ways = {(page, *key): call for page in (1, 16) for key, call in _swap_ways(page, num_bytes).items()}
        for (page, way, kernel), timed in wall_all(ways, rounds=rounds).items():
            labels = {"op": "swap", "page": page, "mb": round(num_bytes / 1e6), "way": way, "kernel": kernel}
            found = timed.row()
            yield {**labels, **found, "gbps": round(num_bytes / found["us"] / 1e3, 1)}


def _swap_ways(page: int, num_bytes: int) -> dict[tuple[str, str], Callable[[], object]]:
    """(way, kernel): transfer of random pages of a pool of their own, checked before anything is timed."""
    pool = KVPool(1, POOL_SLOTS // 4 // page, page, 8, 128, dtype=torch.bfloat16, device="cuda")
    count = num_bytes // pool.bytes_per_page
    for tensor in pool.layers:
        tensor.normal_()
    ids = torch.randperm(pool.num_pages)[:count] + 1
    host = torch.empty((count, pool.bytes_per_page), dtype=torch.uint8, pin_memory=True)
    _check_swap(pool, ids, host)
    device = torch.empty_like(host, device="cuda")
    return {
        ("out", "kvarena"): functools.partial(copy.gather_pages, pool.layers, ids, host),
        ("in", "kvarena"): functools.partial(copy.scatter_pages, host, pool.layers, ids),
        ("out", "one copy"): functools.partial(host.copy_, device, non_blocking=True),
        ("in", "one copy"): functools.partial(device.copy_, host, non_blocking=True),
        **_pack_and_copy(pool, ids, host, device),
    }


def _pack_and_copy(
    pool: KVPool, ids: Tensor, host: Tensor, device: Tensor
) -> dict[tuple[str, str], Callable[[], object]]:
    """One launch and one copy each way, through scratch memory `device`."""
    runs, base, on_device = copy._runs(list(pool.layers)), pool.layers[0], ids.int().cuda()

    def pack(gather: bool) -> None:
        runs.pack(base, on_device, 0, len(ids), device, gather=gather)

    def out() -> None:
        pack(gather=True)
        host.copy_(device, non_blocking=True)

    def back() -> None:
        device.copy_(host, non_blocking=True)
        pack(gather=False)

    return {("out", "pack and copy"): out, ("in", "pack and copy"): back}


def _check_swap(pool: KVPool, ids: Tensor, host: Tensor) -> None:
    """Out to `host` and back, bit for bit; ValueError where a byte differs."""
    wanted = copy.gather_pages(pool.layers, ids)
    copy.gather_pages(pool.layers, ids, host)
    torch.cuda.synchronize()
    if not torch.equal(host, wanted.cpu()):
        raise ValueError("gather_pages: expected the same bytes on host and device, found others")
    for tensor in pool.layers:
        tensor[ids.cuda()] = 0
    copy.scatter_pages(host, pool.layers, ids)
    if not torch.equal(copy.gather_pages(pool.layers, ids), wanted):
        raise ValueError("scatter_pages: expected the pages that were gathered, found others")


def host_rows() -> Iterator[dict[str, Any]]:
    """Host time of eager calls: what a step pays a launch when no graph is used."""
    k_cache, v_cache = pool_views(16)
    table, starts = make_table((2048,) * 64, 16, "shuffled", 0), make_starts((1,) * 64)
    long_table = make_table((131_072,), 16, "shuffled", 0)
    q, out = (torch.randn(64, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(64, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = make_table((64,), 1, "shuffled", 0).slots(0)
    positions = torch.zeros(64, dtype=torch.int64, device="cuda")
    mapping = torch.empty(64, dtype=torch.int64, device="cuda")
    plan = extend_gluon.plan_extend(table, starts, 64, 32, 8)
    calls: dict[str, Callable[[], object]] = {
        "decode": lambda: paged_decode(q, k_cache, v_cache, table, out=out, num_splits=1),
        "decode_split": lambda: paged_decode(q[:1], k_cache, v_cache, long_table, out=out[:1]),
        "extend_gluon": lambda: paged_extend(q, k_cache, v_cache, table, starts, out=out, plan=plan),
        "extend_triton": lambda: paged_extend(q, k_cache, v_cache, table, starts, out=out, backend="triton"),
        "plan_extend": lambda: extend_gluon.plan_extend(table, starts, 64, 32, 8),
        "store": lambda: store_kv(k, v, k_cache, v_cache, slots),
        "slot_mapping": lambda: compute_slot_mapping(table, starts, positions, mapping),
    }
    for name, timed in host_all(calls).items():
        found = timed.row()
        yield {"op": "host", "what": name, "kernel": "kvarena", "us": found["us"], "spread": found["spread"]}
    yield from adapter_rows()
