"""Progress on stderr: a bar with the time left on a terminal, a line a cell in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.pools import Cell


class ProgressBar:
    """Counts the requests of all cells; shows nothing unless `shown`."""

    def __init__(self, cells: list[Cell], shown: bool) -> None:
        self._counts = [len(cell.workload.requests) for cell in cells]
        self._shown = shown
        self._begun = 0
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True)).__enter__()
            self._task = self._bar.add_task("replay", total=sum(self._counts))
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def tick(self, cell: Cell) -> Callable[[], None] | None:
        """Announce the next cell; returns what advances by one request, or None when there is nothing to call."""
        text = f"{cell.entry.name} {format_bytes(cell.pool_bytes)}"
        self._begun += 1
        if self._bar is not None:
            self._bar.update(self._task, description=text)
            return lambda: self._bar.advance(self._task)
        if self._shown:
            print(f"replay {self._begun} of {len(self._counts)}: {text}{self._left()}", file=sys.stderr, flush=True)
        return None

    def _left(self) -> str:
        """Time left by the pace so far, once there is a pace."""
        done = sum(self._counts[: self._begun - 1])
        if not done:
            return ""
        seconds = (time.monotonic() - self._start) * (sum(self._counts) - done) / done
        return f", about {seconds:.0f} s left"
