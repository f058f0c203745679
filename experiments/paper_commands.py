"""`kvarena paper`: all figures and tables of the documents, redrawn and compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:\n
kvarena paper\n
kvarena paper --rerun cpu\n
kvarena paper --update"""


def add_paper_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=EXAMPLES)(paper)


def paper(
    out: Annotated[Path, typer.Option(help="Where the redrawn ones go.")] = Path("out/paper"),
    only: Annotated[list[str] | None, typer.Option(help="Only targets that contain this. Repeatable.")] = None,
    rerun: Annotated[str | None, typer.Option(help="Make the inputs anew first: cpu or gpu.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Write the committed files and ARTIFACT.md.")] = False,
) -> None:
    """Redraw every figure and table of README and docs from saved results; exit code 1 when one differs."""
    from kvarena.experiments.outputs import refuse_unwritable
    from kvarena.experiments.paper import ARTIFACT, artifact, load_items, redraw, run_quietly

    if rerun not in (None, "cpu", "gpu"):
        raise ValueError(f"--rerun: expected cpu or gpu, found {rerun!r}")
    refuse_unwritable(out / "file")
    root = Path()
    every = load_items(root)
    items = [item for item in every if only is None or any(part in item.target for part in only)]
    for part in only or []:
        if not any(part in item.target for item in every):
            raise ValueError(f"--only: expected a part of {', '.join(item.target for item in every)}; found {part!r}")
    for arguments in dict.fromkeys(item.rerun for item in items if rerun and item.on_gpu == (rerun == "gpu")):
        print(f"kvarena {' '.join(arguments)}", file=sys.stderr, flush=True)
        run_quietly(list(arguments))
    faults = 0
    for outcome in redraw(items, root, out, run_quietly, update=update):
        faults += bool(outcome.fault)
        print(
            f"{'DIFFERS' if outcome.fault else 'same   '}  {outcome.item.target}  {outcome.fault}".rstrip(), flush=True
        )
    page = artifact(every, root)
    if update:
        ARTIFACT.write_text(page, encoding="utf-8")
    elif not ARTIFACT.is_file() or ARTIFACT.read_text(encoding="utf-8") != page:
        faults += 1
        print(f"DIFFERS  {ARTIFACT}  `kvarena paper --update` writes it")
    raise typer.Exit(1 if faults else 0)
