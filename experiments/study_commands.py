"""The commands of a study: bounds, explain, sweep. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

if TYPE_CHECKING:
    import pandas as pd
    from kvarena.experiments.explain import Explanation

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field; repeatable.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]

EXPLAIN_EXAMPLES = """Examples:\n
kvarena explain out/chat\n
kvarena explain out/chat --allocator vllm --request s0.t1\n
kvarena explain out/study --out reasons.csv\n
kvarena explain --trace chat --allocator vllm --allocator block:page_size=64 --pool '450 MiB' --out reasons.csv"""
BOUNDS_EXAMPLES = "Example: kvarena bounds out/chat --out bounds.csv --figure bounds.pdf"
SWEEP_EXAMPLES = """Examples:\n
kvarena sweep my-sweep.toml --out out/sweep\n
kvarena sweep my-sweep.toml --out out/sweep --jobs 2 --set requests=1000\n
kvarena sweep my-sweep.toml --out out/sweep --ray local"""


def add_study_commands(app: typer.Typer) -> None:
    """Mount the commands of this module."""
    app.command(epilog=BOUNDS_EXAMPLES)(bounds)
    app.command(epilog=EXPLAIN_EXAMPLES)(explain)
    app.command(epilog=SWEEP_EXAMPLES)(sweep)


def bounds(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="Folder of a finished comparison or engine run.")],
    out: Annotated[Path | None, typer.Option(help="Write the table: .csv or .parquet.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it: .png, .pdf or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Say how far each allocator is from random eviction, clairvoyance and an infinite cache, at its own page size."""
    from kvarena.experiments.bounds import RATES
    from kvarena.experiments.bounds import bounds as bounds_of
    from kvarena.experiments.changed import warn_of_changes
    from kvarena.experiments.outputs import check_figure, check_table
    from kvarena.experiments.results import load_result
    from kvarena.experiments.study import bounds_table, draw_bounds, write_table

    check_table(out, RATES)
    check_figure(figure)
    loaded = load_result(result)
    warn_of_changes(result)
    table = bounds_of(loaded)
    if out is not None:
        write_table(table, out)
    if figure is not None:
        draw_bounds(loaded, table, figure)
    print_rows(table) if as_json else print_rich(bounds_table(loaded, table))


