"""The command `kvarena report`. Imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:\n
kvarena report out/chat\n
kvarena report results/claims --out claims.html\n
kvarena report results/h200/kernels.json --out kernels.html"""


def add_report_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=EXAMPLES)(report)


def report(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT", help="Folder of a result or study of any kind, or a kernels.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in RESULT, or here for a file.")
    ] = None,
) -> None:
    """Write one self-contained page: tables, figures, config and provenance of a comparison, an engine run, a sweep, a
    ladder, ablations, claims, resamples, or a page-size, capacity, rate or benchmark study."""
    from kvarena.experiments.outputs import check_file
    from kvarena.experiments.report_pages import write_report_page

    place = out or (result if result.is_dir() else Path()) / "report.html"
    check_file(place, "--out", (".html",), ("<meta name='schema_version'",))
    write_report_page(result, place)
    print(f"{place}", file=sys.stdout)
