"""The figure of a rate study: latency, throughput and batch against request rate, and what a hit is worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.style import DASHES as LOOK_DASHES
from kvarena.experiments.style import STYLE, Look, add_footer, has_positive, looks, save_figure, say_no_data

if TYPE_CHECKING:
    from kvarena.experiments.rate import RateResult
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_CHARACTERS = 130  # of all labels together, in one line
DASHES: dict[str, Any] = {"p50": "-", "p90": (0, (4, 1.5)), "p99": (0, (1.2, 1.2))}
TURN_MARKERS = ("v", "P", "X")  # of allocators that share a colour, after the first
FEW = 5.0  # highest over lowest value up to which an axis of 1, 2 and 5 would have two labels or less


def plot_normalised(result: RateResult, ax: Axes) -> Axes:
    """Normalised latency against rate; a vertical line at each allocator's knee."""
    for name, look in _looks(result).items():
        rows = _rows(result, name)
        knee = result.manifest["knee_per_s"].get(name)
        text = f"{look.label}: " + ("no knee" if knee is None else f"knee at {knee:.1f}/s")
        ax.plot(rows["rate_per_s"], rows["normalised_ms"], label=text, **_line(look))
        if knee is not None:
            ax.axvline(knee, color=look.colour, linestyle=(0, (1, 2)), linewidth=1)
    _log(ax, result.rates["normalised_ms"])
    return _finish(ax, "normalised latency (ms a token)\ndotted: knee, latency doubled")


def plot_percentiles(result: RateResult, what: str, ax: Axes) -> Axes:
    """`what` (ttft or tpot) at p50 (solid), p90 (dashed) and p99 (dotted)."""
    for name, look in _looks(result).items():
        rows = _rows(result, name)
        for label, dashes in DASHES.items():
            ax.plot(rows["rate_per_s"], rows[f"{what}_{label}_ms"], **_line(look, dashes))
    _log(ax, *(result.rates[f"{what}_{label}_ms"] for label in DASHES))
    return _finish(ax, f"{what.upper()} (ms):\np50 solid, p90 dashed, p99 dotted")


def plot_throughput(result: RateResult, ax: Axes) -> Axes:
    """Served (solid) and good (dashed) requests a second; the thin line is what arrives."""
    for name, look in _looks(result).items():
        rows = _rows(result, name)
        ax.plot(rows["rate_per_s"], rows["requests_per_s"], **_line(look))
        ax.plot(rows["rate_per_s"], rows["goodput_per_s"], **_line(look, DASHES["p90"]))
    if has_positive(result.rates["requests_per_s"]):
        most = float(result.rates["requests_per_s"].max())
        ax.plot([0, most], [0, most], color="#555555", linewidth=0.8, linestyle=":")
        ax.set_ylim(0, most * 1.08)
    else:
        say_no_data(ax)
    return _finish(ax, "requests a second:\nserved solid, good dashed, arriving dotted")


def plot_batch(result: RateResult, ax: Axes) -> Axes:
    """Requests in a step, mean over the steps that ran."""
    for name, look in _looks(result).items():
        rows = _rows(result, name)
        ax.plot(rows["rate_per_s"], rows["mean_batch"], **_line(look))
    ax.set_ylim(bottom=0)
    if not has_positive(result.rates["mean_batch"]):
        say_no_data(ax)
    return _finish(ax, "requests in a step, mean")


def plot_hits(result: RateResult, ax: Axes) -> Axes:
    """Gain in throughput against token hit rate, with Amdahl's line for the share that prompts take."""
    if not len(result.hits):
        ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", va="center", color="#777777")
        return ax
    if not has_positive(result.hits["gain"]):
        say_no_data(ax)
        return ax
    for name, look in _looks(result).items():
        rows = result.hits[result.hits["allocator"] == name]
        ax.plot(100 * rows["token_hit_rate"], rows["gain"], **_line(look))
    line = result.hits.sort_values("token_hit_rate")
    label = f"Amdahl's law, {line['prefill_share'].mean():.0%} in prompts"
    dashes: Any = (0, (2, 2))
    ax.plot(100 * line["token_hit_rate"], line["amdahl"], color="black", linewidth=1, linestyle=dashes, label=label)
    ax.set_ylim(top=1 + 1.15 * (ax.get_ylim()[1] - 1))  # room for the legend
    ax.legend(fontsize=7.5, loc="upper left", frameon=False)
    ax.set_xlabel("token hit rate (%)")
    ax.set_ylabel("throughput over no cache (x)")
    ax.set_ylim(bottom=min(0.9, ax.get_ylim()[0]))
    return ax


def _log(ax: Axes, *columns: Any) -> None:
    """A logarithmic axis with plain numbers, more of them where it is short; none where these columns have nothing to
    put on one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not any(map(has_positive, columns)):
        say_no_data(ax)
        return
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low > FEW else (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _rows(result: RateResult, name: str) -> Any:
    return result.rates[result.rates["allocator"] == name].sort_values("rate_per_s")


def _line(look: Look, dashes: Any = "-") -> dict[str, Any]:
    """Dashes say what is drawn, never of which allocator: those of one colour have markers of their own here."""
    turn = LOOK_DASHES.index(look.dashes)
    marker = TURN_MARKERS[turn - 1] if turn else look.marker
    face = {"markerfacecolor": look.face, "markersize": 4 if turn else 3.5, "linewidth": 1.3}
    return {"color": look.colour, "marker": marker, "linestyle": dashes, **face}


def _looks(result: RateResult) -> dict[str, Look]:
    return looks(result.manifest["allocators"])


def _finish(ax: Axes, label: str) -> Axes:
    ax.set_xlabel("request rate (1/s)")
    ax.set_ylabel(label)
    ax.set_xlim(left=0)
    return ax


def draw_rate(result: RateResult) -> Figure:
    """All six panels."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(10.0, 6.0), layout="constrained")
        axes = figure.subplots(2, 3)
        plot_normalised(result, axes[0][0])
        plot_percentiles(result, "ttft", axes[0][1])
        plot_percentiles(result, "tpot", axes[0][2])
        plot_throughput(result, axes[1][0])
        plot_batch(result, axes[1][1])
        plot_hits(result, axes[1][2])
        lines, labels = axes[0][0].get_legend_handles_labels()
        columns = 3 if sum(map(len, labels)) <= LEGEND_CHARACTERS else 2
        figure.legend(lines, labels, loc="outside upper left", ncols=columns, fontsize=8, frameon=False)
        add_footer(figure, _footer(result))
        return figure


def save_rate_figure(result: RateResult, stem: Path) -> list[Path]:
    """rate.pdf|svg|png."""
    import matplotlib.pyplot as plt

    figure = draw_rate(result)
    try:
        return save_figure(figure, stem)
    finally:
        plt.close(figure)


def _footer(result: RateResult) -> str:
    from kvarena.experiments.budget import format_bytes

    from kvarena import __version__

    about = result.manifest
    pools = ", ".join(format_bytes(size) for size in about["pool_bytes"])
    return (
        f"kvarena {__version__}; {about['trace']}, {about['requests']:,} requests, open arrivals; {about['model']}, "
        f"pool {pools}; {about['policy']['label']}, lag {about['result_lag']}; goodput at {about['goodput_limits']}; "
        f"simulated, step times {about['step_times'].split(' and ')[0]}"
    )
