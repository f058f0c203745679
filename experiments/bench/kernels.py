"""kvarena bench kernels: check the kernels on this card, then time them, beside peers and the card's own ceilings.

    python -m kvarena.experiments.bench.kernels --part check|decode|rest|safety|sanitize [--out FILE]

`check` runs odd cases with a poisoned pool; `decode` and `rest` gate each point again before they time it. Parts are
merged into one file, so that each fits a ten-minute lease. `safety` (what kernels may never do, 10,000 random calls)
and `sanitize` (compute-sanitizer) have files of their own. Imports torch, triton, numpy and ours. A table for people
goes to stderr, JSON lines for programs to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from kvarena.experiments.bench.attention_cells import decode_cells, extend_cells
from kvarena.experiments.bench.ceilings import ceiling_cells
from kvarena.experiments.bench.checks import check_rows_of
from kvarena.experiments.bench.memory_cells import host_rows, memory_cells, swap_rows
from kvarena.experiments.bench.peers import PEERS, Peer, load_peers
from kvarena.experiments.bench.runner import Cell, ClockLog, print_row, run_cell, warm_cells
from kvarena.experiments.bench.safety import safety_rows
from kvarena.experiments.bench.sanitize import sanitize_rows
from kvarena.experiments.bench.tables import print_tables
from kvarena.experiments.outputs import check_file
from kvarena.experiments.provenance import code_version
from kvarena.kernels import extend_gluon

PARTS = ("check", "decode", "rest", "safety", "sanitize")
OWN_FILE = {"safety": "safety.json", "sanitize": "sanitizer.json"}
SCHEMA_VERSION = 1
# Processes that share the untimed work: timed parts hold pools of up to 11 GB each, so do far pages.
WORKERS = {"check": 16, "decode": 9, "rest": 9, "safety": 10, "sanitize": 0}


def provenance(skipped: dict[str, str]) -> dict[str, Any]:
    """Card (which one of its kind, too), driver, torch, triton, commit, and which extend kernel ran."""
    fields = "name,driver_version,power.limit,clocks.max.sm,memory.total,uuid"  # cards of one name differ by 3 %
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        card = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        card = torch.cuda.get_device_name()
    return {
        "card": [part.strip() for part in card.split(",")],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "kvarena": code_version() | _commit_from_environment(),
        "extend": "gluon" if extend_gluon.runs_on(torch.device("cuda")) else "triton",
        "peers_skipped": skipped,
    }


def _commit_from_environment() -> dict[str, str]:
    """A copy of the checkout without its history says its commit in KVARENA_COMMIT."""
    commit = os.environ.get("KVARENA_COMMIT")
    return {"commit": commit} if commit else {}


def cells_of(part: str, peers: dict[str, Peer], dry: bool) -> Iterator[Cell]:
    """The graph-timed cells of a part, ceilings first."""
    decode_peers = [peers[name] for name in ("fa3", "flashinfer", "sdpa", "vllm", "sglang") if name in peers]
    extend_peers = [peers[name] for name in ("fa3", "flashinfer", "vllm", "sglang") if name in peers]
    if part not in ("decode", "rest"):
        return
    yield from ceiling_cells()
    if part == "decode":
        yield from decode_cells(decode_peers, dry)
    else:
        yield from extend_cells(extend_peers, dry)
        yield from memory_cells()


def run_part(part: str, peers: dict[str, Peer], budget_s: float) -> list[dict[str, Any]]:
    """All timed rows of a part; cells that no longer fit the time budget are rows that say so."""
    deadline = time.time() + budget_s
    rows: list[dict[str, Any]] = []
    with ClockLog() as clocks:
        for cell in cells_of(part, peers, dry=False):
            late = time.time() > deadline
            for row in [{**cell.labels, "error": "no time left"}] if late else run_cell(cell):
                rows.append(row)
                print_row(row)
        clocks.finish(rows)
    for row in _in_fresh_process() if part == "rest" else ():  # the clocks' log would slow the host
        rows.append(row)
        print_row(row)
    for row in rows:
        row.pop("t", None)
    return rows


def _in_fresh_process() -> list[dict[str, Any]]:
    """Rows by the host's clock. In a process behind hundreds of captured graphs and a few loaded peers, the same calls
    took up to 2.5 times as long on the host, plain copies too; in four fresh ones they did not."""
    command = [sys.executable, "-m", "kvarena.experiments.bench.kernels", "--part", "rest", "--worker", "host"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows + ([{"op": "host", "error": f"process ended with {done.returncode}"}] if done.returncode else [])


def _host_timed() -> None:
    """What `_in_fresh_process` runs."""
    for source in (swap_rows, host_rows):
        for row in _rows_or_error(source):
            print_row(row)


def _rows_or_error(source: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Rows of one source; what stops it is its last row, so that the other rows are kept."""
    try:
        yield from source()
    except Exception as error:
        traceback.print_exc()
        yield {"op": source.__name__, "error": f"{type(error).__name__}: {error}"[:300]}


