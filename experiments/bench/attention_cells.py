"""Decode and extend cells: the grids, and what is varied one at a time around them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from kvarena.experiments.bench.gate import check_rows, oracle, sample_positions
from kvarena.experiments.bench.peers import Case, Peer
from kvarena.experiments.bench.recorded import Layout, layout_table, load_layouts
from kvarena.experiments.bench.runner import Cell, Competition
from kvarena.experiments.bench.shapes import (
    DECODE_POINTS,
    EXTEND_SHAPES,
    POOL_SLOTS,
    ExtendShape,
    make_starts,
    make_table,
)
from kvarena.kernels import extend_gluon
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.page_table import PageTable
from torch import Tensor

HEADS = (32, 8)
PAGES = (1, 16, 64)
OTHER_PAGES = (2, 4, 8, 32, 128, 256)
L2_SAFE_BYTES = 400e6  # below this much KV a call, more placements rotate, so that L2 never holds what comes next
PLACEMENTS = 4  # at least: one draw of shuffled pages can be 3 % slower than another
AGED_REQUESTS, AGED_NEW = 16, 512  # of a recorded batch, extended: the requests, and the last tokens of each
POOL_NUMBERS = POOL_SLOTS * 8 * 128
QUANTISED = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


@functools.cache
def _storage(which: int, dtype: torch.dtype) -> Tensor:
    """One flat pool, made once a process: random normal numbers (int8: scaled to fill its range)."""
    generator = torch.Generator("cuda").manual_seed(which)
    flat = torch.randn(POOL_NUMBERS, device="cuda", generator=generator, dtype=torch.bfloat16)
    if dtype == torch.int8:
        return (flat * 32).clamp(-127, 127).to(dtype)
    return flat.to(dtype)


def pool_views(
    page_size: int, layout: str = "split", heads: int = 8, dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """K and V [P, S, HKV, D] over the same bytes, in one of the layouts of KVPool."""
    flats = [_storage(which, dtype) for which in range(2)]
    pages = POOL_SLOTS * 1024 // (heads * dim * page_size)
    if layout == "split":
        k, v = (flat[: pages * page_size * heads * dim].view(pages, page_size, heads, dim) for flat in flats)
    elif layout == "hnd":
        k, v = (flat[: pages * page_size * heads * dim].view(pages, heads, page_size, dim) for flat in flats)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    elif layout == "fused":
        both = flats[0][: pages // 2 * page_size * heads * 2 * dim].view(pages // 2, page_size, heads, 2 * dim)
        k, v = both[..., :dim], both[..., dim:]
    else:
        both = flats[0][: pages // 2 * page_size * heads * 2 * dim].view(pages // 2, 2, page_size, heads, dim)
        k, v = both[:, 0], both[:, 1]
    return k, v


def _gate(
    caches: tuple[Tensor, Tensor],
    q: Tensor,
    table: PageTable,
    new: Sequence[int],
    lens: Sequence[int],
    runs: dict[str, Callable[[], object]],
    outs: dict[str, Tensor],
    scale: float = 1.0,
) -> None:
    """Run each competitor once into NaN, then compare first, middle and last request with the float64 oracle."""
    for name, run in runs.items():
        outs[name].fill_(float("nan"))
        run()
        if not torch.isfinite(outs[name]).all():
            raise ValueError(f"{name}: expected finite outputs everywhere, found NaN or Inf")
    starts = make_starts(tuple(new)).tolist()
    for b in sorted({0, len(lens) // 2, len(lens) - 1}):
        index, positions = sample_positions(new[b], lens[b], 12, q.device)
        k, v = (cache if scale == 1.0 else cast(Tensor, _Dequantised(cache, scale)) for cache in caches)
        wanted = oracle(q[starts[b] + index], k, v, table, b, positions)
        for name, out in outs.items():
            check_rows(f"{name}, request {b}", out[starts[b] + index], wanted)


class _Dequantised:
    """A quantised cache that gives numbers when it is indexed."""

    def __init__(self, cache: Tensor, scale: float) -> None:
        self._cache, self._scale = cache, scale
        self.shape = cache.shape

    def __getitem__(self, index: Any) -> Tensor:
        return self._cache[index].float() * self._scale


def _tables(
    lens: Sequence[int], kv_bytes: float, page: int, placement: str, kind: str, slots: int, rotate: bool
) -> list[PageTable]:
    count = max(PLACEMENTS, min(16, int(L2_SAFE_BYTES / kv_bytes) + 1)) if rotate else 1
    return [
        make_table(tuple(lens), page, placement, seed, kind=kind, pool_slots=min(slots, POOL_SLOTS))
        for seed in range(count)
    ]


def decode_competition(
    lens: Sequence[int],
    page: int,
    *,
    heads: tuple[int, int] = HEADS,
    dim: int = 128,
    layout: str = "split",
    placement: str = "shuffled",
    kinds: Sequence[str] = ("block_table", "req_to_token"),
    dtype: str = "bf16",
    peers: Sequence[Peer] = (),
    dry: bool = False,
) -> Competition:
    """Ours by each kind of table, and the peers by the block table, on the same bytes."""
    k, v = pool_views(page, layout, heads[1], dim, QUANTISED.get(dtype, torch.bfloat16))
    scale = {"bf16": 1.0, "e4m3": 0.5, "int8": 1 / 32}[dtype]
    scales: dict[str, Any] = {} if dtype == "bf16" else {"k_scale": scale, "v_scale": scale}
    num_bytes = 2.0 * heads[1] * dim * sum(lens) * k.element_size()
    q = torch.randn(len(lens), heads[0], dim, device="cuda", dtype=torch.bfloat16)
    slots = k.shape[0] * page
    ones = (1,) * len(lens)
    peers = [] if dry else [peer for peer in peers if peer.takes(ones, lens, page)]
    tables = {kind: _tables(lens, num_bytes, page, placement, kind, slots, not dry) for kind in kinds}
    names = [f"kvarena-{kind}" for kind in kinds] + [peer.name for peer in peers]
    outs = {name: torch.empty_like(q) for name in names}
    calls: dict[str, Sequence[Callable[[], object]]] = {}
    for kind in kinds:
        out = outs[f"kvarena-{kind}"]
        calls[f"kvarena-{kind}"] = [
            functools.partial(paged_decode, q, k, v, table, out=out, **scales) for table in tables[kind]
        ]
    for peer in peers:
        shared = tables.get("block_table") or _tables(lens, num_bytes, page, placement, "block_table", slots, True)
        calls[peer.name] = [peer.call(Case(q, k, v, t, ones, tuple(lens)), outs[peer.name]) for t in shared]
    first = tables[kinds[0]][0]

    def gate() -> None:
        _gate((k, v), q, first, ones, lens, {n: c[0] for n, c in calls.items()}, outs, scale)

    return Competition(calls, gate, {"bytes": num_bytes}, max(10.0, num_bytes / 4.2e6))


def recorded_competition(layout: Layout, placement: str = "recorded", dry: bool = False) -> Competition:
    """Ours by each kind of table on a recorded layout, or on its pages placed otherwise, rotated over disjoint places.

    Bytes are counted a request: what requests share is counted once for each of them, and may come from L2.
    """
    num_bytes = 2.0 * HEADS[1] * 128 * 2 * sum(layout.lens)
    most = 1 if dry else max(1, int(L2_SAFE_BYTES / num_bytes) + 1)
    if placement == "shuffled":
        places = [layout.placed(placement, POOL_SLOTS, seed) for seed in range(most)]
    else:
        moved = layout if placement == "recorded" else layout.placed(placement, POOL_SLOTS)
        places = moved.copies(POOL_SLOTS, most)
    tables = {kind: [layout_table(place, kind) for place in places] for kind in ("block_table", "req_to_token")}
    return _table_competition(layout.lens, layout.page_size, tables, num_bytes)


def _table_competition(
    lens: Sequence[int], page: int, tables: dict[str, list[PageTable]], num_bytes: float
) -> Competition:
    """Ours on given tables of the shared pool, without peers."""
    k, v = pool_views(page)
    q = torch.randn(len(lens), HEADS[0], 128, device="cuda", dtype=torch.bfloat16)
    outs = {f"kvarena-{kind}": torch.empty_like(q) for kind in tables}
    calls = {
        f"kvarena-{kind}": [functools.partial(paged_decode, q, k, v, t, out=outs[f"kvarena-{kind}"]) for t in found]
        for kind, found in tables.items()
    }
    first = next(iter(tables.values()))[0]

    def gate() -> None:
        _gate((k, v), q, first, (1,) * len(lens), lens, {name: c[0] for name, c in calls.items()}, outs)

    return Competition(calls, gate, {"bytes": num_bytes}, max(10.0, num_bytes / 4.2e6))


def extend_competition(
    shape_name: str,
    page: int,
    *,
    heads: tuple[int, int] = HEADS,
    kinds: Sequence[str] = ("block_table",),
    backends: Sequence[str] = ("gluon", "triton"),
    placement: str = "shuffled",
    peers: Sequence[Peer] = (),
    dry: bool = False,
) -> Competition:
    """Gluon with its work list made beforehand, as peers' metadata is; plain Triton beside it."""
    shape = EXTEND_SHAPES[shape_name]
    k, v = pool_views(page, heads=heads[1])
    q = torch.randn(sum(shape.new), heads[0], 128, device="cuda", dtype=torch.bfloat16)
    starts = make_starts(shape.new)
    slots = k.shape[0] * page
    outs: dict[str, Tensor] = {}
    calls: dict[str, Sequence[Callable[[], object]]] = {}
    options: dict[str, Any]
    for kind in kinds:
        table = make_table(shape.lens, page, placement, 5, kind=kind, pool_slots=min(slots, POOL_SLOTS))
        plan = extend_gluon.plan_extend(table, starts, q.shape[0], *heads)
        for backend in backends:
            name = f"kvarena-{backend}" if kind == "block_table" else f"kvarena-{backend}-{kind}"
            outs[name] = torch.empty_like(q)
            options = {"out": outs[name], "backend": backend, "plan": plan}
            calls[name] = [functools.partial(paged_extend, q, k, v, table, starts, **options)]
    table = make_table(shape.lens, page, placement, 5, pool_slots=min(slots, POOL_SLOTS))
    for peer in [] if dry else [peer for peer in peers if peer.takes(shape.new, shape.lens, page)]:
        outs[peer.name] = torch.empty_like(q)
        calls[peer.name] = [peer.call(Case(q, k, v, table, shape.new, shape.lens), outs[peer.name])]
    flops = shape.flops(heads[0])

    def gate() -> None:
        _gate((k, v), q, table, shape.new, shape.lens, {n: c[0] for n, c in calls.items()}, outs)

    return Competition(calls, gate, {"flops": flops}, flops / 5e8, pause_s=0.05, graph_us=10_000)


