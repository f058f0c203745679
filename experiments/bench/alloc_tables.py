"""The allocator benchmark as tables for people and as a figure of growth."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
TITLES = {
    "counts": "operation counts, a request (follow from the decisions alone)",
    "replay": "replay, requests a CPU second",
    "op": "single operations, us of CPU time",
    "latency": "latency of the verbs in a replay, us of wall time",
    "growth": "the same operation in ever larger pools and trees, us of CPU time",
    "memory": "memory and build time",
    "adapter": "a step through the adapters, us of CPU time of the host; nothing is launched",
}
COLUMNS = (
    "",
    "design",
    "page",
    "size",
    "ours",
    "low .. high",
    "real",
    "ratio",
    "must",
    "aim",
    "met",
    "real here",
    "ratio here",
)


def text(rows: list[Row]) -> str:
    """All studies, one table each, targets beside values."""
    parts = []
    for study, title in TITLES.items():
        chosen = [row for row in rows if row["study"] == study]
        if chosen:
            parts.append(title + "\n" + _table(chosen))
    header = next((row for row in rows if row["study"] == "header"), {})
    notes = (
        f"real, must, aim, met: against {header.get('real', '')}\n"
        "real here: measured in this run's turns, where it can be imported"
    )
    if "load_average" in header:
        load = ", ".join(map(str, header["load_average"]))
        notes += f"\nload of the machine's {header['cpus']} CPUs before the run (1, 5, 15 minutes): {load}"
    return "\n\n".join([*parts, notes]) + "\n"


def _table(rows: list[Row]) -> str:
    lines = [COLUMNS, *(_cells(row) for row in rows)]
    # A column in which no row has anything is left out.
    kept = [at for at in range(len(COLUMNS)) if at == 0 or any(line[at] for line in lines[1:])]
    widths = [max(len(line[at]) for line in lines) for at in kept]
    return "\n".join(
        "  ".join(
            line[at].ljust(width) if at < 2 else line[at].rjust(width) for at, width in zip(kept, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    times = "" if row["absolute"] else "x"
    spread = f"{_number(row['low'])} .. {_number(row['high'])}" if row["samples"] > 1 else ""
    return (
        row["name"],
        row["design"],
        str(row["page_size"]),
        f"{row['size']:,}" if "size" in row else "",
        _number(row["value"]),
        spread,
        _number(row["real"]),
        f"{row['ratio']:.1f}x" if row["ratio"] is not None else "",
        f"{_number(row['must'])}{times}" if row["must"] is not None else "",
        f"{_number(row['aim'])}{times}" if row["aim"] is not None else "",
        row["met"] or "",
        _number(row.get("here")),
        f"{row['here_ratio']:.1f}x ({row['here_ratio_low']:.1f} .. {row['here_ratio_high']:.1f})"
        if "here" in row
        else "",
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def spread(runs: list[list[Row]]) -> str:
    """Every measurement over several runs: the value of each, and their range as a share of the middle one."""
    lines = [("study", "", "design", "page", "size", *(f"run {number}" for number in range(1, len(runs) + 1)), "range")]
    tables = [{_name(row): row["value"] for row in run if row["study"] != "header"} for run in runs]
    for name in tables[0]:
        values = [table[name] for table in tables if name in table]
        if len(values) == len(runs):
            middle = sorted(values)[len(values) // 2]
            share = f"{(max(values) - min(values)) / middle:.0%}" if middle else ""
            lines.append((*name, *map(_number, values), share))
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines) + "\n"


def _name(row: Row) -> tuple[str, ...]:
    size = f"{row['size']:,}" if "size" in row else ""
    return row["study"], row["name"], row["design"], str(row["page_size"]), size


def growth_figure(rows: Iterable[Row]) -> Figure:
    """Median cost against size, one panel for each operation."""
    from kvarena.experiments.style import KIND_COLOURS, MARKERS
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["study"] == "growth"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure = Figure(figsize=(3.4 * len(names), 2.9), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)
    for name, ax in zip(names, panels[0], strict=True):
        chosen = [row for row in rows if row["name"] == name]
        for design, page_size in dict.fromkeys((row["design"], row["page_size"]) for row in chosen):
            kind = design.split()[0]
            line = [row for row in chosen if (row["design"], row["page_size"]) == (design, page_size)]
            ax.plot(
                [row["size"] for row in line],
                [row["value"] for row in line],
                color=KIND_COLOURS[kind],
                marker=MARKERS[kind],
                linestyle="--" if design.endswith("runs") or (page_size == 16 and kind == "token") else "-",
                label=f"{design}, page {page_size}",
            )
        _label(ax, name, nodes="leaf" in name or "leaves" in name)
    return figure


def _label(ax: Axes, name: str, *, nodes: bool) -> None:
    ax.set_xscale("log")
    ax.margins(y=0.15)
    ax.set_ylim(bottom=0)
    ax.set_title(name)
    ax.set_xlabel("leaves in the tree" if nodes else "pages in the pool")
    ax.set_ylabel("CPU time, µs")
    ax.legend()


def save(rows: list[Row], out: Path) -> list[Path]:
    """Table and figures of growth and of the adapters into a folder; returns what was written."""
    import matplotlib as mpl
    from kvarena.experiments.bench.alloc_adapter import adapter_figure
    from kvarena.experiments.bench.alloc_saved import summary
    from kvarena.experiments.style import STYLE, save_figure

    written = [out / "allocators.txt", out / "cost.md"]
    written[0].write_text(text(rows), encoding="utf-8")
    written[1].write_text(summary(rows), encoding="utf-8")
    if any(row["study"] == "growth" for row in rows):
        with mpl.rc_context(STYLE):
            written += save_figure(growth_figure(rows), out / "growth")
    if any(row["study"] == "adapter" for row in rows):
        with mpl.rc_context(STYLE):
            written += save_figure(adapter_figure(rows), out / "adapter")
    return written
