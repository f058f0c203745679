"""Verifies studies that are made of several results: resamples, rates, ladders, ablations, page sizes, claims.

Each number that the study's own tables determine is computed again by a second definition, apart from the module that
wrote it; what they do not determine is named.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from kvarena.experiments.foreign import read_object
from kvarena.experiments.sweep import INDEX
from kvarena.experiments.verify_numbers import agrees
from kvarena.experiments.verify_verdict import Verdict

CLOSE = 1e-9  # relative, of sums in another order


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows with names that are text."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _close(stated: Any, expected: float, scale: float = 0.0) -> bool:
    return math.isclose(float(stated), expected, rel_tol=CLOSE, abs_tol=CLOSE * scale + 1e-12)


# --- resamples ---


def verify_resample(path: Path, again: bool) -> Verdict:
    """The cells as those of any sweep where they are there, the table from them, and the intervals from the table."""
    from kvarena.experiments.resample import MEASURES, open_replicates
    from kvarena.experiments.verify_result import verify_sweep

    found = open_replicates(path)
    verdict = Verdict(path, "")
    if (path / INDEX).is_file():
        verdict = verify_sweep(path, again)
        _check_draws(path, found.table, tuple(MEASURES), verdict)
    else:
        verdict.notes.append("the cells of the resamples are not at hand: the table stands for them")
    verdict.what = f"resample of {found.trace}, {found.table['resample'].nunique() - 1} draws"
    names = [one["name"] for one in found.allocators]
    expected = _intervals(found.table, names, tuple(MEASURES))
    stated = pd.read_csv(path / "intervals.csv") if (path / "intervals.csv").is_file() else pd.DataFrame()
    verdict.check("numbers", len(stated) == len(expected), f"intervals.csv: {len(stated)} rows of {len(expected)}")
    for row, own in zip(rows_of(stated), expected, strict=False):
        name = f"intervals.csv: {own['measure']}, {own['pool_bytes']} B, {own['allocator']}"
        for column, value in own.items():
            fine = row[column] == value if isinstance(value, str | int) else _close(row[column], value, 1.0)
            verdict.check("numbers", fine, f"{name}: {column} is {row[column]!r}, computed again {value!r}")
    return verdict


def _check_draws(path: Path, table: pd.DataFrame, measures: tuple[str, ...], verdict: Verdict) -> None:
    from kvarena.experiments.sweep import open_sweep

    sweep = open_sweep(path)
    draws = {cell["key"]: cell["point"].get("workload.resample", 0) for cell in sweep.cells}
    cells = {(draws[row["cell"]], row["pool_bytes"], row["allocator"]): row for row in rows_of(sweep.table)}
    for row in rows_of(table):
        own = cells.get((row["resample"], row["pool_bytes"], row["allocator"]))
        for measure in measures:
            fine = own is not None and agrees(row[measure], own[measure])
            verdict.check(
                "table", fine, f"study.json: draw {row['resample']}: {measure} is {row[measure]}, not its cell's"
            )


def _intervals(table: pd.DataFrame, names: list[str], measures: tuple[str, ...]) -> list[dict[str, Any]]:
    """Student's t around the trace's own difference, with the spread of the draws; q after Benjamini-Yekutieli."""
    from scipy.stats import t

    value = {
        (row["resample"], row["pool_bytes"], row["allocator"], m): row[m] for row in rows_of(table) for m in measures
    }
    draws = sorted({int(draw) for draw in table["resample"]} - {0})
    found = []
    for measure in measures:
        for name in names[1:]:
            for pool in sorted({int(size) for size in table["pool_bytes"]}):
                gaps = [100 * (value[d, pool, name, measure] - value[d, pool, names[0], measure]) for d in (0, *draws)]
                middle = math.fsum(gaps[1:]) / len(draws)
                spread = math.sqrt(math.fsum((gap - middle) ** 2 for gap in gaps[1:]) / (len(draws) - 1))
                half = float(t.ppf(0.975, len(draws) - 1)) * spread
                certain = 1.0 if abs(gaps[0]) < 1e-12 else 0.0
                p = 2 * float(t.sf(abs(gaps[0]) / spread, len(draws) - 1)) if spread > 0 else certain
                found.append(
                    {
                        "measure": measure,
                        "pool_bytes": pool,
                        "allocator": name,
                        "difference": gaps[0],
                        "low": gaps[0] - half,
                        "high": gaps[0] + half,
                        "resamples": len(draws),
                        "p": p,
                    }
                )
    order = sorted(range(len(found)), key=lambda at: found[at]["p"], reverse=True)
    harmonic, least = math.fsum(1 / k for k in range(1, len(found) + 1)), 1.0
    for rank, at in zip(range(len(found), 0, -1), order, strict=True):
        least = min(least, found[at]["p"] * len(found) * harmonic / rank)
        found[at]["q"] = least
    return found


# --- rates ---


def verify_rate(path: Path, again: bool) -> Verdict:
    """Rates from shares and saturation, knees from the latencies, Amdahl's law from its two shares; orders."""
    from kvarena.experiments.rate import load_rate

    made = load_rate(path)
    manifest = made.manifest
    verdict = Verdict(path, f"rate study of {manifest['trace']}, {len(made.rates)} rows")
    names = [one["name"] for one in manifest["allocators"]]
    for row in rows_of(made.rates):
        name = f"rates.csv: {row['allocator']} at {row['share']:g}"
        expected = row["share"] * manifest["saturation_per_s"][names[0]]
        verdict.check(
            "numbers", _close(row["rate_per_s"], expected), f"{name}: rate is {row['rate_per_s']}, not {expected}"
        )
        for what in ("ttft", "tpot"):
            ranks = [row[f"{what}_{rank}_ms"] for rank in ("p50", "p90", "p99")]
            verdict.check("order", ranks == sorted(ranks), f"{name}: percentiles of {what} fall: {ranks}")
        good = row["goodput_per_s"] <= row["requests_per_s"] * (1 + CLOSE)
        verdict.check("order", good, f"{name}: goodput {row['goodput_per_s']} of {row['requests_per_s']} requests")
    for name in names:
        expected_knee = _knee(rows_of(made.rates[made.rates["allocator"] == name]))
        stated = manifest["knee_per_s"].get(name)
        fine = stated is None and expected_knee is None
        fine = fine or (None not in (stated, expected_knee) and _close(stated, expected_knee or 0.0))
        verdict.check("numbers", fine, f"result.json: knee of {name} is {stated}, by rates.csv {expected_knee}")
    for row in rows_of(made.hits):
        amdahl = 1 / (1 - row["prefill_share"] * row["token_hit_rate"])
        problem = f"hits.csv: {row['allocator']} at {row['target']}: Amdahl's gain is {row['amdahl']}, not {amdahl}"
        unknown = all(math.isnan(value) for value in (row["amdahl"], amdahl))  # nothing was served, so nothing hit
        verdict.check("numbers", unknown or _close(row["amdahl"], amdahl), problem)
    verdict.unseen["latencies, goodput, batch, hit rates, gain"] = "the runs behind a study are not kept"
    return verdict


