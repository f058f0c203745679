"""Figures of a result. Each `plot(result, ax=None) -> Axes` reads nothing from disk, saves nothing and sets no global
style; without `ax` it opens a figure of its own. Missing values are gaps, never zeros; a series without any value
keeps its colour and says "no data".
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.pool_axis import pool_axis as _pool_axis
from kvarena.experiments.provenance import outputs_words
from kvarena.experiments.style import (
    STATE_COLOURS,
    STYLE,
    Look,
    add_footer,
    has_positive,
    is_narrow,
    looks,
    new_figure,
    save_figure,
    say_no_data,
    short_label,
    use_paper_style,
)
from kvarena.experiments.style import styled as _styled

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.results import Result
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "add_footer",
    "allocator_time",
    "difference",
    "evictions",
    "hit_rate",
    "hit_rate_by_page_size",
    "occupancy",
    "save_figure",
    "use_paper_style",
    "waste",
]

MAX_POINTS = 1500
NARROW_LABEL = 48  # letters of a label that a single column of a paper holds
BAND_ALPHA = 0.18
OUTPUTS_BAND = "replies: none (line) to unreachable"
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "borderaxespad": 0}
WASTE_KINDS = {"tail_waste_bytes": "tail", "reservation_bytes": "reservation", "duplicate_bytes": "duplicates"}
VERBS = ("pin", "reserve", "commit", "release")


@_styled
def hit_rate(result: Result, ax: Axes | None = None) -> Axes:
    """Token hit rate (first admissions) against pool size in bytes, with the no-cache line and each design's
    infinite-cache line. Without `ax`, the paired difference stands below; the upper axes are returned."""
    if ax is None:
        figure = new_figure((6.4, 4.8))
        ax, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
        difference(result, below)
        ax.tick_params(labelbottom=False)
        _hit_rate(result, ax)
        ax.set_xlabel("")
        return ax
    return _hit_rate(result, ax)


def _hit_rate(result: Result, ax: Axes) -> Axes:
    for name, look in _looks(result).items():
        table = _over_seeds(result.summary, name, "token_hit_rate", scale=100)
        draw_series(ax, table["pool_bytes"], table["mean"], look, band=_band(result, table))
        _outputs_band(result, ax, name, look, table)
        ceiling = _over_seeds(result.summary, name, "token_hit_rate_ceiling", scale=100)["mean"].dropna()
        if len(ceiling):
            ax.axhline(ceiling.iloc[0], color=look.colour, linestyle=(0, (2, 2)), linewidth=1, zorder=1)
    ax.axhline(0, color="#555555", linewidth=1, linestyle=":", zorder=1)
    for dashes, text in (((0, (2, 2)), "infinite cache, at each design's grain"), (":", "no cache")):
        ax.plot([], [], color="#555555", linestyle=dashes, linewidth=1, label=text)
    if "token_hit_rate_unreachable" in result.summary:
        ax.fill_between(
            [], [], [], color="#555555", alpha=BAND_ALPHA, hatch="\\\\\\\\", linewidth=0, label=OUTPUTS_BAND
        )
    seeds = result.summary["seed"].nunique()
    if seeds > 1:
        ax.fill_between([], [], [], color="#555555", alpha=BAND_ALPHA, linewidth=0, label=f"range over {seeds} seeds")
    ax.set_ylabel("token hit rate (%)")
    ax.set_ylim(min(0.0, ax.get_ylim()[0]), max(1.0, ax.get_ylim()[1]))
    _pool_axis(ax, result.summary)
    say_outputs(result, ax)
    return _finish(ax, result.summary)


def _outputs_band(result: Result, ax: Axes, name: str, look: Look, table: pd.DataFrame) -> None:
    """From replies that are left out (the line) down to replies that take room and serve nothing."""
    if "token_hit_rate_unreachable" not in result.summary:
        return
    lower = _over_seeds(result.summary, name, "token_hit_rate_unreachable", scale=100)["mean"]
    hatching: dict[str, Any] = {"hatch": "\\\\\\\\", "edgecolor": look.colour, "linewidth": 0}
    ax.fill_between(table["pool_bytes"], lower, table["mean"], facecolor=look.colour, alpha=BAND_ALPHA, **hatching)


@_styled
def difference(result: Result, ax: Axes | None = None) -> Axes:
    """Paired difference in token hit rate to the first allocator, in points: same seed, same requests, same bytes."""
    ax = ax or _new_axes()
    first, *others = result.allocators
    look = _looks(result)
    for name in others:
        table = _paired(result.summary, first, name)
        draw_series(ax, table["pool_bytes"], table["mean"], look[name], band=(table["min"], table["max"]), label="")
    ax.axhline(0, color="#555555", linewidth=1, linestyle=":")
    ax.set_ylabel(f"minus {short_label([look[name].label for name in result.allocators])}\n(points)")
    ax.margins(y=0.15)
    # Rounding errors are no difference: without this, an axis of 1e-17 would show them.
    ax.set_ylim(min(-0.05, ax.get_ylim()[0]), max(0.05, ax.get_ylim()[1]))
    _pool_axis(ax, result.summary)
    say_outputs(result, ax)
    if not others or not len(result.summary):
        say_no_data(ax)
    return ax


@_styled
def hit_rate_by_page_size(result: Result, ax: Axes | None = None) -> Axes:
    """Token hit rate at the reference pool for each page size: separate categories, in numeric order. Of several seeds
    the mean, and a line over their range."""
    ax = ax or _new_axes()
    table = result.summary[result.summary["pool_bytes"] == result.reference_pool]
    sizes = sorted({int(size) for size in table["page_size"]})
    place = {size: position for position, size in enumerate(sizes)}
    for name, look in _looks(result).items():
        rows = table[table["allocator"] == name]
        rates = (rows["token_hit_rate"].astype(float) * 100).groupby(rows["page_size"]).agg(["mean", "min", "max"])
        x = [place[int(size)] for size in rates.index]
        ax.vlines(x, rates["min"], rates["max"], color=look.colour, linewidth=1.2)
        style: dict[str, Any] = {"color": look.colour, "markersize": 7, "markerfacecolor": look.face}
        ax.plot(x, rates["mean"], look.marker, label=look.label, **style)
    if (seeds := table["seed"].nunique()) > 1:
        ax.plot([], [], "|", color="#555555", markersize=9, label=f"mean and range of {seeds} seeds")
    ax.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    ax.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
    ax.set_xlabel(f"page size (tokens), pool {format_bytes(result.reference_pool)}")
    say_outputs(result, ax)
    ax.set_ylabel("token hit rate (%)")
    return _finish(ax, table)


@_styled
def occupancy(result: Result, ax: Axes | None = None, allocator: str | None = None) -> Axes:
    """Share of the pool that is in use, evictable and free over the run, first seed, reference pool.

    Without `ax`, one panel an allocator, or that of `allocator` (the first axes are returned); with it, `allocator` or
    the first one.
    """
    if allocator not in (None, *result.allocators):
        raise ValueError(f"allocator: expected one of {', '.join(result.allocators)}, found {allocator!r}")
    if ax is None:
        names = result.allocators if allocator is None else [allocator]
        figure = new_figure((6.4, 0.7 + 1.5 * len(names)))
        panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, names, strict=True):
            _occupancy(result, panel, name)
        for panel in panels[:-1]:
            panel.set_xlabel("")
        for panel in panels[1:]:
            panel.get_legend().remove()
            panel.set_title(panel.get_title(loc="left"), pad=4, loc="left", fontsize=9)
        return panels[0]
    return _occupancy(result, ax, allocator or result.allocators[0])


def _occupancy(result: Result, ax: Axes, name: str) -> Axes:
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    steps = result.steps
    rows = steps[(steps["allocator"] == name) & (steps["pool_bytes"] == result.reference_pool)]
    rows = rows[rows["seed"] == rows["seed"].min()]
    rows = rows.iloc[:: max(1, -(-len(rows) // MAX_POINTS))]
    last = rows.iloc[-1:].assign(step=rows["step"].max() + 1)  # the last step is as wide as the others
    rows = pd.concat([rows, last])
    total = rows["free"] + rows["evictable"] + rows["in_use"]
    shares = [100 * rows[column] / total for column in ("in_use", "evictable", "free")]
    ax.stackplot(
        rows["step"], shares, labels=list(STATE_COLOURS), colors=list(STATE_COLOURS.values()), linewidth=0, step="post"
    )
    title = f"{_looks(result)[name].label}, pool {format_bytes(result.reference_pool)}"
    narrow = is_narrow(ax)  # there the title stands above the legend, else beside it
    ax.set_title(textwrap.fill(title, 40 if narrow else 52), pad=18 if narrow else 4, loc="left", fontsize=9)
    ax.set_xlabel("step of the engine" if result.manifest["kind"] == "run" else "request, in order of arrival")
    ax.set_ylabel("pool (%)")
    ax.set_ylim(0, 100)
    ax.margins(x=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(False)
    if not len(rows):
        say_no_data(ax)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, handlelength=1.2, **_LEGEND)
    return ax


@_styled
def waste(result: Result, ax: Axes | None = None) -> Axes:
    """Mean waste over the run by kind, in MiB of KV, at the reference pool."""
    look = _looks(result)
    ax = ax or _new_axes((6.4, 1.5 + 0.5 * len(look)))
    table = result.summary[result.summary["pool_bytes"] == result.reference_pool]
    height = 0.8 / max(len(look), 1)
    largest = 0.0
    for row, column in enumerate(WASTE_KINDS):
        for place, name in enumerate(look):
            value = table.loc[table["allocator"] == name, column].astype(float).mean() / 2**20
            y = row + (place - (len(look) - 1) / 2) * height
            shown = 0.0 if math.isnan(value) else value
            ax.barh(y, shown, height * 0.9, label=look[name].label if row == 0 else None, **_bar(look[name]))
            text = "no data" if math.isnan(value) else f"{value:.3g}"
            ax.annotate(text, (shown, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
            largest = max(largest, shown)
    ax.set_yticks(range(len(WASTE_KINDS)), list(WASTE_KINDS.values()))
    ax.invert_yaxis()
    ax.set_xlim(0, largest * 1.12 or 1)
    ax.set_xlabel(f"mean waste (MiB of KV), pool {format_bytes(result.reference_pool)}")
    ax.grid(axis="y", visible=False)
    return _finish(ax, table)


@_styled
def evictions(result: Result, ax: Axes | None = None) -> Axes:
    """KV evicted over the whole run, in GiB, against pool size."""
    ax = ax or _new_axes()
    page_bytes = result.summary["page_size"] * result.manifest["bytes_per_token"]
    frame = result.summary.assign(evicted_gib=result.summary["evicted_pages"] * page_bytes / 2**30)
    for name, look in _looks(result).items():
        table = _over_seeds(frame, name, "evicted_gib")
        draw_series(ax, table["pool_bytes"], table["mean"], look, band=_band(result, table))
    ax.set_ylabel("evicted KV (GiB, whole run)")
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])  # one pool alone: margins of what lies far above 0 are narrow
    _pool_axis(ax, frame)
    return _finish(ax, frame)


@_styled
def allocator_time(result: Result, ax: Axes | None = None) -> Axes:
    """Measured time of one call of each verb at the reference pool: marker = median wall time, line up to the
    99th percentile. No bars: on a log axis their length would mean nothing."""
    ax = ax or _new_axes((6.4, 3.4))
    look = _looks(result)
    table = result.timings
    if len(table):
        table = table[table["pool_bytes"] == result.reference_pool]
    width = 0.8 / max(len(look), 1)
    for place, name in enumerate(look):
        rows = table[table["allocator"] == name].groupby("verb")[["p50_us", "p99_us"]].mean() if len(table) else table
        rows = rows.reindex(VERBS) if len(rows) else rows
        if not len(rows):
            ax.plot([], [], label=f"{look[name].label}: no data", **_point(look[name]))
            continue
        x = [i + (place - (len(look) - 1) / 2) * width for i in range(len(VERBS))]
        ax.plot([], [], label=look[name].label, **_point(look[name]))
        ax.plot(x, rows["p50_us"], zorder=3, **{**_point(look[name]), "linestyle": "none"})
        ax.vlines(x, rows["p50_us"], rows["p99_us"], color=look[name].colour, linestyle=look[name].dashes)
        ax.plot(x, rows["p99_us"], "_", color=look[name].colour, markersize=8)
    ax.set_xticks(range(len(VERBS)), list(VERBS))
    known = len(table) > 0 and has_positive(table["p99_us"])
    if known:
        ax.set_yscale("log")
    ax.set_ylabel("wall time a call (µs):\nmedian, 99th percentile")
    ax.grid(axis="x", visible=False)
    return _finish(ax, table if known else table.iloc[:0])


# --- series ---


def draw_series(
    ax: Axes,
    x: Sequence[float] | pd.Series,
    y: Sequence[float | None] | pd.Series,
    look: Look,
    *,
    band: tuple[Any, Any] | None = None,
    label: str | None = None,
) -> None:
    """A line with gaps where values are missing. A series without values keeps its colour and says so.

    band: lower and upper edge, drawn where they differ.
    """
    values = [math.nan if value is None else float(value) for value in y]
    text = look.label if label is None else label
    if all(math.isnan(value) for value in values):
        ax.plot([], [], look.marker, linestyle=look.dashes, color=look.colour, label=text and f"{text}: no data")
        return
    marker: dict[str, Any] = {"marker": look.marker, "markerfacecolor": look.face, "markeredgewidth": 1.2}
    ax.plot(list(x), values, linestyle=look.dashes, color=look.colour, label=text or None, **marker)
    if band is not None and any(a != b for a, b in zip(*band, strict=True)):
        ax.fill_between(list(x), list(band[0]), list(band[1]), color=look.colour, alpha=BAND_ALPHA, linewidth=0)


def _point(look: Look) -> dict[str, Any]:
    face = {"markerfacecolor": look.face, "markeredgewidth": 1.2}
    return {"color": look.colour, "marker": look.marker, "linestyle": look.dashes, **face}


def _bar(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "hatch": look.hatch, "edgecolor": "white", "linewidth": 0}


def _band(result: Result, table: pd.DataFrame) -> tuple[Any, Any] | None:
    """Range over the seeds; left out where bands of many allocators would hide each other. Paired differences keep
    theirs."""
    return (table["min"], table["max"]) if len(result.allocators) <= 2 else None


def _over_seeds(frame: pd.DataFrame, name: str, column: str, scale: float = 1) -> pd.DataFrame:
    """mean, min and max of a column over the seeds at each pool size, ascending."""
    rows = frame[frame["allocator"] == name]
    values = rows.assign(value=rows[column].astype(float) * scale).groupby("pool_bytes")["value"]
    return values.agg(["mean", "min", "max"]).reset_index()


def _paired(frame: pd.DataFrame, first: str, name: str) -> pd.DataFrame:
    """Differences in points, `name` minus `first`, over the seeds at each pool size."""
    table = frame.pivot_table(index=["pool_bytes", "seed"], columns="allocator", values="token_hit_rate", dropna=False)
    missing = math.nan
    a, b = (table[n].astype(float) if n in table else missing for n in (first, name))
    table["value"] = 100 * (b - a)
    return table.groupby("pool_bytes")["value"].agg(["mean", "min", "max"]).reset_index()


def _looks(result: Result) -> dict[str, Look]:
    return looks(result.manifest["allocators"])


def say_outputs(result: Result, ax: Axes) -> None:
    """What is known of replies, and whether they were replayed, under a hit rate: it stands there in a notebook too,
    where a figure has no footer."""
    told = outputs_words(result.config, result.visible["outputs"])
    text = f"{ax.get_xlabel()}; outputs: {told}"
    wide = is_narrow(ax) and len(text) > NARROW_LABEL
    ax.set_xlabel(text.replace("; outputs", ";\noutputs") if wide else text)


# --- axes ---


def _finish(ax: Axes, frame: pd.DataFrame) -> Axes:
    if not len(frame):
        say_no_data(ax)
        return ax
    handles, labels = ax.get_legend_handles_labels()
    wrapped = [textwrap.fill(text, 36 if is_narrow(ax) else 44) for text in labels]
    columns = 1 if is_narrow(ax) else 2
    ax.legend(handles, wrapped, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=columns, columnspacing=1.2, **_LEGEND)
    return ax


def _new_axes(size: tuple[float, float] = (6.4, 3.8)) -> Axes:
    return new_figure(size).subplots()


PLOTS: dict[str, Callable[..., Axes]] = {
    "hit_rate": hit_rate,
    "occupancy": occupancy,
    "waste": waste,
    "evictions": evictions,
}


def _plot(name: str) -> Callable[..., Axes]:
    from kvarena.experiments.engine import figures

    return {"allocator_time": allocator_time, **PLOTS, **figures.PLOTS}[name]


def draw(name: str, result: Result, footer: str) -> Figure:
    """One named figure in our style, with its footer, ready to save. The caller closes it."""
    import matplotlib as mpl

    with mpl.rc_context({**STYLE, "figure.figsize": mpl.rcParamsDefault["figure.figsize"]}):
        plot = _plot(name)
        figure: Figure = plot(result).get_figure()  # type: ignore[assignment]
        add_footer(figure, footer)
        return figure
