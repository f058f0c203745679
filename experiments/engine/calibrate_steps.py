"""Measured steps against predicted ones: errors by kind, and whether the designs rank as they do on the card.

Two designs are tied on the card where the sums of their steps differ by no more than the sums of one design do from
round to round. Without rounds there is no spread, and every difference counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from kvarena.experiments.engine.calibrate_points import MeasuredStep
from kvarena.experiments.engine.step_time import COMPUTE, GpuTimes, StepTimeModel
from kvarena.experiments.metrics import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def predicted_us(step: MeasuredStep, times: GpuTimes, *, eager: bool = False) -> float:
    """Store and attention of all layers; `eager`: launched kernel by kernel."""
    layout = step.layout
    model = StepTimeModel(
        step.shape,
        COMPUTE[step.model],
        layout.page_size,
        times,
        table=layout.table,
        table_tokens=layout.table_tokens,
    )
    return (model.launched_us if eager else model.kernels_us)(step.plan, step.lists)


def step_frame(steps: Sequence[MeasuredStep], held_out: Mapping[str, GpuTimes], times: GpuTimes) -> pd.DataFrame:
    """A row a step: measured, predicted by the fit that has not seen its workload (`predicted_us`), by the whole fit
    (`fitted_us`), and the relative error of the first."""
    rows = []
    for step in steps:
        rows.append(
            {
                "load": step.load,
                "design": step.design,
                "step": step.number,
                "kind": step.kind,
                "measured_us": step.measured_us,
                "predicted_us": predicted_us(step, held_out[step.load]),
                "fitted_us": predicted_us(step, times),
                "eager_us": step.eager_us,
                "predicted_eager_us": predicted_us(step, held_out[step.load], eager=True),
                "repeats_us": step.repeats,
            }
        )
    frame = pd.DataFrame(rows)
    return frame.assign(error=(frame["predicted_us"] / frame["measured_us"] - 1).abs())


def error_table(frame: pd.DataFrame) -> dict[str, list[float]]:
    """{"decode": [p50, p95], "mixed": ..., "all": ...} of the relative error of a step; "eager" where measured."""
    found = {}
    for kind, part in [*frame.groupby("kind"), ("all", frame)]:
        found[str(kind)] = _p50_p95(part["error"])
    eager = frame.dropna(subset="eager_us")
    if len(eager):
        found["eager"] = _p50_p95((eager["predicted_eager_us"] / eager["eager_us"].astype(float) - 1).abs())
    return found


def _p50_p95(errors: pd.Series) -> list[float]:
    ordered = sorted(errors)
    return [round(percentile(ordered, share), 4) for share in (0.5, 0.95)]


def rank_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a workload and design: time of all its steps, ms, measured and predicted; both over that of the fastest;
    and `spread`, the largest relative difference between two rounds of one design (NaN without rounds)."""
    sums = frame.groupby(["load", "design"], sort=False)[["measured_us", "predicted_us"]].sum() / 1e3
    sums.columns = pd.Index(["measured_ms", "predicted_ms"])
    sums["spread"] = [_spread(part) for _, part in frame.groupby(["load", "design"], sort=False)]
    for name in ("measured", "predicted"):
        best = sums[f"{name}_ms"].groupby("load").transform("min")
        sums[f"{name}_over_best"] = sums[f"{name}_ms"] / best
        sums[f"{name}_rank"] = sums[f"{name}_ms"].groupby("load").rank().astype(int)
    return sums.reset_index()


def _spread(part: pd.DataFrame) -> float:
    rounds = [row for row in part["repeats_us"] if len(row)]
    count = max((len(row) for row in rounds), default=0)
    whole = np.array([row for row in rounds if len(row) == count]) if count > 1 else np.zeros((0, 0))
    if not whole.size:
        return float("nan")
    sums = whole.sum(axis=0)
    return float(sums.max() / sums.min() - 1)


