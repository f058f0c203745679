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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from kvarena.allocators.interface import PADDING_PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    tables: Mapping[str, TableKind] | None = None,
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

    tables: the kind of table for each label; None: both kinds for every label, at twice the time
    device: "cuda", "cpu" or None (CUDA where there is one). Raises ValueError for a malformed sample.

    Interpreted, a sample of 4 requests of 512 tokens takes about 1 s a table.
    """
    chosen = list(samples)
    shape = model or HeadShape()
    cuts = [cut(sample, max_context, max_requests) for sample in chosen]
    kinds = _table_kinds(cuts, tables)
    options = {"model": asdict(shape), "max_context": max_context, "max_requests": max_requests, "seed": seed}
    head = {**options, "samples": len(cuts), "requests": sum(len(c.contexts) for c in cuts)}
    head["tokens"] = sum(sum(c.contexts) for c in cuts)
    if reason := _why_not(cuts):
        return {"status": "not run", "reason": reason, "device": None, **head, "comparisons": []}
    if not _can_run_here(device):
        return _in_subprocess(chosen, {**options, "tables": tables, "device": device})
    from kvarena.experiments.kernel_runs import run

    comparisons, where = run(cuts, kinds, shape, seed, device)
    agreed = all(row["agreed"] for row in comparisons)
    return {
        "status": "agreed" if agreed else "differed",
        "reason": "",
        "device": where,
        **head,
        "comparisons": comparisons,
    }


def _why_not(cuts: list[BatchSample]) -> str:
    """Why these samples cannot be run here; empty when they can."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    tables = ((label, rows) for sample in cuts for label, (_, rows) in sample.tables.items())
    windowed = next((label for label, rows in tables if any(PADDING_PAGE in row for row in rows)), None)
    if windowed is not None:
        return f"{windowed}: a sliding window left pages behind, so its rows no longer hold whole contexts"
    return "" if cuts else "no batch was sampled"


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


def _table_kinds(cuts: list[BatchSample], tables: Mapping[str, TableKind] | None) -> dict[str, tuple[TableKind, ...]]:
    labels = {label for sample in cuts for label in sample.tables}
    if tables is None:
        return dict.fromkeys(labels, TABLE_KINDS)
    if missing := labels - tables.keys():
        raise ValueError(f"tables: expected a kind for each of {sorted(labels)}, found none for {sorted(missing)}")
    if wrong := set(tables.values()) - set(TABLE_KINDS):
        raise ValueError(f"tables: expected {' or '.join(TABLE_KINDS)}, found {sorted(wrong)}")
    return {label: (tables[label],) for label in labels}


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
        if min(row) < PADDING_PAGE:
            raise ValueError(f"{place}: request {request} names page {min(row)}; owned pages start at 1")
    columns: dict[int, int] = {}
    for page, column in ((page, column) for row in rows for column, page in enumerate(row)):
        if page != PADDING_PAGE and columns.setdefault(page, column) != column:
            raise ValueError(f"{place}: page {page} holds positions of page {columns[page]} and of page {column}")
    return size, rows


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


def kernel_pages(page_size: int, rows: list[list[int]]) -> tuple[int, list[list[int]]]:
    """(kernel page size, rows) with ids renumbered densely from 1 and pages split where no kernel takes them.

    >>> kernel_pages(48, [[9, 4]])
    (16, [[6, 7, 8, 3, 4, 5]])
    """
    size = min(page_size & -page_size, MAX_KERNEL_PAGE)
    parts = page_size // size
    rank = {page: i for i, page in enumerate(sorted({page for row in rows for page in row}), 1)}
    return size, [[rank[page] * parts + part for page in row for part in range(parts)] for row in rows]


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


if __name__ == "__main__":
    _serve()
