"""A progress bar with the time left, on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.pools import Cell


class ProgressBar:
    """A bar over all requests of all cells, on stderr, or nothing."""

    def __init__(self, cells: list[Cell], shown: bool) -> None:
        self._total = sum(len(cell.workload.requests) for cell in cells)
        self._shown = shown
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True)).__enter__()
            self._task = self._bar.add_task("replay", total=self._total)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def tick(self, cell: Cell) -> Callable[[], None] | None:
        """Advance by one request of this cell."""
        if self._bar is None:
            return None
        text = f"{cell.entry.name} {format_bytes(cell.pool_bytes)}"
        self._bar.update(self._task, description=text)
        return lambda: self._bar.advance(self._task)
