"""Latency of requests on the engine's clock, and what is summed up of it. Words are those of the glossary.

TTFT     arrival to first output token, queueing included
TPOT     (end to end - TTFT) / (output tokens - 1) of one request; undefined for one token, which then meets any limit
ITL      every gap between two successive tokens of a request, pooled over requests
E2EL     arrival to last token
goodput  requests a second that were served whole (neither rejected nor cut) and met all stated limits
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvarena.experiments.metrics import mean, percentile

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(slots=True)
class TokenTimes:
    """When one request arrived and got its tokens, seconds.

    >>> times = TokenTimes(arrival_s=1.0)
    >>> gaps = [times.token(at) for at in (1.5, 1.75, 2.5)]
    >>> times.ttft_s, times.tpot_s, times.e2el_s, gaps
    (0.5, 0.5, 1.5, [None, 0.25, 0.75])
    """

    arrival_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0

    def token(self, now_s: float) -> float | None:
        """One more token; returns the gap to the one before, None for the first."""
        before, self.last_s = self.last_s, now_s
        self.num_tokens += 1
        if before is None:
            self.first_s = now_s
            return None
        return now_s - before

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrival_s

    @property
    def e2el_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True)
class Limits:
    """Limits of goodput, milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def met(self, times: TokenTimes) -> bool:
        """Whether a served request met all limits; one token has no TPOT to miss."""
        pairs = ((self.ttft_ms, times.ttft_s), (self.tpot_ms, times.tpot_s), (self.e2el_ms, times.e2el_s))
        return all(limit is None or value is None or 1e3 * value <= limit for limit, value in pairs)

    def text(self) -> str:
        """The limits for people: goodput is never printed without them."""
        stated = [f"{name} <= {value:g} ms" for name, value in self._named().items() if value is not None]
        return ", ".join(stated) or "no limit"

    def _named(self) -> Mapping[str, float | None]:
        return {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "E2EL": self.e2el_ms}


@dataclass
class Latencies:
    """Everything that a summary needs, collected while the engine runs. Times in seconds."""

    limits: Limits = Limits()
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    e2el: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("f"))
    num_good: int = 0

    def served(self, times: TokenTimes, whole: bool) -> None:
        """A request ended with output; `whole`: not cut by a limit of the engine."""
        for values, value in ((self.ttft, times.ttft_s), (self.tpot, times.tpot_s), (self.e2el, times.e2el_s)):
            if value is not None:
                values.append(value)
        self.num_good += whole and self.limits.met(times)

    def summary(self, duration_s: float) -> dict[str, float | None]:
        """Means and percentiles in milliseconds, and goodput over `duration_s`."""
        row: dict[str, float | None] = {}
        for name in ("ttft", "tpot", "itl", "e2el"):
            row |= _spread(name, getattr(self, name))
        row["goodput_per_s"] = self.num_good / duration_s if duration_s > 0 else None
        return row


def _spread(name: str, values: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    average = mean(ordered)
    row: dict[str, float | None] = {f"{name}_mean_ms": None if average is None else 1e3 * average}
    for label, share in PERCENTILES.items():
        row[f"{name}_{label}_ms"] = 1e3 * percentile(ordered, share) if ordered else None
    return row
