"""Where the commands print: a terminal at its own width, a pipe at a width that keeps lines whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPED_COLUMNS = 140


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
