"""The command `kvarena report`. Imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:\n
kvarena report out/chat\n
kvarena report results/claims --out claims.html\n
kvarena report results/h200/kernels.json --out kernels.html\n
kvarena report results/laws.csv --out laws.html"""


def add_report_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=EXAMPLES)(report)


def report(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT", help="What a command wrote: its folder, table, JSON file or log.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in RESULT, or here for a file.")
    ] = None,
) -> None:
    """Write one self-contained page of a result of any kind that kvarena verify kinds lists: tables, figures, config
    and provenance; of long tables the first 200 rows. Warns when files were changed since they were written. A folder
    of several results has no page: give one of them; nor has what an interrupted command left."""
    from kvarena.experiments.changed import changed_words
    from kvarena.experiments.outputs import check_file
    from kvarena.experiments.partial import refuse_partial
    from kvarena.experiments.report_pages import write_report_page

    refuse_partial(result)
    place = out or (result if result.is_dir() else Path()) / "report.html"
    check_file(place, "--out", (".html",), ("<meta name='schema_version'",))
    write_report_page(result, place)
    if changed := changed_words(result):
        print(changed, file=sys.stderr)
    print(f"{place}", file=sys.stdout)
