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

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments.alike import UNLIKE, page_notes
from kvarena.experiments.budget import format_bytes
from kvarena.experiments.config import SCHEMA_VERSION, Config, config_from_mapping
from kvarena.experiments.foreign import read_json, read_toml
from kvarena.experiments.outputs import refuse_other_options
from kvarena.experiments.plots import _finish, _new_axes, _pool_axis, _styled
from kvarena.experiments.style import FORMATS, looks, printable
from kvarena.experiments.sweep import SweepResult, sweep, write_whole
from kvarena.experiments.tables import Table
from kvarena.experiments.wrong_kind import reads

if TYPE_CHECKING:
    from kvarena.experiments.results import Result
    from matplotlib.axes import Axes

MEASURES = {"token_hit_rate": "whole run", "token_hit_rate_last_half": "last half"}
REPLICATES = 30
STUDY = "study.json"
FILES = (STUDY, "intervals.csv", *(f"intervals.{kind}" for kind in FORMATS))


@dataclass(frozen=True)
class Replicates:
    """A comparison and its resamples.

    trace       name of the trace
    allocators  name, label, kind and page_size of each, the first is the one that others are compared with
    unit        what was drawn, in words
    footer      the line of provenance for figures
    cautions    what makes its allocators' rates unlike (`alike.py`)
    table       a row a resample (0: the trace itself), pool and allocator, with the measures
    intervals   a row a measure, pool and allocator beside the first: difference, low, high (points), p, q, within_noise
    """

    trace: str
    allocators: list[dict[str, Any]]
    unit: str
    footer: str
    table: pd.DataFrame
    intervals: pd.DataFrame
    cautions: tuple[str, ...] = ()

    @property
    def labels(self) -> dict[str, str]:
        """Allocator -> text for a legend."""
        return {one["name"]: one["label"] for one in self.allocators}