def recorded_extend_competition(layout: Layout, placement: str) -> Competition:
    """Ours by each kind of table: the last tokens of recorded requests over what the pool held of them before."""
    shape = _recorded_shape(layout)
    place = layout if placement == "recorded" else layout.placed(placement, POOL_SLOTS)
    tables = {kind: layout_table(place, kind) for kind in ("block_table", "req_to_token")}
    k, v = pool_views(layout.page_size)
    q = torch.randn(sum(shape.new), HEADS[0], 128, device="cuda", dtype=torch.bfloat16)
    starts = make_starts(shape.new)
    outs = {f"kvarena-{kind}": torch.empty_like(q) for kind in tables}
    calls: dict[str, Sequence[Callable[[], object]]] = {}
    for kind, table in tables.items():
        out, plan = outs[f"kvarena-{kind}"], extend_gluon.plan_extend(table, starts, q.shape[0], *HEADS)
        options: dict[str, Any] = {"out": out, "backend": "gluon", "plan": plan}
        calls[f"kvarena-{kind}"] = [functools.partial(paged_extend, q, k, v, table, starts, **options)]
    flops = shape.flops(HEADS[0])

    def gate() -> None:
        ours = {name: found[0] for name, found in calls.items()}
        _gate((k, v), q, tables["block_table"], shape.new, shape.lens, ours, outs)

    return Competition(calls, gate, {"flops": flops}, flops / 5e8, pause_s=0.05, graph_us=10_000)


