"""What a report shows of each kind of result; see `report_pages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.foreign import read_object
from kvarena.experiments.report_pages import Page, Reader
from kvarena.experiments.tables import Table

if TYPE_CHECKING:
    from kvarena.experiments.results import Result
    from matplotlib.figure import Figure

MAX_PANELS = 12
MAX_ROWS = 200


def _toml(data: Any) -> str:
    import tomli_w

    return tomli_w.dumps(data)


def _beside(folder: Path) -> dict[str, Any]:
    path = folder / "provenance.json"
    return read_object(path) if path.is_file() else {}


def _result(folder: Path) -> Page:
    """result.json: a comparison, an engine run, or a capacity or rate study."""
    kind = read_object(folder / "result.json").get("kind")
    readers: dict[Any, Reader] = {"capacity": _capacity, "rate": _rate}
    if kind in readers:
        return readers[kind](folder)
    from kvarena.experiments.results import load_result

    return _page_of(load_result(folder))


def _page_of(result: Result) -> Page:
    from kvarena.experiments.plots import draw
    from kvarena.experiments.report import captions, result_footer
    from kvarena.experiments.tables import remarks, tables, time_table

    footer = result_footer(result)
    shown = dict(captions(result))
    if len(result.timings):
        shown["allocator_time"] = "Measured time of each verb: this machine, this run."
    page = Page(
        f"{result.manifest['trace']}: {' against '.join(result.labels.values())}",
        [*tables(result), *([time_table(result)] if len(result.timings) else [])],
        [(head, list(lines)) for head, lines in remarks(result)],
        [(partial(draw, name, result, footer), text) for name, text in shown.items()],
        config=_toml(result.config),
        provenance=result.provenance,
        footer=footer,
    )
    if any(entry["shares_prefixes"] for entry in result.manifest["allocators"]):
        from kvarena.experiments.report import _frame_html, why_head

        page.html.append((why_head(result), _frame_html(result.why())))
    return page


def _ladder(folder: Path) -> Page:
    from kvarena.experiments.ladder import load_ladder
    from kvarena.experiments.ladder_plots import footer, plot_interactions, plot_metrics, plot_waterfall, put_footer
    from kvarena.experiments.ladder_tables import ladder_tables

    made = load_ladder(folder)
    below = footer(made)

    def drawn(plot: Callable[..., Any]) -> Figure:
        axes = plot(made)
        figure: Any = axes if plot is plot_metrics else axes.get_figure()
        put_footer(figure, below)
        return figure

    captions: dict[Callable[..., Any], str] = {
        plot_waterfall: "The walk from one design to the other: exact Shapley shares of the token hit rate. Whiskers: "
        "what a rung adds in any setting of the others.",
        plot_interactions: "Pairs of rungs: how much more they do together than apart.",
        plot_metrics: "Shares in all four metrics. Grey: the measured time's range over rounds holds zero.",
    }
    return Page(
        f"Ladder: {made.manifest['trace']}, from {' to '.join(made.manifest['ends'])}",
        [table for pool in made.manifest["pools"] for table in ladder_tables(made, pool)],
        figures=[(partial(drawn, plot), text) for plot, text in captions.items()],
        config=_toml(made.manifest["config"]),
        provenance=made.provenance,
        footer=below,
    )


def _ablations(folder: Path) -> Page:
    from kvarena.experiments.ladder_ablations import load_ablations
    from kvarena.experiments.ladder_plots import draw_ablations
    from kvarena.experiments.ladder_tables import ablation_tables

    made = load_ablations(folder)
    caption = "With and without the rules for which reasons are usually given; removal from a queue is measured."
    return Page(
        f"Ablations: {made.manifest['trace']}",
        list(ablation_tables(made)),
        figures=[(partial(draw_ablations, made), caption)],
        config=_toml(made.manifest["config"]),
        provenance=_beside(folder),
    )


def _claims(folder: Path) -> Page:
    from kvarena.experiments.claims import load_findings
    from kvarena.experiments.claims_commands import findings_table

    found = load_findings(folder)
    counts = {v: sum(f.verdict == v for f in found) for v in ("reproduced", "refuted", "depends", "not tested")}
    notes = [(f.claim.id, [f.claim.claim, f.claim.note]) for f in found]
    return Page(
        f"Claims: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}",
        [findings_table(found, whole=False)],
        [(name, [line for line in lines if line]) for name, lines in notes],
        provenance={**_beside(folder), "claims": {f.claim.id: f.claim.sha256 for f in found}},
        footer="Expectations and tolerances were written before the runs; provenance has the hash of each file.",
    )


def _resampled(folder: Path) -> Page:
    from kvarena.experiments.resample import interval_table, open_replicates, plot_intervals
    from kvarena.experiments.style import add_footer

    found = open_replicates(folder)

    def drawn() -> Figure:
        figure: Any = plot_intervals(found).get_figure()
        add_footer(figure, found.footer)
        return figure

    caption = "Paired differences of the token hit rate with nominal 95 % intervals, over resamples of the trace."
    data = read_object(folder / "study.json")
    return Page(
        f"How sure: {found.trace}",
        [interval_table(found)],
        figures=[(drawn, caption)],
        config=_toml(data["config"]) if isinstance(data.get("config"), dict) else "",
        provenance=_beside(folder),
        footer=found.footer,
    )


def _pagesize(folder: Path) -> Page:
    from kvarena.experiments import one_axis
    from kvarena.experiments.one_axis_plots import draw_axis

    made = one_axis.load(folder)
    names = list(dict.fromkeys(made.rows["workload"]))
    groups = [names[at : at + 3] for at in range(0, len(names), 3)]
    kernels = one_axis.kernel_times()
    caption = "Page sizes 1 to 256 on one axis; a ring marks each design's best."
    return Page(
        f"Page size on one axis: {', '.join(names)}",
        [one_axis.best_table(made)],
        figures=[(partial(draw_axis, made, kernels, group), caption) for group in groups],
        config=_toml({name: value for name, value in made.about.items() if value is not None}),
        provenance=_beside(folder),
    )


def _capacity(folder: Path) -> Page:
    from kvarena.experiments.capacity_commands import _tables
    from kvarena.experiments.capacity_study import load_capacity
    from kvarena.experiments.plots_capacity import draw_capacity

    result = load_capacity(folder)
    caption = "Concurrent requests that each design carries: predicted in closed form, and run."
    figures = [(partial(draw_capacity, result), caption)]
    return Page("Capacity", _tables(result), figures=figures, provenance=_beside(folder))


def _rate(folder: Path) -> Page:
    from kvarena.experiments.plots_rate import draw_rate
    from kvarena.experiments.rate import load_rate
    from kvarena.experiments.rate_tables import hits_table, knee_lines, rates_table

    result = load_rate(folder)
    tables = [rates_table(result), *([hits_table(result)] if len(result.hits) else [])]
    caption = "Latency, throughput and batch against the request rate, and what a hit is worth."
    remarks = [("Where it bends", list(knee_lines(result))), ("Warnings", list(result.manifest["warnings"]))]
    return Page(
        f"Rate: {result.manifest['trace']}",
        tables,
        [(head, lines) for head, lines in remarks if lines],
        [(partial(draw_rate, result), caption)],
        config=_toml(result.manifest["config"]) if "config" in result.manifest else "",
        provenance=_beside(folder),
    )


def _aged(folder: Path) -> Page:
    from kvarena.experiments import aged
    from kvarena.experiments.aged_plots import draw_aged

    table, layouts = aged.load_churn(folder / "aged_churn.csv"), aged.load_layouts(folder / "aged.parquet")
    caption = "Runs of consecutive slots over churn, and their lengths in the aged pools."
    draw = partial(draw_aged, table, layouts, "simulated clock")
    return Page("Aged pools", [aged.aged_table(table)], figures=[(draw, caption)], provenance=_beside(folder))


def _sweep(folder: Path) -> Page:
    from kvarena.experiments.sweep import open_sweep
    from kvarena.experiments.sweep_plots import draw_sweep
    from kvarena.experiments.tables import hit_rate_table, tables

    made = open_sweep(folder)
    finished = [cell["key"] for cell in made.cells if cell["state"] == "finished"]
    shown = finished[: 2 * MAX_PANELS]
    rates = []
    for key in shown:
        result = made.result(key)
        table = tables(result)[0] if len(result.allocators) > 3 else hit_rate_table(result)
        table.title = f"{table.title} (cell {key[:10]})"
        rates.append(table)
    caption = "Token hit rate against pool size, a panel a cell."
    groups = [shown[at : at + MAX_PANELS] for at in range(0, len(shown), MAX_PANELS)]
    return Page(
        f"Sweep: {folder.resolve().name}",
        [_cells_table(made), *_first_rates(made), *rates],
        [(f"Failed: {_point(failure['point'])}", [str(failure["error"])]) for failure in made.failures.values()],
        [(partial(draw_sweep, made, group), caption) for group in groups],
        provenance=_beside(folder / "cells" / finished[0]) if finished else {},
    )


def _cells_table(made: Any) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title="Cells")
    for head in ("cell", "state", "point"):
        table.add_column(head)
    for cell in made.cells[:MAX_ROWS]:
        table.add_row(cell["key"][:10], cell["state"], Text(_point(cell["point"])))
    states = {state: sum(cell["state"] == state for cell in made.cells) for state in ("finished", "failed", "pending")}
    more = len(made.cells) - MAX_ROWS
    table.caption = ", ".join(f"{count} {state}" for state, count in states.items())
    table.caption += f"; {more} more are not shown" if more > 0 else ""
    return table


def _point(point: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {_value(value)}" for name, value in point.items()) or "the base config"


def _value(value: Any) -> str:
    """Allocators by their names; everything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return " | ".join(str(item["name"]) for item in value)
    return str(value)


