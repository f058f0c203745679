"""`kvarena verify`: are the allocators still the upstreams', and does a result folder add up?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

ABSENT = 3  # exit code: the real package is not there, or nothing can be recomputed: nothing was compared

verify_app = typer.Typer(
    name="verify",
    help="Compare decisions with the real packages, and results with their rows.",
    no_args_is_help=True,
)


@verify_app.callback()
def main() -> None:
    """Compare decisions with the real packages, and results with their rows."""


@verify_app.command(epilog="Example: kvarena verify upstream vllm --path wheels/vllm-0.32.0 --ops 100000")
def upstream(
    package: Annotated[str, typer.Argument(help="Whose decisions: vllm or sglang.")],
    ops: Annotated[int, typer.Option(help="Random operations in all, shared by the settings.", min=1)] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the first operations.", min=0)] = 0,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder of an unpacked wheel; else KVARENA_PEERS (folders of them), else what is installed."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Settings whose name contains this; all when left out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the outcomes: a .json file.")] = None,
) -> None:
    """Drive the real allocator and ours with the same random operations and compare every decision.

    Exit code 0: they agree. 1: they differ, and the first difference of each setting is printed. 3: the package is not
    there, and nothing was compared.
    """
    from kvarena.experiments.outputs import check_file
    from kvarena.experiments.upstream import report

    check_file(out, "--out", (".json",), ('"package"', '"differences"', '"settings"'))
    found = report.compare_all(package, path, ops=ops, seed=seed, only=only or [])
    if isinstance(found, str):
        print(f"skipped: {found}")
        raise typer.Exit(ABSENT)
    if out is not None:
        report.write(found, out)
    if found["differences"]:
        raise typer.Exit(1)


@verify_app.command("result", epilog="Example: kvarena verify result out/chat out/sweep")
def result(
    results: Annotated[
        list[Path],
        typer.Argument(help="Results of any kind that `kvarena verify kinds` lists.", metavar="RESULT..."),
    ],
    again: Annotated[bool, typer.Option("--again", help="Also run each config once more; compare every row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a result on stdout.")] = False,
) -> None:
    """Recompute every summary number from the raw rows, check the conservation laws and the hashes of all files.

    Every result is reported. Exit code 1: one does not stand. 2: one cannot be read. 3: nothing of one can be
    recomputed, with the reason. 0: all stand."""
    from kvarena.experiments.style import printable
    from kvarena.experiments.verify_result import verdict_json, verify

    codes = set()
    for path in results:
        try:
            verdict = verify(path, again=again)
        except ValueError as error:
            print(f"kvarena: {printable(str(error))}", file=sys.stderr)
            codes.add(2)
            continue
        codes.add(1 if not verdict.stands else ABSENT if verdict.why_not else 0)
        for line in [verdict_json(verdict)] if as_json else verdict.lines():
            print(line if as_json else printable(line))
    raise typer.Exit(next(code for code in (1, 2, ABSENT, 0) if code in codes))


@verify_app.command(epilog="Example: kvarena verify kinds")
def kinds() -> None:
    """List the kinds of result: what writes them, and what is recomputed of them or why nothing is."""
    from kvarena.experiments.verify_kinds import kind_lines

    print("\n".join(kind_lines()))
