"""Figures of a ladder: the walk from one design to the other, and which rungs do more or less together than apart."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.ladder import METRICS, TIME, Ladder
from kvarena.experiments.outputs import refuse_other_figures, source_of
from kvarena.experiments.style import STYLE, add_footer, printable, save_figure

if TYPE_CHECKING:
    from kvarena.experiments.ladder_ablations import Ablations
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UP, DOWN, END = "#542788", "#E08214", "#444444"  # as in the table of pairs; no design has them
SCALES = {"token_hit_rate": (100.0, "token hit rate (%)"), "hit_tokens": (1.0, "hit tokens")}
SCALES |= {"concurrency": (1.0, "live requests, mean"), "preemptions": (1.0, "preemptions")}


def plot_waterfall(
    made: Ladder, ax: Axes | None = None, metric: str = "token_hit_rate", pool: int | None = None
) -> Axes:
    """Each rung's Shapley share from the lower end to the upper one; whiskers: what it adds in any setting of the
    others, from where its bar begins. Reads nothing, saves nothing."""
    from matplotlib.ticker import MaxNLocator

    if metric not in METRICS:
        raise ValueError(f"metric: expected one of {', '.join(METRICS)}, found {metric!r}")
    ax = _axes((5.6, 1.2 + 0.32 * (len(made.rungs) + 2))) if ax is None else ax
    scale, name = SCALES[metric]
    table = made.of(metric, pool)
    at = made.end(metric, upper=False, pool=pool) * scale
    reach = [at]
    _end(ax, 0, at)
    for place, row in enumerate(table.to_dict("records"), 1):
        value, low, high = (scale * row[part] for part in ("value", "low", "high"))
        ax.plot([at, at], [place - 1, place + 0.35], color="#999999", linewidth=0.6, zorder=1)
        ax.plot(
            [at + low, at + high], [place, place], color="#666666", linewidth=0.8, marker="|", markersize=5, zorder=3
        )
        colour, hatch = (UP, "") if value >= 0 else (DOWN, "////")
        ax.barh(place, value, left=at, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0, zorder=2)
        reach += [at + low, at + high, at + value]
        at += value
        ax.annotate(
            _short(value) if abs(value) < 1000 else f"{value:+,.0f}",
            (max(at, at - value, at - value + high, at - value + low), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    last = len(table) + 1
    ax.plot([at, at], [last - 1, last], color="#999999", linewidth=0.6, zorder=1)
    _end(ax, last, at)
    labels = [made.manifest["ends"][0], *table["rung"], made.manifest["ends"][1]]
    ax.set_yticks(range(len(labels)), [_folded(label) for label in labels])
    ax.set_ylim(last + 0.6, -0.6)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    room = 0.16 * (max(reach) - min(reach)) or 0.5  # for the numbers; bars end at no edge of the axes
    ax.set_xlim(min(reach) - room / 2, max(reach) + room)
    ax.set_xlabel(name)
    ax.grid(axis="y", visible=False)
    ax.set_title(_title(made, pool))
    return ax


def _end(ax: Axes, place: int, value: float) -> None:
    ax.plot([value], [place], marker="D", color=END, markersize=5, zorder=3)
    text = f"{value:.2f}" if value < 1000 else f"{value:,.0f}"
    ax.annotate(text, (value, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=7)


SHARES = {
    "token_hit_rate": (100.0, "token hit rate (points)"),
    "concurrency": (1.0, "live requests, mean"),
    "preemptions": (1.0, "preemptions"),
    TIME: (1.0, "allocator time (µs of CPU a request)"),
}


def is_timed(made: Ladder) -> bool:
    """Whether the allocator's time was measured in rounds, and so has a spread."""
    return bool(made.manifest.get("time_rounds", 0))


