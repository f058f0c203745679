"""The figure of the page-size axis: one column of panels a workload, one scale of page sizes for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvarena.experiments.one_axis import KERNEL_POINT, best
from kvarena.experiments.style import STYLE, Look, add_footer, looks

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.one_axis import Study
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = ("token_hit_rate", "tail_tokens", "concurrency", "kernel", "host_us")
LABELS = {
    "token_hit_rate": "token hit\nrate (%)",
    "tail_tokens": "tail waste\n(tokens a\nrequest)",
    "concurrency": "requests in\n16 GiB",
    "kernel": f"decode on an\nH200, {KERNEL_POINT}\n(µs)",
    "host_us": "allocator\n(µs a request)",
}


def kind_looks() -> dict[str, Look]:
    """The two designs' colours at their preset page size."""
    about = (("block", "block (vLLM 0.32.0 rules)", 16), ("token", "token (SGLang 0.5.22 rules)", 1))
    return looks({"name": kind, "label": label, "kind": kind, "page_size": size} for kind, label, size in about)


def axis(rows: pd.DataFrame, column: str, ax: Axes, kernels: Mapping[str, Mapping[int, float]] | None = None) -> Axes:
    """One panel: a column of one workload's rows against the page size; `kernel` is drawn from `kernels`."""
    pages = sorted(set(rows["page_size"]))
    for offset, (kind, look) in enumerate(kind_looks().items()):
        if column == "kernel":
            known = (kernels or {}).get(kind, {})
            x, y = [size for size in pages if size in known], [known[size] for size in pages if size in known]
        else:
            part = rows[rows["kind"] == kind].sort_values("page_size")
            x = part["page_size"].tolist()
            y = (part[column] * (100 if column == "token_hit_rate" else 1)).tolist()
        style: dict[str, Any] = {"marker": look.marker, "markerfacecolor": look.face, "linestyle": look.dashes}
        style["markersize"] = 4 if offset else 6.5  # so that the one below shows where both agree
        if column == "kernel" and len(x) < len(pages):
            style["linestyle"] = "none"  # what lies between was not measured
        ax.plot(x, y, color=look.colour, label=look.label, **style)
    ax.set_xscale("log", base=2)
    ax.set_xticks(pages, [str(size) for size in pages])
    ax.minorticks_off()
    ax.set_xlim(pages[0] / 1.25, pages[-1] * 1.25)
    if column == "token_hit_rate":
        ax.margins(y=0.12)  # the rings need room
    else:
        ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
    if column == "kernel":
        _mark_unmeasured(ax, pages, kernels)
    return ax


def _mark_unmeasured(ax: Axes, pages: list[int], kernels: Mapping[str, Mapping[int, float]] | None) -> None:
    """Crosses on the axis itself, below every value, so that nobody reads one off them."""
    missing = [size for size in pages if not any(size in known for known in (kernels or {}).values())]
    if not missing:
        return
    place: Any = ax.get_xaxis_transform()
    look: dict[str, Any] = {"color": "#777777", "markersize": 4.5, "clip_on": False, "zorder": 5}
    ax.plot(missing, [0.0] * len(missing), "x", transform=place, label="not measured", **look)
    ax.text(0.5, 0.12, "x: not measured", transform=ax.transAxes, ha="center", fontsize=6, color="#777777")


def draw_axis(study: Study, kernels: Mapping[str, Mapping[int, float]], workloads: list[str] | None = None) -> Figure:
    """Every panel for up to three workloads (default: the first three). The caller closes the figure."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    import kvarena

    names = workloads or list(dict.fromkeys(study.rows["workload"]))[:3]
    choice = best(study.rows)
    with mpl.rc_context({**STYLE, "font.size": 7.5, "xtick.labelsize": 6.5, "ytick.labelsize": 7}):
        figure = plt.figure(figsize=(max(2.5 * len(names) + 0.7, 5.2), 7.4), layout="constrained")
        panels = figure.subplots(len(PANELS), len(names), sharex=True, squeeze=False)
        for column, name in enumerate(names):
            rows = study.rows[study.rows["workload"] == name]
            for row, measure in enumerate(PANELS):
                ax = axis(rows, measure, panels[row, column], kernels)
                if column == 0:
                    ax.set_ylabel(LABELS[measure])
            _mark_best(panels[0, column], choice[choice["workload"] == name], rows)
            panels[0, column].set_title(name.replace("_", " "), loc="left", fontsize=8)
            panels[-1, column].set_xlabel("page size (tokens)")
        figure.align_ylabels(panels[:, 0])
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, handlelength=3)
        about = study.about
        outputs = ", ".join(dict.fromkeys(about["outputs"].get(name, "unknown") for name in names))
        parts = (
            f"kvarena {kvarena.__version__}",
            f"pool {about['pool']}",
            f"{about['live']} live",
            "replies replayed",
            about["model"],
            f"outputs {outputs}",
            "ringed: least prefill and allocator time",
        )
        add_footer(figure, " · ".join(parts))
        return figure


def _mark_best(ax: Axes, choice: pd.DataFrame, rows: pd.DataFrame) -> None:
    """A ring around the page size of the least time."""
    for row in choice.to_dict("records"):
        at = rows[(rows["kind"] == row["kind"]) & (rows["page_size"] == row["least_time"])]
        colour = kind_looks()[row["kind"]].colour
        ax.plot(
            at["page_size"],
            100 * at["token_hit_rate"],
            "o",
            markersize=10,
            markerfacecolor="none",
            markeredgecolor=colour,
            markeredgewidth=1,
        )
