"""Verifies results that are one table or one file, each by what its own columns must agree on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from kvarena.experiments.verify_numbers import agrees
from kvarena.experiments.verify_verdict import Verdict

SIX_DIGITS = 6e-6  # relative; tables written with six of them


def read_table(path: Path) -> pd.DataFrame:
    """A .csv or .parquet. Raises ValueError when it cannot be read."""
    try:
        return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, NotImplementedError, pd.errors.ParserError) as error:
        raise ValueError(f"{path}: cannot be read as a table ({error})") from None


def _expect(path: Path, frame: pd.DataFrame, columns: set[str]) -> None:
    if missing := sorted(columns - set(frame.columns)):
        raise ValueError(f"{path}: found no column {', '.join(missing)}")


def verify_forks(path: Path, again: bool) -> Verdict:
    """A table of the fork study: each row is computed once more from its own columns (20 us a decoded token)."""
    from kvarena.experiments.forking import saving_again

    frame = read_table(path)
    _expect(path, frame, {"lengths", "method", "allocator", "width", "requests", "seed", "scale", "saved", "copies"})
    verdict = Verdict(path, f"forks, {len(frame)} rows")
    for stated in frame.to_dict("records"):
        row = {str(name): value for name, value in stated.items()}
        found = saving_again(row)
        for column in ("saved", "copies"):
            problem = f"{row['lengths']}, {row['method']}, {row['allocator']}, {row['width']}: {column} is "
            problem += f"{row[column]}, computed again {getattr(found, column)}"
            verdict.check("numbers", agrees(row[column], getattr(found, column)), problem)
    return verdict


def verify_laws(path: Path, again: bool) -> Verdict:
    """A law holds when prediction and measurement are within its tolerance, or within its slack."""
    frame = read_table(path)
    _expect(path, frame, {"law", "kind", "x", "predicted", "measured", "tolerance", "slack", "holds", "why"})
    verdict = Verdict(path, f"laws, {len(frame)} rows")
    for row in frame.to_dict("records"):
        apart, allowed = abs(row["measured"] - row["predicted"]), row["tolerance"] * abs(row["predicted"])
        holds = apart <= allowed or apart <= row["slack"]
        name = f"{row['law']}, {row['kind']}, {row['x']}"
        verdict.check(
            "numbers", bool(row["holds"]) == holds, f"{name}: holds is {row['holds']}, by its numbers {holds}"
        )
        explained = holds or (isinstance(row["why"], str) and bool(row["why"]))
        verdict.check("reasons", explained, f"{name}: does not hold, and has no reason")
    return verdict


def verify_reasons(path: Path, again: bool) -> Verdict:
    """Hits and the tokens of all reasons are the prompt's tokens, of every request."""
    from kvarena.experiments.ledger import REASONS

    frame = read_table(path)
    _expect(path, frame, {"request_id", "num_prompt_tokens", "hit_tokens", *REASONS})
    verdict = Verdict(path, f"reasons, {len(frame)} requests")
    for row in frame.to_dict("records"):
        _covers(verdict, "requests", f"request {row['request_id']}", row, row["num_prompt_tokens"])
    return verdict


def _covers(verdict: Verdict, what: str, name: str, row: Mapping[Hashable, Any], prompt_tokens: int) -> None:
    from kvarena.experiments.ledger import REASONS

    counts = [int(row[column]) for column in ("hit_tokens", *REASONS)]
    told = sum(counts)
    fine = told == prompt_tokens and min(counts) >= 0
    verdict.check(what, fine, f"{name}: reasons and hits are {told} of {prompt_tokens} tokens")


