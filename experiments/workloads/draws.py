"""Draws, checks and token runs that several workloads need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from kvarena.experiments.traces.base import Request
from numpy.typing import NDArray

VOCAB_SIZE = 32_000

DECODE_S_PER_TOKEN = 0.02
"""Nominal time a reply token takes, where something follows a reply: a trace without an engine has to assume one."""

Tokens = NDArray[np.int32]
Timed = list[tuple[float, Request]]


def check_count(name: str, value: Any, *, minimum: int = 1, maximum: int = 2**31 - 1) -> None:
    """Raises ValueError unless the parameter is a whole number in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not minimum <= value <= maximum:
        raise ValueError(f"{name}: expected a whole number from {minimum} to {maximum}, found {value!r}")


def check_number(name: str, value: Any, *, minimum: float = 0.0, maximum: float = float("inf")) -> None:
    """Raises ValueError unless the parameter is a finite number in [minimum, maximum]."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value)
    if not ok or not minimum <= value <= maximum:
        raise ValueError(f"{name}: expected a finite number from {minimum} to {maximum}, found {value!r}")


def check_shape(
    seed: Any,
    shape: Any,
    *,
    counts: Iterable[str] = (),
    positive: Iterable[str] = (),
    numbers: Iterable[str] = (),
    shares: Iterable[str] = (),
) -> None:
    """Checks the seed and the named parameters: counts >= 1, numbers > 0, numbers >= 0, shares in [0, 1]."""
    check_count("seed", seed, minimum=0)
    for name in counts:
        check_count(name, getattr(shape, name))
    for name in positive:
        check_number(name, getattr(shape, name), minimum=1e-6)
    for name in numbers:
        check_number(name, getattr(shape, name))
    for name in shares:
        check_number(name, getattr(shape, name), maximum=1.0)


def text(rng: np.random.Generator, length: int, *, first: int = 0, vocab_size: int = VOCAB_SIZE) -> Tokens:
    """Token ids, int32 [length], uniform in [first, vocab_size)."""
    return rng.integers(first, vocab_size, length, dtype=np.int32)


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


def request(
    name: str,
    prompt: Tokens,
    output: Tokens,
    *,
    session: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Request:
    """A request with token ids; its arrival is set by `in_arrival_order`."""
    return Request(
        request_id=name,
        arrival_s=0.0,
        num_prompt_tokens=len(prompt),
        num_output_tokens=len(output),
        token_ids=prompt,
        output_ids=output,
        session_id=session,
        extra=dict(extra or {}),
    )


def in_arrival_order(timed: Timed) -> list[Request]:
    """Requests sorted by time (equal times keep their order), arrivals counted from the first."""
    timed = sorted(timed, key=lambda pair: pair[0])
    first = timed[0][0]
    return [replace(request, arrival_s=float(arrival - first)) for arrival, request in timed]