def in_parallel(part: str) -> list[dict[str, Any]]:
    """Run the untimed work of a part in processes that share Triton's cache: all checks, or one call a kernel.

    Returns the rows that they print; a process that failed is a row with `error`.
    """
    command = [sys.executable, "-m", "kvarena.experiments.bench.kernels", "--part", part, "--worker"]
    count = min(WORKERS[part], os.cpu_count() or 1)
    workers = [subprocess.Popen([*command, f"{i}/{count}"], stdout=subprocess.PIPE, text=True) for i in range(count)]
    rows: list[dict[str, Any]] = []
    for index, worker in enumerate(workers):
        printed, _ = worker.communicate()
        rows += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        if worker.returncode:
            rows.append({"op": "worker", "part": part, "error": f"process {index} ended with {worker.returncode}"})
    return rows


def work(part: str, index: int, count: int) -> None:
    """One process of `in_parallel`."""
    rows = {"check": check_rows_of, "safety": safety_rows}.get(part)
    if rows is None:
        warm_cells(cells_of(part, {}, dry=True), index, count)
        return
    for row in rows(index, count):
        print_row(row)


def merge(path: Path, part: str, rows: list[dict[str, Any]], info: dict[str, Any]) -> dict[str, Any]:
    """Replace one part in the results file, written under a temporary name first; returns the whole."""
    whole: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "parts": {}}
    if path.exists():
        whole = json.loads(path.read_text())
    whole["parts"][part] = {"provenance": info, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    lines = json.dumps(whole, separators=(",", ":")).replace("},{", "},\n{")
    partial.write_text(lines + "\n")
    partial.rename(path)
    return whole


def card_folder() -> str:
    """Folder name of this card: h200 for an NVIDIA H200."""
    return torch.cuda.get_device_name().removeprefix("NVIDIA").strip().lower().replace(" ", "-")


def default_out(part: str = "check") -> Path:
    """results/<card>/kernels.json below the current folder; `safety` and `sanitize` have files of their own."""
    return Path("results") / card_folder() / OWN_FILE.get(part, "kernels.json")


def bench_kernels(part: str, out: Path | None, peer_names: Sequence[str], budget_s: float = 540) -> int:
    """Run one part; returns the number of rows with an error."""
    if not torch.cuda.is_available():
        raise ValueError("bench kernels: expected a CUDA device, found none")
    if part not in PARTS:
        raise ValueError(f"--part: expected one of {', '.join(PARTS)}, found {part!r}")
    check_file(out or default_out(part), "--out", (".json",), ('"parts"',))
    started = time.time()
    rows = list(sanitize_rows()) if part == "sanitize" else in_parallel(part)
    for row in rows:
        print_row(row)
    print(f"{part}: untimed work took {time.time() - started:.0f} s", file=sys.stderr)
    peers, skipped = load_peers(list(peer_names) if part in ("decode", "rest") else [])
    rows += run_part(part, peers, budget_s - (time.time() - started))
    whole = merge(out or default_out(part), part, rows, provenance(skipped))
    print_tables(whole, sys.stderr)
    errors = [row for row in rows if "error" in row]
    for row in errors:
        print(f"error: {row}", file=sys.stderr)
    return len(errors)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, help="results file; default results/<card>/kernels.json")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; what cannot be imported is skipped")
    parser.add_argument("--budget", type=float, default=540, help="seconds; later cells are left out and say so")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker == "host":
        _host_timed()
        return 0
    if options.worker:
        index, count = (int(number) for number in options.worker.split("/"))
        work(options.part, index, count)
        return 0
    return (
        1 if bench_kernels(options.part, options.out, [p for p in options.peers.split(",") if p], options.budget) else 0
    )


if __name__ == "__main__":
    raise SystemExit(main())
