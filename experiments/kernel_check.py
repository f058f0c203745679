"""Sampled batches of a replay, pushed through the real kernels with every allocator's own page table.

Input: `BatchSample`s, one a sampled step. A sample holds the context length of each request and, for each
allocator (by label), its page size and each request's page ids in position order. Contexts are cut to
`max_context` tokens (from the front, where shared prefixes lie), requests to `max_requests`.

    report = check_batches([BatchSample([40, 7], {"block": (16, [[1, 2, 3], [4]]), "token": (1, [...])})])
    report["status"]          # "agreed" | "differed" | "not run" (with report["reason"])
    print(summary(report))    # one line for a terminal

Each allocator's pool is poisoned with NaN, filled by `store_kv` through its own slot_mapping, then read by
`paged_decode` (last token) and `paged_extend` (last tokens, ragged) through a block_table and a req_to_token.
All outputs are compared with those of the first label's first table, and with attention in float64 over the
same keys and values without any paging, so that two tables that are wrong alike are found too.

Content: requests that share a page under any allocator have equal keys and values up to there; all else is
random. Page ids are renumbered densely, order kept, and a page that no kernel takes (S > 256, or not a power
of two) is split into equal kernel pages, as servers split them.

Without a CUDA device the kernels run in Triton's interpreter. That must be chosen before triton is imported;
where triton is there already, uninterpreted, the check runs in a process of its own. Without torch or triton
the status is "not run".
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from kvarena.allocators.interface import Sequence
    from numpy.typing import NDArray
    from torch import Tensor

TableKind = Literal["block_table", "req_to_token"]
TABLE_KINDS: tuple[TableKind, ...] = ("block_table", "req_to_token")
MAX_KERNEL_PAGE = 256  # tokens; the kernels take powers of two up to here
MAX_NEW_TOKENS = 5  # tokens a request in the extend batch; request i brings 1 + i % 5


@dataclass(frozen=True)
class BatchSample:
    """One step's batch.

    contexts  tokens with KV of each request after the step
    tables    label -> (page_size, page ids of each request in position order); every label lists all requests
    step      step number in the replay, for the report
    """

    contexts: list[int]
    tables: dict[str, tuple[int, list[list[int]]]]
    step: int = 0


@dataclass(frozen=True)
class HeadShape:
    """Attention shape of the check. Small by default: the interpreter takes about 0.1 s a head and 50 tokens."""

    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64


def check_batches(
    samples: Iterable[BatchSample],
    *,
    model: HeadShape | None = None,
    max_context: int = 512,
    max_requests: int = 4,
    seed: int = 0,
    device: str | None = None,
) -> dict[str, Any]:
    """Run every sample through the kernels with every table; returns a JSON-ready report.

    status        "agreed", "differed", or "not run"; `reason` says why it was not run
    device        where the kernels ran; `model`, `max_context`, `seed`: what ran
    samples, requests, tokens   counts after the cut
    comparisons   one row for each op and table: {op, label, table, against, rows, bitwise_rows, max_abs_error,
                  bound, worst, agreed}; `against` is another table's name or "float64 oracle"; `worst` names the
                  sample, step, request and its context; `bound` is the derived bound at that row

    device: "cuda", "cpu" or None (CUDA where there is one). Raises ValueError for a malformed sample.
    """
    chosen = list(samples)
    shape = model or HeadShape()
    cuts = [cut(sample, max_context, max_requests) for sample in chosen]
    options = {"model": asdict(shape), "max_context": max_context, "max_requests": max_requests, "seed": seed}
    head = {**options, "samples": len(cuts), "requests": sum(len(c.contexts) for c in cuts)}
    head["tokens"] = sum(sum(c.contexts) for c in cuts)
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing or not cuts:
        reason = f"{' and '.join(missing)} not installed" if missing else "no batch was sampled"
        return {"status": "not run", "reason": reason, "device": None, **head, "comparisons": []}
    if not _can_run_here(device):
        return _in_subprocess(chosen, {**options, "device": device})
    comparisons, where = _run(cuts, shape, seed, device)
    agreed = all(row["agreed"] for row in comparisons)
    return {
        "status": "agreed" if agreed else "differed",
        "reason": "",
        "device": where,
        **head,
        "comparisons": comparisons,
    }


def summary(report: Mapping[str, Any]) -> str:
    """One line for people: how many outputs agreed, and how closely."""
    if report["status"] == "not run":
        return f"kernel check not run: {report['reason']}"
    tables = [row for row in report["comparisons"] if row["against"] != ORACLE]
    oracle = [row for row in report["comparisons"] if row["against"] == ORACLE]
    rows, bitwise = sum(row["rows"] for row in tables), sum(row["bitwise_rows"] for row in tables)
    worst = max((row["max_abs_error"] for row in tables), default=0.0)
    return (
        f"kernel outputs {report['status']}: {bitwise} of {rows} rows bitwise equal across tables, largest difference "
        f"{worst:.2g}; against float64 at most {max(row['max_abs_error'] for row in oracle):.2g} "
        f"({report['samples']} batches, {report['requests']} requests, {report['tokens']} tokens, {report['device']})"
    )


ORACLE = "float64 oracle"


def cut(sample: BatchSample, max_context: int, max_requests: int) -> BatchSample:
    """The sample with at most `max_requests` requests of at most `max_context` tokens; ValueError if malformed."""
    contexts = [min(n, max_context) for n in sample.contexts[:max_requests]]
    if not contexts or min(contexts) < 1:
        raise ValueError(f"sample of step {sample.step}: contexts: expected lengths >= 1, found {sample.contexts}")
    if not sample.tables:
        raise ValueError(f"sample of step {sample.step}: tables: expected at least one allocator, found none")
    tables = {label: _cut_table(sample, label, contexts) for label in sample.tables}
    return BatchSample(contexts, tables, sample.step)


def _cut_table(sample: BatchSample, label: str, contexts: list[int]) -> tuple[int, list[list[int]]]:
    size, pages = sample.tables[label]
    place = f"sample of step {sample.step}, {label}"
    if size < 1 or len(pages) != len(sample.contexts):
        raise ValueError(
            f"{place}: expected page_size >= 1 and {len(sample.contexts)} rows, found {size}, {len(pages)}"
        )
    rows = [list(row[: -(-n // size)]) for row, n in zip(pages, contexts, strict=False)]
    for request, (row, n) in enumerate(zip(rows, contexts, strict=True)):
        if len(row) * size < n:
            raise ValueError(f"{place}: request {request} has {len(row)} pages of {size} for {n} tokens")
        if min(row) < 1:
            raise ValueError(f"{place}: request {request} names page {min(row)}; owned pages start at 1")
    columns: dict[int, int] = {}
    for page, column in ((page, column) for row in rows for column, page in enumerate(row)):
        if columns.setdefault(page, column) != column:
            raise ValueError(f"{place}: page {page} holds positions of page {columns[page]} and of page {column}")
    return size, rows


# --- where the kernels run ---------------------------------------------------------------------------------


def _can_run_here(device: str | None) -> bool:
    """Prepare this process: True when the kernels can run in it (CUDA, or the interpreter)."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return not _interpreted()
    if device == "cuda":
        raise ValueError("device: expected one that is there, found 'cuda' without a CUDA device")
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    return _interpreted()


