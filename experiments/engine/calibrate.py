"""Fits the step-time model's attention coefficients to measured kernel times, and says how far off it is.

    python -m kvarena.experiments.engine.calibrate results/h200/kernels.json

reads the results of the kernel benchmark, writes `step_times.json` beside them, prints the error out of sample, and
draws predicted against measured (`step_times.pdf|svg|png`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.engine.step_time import GpuTimes, save_gpu_times
from kvarena.experiments.metrics import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float, int]  # amount (bytes or flops), microseconds, page size


def benchmark_rows(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows for `calibrate` from a kernel benchmark's results, and where they come from.

    Taken: our kernels on the grid of points, at each point and page size the fastest of ours. Raises ValueError naming
    the file.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        parts = whole["parts"].values()
        given = [row for part in parts for row in part["rows"]]
        cards = {part["provenance"]["card"][0] for part in parts}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as kernel benchmark results ({error})") from None
    fastest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in given:
        if row.get("study") != "grid" or "error" in row or not str(row.get("kernel", "")).startswith("kvarena"):
            continue
        key = (row["op"], row["point"], int(row["page"]))
        if key not in fastest or row["us"] < fastest[key]["us"]:
            fastest[key] = row
    rows = []
    for (op, _, page), row in fastest.items():
        made = {"op": op, "us": row["us"], "page_size": page}
        if "gbps" in row:
            made["bytes"] = row["gbps"] * row["us"] * 1e3
        if "tflops" in row:
            made["flops"] = row["tflops"] * row["us"] * 1e6
        rows.append(made)
    return rows, f"fitted to {len(rows)} points of {path.name} on {', '.join(sorted(cards))}"


def calibrate(rows: Iterable[Mapping[str, Any]], source: str, base: GpuTimes | None = None) -> GpuTimes:
    """Fit the attention coefficients to rows of the kernel benchmark; the rest stays as in `base`.

    A row has `op` ("decode" or "extend"), `us`, `page_size`, and `bytes` (KV read, one layer) or `flops`. The error
    is out of sample: every second row is predicted from a fit to the others. Raises ValueError for too few rows.
    """
    given = list(rows)
    base = base or GpuTimes()
    decode = [(float(row["bytes"]), float(row["us"]), int(row["page_size"])) for row in given if row["op"] == "decode"]
    extend = [(float(row["flops"]), float(row["us"]), int(row["page_size"])) for row in given if row["op"] == "extend"]
    decode_us, decode_rate = _fit(decode, "decode")
    extend_us, extend_rate = _fit(extend, "extend")
    by_page = {}
    for size in sorted({size for _, _, size in decode}):
        subset = [row for row in decode if row[2] == size]
        if len(subset) >= 4:
            by_page[str(size)] = _fit(subset, f"decode at page {size}")[1] / 1e3
    return replace(
        base,
        decode_us=decode_us,
        decode_gbps=decode_rate / 1e3,
        extend_us=extend_us,
        extend_tflops=extend_rate / 1e6,
        decode_gbps_by_page=by_page,
        calibrated=True,
        source=source,
        error={"decode": _errors(decode, "decode"), "extend": _errors(extend, "extend")},
    )


def _fit(rows: Sequence[Point], what: str) -> tuple[float, float]:
    """(fixed us, amount per us) of us = fixed + amount / rate, least squares of the relative error; fixed >= 0.01."""
    if len(rows) < 2:
        raise ValueError(f"calibrate: expected at least 2 {what} rows, found {len(rows)}")
    amounts, us = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    design = np.stack([1 / us, amounts / us], axis=1)
    fixed, slope = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
    if fixed < 0.01:
        fixed, slope = 0.01, float((amounts / us).sum() / ((amounts / us) ** 2).sum())
    if slope <= 0:
        raise ValueError(f"calibrate: {what} rows do not grow with their amount")
    return float(fixed), float(1 / slope)


def predicted_us(times: GpuTimes, op: str, amount: float) -> float:
    """Time of one launch over one layer, as the fit sees it."""
    if op == "decode":
        return times.decode_us + amount / times.decode_gbps / 1e3
    return times.extend_us + amount / times.extend_tflops / 1e6


def plot_calibration(rows: Iterable[Mapping[str, Any]], times: GpuTimes, ax: Axes | None = None) -> Axes:
    """Predicted against measured time of each point, decode and extend, with the line on which they are equal."""
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.figure(figsize=(4.2, 3.8), layout="constrained").subplots()
    measured: list[float] = []
    for op, amount, marker in (("decode", "bytes", "o"), ("extend", "flops", "s")):
        points = [(float(row["us"]), predicted_us(times, op, float(row[amount]))) for row in rows if row["op"] == op]
        measured += [us for us, _ in points]
        error = times.error.get(op) or [float("nan")] * 2
        label = f"{op}: out of sample p50 {100 * error[0]:.1f} %, p95 {100 * error[1]:.1f} %"
        ax.plot([us for us, _ in points], [us for _, us in points], marker, label=label, markersize=4)
    if measured:
        ends = [min(measured), max(measured)]
        ax.plot(ends, ends, color="#555555", linewidth=1, linestyle=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured (us)")
    ax.set_ylabel("predicted (us)")
    ax.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.01), borderaxespad=0)
    return ax


def _errors(rows: Sequence[Point], what: str) -> list[float]:
    """[p50, p95] of |predicted - measured| / measured; each half is predicted from the other."""
    if len(rows) < 4:
        return []
    errors = []
    for half in (0, 1):
        fixed, rate = _fit(rows[half::2], what)
        errors += [abs(fixed + amount / rate - us) / us for amount, us, _ in rows[1 - half :: 2]]
    errors.sort()
    return [round(percentile(errors, 0.5), 4), round(percentile(errors, 0.95), 4)]


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results of `kvarena bench kernels`")
    parser.add_argument("--out", type=Path, help="file to write; default step_times.json beside the results")
    options = parser.parse_args(arguments)
    out = options.out or options.results.with_name("step_times.json")
    try:
        rows, source = benchmark_rows(options.results)
        times = calibrate(rows, source)
    except ValueError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    save_gpu_times(times, out)
    _save_figure(rows, times, out)
    print(json.dumps({"source": source, "error": times.error, "decode_gbps": times.decode_gbps}))
    return 0


def _save_figure(rows: list[dict[str, Any]], times: GpuTimes, out: Path) -> None:
    import matplotlib.pyplot as plt
    from kvarena.experiments.style import save_figure

    plt.switch_backend("agg")
    figure = plot_calibration(rows, times).get_figure()
    save_figure(figure, out.with_suffix(""))  # type: ignore[arg-type]  # a whole figure, not a part of one
    plt.close(figure)  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(main())
