"""A small table of cases in which every pair of values of any two factors occurs together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _pairs(row: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, seed: int = 0
) -> list[Row]:
    """Greedy pairwise cover: deterministic rows, each a value for every factor.

    `allowed` refuses rows that make no sense; pairs that occur in no allowed row are left out. Each round takes the
    best of 40 random rows that hold the first pair still uncovered.
    """
    rng = random.Random(seed)
    names = list(factors)
    wanted = [((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]]
    covered: set[Pair] = set()
    rows: list[Row] = []
    for pair in wanted:
        if pair in covered:
            continue
        candidates = [{name: rng.choice(factors[name]) for name in names} | dict(pair) for _ in range(40)]
        candidates = [row for row in candidates if allowed(row)]
        if candidates:
            best = max(candidates, key=lambda row: len(_pairs(row) - covered))
            covered |= _pairs(best)
            rows.append(best)
    return rows
