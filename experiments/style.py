"""How figures look: one colour for each allocator, wherever it is drawn, safe for colour-blind readers and in grey."""

from __future__ import annotations

import functools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every common colour blindness.
KIND_COLOURS = {"block": "#0072B2", "token": "#D55E00", "exact": "#009E73", "contiguous": "#666666"}
CUSTOM_COLOURS = ("#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = {"block": "o", "token": "s", "exact": "^", "contiguous": "D"}
PRESET_PAGE = {"block": 16, "token": 1, "exact": 1, "contiguous": 1}
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1, 1)))
HATCHES = ("", "////", "....", "xxxx")
STATE_COLOURS = {"in use": "#1B2A41", "evictable": "#7A93AC", "free": "#E3E9EF"}
SHADE_A_STEP = 0.16  # of the way to black or white for each doubling of the page size
FORMATS = ("pdf", "svg", "png")

STYLE: Any = {  # rcParams
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E0E0E0",
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "kvarena",
    "svg.fonttype": "path",
}
WIDTHS_IN = {"single": 3.35, "double": 7.0}
NARROW_IN = 5.0


@dataclass(frozen=True)
class Look:
    """How one allocator is drawn. Hollow markers keep the one below visible where two curves meet; the hatch does for
    bars what dashes do for lines."""

    label: str
    colour: str
    marker: str
    dashes: Any
    face: str
    hatch: str = ""


def looks(entries: Iterable[Mapping[str, Any]]) -> dict[str, Look]:
    """A look for each allocator of a result. Kind gives the hue, page size the shade; where both are equal, dashes
    and hatches tell them apart. So an allocator has the same colour in every figure, whatever stands beside it.

    Order: kinds as they come, within a kind by page size, as a number.
    """
    chosen: dict[str, Look] = {}
    used: dict[str, int] = {}
    customs = 0
    given = list(entries)
    kinds = list(dict.fromkeys(entry["kind"] for entry in given))
    for entry in sorted(given, key=lambda entry: (kinds.index(entry["kind"]), entry["page_size"])):
        kind, size = entry["kind"], entry["page_size"]
        if kind in KIND_COLOURS:
            colour = shade(KIND_COLOURS[kind], math.log2(size / PRESET_PAGE[kind]))
        else:
            colour = CUSTOM_COLOURS[customs % len(CUSTOM_COLOURS)]
            customs += 1
        turn = used.get(colour, 0)
        used[colour] = turn + 1
        marker, dashes = MARKERS.get(kind, "v"), DASHES[turn % len(DASHES)]
        face = "white" if chosen else colour
        chosen[entry["name"]] = Look(plain(entry["label"]), colour, marker, dashes, face, HATCHES[turn % len(HATCHES)])
    return chosen


def shade(colour: str, doublings: float) -> str:
    """Darker for larger pages than the preset's, lighter for smaller ones."""
    target = 0 if doublings > 0 else 255
    weight = min(abs(doublings) * SHADE_A_STEP, 0.45)
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (target - part) * weight):02X}" for part in parts)


def use_paper_style(column: str = "single") -> None:
    """Set matplotlib's defaults for a paper: `single` or `double` column width, embedded fonts, 8-point text.

    A figure of a single column is as high as its legend and panels need. Figures in result folders keep their own size.
    """
    import matplotlib as mpl

    if column not in WIDTHS_IN:
        raise ValueError(f"column: expected one of {', '.join(WIDTHS_IN)}, found {column!r}")
    width = WIDTHS_IN[column]
    mpl.rcParams.update(
        {**STYLE, "font.size": 8, "figure.figsize": (width, width * 0.62 if width > 4 else width * 0.75)}
    )


def styled(plot: Callable[..., Axes]) -> Callable[..., Axes]:
    """A figure that a plot opens by itself is in our style; what the user set stays, and so do the defaults."""

    @functools.wraps(plot)
    def drawn(result: Any, ax: Axes | None = None, **options: Any) -> Axes:
        import matplotlib as mpl

        if not hasattr(result, "labels"):
            raise ValueError(f"result: expected what kv.compare or kv.load_result gives, found {type(result).__name__}")
        if ax is not None:
            if not hasattr(ax, "plot"):
                raise ValueError(f"ax: expected axes of matplotlib, found {type(ax).__name__}")
            return plot(result, ax, **options)
        mine: Any = {k: v for k, v in STYLE.items() if mpl.rcParams[k] == mpl.rcParamsDefault[k]}
        with mpl.rc_context(mine):
            return plot(result, None, **options)

    return drawn


