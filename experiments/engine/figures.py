"""Figures and tables of engine runs, beside those that a run shares with a comparison. Same contract as `plots.py`:
`plot(result, ax=None) -> Axes`, nothing read from disk, nothing saved, missing values are gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvarena.experiments.style import Look, has_positive, looks, say_no_data

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.results import Result
    from matplotlib.axes import Axes

MAX_POINTS = 1500
MARKERS_A_LINE = 8
LATENCIES = {"ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms)", "e2el_ms": "E2EL (ms)"}
CAPTIONS = {
    "latency": "Latency of the served requests on the simulated clock: share of requests not slower than.",
    "load": "Requests that run and requests that wait, over the run.",
}
MEASURES = {
    "served": ("requests served", ",.0f"),
    "rejected": ("requests rejected", ",.0f"),
    "cut": ("requests cut short by a limit", ",.0f"),
    "requests_per_s": ("requests a second", ".3f"),
    "output_tokens_per_s": ("output tokens a second", ",.0f"),
    "goodput_per_s": ("goodput, requests a second", ".3f"),
    "ttft_p50_ms": ("TTFT p50, ms", ",.1f"),
    "ttft_p99_ms": ("TTFT p99, ms", ",.1f"),
    "tpot_p50_ms": ("TPOT p50, ms", ",.2f"),
    "tpot_p99_ms": ("TPOT p99, ms", ",.2f"),
    "itl_p99_ms": ("ITL p99, ms", ",.2f"),
    "e2el_p50_ms": ("E2EL p50, ms", ",.0f"),
    "e2el_p99_ms": ("E2EL p99, ms", ",.0f"),
    "mean_batch": ("requests in a step, mean", ".1f"),
    "preemptions": ("preemptions", ",.0f"),
    "recomputed_tokens": ("tokens computed again after them", ",.0f"),
    "swapped_tokens": ("tokens of preempted requests copied back instead", ",.0f"),
    "host_token_hit_rate": ("token hit rate of the host's cache, beyond the device's", "percent"),
    "swapped_out_bytes": ("copied to the host, swaps and cache", "bytes"),
    "swapped_in_bytes": ("copied back from the host, swaps and cache", "bytes"),
    "token_hit_rate": ("token hit rate, the run's clock", "percent"),
    "fixed_token_hit_rate": ("token hit rate, fixed clock", "percent"),
    "fixed_left_out": ("requests without room, fixed clock", ",.0f"),
    "readmitted_hit_tokens": ("hit tokens of re-admissions (apart)", ",.0f"),
}
# Which part of a host tier each is of: a run without it has none, which is not 0.
OF_THE_HOST = {
    "swapped_tokens": ("host_pool",),
    "host_token_hit_rate": ("host_cache",),
    "swapped_out_bytes": ("host_pool", "host_cache"),
    "swapped_in_bytes": ("host_pool", "host_cache"),
}


def latency(result: Result, ax: Axes | None = None, measure: str = "ttft_ms") -> Axes:
    """Empirical distribution of a latency at the reference pool, all seeds; without `ax`, TTFT, TPOT and E2EL in three
    panels (the first axes are returned)."""
    if ax is not None:
        return _distribution(result, ax, measure)
    from kvarena.experiments.style import new_figure

    panels = new_figure((7.0, 2.8)).subplots(1, len(LATENCIES), sharey=True)
    for panel, name in zip(panels, LATENCIES, strict=True):
        _distribution(result, panel, name)
        panel.set_ylabel("")
    panels[0].set_ylabel("requests (%)")
    # Of the figure: a legend wider than its panel would push the panels apart.
    panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return panels[0]


def _distribution(result: Result, ax: Axes, measure: str) -> Axes:
    rows = _at_reference(result, result.requests)
    for turn, (name, look) in enumerate(looks(result.manifest["allocators"]).items()):
        values = rows.loc[rows["allocator"] == name, measure].dropna().sort_values().to_list()
        if not values:
            ax.plot([], [], color=look.colour, label=f"{look.label}: no data")
            continue
        step = max(1, len(values) // MAX_POINTS)
        picked = [*range(0, len(values), step), len(values) - 1]
        shares = [100 * (place + 1) / len(values) for place in picked]
        style = {"linestyle": look.dashes, "label": look.label, **_markers(look, turn, len(picked))}
        ax.plot([values[place] for place in picked], shares, **style)
    if has_positive(rows[measure]):
        _log_axis(ax)
    else:
        say_no_data(ax)
    ax.set_ylim(0, 100)
    ax.set_xlabel(LATENCIES[measure])
    ax.set_ylabel("requests (%)")
    return ax


def _markers(look: Look, turn: int, points: int) -> dict[str, Any]:
    """A colour, and markers at some of the points, elsewhere for each allocator: colours alone look alike in grey."""
    every = max(1, points // MARKERS_A_LINE)
    start = round(turn * every / 2) % every
    return {"color": look.colour, "marker": look.marker, "markerfacecolor": look.face, "markevery": (start, every)}


def _log_axis(ax: Axes) -> None:
    """Few plain numbers: matplotlib's own labels of a short logarithmic axis run into each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = ax.get_xlim()
    if high < 4 * max(low, 1e-9):  # too short for powers of ten
        ax.xaxis.set_major_locator(MaxNLocator(3))
        return
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    wide = high > 30 * low
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 3.0) if wide else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())


