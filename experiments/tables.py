"""A result as tables of text: one source for the terminal, the notebook and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.style import printable

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.results import Result
    from rich.table import Table as RichTable

MEASURES = {
    "token_hit_rate": ("token hit rate, whole run", "percent"),
    "token_hit_rate_last_half": ("token hit rate, last half", "percent"),
    "token_hit_rate_unreachable": ("token hit rate, replies unreachable", "percent"),
    "token_hit_rate_ceiling": ("ceiling: infinite cache at its own grain", "percent"),
    "request_hit_rate": ("requests with a hit", "percent"),
    "num_pages": ("pages", "count"),
    "utilisation": ("utilisation, mean", "percent"),
    "fragmentation": ("fragmentation, mean", "percent"),
    "external_fragmentation": ("external fragmentation, mean", "percent"),
    "tail_waste_bytes": ("tail waste, mean", "bytes"),
    "reservation_bytes": ("reservation, mean", "bytes"),
    "duplicate_bytes": ("duplicates, mean", "bytes"),
    "evicted_pages": ("pages evicted", "count"),
    "refusals": ("refused tries", "count"),
    "rejected": ("requests rejected", "count"),
    "cut_output_tokens": ("reply tokens not replayed", "count"),
}
NOISE = " ~"
BUDGET_LINES = {
    "kv_bytes": "KV of pages",
    "padding_page_bytes": "padding page",
    "table_bytes": "page table",
    "slot_mapping_bytes": "slot_mapping",
    "unused_bytes": "left over",
}


@dataclass
class Table:
    """Text cells, control characters replaced. `notes` stand under it, one a line."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.title = printable(self.title)
        self.columns = [printable(head) for head in self.columns]
        self.rows = [[printable(cell) for cell in row] for row in self.rows]
        self.notes = [printable(note) for note in self.notes]


def tables(result: Result) -> list[Table]:
    """Everything a reader should see first: hit rates, measures, budget, and what to be careful about."""
    rates = hit_rate_table(result)
    if result.manifest["kind"] == "run":
        return [engine_table(result), rates, measures_table(result), budget_table(result)]
    if len(result.allocators) > 3:
        return [*_apart(rates, len(result.allocators)), measures_table(result), budget_table(result)]
    return [rates, measures_table(result), budget_table(result)]


def _apart(table: Table, count: int) -> list[Table]:
    """Rates and paired differences as two tables, when there are too many columns for one."""
    rates = Table(table.title, table.columns[: count + 1], [row[: count + 1] for row in table.rows], table.notes)
    rows = [[row[0], *row[count + 1 :]] for row in table.rows[:-1]]
    heads = [head.partition(" − ")[0] for head in table.columns[count + 1 :]]
    first = table.columns[count + 1].partition(" − ")[2]
    return [rates, Table(f"Paired differences to {first}, points", [table.columns[0], *heads], rows)]


def hit_rate_table(result: Result) -> Table:
    """Token hit rate of each allocator at each pool size, means over seeds, with paired differences to the first."""
    first, *others = result.allocators
    short = _short_names(result)
    columns = ["pool", *short.values(), *(f"{short[name]} − {short[first]}" for name in others)]
    rows = []
    for pool in result.pools:
        rates = {name: _per_seed(result.summary, name, pool, "token_hit_rate") for name in result.allocators}
        cells = [percent(_mean(values)) for values in rates.values()]
        cells += [_difference(rates[first], rates[name]) for name in others]
        rows.append([format_bytes(pool), *cells])
    ceilings = [
        percent(_mean(_per_seed(result.summary, n, result.pools[-1], "token_hit_rate_ceiling")))
        for n in result.allocators
    ]
    rows.append(["infinite cache", *ceilings, *([""] * len(others))])
    seeds = result.summary["seed"].nunique()
    spread = f"mean of {seeds} seeds, range of the paired differences in brackets" if seeds > 1 else "one run"
    if any(cell.endswith(NOISE) for row in rows for cell in row):
        spread += f"; {NOISE.strip()}: within noise (the 95 % interval of the mean holds zero)"
    legend = [f"{short[name]}: {label}" for name, label in result.labels.items() if label != short[name]]
    title = f"Token hit rate over first admissions, {result.manifest['trace']}"
    return Table(title, columns, rows, [f"{spread}; differences in points" if others else spread, *legend])


def engine_table(result: Result) -> Table:
    """Throughput and latency of an engine run at the reference pool, means over seeds."""
    from kvarena.experiments.engine.figures import engine_notes, engine_rows

    title = f"Engine at a pool of {format_bytes(result.reference_pool)}"
    return Table(title, ["measure", *_short_names(result).values()], engine_rows(result), engine_notes(result))


def measures_table(result: Result) -> Table:
    """All measures at the reference pool, means over seeds."""
    pool = result.reference_pool
    rows = []
    for column, (text, unit) in MEASURES.items():
        if column not in result.summary:
            continue  # an engine run has its own
        values = [_mean(_per_seed(result.summary, name, pool, column)) for name in result.allocators]
        if column == "external_fragmentation" and not any(value is not None for value in values):
            continue  # only designs that need runs have it
        rows.append([text, *(_format(value, unit) for value in values)])
    return Table(f"At a pool of {format_bytes(pool)}", ["measure", *_short_names(result).values()], rows)


def budget_table(result: Result) -> Table:
    """Where the bytes of the reference pool go, line by line, first seed."""
    budgets: dict[str, dict[str, Any]] = {}
    for row in result.manifest["budgets"]:
        if row["pool_bytes"] == result.reference_pool:
            budgets.setdefault(row["allocator"], row)
    rows = [
        [text, *(format_bytes(budgets[name][line]) for name in result.allocators)]
        for line, text in BUDGET_LINES.items()
    ]
    unit = "a token" if result.manifest["tokens_per_id"] == 1 else "an id"
    title = (
        f"Budget of {format_bytes(result.reference_pool)}, {format_bytes(result.manifest['bytes_per_token'])} {unit}"
    )
    return Table(title, ["bytes", *_short_names(result).values()], rows)


