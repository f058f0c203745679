"""The attribution ladder: what each field in which two designs differ does to hits, concurrency, preemptions, time.

    OUT/config.toml        what was asked for, resolved: a config of `kvarena ladder`
    OUT/ladder.json        ends, rungs, what is not observable and why, pools, checks
    OUT/attribution.csv    a row a pool, metric and rung: exact Shapley share, whole tokens, and its range
    OUT/interactions.csv   a row a pool, metric and pair of rungs
    OUT/subsets.csv        a row a pool and subset: what was counted
    OUT/times.csv          allocator time, attributed alike, with its spread over rounds
    OUT/rounds.json        that time as measured, a subset and round: what another run does not repeat
    OUT/figures/           waterfall and interactions
    OUT/sweep/             the cells; a ladder that was killed goes on where it stopped

Every subset is run by the general form; its ends are run by the fast forms too, and must decide alike.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.allocators.interface import AllocatorError
from kvarena.experiments.budget import PoolTooSmallError
from kvarena.experiments.config import SCHEMA_VERSION, ConfigError, apply_sets, config_from_mapping
from kvarena.experiments.foreign import read_json, read_toml
from kvarena.experiments.ladder_plan import (
    LOWER_FAST,
    MANIFEST,
    UPPER_FAST,
    UPPER_WHOLE,
    LadderPlan,
    begin_ladder,
    plan_ladder,
)
from kvarena.experiments.ladder_times import Times, measured, medians
from kvarena.experiments.loading import Workload, load_workloads
from kvarena.experiments.partial import Interrupted
from kvarena.experiments.pools import plan as plan_pools
from kvarena.experiments.pools import pool_sizes
from kvarena.experiments.provenance import provenance
from kvarena.experiments.shapley import apportion, interaction, marginals, shapley
from kvarena.experiments.specs import allocator_entry, an_id_a_page, display_label
from kvarena.experiments.sweep import SweepResult, sweep, write_whole
from kvarena.experiments.sweep_plan import kind_of
from kvarena.experiments.wrong_kind import reads

DEFAULT_POOL = "30 %"
# metric -> (unit, whether shares are apportioned in whole units)
METRICS: dict[str, tuple[str, bool]] = {
    "hit_tokens": ("tokens", True),
    "token_hit_rate": ("of the prompt tokens", False),
    "concurrency": ("requests", False),
    "preemptions": ("times", True),
}
TIME = "allocator_us"  # microseconds of CPU a request in the general form, measured
COUNTS = ("hit_tokens", "prompt_tokens", "evicted_pages")


@dataclass
class Ladder:
    """A finished ladder.

    manifest      ends, rungs (name -> field -> both values), held (field -> why), pools, visible, checks
    attribution   pool_bytes, metric, rung, share (exact), value, whole, alone, last, low, high
    interactions  pool_bytes, metric, a, b, value
    subsets       pool_bytes, mask, upper, then what was counted
    times         as attribution, of the measured time
    """

    manifest: dict[str, Any]
    attribution: pd.DataFrame
    interactions: pd.DataFrame
    subsets: pd.DataFrame
    times: pd.DataFrame
    path: Path | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def rungs(self) -> list[str]:
        """Names, in the order of the walk."""
        return list(self.manifest["rungs"])

    @property
    def reference_pool(self) -> int:
        """The pool that single-pool tables and figures show."""
        pools = self.manifest["pools"]
        return int(pools[len(pools) // 2])

    def of(self, metric: str, pool: int | None = None) -> pd.DataFrame:
        """Attribution of one metric at one pool, in the order of the walk."""
        table = self.times if metric == TIME else self.attribution
        pool = self.reference_pool if pool is None else pool
        found = table[(table["metric"] == metric) & (table["pool_bytes"] == pool)]
        if found.empty:
            known = ", ".join([*self.attribution["metric"].unique(), TIME])
            raise ValueError(
                f"metric {metric!r} at pool {pool}: known metrics: {known}; pools {self.manifest['pools']}"
            )
        return found.reset_index(drop=True)

    @property
    def unit(self) -> str:
        """What a hit token of the tables is: a token, or an id of the trace that stands for several."""
        size = self.manifest["tokens_per_id"]
        return "" if size == 1 else f"each token here is an id of {size} tokens"

    def end(self, metric: str, *, upper: bool, pool: int | None = None) -> float:
        """A metric at one end."""
        rows = self.subsets[self.subsets["pool_bytes"] == (self.reference_pool if pool is None else pool)]
        return float(rows[metric].iloc[-1 if upper else 0])

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from kvarena.experiments.ladder_tables import ladder_tables

        yield from ladder_tables(self)


def ladder(
    base: Mapping[str, Any],
    out: Path | str,
    *,
    lower: Any = "vllm",
    upper: Any = "sglang",
    groups: Sequence[str] = (),
    extra: Mapping[str, tuple[Any, Any]] | None = None,
    sets: Sequence[str] = (),
    jobs: int | None = None,
    ray: str | None = None,
    rounds: int = 3,
    progress: bool = False,
) -> Ladder:
    """Walk from one design to another over a config of `kvarena compare` or `kvarena run`, and write the folder `out`.

    groups, extra  see `plan_ladder`; jobs, ray as in `sweep`
    rounds  of the allocator's time (`ladder_times.py`); 0: as the sweep measured it once, without a spread

    Raises ValueError for a wrong config, a failed cell, or a ladder with other options in `out`; AllocatorError where a
    fast form decides otherwise than the general one.
    """
    started, folder = time.time(), Path(out)
    resolved, workloads = _resolve(base, sets, lower, upper)
    plan = plan_ladder(resolved, workloads[0].trace.visible, lower=lower, upper=upper, groups=groups, extra=extra)
    config = begin_ladder(folder, resolved, plan, groups, extra or {})
    cells = {cell.key: cell for cell in (*plan.cells, *plan.ends.values())}
    done = sweep(list(cells.values()), folder / "sweep", jobs=jobs, ray=ray, progress=progress)
    if done.failures:
        key, failure = next(iter(done.failures.items()))
        raise ValueError(f"ladder: cell {failure['point']} failed: {failure['error']} (sweep/failed/{key}.json)")
    tick = (lambda text: print(text, file=sys.stderr, flush=True)) if progress else None
    try:
        times = measured(folder, plan, workloads, rounds, tick) if rounds else {}
    except KeyboardInterrupt:
        kept = (
            f"all {len(cells)} cells are finished in {folder}, their times are not; the same command goes on from there"
        )
        raise Interrupted(kept) from None
    made = _attribute(plan, _counts(plan, done), resolved, workloads, times)
    path = workloads[0].trace.path
    inputs = [path] if path is not None and path.is_file() else []
    made.provenance = provenance([workload.seed for workload in workloads], inputs, started)
    save(made, folder, config)
    return made


def _resolve(
    base: Mapping[str, Any], sets: Sequence[str], lower: Any, upper: Any
) -> tuple[dict[str, Any], list[Workload]]:
    """Every field of the base with its value, pools in bytes that hold for all cells, and the requests."""
    if kind_of(base) == "run":
        from kvarena.experiments.engine.run_config import run_config

        resolved = run_config({k: v for k, v in base.items() if k not in ("allocator", "allocators")}, sets).resolved()
        live, outputs = resolved["engine"]["max_num_seqs"], "replay"
        engine = {"live": live, "too_long": "reject", "outputs": outputs}
    else:
        plain = {"pool": {"pool": DEFAULT_POOL}, **base}
        resolved = config_from_mapping(apply_sets({**plain, "allocators": [lower, upper]}, sets)).resolved()
        resolved["engine"]["kernel_batches"] = 0
        engine = resolved["engine"]
    del resolved["allocators"]
    sizing = {"workload": resolved["workload"], "pool": resolved["pool"], "allocators": [lower, upper]}
    try:
        config = config_from_mapping({**sizing, "engine": engine})
        workloads = load_workloads(config)
    except ConfigError as error:
        if error.field != "engine.outputs" or kind_of(base) != "run":
            raise
        config = config_from_mapping({**sizing, "engine": {**engine, "outputs": "none"}})
        workloads = load_workloads(config)
    if not workloads[0].trace.visible.reuse:
        raise ValueError(f"{workloads[0].trace.name} has lengths only: nothing that a design does to hits can show")
    if workloads[0].tokens_per_id > 1:  # where ids are tokens, both designs get an id a page
        specs = (("lower", lower), ("upper", upper))
        ends = [{**an_id_a_page(allocator_entry(spec)).as_toml(), "name": name} for name, spec in specs]
        config = config_from_mapping({**sizing, "engine": engine, "allocators": ends})
    sizes = pool_sizes(config, workloads, config.entries())
    try:
        if kind_of(base) == "compare":
            plan_pools(config, workloads, config.entries())  # says at once if a request fits no pool
    except PoolTooSmallError as error:
        raise ValueError(f"ladder: pool {resolved['pool']['pool']}: {error}") from None
    resolved["pool"]["pool"] = [f"{size} B" for size in sizes]
    return resolved, workloads


# --- counting ---


def _counts(plan: LadderPlan, done: SweepResult) -> dict[str, dict[int, dict[str, Fraction]]]:
    """What each cell counted, over all seeds: key -> pool -> metric -> value. Times as they were measured."""
    counts: dict[str, dict[int, dict[str, Fraction]]] = {}
    for key, rows in done.table.groupby("cell", sort=False):
        times = pd.read_parquet(done.path / "cells" / str(key) / "timings.parquet")
        steps = None
        if plan.kind == "compare":
            steps = pd.read_parquet(done.path / "cells" / str(key) / "steps.parquet", columns=["pool_bytes", "live"])
        counts[str(key)] = {
            pool: _count(plan, rows[rows["pool_bytes"] == pool], times[times["pool_bytes"] == pool], steps, pool)
            for pool in rows["pool_bytes"].unique().tolist()
        }
    return counts


def _count(
    plan: LadderPlan, rows: pd.DataFrame, times: pd.DataFrame, steps: pd.DataFrame | None, pool: int
) -> dict[str, Fraction]:
    values = {name: Fraction(int(rows[name].sum())) for name in COUNTS}
    values["token_hit_rate"] = values["hit_tokens"] / max(values["prompt_tokens"], Fraction(1))
    if steps is None:
        values["concurrency"] = sum(map(Fraction, rows["mean_batch"].fillna(0)), Fraction(0)) / len(rows)
        values["preemptions"] = Fraction(int(rows["preemptions"].sum()))
    else:
        live = steps.loc[steps["pool_bytes"] == pool, "live"]
        values["concurrency"] = Fraction(int(live.sum()), len(live))
        values["preemptions"] = Fraction(int(rows["refusals"].sum()))
    values[TIME] = Fraction(float(times["total_ms"].sum()) * 1e3) / int(rows["requests"].sum())
    return values


# --- attributing ---


def _attribute(
    plan: LadderPlan, counts: dict[str, Any], resolved: dict[str, Any], workloads: list[Workload], timed: Times
) -> Ladder:
    pools = sorted(counts[plan.cells[0].key])
    shares: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    subsets: list[dict[str, Any]] = []
    for pool in pools:
        cells = [counts[cell.key][pool] for cell in plan.cells]
        subsets += [_subset_row(plan, pool, mask, cell) for mask, cell in enumerate(cells)]
        for metric in METRICS:
            values = [cell[metric] for cell in cells]
            shares += _share_rows(plan, pool, metric, values)
            pairs += _pair_rows(plan, pool, metric, values)
        times += _time_rows(plan, pool, timed.get(pool), [cell[TIME] for cell in cells])
    manifest = _manifest(plan, pools, resolved, workloads)
    manifest["time_rounds"] = len(next(iter(timed.values()), ()))
    manifest["checks"] = [_check(plan, pool, counts) for pool in pools]
    table = pd.DataFrame(pairs, columns=["pool_bytes", "metric", "a", "b", "value"])  # one rung has no pairs
    return Ladder(manifest, pd.DataFrame(shares), table, pd.DataFrame(subsets), pd.DataFrame(times))


def _subset_row(plan: LadderPlan, pool: int, mask: int, cell: Mapping[str, Fraction]) -> dict[str, Any]:
    counted = {name: int(cell[name]) for name in (*COUNTS, "preemptions")}
    rates = {name: float(cell[name]) for name in ("token_hit_rate", "concurrency")}
    return {"pool_bytes": pool, "mask": mask, "upper": plan.cells[mask].point["upper"], **counted, **rates}


def _share_rows(plan: LadderPlan, pool: int, metric: str, values: list[Fraction]) -> list[dict[str, Any]]:
    shares = shapley(values)
    whole = apportion(shares) if METRICS.get(metric, ("", False))[1] else [None] * len(shares)
    rows = []
    for place, rung in enumerate(plan.rungs):
        added = marginals(values, place)
        rows.append(
            {
                "pool_bytes": pool,
                "metric": metric,
                "rung": rung.name,
                "share": str(shares[place]) if metric != TIME else "",
                "value": float(shares[place]),
                "whole": whole[place],
                "alone": float(added[0]),
                "last": float(added[-1]),
                "low": float(min(added)),
                "high": float(max(added)),
            }
        )
    return rows


def _time_rows(
    plan: LadderPlan, pool: int, rounds: list[list[float]] | None, once: list[Fraction]
) -> list[dict[str, Any]]:
    """As `_share_rows`, of medians over rounds, with the range of single rounds; of one measurement without them."""
    if rounds is None:
        nothing = {"spread_low": None, "spread_high": None, "within_noise": None}
        return [{**row, **nothing} for row in _share_rows(plan, pool, TIME, once)]
    single = [[float(share) for share in shapley([Fraction(value) for value in times])] for times in rounds]
    typical = medians(rounds)
    rows = _share_rows(plan, pool, TIME, [Fraction(value) for value in typical])
    for place, row in enumerate(rows):
        low, high = (f(times[place] for times in single) for f in (min, max))
        row.update(spread_low=low, spread_high=high, within_noise=low <= 0 <= high)
        row.update(lower_us=typical[0], upper_us=typical[-1])
    return rows


def _pair_rows(plan: LadderPlan, pool: int, metric: str, values: list[Fraction]) -> list[dict[str, Any]]:
    names = [rung.name for rung in plan.rungs]
    return [
        {
            "pool_bytes": pool,
            "metric": metric,
            "a": a,
            "b": names[j],
            "value": float(interaction(values, i, j)),
        }
        for i, a in enumerate(names)
        for j in range(i + 1, len(names))
    ]


def _check(plan: LadderPlan, pool: int, counts: dict[str, Any]) -> dict[str, Any]:
    """The ends by their fast forms, and what the fields do that are not observable here. Raises AllocatorError."""
    ends = {name: counts[cell.key][pool] for name, cell in plan.ends.items()}
    general = {LOWER_FAST: counts[plan.cells[0].key][pool], UPPER_FAST: ends[UPPER_WHOLE]}
    for name, other in general.items():
        for metric in (*COUNTS, "concurrency", "preemptions"):
            if ends[name][metric] != other[metric]:
                raise AllocatorError(
                    f"ladder: {name}: {metric} is {ends[name][metric]}, the general form counts {other[metric]}"
                )
    top = counts[plan.cells[-1].key][pool]
    rest = {metric: ends[UPPER_WHOLE][metric] - top[metric] for metric in ("hit_tokens", "preemptions")}
    return {
        "pool_bytes": pool,
        "fast_forms_agree": True,
        "not_observable_changes": {metric: int(value) for metric, value in rest.items()},
    }


def _manifest(
    plan: LadderPlan, pools: list[int], resolved: Mapping[str, Any], workloads: list[Workload]
) -> dict[str, Any]:
    trace = workloads[0].trace
    ends = [entry.design for entry in (plan.lower, plan.upper)]
    return {
        "kind": "ladder",
        "of": plan.kind,
        "trace": trace.name,
        "visible": asdict(trace.visible),
        "ends": [display_label(design) for design in ends if design is not None],
        "rungs": {rung.name: {name: list(values) for name, values in rung.fields.items()} for rung in plan.rungs},
        "held": plan.held,
        "pools": pools,
        "tokens_per_id": workloads[0].tokens_per_id,
        "seeds": [workload.seed for workload in workloads],
        "cells": len({cell.key for cell in (*plan.cells, *plan.ends.values())}),
        "shares": "Shapley; whole units by largest remainder, the earlier rung first",
        "config": dict(resolved),
    }


# --- the folder ---


def save(made: Ladder, folder: Path, resolved: Mapping[str, Any]) -> None:
    """Write tables and figures, each whole or not at all; the manifest last."""
    import tomli_w
    from kvarena.experiments.ladder_plots import write_figures

    write_whole(folder / "config.toml", tomli_w.dumps(dict(resolved)))
    for name in ("attribution", "interactions", "subsets", "times"):
        write_whole(folder / f"{name}.csv", getattr(made, name).to_csv(index=False, lineterminator="\n"))
    write_figures(made, folder / "figures")
    write_whole(folder / "provenance.json", _json({"schema_version": SCHEMA_VERSION, **made.provenance}))
    write_whole(folder / MANIFEST, _json({"schema_version": SCHEMA_VERSION, **made.manifest}))
    made.path = folder


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


@reads("ladder")
def load_ladder(path: Path | str) -> Ladder:
    """Read a finished ladder. Raises ValueError when it is none, or not whole."""
    folder = Path(path)
    try:
        manifest = read_json(folder / MANIFEST)
        prov = read_json(folder / "provenance.json")
        tables = {
            name: pd.read_csv(
                folder / f"{name}.csv", dtype={"share": str}, keep_default_na=False, na_values={"whole": [""]}
            )
            for name in ("attribution", "interactions", "subsets", "times")
        }
    except (OSError, ValueError, RecursionError, pd.errors.ParserError) as error:
        raise ValueError(f"{folder}: not a finished ladder ({error})") from None
    if manifest.pop("schema_version", None) != SCHEMA_VERSION or manifest.get("kind") != "ladder":
        raise ValueError(f"{folder / MANIFEST}: expected a ladder of schema_version {SCHEMA_VERSION}")
    return Ladder(manifest, path=folder, provenance=prov, **tables)


def read_base(what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base config and the [ladder] table of a TOML file, or those of a trace's name or path."""
    if not what.endswith(".toml"):
        return {"workload": {"trace": what}}, {}
    data = read_toml(Path(what))
    asked = data.pop("ladder", {})
    known = {"from", "to", "fields", "rungs"}
    if not isinstance(asked, dict) or set(asked) - known:
        raise ValueError(f"{what}: [ladder]: expected {', '.join(sorted(known))}, found {asked!r}")
    data.pop("sweep", None)
    return data, asked