def _interpreted() -> bool:
    if "triton" not in sys.modules and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return False
    import triton.language as tl

    return type(tl.cdiv).__name__ == "InterpretedFunction"


def _in_subprocess(samples: list[BatchSample], options: dict[str, Any]) -> dict[str, Any]:
    """The same check in a fresh interpreter, samples and report as JSON through pipes."""
    request = json.dumps({"samples": [asdict(sample) for sample in samples], "options": options})
    on_cuda = options["device"] != "cpu" and _has_cuda()
    environment = {**os.environ, "TRITON_INTERPRET": "0" if on_cuda else "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvarena.experiments.kernel_check"],
        input=request,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the kernel check failed in its own process:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _serve() -> None:
    """Entry of the process of its own: a request on stdin, the report on stdout."""
    request = json.load(sys.stdin)
    samples = [
        BatchSample(row["contexts"], {k: (s, p) for k, (s, p) in row["tables"].items()}, row["step"])
        for row in request["samples"]
    ]
    options = request["options"]
    options["model"] = HeadShape(**options["model"])
    json.dump(check_batches(samples, **options), sys.stdout)


# --- the check itself --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inputs:
    """Keys and values [T, HKV, D], decode queries [B, HQ, D] and extend queries [N, HQ, D] of one batch."""

    k: Tensor
    v: Tensor
    decode_q: Tensor
    extend_q: Tensor
    new_tokens: list[int]


