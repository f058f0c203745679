"""The commands that look inside a design: aged pools. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]

AGED_EXAMPLES = """Examples:\n
kvarena aged\n
kvarena aged --figure aged.pdf\n
kvarena aged --hours 2 --out out/layouts"""


def add_insight_commands(app: typer.Typer) -> None:
    """Mount the commands of this module."""
    app.command(epilog=AGED_EXAMPLES)(aged)


def aged(
    hours: Annotated[
        float | None, typer.Option(help="Age pools anew for so many simulated hours (2: as the shipped ones).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the layouts and the table over churn.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it: .png, .pdf or .svg.")] = None,
    quiet: Quiet = False,
) -> None:
    """Say in how long runs the slots of live requests lie after hours of churn; without --hours, as shipped."""
    from kvarena.experiments import aged as of

    if hours is None:
        if out is not None or seed:
            raise ValueError("aged: --out and --seed age pools anew and need --hours")
        layouts, table = of.load_layouts(), of.load_churn()
    else:
        config = of.AgeConfig(hours=hours, seed=seed)
        done = [of.age(one, config, None if quiet else _Ticks(one.name)) for one in of.ALLOCATORS]
        layouts = {one.allocator.name: (one.allocator.spec["page_size"], list(one.layout.values())) for one in done}
        table = of.churn_table(done)
        if out is not None:
            print(*of.save(done, config, out), sep="\n", file=sys.stderr)
    if figure is not None:
        _draw(figure, table, layouts)
    _print(of.aged_table(table))


def _draw(path: Path, table: Any, layouts: Any) -> None:
    from kvarena.experiments.aged_plots import draw_aged

    save_one(draw_aged(table, layouts, "chat workload, replies of 400 tokens in the median; simulated clock"), path)


def save_one(figure: Any, path: Path) -> None:
    """Write one figure and close it. Raises ValueError for another kind of file."""
    import matplotlib.pyplot as plt
    from kvarena.experiments.style import FORMATS, save_figure

    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"--figure: expected a file {', '.join('.' + name for name in FORMATS)}, found {path}")
    save_figure(figure, path.with_suffix(""), (kind,))
    plt.close(figure)


class _Ticks:
    """Counts on stderr what has been done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if self._count % 1000 == 0:
            print(f"{self._what}: {self._count:,} requests", file=sys.stderr)


def _print(table: Any) -> None:
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 140).print(table)
