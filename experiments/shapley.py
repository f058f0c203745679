"""Exact attribution of a difference to the switches that make it, in fractions: nothing is rounded, nothing is left.

A value is measured for every subset of the switches. Subsets are bit masks: bit i is on where switch i is turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import factorial

Values = Sequence[Fraction]  # of each subset, by its mask; 2^n of them


def num_switches(values: Values) -> int:
    """n of 2^n values. Raises ValueError for another number of them."""
    n = len(values).bit_length() - 1
    if len(values) != 1 << n:
        raise ValueError(f"values: expected one for each subset, 2^n of them, found {len(values)}")
    return n


def shapley(values: Values) -> list[Fraction]:
    """What each switch adds, averaged over all orders in which they could be turned.

    They add up to values[all] - values[none] exactly. Cost n x 2^n.

    >>> [str(share) for share in shapley([Fraction(v) for v in (0, 10, 20, 60)])]
    ['25', '35']
    """
    n = num_switches(values)
    weights = [Fraction(factorial(k) * factorial(n - k - 1), factorial(n)) for k in range(n)]
    shares = []
    for i in range(n):
        bit = 1 << i
        without = (mask for mask in range(1 << n) if not mask & bit)
        shares.append(
            sum((weights[mask.bit_count()] * (values[mask | bit] - values[mask]) for mask in without), Fraction(0))
        )
    return shares


def interaction(values: Values, i: int, j: int) -> Fraction:
    """How much more switches i and j do together than apart, averaged over the settings of the others.

    0: they add up; negative: they do the same work. The Shapley interaction index of Grabisch and Roubens.

    >>> interaction([Fraction(v) for v in (0, 10, 20, 60)], 0, 1)
    Fraction(30, 1)
    """
    n, a, b = num_switches(values), 1 << i, 1 << j
    total = Fraction(0)
    for mask in range(1 << n):
        if not mask & (a | b):
            k = mask.bit_count()
            weight = Fraction(factorial(k) * factorial(n - k - 2), factorial(n - 1))
            total += weight * (values[mask | a | b] - values[mask | a] - values[mask | b] + values[mask])
    return total


def marginals(values: Values, i: int) -> list[Fraction]:
    """What switch i adds in each setting of the others, by the mask of the others."""
    bit = 1 << i
    return [values[mask | bit] - values[mask] for mask in range(1 << num_switches(values)) if not mask & bit]


def apportion(shares: Sequence[Fraction]) -> list[int]:
    """The shares in whole numbers that add up to their sum, which must be whole: the largest remainders are rounded up.

    Each is off by less than 1. Between equal remainders the first wins. Raises ValueError for a sum that is not whole.

    >>> apportion([Fraction(5, 2), Fraction(-1, 3), Fraction(5, 6)])
    [2, 0, 1]
    """
    total = sum(shares, Fraction(0))
    if total.denominator != 1:
        raise ValueError(f"shares: expected a whole sum, found {total}")
    whole = [share.numerator // share.denominator for share in shares]
    left = int(total) - sum(whole)
    largest = sorted(range(len(shares)), key=lambda at: whole[at] - shares[at])
    for at in largest[:left]:
        whole[at] += 1
    return whole
