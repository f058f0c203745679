"""The commands that look inside a design: aged pools, timelines. Each imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from kvarena.experiments.console import Json, print_rich, print_rows

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]

AGED_EXAMPLES = """Examples:\n
kvarena aged\n
kvarena aged --figure aged.pdf\n
kvarena aged --hours 2 --out out/layouts"""

TIMELINE_EXAMPLES = """Examples:\n
kvarena timeline out/chat --out chat.json\n
kvarena timeline out/chat --allocator sglang --figure pool.png"""

PAGESIZE_EXAMPLES = """Examples:\n
kvarena pagesize chat agents --out out/pagesize --figure pagesize.pdf\n
kvarena pagesize --saved results/pagesize --figure pagesize.png"""

LAWS_EXAMPLES = """Examples:\n
kvarena laws\n
kvarena laws agents --requests 300 --figure laws.pdf --out laws.csv"""


def add_insight_commands(app: typer.Typer) -> None:
    """Mount the commands of this module."""
    app.command(epilog=AGED_EXAMPLES)(aged)
    app.command(epilog=TIMELINE_EXAMPLES)(timeline)
    app.command(epilog=PAGESIZE_EXAMPLES)(pagesize)
    app.command(epilog=LAWS_EXAMPLES)(laws)


def aged(
    hours: Annotated[
        float | None, typer.Option(help="Age pools anew for so many simulated hours (2: as the shipped ones).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the layouts and the table over churn.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it: .png, .pdf or .svg.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say in how long runs the slots of live requests lie after hours of churn; without --hours, as shipped."""
    from kvarena.experiments import aged as of
    from kvarena.experiments.outputs import check_figure

    check_figure(figure)
    if hours is None:
        if out is not None or seed:
            raise ValueError("aged: --out and --seed age pools anew and need --hours")
        layouts, table = of.load_layouts(), of.load_churn()
    else:
        config = of.AgeConfig(hours=hours, seed=seed)
        if out is not None:
            of.refuse_other(out)
        done = [of.age(one, config, None if quiet else _Ticks(one.name)) for one in of.ALLOCATORS]
        layouts = {one.allocator.name: (one.allocator.spec["page_size"], list(one.layout.values())) for one in done}
        table = of.churn_table(done)
        if out is not None:
            print(*of.save(done, config, out), sep="\n", file=sys.stderr)
    if figure is not None:
        _draw(figure, table, layouts, shipped=hours is None)
    print_rows(table) if as_json else print_rich(of.aged_table(table))


def timeline(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="Folder of a finished comparison or engine run.")],
    allocator: Annotated[str | None, typer.Option(help="Which one; default: the first.")] = None,
    pool: Annotated[str | None, typer.Option(help="Pool size; default: the result's reference pool.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which seed; default: the first.", min=0)] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON for ui.perfetto.dev: requests, steps, pool, evictions. .gz packs it.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Pages over time, coloured by state: .png, .pdf or .svg.")] = None,
) -> None:
    """Replay one cell of a result and show it step by step: a trace for Perfetto, and a map of the pool."""
    from kvarena.experiments.budget import parse_bytes
    from kvarena.experiments.changed import warn_of_changes
    from kvarena.experiments.outputs import check_figure, check_file, save_one
    from kvarena.experiments.pool_map import draw_pool_map
    from kvarena.experiments.timeline import summary_lines
    from kvarena.experiments.timeline import timeline as of
    from kvarena.experiments.timeline_export import write_trace_events

    check_file(out, "--out", (".json", ".json.gz"), ('"displayTimeUnit"', '"evictions_by_reason"'))
    check_figure(figure)
    size = None if pool is None else parse_bytes(f"{pool} B" if pool.isdigit() else pool)
    made = of(result, allocator=allocator, pool=size, seed=seed)
    warn_of_changes(result)
    if out is not None:
        print(f"{write_trace_events(made, out):,} events in {out}; open it at ui.perfetto.dev", file=sys.stderr)
    if figure is not None:
        save_one(draw_pool_map(made), figure)
    print("\n".join(summary_lines(made)))


