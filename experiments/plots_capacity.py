"""The figure of a capacity study: what each design carries and where the rest goes, and what happens beyond."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.capacity import PARTS
from kvarena.experiments.style import KIND_COLOURS, STYLE, Look, add_footer, save_figure, shade

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.capacity_study import CapacityResult
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What is lost, from the bar outwards: told apart in grey by hatch.
PART_LOOKS: dict[str, tuple[str, str]] = {
    "residual": ("#4D4D4D", ""),
    "rows": ("#FFFFFF", "||||"),
    "reservation": ("#F2F2F2", "////"),
    "duplicates": ("#D9D9D9", "xxxx"),
    "tail": ("#BFBFBF", ""),
    "sharing": ("#E6E6E6", "...."),
    "tables": ("#8C8C8C", "----"),
}
FOOTER_IN = 0.22
PANEL_TEXT = {"equal": "equal bytes", "deployed": "as deployed"}
# Shade (in doublings of the page), marker, dashes, filled marker.
DETAILS: dict[str, tuple[float, str, Any, bool]] = {
    "1": (0, "o", "-", True),
    "16": (0.8, "s", (0, (5, 1.5)), False),
    "32": (1.6, "^", (0, (3, 1, 1, 1)), False),
    "64": (2.6, "D", (0, (1.5, 1)), False),
    "max": (-2, "v", "-", False),
    "pow2": (-0.5, "<", (0, (5, 1.5)), False),
    "declared": (1.5, ">", (0, (1.5, 1)), True),
}
PART_TEXT = {
    "tables": "tables, padding",
    "sharing": "prefix not shared",
    "tail": "tail of the last page",
    "duplicates": "duplicates",
    "reservation": "reservation",
    "rows": "no row left",
    "residual": "fragmentation",
}


def plot_capacity(result: CapacityResult, panel: str, load: str, ax: Axes) -> Axes:
    """One panel and load: a bar a design, carried (colour) and lost (grey) up to what its bytes would carry.

    The prediction is a black line across the bar; a white diamond is what a card carried.
    """
    rows = result.capacity[(result.capacity["panel"] == panel) & (result.capacity["load"] == load)]
    if not len(rows):
        ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", va="center", color="#777777")
        ax.set_axis_off()
        return ax
    chosen = _looks(rows)
    for place, row in enumerate(rows.to_dict("records")):
        look = chosen[row["design"]]
        ax.barh(place, row["measured"], 0.72, color=look.colour, edgecolor="black", linewidth=0.5)
        left = row["measured"]
        for part in reversed(PARTS):
            lost = max(int(row[f"lost_{part}"]), 0)
            colour, hatch = PART_LOOKS[part]
            ax.barh(place, lost, 0.72, left=left, color=colour, hatch=hatch, edgecolor="#666666", linewidth=0.4)
            left += lost
        ax.plot([row["predicted"]] * 2, [place - 0.44, place + 0.44], color="black", linewidth=1.6)
        on_card = _on_card(result, panel, load, row["design"])
        if on_card is not None:
            ax.plot(on_card, place, "D", markerfacecolor="white", markeredgecolor="black", markersize=4.5)
        inside = row["measured"] > 0.35 * rows["ideal"].max()
        ax.annotate(
            f"{row['measured']:,}",
            (row["measured"], place),
            (-7 if inside else 7, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=7,
            color="white" if inside else "black",
            bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        )
    ax.set_yticks(range(len(rows)), [_short(design) for design in rows["design"]])
    ax.invert_yaxis()
    ax.set_xlim(0, rows["ideal"].max() * 1.03)
    ax.set_xlabel("concurrent requests")
    ax.grid(axis="y", visible=False)
    return ax


def plot_beyond(result: CapacityResult, load: str, column: str, ax: Axes) -> Axes:
    """Throughput or preemptions of bursts of growing size, at equal bytes; a tick at each design's capacity."""
    bursts = result.bursts
    rows = bursts[(bursts["panel"] == "equal") & (bursts["load"] == load)]
    capacity = result.capacity[(result.capacity["panel"] == "equal") & (result.capacity["load"] == load)]
    sizes = sorted(_common_sizes(rows))
    if not sizes:
        ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", va="center", color="#777777")
        ax.set_axis_off()
        return ax
    for name, look in _looks(capacity).items():
        mine = rows[(rows["design"] == name) & rows["size"].isin(sizes)].drop_duplicates("size", keep="last")
        mine = mine.sort_values("size")
        label = _short(name)
        if not len(mine):
            ax.plot([], [], color=look.colour, label=f"{label}: no data")
            continue
        ax.plot(
            mine["size"],
            mine[column].astype(float),
            look.marker,
            linestyle=look.dashes,
            color=look.colour,
            markerfacecolor=look.face,
            label=label,
            markersize=4,
            linewidth=1.2,
        )
    ax.set_xlabel("requests at once")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    return ax


def _common_sizes(rows: pd.DataFrame) -> set[int]:
    """Sizes that every design ran: the bursts beyond, not those that looked for the border."""
    if not len(rows):
        return set()
    return set.intersection(*(set(part["size"]) for _, part in rows.groupby("design")))


