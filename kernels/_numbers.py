"""Whole-number arithmetic of shapes; needs neither torch nor Triton."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