def pagesize(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD...]", help="Built-in workloads; default: five of them.")
    ] = None,
    saved: Annotated[Path | None, typer.Option(help="Show and draw a saved study, measuring nothing.")] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first so many requests of each.", min=1)] = None,
    pool: Annotated[str, typer.Option(help="Pool of the replays.")] = "40 %",
    rounds: Annotated[int, typer.Option(help="Rounds of the host times, medians taken.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for the study.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw up to three workloads: .png, .pdf or .svg.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put the page size on one axis, 1 to 256: hits, waste, concurrency, kernel and host time of both designs."""
    from kvarena.experiments import one_axis as of
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.one_axis_plots import draw_axis
    from kvarena.experiments.outputs import check_figure, save_one

    check_figure(figure)
    if saved is not None:
        if out is not None or requests is not None:
            raise ValueError("pagesize: --saved measures nothing; --out and --requests are for a new study")
        with reading(saved):
            made = of.load(saved)
        names = workloads or None
        if names and (unknown := set(names) - set(made.rows["workload"])):
            raise ValueError(f"pagesize: the saved study has no {', '.join(sorted(unknown))}")
    else:
        names = workloads or list(of.WORKLOADS)
        if out is not None:
            of.refuse_other(out)
        tick = None if quiet else _Ticks("pagesize", "replays", 18)
        made = of.study(names, pool=pool, requests=requests, rounds=rounds, tick=tick, out=out)
    if out is not None:
        print(f"study in {of.save(made, out)}", file=sys.stderr)
    with reading(saved):
        if figure is not None:
            save_one(draw_axis(made, of.kernel_times(), names and names[:3]), figure)
        print_rows(made.rows) if as_json else print_rich(of.best_table(made))


def laws(
    workload: Annotated[str, typer.Argument(help="A built-in workload or a trace with token ids.")] = "chat",
    requests: Annotated[int, typer.Option(help="Only its first so many requests.", min=2)] = 600,
    saved: Annotated[Path | None, typer.Option(help="Show and draw an earlier --out; nothing is run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table: .csv or .parquet.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it: .png, .pdf or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Predict rounding, tails, tables, gains and break-even in closed form, then run both designs and compare."""
    from kvarena.experiments import laws as of
    from kvarena.experiments.foreign import reading
    from kvarena.experiments.laws_plots import draw_laws
    from kvarena.experiments.outputs import check_figure, check_table, save_one
    from kvarena.experiments.study import write_table

    check_table(out, ("law", "predicted", "measured", "tolerance", "holds"))
    check_figure(figure)
    if saved is None:
        found = of.laws(workload, requests=requests)
        about = of.about_laws(workload, requests)
    else:
        with reading(saved):
            found, about = of.load_laws(saved)
    with reading(saved):
        if out is not None:
            write_table(of.laws_frame(found, about), out)
        if figure is not None:
            save_one(draw_laws(found, about), figure)
        print_rows(of.laws_frame(found, about)) if as_json else print_rich(of.laws_table(found))


def _draw(path: Path, table: Any, layouts: Any, *, shipped: bool) -> None:
    """With the measured cost of the layouts, where they are those that were measured."""
    from kvarena.experiments.aged_plots import draw_aged, kernel_costs
    from kvarena.experiments.outputs import save_one

    footer = "chat workload, replies of 400 tokens in the median; simulated clock"
    costs = kernel_costs() if shipped else None
    if costs is not None and len(costs):
        footer += "; kernels measured on an H200"
    save_one(draw_aged(table, layouts, footer, costs), path)


class _Ticks:
    """Counts on stderr what has been done."""

    def __init__(self, what: str, unit: str = "requests", every: int = 1000) -> None:
        self._what = what
        self._unit = unit
        self._every = every
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if self._count % self._every == 0:
            print(f"{self._what}: {self._count:,} {self._unit}", file=sys.stderr)
