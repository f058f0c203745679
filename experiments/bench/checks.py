"""`--part check`: every op on small odd cases in a poisoned pool, before anything is timed; a row a case."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kvarena.experiments.bench.gate import check_rows, oracle, poison, sample_positions
from kvarena.experiments.bench.shapes import make_starts, make_table
from kvarena.kernels import extend_gluon
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import LAYOUTS, KVPool
from torch import Tensor

SLOTS = 65_536
BATCHES = {
    "prompt": ((512,), (0,)),
    "odd": ((133, 77), (200, 0)),
    "short": ((16,) * 3, (1000,) * 3),
    "aligned": ((1024,), (1000,)),
    "ragged": ((1, 7, 300, 64, 129, 1), (0, 500, 33, 64, 1023, 4095)),
}
DECODE_LENS = {"tiny": (1, 15, 16, 17), "long": (4096, 5000, 1, 127, 128, 129), "one": (16_384,)}


def check_cases() -> list[tuple[int, str, str, tuple[int, int], torch.dtype]]:
    """(page size, table kind, layout, heads, dtype) of each case."""
    cases = []
    for page in (1, 4, 16, 64, 128, 256):
        for kind in ("block_table", "req_to_token"):
            for layout in LAYOUTS if page in (1, 16, 64) else ("split",):
                cases.append((page, kind, layout, (32, 8), torch.bfloat16))
    for heads in ((64, 8), (8, 8), (16, 1), (16, 8)):
        cases += [(page, "block_table", "split", heads, torch.bfloat16) for page in (1, 16)]
    return cases + [(page, "block_table", "split", (32, 8), torch.float16) for page in (1, 64)]


def check_rows_of(part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
    """Every `parts`-th case in turn; a wrong one is a row with `error`."""
    for index, case in enumerate(check_cases()):
        if index % parts == part:
            yield _row(*case)


def _row(page: int, kind: str, layout: str, heads: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    labels = {"op": "check", "page": page, "table": kind, "layout": layout, "heads": f"{heads[0]}/{heads[1]}"}
    labels["dtype"] = str(dtype).removeprefix("torch.")
    try:
        shares = {
            "decode": max(_decode(lens, page, kind, layout, heads, dtype) for lens in DECODE_LENS.values()),
            **_extend_all(page, kind, layout, heads, dtype),
        }
    except Exception as error:
        traceback.print_exc()
        return {**labels, "error": f"{type(error).__name__}: {error}"[:300]}
    return {**labels, "bound_share": {name: round(share, 3) for name, share in shares.items()}}


def _pool(page: int, layout: str, num_kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pool = KVPool(2, SLOTS // page - 1, page, num_kv_heads, 128, dtype=dtype, device="cuda", layout=layout)
    k, v = pool.key(1), pool.value(1)
    for cache in (k, v):
        cache.copy_(torch.randn(cache.shape, device="cuda", dtype=dtype))
    return k, v


def _compare(
    run: Callable[[], tuple[Tensor, Tensor]],
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    table: PageTable,
    new: tuple[int, ...],
    lens: tuple[int, ...],
    rows: int,
) -> float:
    """Largest share of the bound over all requests; the same bits twice."""
    out, lse = run()
    again, _ = run()
    if not torch.equal(out, again):
        raise ValueError("expected the same bits twice, found others")
    starts = make_starts(new).tolist()
    worst = 0.0
    for b, (count, length) in enumerate(zip(new, lens, strict=True)):
        index, positions = sample_positions(count, length, rows, q.device)
        at = starts[b] + index
        worst = max(worst, check_rows(f"request {b}", out[at], oracle(q[at], *caches, table, b, positions), lse[at]))
    return worst


def _decode(
    lens: tuple[int, ...], page: int, kind: str, layout: str, heads: tuple[int, int], dtype: torch.dtype
) -> float:
    k, v = _pool(page, layout, heads[1], dtype)
    table = make_table(lens, page, "shuffled", 1, kind=kind, pool_slots=SLOTS)
    for cache in (k, v):
        poison(cache, [table])
    q = torch.randn(len(lens), heads[0], 128, device="cuda", dtype=dtype)

    def run() -> tuple[Tensor, Tensor]:
        out = torch.full_like(q, float("nan"))
        result = paged_decode(q, k, v, table, out=out, return_lse=True)
        return result[0], result[1]

    return _compare(run, q, (k, v), table, (1,) * len(lens), lens, 1)


def _extend_all(page: int, kind: str, layout: str, heads: tuple[int, int], dtype: torch.dtype) -> dict[str, float]:
    backends = ["triton"] + (["gluon"] if extend_gluon.runs_on(torch.device("cuda")) else [])
    k, v = _pool(page, layout, heads[1], dtype)
    clean = (k.clone(), v.clone())
    shares = dict.fromkeys((f"extend-{backend}" for backend in backends), 0.0)
    for new, prefix in BATCHES.values():
        lens = tuple(n + p for n, p in zip(new, prefix, strict=True))
        table = make_table(lens, page, "shuffled", 2, kind=kind, pool_slots=SLOTS)
        for cache, source in zip((k, v), clean, strict=True):
            cache.copy_(source)
            poison(cache, [table])
        starts, padding = make_starts(new), 3
        q = torch.randn(sum(new) + padding, heads[0], 128, device="cuda", dtype=dtype)
        for backend in backends:
            run = _extend_run(backend, q, (k, v), table, starts, padding)
            share = _compare(run, q, (k, v), table, new, lens, 40)
            shares[f"extend-{backend}"] = max(shares[f"extend-{backend}"], share)
    return shares


def _extend_run(
    backend: str, q: Tensor, caches: tuple[Tensor, Tensor], table: PageTable, starts: Tensor, padding: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    def run() -> tuple[Tensor, Tensor]:
        out = torch.full_like(q, float("nan"))
        result = paged_extend(q, *caches, table, starts, out=out, return_lse=True, backend=backend)
        _check_padding(result[0][-padding:], result[1][-padding:])
        return result[0], result[1]

    return run


def _check_padding(out: Tensor, lse: Tensor) -> None:
    if out.any() or not torch.isneginf(lse).all():
        raise ValueError("expected zeros and lse -inf for tokens behind the last request, found others")
