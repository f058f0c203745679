"""The command `kvarena capacity`. Imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

CAPACITY_EXAMPLES = """Examples:\n
kvarena capacity --out out/capacity\n
kvarena capacity --model deepseek-v2-lite --loads chat --designs block-64,token-64 --no-beyond\n
kvarena capacity --saved results/h200/capacity.json --out out/card\n
kvarena capacity --backends"""

COLUMNS = 160


def add_capacity_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=CAPACITY_EXAMPLES)(capacity)


def capacity(
    model: Annotated[str, typer.Option(help="Model shape, such as llama-3-8b.")] = "llama-3-8b",
    memory: Annotated[str, typer.Option(help="Memory of the card.")] = "143771 MiB",
    workspace: Annotated[str, typer.Option(help="Activations and captured graphs on it.")] = "2 GiB",
    panels: Annotated[str, typer.Option(help="equal, deployed, or both with a comma between.")] = "equal,deployed",
    loads: Annotated[str, typer.Option(help="chat, long, shared, short; commas between.")] = "chat,long,shared",
    designs: Annotated[str | None, typer.Option(help="Such as block-16,token-1; default: all nine.")] = None,
    max_model_len: Annotated[
        int, typer.Option(help="Tokens of a row, and of a run that is always reserved.", min=1)
    ] = 131_072,
    rows: Annotated[int, typer.Option(help="Rows of the page table at equal bytes.", min=1)] = 2048,
    declared: Annotated[int, typer.Option(help="max_tokens that every client states.", min=1)] = 4096,
    seed: Annotated[int, typer.Option(help="Of lengths and tokens.", min=0)] = 0,
    beyond: Annotated[bool, typer.Option("--beyond/--no-beyond", help="Also bursts past capacity.")] = True,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    saved: Annotated[
        list[Path] | None, typer.Option(help="Show a finished study, or a card's .json; several are joined.")
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="Results of a card (capacity.json) to show beside.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables and the figure.")] = None,
    backends: Annotated[
        bool, typer.Option("--backends", help="Print the page size of each attention backend.")
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Say how many concurrent requests each design carries on a card: predicted, run, and taken apart.

    Bursts arrive at once; a burst is carried when all are live together, nobody is preempted and nobody waits for room.
    """
    from kvarena.experiments.budget import parse_bytes
    from kvarena.experiments.capacity import DESIGNS, capacity_plan
    from kvarena.experiments.capacity_backends import backend_rows
    from kvarena.experiments.capacity_card import read_measured
    from kvarena.experiments.capacity_sizing import card
    from kvarena.experiments.capacity_study import backends_table, joined, load_capacity, refuse_other, run_study
    from kvarena.experiments.foreign import reading

    if backends:
        print_rows(backend_rows()) if as_json else print_rich(backends_table(), piped_columns=COLUMNS)
        return
    if out is not None:  # the plan itself takes seconds
        refuse_other(out)
    on_card = None if measured is None else read_measured(measured)
    if saved:
        with reading(saved[0]):
            result = joined([load_capacity(path) for path in saved])
    else:
        plan = capacity_plan(
            model,
            on=card(model, parse_bytes(memory, "memory"), parse_bytes(workspace, "workspace", 0), "a card"),
            panels=_names(panels),
            loads=_names(loads),
            designs=_names(designs) if designs else tuple(DESIGNS),
            max_model_len=max_model_len,
            declared=declared,
            rows=rows,
            seed=seed,
        )
        tick = None if quiet else lambda text: print(text, file=sys.stderr, flush=True)
        result = run_study(plan, beyond=beyond, jobs=jobs, tick=tick, out=out)
    if on_card is not None:
        from kvarena.experiments.capacity_beside import beside

        result.manifest["on_card"] = beside(on_card, result.sizing)
    if out is not None:
        result.save(out)
        print(f"result in {out}", file=sys.stderr)
    with reading(saved[0] if saved else None):
        print_rows(result.capacity) if as_json else print_rich(*_tables(result), piped_columns=COLUMNS)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _tables(result: Any) -> list[Any]:
    from kvarena.experiments.capacity_study import answer_table, parts_table, sizing_table

    tables = [sizing_table(result, panel) for panel in result.panels]
    tables += [answer_table(result, panel) for panel in result.panels]
    return tables + [parts_table(result, panel) for panel in result.panels]