def _recorded_shape(layout: Layout) -> ExtendShape:
    new = tuple(min(AGED_NEW, length) for length in layout.lens)
    return ExtendShape(new, tuple(length - count for length, count in zip(layout.lens, new, strict=True)))


def decode_cells(peers: Sequence[Peer], dry: bool) -> Iterator[Cell]:
    """The ten points at each page size and table kind; then placements, layouts, heads, head dims, quantised KV."""

    def cell(point: str, page: int, labels: dict[str, Any] | None = None, **options: Any) -> Cell:
        lens = DECODE_POINTS[point]
        shown = {"op": "decode", "point": point, "page": page, "layout": "split", "placement": "shuffled"}
        shown |= {"heads": "32/8", "dim": 128, "dtype": "bf16", "study": "grid"} | (labels or {})
        return Cell(shown, lambda: decode_competition(lens, page, dry=dry, **options))

    for page in PAGES:
        for point in DECODE_POINTS:
            yield cell(point, page, peers=peers)
    one = ("block_table",)
    for point in ("32x4k", "128x1k", "64x16k", "256x4k"):
        for placement in ("in_order", "groups16", "groups64", "window64", "window1024"):
            yield cell(point, 1, {"placement": placement, "study": "placement"}, placement=placement, kinds=one)
        for placement in ("in_order", "window1024"):
            yield cell(point, 16, {"placement": placement, "study": "placement"}, placement=placement, kinds=one)
    for point in ("32x4k", "128x1k", "64x16k", "256x4k"):
        label = {"placement": "identity", "study": "lookup"}
        yield cell(point, 16, label, placement="identity", kinds=("one_entry", "block_table"))
        yield cell(point, 1, label, placement="identity", kinds=("block_table", "req_to_token"))
    for layout, page in (("hnd", 16), ("hnd", 64), ("fused", 1), ("fused", 16), ("page_major", 16)):
        for point in ("32x4k", "128x1k", "256x1k"):
            yield cell(point, page, {"layout": layout, "study": "layout"}, layout=layout, kinds=one)
    for heads in ((64, 8), (32, 32), (16, 1)):
        for point in ("32x4k", "256x1k"):
            for page in (1, 16):
                label = {"heads": f"{heads[0]}/{heads[1]}", "study": "heads"}
                use = [peer for peer in peers if page == 16 and peer.name in ("fa3", "flashinfer")]
                yield cell(point, page, label, heads=heads, kinds=one, peers=use)
    for dim in (64, 96, 192, 256):
        for point in ("32x4k", "256x1k"):
            yield cell(point, 16, {"dim": dim, "study": "head_dim"}, dim=dim, kinds=one)
    for point in ("32x4k", "256x1k"):
        by_head: dict[str, Any] = {"dim": 96, "layout": "hnd", "study": "head_dim"}
        yield cell(point, 16, by_head, dim=96, layout="hnd", kinds=one)
    for dtype in QUANTISED:
        for point in ("64x16k", "256x4k"):
            for page in (1, 16):
                yield cell(point, page, {"dtype": dtype, "study": "quantised"}, dtype=dtype, kinds=one)
    for page in OTHER_PAGES:  # for the figure of every page size (`kvarena pagesize`)
        yield cell("64x16k", page, {"study": "pages"})
    for recorded in _layouts():
        yield from _recorded_cells(recorded, dry)