def _knee(rows: list[dict[str, Any]]) -> float | None:
    """Where the line through the points crosses twice the first latency, for the first time; a rate at which nothing
    was served is no point, and when the first is one there is nothing to double."""
    points = sorted((row["rate_per_s"], row["normalised_ms"]) for row in rows)
    limit = 2 * points[0][1]
    points = [point for point in points if not math.isnan(point[1])]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 < limit <= y1:
            return float(x0 + (x1 - x0) * (limit - y0) / (y1 - y0))
    return None


# --- ladders ---


def verify_ladder(path: Path, again: bool) -> Verdict:
    """Shares and interactions from the subsets by Harsanyi's dividends, ranges, and the subsets from their cells."""
    from kvarena.experiments.ladder import METRICS, load_ladder
    from kvarena.experiments.verify_result import verify_sweep

    made = load_ladder(path)
    verdict = Verdict(path, "")
    if (path / "sweep" / INDEX).is_file():
        verdict = verify_sweep(path / "sweep", again)
        _check_subsets(path / "sweep", made.subsets, verdict)
    else:
        verdict.notes.append("the cells are not at hand: subsets.csv stands for them")
    verdict.path, verdict.what = path, f"ladder of {made.manifest['trace']}, {len(made.rungs)} rungs"
    for pool in made.manifest["pools"]:
        subsets = made.subsets[made.subsets["pool_bytes"] == pool].sort_values("mask")
        whole = subsets["mask"].tolist() == list(range(1 << len(made.rungs)))
        verdict.check("subsets", whole, f"subsets.csv: pool {pool}: not every subset of the rungs once")
        for metric in METRICS if whole else ():
            values = [_value(row, metric) for row in rows_of(subsets)]
            shares = _of_metric(made.attribution, pool, metric)
            _check_shares(metric, values, made.rungs, rows_of(shares), verdict)
            pairs = _of_metric(made.interactions, pool, metric)
            _check_pairs(metric, values, made.rungs, rows_of(pairs), verdict)
    verdict.unseen["times.csv"] = "it is measured"
    return verdict


