"""Where the commands print: a terminal at its own width, a pipe at one that keeps lines whole, programs get rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

PIPED_COLUMNS = 140
Json = Annotated[bool, typer.Option("--json", help="One JSON line a row on stdout in place of tables.")]


def console(piped_columns: int = PIPED_COLUMNS) -> Console:
    """Stdout. Where it is no terminal it has `piped_columns` columns, so that nobody's pager folds a table's cells."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=piped_columns)


def print_rich(*things: Any, piped_columns: int = PIPED_COLUMNS) -> None:
    """Print tables, results and texts, one below the other."""
    out = console(piped_columns)
    for thing in things:
        out.print(thing)


def print_rows(rows: Any) -> None:
    """One JSON object a line on stdout, in UTF-8: a DataFrame, or mappings. What is not known is null."""
    records: Iterable[Mapping[Any, Any]] = rows.to_dict("records") if hasattr(rows, "to_dict") else rows
    for record in records:
        print(json.dumps({str(name): plain(value) for name, value in record.items()}))


def plain(value: Any) -> Any:
    """A value of a table as JSON has it: NaN and infinity as null, numpy's numbers as Python's.

    >>> plain(float("nan")), plain((1, "a")), plain(2.5)
    (None, [1, 'a'], 2.5)
    """
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
