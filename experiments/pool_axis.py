"""The axis of pool sizes, which figures of hit rates, evictions, bounds and differences share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.style import is_narrow, width_in

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

CHARACTER_IN = 0.085  # width of a letter of a tick label, inches, on the safe side


def pool_axis(ax: Axes, frame: pd.DataFrame) -> None:
    """Pool sizes of a table, logarithmic, in bytes."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    sizes = sorted(set(frame["pool_bytes"])) if len(frame) else []
    ax.set_xlabel("pool (bytes on the device)")
    if not sizes:
        return
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(_pool_ticks(ax, sizes)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    ax.xaxis.set_minor_locator(NullLocator())
    margin = (sizes[-1] / sizes[0]) ** 0.03 if len(sizes) > 1 else 2
    ax.set_xlim(sizes[0] / margin, sizes[-1] * margin)


def _pool_ticks(ax: Axes, sizes: Sequence[float]) -> list[float]:
    """The measured sizes themselves where each has room for its label, else powers of two between them."""
    if _have_room(ax, sizes):
        return list(sizes)
    low, high = math.ceil(math.log2(sizes[0]) - 1e-9), math.floor(math.log2(sizes[-1]) + 1e-9)
    step = -(-(high - low) // 2) if is_narrow(ax) else (high - low) // 6
    powers = [2.0**i for i in range(low, high + 1, max(1, step))]
    return powers if len(powers) > 1 else list(sizes)


def _have_room(ax: Axes, sizes: Sequence[float]) -> bool:
    """Whether labels at these places of a logarithmic axis stand apart, by the letters that they have."""
    widths = [CHARACTER_IN * (len(format_bytes(size)) + 1) for size in sizes]
    inches = width_in(ax) / max(math.log(sizes[-1] / sizes[0]), 1e-9)
    pairs = zip(pairwise(sizes), pairwise(widths), strict=True)
    return all(math.log(right / left) * inches > sum(both) / 2 for (left, right), both in pairs)