def _first_rates(made: Any) -> list[Table]:
    """Beyond the cells that get a table of their own, how many rows sweep.csv has."""
    left = sum(cell["state"] == "finished" for cell in made.cells) - 2 * MAX_PANELS
    if left <= 0:
        return []
    return [Table("More cells", ["", ""], [["finished cells without a table here", str(left)]], ["sweep.csv has all"])]


def kernels_page(path: Path) -> Page:
    """Figures and targets of `bench kernels`."""
    from kvarena.experiments.bench import kernel_plots, tables
    from kvarena.experiments.style import add_footer

    result = kernel_plots.load_kernels(path)

    def drawn(plot: Callable[..., Any]) -> Figure:
        figure: Any = plot(result).figure
        add_footer(figure, kernel_plots.footer(result))
        return figure

    rows = [["met" if t.met else "missed", t.name, t.wanted, t.found] for t in tables.targets(result)]
    return Page(
        f"Kernels: {path.parent.name}/{path.name}",
        [_targets(rows)],
        figures=[
            (partial(drawn, plot), " ".join((plot.__doc__ or name).split()))
            for name, plot in kernel_plots.FIGURES.items()
        ],
        provenance={part: data.get("provenance", {}) for part, data in result["parts"].items()},
        footer=kernel_plots.footer(result),
    )


def _targets(rows: list[list[Any]]) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title="Targets")
    for head in ("", "target", "wanted", "found"):
        table.add_column(head)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _allocators(folder: Path) -> Page:
    from html import escape

    from kvarena.experiments.bench import alloc_saved, alloc_tables

    rows = alloc_saved.load(folder)
    header = next((row for row in rows if row["study"] == "header"), {})
    grown = [(partial(alloc_tables.growth_figure, rows), "Time of an operation against the pool's size.")]
    return Page(
        f"Allocators on the CPU: {folder.name}",
        figures=grown if any(row["study"] == "growth" for row in rows) else [],
        html=[("Times", f"<pre>{escape(alloc_tables.text(rows))}</pre>")],
        provenance=dict(header),
    )


# The file that tells each kind, asked in this order: some folders hold a sweep too.
KINDS: dict[str, Reader] = {
    "ladder.json": _ladder,
    "ablations.json": _ablations,
    "claims.json": _claims,
    "study.json": _resampled,
    "pagesize.json": _pagesize,
    "aged_churn.csv": _aged,
    "allocators.jsonl": _allocators,
    "result.json": _result,
    "sweep.json": _sweep,
}