def load(result: Result, ax: Axes | None = None) -> Axes:
    """Running (solid) and waiting (dotted) requests over time, first seed, reference pool."""
    from kvarena.experiments.plots import _new_axes

    ax = ax or _new_axes((6.4, 2.8))
    rows = _at_reference(result, result.steps)
    rows = rows[rows["seed"] == rows["seed"].min()]
    for turn, (name, look) in enumerate(looks(result.manifest["allocators"]).items()):
        mine = rows[rows["allocator"] == name]
        mine = mine.iloc[:: max(1, -(-len(mine) // MAX_POINTS))]
        style = _markers(look, turn, len(mine))
        ax.plot(mine["time_s"], mine["running"], label=f"running, {look.label}", **style)
        ax.plot(mine["time_s"], mine["waiting"], linestyle=":", label="waiting", **style)
    ax.set_xlabel("time (s, simulated)")
    ax.set_ylabel("requests")
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2, borderaxespad=0)
    return ax


def _at_reference(result: Result, frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["pool_bytes"] == result.reference_pool]


PLOTS: dict[str, Callable[..., Axes]] = {"latency": latency, "load": load}


def engine_rows(result: Result) -> list[list[str]]:
    """Text cells of the engine's measures at the reference pool, means over seeds, an allocator a column."""
    table = _at_reference(result, result.summary)
    rows = []
    for column, (text, shape) in MEASURES.items():
        if column not in table or not _is_there(result, column):
            continue
        cells = [text]
        for name in result.allocators:
            value = table.loc[table["allocator"] == name, column].astype(float).mean()
            cells.append(_cell(value, shape))
        rows.append(cells)
    return rows


def _is_there(result: Result, column: str) -> bool:
    engine = result.config["engine"]
    return column not in OF_THE_HOST or any(engine.get(part) is not None for part in OF_THE_HOST[column])


def _cell(value: float, shape: str) -> str:
    from kvarena.experiments.budget import format_bytes
    from kvarena.experiments.tables import percent

    if value != value:
        return "–"
    named = {"percent": percent, "bytes": format_bytes}
    return named[shape](value) if shape in named else format(value, shape)


def engine_notes(result: Result) -> list[str]:
    """What has to stand under the table: policy, limits, where the times come from."""
    times = result.manifest["step_times"]
    return [
        f"policy: {result.manifest['policy']['label']}; goodput at {result.manifest['goodput_limits']}",
        f"simulated, {clock_text(result.config)}; step times {times['source']}",
    ]


def clock_text(config: dict[str, Any]) -> str:
    """Which clock a run had."""
    clock = config["engine"].get("clock", "feedback")
    if clock == "feedback":
        return "feedback clock"
    of = config["engine"].get("schedule") or "a neutral run"
    return f"{'feedback and fixed clock' if clock == 'both' else 'fixed clock'} (schedule of {of})"


def engine_footer(config: dict[str, Any]) -> str:
    """How the engine ran, for a figure's footer."""
    engine = config["engine"]
    clock = "" if engine.get("clock", "feedback") == "feedback" else f", {engine['clock']} clock"
    return f"{engine['scheduler']} policy, lag {engine['result_lag']}, {engine['sessions']} sessions{clock}"
