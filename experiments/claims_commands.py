"""`kvarena claims`: published numbers, tested."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

if TYPE_CHECKING:
    from kvarena.experiments.claims import Finding
    from rich.table import Table

EXAMPLES = """Examples:\n
kvarena claims --list\n
kvarena claims shared_prompt_201_pages\n
kvarena claims --out out/claims"""


def add_claims_command(app: typer.Typer) -> None:
    """Mount the command of this module."""
    app.command(epilog=EXAMPLES)(claims)


def claims(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CLAIM...]", help="Ids; default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for claims.json and claims.md.")] = None,
    saved: Annotated[Path | None, typer.Option(help="Show findings of an earlier --out; nothing is run.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List ids and claims; nothing is run.")] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Test published and folklore numbers: reproduced, refuted, depends on what, or not tested and why."""
    from kvarena.experiments.claims import (
        load_claims,
        load_findings,
        refuse_other,
        save_findings,
        test_claim,
        write_page,
    )

    chosen = load_claims(names or None)
    if listed and as_json:
        print_rows({"claim": claim.id, "said": claim.claim, "source": claim.source} for claim in chosen)
        return
    if listed:
        for claim in chosen:
            print(f"{claim.id:32} {claim.claim}")
        return
    if out is not None:
        refuse_other(out)
    if saved is not None:
        from kvarena.experiments.foreign import reading

        wanted = {claim.id for claim in chosen}
        with reading(saved):
            kept = [finding for finding in load_findings(saved) if finding.claim.id in wanted]
            if out is not None:
                write_page(kept, out)
            print_rows(map(_row, kept)) if as_json else _print(kept, len(chosen) == 1)
        return
    found: list[Finding] = []
    try:
        for number, claim in enumerate(chosen, 1):
            if not quiet:
                print(f"claim {number} of {len(chosen)}: {claim.id}", file=sys.stderr, flush=True)
            found.append(test_claim(claim))
            if out is not None:  # after each: what is found stays when the next is interrupted
                save_findings(found, out)
    except KeyboardInterrupt:
        raise _interrupted(len(found), len(chosen), out) from None
    print_rows(map(_row, found)) if as_json else _print(found, len(found) == 1)


def _row(finding: Finding) -> dict[str, Any]:
    claim = {"claim": finding.claim.id, "verdict": finding.verdict}
    return {**claim, "values": finding.values, "reason": finding.reason, "sha256": finding.claim.sha256}


def _interrupted(done: int, asked: int, out: Path | None) -> KeyboardInterrupt:
    from kvarena.experiments.partial import Interrupted

    if out is None or not done:
        return Interrupted("nothing was kept")
    return Interrupted(f"{done} of {asked} claims are tested, findings in {out}; give the others by name to go on")


def _print(found: list[Finding], whole: bool) -> None:
    from rich.text import Text

    notes = [Text(found[0].claim.note)] if whole and found[0].claim.note else []
    counts = {v: sum(f.verdict == v for f in found) for v in ("reproduced", "refuted", "depends", "not tested")}
    words = Text(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    print_rich(findings_table(found, whole=whole), *notes, words)


def findings_table(found: list[Finding], *, whole: bool) -> Table:
    """A row a claim and expectation. `whole`: the claim's words in place of its id."""
    from kvarena.experiments.claims import claimed, measured, predicted
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for head in ("claim", "verdict", "when", "claimed", "measured", "predicted"):
        table.add_column(head)
    for finding in found:
        first: tuple[str, str] = (finding.claim.claim if whole else finding.claim.id, finding.verdict)
        if finding.reason:
            table.add_row(*map(Text, (*first, finding.reason, "", "", "")))
            first = ("", "beside it")
        for place, e in enumerate(finding.claim.expect if finding.values else ()):
            cells = (e.when, claimed(e), measured(finding, e), predicted(finding, e))
            table.add_row(*map(Text, (*(first if place == 0 else ("", "")), *cells)))
        table.add_section()
    return table
