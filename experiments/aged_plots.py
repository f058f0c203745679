"""The figure of aged pools: how runs of slots fall apart while a pool is turned over, what is left at the end, and what
that costs a decode and an extend step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from kvarena.experiments.style import STYLE, Look, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

AGED = "aged:"  # of the benchmark's points, before an allocator's name
LABELS = {
    "block-16": "block, page 16 (vLLM 0.32.0 rules)",
    "token-1": "token, page 1 (SGLang 0.5.22 rules)",
    "token-16": "token, page 16 (SGLang 0.5.22 rules)",
    "token-1-sorted": "token, page 1, free slots sorted",
}


def aged_looks(names: list[str]) -> dict[str, Look]:
    """A look for each aged allocator: kind and page size are in its name. A variant of the same kind and size
    (`token-1-sorted`) lies on the other line, so it is drawn as thin black crosses."""
    entries = []
    for name in names:
        kind, size, *_ = name.split("-")
        entries.append({"name": name, "label": LABELS.get(name, name), "kind": kind, "page_size": int(size)})
    variants = {name for name in names if name.count("-") > 1}
    return {
        name: replace(look, colour="#000000", face="#000000", marker="x") if name in variants else look
        for name, look in looks(entries).items()
    }


def churn(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Mean slots a run of live requests against how often the pool was turned over."""
    ax = ax or _axes()
    for name, look in aged_looks(list(dict.fromkeys(table["allocator"]))).items():
        rows = table[table["allocator"] == name]
        style: dict[str, Any] = {"marker": look.marker, "markerfacecolor": look.face, "linestyle": look.dashes}
        if look.marker == "x":
            style["linewidth"] = 0.8
        ax.plot(rows["turnovers"], rows["tokens_a_run"], color=look.colour, label=look.label, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    _plain_ticks(ax)
    ax.set_ylim(1, None)
    ax.set_xlabel("turnovers of the pool\n(tokens computed / slots)")
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
    ax.set_xlabel("run that a token lies in\n(slots)")
    ax.set_ylabel("tokens of live requests (%)")
    return ax


PARTS = {"decode": "decode", "extend": "rest"}  # op -> the part of the kernel benchmark that measured it


def kernel_costs(path: Path | None = None) -> pd.DataFrame:
    """What age costs a kernel on the card that was measured: a row an op (decode, extend), aged layout, table and
    placement ("recorded": as the aged pool held it, "shuffled": page by page), `percent` over the same pages in order.

    path  kernels.json of a card; default: the checkout's; none there, or without these rows: empty. Raises ValueError
          when it cannot be read
    """
    from kvarena.experiments.foreign import read_json

    import kvarena

    path = path or Path(kvarena.__file__).resolve().parent.parent / "results" / "h200" / "kernels.json"
    columns = ["op", "allocator", "table", "placement", "percent"]
    if not path.is_file():
        return pd.DataFrame(columns=columns)
    try:
        parts = read_json(path)["parts"]
        found = [row for op, part in PARTS.items() if part in parts for row in _costs_of(op, parts[part]["rows"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as kernel times ({error})") from None
    return pd.DataFrame(found, columns=columns)


def _costs_of(op: str, rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str, float]]:
    """One op's rows of `kernel_costs`; a layout that was not measured in order has none."""
    ours = [row for row in rows if row.get("op") == op and row.get("study") == "recorded" and "us" in row]
    us = {(str(row["point"]), str(row["kernel"]), str(row["placement"])): float(row["us"]) for row in ours}
    return [
        (op, point.removeprefix(AGED), kernel.removeprefix("kvarena-"), placement, 100 * (time / base - 1))
        for (point, kernel, placement), time in us.items()
        if point.startswith(AGED) and placement != "in_order" and (base := us.get((point, kernel, "in_order")))
    ]


def age_cost(costs: pd.DataFrame, ax: Axes | None = None, op: str = "decode") -> Axes:
    """Time of `op` on an aged and on a shuffled layout over one in order, percent: a pair of bars an allocator, the
    mean of both page tables, which the whisker spans."""
    from matplotlib.patches import Patch

    ax = ax or _axes()
    costs = costs[costs["op"] == op]
    names = list(dict.fromkeys(costs["allocator"]))
    for place, (name, look) in enumerate(aged_looks(names).items()):
        for turn, (placement, hatch) in enumerate((("recorded", ""), ("shuffled", "////"))):
            values = costs[(costs["allocator"] == name) & (costs["placement"] == placement)]["percent"]
            mean = float(values.mean())
            bar: dict[str, Any] = {"color": look.colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            bar["yerr"] = [[mean - values.min()], [values.max() - mean]]
            ax.bar(place + (turn - 0.5) * 0.36, mean, 0.32, ecolor="#444444", capsize=2, **bar)
    ax.axhline(0, color="#444444", linewidth=0.8)
    ax.set_xticks(range(len(names)), [name.replace("-", ", page ") for name in names])
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(f"{op} over slots in order (%)")
    marks = (("as the aged pool held them", ""), ("every page at random", "////"))
    keys = [
        Patch(facecolor="#888888", hatch=hatch, edgecolor="white", linewidth=0, label=text) for text, hatch in marks
    ]
    ax.legend(handles=keys, loc="upper right", handlelength=1.4)
    ax.margins(y=0.3)
    return ax


def draw_aged(
    table: pd.DataFrame,
    layouts: Mapping[str, tuple[int, list[NDArray[np.int32]]]],
    footer: str = "",
    costs: pd.DataFrame | None = None,
) -> Figure:
    """Churn and runs; with `costs` (`kernel_costs`) what they cost each kernel too. The caller closes the figure."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from kvarena.experiments.style import add_footer

    ops = [] if costs is None else list(dict.fromkeys(costs["op"]))
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(7.0, 5.8 if ops else 3.3), layout="constrained")
        top, *below = figure.subfigures(2 if ops else 1, 1, squeeze=False)[:, 0]
        left, right = top.subplots(1, 2)
        churn(table, left)
        run_distribution(layouts, right)
        if costs is not None and below:
            for op, ax in zip(ops, np.ravel(below[0].subplots(1, len(ops), sharey=True)), strict=True):
                age_cost(costs, ax, op)
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
