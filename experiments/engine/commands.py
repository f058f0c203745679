"""The command `kvarena run`: one policy over one allocator. Imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

RUN_EXAMPLES = """Examples:\n
kvarena run experiments/configs/run-chat.toml --out out/block\n
kvarena run experiments/configs/run-chat.toml --set allocator.kind=token --out out/token\n
kvarena plot out/block out/token --out out/both\n
kvarena run --set preset=sglang-0.5.22 --set trace=chat --set speed=4"""


def add_run_command(app: typer.Typer) -> None:
    """Mount `kvarena run`."""
    app.command(epilog=RUN_EXAMPLES)(run)


def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="Sections workload, pool, engine, allocator. Default: chat."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; without it, only the tables.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field; repeatable.")
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Run the engine over one allocator, on a simulated clock; tables on stdout, the rest in --out."""
    from kvarena.experiments.engine.run import run_engine
    from kvarena.experiments.engine.run_config import load_run_config, run_config

    chosen = run_config({}, set_ or []) if config is None else load_run_config(config, set_ or [])
    with _Progress(not quiet) as tick:
        result = run_engine(chosen, out=out, tick=tick)
    if out is not None:  # before anything is printed: a reader that goes away must not cost the result
        result.save(out)
        print(f"result in {out}", file=sys.stderr)
    print_rows(result.summary) if as_json else print_rich(result)


class _Progress:
    """Counts ended requests on stderr; their number is not known before, since sessions may take their time."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None

    def __enter__(self) -> Any:
        if not self._shown:
            return None
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("requests ended"), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True)).__enter__()
        task = self._bar.add_task("run", total=None)
        return lambda: self._bar.advance(task)

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)
