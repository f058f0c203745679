"""One batch through `store_kv`, `paged_decode` and `paged_extend` by one table, and the same attention in float64.

Imports torch and triton: `kernel_check.py` decides first whether the kernels are compiled or interpreted.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from kvarena.allocators.adapter import Batch, BlockTableAdapter, ReqToTokenAdapter
from kvarena.allocators.interface import Sequence
from kvarena.experiments.kernel_check import (
    MAX_NEW_TOKENS,
    ORACLE,
    BatchSample,
    HeadShape,
    TableKind,
    content_leaders,
    kernel_pages,
)
from kvarena.kernels import reference
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.store import store_kv
from torch import Tensor

UNIT_ROUNDOFF = 2.0**-24  # float32


@dataclass(frozen=True)
class Inputs:
    """Keys and values [T, HKV, D], decode queries [B, HQ, D] and extend queries [N, HQ, D] of one batch."""

    k: Tensor
    v: Tensor
    decode_q: Tensor
    extend_q: Tensor
    new_tokens: list[int]

    @property
    def last_rows(self) -> Tensor:
        """Row of each request's last query in the extend batch."""
        return torch.tensor(np.cumsum(self.new_tokens) - 1, device=self.k.device)


def run(
    cuts: list[BatchSample],
    kinds: Mapping[str, tuple[TableKind, ...]],
    shape: HeadShape,
    seed: int,
    device: str | None,
) -> tuple[list[dict[str, Any]], str]:
    """(comparisons as `check_batches` reports them, where the kernels ran) of cut samples."""
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if target == "cuda" else "CPU, Triton interpreter"
    tally: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for index, sample in enumerate(cuts):
        inputs = make_inputs(sample, shape, np.random.default_rng([seed, index]), target)
        bounds, exact = oracle(sample, inputs)
        first: tuple[str, dict[str, Tensor]] | None = None
        for label, kind in ((name, kind) for name in sample.tables for kind in kinds[name]):
            outputs = through_kernels(sample, label, kind, inputs)
            against = [(ORACLE, exact, 1.0)] if first is None else [(ORACLE, exact, 1.0), (*first, 2.0)]
            for op, (name, others, factor) in product(outputs, against):
                row = tally.setdefault((op, label, kind, name), _fresh_row(op, label, kind, name))
                _compare(row, outputs[op], others[op], bounds[op] * factor, sample, index, inputs)
            first = first or (f"{label}, {kind}", outputs)
    return list(tally.values()), where


def _fresh_row(op: str, label: str, kind: str, against: str) -> dict[str, Any]:
    row = {"op": op, "label": label, "table": kind, "against": against, "rows": 0, "bitwise_rows": 0}
    return {**row, "max_abs_error": 0.0, "bound": 0.0, "worst": None, "agreed": True}


def _compare(
    row: dict[str, Any],
    out: Tensor,
    other: Tensor,
    bound: Tensor,
    sample: BatchSample,
    index: int,
    inputs: Inputs,
) -> None:
    """Fold one output into a comparison: errors as shares of the bound, so that the worst row is the riskiest."""
    error = (out.double() - other.double()).abs().flatten(1).amax(1)  # NaN stays NaN
    share = (error / bound).nan_to_num(nan=float("inf"))
    worst = int(share.argmax())
    row["rows"] += len(error)
    row["bitwise_rows"] += int((out == other).flatten(1).all(1).sum())
    row["agreed"] &= bool((share <= 1).all())
    if row["worst"] is None or float(share[worst]) > row["worst"]["share_of_bound"]:
        counts = inputs.new_tokens if row["op"] == "extend" else [1] * len(sample.contexts)
        request = int(np.searchsorted(np.cumsum(counts), worst, side="right"))
        row["worst"] = {"sample": index, "step": sample.step, "request": request}
        row["worst"] |= {"context": sample.contexts[request], "share_of_bound": float(share[worst])}
        row["bound"] = float(bound[worst])
    row["max_abs_error"] = max(row["max_abs_error"], float(error.nan_to_num(nan=float("inf")).max()))


def make_inputs(sample: BatchSample, shape: HeadShape, rng: np.random.Generator, device: str) -> Inputs:
    """Random tensors, equal where requests share pages."""
    leaders = content_leaders(sample)
    longest = max(sample.contexts)
    kv_shape = (2, len(sample.contexts), longest, shape.num_kv_heads, shape.head_dim)
    kv = rng.standard_normal(kv_shape, dtype=np.float32)
    columns = np.arange(longest)
    flat = np.concatenate([kv[:, leaders[b, :n], columns[:n]] for b, n in enumerate(sample.contexts)], axis=1)
    new_tokens = [min(1 + b % MAX_NEW_TOKENS, n) for b, n in enumerate(sample.contexts)]
    queries = rng.standard_normal((sum(new_tokens), shape.num_heads, shape.head_dim), dtype=np.float32)
    extend_q = torch.from_numpy(queries).to(device)
    k, v = torch.from_numpy(flat).to(device)
    inputs = Inputs(k.contiguous(), v.contiguous(), extend_q, extend_q, new_tokens)
    return Inputs(inputs.k, inputs.v, extend_q[inputs.last_rows].contiguous(), extend_q, new_tokens)