def _run(cuts: list[BatchSample], shape: HeadShape, seed: int, device: str | None) -> tuple[list[dict[str, Any]], str]:
    import torch

    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if target == "cuda" else "CPU, Triton interpreter"
    tally: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for index, sample in enumerate(cuts):
        inputs = _make_inputs(sample, shape, np.random.default_rng([seed, index]), target)
        bounds, oracle = _oracle(sample, inputs)
        first: tuple[str, dict[str, Tensor]] | None = None
        for label, kind in product(sample.tables, TABLE_KINDS):
            outputs = _through_kernels(sample, label, kind, inputs)
            against = [(ORACLE, oracle, 1.0)] if first is None else [(ORACLE, oracle, 1.0), (*first, 2.0)]
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
    inputs: _Inputs,
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


def _make_inputs(sample: BatchSample, shape: HeadShape, rng: np.random.Generator, device: str) -> _Inputs:
    import torch

    leaders = content_leaders(sample)
    longest = max(sample.contexts)
    kv_shape = (2, len(sample.contexts), longest, shape.num_kv_heads, shape.head_dim)
    kv = rng.standard_normal(kv_shape, dtype=np.float32)
    columns = np.arange(longest)
    flat = np.concatenate([kv[:, leaders[b, :n], columns[:n]] for b, n in enumerate(sample.contexts)], axis=1)
    new_tokens = [min(1 + b % MAX_NEW_TOKENS, n) for b, n in enumerate(sample.contexts)]
    queries = rng.standard_normal((sum(new_tokens), shape.num_heads, shape.head_dim), dtype=np.float32)
    extend_q = torch.from_numpy(queries).to(device)
    last = torch.tensor(np.cumsum(new_tokens) - 1, device=device)
    k, v = torch.from_numpy(flat).to(device)
    return _Inputs(k.contiguous(), v.contiguous(), extend_q[last].contiguous(), extend_q, new_tokens)


def content_leaders(sample: BatchSample) -> NDArray[np.int64]:
    """Whose content each position holds, [B, longest context]: the first request with which it is shared.

    Two requests share positions [0, n) when some allocator gives both the same pages there; sharing is closed
    over chains of requests (a with b here, b with c there).
    """
    count = len(sample.contexts)
    shared = np.zeros((count, count), dtype=np.int64)
    for size, rows in sample.tables.values():
        for a, b in product(range(count), repeat=2):
            same = next((i for i, (x, y) in enumerate(zip(rows[a], rows[b], strict=False)) if x != y), None)
            same = min(len(rows[a]), len(rows[b])) if same is None else same
            shared[a, b] = max(shared[a, b], same * size)
    for via in range(count):
        shared = np.maximum(shared, np.minimum(shared[:, via : via + 1], shared[via : via + 1, :]))
    np.fill_diagonal(shared, max(sample.contexts))
    return (shared[:, :, None] > np.arange(max(sample.contexts))).argmax(axis=1)


@dataclass(frozen=True)
class _RecordedPages:
    """Stands where an allocator stands for an adapter: the pages that a replay recorded, renumbered."""

    page_size: int
    num_pages: int
    rows: dict[str, array[int]]

    def page_ids(self, seq: Sequence) -> array[int]:
        return self.rows[seq.request_id]


