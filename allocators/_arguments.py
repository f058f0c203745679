"""Checks of what callers hand to the verbs, the same for every design; the contract stands in `interface`."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from kvarena.allocators.interface import Release, Sequence


def whole(number: Any, what: str) -> int:
    """`number` as an int; any integer type will do. ValueError for a negative number and for anything else.

    >>> whole(3, "num_tokens")
    3
    >>> whole(2.0, "num_tokens")
    Traceback (most recent call last):
    ValueError: num_tokens: expected an integer of at least 0, found 2.0
    """
    try:
        value = index(number)
    except TypeError:
        value = -1
    if value < 0:
        raise ValueError(f"{what}: expected an integer of at least 0, found {number!r}")
    return value


def check_reason(reason: Any) -> None:
    """Raise ValueError for anything but a `Release`: its value as text would be taken for another reason."""
    if not isinstance(reason, Release):
        allowed = ", ".join(map(str, Release))
        raise ValueError(f"reason: expected one of {allowed}, found {reason!r}")


def refuse_twice(seqs: Iterable[Sequence]) -> None:
    """Raise ValueError when a sequence stands twice in one call, before it is served or given back twice."""
    names = [seq.request_id for seq in seqs]
    if len(names) > 1 and len(set(names)) < len(names):
        raise ValueError(f"request {next(n for n in names if names.count(n) > 1)!r} stands twice in one call")