def plot_shares(made: Ladder, ax: Axes | None = None, metric: str = TIME, pool: int | None = None) -> Axes:
    """Each rung's share of the difference in one metric, as a bar from 0. Whiskers: of the measured time, the range of
    single rounds (grey bars: it holds zero); of what is counted, what the rung adds in any setting of the others."""
    if metric not in SHARES:
        raise ValueError(f"metric: expected one of {', '.join(SHARES)}, found {metric!r}")
    ax = _axes((4.6, 1.0 + 0.3 * len(made.rungs))) if ax is None else ax
    scale, name = SHARES[metric]
    table = made.of(metric, pool)
    timed = metric == TIME and is_timed(made)
    if metric == TIME and not timed:
        name = "allocator time (µs of wall clock a request, taken once)"
    ends = ("spread_low", "spread_high") if timed else () if metric == TIME else ("low", "high")
    for place, row in enumerate(table.to_dict("records")):
        value = scale * row["value"]
        low, high = (scale * row[end] for end in ends) if ends else (value, value)
        colour, hatch = (UP, "") if value >= 0 else (DOWN, "////")
        colour = "#BBBBBB" if metric == TIME and row.get("within_noise") is True else colour
        ax.barh(place, value, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0, zorder=2)
        ax.plot([low, high], [place, place], color="#444444", linewidth=0.8, marker="|", markersize=5, zorder=3)
    ax.axvline(0, color="#444444", linewidth=0.8)
    if not table[["value", *ends]].fillna(0).astype(bool).any(axis=None):
        ax.set_xlim(-1, 1)
        ax.set_xticks([0])
        words: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "color": "#777777",
            "bbox": {"facecolor": "white", "linewidth": 0},
        }
        ax.text(0.5, 0.5, "no difference", transform=ax.transAxes, **words)
    ax.set_yticks(range(len(table)), [_folded(rung, 26) for rung in table["rung"]])
    ax.set_ylim(len(table) - 0.4, -0.6)
    if metric == "preemptions" and made.manifest["of"] == "compare":
        name = "requests ended early"
    ax.set_xlabel(name)
    ax.grid(axis="y", visible=False)
    return ax


def plot_metrics(made: Ladder, pool: int | None = None) -> Figure:
    """Shares of all four metrics side by side, rungs in rows; of three where the time was taken once."""
    import matplotlib.pyplot as plt

    figure: Any = plt.figure(figsize=(7.0, 1.5 + 0.32 * len(made.rungs)), layout="constrained")
    metrics = [metric for metric in SHARES if metric != TIME or is_timed(made)]
    panels = figure.subplots(1, len(metrics), sharey=True)
    for ax, metric in zip(panels, metrics, strict=True):
        plot_shares(made, ax, metric, pool)
        ax.set_xlabel(ax.get_xlabel().replace(" (", "\n("), fontsize=7)
        ax.tick_params(axis="x", labelsize=6.5)
        if len(ax.get_xticks()) > 1:
            ax.locator_params(axis="x", nbins=4)
    figure.suptitle(_title(made, pool), x=0.01, ha="left", fontsize=9)
    return figure


def plot_interactions(
    made: Ladder, ax: Axes | None = None, metric: str = "token_hit_rate", pool: int | None = None
) -> Axes:
    """Pairs of rungs: how much more they do together than apart. On the diagonal, each rung's own share."""
    import numpy as np

    if metric not in METRICS:
        raise ValueError(f"metric: expected one of {', '.join(METRICS)}, found {metric!r}")
    names, scale = made.rungs, SCALES[metric][0]
    ax = _axes((1.9 + 0.55 * len(names), max(1.5 + 0.5 * len(names), 2.5))) if ax is None else ax
    pool = made.reference_pool if pool is None else pool
    grid = np.full((len(names), len(names)), np.nan)
    for place, value in enumerate(made.of(metric, pool)["value"]):
        grid[place, place] = scale * value
    pairs = made.interactions
    for row in pairs[(pairs["metric"] == metric) & (pairs["pool_bytes"] == pool)].to_dict("records"):
        i, j = sorted((names.index(row["a"]), names.index(row["b"])))
        grid[j, i] = scale * row["value"]
    bound = max(float(np.nanmax(np.abs(grid))), 1e-9)
    image = ax.imshow(grid, cmap="PuOr", vmin=-bound, vmax=bound)
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            ink = "white" if abs(value) > 0.6 * bound else "black"
            weight = "bold" if row == column else "normal"
            text = _short(value)
            ax.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink, fontweight=weight)
    ticks = [_folded(name, 18) for name in names]
    ax.set_xticks(range(len(names)), ticks, rotation=90)
    ax.set_yticks(range(len(names)), ticks)
    ax.grid(visible=False)
    unit = "points" if metric == "token_hit_rate" else SCALES[metric][1]
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.7)
    between = "\n" if len(names) < 5 else " "  # a small figure is shorter than the line
    bar.set_label(f"{unit}: own share (diagonal),{between}together minus apart", fontsize=7)
    ax.set_title(_title(made, pool))
    return ax


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:+.2f}" if abs(value) < 100 else f"{value:+.3g}"


