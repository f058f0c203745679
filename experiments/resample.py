"""How sure is a difference? The same comparison on other draws of the trace, as a sweep, and intervals from it.

Cell 0 is the comparison itself; cells 1 .. R replay the trace's 1st .. R-th resample (`families.py`) at the same pools
in bytes. Both allocators of a cell see the same requests, so differences are paired. Of each difference d on the trace,
with standard deviation s over the resamples:

    interval  d +- t(R-1, 0.975) s        covers the truth of a known source in 92-98 % of studies (by test)
    p         two-sided, of d/s under Student's t with R-1 degrees of freedom
    q         p corrected for all differences of the table (false discovery rate, Benjamini and Yekutieli 2001: valid
              under any dependence; whole run, last half and pool sizes of one trace do depend on each other)

Within noise: the interval holds zero. Whole-run and last-half rates stand side by side: a cold start counts in one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments.budget import format_bytes
from kvarena.experiments.config import Config, config_from_mapping
from kvarena.experiments.plots import _finish, _new_axes, _pool_axis, _styled
from kvarena.experiments.style import printable
from kvarena.experiments.sweep import SweepResult, open_sweep, sweep, write_whole
from kvarena.experiments.tables import Table

if TYPE_CHECKING:
    from kvarena.experiments.results import Result
    from matplotlib.axes import Axes

MEASURES = {"token_hit_rate": "whole run", "token_hit_rate_last_half": "last half"}
REPLICATES = 30


@dataclass(frozen=True)
class Replicates:
    """A comparison and its resamples.

    result     the comparison on the trace itself
    table      a row a resample, pool and allocator: `resample`, `pool_bytes`, `allocator`, and the measures
    intervals  a row a measure, pool and allocator beside the first: difference, low, high (points), p, q, within_noise
    unit       what was drawn, in words
    sweep      where the cells are
    """

    result: Result
    table: pd.DataFrame
    intervals: pd.DataFrame
    unit: str
    sweep: SweepResult


def replicate(
    config: Config,
    out: Path | str,
    *,
    replicates: int = REPLICATES,
    jobs: int | None = None,
    ray: str | None = None,
    progress: bool = False,
) -> Replicates:
    """Run a comparison and its resamples, what is not finished of them, in parallel; write `intervals.csv` beside.

    replicates  at least 10: a standard deviation of fewer says little
    jobs, ray   as in `sweep`

    Raises ValueError for a trace that cannot be resampled (lengths only, or fewer than 20 groups), for one allocator
    alone, and when a cell failed. Costs 1 + replicates times the comparison.
    """
    if replicates < 10:
        raise ValueError(f"replicates: expected at least 10, found {replicates}")
    if len(config.entries()) < 2:
        raise ValueError("allocators: a difference needs two, found one")
    if config.workload.resample is not None:
        raise ValueError("workload.resample: set by this study itself; leave it out")
    points: list[dict[str, Any]] = [{}, *({"workload.resample": draw} for draw in range(1, replicates + 1))]
    base = {**_at_fixed_pools(config), "sweep": points}
    done = sweep(base, out, jobs=jobs, ray=ray, progress=progress)
    if done.failures:
        failure = next(iter(done.failures.values()))
        raise ValueError(f"resample: {len(done.failures)} cells failed; the first: {failure['error']}")
    found = open_replicates(out)
    write_whole(Path(out) / "intervals.csv", found.intervals.to_csv(index=False, lineterminator="\n"))
    return found


def open_replicates(path: Path | str) -> Replicates:
    """Read the folder of a finished study. Raises ValueError when it is none."""
    done = open_sweep(path)
    base = [cell for cell in done.cells if not cell["point"]]
    draws = {cell["key"]: cell["point"].get("workload.resample") for cell in done.cells}
    if len(base) != 1 or not all(isinstance(draw, int) for key, draw in draws.items() if key != base[0]["key"]):
        raise ValueError(f"{path}: a sweep, but not of resamples")
    if unfinished := [cell for cell in done.cells if cell["state"] != "finished"]:
        raise ValueError(f"{path}: {len(unfinished)} of {len(done.cells)} cells are not finished; run it again")
    table = done.table.copy()
    table.insert(0, "resample", [draws[key] or 0 for key in table["cell"]])
    keys = ["resample", "seed", "pool_bytes", "allocator"]
    table = table[[*keys, *MEASURES]].sort_values(keys[:3], kind="stable").reset_index(drop=True)
    result = done.result(base[0]["key"])
    return Replicates(result, table, intervals(table, result.allocators), _unit(done), done)


def _unit(done: SweepResult) -> str:
    drawn = done.result(next(cell["key"] for cell in done.cells if cell["point"]))
    return next(text.partition(" of its ")[2] for text in drawn.warnings if text.startswith("resample "))


def intervals(table: pd.DataFrame, allocators: list[str]) -> pd.DataFrame:
    """Paired differences to the first allocator with nominal 95 % intervals, in points, and q over the whole table.

    table  as `Replicates.table`; resample 0 is the trace itself
    """
    from scipy.stats import false_discovery_control

    first, *others = allocators
    rows = []
    for measure in MEASURES:
        wide = table.pivot_table(index=["resample", "pool_bytes"], columns="allocator", values=measure)
        for name in others:
            for pool, differences in (100 * (wide[name] - wide[first])).groupby("pool_bytes"):
                values = differences.droplevel("pool_bytes")
                rows.append({"measure": measure, "pool_bytes": pool, "allocator": name, **interval(values)})
    frame = pd.DataFrame(rows)
    frame["q"] = false_discovery_control(frame["p"], method="by") if len(frame) else []
    return frame


def interval(values: pd.Series[float]) -> dict[str, Any]:
    """Difference, nominal 95 % interval and p of one paired difference: `values` by resample, 0 the trace itself."""
    from scipy.stats import t

    estimate, draws = float(values.loc[0]), values.drop(0)
    spread, freedom = float(draws.std(ddof=1)), len(draws) - 1
    half = float(t.ppf(0.975, freedom)) * spread
    if spread > 0:
        p = 2 * float(t.sf(abs(estimate) / spread, freedom))
    else:  # all draws alike: certain, or no difference at all
        p = 1.0 if math.isclose(estimate, 0, abs_tol=1e-12) else 0.0
    return {
        "difference": estimate,
        "low": estimate - half,
        "high": estimate + half,
        "resamples": len(draws),
        "p": p,
        "within_noise": estimate - half <= 0 <= estimate + half,
    }


def interval_table(found: Replicates) -> Table:
    """For people: a row a pool, whole run and last half side by side."""
    names = found.result.labels
    first = found.result.allocators[0]
    rows = []
    keys = found.intervals[["pool_bytes", "allocator"]].drop_duplicates().itertuples(index=False)
    for pool, name in keys:
        part = found.intervals.query("pool_bytes == @pool and allocator == @name").to_dict("records")
        by = {row["measure"]: row for row in part}
        q = ", ".join(f"{by[measure]['q']:.2g}" for measure in MEASURES)
        rows.append([format_bytes(int(pool)), names[str(name)], *(_cell(by[measure]) for measure in MEASURES), q])
    noisy = int(found.intervals["within_noise"].sum())
    count = int(found.intervals["resamples"].iloc[0])
    notes = [
        f"drawn: {found.unit}",
        f"points to {names[first]}; 95 % intervals from {count} resamples; q: false discovery rate over this table",
        f"{noisy} of {len(found.intervals)} differences are within noise (~)" if noisy else "no difference is noise",
    ]
    heads = ["pool", "allocator", *MEASURES.values(), "q"]
    return Table(f"Difference in token hit rate, {found.result.manifest['trace']}", heads, rows, notes)


def _cell(row: dict[Any, Any]) -> str:
    mark = " ~" if row["within_noise"] else ""
    return f"{row['difference']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]{mark}"


@_styled
def plot_intervals(found: Replicates, ax: Axes | None = None) -> Axes:
    """Paired difference of the token hit rate, points, against pool size, with its 95 % interval; hollow: last half."""
    from kvarena.experiments.plots import _looks

    ax = ax or _new_axes()
    ax.axhline(0, color="#444444", linewidth=0.8)
    every = _looks(found.result)
    series = list(found.intervals.groupby(["allocator", "measure"], sort=False))
    pools = found.intervals["pool_bytes"]
    step = max(pools.max() / pools.min(), 4) ** 0.012
    for place, ((name, measure), part) in enumerate(series):
        look = every[str(name)]
        half = measure != "token_hit_rate"
        ax.errorbar(
            part["pool_bytes"] * step ** (place - (len(series) - 1) / 2),  # beside each other, not on top
            part["difference"],
            yerr=(part["high"] - part["low"]) / 2,
            color=look.colour,
            marker=look.marker,
            markerfacecolor="white" if half else look.colour,
            linestyle=(0, (2, 1.5)) if half else "-",
            capsize=2.5,
            linewidth=1.2,
            label=f"{printable(look.label)}, {MEASURES[str(measure)]}",
        )
    _pool_axis(ax, found.intervals)
    ax.margins(x=0.06)
    ax.autoscale(axis="x")
    first = found.result.labels[found.result.allocators[0]]
    ax.set_ylabel(f"difference to {printable(first)}, points", fontsize=7.5)
    return _finish(ax, found.intervals)


def _at_fixed_pools(config: Config) -> dict[str, Any]:
    """The config with its pools in bytes, as the trace itself gives them, and one seed: draws are the randomness."""
    from kvarena.experiments.loading import load_workloads
    from kvarena.experiments.pools import plan

    fields = config.resolved()
    fields["workload"]["seeds"] = config.workload.seed_list[:1]
    one = config_from_mapping(fields)
    cells = plan(one, load_workloads(one), one.entries())
    fields["pool"]["pool"] = [f"{size} B" for size in sorted({cell.pool_bytes for cell in cells})]
    return fields
