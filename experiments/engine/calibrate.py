"""Fits the step-time model to measured kernels and steps, says how far off it is, and whether it ranks as the card.

    python -m kvarena.experiments.engine.calibrate results/h200/kernels.json

reads the results of the kernel benchmark, and beside them the measured steps (`steps.json`) and the 8B model
(`model.json`); writes `step_times.json` there, prints the errors out of sample and the ranks, and draws predicted
against measured (`step_times.pdf|svg|png`). A workload is predicted from a fit that has not seen it, which is kept too
(`step_times_without_WORKLOAD.json`); so is a kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from kvarena.experiments.engine.attention_time import DecodeTimes, ExtendTimes, decode_us, extend_us, list_us
from kvarena.experiments.engine.calibrate_points import Points, kernel_points, read_steps, step_points
from kvarena.experiments.engine.calibrate_steps import (
    error_table,
    plot_held_out,
    plot_sums,
    rank_lines,
    rank_table,
    step_frame,
)
from kvarena.experiments.engine.step_time import COMPUTE, GpuTimes, save_gpu_times
from kvarena.experiments.outputs import refuse_unwritable
from numpy.typing import NDArray

REFERENCE = "req_to_token/1"  # its page factor is 1
BLOCKS = ("128", "64", "32")  # the last is measured at two points only, and takes the time of the one before
STORE = ("store_us", "store_gbps")
Floats = NDArray[np.float64]
# name, start, lowest, highest
DECODE = (
    ("base_us", 8.0, 0.0, 30.0),
    ("split_us", 2.0, 0.0, 20.0),
    ("crowding", 0.3, 0.0, 3.0),
    ("l2_gbps", 8000.0, 3000.0, 15000.0),
    ("dram_gbps", 4400.0, 3000.0, 8000.0),
    ("sharpness", 3.0, 1.0, 20.0),
)
TOKEN_US = (0.02, 0.005, 0.1)
EXTEND = (
    ("base_us", 10.0, 0.0, 40.0),
    ("tile_us", 1.0, 0.0, 20.0),
    ("longest_us", 0.003, 0.0001, 0.1),
    ("key_us", 0.0125, 0.001, 0.1),
    ("gbps", 5000.0, 3000.0, 8000.0),
    ("sharpness", 3.0, 1.0, 20.0),
    ("list_us", 5.0, 0.0, 40.0),
    ("long_list_us", 30.0, 0.0, 100.0),
)


def columns(points: pd.DataFrame) -> Any:
    """The numbers of a table of points as arrays, named as in `DecodeWork` and `ExtendWork`."""
    numbers = points.select_dtypes(["number", "bool"])
    return SimpleNamespace(**{str(name): numbers[name].to_numpy(float) for name in numbers})


def fit_decode(points: pd.DataFrame) -> DecodeTimes:
    """Least squares of the logarithm of the error, robust. Raises ValueError for too few points."""
    keys = _keys(points, "decode")
    names = [name for name, *_ in DECODE]
    blocks = points["block"].astype(str).map(BLOCKS.index).to_numpy()
    places, work = points["table"].map([REFERENCE, *keys].index).to_numpy(), columns(points)

    def made(values: Floats) -> DecodeTimes:
        wide, narrow = map(float, values[len(names) : len(names) + 2])
        rest = dict(zip(BLOCKS, (wide, narrow, narrow), strict=True))
        factors = dict(zip(keys, map(float, values[len(names) + 2 :]), strict=True))
        head = dict(zip(names, map(float, values[: len(names)]), strict=True))
        return DecodeTimes(token_us=rest, pages={REFERENCE: 1.0, **factors}, **head)

    def predicted(values: Floats) -> Floats:
        times = made(values)
        token = np.array(list(times.token_us.values()))[blocks]
        return np.asarray(decode_us(times, work, token, np.array(list(times.pages.values()))[places]))

    bounds = [tuple(row[1:]) for row in DECODE] + [TOKEN_US] * 2 + [(1.0, 0.7, 1.5)] * len(keys)
    return made(_least(predicted, points, bounds, ((5, 2.0), (5, 6.0))))


def fit_extend(points: pd.DataFrame) -> ExtendTimes:
    """As `fit_decode`."""
    keys = _keys(points, "extend")
    names = [name for name, *_ in EXTEND]
    places, work = points["table"].map([REFERENCE, *keys].index).to_numpy(), columns(points)

    def made(values: Floats) -> ExtendTimes:
        factors = dict(zip(keys, map(float, values[len(names) :]), strict=True))
        head = dict(zip(names, map(float, values[: len(names)]), strict=True))
        return ExtendTimes(pages={REFERENCE: 1.0, **factors}, **head)

    def predicted(values: Floats) -> Floats:
        times = made(values)
        factor = np.array(list(times.pages.values()))[places]
        return np.asarray(extend_us(times, work, factor) + work.lists * list_us(times, work.sequences))

    bounds = [tuple(row[1:]) for row in EXTEND] + [(1.0, 0.7, 1.5)] * len(keys)
    return made(_least(predicted, points, bounds, ((5, 2.0), (5, 6.0))))


def _keys(points: pd.DataFrame, what: str) -> list[str]:
    if len(points) < 12:
        raise ValueError(f"calibrate: expected at least 12 {what} points, found {len(points)}")
    return [key for key in sorted(set(points["table"])) if key != REFERENCE]


def _least(
    predicted: Callable[[Floats], Floats],
    points: pd.DataFrame,
    bounds: Sequence[tuple[float, ...]],
    starts: Iterable[tuple[int, float]],
) -> Floats:
    """The best of several starts, each with one value changed."""
    from scipy.optimize import least_squares

    begin, low, high = (np.array(part, float) for part in zip(*bounds, strict=True))
    target, weight = np.log(points["us"].to_numpy(float)), np.sqrt(points["weight"].to_numpy(float))

    def off(values: Floats) -> Floats:
        return np.asarray((np.log(predicted(values)) - target) * weight)

    found = []
    for place, value in starts:
        at = begin.copy()
        at[place] = value
        found.append(
            least_squares(
                off,
                at,
                bounds=(low, high),
                loss="soft_l1",
                f_scale=0.05,
                x_scale=np.abs(begin) + 0.001,
                max_nfev=200,
            )
        )
    return np.asarray(min(found, key=lambda each: each.cost).x)


def fit(points: Points, base: GpuTimes) -> GpuTimes:
    """Both kinds of attention; the rest stays as in `base`."""
    return replace(base, decode=fit_decode(points.decode), extend=fit_extend(points.extend))


def without(points: Points, source: str) -> Points:
    """The points of all other sources."""
    return replace(
        points,
        decode=points.decode[points.decode["source"] != source],
        extend=points.extend[points.extend["source"] != source],
    )


def kernel_errors(points: Points, base: GpuTimes, folds: int = 4) -> dict[str, list[float]]:
    """[p50, p95] of the benchmark's kernels, each from a fit that has seen its point at no page size."""
    errors: dict[str, list[float]] = {}
    for what, fitted, name in (("decode", fit_decode, "decode"), ("extend", fit_extend, "extend")):
        frame: pd.DataFrame = getattr(points, name)
        named = sorted(set(frame.loc[frame["source"] == "kernels", "point"].astype(str)))
        found: list[float] = []
        for fold in range(folds):
            out = (frame["source"] == "kernels") & frame["point"].astype(str).isin(named[fold::folds])
            if not out.any():
                continue
            times = fitted(frame[~out])
            found += _relative(times, frame[out])
        errors[what] = _p50_p95(found)
    return errors


