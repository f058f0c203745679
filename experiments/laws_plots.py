"""The figure of the laws: each closed form as a line, what was measured as points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvarena.experiments.laws import TEXTBOOK
from kvarena.experiments.one_axis_plots import kind_looks
from kvarena.experiments.style import STYLE, add_footer, printable

if TYPE_CHECKING:
    from kvarena.experiments.laws import Law
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "rounding": ("page size (tokens)", "lost to rounding\n(% of prompt tokens)"),
    "tail waste": ("page size (tokens)", "tail waste\n(slots a request)"),
    "table bytes": ("page size (tokens)", "page table, 256 rows\nof 4,096 (MiB)"),
    "capacity": ("page size (tokens)", "chat requests\nin 8 GiB"),
    "prefill gain": ("requests that share 2,048 tokens", "prefill gain\n(times)"),
    "break-even": ("model", "break-even prefix\n(tokens)"),
}

DOTTED: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1.2}


def law_panel(found: Sequence[Law], law: str, ax: Axes) -> Axes:
    """One law: predicted (line, or dash where x is a name) and measured (marker) for both designs. What does not hold
    has a cross. Rounding: the textbook form dotted."""
    scale = 2.0**-20 if law == "table bytes" else 1.0
    rows = [one for one in found if one.law == law]
    names = list(dict.fromkeys(one.x for one in rows))
    numeric = all(name.isdigit() for name in names)
    for offset, (kind, look) in enumerate(kind_looks().items()):
        mine = [one for one in rows if one.kind == kind]
        x = [float(one.x) if numeric else names.index(one.x) + (offset - 0.5) * 0.2 for one in mine]
        line: dict[str, Any] = {"color": look.colour, "linestyle": "-" if numeric else "none", "linewidth": 1.2}
        line |= {} if numeric else {"marker": "_", "markersize": 14}
        ax.plot(x, [scale * one.predicted for one in mine], **line)
        # The first design's markers are the larger ones, so that they show where both designs agree.
        style: dict[str, Any] = {"marker": look.marker, "markerfacecolor": look.face, "linestyle": "none"}
        style["markersize"] = 4 if offset else 7
        ax.plot(x, [scale * one.measured for one in mine], color=look.colour, label=look.label, **style)
        off = [(at, scale * one.measured) for at, one in zip(x, mine, strict=True) if not one.holds]
        if off:
            ax.plot(*zip(*off, strict=True), "x", color="black", markersize=9, zorder=5)
    if law == "rounding" and (plain := [one for one in found if one.law == TEXTBOOK and one.kind == "block"]):
        ax.plot([float(one.x) for one in plain], [one.predicted for one in plain], **DOTTED)
    if numeric:
        ax.set_xscale("log", base=2)
        ticks = [float(name) for name in names]
        ax.set_xticks(ticks, names)
        ax.minorticks_off()
    else:
        ax.set_xticks(range(len(names)), names, fontsize=6, rotation=12)
        ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_ylim(0, 1.08 * max(ax.get_ylim()[1], 1e-9))
    ax.set_xlabel(PANELS[law][0])
    ax.set_ylabel(PANELS[law][1])
    return ax


def draw_laws(found: Sequence[Law], about: str) -> Figure:
    """Every law that was tested, a panel each; `about` for the footer. The caller closes the figure."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    import kvarena

    names = [name for name in PANELS if any(one.law == name for one in found)]
    with mpl.rc_context({**STYLE, "font.size": 7.5, "xtick.labelsize": 7, "ytick.labelsize": 7}):
        figure = plt.figure(figsize=(7.0, 2.4 * -(-len(names) // 3) + 0.5), layout="constrained")
        panels = list(figure.subplots(-(-len(names) // 3), 3, squeeze=False).flat)
        for name, ax in zip(names, panels, strict=False):
            law_panel(found, name, ax)
        for ax in panels[len(names) :]:
            ax.axis("off")
        handles: list[Any] = list(figure.axes[0].get_legend_handles_labels()[0])
        handles.append(Line2D([], [], color="#555555", linewidth=1.2, label="closed form, before the run"))
        if "rounding" in names:
            handles.append(Line2D([], [], **DOTTED, label="textbook: every known length alike"))
        if any(one.law in names and not one.holds for one in found):
            handles.append(
                Line2D([], [], color="black", marker="x", linestyle="none", label="off by more than allowed")
            )
        figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)
        add_footer(figure, f"kvarena {kvarena.__version__} · {printable(about)} · points: measured")
        return figure
