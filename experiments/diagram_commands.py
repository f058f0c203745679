"""`kvarena diagram`: state and sequence diagrams drawn from a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:\n
kvarena diagram states\n
kvarena diagram request --out request.md\n
kvarena diagram states --allocator token:page_size=16"""
PAGES = 48


def add_diagram_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=EXAMPLES)(diagram)


def diagram(
    what: Annotated[
        str, typer.Argument(help="states: what a page passes through; request: one request, verb by verb.")
    ],
    allocator: Annotated[
        list[str] | None, typer.Option(help="As in compare; default: block with pages of 4, and token. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write it as Markdown with Mermaid blocks.")] = None,
) -> None:
    """Draw the states of pages with every transition counted, or one request through each design, as Mermaid text."""
    from kvarena.experiments.commands import allocator_specs
    from kvarena.experiments.outputs import check_file, whole
    from kvarena.experiments.page_states import request_diagram, state_diagram, watch
    from kvarena.experiments.specs import allocator_entries

    if what not in ("states", "request"):
        raise ValueError(f"diagram: expected states or request, found {what!r}")
    check_file(out, "--out", (".md",), ("```mermaid",))
    parts = []
    for entry in allocator_entries(allocator_specs(allocator or ["block:page_size=4", "token"])):
        pool = entry.build(PAGES)
        text = state_diagram(watch(pool)) if what == "states" else request_diagram(pool)
        parts.append(f"**{entry.label}**\n\n```mermaid\n{text}\n```")
    page = "\n\n".join(parts) + "\n"
    if out is None:
        print(page, end="")
        return
    with whole(out) as partial:
        partial.write_text(page, encoding="utf-8")
    print(out, file=sys.stderr)