def _layouts() -> list[Layout]:
    """The recorded layouts; none, and a note, where their files cannot be read."""
    try:
        return load_layouts()
    except ImportError as error:
        print(f"recorded layouts left out: {error}", file=sys.stderr)
        return []


def _recorded_cells(layout: Layout, dry: bool) -> Iterator[Cell]:
    """A batch as an aged pool held it, and the same lengths shuffled and in order: what age costs."""
    requests, tokens = len(layout.lens), sum(layout.lens)
    labels = {"op": "decode", "point": f"{layout.name}:{layout.allocator}", "page": layout.page_size}
    labels |= {"layout": "split", "heads": "32/8", "dim": 128, "dtype": "bf16", "study": "recorded"}
    labels |= {"requests": requests, "tokens": tokens, "unique_tokens": layout.unique_tokens}
    for placement in ("recorded", "shuffled", "in_order"):
        shown = layout if placement == "recorded" else layout.placed(placement, POOL_SLOTS)
        place = {"placement": placement, "run_length": round(shown.run_length, 2)}
        yield Cell({**labels, **place}, functools.partial(recorded_competition, layout, placement, dry))


def _recorded_extend_cells(whole: Layout) -> Iterator[Cell]:
    """What age costs an extend step of the first requests of a recorded batch."""
    layout = whole.first(AGED_REQUESTS)
    labels = {"op": "extend", "point": f"{layout.name}:{layout.allocator}", "page": layout.page_size}
    labels |= {"heads": "32/8", "study": "recorded", "requests": len(layout.lens), "tokens": sum(layout.lens)}
    labels |= {"new_tokens": sum(_recorded_shape(layout).new), "unique_tokens": layout.unique_tokens}
    for placement in ("recorded", "shuffled", "in_order"):
        shown = layout if placement == "recorded" else layout.placed(placement, POOL_SLOTS)
        place = {"placement": placement, "run_length": round(shown.run_length, 2)}
        yield Cell({**labels, **place}, functools.partial(recorded_extend_competition, layout, placement))