def _of_metric(frame: pd.DataFrame, pool: int, metric: str) -> pd.DataFrame:
    return frame[(frame["pool_bytes"] == pool) & (frame["metric"] == metric)]


def _value(row: dict[str, Any], metric: str) -> Fraction:
    if metric == "token_hit_rate":
        return Fraction(int(row["hit_tokens"]), max(int(row["prompt_tokens"]), 1))
    return Fraction(float(row[metric]))


def _dividends(values: list[Fraction]) -> list[Fraction]:
    """What each set of rungs adds beyond what its parts add: values[S] is the sum of the dividends of its subsets."""
    found = list(values)
    for bit in (1 << i for i in range(len(values).bit_length() - 1)):
        for mask in range(len(found)):
            if mask & bit:
                found[mask] -= found[mask ^ bit]
    return found


def _check_shares(
    metric: str, values: list[Fraction], rungs: list[str], rows: list[dict[str, Any]], verdict: Verdict
) -> None:
    """A rung's share: of every set that it is in, the set's dividend split evenly."""
    dividends, scale = _dividends(values), float(max(map(abs, values)))
    stated = {row["rung"]: row for row in rows}
    verdict.check("shares", list(stated) == rungs, f"attribution.csv: {metric}: rungs {list(stated)}, expected {rungs}")
    for place, rung in enumerate(rungs):
        bit = 1 << place
        share = sum((d / mask.bit_count() for mask, d in enumerate(dividends) if mask & bit), Fraction(0))
        added = [values[mask | bit] - values[mask] for mask in range(len(values)) if not mask & bit]
        expected = {"value": share, "alone": added[0], "last": added[-1], "low": min(added), "high": max(added)}
        row = stated.get(rung, {})
        for name, value in expected.items():
            fine = name in row and _close(row[name], float(value), scale)
            verdict.check(
                "shares", fine, f"attribution.csv: {metric} of {rung}: {name} is {row.get(name)}, not {value}"
            )
    if rows and not any(pd.isna(row["whole"]) for row in rows):
        total = sum(int(row["whole"]) for row in rows)
        verdict.check(
            "shares", total == values[-1] - values[0], f"attribution.csv: {metric}: whole shares add up to {total}"
        )
        near = all(abs(row["whole"] - row["value"]) < 1 for row in rows)
        verdict.check("shares", near, f"attribution.csv: {metric}: a whole share is off by 1 or more")


def _check_pairs(
    metric: str, values: list[Fraction], rungs: list[str], rows: list[dict[str, Any]], verdict: Verdict
) -> None:
    dividends, scale = _dividends(values), float(max(map(abs, values)))
    at = {rung: 1 << place for place, rung in enumerate(rungs)}
    count = len(rungs) * (len(rungs) - 1) // 2
    verdict.check("pairs", len(rows) == count, f"interactions.csv: {metric}: {len(rows)} pairs of {count}")
    for row in rows:
        both = at[row["a"]] | at[row["b"]]
        expected = sum((d / (m.bit_count() - 1) for m, d in enumerate(dividends) if m & both == both), Fraction(0))
        problem = f"interactions.csv: {metric} of {row['a']} and {row['b']}: {row['value']}, not {float(expected)}"
        verdict.check("pairs", _close(row["value"], float(expected), scale), problem)


def _check_subsets(sweep: Path, subsets: pd.DataFrame, verdict: Verdict) -> None:
    """Hit and prompt tokens of each subset, over all seeds, are those of its cell."""
    from kvarena.experiments.sweep import open_sweep

    table = open_sweep(sweep).table
    sums = table.groupby(["sweep.upper", "pool_bytes"])[["hit_tokens", "prompt_tokens", "evicted_pages"]].sum()
    for row in rows_of(subsets):
        key = (row["upper"], row["pool_bytes"])
        for name in sums.columns:
            fine = key in sums.index and int(sums.loc[key, name]) == row[name]
            verdict.check("subsets", fine, f"subsets.csv: {row['upper']}: {name} is {row[name]}, not its cell's")


# --- ablations, page sizes, claims ---


