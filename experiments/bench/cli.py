"""`kvarena bench`: what the allocators cost on the host, what the kernels reach on a card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(
    name="bench", help="Measure allocators on the host and kernels on a card.", no_args_is_help=True
)


@bench_app.callback()
def main() -> None:
    """Measure allocators on the host and kernels on a card."""


@bench_app.command(
    epilog="Examples: kvarena bench allocators --only replay --only op --out out/bench; "
    "kvarena bench allocators --runs 3 --out results/allocators; "
    "kvarena bench allocators --saved results/allocators/run1 --saved results/allocators/run2 --out out/shown"
)
def allocators(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Studies: counts, replay, op, latency, growth, memory, adapter; all when left out."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for rows, table and figure; rows on stdout without it.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Whole runs, OUT/run1 and so on, their spread and medians.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="Turns of each contender, in alternation.", min=1)] = 5,
    samples: Annotated[int, typer.Option(help="Samples of each operation, over all turns.", min=1)] = 40,
    requests: Annotated[int, typer.Option(help="Requests of the replay.", min=50)] = 4000,
    largest: Annotated[int, typer.Option(help="Largest pool and tree of the growth study.", min=10_000)] = 1_000_000,
    quick: Annotated[bool, typer.Option(help="A smoke run of seconds; its times mean nothing.")] = False,
    saved: Annotated[
        list[Path] | None, typer.Option(help="Show saved runs laid together, medians of all; nothing is run.")
    ] = None,
) -> None:
    """Time both allocator designs: operations, replay, latencies, growth, memory, operation counts.

    The real packages take their turns where they can be imported or KVARENA_PEERS names folders of unpacked wheels;
    latencies are of a recorded trace where KVARENA_TRACES holds it. Rows are JSON lines on stdout, or in
    OUT/allocators.jsonl; the table for people goes to stderr, a short one in Markdown to OUT/cost.md.
    """
    from kvarena.experiments.bench import alloc_saved, alloc_tables
    from kvarena.experiments.bench import allocators as bench
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.results import refuse_others

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if out is not None:
        ours = any((folder / alloc_saved.ROWS_FILE).is_file() for folder in (out, *out.glob("run*")))
        refuse_others(out, ours, "an earlier run")
    if saved and runs > 1:
        raise ValueError("--runs: with --saved nothing is run; expected one of them")
    if saved:
        with reading(saved[0], "rows of `kvarena bench allocators`"):
            rows = alloc_saved.together([alloc_saved.load(folder) for folder in saved])
    else:
        effort = bench.Effort.quick() if quick else bench.Effort(requests, repeats, samples, largest)
        if runs > 1:
            if out is None:
                raise ValueError("--runs: several runs are saved, so --out is needed")
            rows = alloc_saved.several(runs, lambda: bench.run(only or bench.STUDIES, effort, say), out, say)
        else:
            rows = list(bench.run(only or bench.STUDIES, effort, say))
    with reading(saved[0] if saved else None, "rows of `kvarena bench allocators`"):
        print(alloc_tables.text(rows), file=sys.stderr)
    if out is None:
        import json

        for row in rows:
            print(json.dumps(row, separators=(",", ":")))
        return
    written = alloc_saved.save_rows(rows, out)
    written += alloc_tables.save(rows, out)
    print(f"in {out}: {', '.join(path.name for path in written)}", file=sys.stderr)


@bench_app.command(epilog="Example: kvarena bench kernels --figures out/figures --saved results/h200/kernels.json")
def kernels(
    part: Annotated[
        str | None, typer.Option(help="What to run on this card: check, decode, rest, safety or sanitize.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Results file; default results/CARD/kernels.json.")] = None,
    peers: Annotated[str, typer.Option(help="Kernels to run beside ours; what cannot be imported is skipped.")] = (
        "fa3,flashinfer,sdpa,vllm,sglang"
    ),
    budget: Annotated[float, typer.Option(help="Seconds; cells that no longer fit are left out and say so.")] = 540,
    saved: Annotated[Path | None, typer.Option(help="A saved results file to show, without a card.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for figures from the results, saved or new.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also over figures of other results, and other files.")
    ] = False,
) -> None:
    """Check the kernels on this card, then time them beside peers and ceilings; or show a saved result.

    A run's rows are JSON lines on stdout, its tables and targets go to stderr; what is saved is shown on stdout. Exit
    code 1: a row has an error.
    """
    if part is None and saved is None:
        raise ValueError("--part or --saved: expected one of them, found neither")
    from kvarena.experiments.bench import kernel_plots, tables
    from kvarena.experiments.foreign import reading

    failed = 0
    if part is not None:
        from kvarena.experiments.bench.kernels import bench_kernels, default_out

        failed = bench_kernels(part, out, [name for name in peers.split(",") if name], budget)
        saved = out or default_out(part)
    with reading(saved):
        result = kernel_plots.load_rows(saved or Path())
        if part is None:
            tables.print_tables(result, sys.stdout)
        if figures is not None:
            written = kernel_plots.save_figures(result, figures, force)
            print(f"{len(written)} files in {figures}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


@bench_app.command("spread", epilog="Example: kvarena bench spread out/run1 out/run2 out/run3")
def spread_of_runs(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `bench allocators --out` wrote.", exists=True)],
) -> None:
    """Show how far the values of several runs of `bench allocators` lie apart."""
    from kvarena.experiments.bench import alloc_saved, alloc_tables
    from kvarena.experiments.foreign import reading

    with reading(folders[0], "rows of `kvarena bench allocators`"):
        print(alloc_tables.spread([alloc_saved.load(folder) for folder in folders]), end="")
