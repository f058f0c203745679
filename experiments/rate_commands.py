"""The command `kvarena rate`. Imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from kvarena.experiments.console import Json, console, print_rows

RATE_EXAMPLES = """Examples:\n
kvarena rate experiments/configs/rate.toml --out out/rate\n
kvarena rate experiments/configs/rate.toml --set pool='8 GiB' --set 'rate.shares=[0.5, 1.0, 1.5]'\n
kvarena rate --saved results/rate"""

COLUMNS = 160


def add_rate_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=RATE_EXAMPLES)(rate)


def rate(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="A run's sections, \\[\\[allocators]] and \\[rate].")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables and the figure.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any field, rate.shares too; repeatable.")
    ] = None,
    saved: Annotated[Path | None, typer.Option(help="Show a finished study in place of running one.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Draw latency, throughput and goodput against request rate, mark the knee, and say what a hit is worth."""
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.rate import load_rate, load_rate_plan, run_rate

    if (config is None) == (saved is None):
        raise ValueError("rate: expected a config, or --saved with a finished study")
    if saved is not None:
        with reading(saved):
            result = load_rate(saved)
    else:
        tick = None if quiet else lambda text: print(text, file=sys.stderr, flush=True)
        result = run_rate(load_rate_plan(config, set_ or []), jobs=jobs, tick=tick, out=out)  # type: ignore[arg-type]
    if out is not None:
        result.save(out)
        print(f"result in {out}", file=sys.stderr)
    with reading(saved):
        print_rows(result.rates) if as_json else _print(result)


def _print(result: Any) -> None:
    from kvarena.experiments.rate_tables import hits_table, knee_lines, rates_table

    out = console(COLUMNS)
    out.print(rates_table(result))
    for line in knee_lines(result):
        out.print(line, highlight=False)
    if len(result.hits):
        out.print(hits_table(result))
    for warning in result.manifest["warnings"]:
        out.print(warning, style="dim", highlight=False, markup=False)
