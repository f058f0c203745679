"""Random draws of attention calls against a float64 oracle, over a bounded number of compiled variants.

A variant fixes what a kernel is compiled for: op, dtypes, heads, head dims, page size, table kind, layout, options,
batch and table width. A draw fixes the rest by its seed: lengths (0, 1, a page and one off it more often than chance
would have it), pages, contents. All that nobody owns is poison: slots hold NaN or infinity (int8: 127), entries behind
a row's end name a poisoned page, padded rows of q are NaN. The output lies between guard rows that must keep their
bits, and the same call again must give the same bits.

Bound of one output element, u the unit roundoff of q's dtype: u |out| for rounding the result, u sum_j p_j |v_j| for
rounding the weights, and 16 float32 roundings on every weight, which grow with the size of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from kvarena.kernels import extend_gluon, reference
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import LAYOUTS, KVPool
from torch import Tensor

VARIANTS = 200
GUARD_ROWS = 2
GUARD = 12_288.0  # exact in every float dtype that q can have
LSE_TOLERANCE = 1e-4
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class Variant:
    """What is compiled; names of dtypes as in DTYPES."""

    op: str  # decode, extend-triton or extend-gluon
    q_dtype: str
    kv_dtype: str
    page_size: int
    table: str
    layout: str
    heads: tuple[int, int]
    head_dim: int
    head_dim_v: int
    batch: int
    width: int  # tokens that a row of the table can name
    tokens: int  # rows of q, padding included (decode: the batch)
    options: tuple[str, ...]


def variants(count: int = VARIANTS, gluon: bool = True) -> list[Variant]:
    """`count` different variants, always the same ones: a third decode of one-byte or odd shapes, and so on."""
    rng = np.random.default_rng(2024)
    found: dict[Variant, None] = {}
    while len(found) < count:
        found.setdefault(_variant(rng, gluon))
    return list(found)


def _variant(rng: np.random.Generator, gluon: bool) -> Variant:
    op = str(rng.choice(["decode", "decode", "extend-triton", "extend-gluon" if gluon else "extend-triton"]))
    page = int(rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 256]))
    table = str(rng.choice(["block_table", "req_to_token"]))
    layout = str(rng.choice(LAYOUTS))
    width = int(rng.choice([256, 512, 1024]))
    batch = int(rng.choice([1, 3, 5, 8]))
    tokens = batch if op == "decode" else int(rng.choice([64, 130, 257]))
    if op == "extend-gluon":
        heads = tuple(int(n) for n in rng.choice([(8, 2), (4, 4), (16, 2), (8, 1)]))
        dtype = str(rng.choice(["bfloat16", "float16"]))
        return Variant(op, dtype, dtype, page, table, layout, (heads[0], heads[1]), 128, 128, batch, width, tokens, ())
    heads = tuple(int(n) for n in rng.choice([(8, 2), (4, 4), (6, 2), (8, 1), (7, 1)]))
    q_dtype = str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"]))
    kv_dtype = str(rng.choice([q_dtype, q_dtype, "e4m3", "e5m2", "int8"]))
    dim = int(rng.choice([64, 80, 96, 128, 128, 192, 256]))
    dim_v = dim if rng.random() < 0.8 else int(rng.choice([64, 128]))
    chosen = [name for name in ("window", "softcap", "alibi", "scale") if rng.random() < 0.2]
    if op == "decode":
        chosen += [f"splits{int(rng.choice([1, 2, 5]))}"] if rng.random() < 0.5 else []
    parts = (page, table, layout, (heads[0], heads[1]), dim, dim_v, batch, width, tokens)
    return Variant(op, q_dtype, kv_dtype, *parts, tuple(chosen))


@dataclass
class Draw:
    """One call ready to make; `starts` of a decode is one token a request."""

    variant: Variant
    q: Tensor
    caches: tuple[Tensor, Tensor]
    table: PageTable
    starts: Tensor
    new: list[int]
    lens: list[int]
    options: dict[str, Any]


def _length(rng: np.random.Generator, most: int, page: int) -> int:
    """0 to `most`: an edge in half of all draws."""
    edges = [0, 1, page - 1, page, page + 1, 127, 128, 129, most - 1, most]
    length = int(rng.choice(edges)) if rng.random() < 0.5 else int(rng.integers(0, most + 1))
    return min(max(length, 0), most)


def _lengths(variant: Variant, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """(tokens, new tokens) of each request; new tokens fit the rows of q."""
    lens = [_length(rng, variant.width, variant.page_size) for _ in range(variant.batch)]
    if variant.op == "decode":
        return lens, [1] * variant.batch
    left, new = variant.tokens, []
    for length in lens:
        count = min(_length(rng, min(length, left), 32), left) if length else 0
        new.append(count)
        left -= count
    return lens, new


def _table(variant: Variant, lens: Sequence[int], rng: np.random.Generator) -> tuple[PageTable, int, np.ndarray]:
    """(table, pages of the pool, slots that requests own); the last page is nobody's, and unused entries name it."""
    size = variant.page_size
    counts = [-(-n // size) for n in lens]
    pages = rng.permutation(sum(counts)) + 1
    unowned = sum(counts) + 1
    columns = -(-variant.width // size)
    entries = np.full((variant.batch + 2, columns), unowned, np.int64)
    rows = rng.permutation(variant.batch + 2)[: variant.batch]
    owned, start = [], 0
    for row, count, length in zip(rows, counts, lens, strict=True):
        entries[row, :count] = pages[start : start + count]
        owned.append((pages[start : start + count, None] * size + np.arange(size)).reshape(-1)[:length])
        start += count
    if variant.table == "req_to_token":
        entries = (entries[:, :, None] * size + np.arange(size)).reshape(len(entries), -1)
    numbers = (entries, rows, np.array(lens))
    tensors = [torch.from_numpy(array.astype(np.int32)).cuda() for array in numbers]
    per_entry = size if variant.table == "block_table" else 1
    return PageTable(tensors[0], tensors[1], tensors[2], per_entry), unowned + 1, np.concatenate(owned)


def _contents(cache: Tensor, slots: Tensor, poison: float, generator: torch.Generator) -> None:
    """Poison everywhere but in `slots`, which hold random numbers as the dtype can."""
    page_size = cache.shape[1]
    rows = torch.randn((len(slots), *cache.shape[2:]), generator=generator, device="cuda")
    if cache.dtype == torch.int8:
        cache.fill_(127)
        rows = (rows * 32).clamp(-127, 127).round()
    elif cache.element_size() == 1:
        cache.view(torch.uint8).fill_(0x7F)  # NaN in both
    else:
        cache.fill_(poison)
    cache.view(torch.int8 if cache.element_size() == 1 else cache.dtype)[slots // page_size, slots % page_size] = (
        rows.to(cache.dtype).view(torch.int8) if cache.element_size() == 1 else rows.to(cache.dtype)
    )


def make_draw(variant: Variant, seed: int) -> Draw:
    """The draw of this seed."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    lens, new = _lengths(variant, rng)
    table, pages, owned = _table(variant, lens, rng)
    kv_dtype, q_dtype = DTYPES[variant.kv_dtype], DTYPES[variant.q_dtype]
    pool = KVPool(
        1, pages - 1, variant.page_size, variant.heads[1], variant.head_dim, variant.head_dim_v, kv_dtype, "cuda",
        variant.layout,
    )  # fmt: skip
    caches = (pool.key(0), pool.value(0))
    slots = torch.from_numpy(owned).cuda()
    for cache in caches:
        _contents(cache, slots, math.nan if seed % 2 else math.inf, generator)
    q = torch.randn((variant.tokens, variant.heads[0], variant.head_dim), generator=generator, device="cuda").to(
        q_dtype
    )
    starts = np.cumsum([0, *new])
    if variant.op == "decode":
        q[[i for i, length in enumerate(lens) if length == 0]] = math.nan
    else:
        q[int(starts[-1]) :] = math.nan
    return Draw(
        variant, q, caches, table, torch.from_numpy(starts.astype(np.int32)).cuda(), new, lens, _options(variant, q)
    )


def _options(variant: Variant, q: Tensor) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "window" in variant.options:
        options["window"] = 37
    if "softcap" in variant.options:
        options["softcap"] = 20.0
    if "scale" in variant.options:
        options["scale"] = 0.11
    if "alibi" in variant.options:
        options["alibi_slopes"] = torch.linspace(0.01, 0.2, q.shape[1], device="cuda")
    if variant.kv_dtype in ("e4m3", "e5m2", "int8"):
        number = 1 / 32 if variant.kv_dtype == "int8" else 0.5
        by_head = torch.linspace(number, 1.5 * number, variant.heads[1], device="cuda")
        options |= {"k_scale": number, "v_scale": by_head}
    return options


def call_of(draw: Draw, out: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """The call under test, into `out`; returns (out, lse)."""
    q, caches, table, options = draw.q, draw.caches, draw.table, draw.options
    if draw.variant.op == "decode":
        splits = [int(name.removeprefix("splits")) for name in draw.variant.options if name.startswith("splits")]
        return lambda: paged_decode(  # type: ignore[return-value]  # return_lse: two tensors
            q, *caches, table, out=out, return_lse=True, num_splits=splits[0] if splits else None, **options
        )
    backend = draw.variant.op.removeprefix("extend-")
    return lambda: paged_extend(  # type: ignore[return-value]
        q, *caches, table, draw.starts, out=out, return_lse=True, backend=backend, **options
    )


def check_draw(draw: Draw) -> tuple[float, float]:
    """(largest share of a bound, largest error of lse) of one draw; ValueError where anything is wrong."""
    variant = draw.variant
    shape = (variant.tokens, variant.heads[0], variant.head_dim_v)
    guarded = torch.full((shape[0] + 2 * GUARD_ROWS, *shape[1:]), GUARD, dtype=draw.q.dtype, device="cuda")
    out = guarded[GUARD_ROWS:-GUARD_ROWS]
    out.fill_(math.nan)
    run = call_of(draw, out)
    lse = run()[1]
    first = out.clone()
    if not (guarded[:GUARD_ROWS] == GUARD).all() or not (guarded[-GUARD_ROWS:] == GUARD).all():
        raise ValueError("expected the rows around the output untouched, found others")
    out.fill_(math.nan)
    again = run()[1]
    if not (torch.equal(out, first) and torch.equal(again, lse)):
        raise ValueError("expected the same bits twice, found others")
    return _compare(draw, first, lse)


def _compare(draw: Draw, out: Tensor, lse: Tensor) -> tuple[float, float]:
    share, lse_error = 0.0, 0.0
    starts = np.cumsum([0, *draw.new])
    unseen = torch.ones(len(out), dtype=torch.bool, device="cuda")
    for request, (count, length) in enumerate(zip(draw.new, draw.lens, strict=True)):
        rows = slice(int(starts[request]), int(starts[request]) + count)
        if count and length:
            unseen[rows] = False
            exact, bound, exact_lse = _oracle(draw, request, rows)
            found = ((out[rows].double() - exact).abs() / bound).nan_to_num(math.inf).max().item()
            share = max(share, found)
            lse_error = max(lse_error, (lse[rows].double() - exact_lse).abs().nan_to_num(math.inf).max().item())
    if out[unseen].any() or not torch.isneginf(lse[unseen]).all() or not torch.isfinite(out).all():
        raise ValueError("expected zeros and lse -inf for rows that see no key, found others")
    if share > 1 or lse_error > LSE_TOLERANCE:
        raise ValueError(f"expected outputs inside their bound, found {share:.3g} of it, lse off by {lse_error:.2g}")
    return share, lse_error


def _oracle(draw: Draw, request: int, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """(out, bound of each element, lse) in float64."""
    options = dict(draw.options)
    k, v = (
        reference.gather(cache, draw.table, request).double() * _by_head(options.pop(name, None))
        for cache, name in zip(draw.caches, ("k_scale", "v_scale"), strict=True)
    )
    q = draw.q[rows].double()
    scale = options.pop("scale", q.shape[2] ** -0.5)
    count = rows.stop - rows.start
    positions = len(k) - count + torch.arange(count, device="cuda")
    both, lse = reference.attend(q, k, torch.cat([v, v.abs()], 2), positions, scale=scale, **options)
    exact, weight = both.split(v.shape[2], 2)
    group = q.shape[1] // k.shape[1]
    size = torch.einsum("thd,nhd->thn", q.abs(), k.abs().repeat_interleave(group, 1)).amax(-1) * scale
    if "alibi_slopes" in options:
        size = size + options["alibi_slopes"].double() * len(k)
    unit = ROUNDOFF[draw.q.dtype]
    rounded = unit if draw.q.dtype != torch.float32 else 0.0
    relative = 1.1 * rounded + 16 * 2.0**-24 * (2 + size)[..., None]
    return exact, 1.1 * unit * exact.abs() + relative * weight + 1e-7, lse


def _by_head(scale: float | Tensor | None) -> float | Tensor:
    if isinstance(scale, Tensor):
        return scale.double()[:, None]
    return 1.0 if scale is None else scale


def draw_rows(part: int, parts: int, draws: int, count: int = VARIANTS) -> list[dict[str, Any]]:
    """A row for each variant of this part: draws made, seeds, largest share of a bound; a wrong one has `error`."""
    gluon = extend_gluon.runs_on(torch.device("cuda"))
    rows = []
    for index, variant in enumerate(variants(count, gluon)):
        if index % parts == part:
            rows.append(_variant_row(index, variant, draws // count + (index < draws % count)))
    return rows


def _variant_row(index: int, variant: Variant, draws: int) -> dict[str, Any]:
    first = index * 100_000
    row: dict[str, Any] = {"op": "draws", "variant": index, **asdict(variant), "seeds": [first, first + draws - 1]}
    shares, errors = [0.0], [0.0]
    for seed in range(first, first + draws):
        try:
            share, error = check_draw(make_draw(variant, seed))
        except Exception as problem:
            return {**row, "draws": seed - first, "error": f"seed {seed}: {type(problem).__name__}: {problem}"[:300]}
        shares.append(share)
        errors.append(error)
    return {**row, "draws": draws, "bound_share": round(max(shares), 4), "lse_error": float(f"{max(errors):.2g}")}