def extend_cells(peers: Sequence[Peer], dry: bool) -> Iterator[Cell]:
    """Seven shapes and a mixed batch at four page sizes; tables; other head counts; recorded layouts."""

    def cell(shape: str, page: int, labels: dict[str, Any] | None = None, **options: Any) -> Cell:
        shown = {"op": "extend", "point": shape, "page": page, "placement": "shuffled", "heads": "32/8"}
        shown |= {"study": "grid"} | (labels or {})
        return Cell(shown, lambda: extend_competition(shape, page, dry=dry, **options))

    for page in (1, 16, 64, 128):
        for shape in EXTEND_SHAPES:
            # FlashInfer's speed is that of page 1 at every page size (results/h200): one is measured.
            use = [peer for peer in peers if page == 16 or peer.name != "flashinfer"]
            yield cell(shape, page, peers=use)
    for shape in ("8192/0x1", "512/4096x8"):
        for page in (1, 16):
            label = {"study": "table", "placement": "in_order"}
            kinds = ("block_table", "req_to_token")
            yield cell(shape, page, label, placement="in_order", backends=("gluon",), kinds=kinds)
        for heads in ((64, 8), (32, 32), (16, 1)):
            label = {"study": "heads", "heads": f"{heads[0]}/{heads[1]}"}
            use = [peer for peer in peers if peer.name == "fa3"]
            yield cell(shape, 16, label, heads=heads, backends=("gluon",), peers=use)
    for recorded in _layouts():
        yield from _recorded_extend_cells(recorded)