def replicate(
    config: Config,
    out: Path | str,
    *,
    replicates: int = REPLICATES,
    jobs: int | None = None,
    ray: str | None = None,
    progress: bool = False,
) -> Replicates:
    """Run what is not finished of a comparison and its resamples; `study.json` and `intervals.csv` go to `out`.

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
    if len(config.workload.seed_list) > 1:
        raise ValueError(
            f"workload.seeds: expected one seed, found {config.workload.seeds}: a study draws from one trace; choose "
            "it as seeds = [N] (several seeds are draws by themselves: kvarena compare --seeds N)"
        )
    _refuse_few_groups(config)
    points: list[dict[str, Any]] = [{}, *({"workload.resample": draw} for draw in range(1, replicates + 1))]
    base = {**_at_fixed_pools(config), "sweep": points}
    _refuse_other(Path(out), base)
    done = sweep(base, out, jobs=jobs, ray=ray, progress=progress, beside=FILES)
    if done.failures:
        failure = next(iter(done.failures.values()))
        raise ValueError(f"resample: {len(done.failures)} cells failed; the first: {failure['error']}")
    found = _collect(done)
    data = {"schema_version": SCHEMA_VERSION, "config": _without_sweep(base)}
    data |= {"trace": found.trace, "allocators": found.allocators, "unit": found.unit, "footer": found.footer}
    data["cautions"] = list(found.cautions)
    data["table"] = found.table.to_dict("list")
    write_whole(Path(out) / STUDY, json.dumps(data, indent=1) + "\n")
    write_whole(Path(out) / "intervals.csv", found.intervals.to_csv(index=False, lineterminator="\n"))
    return found


def _refuse_few_groups(config: Config) -> None:
    """Raise ValueError before anything runs when the trace cannot be resampled."""
    from kvarena.experiments.families import groups_of
    from kvarena.experiments.loading import trace_of

    groups_of(trace_of(config, config.workload.seed_list[0]), config.workload.requests)


def _refuse_other(folder: Path, base: dict[str, Any]) -> None:
    """Raise ValueError when the study in the folder, finished or not, is of another config. More resamples of the same
    one are welcome."""
    earlier = None
    if (folder / STUDY).is_file():
        earlier = read_json(folder / STUDY).get("config")
    cell = next(iter(sorted(folder.glob("cells/*/config.toml"))), None)
    if earlier is None and cell is not None:
        earlier = read_toml(cell)
        earlier["workload"].pop("resample", None)
    if earlier is not None:
        refuse_other_options(folder, "a study", earlier, _without_sweep(base))


def _without_sweep(base: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name != "sweep"}


@reads("resample")
def open_replicates(path: Path | str) -> Replicates:
    """Read a finished study; `open_sweep` reads its cells. Raises ValueError when there is none."""
    file = Path(path) / STUDY
    try:
        data = read_json(file)
        table = pd.DataFrame(data["table"])
        names = [one["name"] for one in data["allocators"]]
        found = Replicates(
            data["trace"],
            data["allocators"],
            data["unit"],
            data["footer"],
            table,
            intervals(table, names),
            tuple(data.get("cautions", ())),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as a study of resamples ({error})") from None
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema_version: expected {SCHEMA_VERSION}")
    return found


def _collect(done: SweepResult) -> Replicates:
    from kvarena.experiments.report import result_footer

    draws = {cell["key"]: cell["point"].get("workload.resample", 0) for cell in done.cells}
    table = done.table.copy()
    table.insert(0, "resample", table["cell"].map(draws))
    keys = ["resample", "pool_bytes", "allocator"]
    table = table[[*keys, *MEASURES]].sort_values(keys[:2], kind="stable").reset_index(drop=True)
    result, drawn = (
        done.result(next(key for key, draw in draws.items() if bool(draw) == one)) for one in (False, True)
    )
    unit = next(text.partition(" of its ")[2] for text in drawn.warnings if text.startswith("resample "))
    names = ("name", "label", "kind", "page_size")
    allocators = [{name: one[name] for name in names} for one in result.manifest["allocators"]]
    rows = intervals(table, result.allocators)
    about = str(result.manifest["trace"]), allocators, unit, result_footer(result)
    return Replicates(*about, table, rows, _cautions(result, done.table))


def _cautions(result: Result, cells: pd.DataFrame) -> tuple[str, ...]:
    """What makes the rates of the trace itself unlike, and in how many draws the allocators rejected unlike counts."""
    about, found = result.manifest, list[str]()
    if result.config["workload"]["unit"] == "ids":
        sizes = {one["name"]: one["page_size"] for one in about["allocators"]}
        found += page_notes(sizes, about["tokens_per_id"])
    found += [text for text in result.warnings if text.startswith(UNLIKE)]
    counts = cells.groupby(["cell", "pool_bytes"])["rejected"].nunique() > 1
    if draws := int(counts.groupby("cell").any().sum()):
        found.append(
            f"in {draws} of {cells['cell'].nunique()} cells the allocators rejected unlike numbers of requests"
        )
    return tuple(found)


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
    names = found.labels
    first = found.allocators[0]["name"]
    rows = []
    keys = found.intervals[["pool_bytes", "allocator"]].drop_duplicates().itertuples(index=False)
    for pool, name in keys:
        own = (found.intervals["pool_bytes"] == pool) & (found.intervals["allocator"] == name)
        part = found.intervals[own].to_dict("records")
        by = {row["measure"]: row for row in part}
        q = ", ".join(f"{by[measure]['q']:.2g}" for measure in MEASURES)
        rows.append([format_bytes(int(pool)), names[str(name)], *(_cell(by[measure]) for measure in MEASURES), q])
    noisy = int(found.intervals["within_noise"].sum())
    count = int(found.intervals["resamples"].iloc[0])
    notes = [
        f"drawn: {found.unit}",
        f"points to {names[first]}; 95 % intervals from {count} resamples; q: false discovery rate over this table",
        f"{noisy} of {len(found.intervals)} differences are within noise (~)" if noisy else "no difference is noise",
        *found.cautions,
    ]
    heads = ["pool", "allocator", *MEASURES.values(), "q"]
    return Table(f"Difference in token hit rate, {found.trace}", heads, rows, notes)


def _cell(row: dict[Any, Any]) -> str:
    mark = " ~" if row["within_noise"] else ""
    return f"{row['difference']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]{mark}"


@_styled
def plot_intervals(found: Replicates, ax: Axes | None = None) -> Axes:
    """Paired difference of the token hit rate, points, against pool size, with its 95 % interval; hollow: last half."""
    ax = ax or _new_axes()
    ax.axhline(0, color="#444444", linewidth=0.8)
    every = looks(found.allocators)
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
    if pools.max() == pools.min():  # nothing to scale by: the points stand around the middle
        ax.set_xlim(pools.min() / 1.15, pools.max() * 1.15)
    else:
        ax.margins(x=0.06)
        ax.autoscale(axis="x")
    first = found.allocators[0]["label"]
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