@dataclass(frozen=True)
class _RecordedPages:
    """Stands where an allocator stands for an adapter: the pages that a replay recorded, renumbered."""

    page_size: int
    num_pages: int
    rows: dict[str, array[int]]

    def page_ids(self, seq: Sequence) -> array[int]:
        return self.rows[seq.request_id]


class _Run:
    """One sample on one allocator's pages, with one kind of table."""

    def __init__(self, sample: BatchSample, label: str, kind: TableKind, inputs: Inputs) -> None:
        size, rows = kernel_pages(*sample.tables[label])
        num_pages = max(page for row in rows for page in row)
        source = _RecordedPages(size, num_pages, {f"r{b}": array("i", row) for b, row in enumerate(rows)})
        make = BlockTableAdapter if kind == "block_table" else ReqToTokenAdapter
        device, width, tokens = inputs.k.device, max(len(row) for row in rows) * size, sum(sample.contexts)
        self.adapter = make(source, max_requests=len(rows), max_tokens=width, max_batch_tokens=tokens, device=device)
        self.seqs = [Sequence(f"r{b}", [0] * n) for b, n in enumerate(sample.contexts)]
        for seq in self.seqs:
            self.adapter.add(seq)
        cache_shape = (2, num_pages + 1, size, *inputs.k.shape[1:])
        self.key_cache, self.value_cache = torch.full(cache_shape, float("nan"), device=device)

    def batch(self, new_tokens: list[int]) -> Batch:
        """The step that brings the last `new_tokens` tokens of each request."""
        for seq, new in zip(self.seqs, new_tokens, strict=True):
            seq.num_computed_tokens = seq.num_tokens - new
        return self.adapter.batch(self.seqs, new_tokens)

    def fill(self, inputs: Inputs, contexts: list[int]) -> None:
        """Write all tokens through the slot mapping. Interpreted, `store_kv` takes 10 ms a token: there only the
        step's new tokens go through it, and those before them through its torch reference."""
        slots = self.batch(contexts).slot_mapping
        new = torch.ones_like(slots, dtype=torch.bool)
        if not slots.is_cuda:
            left = torch.tensor([n - m for n, m in zip(contexts, inputs.new_tokens, strict=True)])
            new = torch.cat([torch.arange(n) >= first for n, first in zip(contexts, left, strict=True)])
        nothing = torch.full_like(slots, -1)
        before, now = torch.where(new, nothing, slots), slots[new]
        reference.store_kv(inputs.k, inputs.v, self.key_cache, self.value_cache, before)
        store_kv(inputs.k[new], inputs.v[new], self.key_cache, self.value_cache, now)


def through_kernels(sample: BatchSample, label: str, kind: TableKind, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs of decode [B, HQ, D] and extend [N, HQ, D]."""
    run_ = _Run(sample, label, kind, inputs)
    run_.fill(inputs, sample.contexts)
    caches = run_.key_cache, run_.value_cache
    decoded = paged_decode(inputs.decode_q, *caches, run_.batch([1] * len(sample.contexts)).table)
    step = run_.batch(inputs.new_tokens)
    extended = paged_extend(inputs.extend_q, *caches, step.table, step.query_start_loc)
    return {"decode": _without_lse(decoded), "extend": _without_lse(extended)}


def _without_lse(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def oracle(sample: BatchSample, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(bound of each row, outputs), both float64, from the tokens themselves: no pages, no tables."""
    outs, bounds = [], []
    starts = np.concatenate([[0], np.cumsum(sample.contexts)])
    queries = inputs.extend_q.split(inputs.new_tokens)
    for b, n in enumerate(sample.contexts):
        k, v = inputs.k[starts[b] : starts[b + 1]], inputs.v[starts[b] : starts[b + 1]]
        for i, q in enumerate(queries[b]):
            seen = n - len(queries[b]) + i + 1
            bound, out = attend(q, k[:seen], v[:seen])
            outs.append(out)
            bounds.append(bound)
    out, bound = torch.stack(outs), torch.stack(bounds)
    last = inputs.last_rows
    return {"decode": bound[last], "extend": bound}, {"decode": out[last], "extend": out}


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one token in float64: q [HQ, D], k, v [n, HKV, D] -> (error bound of a float32 run [], out [HQ, D]).

    The bound, to first order in the unit roundoff u = 2^-24. A score is a D-term sum, scaled and rounded: its error
    is at most (D + 3) u scale sum|q||k|. exp turns it into the same relative error of a weight, plus 4 u for exp
    itself and for each of at most n rescalings; numerator and denominator each sum n terms, n u. Together
    2 (score error + (2 n + 6) u) max|v|, the factor 2 because numerator and denominator both carry it.
    """
    groups = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))  # [n, HQ, D]
    scale = q.shape[1] ** -0.5
    weights = torch.einsum("hd,nhd->hn", q.double() * scale, k).softmax(-1)
    out = torch.einsum("hn,nhd->hd", weights, v)
    magnitude = torch.einsum("hd,nhd->hn", q.double().abs() * scale, k.abs()).max()
    bound = 2 * UNIT_ROUNDOFF * ((q.shape[1] + 3) * magnitude + 2 * len(k) + 6) * v.abs().max()
    return bound, out
