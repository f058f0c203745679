"""`kvarena verify`: are the allocators still the upstreams', and does a result folder add up?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

verify_app = typer.Typer(
    name="verify",
    help="Compare decisions with the real packages, and results with their rows.",
    no_args_is_help=True,
)


@verify_app.callback()
def main() -> None:
    """Compare decisions with the real packages, and results with their rows."""


@verify_app.command("result", epilog="Example: kvarena verify result out/chat out/sweep")
def result(
    results: Annotated[
        list[Path],
        typer.Argument(help="Folders of compare, run or sweep, or tables of forks.", metavar="RESULT..."),
    ],
    again: Annotated[bool, typer.Option("--again", help="Also run each config once more; compare every row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a result on stdout.")] = False,
) -> None:
    """Recompute every summary number from the raw rows, check the conservation laws and the hashes of all files.

    Exit code 1 when anything differs."""
    from kvarena.experiments.style import printable
    from kvarena.experiments.verify_result import verdict_json, verify

    verdicts = []
    for path in results:
        verdict = verify(path, again=again)
        verdicts.append(verdict)
        for line in [verdict_json(verdict)] if as_json else verdict.lines():
            print(line if as_json else printable(line))
    raise typer.Exit(0 if all(verdict.stands for verdict in verdicts) else 1)
