"""The figure of aged pools: how runs of slots fall apart while a pool is turned over, and what is left at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.style import STYLE, Look, looks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

LABELS = {
    "block-16": "block, page 16 (vLLM 0.32.0 rules)",
    "token-1": "token, page 1 (SGLang 0.5.22 rules)",
    "token-16": "token, page 16 (SGLang 0.5.22 rules)",
    "token-1-sorted": "token, page 1, free slots sorted",
}


def aged_looks(names: list[str]) -> dict[str, Look]:
    """A look for each aged allocator: kind and page size are in its name."""
    entries = []
    for name in names:
        kind, size, *_ = name.split("-")
        entries.append({"name": name, "label": LABELS.get(name, name), "kind": kind, "page_size": int(size)})
    return looks(entries)


def churn(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Mean slots a run of live requests against how often the pool was turned over."""
    ax = ax or _axes()
    for name, look in aged_looks(list(dict.fromkeys(table["allocator"]))).items():
        rows = table[table["allocator"] == name]
        style: dict[str, Any] = {"marker": look.marker, "markerfacecolor": look.face, "linestyle": look.dashes}
        ax.plot(rows["turnovers"], rows["tokens_a_run"], color=look.colour, label=look.label, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    _plain_ticks(ax)
    ax.set_ylim(1, None)
    ax.set_xlabel("turnovers of the pool (tokens computed / slots)")
    ax.set_ylabel("consecutive slots a run, mean")
    return ax


def run_distribution(layouts: Mapping[str, tuple[int, list[NDArray[np.int32]]]], ax: Axes | None = None) -> Axes:
    """Share of tokens that lie in runs of at most so many slots, at the end."""
    from kvarena.experiments.aged import token_runs

    ax = ax or _axes()
    for name, look in aged_looks(list(layouts)).items():
        runs = token_runs(layouts[name][1])
        lengths, last = np.unique(runs, return_index=True)
        share = 100 * np.append(last[1:], len(runs)) / max(len(runs), 1)
        # The first step rises from 0, so that what lies in the shortest runs is seen.
        lengths, share = np.append(lengths[:1], lengths), np.append(0.0, share)
        ax.step(lengths, share, where="post", color=look.colour, linestyle=look.dashes, label=look.label)
    ax.set_xscale("log", base=2)
    _plain_ticks(ax, y=False)
    ax.set_ylim(0, 100)
    ax.set_xlabel("length of the run that a token lies in (slots)")
    ax.set_ylabel("tokens of live requests (%)")
    return ax


def draw_aged(
    table: pd.DataFrame, layouts: Mapping[str, tuple[int, list[NDArray[np.int32]]]], footer: str = ""
) -> Figure:
    """Both panels. The caller closes the figure."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from kvarena.experiments.style import add_footer

    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(7.0, 3.3), layout="constrained")
        left, right = figure.subplots(1, 2)
        churn(table, left)
        run_distribution(layouts, right)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, handlelength=3)
        if footer:
            add_footer(figure, footer)
        return figure


def _plain_ticks(ax: Axes, *, y: bool = True) -> None:
    from matplotlib.ticker import FuncFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_major_formatter(plain)
    if y:
        ax.yaxis.set_major_formatter(plain)


def _axes() -> Axes:
    import matplotlib.pyplot as plt

    return plt.figure(figsize=(6.4, 3.8), layout="constrained").subplots()
