"""Fits the step-time model's attention coefficients to measured kernel times, and says how far off it is.

    python -m kvarena.experiments.engine.calibrate results/h200/kernels.json

reads the results of the kernel benchmark, writes `step_times.json` beside them, prints the error out of sample, and
draws predicted against measured (`step_times.pdf|svg|png`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from kvarena.experiments.engine.step_time import GpuTimes, save_gpu_times, tile_pairs
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
            made["flops"], made["bytes"] = _extend_amounts(row)
        made["point"] = row["point"]
        rows.append(made)
    rows += [
        {"op": "store", "us": row["us"], "page_size": 1, "bytes": row["gbps"] * row["us"] * 1e3}
        for row in given
        if row["op"] == "store" and row.get("kernel") == "kvarena" and row.get("placement") == "shuffled"
    ]
    host = {row["what"]: row["us"] for row in given if row["op"] == "host" and row.get("kernel") == "kvarena"}
    if {"store", "decode"} <= set(host):
        rows.append({"op": "launch", "us": host["store"] + host["decode"], "page_size": 1, "bytes": 0.0})
    return (
        rows,
        f"fitted to {sum(row['op'] != 'launch' for row in rows)} points of {path.name} on {', '.join(sorted(cards))}",
    )


_UNIFORM = re.compile(r"(\d+)/(\d+)x(\d+)")


def _extend_amounts(row: Mapping[str, Any]) -> tuple[float, float]:
    """FLOPs of the tiles and KV bytes read of an extend row, one layer, bf16.

    A point is NEW/PREFIXxBATCH, or a name of `bench.shapes`; of any other, the FLOPs are those that were counted.
    """
    counted, found = row["tflops"] * row["us"] * 1e6, _UNIFORM.fullmatch(row["point"])
    if found is not None:
        new, prefix, batch = map(int, found.groups())
        pairs = [(new, prefix)] * batch
    elif row["point"] == "mix16":
        from kvarena.experiments.bench.shapes import EXTEND_SHAPES

        shape = EXTEND_SHAPES["mix16"]
        pairs = list(zip(shape.new, shape.prefix, strict=True))
    else:
        return counted, 0.0
    heads, kv_heads = map(int, row["heads"].split("/"))
    exact = sum(new * prefix + new * (new + 1) // 2 for new, prefix in pairs)
    tiles = sum(tile_pairs(new, prefix) for new, prefix in pairs)
    dim = counted / exact / heads / 4
    return counted * tiles / exact, sum(new + prefix for new, prefix in pairs) * kv_heads * dim * 2 * 2


def calibrate(rows: Iterable[Mapping[str, Any]], source: str, base: GpuTimes | None = None) -> GpuTimes:
    """Fit the attention coefficients to rows of the kernel benchmark; the rest stays as in `base`.

    A row has `op` ("decode", "extend", "store" or "launch"), `us`, `page_size`, and `bytes` (KV of one layer) or
    `flops` (of tiles), and perhaps `point`. What has no row stays as in `base`. The error is out of sample: each point
    is predicted from a fit to the others, at no page size of it; without points, each half from the other. Raises
    ValueError for too few rows.
    """
    given = list(rows)
    base = base or GpuTimes()
    decode = [_point(row, "bytes") for row in given if row["op"] == "decode"]
    decode_us, decode_rate = _fit(decode, "decode")
    extend_us, extend_rate = _fit(_compute_bound(given, decode_rate), "extend")
    stores = [_point(row, "bytes") for row in given if row["op"] == "store"]
    store_us, store_rate = _fit(stores, "store") if stores else (base.store_us, base.store_gbps * 1e3)
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
        launch_us=next((float(row["us"]) for row in given if row["op"] == "launch"), base.launch_us),
        store_us=store_us,
        store_gbps=store_rate / 1e3,
        decode_gbps_by_page=by_page,
        calibrated=True,
        source=source,
        error={"decode": _held_out(given, "decode"), "extend": _held_out(given, "extend")},
    )


def _point(row: Mapping[str, Any], amount: str) -> Point:
    return float(row[amount]), float(row["us"]), int(row["page_size"])


def _compute_bound(rows: Iterable[Mapping[str, Any]], bandwidth: float) -> list[Point]:
    """Extend rows that take longer than reading their KV (at `bandwidth` bytes per us) by half and more: the rest says
    nothing of the rate of arithmetic."""
    extend = [row for row in rows if row["op"] == "extend"]
    return [_point(row, "flops") for row in extend if float(row["us"]) > 1.5 * float(row.get("bytes", 0)) / bandwidth]


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


def predicted_us(times: GpuTimes, op: str, row: Mapping[str, Any]) -> float:
    """Time of one launch over one layer, as the model sees it."""
    size = int(row["page_size"])
    known = [int(each) for each in times.decode_gbps_by_page if int(each) <= size]
    rate = times.decode_gbps_by_page[str(max(known))] if known else times.decode_gbps
    read = float(row.get("bytes", 0)) / rate / 1e3
    if op == "decode":
        return times.decode_us + read
    return times.extend_us + max(float(row["flops"]) / times.extend_tflops / 1e6, read)


def plot_calibration(rows: Iterable[Mapping[str, Any]], times: GpuTimes, ax: Axes | None = None) -> Axes:
    """Predicted (by a fit that has not seen the point) against measured time, with the line on which they are equal."""
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.figure(figsize=(4.2, 3.8), layout="constrained").subplots()
    given, measured = list(rows), list[float]()
    for op, marker in (("decode", "o"), ("extend", "s")):
        pairs = held_out(given, op)
        points = [(float(row["us"]), us) for row, us in pairs]
        measured += [us for us, _ in points]
        error = times.error.get(op) or [float("nan")] * 2
        label = f"{op}: out of sample p50 {100 * error[0]:.1f} %, p95 {100 * error[1]:.1f} %"
        face: Any = {"markerfacecolor": "none"} if op == "extend" else {}
        ax.plot([us for us, _ in points], [us for _, us in points], marker, label=label, markersize=4, **face)
    if measured:
        ends = [min(measured), max(measured)]
        ax.plot(ends, ends, color="#555555", linewidth=1, linestyle=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured (us)")
    ax.set_ylabel("predicted (us)")
    ax.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.01), borderaxespad=0)
    return ax


def held_out(rows: Iterable[Mapping[str, Any]], op: str) -> list[tuple[Mapping[str, Any], float]]:
    """Each row with its prediction from a fit that has never seen its point (no page size of it); rows without a point
    are halved."""
    given = list(rows)
    mine = [row for row in given if row["op"] == op]
    names = [str(row.get("point", number % 2)) for number, row in enumerate(mine)]
    folds = names if len(set(names)) > 3 and any(names.count(name) > 1 for name in names) else None
    groups = folds or [str(number % 2) for number in range(len(mine))]
    pairs = []
    for group in dict.fromkeys(groups):
        rest = [row for row, name in zip(mine, groups, strict=True) if name != group]
        others = [row for row in given if row["op"] != op]
        times = _fitted([*others, *rest])
        pairs += [(row, predicted_us(times, op, row)) for row, name in zip(mine, groups, strict=True) if name == group]
    return pairs


def _fitted(rows: list[Mapping[str, Any]]) -> GpuTimes:
    """The attention coefficients alone."""
    decode_us, decode_rate = _fit([_point(row, "bytes") for row in rows if row["op"] == "decode"], "decode")
    extend_us, extend_rate = _fit(_compute_bound(rows, decode_rate), "extend")
    return GpuTimes(
        decode_us=decode_us, decode_gbps=decode_rate / 1e3, extend_us=extend_us, extend_tflops=extend_rate / 1e6
    )


def _held_out(rows: list[Mapping[str, Any]], op: str) -> list[float]:
    """[p50, p95] of |predicted - measured| / measured out of sample."""
    if sum(row["op"] == op for row in rows) < 4:
        return []
    errors = sorted(abs(us - float(row["us"])) / float(row["us"]) for row, us in held_out(rows, op))
    return [round(percentile(errors, 0.5), 4), round(percentile(errors, 0.95), 4)]


def step_errors(path: Path, times: GpuTimes) -> pd.DataFrame:
    """Measured against predicted microseconds of each step that the `kernels` executor ran on a card.

    path  a file of `capacity_card`: its cells have `steps`, with the amounts of each and `kernels_us`. None of them
          took part in the fit. Raises ValueError naming the file when it has no steps.
    """
    from kvarena.experiments.capacity_card import read_measured
    from kvarena.experiments.engine.step_time import StepAmounts, StepTimeModel, compute_of
    from kvarena.experiments.models import model_shape

    names = {entry.name for entry in fields(StepAmounts)}
    rows = []
    for cell in read_measured(path)["cells"]:
        shape = model_shape(cell["model"])
        model = StepTimeModel(shape, compute_of(cell["model"], shape), int(cell["page_size"]), times)
        for number, step in enumerate(cell["steps"]):
            amounts = StepAmounts(**{name: int(step[name]) for name in names})
            kind = "mixed" if amounts.num_extends and amounts.num_decodes else "extend"
            rows.append(
                {
                    "cell": f"{cell['panel']}/{cell['load']}/{cell['design']}",
                    "step": number,
                    "kind": kind if amounts.num_extends else "decode",
                    "measured_us": step["kernels_us"],
                    "predicted_us": model.launched_us(amounts),
                    "host_us": step["host_us"],
                }
            )
    if not rows:
        raise ValueError(f"{path}: expected cells with steps, found none")
    frame = pd.DataFrame(rows)
    return frame.assign(error=(frame["predicted_us"] - frame["measured_us"]).abs() / frame["measured_us"])


def step_error_table(frame: pd.DataFrame) -> dict[str, list[float]]:
    """{"decode": [p50, p95], "mixed": ..., "all": ...} of the relative error of a step."""
    found = {}
    for kind, part in [*frame.groupby("kind"), ("all", frame)]:
        ordered = sorted(part["error"])
        found[str(kind)] = [round(percentile(ordered, share), 4) for share in (0.5, 0.95)]
    return found


def rank_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of all steps of each run, measured and predicted, ms, and the rank among the designs of its load."""
    sums = frame.groupby("cell", sort=False)[["measured_us", "predicted_us"]].sum() / 1e3
    sums.columns = ["measured_ms", "predicted_ms"]
    load = sums.index.str.rsplit("/", n=1).str[0]
    ranks = sums.groupby(load).rank().astype(int)
    return sums.assign(measured_rank=ranks["measured_ms"], predicted_rank=ranks["predicted_ms"])