def _title(made: Ladder, pool: int | None) -> str:
    size = format_bytes(made.reference_pool if pool is None else pool)
    return f"{printable(made.manifest['trace'])}, pool {size}"


def _folded(text: str, width: int = 30) -> str:
    return textwrap.fill(printable(text).replace("$", r"\$"), width, break_long_words=False)


def _axes(size: tuple[float, float]) -> Axes:
    import matplotlib.pyplot as plt

    axes: Any = plt.figure(figsize=size, layout="constrained").add_subplot()
    return axes


def footer(made: Ladder) -> str:
    """One line: what was run, and what cannot be seen."""
    held = ", ".join(made.manifest["held"]) or "nothing"
    unit = f"; {made.unit}" if made.unit else ""
    return (
        f"kvarena ladder: {2 ** len(made.rungs)} subsets, exact Shapley shares; outputs "
        f"{made.manifest['visible']['outputs']}; not observable here: {held}{unit}"
    )


def write_figures(made: Ladder, folder: Path, force: bool = True) -> list[Path]:
    """Waterfall, interactions and all metrics as PDF, SVG and PNG; the same ladder gives the same bytes.

    Raises ValueError when other figures are there, unless `force`.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    source = source_of("ladder", made.manifest["config"], made.manifest["ends"], made.manifest["rungs"])
    if not force:
        refuse_other_figures(folder, ("waterfall", "interactions", "metrics"), source)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    plots: dict[str, Any] = {"waterfall": plot_waterfall, "interactions": plot_interactions, "metrics": plot_metrics}
    with mpl.rc_context(STYLE):
        for name, plot in plots.items():
            drawn: Any = plot(made)
            figure = drawn if name == "metrics" else drawn.get_figure()
            put_footer(figure, footer(made))
            paths += save_figure(figure, folder / name, source=source)
            plt.close(figure)
    return paths


def put_footer(figure: Any, text: str) -> None:
    """Provenance under the figure, on as many lines as its width asks for, without a date."""
    lines = textwrap.wrap(text, int(figure.get_figwidth() * 25))
    add_footer(figure, "")
    share = 0.11 * len(lines) / figure.get_figheight() + 0.01
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))
    shown = "\n".join(printable(line).replace("$", r"\$") for line in lines)
    figure.text(0.008, 0.005, shown, fontsize=5.5, color="#777777", ha="left", va="bottom")


# --- ablations ---

BARS = {
    "block": ("#0072B2", ""),
    "unhashed to the tail": ("#E69F00", "////"),
    "released forwards": ("#CC79A7", "...."),
    "block, merged": ("#7FB8D8", "xxxx"),
    "token": ("#D55E00", ""),
    "token, kept": ("#EAA26F", "xxxx"),
}
QUEUES = {"linked list": ("#333333", "o"), "deque": ("#999999", "s")}  # no design is meant


def plot_ablation_hits(made: Ablations, ax: Axes | None = None) -> Axes:
    """Token hit rate of the block design with and without its two queue rules, at each pool."""
    ax = _axes((5, 3)) if ax is None else ax
    names = ("block", "unhashed to the tail", "released forwards")
    _bars(ax, made, names, "token_hit_rate", 100.0)
    ax.set_ylabel("token hit rate (%)")
    return ax


def plot_ablation_tables(made: Ablations, ax: Axes | None = None) -> Axes:
    """Table bytes rewritten a step, append-only tables against merged ones; a missing bar is 0."""
    ax = _axes((5, 3)) if ax is None else ax
    names = ("block", "block, merged", "token, kept", "token")
    table = made.table.assign(rewritten=made.table["table_bytes_rewritten"] / made.table["steps"])
    _bars(ax, made, names, "rewritten", 1.0, table)
    ax.set_ylabel("table bytes rewritten a step")
    return ax


def plot_ablation_duplicates(made: Ablations, ax: Axes | None = None) -> Axes:
    """Bytes in pages that repeat another one, mean over steps; a missing bar is 0."""
    ax = _axes((5, 3)) if ax is None else ax
    _bars(ax, made, ("block", "block, merged", "token, kept", "token"), "duplicate_bytes", 2.0**-20)
    ax.set_ylabel("duplicates (MiB, mean)")
    return ax


def plot_removal(made: Ablations, ax: Axes | None = None) -> Axes:
    """Measured cost of one page leaving the middle of a queue, by the queue's length."""
    ax = _axes((4, 3)) if ax is None else ax
    for name, (colour, marker) in QUEUES.items():
        rows = made.removal[made.removal["queue"] == name]
        ax.plot(rows["length"], rows["ns_a_page"], color=colour, marker=marker, linestyle="none", label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("pages in the queue")
    ax.set_ylabel("ns a page removed")
    ax.legend(loc="upper left")
    return ax


def _bars(ax: Axes, made: Ablations, names: tuple[str, ...], column: str, scale: float, table: Any = None) -> None:
    means = (made.table if table is None else table).groupby(["pool_bytes", "design"])[column].mean()
    pools = made.manifest["pools"]
    if not any(means[pool, name] for pool in pools for name in names):
        ax.set_ylim(0, 1)
        ax.set_yticks([0])
        ax.text(0.5, 0.5, "none in this workload", transform=ax.transAxes, ha="center", va="center", color="#777777")
    width = 0.8 / len(names)
    for turn, name in enumerate(names):
        colour, hatch = BARS[name]
        heights = [scale * float(means[pool, name]) for pool in pools]
        places = [place + (turn - (len(names) - 1) / 2) * width for place in range(len(pools))]
        ax.bar(places, heights, width * 0.92, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=name)
    ax.set_xticks(range(len(pools)), [format_bytes(pool) for pool in pools])
    ax.set_xlabel("pool")
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=7, borderaxespad=0.2)


def write_ablations(made: Ablations, folder: Path, force: bool = True) -> list[Path]:
    """All four as one figure, as PDF, SVG and PNG. Raises ValueError when another is there, unless `force`."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    source = source_of("ablations", made.manifest["config"])
    if not force:
        refuse_other_figures(folder, ("ablations",), source)
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure = draw_ablations(made)
        paths = save_figure(figure, folder / "ablations", source=source)
        plt.close(figure)
    return paths


def draw_ablations(made: Ablations) -> Figure:
    """The four, and the provenance below."""
    import matplotlib.pyplot as plt

    figure: Any = plt.figure(figsize=(7.0, 5.6), layout="constrained")
    plots = (plot_ablation_hits, plot_removal, plot_ablation_tables, plot_ablation_duplicates)
    for plot, ax in zip(plots, figure.subplots(2, 2).flat, strict=True):
        plot(made, ax)
    trace, outputs = printable(made.manifest["trace"]), made.manifest["visible"]["outputs"]
    put_footer(figure, f"kvarena ablations: {trace}, pages of 16 tokens, outputs {outputs}; removal is measured")
    return figure