def draw_capacity(result: CapacityResult) -> Figure:
    """The whole figure: a row a panel, a column a load; below them what happens beyond capacity, where it was run."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    loads, panels = result.loads, result.panels
    beyond = [load for load in loads if _common_sizes(_equal(result, load))]
    extra = 2 if beyond else 0
    with mpl.rc_context(STYLE):
        height = 2.7 * len(panels) + 2.1 * extra + 0.9
        figure = plt.figure(figsize=(3.4 * len(loads) + 1.2, height), layout="constrained")
        ratios = [2.6] * len(panels) + [2.0] * extra
        grid = figure.subplots(len(panels) + extra, len(loads), squeeze=False, height_ratios=ratios)
        for row, panel in enumerate(panels):
            for column, load in enumerate(loads):
                plot_capacity(result, panel, load, grid[row][column])
                grid[row][column].set_title(f"{result.manifest['loads'][load]}, {PANEL_TEXT[panel]}", loc="left")
        for column, load in enumerate(loads):
            if extra:
                _beyond_column(result, load, [grid[len(panels) + i][column] for i in range(2)], column == 0)
        _legends(figure, result, bool(extra), grid[-1][0] if extra else None)
        add_footer(figure, _footer(result))
        _leave_room(figure, len(loads), bool(extra))
        return figure


def _leave_room(figure: Figure, columns: int, beyond: bool) -> None:
    """For the legends: above everything, and between the last axes and the footer."""
    tall = figure.get_figheight()
    above = {1: 0.95, 2: 0.58}.get(columns, 0.42)
    below = FOOTER_IN + ({1: 0.6, 2: 0.45}.get(columns, 0.3) if beyond else 0.0)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, below / tall, 1, 1 - (above + below) / tall))


def _equal(result: CapacityResult, load: str) -> pd.DataFrame:
    return result.bursts[(result.bursts["panel"] == "equal") & (result.bursts["load"] == load)]


def _beyond_column(result: CapacityResult, load: str, axes: list[Axes], first: bool) -> None:
    plot_beyond(result, load, "tokens_per_s", axes[0])
    plot_beyond(result, load, "preemptions_per_request", axes[1])
    axes[0].set_xlabel("")
    if first:
        axes[0].set_ylabel("output tokens/s")
        axes[1].set_ylabel("preemptions a request")
    axes[0].set_title(f"{result.manifest['loads'][load]}, growing bursts", loc="left")


def _legends(figure: Figure, result: CapacityResult, beyond: bool, axes: Axes | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    by = result.manifest.get("carried_by", "simulated engine")
    handles: list[Any] = [Line2D([], [], color="black", linewidth=1.6, label="predicted in closed form")]
    handles.append(Patch(facecolor="#0072B2", edgecolor="black", linewidth=0.5, label=f"carried ({by})"))
    for part in reversed(PARTS):
        if (result.capacity[f"lost_{part}"] > 0).any():
            colour, hatch = PART_LOOKS[part]
            handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="#666666", label=f"lost: {PART_TEXT[part]}"))
    card = result.manifest.get("on_card")
    if card:
        face: Any = {"markerfacecolor": "white", "markeredgecolor": "black", "linestyle": "none"}
        handles.append(Line2D([], [], marker="D", label=f"carried on {card['name']}, its own budgets", **face))
    columns = len(result.loads)
    place = {"fontsize": 7.5, "frameon": False, "borderaxespad": 0}
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.01, 0.995), ncols={1: 2, 2: 4}.get(columns, 6), **place
    )
    if beyond and axes is not None:
        lines, labels = axes.get_legend_handles_labels()
        y = FOOTER_IN / figure.get_figheight()
        figure.legend(
            lines,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.01, y),
            ncols={1: 3, 2: 5}.get(columns, 9),
            columnspacing=1.1,
            handlelength=2.4,
            **{**place, "fontsize": 6.8},
        )


def save_capacity_figure(result: CapacityResult, stem: Path) -> list[Path]:
    """capacity.pdf|svg|png."""
    import matplotlib.pyplot as plt

    figure = draw_capacity(result)
    try:
        return save_figure(figure, stem)
    finally:
        plt.close(figure)


def _looks(rows: pd.DataFrame) -> dict[str, Look]:
    """The hue of the kind; shade, marker and dashes by page size or sizing: nine lines are told apart in grey."""
    found = {}
    for design in dict.fromkeys(rows["design"]):
        kind, _, rest = design.partition("-")
        doublings, marker, dashes, face = DETAILS[rest]
        colour = shade(KIND_COLOURS[kind], doublings)
        found[design] = Look(_short(design), colour, marker, dashes, colour if face else "white")
    return found


def _short(design: str) -> str:
    kind, _, rest = design.partition("-")
    return f"{kind}, {rest}" if not rest.isdigit() else f"{kind}, page {rest}"


def _on_card(result: CapacityResult, panel: str, load: str, design: str) -> int | None:
    cells = result.manifest.get("on_card", {}).get("cells", [])
    found = [
        cell["measured"] for cell in cells if (cell["panel"], cell["load"], cell["design"]) == (panel, load, design)
    ]
    return found[0] if found else None


def _footer(result: CapacityResult) -> str:
    from kvarena import __version__

    about, first = result.manifest, result.sizing.iloc[0]
    model = about["model"] if isinstance(about["model"], str) else "a shape of its own"
    card = f"kvarena {__version__}; {model}, {about['bytes_per_token'] / 1024:g} KiB a token, "
    card += f"{first['total_bytes'] / 2**30:.1f} GiB card; seed {about['seed']}"
    if len(result.loads) < 3:  # a narrow figure
        return card
    limits = f"up to {about['max_model_len']:,} tokens a row; clients declare {about['declared_max_tokens']:,} tokens"
    return f"{card}; {limits}; step times {about['step_times'].split(' and ')[0]}"