def explain(
    result: Annotated[
        Path | None, typer.Argument(metavar="[RESULT]", help="Folder of a comparison, an engine run, or a sweep.")
    ] = None,
    request: Annotated[str | None, typer.Option(help="Tell one request's prompt, token by token.")] = None,
    allocator: Annotated[
        list[str] | None, typer.Option(help="Which ones; without RESULT, also block:page_size=64. Repeatable.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Pool size; default: the result's reference pool.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which seed; default: the first.", min=0)] = None,
    trace: Annotated[str | None, typer.Option(help="Without RESULT: path or name of a trace.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table over all requests: .csv or .parquet.")] = None,
    saved: Annotated[
        Path | None,
        typer.Option(help="Show what an earlier --out of a sweep holds; --out FILE.md writes it as a page."),
    ] = None,
    set_: Sets = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say why each prompt token was not served from the cache: one reason each, adding up to the misses."""
    from kvarena.experiments.changed import warn_of_changes
    from kvarena.experiments.explain import REASONS
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.outputs import check_table
    from kvarena.experiments.study import explain_folder, explain_trace, write_table

    if saved is not None:
        if any(given is not None for given in (result, request, allocator, pool, seed, trace)) or set_:
            raise ValueError("explain: --saved shows a table as it is; no other option goes with it but --out")
        with reading(saved):
            _show_reasons(saved, out, as_json)
        return
    check_table(out, REASONS)
    tick = None if quiet else _Ticker()
    if result is not None:
        if trace is not None or set_:
            raise ValueError("explain: RESULT says what was run; --trace and --set are for explaining without one")
        if (result / "sweep.json").is_file():
            chosen = any(given is not None for given in (request, allocator, pool, seed))
            _explain_sweep(result, out, tick, chosen, as_json)
            warn_of_changes(result)
            return
        found = explain_folder(result, allocator, pool, seed, tick)
        warn_of_changes(result)
    else:
        found = explain_trace(trace, allocator, pool, seed, set_ or [], tick)
    if tick is not None:
        tick.end()
    if out is not None:
        write_table(_rows(found), out)
        print(f"table in {out}", file=sys.stderr)
    if as_json:
        rows = _rows(found)
        print_rows(rows if request is None else rows[rows["request_id"] == request])
    else:
        _print_explanations(found, request)


class _Ticker:
    """Counts replayed requests on stderr: in place on a terminal, the last count alone in a log."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if self._count % 500 == 0 and sys.stderr.isatty():
            print(f"\rreplayed {self._count:,} requests", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """The last count, and a line of its own for what comes next."""
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}replayed {self._count:,} requests", file=sys.stderr, flush=True)


def _rows(found: list[Explanation]) -> pd.DataFrame:
    import pandas as pd

    parts = [part for one in found for part in (one.table, one.readmitted) if len(part)]
    return pd.concat(parts, ignore_index=True)


def _explain_sweep(folder: Path, out: Path | None, tick: _Ticker | None, chosen: bool, as_json: bool) -> None:
    """Every comparison of a sweep, at every pool: whether all adds up, and the sums."""
    from kvarena.experiments.study import explain_sweep, sweep_reasons_table, write_table

    if chosen:
        raise ValueError("explain: a sweep is explained whole; give one of its cells (FOLDER/cells/KEY) to choose")
    table = explain_sweep(folder, tick)
    if tick is not None:
        tick.end()
    if out is not None:
        write_table(table, out)
        print(f"table in {out}", file=sys.stderr)
    print_rows(table) if as_json else print_rich(sweep_reasons_table(table))


def _show_reasons(saved: Path, out: Path | None, as_json: bool) -> None:
    from kvarena.experiments.outputs import check_file, whole
    from kvarena.experiments.study import load_reasons, study_page, sweep_reasons_table

    check_file(out, "--out", (".md",), ("| pool |",))
    table = load_reasons(saved)
    if out is not None:
        with whole(out) as partial:
            partial.write_text(study_page(table), encoding="utf-8")
    print_rows(table) if as_json else print_rich(sweep_reasons_table(table))


def _print_explanations(found: list[Explanation], request: str | None) -> None:
    from kvarena.experiments.study import explanation_table, readmission_table

    if request is not None:
        print("\n\n".join("\n".join(one.tell(request)) for one in found))
        return
    print_rich(explanation_table(found))
    if any(len(one.readmitted) for one in found):
        print_rich(readmission_table(found))


def sweep(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="A config with a table \\[sweep], or several \\[\\[sweep]].")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the sweep; an earlier one there is carried on.")],
    jobs: Annotated[int | None, typer.Option(help="Processes at once; default: one a core.", min=1)] = None,
    ray: Annotated[str | None, typer.Option(help="'local', or the address of a Ray cluster.")] = None,
    set_: Sets = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a grid or list of configs, in parallel and resumable. Exit code 1 when a cell failed."""
    from kvarena.experiments.sweep import sweep as run_sweep

    found = run_sweep(config, out, sets=set_ or [], jobs=jobs, ray=ray, progress=not quiet)
    finished = sum(cell["state"] == "finished" for cell in found.cells)
    if as_json:
        print_rows(found.table)
    text = f"{finished} of {len(found.cells)} cells finished: {out / 'sweep.csv'}"
    print(text, file=sys.stderr if as_json else sys.stdout)
    for key, failure in sorted(found.failures.items()):
        print(f"failed: {failure['point']}: {failure['error']} ({out / 'failed' / key}.json)", file=sys.stderr)
    raise typer.Exit(1 if found.failures else 0)
