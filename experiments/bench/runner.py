"""Cells of the kernel benchmark and how each is run: gate, capture, alternate, one row a competitor.

A cell is one point that several kernels run on. Its competitors are lists of functions without arguments (one a
placement of the KV in the pool, rotated so that a cache never holds what comes next). Nothing is timed before the
cell's gate has compared every competitor with an oracle.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvarena.experiments.bench.timing import capture, time_all

Calls = Sequence[Callable[[], object]]

REPLAYS = 7
SHORT_US, SHORT_REPLAYS = 50.0, 21  # a median of 7 replays of a 15 us call moves by 0.5 %, as much as two tables differ


@dataclass
class Competition:
    """What a cell builds.

    calls    competitors by name; ours begin with "kvarena"
    gate     raises ValueError when a competitor is wrong
    amounts  numbers of one call, by name: bytes (moved, counted), flops
    expect_us  rough time of a call, to size the graphs
    pause_s  rest before each replay: 0.05 for compute-bound points, where power is the limit
    graph_us rough time of one replay; longer where clocks are to be seen by a log of ten samples a second
    extra    fields for each competitor's row
    """

    calls: Mapping[str, Calls]
    gate: Callable[[], None]
    amounts: dict[str, float]
    expect_us: float
    pause_s: float = 0.0
    graph_us: float = 2000.0
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One point: labels for its rows, and the function that builds it (tables and tensors made only when run)."""

    labels: Mapping[str, Any]
    build: Callable[[], Competition]


def run_cell(cell: Cell) -> list[dict[str, Any]]:
    """Gate, then time; rows with us, spread, GB/s and TFLOP/s. A failure is a row with `error`."""
    started = time.time()
    try:
        competition = cell.build()
        competition.gate()
        graphs = {}
        for name, calls in competition.calls.items():
            repeats = max(1, round(competition.graph_us / (competition.expect_us * len(calls))))
            graphs[name] = capture(calls, repeats)
        replays = REPLAYS if competition.expect_us >= SHORT_US else SHORT_REPLAYS
        timed = time_all(graphs, replays, competition.pause_s)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return [{**cell.labels, "error": f"{type(error).__name__}: {error}"[:300]}]
    rows = []
    for name, result in timed.items():
        row = {**cell.labels, "kernel": name, "us": round(result.us, 3), "spread": round(result.spread, 4)}
        row |= _rates(competition.amounts, result.us) | competition.extra.get(name, {})
        rows.append({**row, "t": [round(started, 1), round(time.time(), 1)]})
    return rows


def _rates(amounts: Mapping[str, float], us: float) -> dict[str, float]:
    rates: dict[str, float] = {}
    if "bytes" in amounts:
        rates["gbps"] = round(amounts["bytes"] / us / 1e3, 1)
    if "flops" in amounts:
        rates["tflops"] = round(amounts["flops"] / us / 1e6, 1)
    return rates


def warm_cells(cells: Iterable[Cell], part: int, parts: int) -> int:
    """Run our kernels of every `parts`-th cell once, which compiles them into the shared cache; returns how many."""
    count = 0
    for index, cell in enumerate(cells):
        if index % parts == part:
            for name, calls in cell.build().calls.items():
                if name.startswith("kvarena"):
                    calls[0]()
            count += 1
    torch.cuda.synchronize()
    return count


class ClockLog:
    """SM clock, power and throttle reasons, sampled by nvidia-smi every 100 ms while rows are measured."""

    FIELDS = "timestamp,clocks.sm,power.draw,clocks_event_reasons.active"

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ClockLog:
        command = ["nvidia-smi", f"--query-gpu={self.FIELDS}", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()

    def finish(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add `clock_mhz`, `power_w` (medians while busy) and `throttle` (bits seen) to rows by their time span."""
        if self._process is None:
            return
        self._process.terminate()
        samples = [sample for line in self._process.communicate()[0].splitlines() if (sample := _clock_sample(line))]
        for row in rows:
            first, last = row.get("t", (0.0, 0.0))
            busy = sorted(s[1:] for s in samples if first <= s[0] <= last and s[2] > 150)
            if busy:
                row["clock_mhz"] = busy[len(busy) // 2][0]
                row["power_w"] = sorted(b[1] for b in busy)[len(busy) // 2]
                row["throttle"] = sorted({b[2] for b in busy})


def _clock_sample(line: str) -> tuple[float, int, int, str] | None:
    """One line of nvidia-smi: (unix time, MHz, W, reasons); None for a broken line."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 4:
        return None
    try:
        stamp = time.mktime(time.strptime(parts[0].split(".")[0], "%Y/%m/%d %H:%M:%S"))
        return stamp + float("0." + parts[0].split(".")[1]), int(parts[1]), round(float(parts[2])), parts[3]
    except (ValueError, IndexError):
        return None


def print_row(row: Mapping[str, Any], file: Any = None) -> None:
    """One JSON line, for programs."""
    print(json.dumps({k: v for k, v in row.items() if k != "t"}, separators=(",", ":")), file=file, flush=True)