def printable(text: str) -> str:
    """The text with control characters shown as a replacement: names come from traces."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def plain(text: str) -> str:
    """The same for a legend: a name of the user's own is no formula."""
    return printable(text).replace("$", r"\$")


def short_label(labels: Sequence[str]) -> str:
    """What tells the first of these legend texts from the others: how it begins (a user's name for an allocator, or its
    kind), with its rules where another begins so too."""
    head, *others = [label.partition(" (")[0].partition(": ")[0] for label in labels]
    most = 14
    if head in others:
        head, most = re.sub(r" \([^)]* rules\)", "", labels[0]), 24
    return head if len(head) <= most else f"{head[: most - 1]}…"


def is_narrow(ax: Axes) -> bool:
    """Whether a legend of two columns is wider than these axes, as in a single column of a paper."""
    return width_in(ax) < 0.8 * NARROW_IN


def width_in(ax: Axes) -> float:
    """Width of the axes in inches, before any layout."""
    figure: Any = ax.get_figure()
    while hasattr(figure, "figure") and figure.figure is not figure:
        figure = figure.figure
    return float(ax.get_position().width * figure.get_figwidth())


def has_positive(values: Iterable[Any]) -> bool:
    """Whether a logarithmic axis has anything to show: a finite number above 0. NaN and None are no numbers."""
    return any(value is not None and 0 < value < math.inf for value in values)


def say_no_data(ax: Axes) -> None:
    """In the middle of axes in which nothing is drawn."""
    ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color="#777777", fontsize=11)


def new_figure(size: tuple[float, float]) -> Figure:
    """A figure that a notebook shows by itself, in our style, without touching anybody's defaults: of `size` in inches,
    or of the user's default width and height, a narrow one no lower than it has room for its legend."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    width, height = mpl.rcParams["figure.figsize"]
    if mpl.rcParams["figure.figsize"] == mpl.rcParamsDefault["figure.figsize"]:
        width, height = size
    elif width < NARROW_IN:
        height = max(height, size[1])
    return plt.figure(figsize=(width, height), layout="constrained")


def add_footer(figure: Figure, text: str) -> None:
    """Provenance under the figure, without a date: one line, more where the figure is narrow."""
    engine: Any = figure.get_layout_engine()
    lines = textwrap.wrap(text, 70) if figure.get_figwidth() < NARROW_IN else [text]
    bottom = 0.035 if len(lines) < 2 else 0.02 + 0.1 * len(lines) / figure.get_figheight()
    engine.set(rect=(0, bottom, 1, 1 - bottom))
    figure.text(0.008, 0.01, "\n".join(map(plain, lines)), fontsize=5.5, color="#777777", ha="left", va="bottom")


def save_figure(figure: Figure, stem: Path, kinds: Iterable[str] = FORMATS, source: str = "") -> list[Path]:
    """Write PDF, SVG and PNG beside each other; the same figure gives the same bytes.

    source  names the result in the files' metadata (`outputs.source_of`); empty: nothing is said
    """
    import matplotlib as mpl

    metadata: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "ModDate": None, "Creator": "kvarena", "Subject": "schema_version 1"},
        "svg": {"Date": None, "Creator": "kvarena", "Description": "schema_version 1"},
        "png": {"Software": "kvarena", "Description": "schema_version 1"},
    }
    if source:
        for kind, name in (("pdf", "Keywords"), ("svg", "Source"), ("png", "Source")):
            metadata[kind][name] = f"source {source}"
    paths = []
    with mpl.rc_context(STYLE):
        for kind in kinds:
            path = stem.with_name(f"{stem.name}.{kind}")
            figure.savefig(path, format=kind, metadata=metadata[kind])
            paths.append(path)
    return paths