def verify_sweep_reasons(path: Path, again: bool) -> Verdict:
    """The same of each cell of a sweep, over all its requests."""
    from kvarena.experiments.study import REASONS_FILE, load_reasons

    frame = load_reasons(path / REASONS_FILE if path.is_dir() else path)
    verdict = Verdict(path, f"reasons of a sweep, {len(frame)} cells")
    for row in frame.to_dict("records"):
        name = f"cell {row['cell']}, {row['pool_bytes']} B, {row['allocator']}"
        _covers(verdict, "cells", name, row, row["prompt_tokens"])
        share = row["hit_tokens"] / row["prompt_tokens"] if row["prompt_tokens"] else 0.0
        problem = f"{name}: token_hit_rate is {row['token_hit_rate']}, by its tokens {share}"
        verdict.check("numbers", agrees(row["token_hit_rate"], share), problem)
    return verdict


def verify_bounds(path: Path, again: bool) -> Verdict:
    """Nobody hits more than an infinite cache, nor than clairvoyance where that is proven; regret is the difference."""
    frame = read_table(path)
    _expect(path, frame, {"seed", "pool_bytes", "allocator", "policy", "clairvoyant", "infinite", "regret", "proven"})
    verdict = Verdict(path, f"bounds, {len(frame)} rows")
    for row in frame.to_dict("records"):
        name = f"seed {row['seed']}, {row['pool_bytes']} B, {row['allocator']}"
        own, foresight, all_of_it = (row[column] for column in ("policy", "clairvoyant", "infinite"))
        verdict.check("order", _at_most(own, all_of_it), f"{name}: hits {own} of at most {all_of_it}")
        if row["proven"]:
            verdict.check("order", _at_most(own, foresight), f"{name}: hits {own}, clairvoyance {foresight}")
            verdict.check("order", _at_most(foresight, all_of_it), f"{name}: clairvoyance {foresight} of {all_of_it}")
        expected = None if pd.isna(own) or pd.isna(foresight) else 100 * (foresight - own)
        verdict.check(
            "numbers", agrees(row["regret"], expected), f"{name}: regret is {row['regret']}, expected {expected}"
        )
    return verdict


def _at_most(value: Any, limit: Any) -> bool:
    return bool(pd.isna(value) or pd.isna(limit) or value <= limit + 1e-12)


def verify_upstream(path: Path, again: bool) -> Verdict:
    """Operations and differences are the sums of those of the settings. What was driven, only a new run can show."""
    from kvarena.experiments.foreign import read_object

    data = read_object(path)
    verdict = Verdict(path, f"live verification of {data['package']} {data.get('version')}")
    try:
        ops = sum(one["ops"] for one in data["settings"])
        apart = sum(one["difference"] is not None for one in data["settings"])
        stated = (data["ops"], data["differences"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: settings: expected ops and difference of each, found {error}") from None
    verdict.check("sums", stated == (ops, apart), f"{path.name}: states {stated}, its settings are {(ops, apart)}")
    verdict.notes.append("whether the packages agree: `kvarena verify upstream` drives them again")
    return verdict


def verify_aged(path: Path, again: bool) -> Verdict:
    """Layouts: no slot twice in a request, none in the padding page. Churn: means from its counts."""
    from kvarena.experiments.aged import CHURN, LAYOUTS, load_churn, load_layouts

    layouts, verdict = load_layouts(path / LAYOUTS), Verdict(path, "aged pools")
    for name, (size, rows) in layouts.items():
        for place, slots in enumerate(rows):
            own = np.unique(slots).size == slots.size
            verdict.check("layouts", own, f"{LAYOUTS}: {name}, request {place}: a slot twice")
            verdict.check("layouts", bool((slots >= size).all()), f"{LAYOUTS}: {name}, request {place}: padding page")
    if (path / CHURN).is_file():
        for row in load_churn(path / CHURN).to_dict("records"):
            found = row["tokens"] / row["runs"] if row["runs"] else float("nan")
            close = pd.isna(found) or abs(found - row["tokens_a_run"]) <= SIX_DIGITS * found
            problem = f"{CHURN}: {row['allocator']}, turnover {row['turnovers']}: tokens_a_run is {row['tokens_a_run']}"
            verdict.check("numbers", close, f"{problem}, by its counts {found}")
    verdict.unseen["live, tokens, runs, quantiles"] = "the simulated hours are not kept"
    return verdict
