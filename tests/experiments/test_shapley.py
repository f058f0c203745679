"""Exact attribution: shares are those of all orders, add up to the difference, and whole units lose nothing."""

from __future__ import annotations

import doctest
import random
from fractions import Fraction
from itertools import permutations

import pytest
from kvarena.experiments import shapley as module
from kvarena.experiments.shapley import apportion, interaction, marginals, shapley


def values_of(seed: int, n: int) -> list[Fraction]:
    rng = random.Random(seed)
    return [Fraction(rng.randint(-(10**6), 10**6), rng.choice([1, 1, 3, 7])) for _ in range(1 << n)]


def by_orders(values: list[Fraction], n: int) -> list[Fraction]:
    """The definition: what a switch adds, averaged over every order of turning them."""
    shares, orders = [Fraction(0)] * n, list(permutations(range(n)))
    for turned in orders:
        mask = 0
        for switch in turned:
            shares[switch] += values[mask | 1 << switch] - values[mask]
            mask |= 1 << switch
    return [share / len(orders) for share in shares]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_shares_are_the_average_over_all_orders(n: int) -> None:
    values = values_of(n, n)
    assert shapley(values) == by_orders(values, n)


@pytest.mark.parametrize("n", [1, 4, 8])
def test_shares_add_up_to_the_difference_with_nothing_left(n: int) -> None:
    values = values_of(n + 40, n)
    assert sum(shapley(values)) == values[-1] - values[0]


def test_switches_that_only_add_up_have_no_interaction() -> None:
    parts = [Fraction(3), Fraction(-5), Fraction(7, 2)]
    values = [sum((p for i, p in enumerate(parts) if mask >> i & 1), Fraction(0)) for mask in range(8)]
    assert shapley(values) == parts
    assert [interaction(values, i, j) for i, j in ((0, 1), (0, 2), (1, 2))] == [0, 0, 0]
    assert marginals(values, 1) == [parts[1]] * 4


def test_the_interaction_of_two_switches_is_what_they_do_together_beyond_apart() -> None:
    # alone +1 and +2, together +10, whatever the third switch (which adds 4)
    values = [Fraction(v + 4 * third) for third in (0, 1) for v in (0, 1, 2, 10)]
    assert interaction(values, 0, 1) == interaction(values, 1, 0) == 7
    assert interaction(values, 0, 2) == 0


@pytest.mark.parametrize("seed", range(30))
def test_whole_shares_add_up_and_each_is_off_by_less_than_one(seed: int) -> None:
    rng = random.Random(seed)
    shares = [Fraction(rng.randint(-999, 999), rng.randint(1, 9)) for _ in range(rng.randint(1, 7))]
    shares.append(rng.randint(-50, 50) - sum(shares))  # so that the sum is whole
    whole = apportion(shares)
    assert sum(whole) == sum(shares)
    assert all(abs(part - share) < 1 for part, share in zip(whole, shares, strict=True))


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a whole sum, found 1/2"):
        apportion([Fraction(1, 2)])
    with pytest.raises(ValueError, match=r"expected one for each subset, 2\^n of them, found 3"):
        shapley([Fraction(0)] * 3)


def test_the_examples_run() -> None:
    assert doctest.testmod(module).failed == 0