def verify_ablations(path: Path, again: bool) -> Verdict:
    """Every design had one prompt, so hit tokens over hit rate is one number for all of a seed; `again`: every row."""
    from kvarena.experiments.ladder_ablations import DESIGNS, again_rows, load_ablations

    made = load_ablations(path)
    verdict = Verdict(path, f"ablations of {made.manifest['trace']}, {len(made.table)} rows")
    for (seed, pool), part in made.table.groupby(["seed", "pool_bytes"]):
        rows = rows_of(part)
        named = [row["design"] for row in rows] == list(DESIGNS)
        verdict.check("rows", named, f"ablations.csv: seed {seed}, {pool} B: not every design once")
        known = {row["hit_tokens"] / row["token_hit_rate"] for row in rows if row["token_hit_rate"] > 0}
        prompts = {round(prompt) for prompt in known}
        whole = len(prompts) <= 1 and all(_close(prompt, round(prompt)) for prompt in known)
        verdict.check(
            "numbers", whole, f"ablations.csv: seed {seed}, {pool} B: hit rates are of {sorted(known)} tokens"
        )
        for row in rows:
            low = min(row[name] for name in ("hit_tokens", "evicted_pages", "refusals", "table_bytes_rewritten"))
            verdict.check("numbers", low >= 0, f"ablations.csv: {row['design']}: a count below 0")
    for stated, found in zip(rows_of(made.table), again_rows(made) if again else [], strict=False):
        for name, value in found.items():
            problem = f"ablations.csv: {stated['design']}: {name} is {stated[name]}, run again {value}"
            verdict.check("rows run again", agrees(stated[name], value), problem)
    if not again:
        verdict.unseen["counts of each design"] = "the replays are not kept; --again carries them out"
    verdict.unseen["removal.csv"] = "it is measured"
    return verdict


def verify_pagesize(path: Path, again: bool) -> Verdict:
    """Concurrency in closed form, tails within a page, hit rates within 0 and 1, a row for every page size."""
    from kvarena.experiments.one_axis import KINDS, concurrency, load

    made = load(path)
    about = made.about
    verdict = Verdict(path, f"page-size study, {len(made.rows)} rows")
    expected = {(kind, size) for kind in KINDS for size in about["pages"]}
    for workload, part in made.rows.groupby("workload", sort=False):
        found = {(row["kind"], row["page_size"]) for row in rows_of(part)}
        whole = found == expected and len(part) == len(expected)
        verdict.check("rows", whole, f"{workload}: not every design and page size once")
    fits = {key: concurrency(*key, about["model"], about["load"]) for key in sorted(expected)}
    for row in rows_of(made.rows):
        key = (row["kind"], row["page_size"])
        name = f"{row['workload']}, {key[0]}, page {key[1]}"
        verdict.check(
            "numbers",
            fits.get(key) == row["concurrency"],
            f"{name}: {row['concurrency']} requests, not {fits.get(key)}",
        )
        verdict.check("ranges", 0 <= row["token_hit_rate"] <= 1, f"{name}: hit rate {row['token_hit_rate']}")
        verdict.check("ranges", 0 <= row["tail_tokens"] < key[1], f"{name}: {row['tail_tokens']} free slots in a page")
        verdict.check("ranges", row["time_us"] >= row["host_us"], f"{name}: less time in all than of the allocator")
    verdict.unseen["token_hit_rate, tail_tokens"] = "the replays are not kept"
    verdict.unseen["host_us, time_us"] = "it is measured"
    return verdict


def verify_claims(path: Path, again: bool) -> Verdict:
    """Each verdict from its values and the claim's ranges, against the claim's file as it is now."""
    from kvarena.experiments.claims import load_claims

    rows = read_object(path / "claims.json").get("findings")
    if not isinstance(rows, list):
        raise ValueError(f"{path / 'claims.json'}: findings: expected a list")
    verdict = Verdict(path, f"claims, {len(rows)} findings")
    for row in rows:
        claim = load_claims([row["id"]])[0]
        same = claim.sha256 == row["sha256"]
        verdict.check("files", same, f"{row['id']}: was tested against another file than the claim's is now")
        ranges = {expectation.measure: expectation.claimed for expectation in claim.expect if expectation.claimed}
        inside = [  # of each value, and of the ends of its repeats
            ranges[measure][0] <= value <= ranges[measure][1]
            for name, value in row["values"].items()
            if (measure := name.removesuffix(".low").removesuffix(".high")) in ranges
        ]
        told = "not tested" if not inside else ("refuted", "depends", "reproduced")[any(inside) + all(inside)]
        verdict.check("verdicts", told == row["verdict"], f"{row['id']}: is {row['verdict']}, by its values {told}")
    verdict.unseen["values"] = "experiments are not kept; `kvarena claims` carries them out"
    return verdict
