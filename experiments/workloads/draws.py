"""Draws and checks that several workloads need."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_count(name: str, value: Any, *, minimum: int = 1, maximum: int = 2**31 - 1) -> None:
    """Raises ValueError unless the parameter is a whole number in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not minimum <= value <= maximum:
        raise ValueError(f"{name}: expected a whole number from {minimum} to {maximum}, found {value!r}")


def check_number(name: str, value: Any, *, minimum: float = 0.0, maximum: float = float("inf")) -> None:
    """Raises ValueError unless the parameter is a finite number in [minimum, maximum]."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value)
    if not ok or not minimum <= value <= maximum:
        raise ValueError(f"{name}: expected a finite number from {minimum} to {maximum}, found {value!r}")


def lognormal_lengths(
    rng: np.random.Generator, size: int, *, median: float, sigma: float, low: int, high: int
) -> NDArray[np.int64]:
    """Lengths in tokens, int64 [size], log-normal about the median, clipped to [low, high]."""
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, size)), low, high).astype(np.int64)


def zipf_choice(rng: np.random.Generator, size: int, choices: int, alpha: float) -> NDArray[np.int64]:
    """Indices in [0, choices), int64 [size], with weight 1 / rank^alpha."""
    weights = np.arange(1, choices + 1, dtype=float) ** -alpha
    return rng.choice(choices, size=size, p=weights / weights.sum())


def poisson_arrivals(rng: np.random.Generator, size: int, rate: float) -> NDArray[np.float64]:
    """Arrival times in seconds, float64 [size], of a Poisson process with `rate` a second."""
    return np.cumsum(rng.exponential(1.0 / rate, size))
