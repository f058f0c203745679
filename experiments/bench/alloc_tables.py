"""The allocator benchmark as tables for people and as a figure of growth."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.bench.alloc_recorded import times_better

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
PERCENTILES = ("p50", "p99", "max")
TITLES = {
    "counts": "operation counts, a request (follow from the decisions alone)",
    "replay": "replay, requests a CPU second",
    "op": "single operations, us of CPU time",
    "latency": "latency of the verbs in a replay, us of wall time",
    "growth": "the same operation in ever larger pools and trees, us of CPU time",
    "slowdown": "times slower at the largest than at the smallest of these sizes",
    "memory": "memory and build time",
    "adapter": "a step through the adapters, us of CPU time of the host; nothing is launched",
}
COLUMNS = (
    *(
        "",
        "design",
        "page",
        "size",
        "ours",
        "low .. high",
        "real here",
        "ratio here",
        "lean",
        "recorded",
        "ratio to it",
    ),
    *("floor", "ratio at it", "must", "aim", "met", "met by recorded"),
)
SECOND = (0, (3, 1.5))  # dashes of a kind's second design
SAMPLE = 4.2  # of a legend's line, in letters: several of the dashes on either side of the marker
MET = {"aim": "aim", "must": "must", "no": "missed"}
NOTES = """\
real here, ratio here (over the turns): the real package as its engine calls it, in turns with ours in this run
lean: our ratio to it where it is called in the leanest way; operations without one are called the same way in both
recorded, ratio to it: {source}; met: against the real package here where it was run, else against the recorded one
floor: the least that Python has to do, timed in turns with ours (docs/cost.md); ratio at it: to the real package"""


def text(rows: list[Row]) -> str:
    """All studies, one table each, and what is asked for at the end, with what was found beside it."""
    parts = []
    for study, title in TITLES.items():
        chosen = [row for row in rows if row["study"] == study]
        if chosen:
            parts.append(_latency_table(chosen) if study == "latency" else title + "\n" + _table(chosen))
    asked = [row for row in rows if row.get("must") is not None]
    if asked:
        parts.append("what is asked for\n" + _table(asked, titled=True) + "\n" + score(asked))
        parts += ["missed here, and why\n" + "\n".join(reasons)] if (reasons := why_missed(asked)) else []
    header = next((row for row in rows if row["study"] == "header"), {})
    notes = NOTES.format(source=header.get("real", ""))
    if "packages_here" in header:
        packages = ", ".join(f"{name} {version}" for name, version in header["packages_here"].items())
        notes += f"\nreal packages here: {packages or 'none'}"
    if "load_average" in header:
        load = ", ".join(map(str, header["load_average"]))
        notes += f"\nload of the machine's {header['cpus']} CPUs before the run (1, 5, 15 minutes): {load}"
    return "\n\n".join([*parts, notes]) + "\n"


def score(asked: list[Row]) -> str:
    """How many of the rows for which something is asked meet their must, and which do not."""
    lines = []
    for label, field in (("real packages here", "met"), ("recorded ones", "met_recorded")):
        judged = [row.get(field) or row["met"] for row in asked]
        missed = [_short(row) for row, met in zip(asked, judged, strict=True) if met == "no"]
        line = f"against the {label}: {len(judged) - len(missed)} of {len(judged)} met"
        lines.append(line + (f"; missed: {'; '.join(missed)}" if missed else ""))
    return "\n".join(lines)


def why_missed(asked: list[Row]) -> list[str]:
    """A line for each row that misses its must: what is found, and whether the floor would do."""
    return [f"{_short(row)}: {reason(row)}" for row in asked if row["met"] == "no"]


def reason(row: Row) -> str:
    """Of a missed must: the figure found beside it, and what the floor says."""
    times = "" if row["absolute"] else "x"
    ratio = row["value"] if row["absolute"] else row.get("here_ratio", row["ratio"])
    found = f"{_number(ratio)}{times} of {_number(row['must'])}{times}"
    if "floor_ratio" not in row:
        return f"{found}; no floor was measured"
    allowed, taken = row["floor_ratio"] / row["must"], times_better(row["floor"], row["value"], row["unit"])
    floor = f"the floor reaches {_number(row['floor_ratio'])}x"
    if allowed < 1:
        return f"{found}; {floor}: out of reach in Python"
    return f"{found}; {floor}: asked for is {allowed:.1f} times its time, ours takes {taken:.1f} times"


def _short(row: Row) -> str:
    return f"{row['name']} ({row['study']}, {row['design']}, page {row['page_size']})"


def _table(rows: list[Row], *, titled: bool = False) -> str:
    """`titled`: rows are of several studies, so each says its own."""
    cells = [_cells(row) for row in rows]
    if titled:
        cells = [(f"{row['study']}: {line[0]}", *line[1:]) for row, line in zip(rows, cells, strict=True)]
    return _aligned([COLUMNS, *cells], left=2)


def _aligned(lines: list[tuple[str, ...]], left: int) -> str:
    """Columns of equal width, the first `left` to the left; one in which no row has anything is left out."""
    columns = range(len(lines[0]))
    kept = [at for at in columns if at == 0 or any(line[at] for line in lines[1:])]
    widths = [max(len(line[at]) for line in lines) for at in kept]
    return "\n".join(
        "  ".join(
            line[at].ljust(width) if at < left else line[at].rjust(width)
            for at, width in zip(kept, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    times = "" if row["absolute"] else "x"
    spread = f"{_number(row['low'])} .. {_number(row['high'])}" if row["samples"] > 1 else ""
    here = ""
    if "here" in row:
        here = f"{row['here_ratio']:.1f}x ({row['here_ratio_low']:.1f} .. {row['here_ratio_high']:.1f})"
    return (
        row["name"],
        row["design"],
        str(row["page_size"]),
        f"{row['size']:,}" if "size" in row else "",
        _number(row["value"]),
        spread,
        _number(row.get("here")),
        here,
        f"{row['lean_ratio']:.1f}x" if "lean_ratio" in row else "",
        _number(row["real"]),
        f"{row['ratio']:.1f}x" if row["ratio"] is not None else "",
        _number(row.get("floor")),
        f"{row['floor_ratio']:.1f}x" if "floor_ratio" in row else "",
        f"{_number(row['must'])}{times}" if row["must"] is not None else "",
        f"{_number(row['aim'])}{times}" if row["aim"] is not None else "",
        MET.get(row["met"] or "", ""),
        MET.get(row.get("met_recorded") or "", ""),
    )


def _latency_table(rows: list[Row]) -> str:
    """A line for each verb of a design, its percentiles side by side."""
    lines: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        verb, _, mark = row["name"].partition(" ")
        lines.setdefault((verb, row["design"], row["page_size"]), {})[mark] = row
    cells = [
        (verb, design, str(page_size), *(_number(each[mark]["value"]) for mark in PERCENTILES), _calls(each))
        for (verb, design, page_size), each in lines.items()
    ]
    title = f"{TITLES['latency']} ({rows[0].get('trace', 'own load')})"
    return title + "\n" + _aligned([("", "design", "page", *PERCENTILES, "calls"), *cells], left=2)


def _calls(each: dict[str, Row]) -> str:
    return f"{each['max']['calls']:,}" if "calls" in each["max"] else ""


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
            second = design.endswith("runs") or (page_size == 16 and kind == "token")
            ax.plot(
                [row["size"] for row in line],
                [row["value"] for row in line],
                color=KIND_COLOURS[kind],
                marker=MARKERS[kind],
                markerfacecolor="white" if second else KIND_COLOURS[kind],
                linestyle=SECOND if second else "-",
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
    ax.legend(handlelength=SAMPLE)


def latency_figure(rows: Iterable[Row]) -> Figure:
    """Percentiles of each verb, a panel for each, a place for each design; wall time on a log axis."""
    from kvarena.experiments.style import KIND_COLOURS
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["study"] == "latency"]
    verbs = list(dict.fromkeys(row["name"].split()[0] for row in rows))
    designs = list(dict.fromkeys((row["design"], row["page_size"]) for row in rows))
    figure = Figure(figsize=(2.0 * len(verbs), 2.9), layout="constrained")
    panels = figure.subplots(1, len(verbs), squeeze=False, sharey=True)[0]
    for verb, ax in zip(verbs, panels, strict=True):
        for mark, symbol in zip(PERCENTILES, ("o", "s", "^"), strict=True):
            found = {(row["design"], row["page_size"]): row["value"] for row in rows if row["name"] == f"{verb} {mark}"}
            colours = [KIND_COLOURS[design.split()[0]] for design, _ in designs]
            values = [found[each] for each in designs]
            ax.scatter(range(len(designs)), values, c=colours, marker=symbol, s=18)
            ax.scatter([], [], c="0.3", marker=symbol, s=18, label=mark)
        ax.set_yscale("log")
        ax.set_title(verb)
        ax.set_xticks(range(len(designs)), [f"{design} {size}" for design, size in designs], rotation=60, ha="right")
        ax.margins(x=0.15)
    panels[0].set_ylabel("wall time of a call, µs")
    panels[-1].legend()
    return figure


def save(rows: list[Row], out: Path) -> list[Path]:
    """Table, and figures of growth, latency and the adapters, into a folder; returns what was written."""
    import matplotlib as mpl
    from kvarena.experiments.bench.alloc_adapter import adapter_figure
    from kvarena.experiments.bench.alloc_saved import summary
    from kvarena.experiments.style import STYLE, save_figure

    written = [out / "allocators.txt", out / "cost.md"]
    written[0].write_text(text(rows), encoding="utf-8")
    written[1].write_text(summary(rows), encoding="utf-8")
    figures = {"growth": growth_figure, "latency": latency_figure, "adapter": adapter_figure}
    for study, draw in figures.items():
        if any(row["study"] == study for row in rows):
            with mpl.rc_context(STYLE):
                written += save_figure(draw(rows), out / study)
    return written
