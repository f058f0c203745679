"""The figure of a sweep: token hit rates of its cells, small and side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvarena.experiments.plots import _pool_axis, draw_series
from kvarena.experiments.provenance import outputs_words
from kvarena.experiments.style import looks, printable

if TYPE_CHECKING:
    from kvarena.experiments.sweep import SweepResult
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3


def plot_cell(made: SweepResult, key: str, ax: Axes) -> Axes:
    """Token hit rate of one finished cell against pool size, a line an allocator, means over seeds."""
    result = made.result(key)
    rows = made.table[made.table["cell"] == key]
    for name, look in looks(result.manifest["allocators"]).items():
        mean = rows[rows["allocator"] == name].groupby("pool_bytes")["token_hit_rate"].mean()
        draw_series(ax, mean.index.tolist(), 100 * mean, look, label=printable(name))
    _pool_axis(ax, rows)
    ax.set_ylabel("token hit rate (%)")
    point = next(cell["point"] for cell in made.cells if cell["key"] == key)
    told = [
        f"{name.rpartition('.')[2]} {value}" for name, value in point.items() if isinstance(value, str | int | float)
    ]
    told = [part for part in told if not part.startswith(("trace ", "outputs "))]
    told.append(f"outputs {outputs_words(result.config, result.visible['outputs'])}")
    title = printable(", ".join([result.manifest["trace"], *told])).replace("$", r"\$")
    ax.set_title(textwrap.fill(title, 34), fontsize=7.5)
    ax.tick_params(axis="x", labelsize=6, rotation=45)
    ax.tick_params(axis="y", labelsize=6.5)
    return ax


def draw_sweep(made: SweepResult, keys: Sequence[str]) -> Figure:
    """A panel a cell; one legend for those whose allocators are alike, else one a panel."""
    import matplotlib.pyplot as plt

    lines = -(-len(keys) // COLUMNS)
    columns = min(COLUMNS, len(keys))
    figure: Any = plt.figure(figsize=(2.7 * columns + 0.4, 2.4 * lines + 0.3), layout="constrained")
    for place, key in enumerate(keys):
        ax = figure.add_subplot(lines, columns, place + 1)
        plot_cell(made, key, ax)
        ax.xaxis.label.set_visible(place >= len(keys) - columns)
        ax.yaxis.label.set_visible(place % columns == 0)
        ax.legend(fontsize=5.5, loc="best", ncols=2 if len(ax.lines) > 3 else 1, handlelength=1.6, columnspacing=0.8)
    return figure