def misranked(ranks: pd.DataFrame) -> list[tuple[str, str, str, float, float]]:
    """(workload, design, design, measured ratio, spread) of the pairs that the model puts the other way round, ties of
    the card left out."""
    wrong = []
    for load, part in ranks.groupby("load", sort=False):
        spread = float(np.nan_to_num(part["spread"].max()))
        rows = part.sort_values("measured_ms").to_dict("records")
        for place, first in enumerate(rows):
            for second in rows[place + 1 :]:
                ratio = second["measured_ms"] / first["measured_ms"] - 1
                if ratio > spread and first["predicted_ms"] > second["predicted_ms"]:
                    wrong.append((str(load), first["design"], second["design"], ratio, spread))
    return wrong


def rank_lines(ranks: pd.DataFrame) -> list[str]:
    """For people: the order on the card and in the model, workload by workload."""
    lines = []
    for load, part in ranks.groupby("load", sort=False):
        texts = []
        for name in ("measured", "predicted"):
            rows = part.sort_values(f"{name}_ms").to_dict("records")
            texts.append(", ".join(f"{row['design']} {100 * (row[f'{name}_over_best'] - 1):+.1f} %" for row in rows))
        spread = part["spread"].max()
        rounds = "one round" if spread != spread else f"round to round {100 * spread:.2f} %"
        lines.append(f"{load}: card {texts[0]} ({rounds}); model {texts[1]}")
    for load, first, second, ratio, _ in misranked(ranks):
        lines.append(f"{load}: the card has {first} {100 * ratio:.2f} % before {second}, the model behind it")
    return lines


def plot_held_out(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Predicted against measured time of every step, by kind; no step took part in the fit that predicts it."""
    errors = error_table(frame)
    for (kind, part), marker in zip(frame.groupby("kind"), "os^", strict=False):
        p50, p95 = errors[str(kind)]
        label = f"{kind}, {len(part):,} steps: p50 {100 * p50:.1f} %, p95 {100 * p95:.1f} %"
        face: Any = {"markerfacecolor": "none", "alpha": 0.5, "markeredgewidth": 0.6}
        ax.plot(part["measured_us"] / 1e3, part["predicted_us"] / 1e3, marker, label=label, markersize=3, **face)
    ends = [frame["measured_us"].min() / 1e3, frame["measured_us"].max() / 1e3]
    ax.plot(ends, ends, color="#555555", linewidth=1, linestyle=":", label="equal")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured (ms a step, all layers)")
    ax.set_ylabel("predicted (ms)")
    ax.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.01), borderaxespad=0)
    return ax


def plot_sums(ranks: pd.DataFrame, ax: Axes) -> Axes:
    """Time of all steps of each design over that of the fastest, on the card and in the model, workload by workload."""
    from kvarena.experiments.style import KIND_COLOURS

    loads, designs = (list(dict.fromkeys(ranks[name])) for name in ("load", "design"))
    for place, load in enumerate(loads):
        part = ranks[ranks["load"] == load].set_index("design")
        for number, design in enumerate(designs):
            at = place + (number - (len(designs) - 1) / 2) * 0.2
            row, colour = part.loc[design], KIND_COLOURS[design.split("-")[0]]
            small: dict[str, Any] = {"markersize": 6, "color": colour}
            measured, predicted = (100 * (row[f"{name}_over_best"] - 1) for name in ("measured", "predicted"))
            ax.plot([at, at], [measured, predicted], color=colour, linewidth=0.8)
            ax.plot(at, measured, "_", markeredgewidth=2.2, **{**small, "markersize": 11})
            ax.plot(at, predicted, "o", markerfacecolor="white", **small)
            ax.annotate(design, (at, max(measured, predicted)), (0, 6), textcoords="offset points", rotation=90,
                        ha="center", va="bottom", fontsize=6.5)  # fmt: skip
    ax.plot([], [], "_", color="black", markeredgewidth=2.2, markersize=11, label="card")
    ax.plot([], [], "o", color="black", markerfacecolor="white", label="model, workload not seen")
    ax.set_xticks(range(len(loads)), loads)
    ax.set_ylabel("time of all steps over the fastest (%)")
    ax.set_ylim(
        -0.6, 1.3 * 100 * (float(ranks[["measured_over_best", "predicted_over_best"]].to_numpy().max()) - 1) + 0.4
    )
    ax.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.01), borderaxespad=0, ncols=2)
    return ax