def time_table(result: Result) -> Table:
    """Measured microseconds of each verb at the reference pool, means over seeds."""
    frame = result.timings
    frame = frame[frame["pool_bytes"] == result.reference_pool] if len(frame) else frame
    rows = []
    for verb in dict.fromkeys(frame["verb"]) if len(frame) else ():
        cells = [verb]
        for name in result.allocators:
            row = frame[(frame["allocator"] == name) & (frame["verb"] == verb)][["p50_us", "p99_us"]].mean()
            cells.append(f"{row['p50_us']:.1f} / {row['p99_us']:.1f}")
        rows.append(cells)
    if result.manifest.get("kind") == "run" and len(frame) and "adapter" not in set(frame["verb"]):
        rows.append(["adapter", *("not measured" for _ in result.allocators)])
    title = "Allocator time a call, µs: median / 99th percentile (measured here)"
    return Table(title, ["verb", *_short_names(result).values()], rows)


def remarks(result: Result) -> list[tuple[str, list[str]]]:
    """Headed lists of lines: the first difference, what the trace shows, warnings, the kernels."""
    divergence = result.first_divergence()
    shown = ["the designs never differ"] if divergence is None else str(divergence).splitlines()
    if len(result.allocators) < 2:
        shown = ["one allocator: nothing to compare"]
    seen = ", ".join(f"{name} {value}" for name, value in result.visible.items())
    heads = {
        "First request on which the designs differ": shown,
        "What the trace can show": [seen, *result.warnings],
        "Kernels, the common ground": [kernel_line(result)],
    }
    return [(head, [printable(line) for line in lines]) for head, lines in heads.items()]


def kernel_line(result: Result) -> str:
    """What the kernel check found, in one line."""
    report = result.manifest["kernel_check"]
    if report["status"] == "not run":
        return f"skipped: {report['reason']}"
    from kvarena.experiments.kernel_check import summary

    return summary(report)


def result_tables(result: Result) -> Iterator[Any]:
    """Renderables for a terminal."""
    from rich.padding import Padding
    from rich.text import Text

    for table in [*tables(result), time_table(result)]:
        yield Text(table.title, style="bold")
        yield rich_table(table)
        for note in table.notes:
            yield Text(note, style="dim")
        yield Text("")
    for head, lines in remarks(result):
        yield Text(head, style="bold")
        for line in lines:
            yield Padding(Text(line), (0, 0, 0, 2), expand=False)


def rich_table(table: Table, left: int = 1, title: str | None = None) -> RichTable:
    """The grid for a terminal, without the notes. The first `left` columns are text, the others numbers. Cells stay
    as they are: names come from traces, and brackets in them are no markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    rich = RichTable(title=None if title is None else Text(title), header_style="bold")
    for place, column in enumerate(table.columns):
        rich.add_column(Text(column), justify="left" if place < left else "right", overflow="fold")
    for row in table.rows:
        rich.add_row(*map(Text, row))
    return rich


def result_html(result: Result) -> str:
    """The same as HTML, escaped, for a notebook."""
    parts = [table_html(table) for table in tables(result)]
    parts += [f"<b>{escape(head)}</b><ul>{_items(lines)}</ul>" for head, lines in remarks(result)]
    return "\n".join(parts)


def table_html(table: Table) -> str:
    """One table as HTML. Every cell is escaped: ids and names come from traces."""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "\n".join(
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for tag, cell in zip(_tags(row), row, strict=True)) + "</tr>"
        for row in table.rows
    )
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in table.notes)
    return (
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table>{notes}"
    )


def _tags(row: list[str]) -> list[str]:
    return ["th", *(["td"] * (len(row) - 1))]


def _items(lines: list[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


# --- cells ---


def percent(value: float | None) -> str:
    """A share as per cent with two digits; a dash when there is none."""
    return "–" if value is None else f"{100 * value:.2f} %"


def _format(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "percent":
        return percent(value)
    return format_bytes(value) if unit == "bytes" else f"{value:,.0f}"


def _short_names(result: Result) -> dict[str, str]:
    """Column heads: the legend text without the rules' version; the short name where two would be alike."""
    heads = {name: re.sub(r" \([^)]* rules\)", "", label) for name, label in result.labels.items()}
    alike = list(heads.values())
    return {name: head if alike.count(head) == 1 else name for name, head in heads.items()}


def _per_seed(summary: pd.DataFrame, name: str, pool: int, column: str) -> list[float | None]:
    rows = summary[(summary["allocator"] == name) & (summary["pool_bytes"] == pool)].sort_values("seed")
    return [None if value is None or math.isnan(value) else float(value) for value in rows[column]]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _difference(a: list[float | None], b: list[float | None]) -> str:
    pairs = [100 * (y - x) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if not pairs:
        return "–"
    text = f"{sum(pairs) / len(pairs):+.2f}"
    if len(pairs) == 1:
        return text
    return f"{text} [{min(pairs):+.2f}, {max(pairs):+.2f}]{NOISE if _within_noise(pairs) else ''}"


def _within_noise(pairs: list[float]) -> bool:
    """Whether the nominal 95 % t interval of the mean paired difference holds zero."""
    if min(pairs) == max(pairs):
        return pairs[0] == 0
    from scipy.stats import ttest_1samp

    return bool(ttest_1samp(pairs, 0).pvalue > 0.05)