def plot_steps(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Predicted against measured time of every step, by kind."""
    errors = step_error_table(frame)
    for (kind, part), marker in zip(frame.groupby("kind"), "os^", strict=False):
        p50, p95 = errors[str(kind)]
        label = f"{kind}, {len(part):,} steps: p50 {100 * p50:.1f} %, p95 {100 * p95:.1f} %"
        face: Any = {"markerfacecolor": "none", "alpha": 0.5, "markeredgewidth": 0.6}
        ax.plot(part["measured_us"] / 1e3, part["predicted_us"] / 1e3, marker, label=label, markersize=3, **face)
    ends = [frame["measured_us"].min() / 1e3, frame["measured_us"].max() / 1e3]
    ax.plot(ends, ends, color="#555555", linewidth=1, linestyle=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured (ms a step, all layers)")
    ax.set_ylabel("predicted (ms)")
    ax.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.01), borderaxespad=0)
    return ax


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results of `kvarena bench kernels`")
    parser.add_argument("--out", type=Path, help="file to write; default step_times.json beside the results")
    parser.add_argument("--steps", type=Path, help="results of `capacity_card`: hold the model against measured steps")
    options = parser.parse_args(arguments)
    out = options.out or options.results.with_name("step_times.json")
    try:
        rows, source = benchmark_rows(options.results)
        times = calibrate(rows, source)
        steps = None if options.steps is None else step_errors(options.steps, times)
    except ValueError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    if steps is not None:
        errors = step_error_table(steps)
        times = replace(times, error={**times.error, **{f"steps, {kind}": pair for kind, pair in errors.items()}})
    save_gpu_times(times, out)
    _save_figure(rows, times, out, steps)
    print(json.dumps({"source": source, "error": times.error, "decode_gbps": times.decode_gbps}))
    return 0


def _save_figure(rows: list[dict[str, Any]], times: GpuTimes, out: Path, steps: pd.DataFrame | None) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from kvarena.experiments.style import STYLE, add_footer, save_figure

    with mpl.rc_context(STYLE):
        columns = 1 if steps is None else 2
        figure: Any = plt.figure(figsize=(3.9 * columns, 3.9), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
        plot_calibration(rows, times, axes[0])
        if steps is not None:
            plot_steps(steps, axes[1])
        add_footer(figure, f"kvarena; {times.source}")
        save_figure(figure, out.with_suffix(""))
        plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
