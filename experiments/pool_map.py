"""A pool to look at: every page's state over time as a picture, and one step after the other in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.budget import format_bytes
from kvarena.experiments.style import STATE_COLOURS, STYLE, printable
from kvarena.experiments.timeline import EVICTABLE, FREE, IN_USE, SHARED, STATES

if TYPE_CHECKING:
    from kvarena.experiments.timeline import Timeline
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

COLOURS = {
    FREE: STATE_COLOURS["free"],
    EVICTABLE: STATE_COLOURS["evictable"],
    IN_USE: STATE_COLOURS["in use"],
    SHARED: "#C51B7D",  # the one bright colour, and no allocator's
}
MAX_LINES = 12


def pool_map(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Pages (one row each, every n-th of a large pool) over time, coloured by state; black ticks below mark steps with
    evictions."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    if ax is None:
        with mpl.rc_context(STYLE):
            return pool_map(timeline, plt.figure(figsize=(7.0, 3.6), layout="constrained").subplots())
    if not timeline.sampled:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color="#777777")
        return ax
    times = _times(timeline)
    first, last = int(timeline.page_ids[0]), int(timeline.page_ids[-1])
    edges_x = np.append(times, times[-1] + (times[-1] - times[0]) / max(len(times) - 1, 1))
    edges_y = np.linspace(first - 0.5, last + 0.5, len(timeline.page_ids) + 1)
    if edges_x[-1] == edges_x[0]:
        edges_x[-1] += 1.0
    ax.pcolormesh(edges_x, edges_y, timeline.states.T, cmap=_cmap(), vmin=-0.5, vmax=3.5, rasterized=True)
    ax.grid(False)
    _mark_evictions(timeline, ax)
    ax.set_xlim(edges_x[0], edges_x[-1])
    ax.set_xlabel("simulated time (s)" if timeline.kind == "run" else "request, in order of arrival")
    ax.set_ylabel("page")
    head = printable(f"{timeline.title}: {timeline.label}")
    title = f"{head}, {timeline.num_pages:,} pages of {timeline.page_size}"
    ax.set_title(title, loc="left", fontsize=9, pad=20)
    _legend(ax, evictions=bool(timeline.evictions))
    return ax


def draw_pool_map(timeline: Timeline) -> Figure:
    """The map with its footer, ready to save. The caller closes it."""
    import matplotlib as mpl
    from kvarena.experiments.style import add_footer

    import kvarena

    with mpl.rc_context(STYLE):
        figure: Figure = pool_map(timeline).get_figure()  # type: ignore[assignment]
        stride = int(timeline.page_ids[1] - timeline.page_ids[0]) if len(timeline.page_ids) > 1 else 1
        rows = "every page" if stride == 1 else f"one page in {stride}"
        parts = (f"kvarena {kvarena.__version__}", timeline.title, f"pool {format_bytes(timeline.pool_bytes)}")
        drawn = (f"seed {timeline.seed}", rows, f"{len(timeline.sampled)} samples", f"config {timeline.config}")
        add_footer(figure, " · ".join((*parts, *drawn)))
        return figure


def _times(timeline: Timeline) -> Any:
    if timeline.kind != "run":
        return np.array(timeline.sampled, float)
    end = {step.step: step.end_s for step in timeline.steps}
    return np.array([end[step] for step in timeline.sampled])


def _mark_evictions(timeline: Timeline, ax: Axes) -> None:
    """A tick under the map wherever pages were evicted; none where none were."""
    if not timeline.evictions:
        return
    scale = (lambda mark: mark.time_s) if timeline.kind == "run" else (lambda mark: float(mark.step))
    at = sorted({scale(mark) for mark in timeline.evictions})
    ax.plot(at, [0.0] * len(at), "|", color="black", markersize=5, clip_on=False, transform=ax.get_xaxis_transform())


def _legend(ax: Axes, *, evictions: bool = True) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=COLOURS[state], edgecolor="#888888", linewidth=0.4, label=STATES[state])
        for state in (SHARED, IN_USE, EVICTABLE, FREE)
    ]
    if evictions:
        handles.append(Line2D([], [], color="black", marker="|", linestyle="none", label="evictions"))
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, fontsize=8, borderaxespad=0.2)


def _cmap() -> ListedColormap:
    from matplotlib.colors import ListedColormap

    return ListedColormap([COLOURS[state] for state in range(4)])


# --- step by step ---


def pages_at(timeline: Timeline, sample: int, ax: Axes | None = None) -> Axes:
    """The pool at one sample as a grid, the first page top left, row by row."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    if not 0 <= sample < len(timeline.sampled):
        raise ValueError(f"sample: expected 0 to {len(timeline.sampled) - 1}, found {sample}")
    if ax is None:
        with mpl.rc_context(STYLE):
            return pages_at(timeline, sample, plt.figure(figsize=(5.0, 2.6), layout="constrained").subplots())
    states = timeline.states[sample].astype(float)
    width = max(1, round(np.sqrt(2.5 * len(states))))
    grid = np.full(-(-len(states) // width) * width, np.nan)
    grid[: len(states)] = states
    rows = grid.reshape(-1, width)
    ax.pcolormesh(np.ma.masked_invalid(rows), cmap=_cmap(), vmin=-0.5, vmax=3.5, edgecolors="white", linewidth=0.4)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
    ax.set_title(f"step {timeline.sampled[sample]}", loc="left", fontsize=9, pad=20)
    _legend(ax, evictions=False)
    return ax


def told(timeline: Timeline, sample: int) -> list[str]:
    """What the allocator did since the sample before, a line an event, the first `MAX_LINES`."""
    step = timeline.sampled[sample]
    before = timeline.sampled[sample - 1] if sample else -1
    marks = [mark for mark in timeline.marks if before < mark.step <= step]
    lines = [
        f"step {mark.step}: {mark.request_id or '-'} {mark.kind}, {mark.num_pages} pages"
        + (f" ({mark.reason})" if mark.reason else "")
        for mark in marks[:MAX_LINES]
    ]
    return lines + ([f"... and {len(marks) - MAX_LINES} more"] if len(marks) > MAX_LINES else [])


def step_through(timeline: Timeline) -> Any:
    """A slider over the samples, which Jupyter shows (`pool_slider.py`: plain HTML, also in a saved notebook). Without
    samples, the static map: its Axes."""
    from kvarena.experiments.pool_slider import PoolSlider

    return PoolSlider(timeline) if timeline.sampled else pool_map(timeline)
