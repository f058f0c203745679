"""`--part sanitize`: every kernel, at small shapes, under NVIDIA's compute-sanitizer; a row a tool.

    memcheck   all kernels, with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor has bounds of its own
    initcheck  all kernels: reads of memory that nothing wrote
    racecheck  the plain Triton kernels, and the Gluon kernel apart: hazards in shared memory
    synccheck  all kernels: barriers that not all threads of a block reach

The kernels are run once without a tool first, so that they are compiled and known to be right; then each tool runs
them in a process of its own (`python -m kvarena.experiments.bench.sanitize plain|gluon|all`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from kvarena.allocators.decode_batch import StepReservation
from kvarena.allocators.interface import Sequence

SEED = 7
TIMEOUT_S = 240
SHOWN = 12  # findings that a row keeps
# What racecheck cannot know: it follows barriers of whole blocks and warps, not mbarriers.
MBARRIERS = (
    "K, V, queries and tile records are handed over by mbarriers (full: the producer's bytes or arrivals; empty: the "
    "consumers' releases), which racecheck does not follow; behind a sequence's end both consumers clear the rows of "
    "V, each before its own product, to the same values. The same calls are bit for bit reproducible and inside their "
    "bounds (safety.json)"
)

Runs = list[tuple[str, str, dict[str, str]]]  # tool, kernels, environment


def tool_runs() -> Runs:
    """What is run: (tool, which kernels, environment)."""
    own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        ("memcheck", "all", own),
        ("initcheck", "all", own),
        ("racecheck", "plain", {}),
        ("racecheck", "gluon", {}),
        ("synccheck", "all", {}),
    ]


def sanitize_rows() -> Iterator[dict[str, Any]]:
    """A row a tool: errors counted, the first findings, time; a run that could not be made is a row with `error`."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        yield {"op": "sanitize", "error": "compute-sanitizer is not on the PATH"}
        return
    target = [sys.executable, "-m", "kvarena.experiments.bench.sanitize"]
    warm = subprocess.run([*target, "all"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if warm.returncode:
        yield {"op": "sanitize", "error": f"the kernels fail without a tool: {warm.stderr[-300:]}"}
        return
    running = []
    for tool, kernels, environment in tool_runs():
        command = [program, "--tool", tool, "--print-limit", "200", *target, kernels]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
        running.append((tool, kernels, environment, process))
    for tool, kernels, environment, process in running:
        labels = {"op": "sanitize", "tool": tool, "kernels": kernels, "environment": environment, "seed": SEED}
        try:
            text, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            yield {**labels, "error": f"not done after {TIMEOUT_S} s"}
            continue
        yield {**labels, **summary_of(tool, kernels, text)}


def summary_of(tool: str, kernels: str, text: str) -> dict[str, Any]:
    """What compute-sanitizer printed, as a row's fields; findings on mbarriers carry their explanation."""
    launched = re.search(r"^launched (.*)$", text, re.MULTILINE)
    counts = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if counts is None or launched is None:
        return {"error": f"no summary from compute-sanitizer: {text[-300:]}"}
    lines = [line.lstrip("= ") for line in text.splitlines() if line.startswith("=========")]
    findings = [line for line in lines if re.match(r"(Error|Warning|Invalid|Uninitialized|Race|Potential)", line)]
    row: dict[str, Any] = {"findings": int(counts.group(1)), "launched": launched.group(1).split(", ")}
    if row["findings"]:
        places = Counter(found for line in findings if (found := _place(line)))
        row["places"] = dict(places.most_common())
        row["shown"] = list(dict.fromkeys(findings))[:SHOWN]
        if tool == "racecheck" and kernels == "gluon":
            row["explained"] = MBARRIERS
        else:
            row["error"] = f"{row['findings']} findings"
    return row


def _place(finding: str) -> str | None:
    """Source file and line of a finding."""
    found = re.search(r"in (\S+\.py:\d+)", finding)
    return found.group(1) if found else None


# --- what runs under the tools -------------------------------------------------------------------------------


def calls_of(kernels: str) -> dict[str, Callable[[], object]]:
    """Every kernel at small shapes: `plain` Triton, `gluon`, or `all`."""
    plain, gluon = _calls()
    return {"plain": plain, "gluon": gluon, "all": plain | gluon}[kernels]


def _calls() -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    import torch
    from kvarena.experiments.bench.draws import Variant, call_of, make_draw
    from kvarena.kernels import copy, extend_gluon
    from kvarena.kernels.merge import merge_states
    from kvarena.kernels.pool import KVPool
    from kvarena.kernels.slots import compute_slot_mapping
    from kvarena.kernels.store import store_kv

    def attention(op: str, page: int, kv: str = "bfloat16", dim: int = 128, *options: str) -> Callable[[], object]:
        tokens = 3 if op == "decode" else 130
        variant = Variant(op, "bfloat16", kv, page, "req_to_token", "split", (8, 2), dim, dim, 3, 256, tokens, options)
        draw = make_draw(variant, SEED)
        return call_of(draw, torch.empty((tokens, 8, dim), dtype=torch.bfloat16, device="cuda"))

    plain: dict[str, Callable[[], object]] = {}
    for page in (1, 16, 64):
        plain[f"decode page {page}"] = attention("decode", page)
        plain[f"extend page {page}"] = attention("extend-triton", page)
    plain["decode splits"] = attention("decode", 16, "bfloat16", 128, "splits5")
    plain["decode head_dim 96"] = attention("decode", 16, "bfloat16", 96)
    plain["extend window"] = attention("extend-triton", 16, "bfloat16", 128, "window", "alibi")
    for kv in ("e4m3", "int8"):
        plain[f"decode {kv}"] = attention("decode", 16, kv)
    pool = KVPool(2, 40, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(70, 2, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(80, 150, device="cuda")
    plain["store"] = lambda: store_kv(k, k, pool.key(1), pool.value(1), slots)
    plain["copy"] = lambda: copy.copy_pages(pool.layers, [1, 2, 3], [3, 9, 8])
    plain["gather and scatter"] = lambda: copy.scatter_pages(
        copy.gather_pages(pool.layers, [4, 5]), pool.layers, [7, 6]
    )
    draw = make_draw(
        Variant("decode", "bfloat16", "bfloat16", 16, "block_table", "split", (8, 2), 128, 128, 3, 256, 3, ()), 2
    )
    starts = torch.tensor([0, 9, 9, 20], dtype=torch.int32, device="cuda")
    positions, mapping = torch.arange(20, device="cuda"), torch.empty(23, dtype=torch.int64, device="cuda")
    plain["slots"] = lambda: compute_slot_mapping(draw.table, starts, positions, mapping)
    for table in ("block table", "req to token"):
        plain[f"adapter {table}"] = _adapter_steps(table)
    out, lse = torch.randn(37, 8, 128, device="cuda"), torch.randn(37, 8, device="cuda")
    plain["merge"] = lambda: merge_states(out, lse, out, lse)
    gluon: dict[str, Callable[[], object]] = {}
    if extend_gluon.runs_on(torch.device("cuda")):
        gluon = {f"extend page {page}, Gluon": attention("extend-gluon", page) for page in (1, 16, 64)}
    return plain, gluon


class _Grown:
    """A page source whose rows grow as told."""

    page_size, num_pages = 4, 10_000

    def __init__(self, seqs: list[Sequence]) -> None:
        self.rows = {seq.request_id: array("i", [10 * place + 1, 10 * place + 2]) for place, seq in enumerate(seqs)}

    def page_ids(self, seq: Sequence) -> array[int]:
        return self.rows[seq.request_id][:]

    def step(self, seqs: list[Sequence], members: list[int]) -> StepReservation:
        """A decode step in which these members get a page."""
        pages = array("i", [5000 + sum(len(row) for row in self.rows.values()) + member for member in members])
        for member, page in zip(members, pages, strict=True):
            self.rows[seqs[member].request_id].append(page)
        computed = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.intp)
        return StepReservation(seqs, members, pages, computed=computed)


def _adapter_steps(table: str) -> Callable[[], object]:
    """Steps of any kind through an adapter, decode steps with and without new pages; then its check of all rows."""
    from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter

    make = BlockTableAdapter if table == "block table" else ReqToTokenAdapter

    def steps() -> None:
        seqs = [Sequence(str(number), [1] * 5) for number in range(70)]
        source = _Grown(seqs)
        adapter = make(source, max_requests=72, max_tokens=40, max_batch_tokens=700, device="cuda")
        for seq in seqs:
            adapter.add(seq)
        adapter.batch(seqs, [7] * 70, pad_requests=72, pad_tokens=600)
        for number in range(9):
            for seq in seqs:
                seq.num_computed_tokens = 7 + number
            full = (7 + number) % 4 == 0  # all of them need a page
            members = range(70) if full else range(number % 3, 70, 4)
            adapter.decode(source.step(seqs, list(members)), pad_requests=72, pad_tokens=72)
        adapter.batch(seqs[::-2], [0] * 35)
        adapter.check(seqs)

    return steps


def main(kernels: str) -> int:
    import torch

    calls = calls_of(kernels)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    print("launched " + ", ".join(name.replace(",", ";") for name in calls), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
