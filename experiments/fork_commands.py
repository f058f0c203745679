"""The command of the fork study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvarena.experiments.console import Json, print_rich, print_rows


def add_fork_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog="Example: kvarena forks --requests 200 --out forks.csv")(forks)


def forks(
    requests: Annotated[int, typer.Option(help="Requests a cell.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Of lengths and beams.", min=0)] = 0,
    sigma: Annotated[float, typer.Option(help="Spread of the lengths: sigma of their logarithm.")] = 0.8,
    scale: Annotated[float, typer.Option(help="How decided the random language model is, nats a rank.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Write the table: .csv or .parquet.")] = None,
    as_json: Json = False,
) -> None:
    """Say how much memory parallel samples and beams save by sharing pages, beside the published figures, and why they
    differ."""
    from kvarena.experiments.forking import Model, frame, reasons, savings_table, study
    from kvarena.experiments.outputs import check_table
    from kvarena.experiments.study import write_table

    check_table(out, ("lengths", "method", "width", "published_low", "published_high"))
    rows = study(requests=requests, seed=seed, sigma=sigma, model=Model(scale))
    if out is not None:
        write_table(frame(rows), out)
    if as_json:
        print_rows(frame(rows))
        return
    print_rich(savings_table(rows))
    for line in reasons(rows):
        typer.echo(line)
