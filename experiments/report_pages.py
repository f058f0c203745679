"""`kvarena report`: one self-contained page for whatever kvarena saved.

A page is told what to show by a reader, one for each kind of result: its tables, its figures (drawn anew from the saved
numbers), its config and where it comes from. Everything that comes from a file is escaped; figures are SVG inside the
page; nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarena.experiments.foreign import reading
from kvarena.experiments.style import STYLE, printable
from kvarena.experiments.tables import Table, table_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable

WIDEST_PRE = 20_000  # characters of a config or a provenance that a page shows


@dataclass
class Page:
    """What a report shows, top to bottom.

    remarks  a heading and its lines
    figures  what draws each, and its caption
    html     a section of its own: heading and markup, already escaped
    """

    title: str
    tables: Sequence[Table | RichTable] = ()
    remarks: Sequence[tuple[str, list[str]]] = ()
    figures: Sequence[tuple[Callable[[], Figure], str]] = ()
    html: list[tuple[str, str]] = field(default_factory=list)
    config: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    footer: str = ""


Reader = Callable[[Path], Page]


def report(path: Path) -> str:
    """The page of a result folder or file, as HTML; it warns of files that were changed after they were written. Raises
    ValueError when it is none of ours, or broken."""
    from kvarena.experiments.changed import changed_words

    with reading(path):
        page = reader_of(path)(path)
        return _page_of(page, changed_words(path))


def _page_of(page: Page, changed: str) -> str:
    from kvarena.experiments.report import _page

    parts = [f"<p class='warning'>{_safe(changed)}</p>"] if changed else []
    parts += [f"<div class='scroll'>{_table(table)}</div>" for table in page.tables]
    for head, lines in page.remarks:
        parts.append(f"<h2>{_safe(head)}</h2>" + "".join(f"<p>{_safe(line)}</p>" for line in lines))
    if page.figures:
        parts.append("<h2>Figures</h2>")
        parts += [_figure(draw, caption) for draw, caption in page.figures]
    parts += [f"<h2>{_safe(head)}</h2><div class='scroll'>{markup}</div>" for head, markup in page.html]
    if page.config:
        parts.append(f"<h2>Config</h2><pre>{escape(_cut(page.config))}</pre>")
    if page.provenance:
        parts.append(f"<h2>Provenance</h2><div class='scroll'>{_provenance(page.provenance)}</div>")
    if page.footer:
        parts.append(f"<footer>{_safe(page.footer)}</footer>")
    return _page(printable(page.title), "\n".join(parts))


def reader_of(path: Path) -> Reader:
    """What reads this kind of result. Raises ValueError naming what is known, and for what an interrupted command left
    or a table in it."""
    from kvarena.experiments.partial import refuse_partial
    from kvarena.experiments.report_files import file_reader, no_result
    from kvarena.experiments.report_readers import KINDS

    refuse_partial(path if path.is_dir() else path.parent)
    for name, reader in KINDS.items():
        if (path / name).is_file():
            return reader
    found = file_reader(path)
    if found is None:
        raise ValueError(no_result(path))
    return found


def write_report_page(path: Path, out: Path) -> None:
    """`report(path)` as a file, whole or not at all."""
    from kvarena.experiments.outputs import whole

    text = report(path)
    with whole(out) as partial:
        partial.write_text(text, encoding="utf-8")


# --- parts ---


def _safe(text: str) -> str:
    return escape(printable(text))


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST_PRE else text[:WIDEST_PRE] + "\n(cut)"


def _table(table: Table | RichTable) -> str:
    if isinstance(table, Table):
        return table_html(table)
    words = {place for place, column in enumerate(table.columns) if column.justify == "left"}
    return worded(from_rich(table), words)


def worded(table: Table, words: Collection[int]) -> str:
    """`table_html` for tables with words in these columns: to the left, and broken where they are long."""

    def line(tag: str, cells: list[str]) -> str:
        parts = (
            f"<{tag} class='w'>{escape(cell)}</{tag}>" if place in words else f"<{tag}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(parts)}</tr>"

    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in table.notes)
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    head = f"<thead>{line('th', table.columns)}</thead>" if any(table.columns) else ""
    body = "\n".join(line("td", row) for row in table.rows)
    return f"{title}<table>{head}\n<tbody>{body}</tbody></table>{notes}"


def from_rich(rich: RichTable) -> Table:
    """The text of a terminal's table."""
    columns = [_plain(column.header) for column in rich.columns]
    cells = [[_plain(cell) for cell in column.cells] for column in rich.columns]
    rows = [list(row) for row in zip(*cells, strict=True)]
    notes = [] if rich.caption is None else [_plain(rich.caption)]
    return Table("" if rich.title is None else _plain(rich.title), columns, rows, notes)


def _plain(cell: Any) -> str:
    from rich.text import Text

    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _figure(draw: Callable[[], Figure], caption: str) -> str:
    data = base64.b64encode(svg_of(draw)).decode()
    return (
        f"<figure><img alt='{escape(printable(caption), quote=True)}' src='data:image/svg+xml;base64,{data}'>"
        f"<figcaption>{_safe(caption)}</figcaption></figure>"
    )


def svg_of(draw: Callable[[], Figure]) -> bytes:
    """A figure as SVG, closed afterwards; the same figure gives the same bytes."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    with mpl.rc_context(STYLE):
        figure = draw()
        out = io.BytesIO()
        try:
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "kvarena"})
        finally:
            plt.close(figure)
    return out.getvalue()


def _provenance(data: Mapping[str, Any]) -> str:
    return worded(Table("", ["", ""], [[name, text] for name, text in _flat(data)]), (0, 1))


def _flat(data: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """Dotted names and values; lists of plain values on one line."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(data, list) and any(isinstance(item, Mapping) for item in data):
        for place, value in enumerate(data):
            yield from _flat(value, f"{name}.{place}")
    else:
        yield name, data if isinstance(data, str) else json.dumps(data)
