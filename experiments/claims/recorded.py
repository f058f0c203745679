"""Experiments on what is kept: saved kernel measurements, and public traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarena.experiments.claims import NotHereError
from kvarena.experiments.foreign import read_json

SAVED = Path("results/h200/kernels.json")  # in a checkout
UPSTREAM = Path("results/upstream")


def kernel_paging() -> dict[str, float]:
    """Four costs of paging with four denominators, H200 decode, each the worst (largest) of all points at which it was
    measured; `NAME_points` says how many these are."""
    from kvarena.experiments.bench.kernel_plots import COSTS, rows_of

    result = _saved()
    points = sorted({str(row["point"]) for row in rows_of(result, op="decode", study="grid")})
    values: dict[str, float] = {}
    for name, (_, cost) in COSTS.items():
        known = [found / 100 for point in points if not math.isnan(found := cost(result, point))]
        if not known:
            raise NotHereError(f"{SAVED} has no row for {name}")
        values |= {name: max(known), f"{name}_points": len(known)}
    return values


def kernel_pages() -> dict[str, float]:
    """Decode time at page 1 and 64 over page 16, shuffled pages: the value farthest from one over all points."""
    from kvarena.experiments.bench import kernel_plots as plots

    result = _saved()
    points = sorted({row["point"] for row in plots.rows_of(result, op="decode", study="grid", page=16)})
    base = {point: plots._ours(result, point, study="grid", page=16) for point in points}
    values = {}
    for size in (1, 64):
        ratios = [plots._ours(result, point, study="grid", page=size) / base[point] - 1 for point in points]
        values[f"worst_{size}_over_16"] = max((r for r in ratios if not math.isnan(r)), key=abs)
    return values


def beside_upstream(packages: Sequence[str]) -> dict[str, float]:
    """Share of the random operations, driven through ours and the real package side by side, that differed."""
    values = {}
    for package in packages:
        path = UPSTREAM / f"{package}.json"
        if not path.is_file():
            raise NotHereError(f"{path} is not here: run from a checkout, or `kvarena verify upstream`")
        data = read_json(path)
        values[f"differ_{package}"] = data["differences"] / data["ops"]
    return values


def mooncake_lru(trace: str, capacities: Sequence[int]) -> dict[str, float]:
    """Block hit rates of plain LRU over the trace's own ids, whole run, and without limit."""
    from kvarena.experiments.bounds import bound_curve
    from kvarena.experiments.traces import load_trace

    try:
        requests = list(load_trace(trace))
    except ValueError:
        raise NotHereError(f"the trace {trace} is not at hand; `kvarena trace list` says how to get it") from None
    table = bound_curve(requests, capacities, policies=["lru"])
    whole = table[table["measure"] == "whole"].set_index(["policy", "capacity_pages"])["block_hit_rate"]
    values = {f"lru_{capacity}": float(whole["lru", capacity]) for capacity in capacities}
    return {**values, "infinite": float(whole["infinite"].iloc[0])}


def _saved() -> Any:
    from kvarena.experiments.bench.kernel_plots import load_kernels

    if not SAVED.is_file():
        raise NotHereError(f"{SAVED} is not here: run from a checkout, or measure with `kvarena bench kernels`")
    return load_kernels(SAVED)
