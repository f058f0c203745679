"""From what length on does looking a cached prefix up pay? Host times of this machine against the step-time model.

A look-up of n tokens takes a + b n. The line is fitted to look-ups of 16 to 16,384 tokens and then asked about shorter
ones, so residuals count relatively: plain least squares lets the longest alone decide what is left of a near zero. All
lengths are timed in turn, in one shuffled order a round, so that short and long ones find the same caches: timed apart,
a look-up of 16 tokens takes half of what it takes among others.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator, Release
from kvarena.allocators.interface import Sequence as Tokens
from kvarena.experiments.engine.step_time import compute_of, load_gpu_times
from kvarena.experiments.laws import Law, break_even_tokens
from kvarena.experiments.models import model_shape

DESIGNS = (("block", 16), ("token", 1))
MODELS = ("smollm2-135m", "llama-3-8b", "llama-3-70b")
FITTED = (16, 64, 256, 1024, 4096, 16_384)  # tokens
TESTED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 128, 256)  # pages
ROUNDS = 401
WHY = "times of a microsecond move with the machine's load from one look-up to the next"


@dataclass
class _Timed:
    """A pool with one cached prefix, and CPU times of requests that have it and that have not."""

    pool: KVAllocator
    text: list[int]
    hit: list[float] = field(default_factory=list)
    miss: list[float] = field(default_factory=list)


def break_even_laws(models: Iterable[str] = MODELS) -> list[Law]:
    """Break-even prefix length of both designs for some models. The measured one is the shortest whole-page prefix
    whose own look-up, of another pool than those that the line is fitted to, is quicker than computing it."""
    found = []
    for kind, size in DESIGNS:
        tested = [size * pages for pages in TESTED]
        times = lookup_us(kind, size, [*FITTED, *tested])
        fixed, slope = fit_line(FITTED, times[: len(FITTED)])
        for model in models:
            cost = recompute_us(model)
            tokens = max(break_even_tokens(fixed, slope, cost), 1.0)
            predicted = math.ceil(tokens / size) * size if math.isfinite(tokens) else math.inf
            spent = dict(zip(tested, times[len(FITTED) :], strict=True))
            measured = next((n for n, us in spent.items() if us < cost * n), math.inf)
            law = Law("break-even", kind, model, "tokens", predicted, measured, 0.25, size)
            found.append(law if law.holds else replace(law, why=_why(spent, measured, fixed, slope)))
    return found


def _why(spent: dict[int, float], measured: float, fixed: float, slope: float) -> str:
    """How far the look-up that decided lies from the line."""
    tokens = min(measured, max(spent))
    told = f"a look-up of {tokens:,} tokens took {spent[int(tokens)]:.2f} us, the line has {fixed + slope * tokens:.2f}"
    return f"{told}: {WHY}"


def recompute_us(model: str) -> float:
    """Microseconds that one more prompt token adds to a step that is full already."""
    return 2 * compute_of(model, model_shape(model)).parameters / load_gpu_times().linear_tflops / 1e6


def lookup_us(kind: str, page_size: int, lengths: Sequence[int], rounds: int = ROUNDS) -> list[float]:
    """CPU microseconds that a cached prefix of n tokens costs a request (match, touch or lock, page ids of its row,
    release), for each n; the same request without a cached prefix is taken off. Least of the rounds, each of which
    times all lengths once."""
    cells, order = [_cell(kind, page_size, length, rounds) for length in lengths], random.Random(0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            for cell in order.sample(cells, len(cells)):
                cell.hit.append(_spent_us(cell.pool, [*cell.text, 2**20 + number]))
                cell.miss.append(_spent_us(cell.pool, [2**21 + number]))
    finally:
        if collecting:
            gc.enable()
    return [max(min(cell.hit) - min(cell.miss), 0.01) for cell in cells]


def _cell(kind: str, page_size: int, length: int, rounds: int) -> _Timed:
    pages = length // page_size + 2 * rounds + 16  # nothing is ever evicted
    cell = _Timed(make_allocator({"kind": kind, "page_size": page_size}, num_pages=pages), list(range(1, length + 1)))
    _spent_us(cell.pool, [*cell.text, 0])
    return cell


def _spent_us(pool: KVAllocator, tokens: list[int]) -> float:
    seq = Tokens("r", tokens)
    start = time.process_time_ns()
    pool.admit(seq)
    pool.page_ids(seq)
    pool.commit([(seq, len(tokens))])
    pool.release([seq], Release.FINISH)
    return (time.process_time_ns() - start) / 1e3


def fit_line(lengths: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """(a, b) of a + b n by least squares of relative residuals, a at least 0.

    >>> a, b = fit_line([10, 100, 1000], [2.01, 2.1, 3.0])
    >>> round(a, 6), round(b, 6)
    (2.0, 0.001)
    """
    y: Any = np.asarray(times, float)
    slope, fixed = np.polyfit(np.asarray(lengths, float), y, 1, w=1 / y)
    return max(float(fixed), 0.0), float(slope)