def _relative(times: DecodeTimes | ExtendTimes, rows: pd.DataFrame) -> list[float]:
    factor, work = rows["table"].map(times.pages).fillna(1.0).to_numpy(), columns(rows)
    if isinstance(times, DecodeTimes):
        us = decode_us(times, work, rows["block"].astype(str).map(times.token_us).to_numpy(), factor)
    else:
        us = extend_us(times, work, factor) + work.lists * list_us(times, work.sequences)
    return list(np.abs(us / work.us - 1))


def _p50_p95(values: Sequence[float]) -> list[float]:
    return [round(float(np.quantile(values, share)), 4) for share in (0.5, 0.95)]


# --- what is not attention ---


def fit_rate(pairs: Iterable[tuple[float, float]], what: str) -> tuple[float, float]:
    """(fixed us, amount per us) of us = fixed + amount / rate, least squares of the relative error; fixed >= 0.01."""
    rows = list(pairs)
    if len(rows) < 2:
        raise ValueError(f"calibrate: expected at least 2 {what} rows, found {len(rows)}")
    amounts, us = (np.array(part, float) for part in zip(*rows, strict=True))
    design = np.stack([1 / us, amounts / us], axis=1)
    fixed, slope = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
    if fixed < 0.01:
        fixed, slope = 0.01, float((amounts / us).sum() / ((amounts / us) ** 2).sum())
    if slope <= 0:
        raise ValueError(f"calibrate: {what} rows do not grow with their amount")
    return float(fixed), float(1 / slope)


def store_times(rows: Iterable[Mapping[str, Any]], base: GpuTimes) -> GpuTimes:
    """Stores of the benchmark, on shuffled slots."""
    pairs = [
        (row["gbps"] * row["us"] * 1e3, row["us"])
        for row in rows
        if row["op"] == "store" and row.get("kernel") == "kvarena" and row.get("placement") == "shuffled"
    ]
    if not pairs:
        return base
    us, rate = fit_rate(pairs, "store")
    return replace(base, store_us=us, store_gbps=rate / 1e3)


