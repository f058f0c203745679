"""`--part safety`: what the kernels may never do, on this card; a row a check, with `error` where one failed.

guards   writes, copies, slots and merges between guard bands that must keep their bits, pools poisoned around them
far      pages at the end of a pool of more than 2^31 numbers: the bits of the same call on a small pool
graphs   a captured graph replayed after lengths, pages and contents changed: the bits of an eager call
repeats  the same call 100 times, the L2 cache flushed between: one set of bits
draws    10,000 random calls against a float64 oracle (`kvarena.experiments.bench.draws`)
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kvarena.experiments.bench.draws import DTYPES, draw_rows
from kvarena.experiments.bench.shapes import make_starts, make_table
from kvarena.kernels import copy, extend_gluon, reference
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.merge import merge_states
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import KVPool
from kvarena.kernels.slots import compute_slot_mapping
from kvarena.kernels.store import store_kv
from torch import Tensor

DRAWS = 10_000
HEADS, DIM = 8, 128
FAR_NUMBERS = 2**31
LENS, NEW = (700, 64, 0, 129), (200, 64, 0, 1)
SPREAD = 4096  # slots that the small pool has
REPEATS = 100


def safety_rows(part: int, parts: int) -> Iterator[dict[str, Any]]:
    """Every `parts`-th check in turn."""
    checks = [*_guard_checks(), *_far_checks(), *_graph_checks(), *_repeat_checks()]
    for index, (labels, check) in enumerate(checks):
        if index % parts == part:
            yield _row(labels, check)
    yield from draw_rows(part, parts, DRAWS)


def _row(labels: dict[str, Any], check: Callable[[], None]) -> dict[str, Any]:
    row = {"op": "safety", **labels}
    try:
        check()
        torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        return {**row, "error": f"{type(error).__name__}: {error}"[:300]}
    return {**row, "passed": True}


def expect_equal(what: str, found: Tensor, wanted: Tensor) -> None:
    """Raise ValueError unless both have the same bits (NaN included)."""
    if found.shape != wanted.shape or not torch.equal(_bytes(found), _bytes(wanted)):
        raise ValueError(f"{what}: expected the same bits, found others")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


_Check = tuple[dict[str, Any], Callable[[], None]]


# --- guards ------------------------------------------------------------------------------------------------


def _guard_checks() -> Iterator[_Check]:
    for layout in ("split", "fused", "hnd", "page_major"):
        for dtype in ("bfloat16", "e4m3", "int8"):
            for page in (1, 16):
                labels = {"check": "guards", "what": "store_kv", "layout": layout, "dtype": dtype, "page": page}
                yield labels, partial(_guard_store, layout, DTYPES[dtype], page)
        yield {"check": "guards", "what": "copies", "layout": layout}, partial(_guard_copies, layout)
    for count in (1, 37, 256, 1000):
        yield {"check": "guards", "what": "slots", "tokens": count}, partial(_guard_slots, count)
        yield {"check": "guards", "what": "merge", "rows": count}, partial(_guard_merge, count)
    yield {"check": "guards", "what": "decode workspace"}, _guard_workspace


def _guard_store(layout: str, dtype: torch.dtype, page: int) -> None:
    """Only the named slots of one layer change; slots of -1, past the pool, and rows behind the list write nothing."""
    pool = KVPool(2, 4096 // page, page, HEADS, DIM, dtype=dtype, device="cuda", layout=layout)
    for storage in pool._storage:
        storage.view(torch.uint8).random_(0, 256)
    wanted = [storage.clone() for storage in pool._storage]
    twin = KVPool(2, 4096 // page, page, HEADS, DIM, dtype=dtype, device="cuda", layout=layout)
    twin._storage = wanted
    k, v = (torch.randn(300, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(4096, device="cuda")[:300].long()
    slots[::7] = -1
    slots[5::50] = pool.key(1).shape[0] * page + 3
    written = (slots >= 0) & (slots < pool.key(1).shape[0] * page)
    scales = {} if dtype == torch.bfloat16 else {"k_scale": 0.02, "v_scale": 0.03}
    store_kv(k, v, pool.key(1), pool.value(1), slots, **scales)
    at = slots[written]
    for rows, cache, source in ((k, twin.key(1), pool.key(1)), (v, twin.value(1), pool.value(1))):
        if dtype == torch.bfloat16:
            cache[at // page, at % page] = rows[written]
        else:  # rounding is the store tests' matter: take what was written, and see that nothing else was
            cache.view(torch.uint8)[at // page, at % page] = source.view(torch.uint8)[at // page, at % page]
    for found, untouched in zip(pool._storage, wanted, strict=True):
        expect_equal("pool", found, untouched)


def _guard_copies(layout: str) -> None:
    """copy, gather, scatter: named pages of all layers and nothing else; packed rows between guard rows."""
    pool = KVPool(3, 200, 16, HEADS, DIM, dtype=torch.bfloat16, device="cuda", layout=layout)
    for storage in pool._storage:
        storage.view(torch.uint8).random_(0, 256)
    wanted = [tensor.clone() for tensor in pool.layers]
    ids = torch.randperm(200) + 1
    src, dst = ids[:40], ids[30:70]  # overlapping: ten targets are sources too
    copy.copy_pages(pool.layers, src, dst)
    reference.copy_pages(wanted, src, dst)
    for found, exact in zip(pool.layers, wanted, strict=True):
        expect_equal("copy_pages", found, exact)
    guarded = torch.full((44, pool.bytes_per_page), 0xA5, dtype=torch.uint8, device="cuda")
    packed = guarded[2:-2]
    copy.gather_pages(pool.layers, src, packed)
    expect_equal("gather_pages", packed, reference.gather_pages(pool.layers, src))
    copy.scatter_pages(packed, pool.layers, dst)
    reference.scatter_pages(packed, wanted, dst)
    for found, exact in zip(pool.layers, wanted, strict=True):
        expect_equal("scatter_pages", found, exact)
    if not (guarded[:2] == 0xA5).all() or not (guarded[-2:] == 0xA5).all():
        raise ValueError("gather_pages: expected the rows around the output untouched, found others")


def _guard_slots(count: int) -> None:
    table = make_table((count, 70), 16, "shuffled", 1, pool_slots=65_536)
    starts = torch.tensor([0, count, count + 9], dtype=torch.int32, device="cuda")
    positions = torch.cat([torch.arange(count), torch.arange(61, 70), torch.tensor([-1, 10**6])]).cuda()
    guarded = torch.full((len(positions) + 20,), -77, dtype=torch.int64, device="cuda")
    out, wanted = guarded[8:-8], torch.empty(len(positions) + 4, dtype=torch.int64, device="cuda")
    compute_slot_mapping(table, starts, positions, out)
    reference.compute_slot_mapping(table, starts, positions, wanted)
    expect_equal("slots", out, wanted)
    if not (guarded[:8] == -77).all() or not (guarded[-8:] == -77).all():
        raise ValueError("compute_slot_mapping: expected what lies around the output untouched, found others")


def _guard_merge(count: int) -> None:
    """A side without keys may hold anything: NaN there stays out."""
    outs = [torch.randn(count, HEADS, DIM, device="cuda", dtype=torch.float32) for _ in range(2)]
    lses = [torch.randn(count, HEADS, device="cuda") for _ in range(2)]
    lses[0][::3], lses[1][::5] = -math.inf, -math.inf
    for out, lse in zip(outs, lses, strict=True):
        out[torch.isneginf(lse)] = math.nan
    out, lse = merge_states(outs[0], lses[0], outs[1], lses[1])
    exact, exact_lse = reference.merge_states(outs[0].double(), lses[0].double(), outs[1].double(), lses[1].double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def _guard_workspace() -> None:
    """Split decode stays inside the workspace that it asked for."""
    from kvarena.kernels.decode import decode_workspace_size

    k, v = _caches(16)
    table, q = make_table(LENS, 16, "shuffled", 3, pool_slots=SPREAD), _queries(len(LENS))
    size = decode_workspace_size(len(LENS), q.shape[1], DIM, 5)
    guarded = torch.full((size + 64,), 12345.0, device="cuda")
    found = paged_decode(q, k, v, table, num_splits=5, workspace=guarded[32:-32])
    expect_equal("decode", found, paged_decode(q, k, v, table, num_splits=5))  # type: ignore[arg-type]
    if not (guarded[:32] == 12345.0).all() or not (guarded[-32:] == 12345.0).all():
        raise ValueError("paged_decode: expected what lies around the workspace untouched, found others")


# --- calls on a pool of SPREAD slots, and the same far away ---------------------------------------------------


def _caches(page: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(page)
    shape = (SPREAD // page, page, HEADS, DIM)
    k, v = (torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(2))
    return k, v


def _queries(rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(5)
    return torch.randn(rows, 4 * HEADS, DIM, device="cuda", generator=generator, dtype=torch.bfloat16)


def _backends() -> list[str]:
    return ["triton"] + (["gluon"] if extend_gluon.runs_on(torch.device("cuda")) else [])


def _attention_calls(page: int) -> dict[str, Callable[[Tensor, Tensor, PageTable], Any]]:
    """Decode, split decode, and extend by each backend, as functions of a pool and a table."""
    starts, q, rows = make_starts(NEW), _queries(sum(NEW)), _queries(len(LENS))
    calls: dict[str, Callable[[Tensor, Tensor, PageTable], Any]] = {
        "decode": lambda k, v, t: paged_decode(rows, k, v, t, return_lse=True, num_splits=1),
        "decode splits": lambda k, v, t: paged_decode(rows, k, v, t, return_lse=True, num_splits=4),
    }
    for backend in _backends():
        extend = partial(paged_extend, q, query_start_loc=starts, return_lse=True, backend=backend)
        calls[f"extend {backend}"] = extend
    return calls


def _far_checks() -> Iterator[_Check]:
    for page in (1, 16, 64):
        for kind in ("block_table", "req_to_token"):
            yield (
                {"check": "far", "what": "attention", "page": page, "table": kind},
                partial(_far_attention, page, kind),
            )
        yield {"check": "far", "what": "store, slots, copies", "page": page}, partial(_far_writes, page)


def _far_pool(page: int) -> tuple[Tensor, Tensor, int]:
    """K and V of more than 2^31 numbers each, NaN, and the first of the SPREAD slots at their end, as a page."""
    pages = FAR_NUMBERS // (page * HEADS * DIM) + SPREAD // page
    shape = (pages, page, HEADS, DIM)
    k, v = (torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return k, v, pages - SPREAD // page


def _moved(table: PageTable, pages: int, page: int) -> PageTable:
    by = pages if table.tokens_per_entry == page else pages * page
    return PageTable(table.entries + by, table.rows, table.seq_lens, table.tokens_per_entry)


def _far_attention(page: int, kind: str) -> None:
    near, (k, v, first) = _caches(page), _far_pool(page)
    k[first:], v[first:] = near
    table = make_table(LENS, page, "shuffled", 9, kind=kind, pool_slots=SPREAD)
    for name, call in _attention_calls(page).items():
        wanted, found = call(*near, table), call(k, v, _moved(table, first, page))
        for part, (a, b) in zip(("out", "lse"), zip(found, wanted, strict=True), strict=True):
            if not torch.isfinite(a[: sum(NEW)] if "extend" in name else a[:2]).all():
                raise ValueError(f"{name}: expected finite numbers, found others")
            expect_equal(f"{name} {part}", a, b)


def _far_writes(page: int) -> None:
    k, v, first = _far_pool(page)
    table = _moved(make_table((SPREAD // 2,), page, "shuffled", 4, pool_slots=SPREAD), first, page)
    starts, positions = make_starts((SPREAD // 2,)), torch.arange(SPREAD // 2, device="cuda")
    slots = compute_slot_mapping(table, starts, positions, torch.empty_like(positions))
    if int(slots.min()) < first * page:
        raise ValueError(f"slots: expected all from {first * page} on, found {int(slots.min())}")
    rows = [torch.randn(SPREAD // 2, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    store_kv(rows[0], rows[1], k, v, slots)
    for cache, wanted in zip((k, v), rows, strict=True):
        expect_equal("store_kv", cache[slots // page, slots % page], wanted)
        if torch.isfinite(cache[: SPREAD // page]).any():
            raise ValueError("store_kv: expected nothing at the start of the pool, found numbers")
    pages = torch.unique(slots // page).cpu()
    layers = (k.flatten(1).unsqueeze(1), v.flatten(1).unsqueeze(1))
    packed = copy.gather_pages(layers, pages)
    expect_equal("gather_pages", packed, reference.gather_pages(layers, pages))
    targets = torch.arange(1, len(pages) + 1)
    copy.copy_pages(layers, pages, targets)
    expect_equal("copy_pages", copy.gather_pages(layers, targets), packed)


# --- graphs --------------------------------------------------------------------------------------------------


def _graph_checks() -> Iterator[_Check]:
    for page in (1, 16, 64):
        yield {"check": "graphs", "what": "attention", "page": page}, partial(_graph_attention, page)


def _graph_attention(page: int) -> None:
    """Lengths, pages, contents and queries change under the captured graph; replays give the bits of eager calls."""
    k, v = _caches(page)
    table = make_table(LENS, page, "shuffled", 9, pool_slots=SPREAD)
    for name, call in _attention_calls(page).items():
        call(k, v, table)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = call(k, v, table)
        for seed in range(3):
            _change(table, k, page, seed, shorter="extend" not in name)
            out.fill_(math.nan), lse.fill_(math.nan)
            graph.replay()
            wanted = call(k, v, table)
            expect_equal(f"{name} out, replay {seed}", out, wanted[0])
            expect_equal(f"{name} lse, replay {seed}", lse, wanted[1])


def _change(table: PageTable, k: Tensor, page: int, seed: int, shorter: bool) -> None:
    fresh = make_table(LENS, page, "shuffled", 50 + seed, pool_slots=SPREAD)
    table.entries.copy_(fresh.entries)
    lens = [max(0, n - 11 * seed) for n in LENS] if shorter else LENS
    table.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
    k.normal_()


# --- repeats ---------------------------------------------------------------------------------------------------


def _repeat_checks() -> Iterator[_Check]:
    for page in (1, 16, 64):
        yield {"check": "repeats", "what": "attention", "page": page, "times": REPEATS}, partial(_repeat, page)


def _repeat(page: int) -> None:
    k, v = _caches(page)
    table = make_table(LENS, page, "shuffled", 9, pool_slots=SPREAD)
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    for name, call in _attention_calls(page).items():
        wanted = [tensor.clone() for tensor in call(k, v, table)]
        for turn in range(REPEATS):
            flush.fill_(turn)
            for found, exact in zip(call(k, v, table), wanted, strict=True):
                expect_equal(f"{name}, run {turn}", found, exact)