def kernel_pages(page_size: int, rows: list[list[int]]) -> tuple[int, list[list[int]]]:
    """(kernel page size, rows) with ids renumbered densely from 1 and pages split where no kernel takes them.

    >>> kernel_pages(48, [[9, 4]])
    (16, [[6, 7, 8, 3, 4, 5]])
    """
    size = min(page_size & -page_size, MAX_KERNEL_PAGE)
    parts = page_size // size
    rank = {page: i for i, page in enumerate(sorted({page for row in rows for page in row}), 1)}
    return size, [[rank[page] * parts + part for page in row for part in range(parts)] for row in rows]


def _through_kernels(sample: BatchSample, label: str, kind: TableKind, inputs: _Inputs) -> dict[str, Tensor]:
    import torch
    from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter
    from kvarena.allocators.interface import Sequence
    from kvarena.kernels.decode import paged_decode
    from kvarena.kernels.extend import paged_extend
    from kvarena.kernels.store import store_kv

    size, rows = kernel_pages(*sample.tables[label])
    num_pages = max(page for row in rows for page in row)
    source = _RecordedPages(size, num_pages, {f"r{b}": array("i", row) for b, row in enumerate(rows)})
    make = BlockTableAdapter if kind == "block_table" else ReqToTokenAdapter
    width = max(len(row) for row in rows) * size
    adapter = make(source, max_requests=len(rows), max_tokens=width, device=inputs.k.device)
    seqs = [Sequence(f"r{b}", [0] * n) for b, n in enumerate(sample.contexts)]
    for seq in seqs:
        adapter.add(seq)

    cache_shape = (num_pages + 1, size, *inputs.k.shape[1:])
    key_cache, value_cache = torch.full((2, *cache_shape), float("nan"), device=inputs.k.device)
    fill = adapter.batch(seqs, sample.contexts)
    store_kv(inputs.k, inputs.v, key_cache, value_cache, fill.slot_mapping)
    for seq in seqs:
        seq.num_computed_tokens = seq.num_tokens - 1
    decode = adapter.batch(seqs, [1] * len(seqs))
    out = {"decode": paged_decode(inputs.decode_q, key_cache, value_cache, decode.table)}
    for seq, new in zip(seqs, inputs.new_tokens, strict=True):
        seq.num_computed_tokens = seq.num_tokens - new
    extend = adapter.batch(seqs, inputs.new_tokens)
    out["extend"] = paged_extend(inputs.extend_q, key_cache, value_cache, extend.table, extend.query_start_loc)
    return out


def _oracle(sample: BatchSample, inputs: _Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(bound of each row, outputs), both float64, from the tokens themselves: no pages, no tables."""
    import torch

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
    last = torch.tensor(np.cumsum(inputs.new_tokens) - 1, device=out.device)
    return {"decode": bound[last], "extend": bound}, {"decode": out[last], "extend": out}


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one token in float64: q [HQ, D], k, v [n, HKV, D] -> (error bound of a float32 run [], out [HQ, D]).

    The bound, to first order in the unit roundoff u = 2^-24. A score is a D-term sum, scaled and rounded: its error
    is at most (D + 3) u scale sum|q||k|. exp turns it into the same relative error of a weight, plus 4 u for exp
    itself and for each of at most n rescalings; numerator and denominator each sum n terms, n u. Together
    2 (score error + (2 n + 6) u) max|v|, the factor 2 because numerator and denominator both carry it.
    """
    import torch

    groups = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))  # [n, HQ, D]
    scale = q.shape[1] ** -0.5
    weights = torch.einsum("hd,nhd->hn", q.double() * scale, k).softmax(-1)
    out = torch.einsum("hn,nhd->hd", weights, v)
    magnitude = torch.einsum("hd,nhd->hn", q.double().abs() * scale, k.abs()).max()
    bound = 2 * 2.0**-24 * ((q.shape[1] + 3) * magnitude + 2 * len(k) + 6) * v.abs().max()
    return bound, out


if __name__ == "__main__":
    _serve()