def model_times(path: Path, times: GpuTimes, parameters: float) -> tuple[GpuTimes, dict[str, list[float]]]:
    """Linear layers, sampling and the rest of a step, from the model's own file; and errors of whole decode steps.

    A batch size is predicted from a fit that has not seen it. Raises ValueError naming the file.
    """
    from kvarena.experiments.engine.calibrate_model import decode_cells, fit_rest, linear_fit

    try:
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
        linear, swaps = parts["linear"]["linear"], parts["linear"]["swap"]
        cells = decode_cells(parts["decode"]["cells"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as results of the 8B model ({error})") from None
    times = linear_fit(linear, times, parameters)
    moved = [(row["bytes"], row[way]) for row in swaps for way in ("out_us", "in_us")]
    times = replace(times, swap_gbps=fit_rate(moved, "swap")[1] / 1e3)
    errors = []
    for batch in sorted({cell.batch for cell in cells}):
        rest = fit_rest([cell for cell in cells if cell.batch != batch], times)
        errors += [cell.error(rest) for cell in cells if cell.batch == batch]
    return fit_rest(cells, times), {"decode steps of the 8B model": _p50_p95(errors)}


@dataclass(frozen=True)
class Calibration:
    """Coefficients; `held_out` those of a fit that has not seen a workload, by its name; `steps` every measured step
    beside its prediction by them."""

    times: GpuTimes
    held_out: dict[str, GpuTimes]
    steps: pd.DataFrame

    def save(self, out: Path) -> None:
        """The coefficients at `out`, the others beside it."""
        save_gpu_times(self.times, out)
        for load, times in self.held_out.items():
            save_gpu_times(times, out.with_name(f"{out.stem}_without_{load}.json"))


def calibrate(kernels: Path, steps: Path, model: Path | None) -> Calibration:
    """Fit everything, with the errors out of sample.

    Raises ValueError naming the file. Cost: a minute or two.
    """
    points, rows = kernel_points(kernels)
    base = store_times(rows, GpuTimes())
    if points.launch_us:
        base = replace(base, launch_us=dict(points.launch_us))
    measured = read_steps(steps)
    points = points + step_points(measured, base)
    times = fit(points, base)
    held_out = {load: fit(without(points, load), base) for load in dict.fromkeys(step.load for step in measured)}
    frame = step_frame(measured, held_out, times)
    errors = {**kernel_errors(points, base), **{f"steps, {kind}": pair for kind, pair in error_table(frame).items()}}
    source = f"fitted to {points.sources[0]} and {points.sources[1]} of {steps.name}"
    if model is not None:
        parameters = COMPUTE[measured[0].model].parameters
        times, whole = model_times(model, times, parameters)
        errors, source = {**errors, **whole}, f"{source}, and {model.name}"
        held_out = {load: model_times(model, each, parameters)[0] for load, each in held_out.items()}
    held_out = {
        load: replace(each, calibrated=True, source=f"{source}, {load} left out") for load, each in held_out.items()
    }
    return Calibration(replace(times, calibrated=True, source=source, error=errors), held_out, frame)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results of `kvarena bench kernels`")
    parser.add_argument("--out", type=Path, help="file to write; default step_times.json beside the results")
    parser.add_argument("--steps", type=Path, help="measured steps; default steps.json beside the results")
    parser.add_argument("--model", type=Path, help="the 8B model; default model.json beside the results, if there")
    options = parser.parse_args(arguments)
    out = options.out or options.results.with_name("step_times.json")
    beside = options.results.with_name("model.json")
    model = options.model or (beside if beside.is_file() else None)
    try:
        refuse_unwritable(out)
        found = calibrate(options.results, options.steps or options.results.with_name("steps.json"), model)
    except ValueError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    found.save(out)
    _save_figure(found.steps, found.times, out)
    print(json.dumps({"source": found.times.source, "error": found.times.error}))
    for line in rank_lines(rank_table(found.steps)):
        print(line)
    return 0


def _save_figure(frame: pd.DataFrame, times: GpuTimes, out: Path) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from kvarena.experiments.style import STYLE, add_footer, save_figure

    with mpl.rc_context(STYLE):
        figure: Any = plt.figure(figsize=(8.4, 3.9), layout="constrained")
        axes = figure.subplots(1, 2, width_ratios=[1.0, 1.15])
        plot_held_out(frame, axes[0])
        plot_sums(rank_table(frame), axes[1])
        add_footer(figure, f"kvarena; {times.source}; each workload from a fit that has not seen it")
        save_figure(figure, out.with_suffix(""))
        plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
