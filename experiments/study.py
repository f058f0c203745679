"""What stands between the study's commands and its work: choosing cells by what was typed, and tables to print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments.budget import format_bytes, parse_bytes
from kvarena.experiments.explain import Explanation, explain, summarise
from kvarena.experiments.outputs import save_one, whole
from kvarena.experiments.style import printable

if TYPE_CHECKING:
    from kvarena.experiments.results import Result
    from rich.table import Table

Tick = Callable[[], None] | None


def explain_folder(
    folder: Path, allocators: list[str] | None, pool: str | None, seed: int | None, tick: Tick
) -> list[Explanation]:
    """Explain a finished comparison. `pool` is a size with a unit."""
    from kvarena.experiments.results import load_result

    result = load_result(folder)
    size = None if pool is None else parse_bytes(pool if not pool.isdigit() else f"{pool} B")
    names = list(dict.fromkeys(allocators)) if allocators else [None]
    return [one for name in names for one in explain(result, allocator=name, pool=size, seed=seed, tick=tick)]


def explain_trace(
    trace: str | None, allocators: list[str] | None, pool: str | None, seed: int | None, sets: list[str], tick: Tick
) -> list[Explanation]:
    """Explain a trace that was not compared yet, under the config that the command line describes."""
    from kvarena.experiments.commands import compare_config

    flags = {
        "allocators": allocators,
        "pool": None if pool is None else [pool],
        "seeds": None if seed is None else [seed],
    }
    config = compare_config(None, sets, trace=trace, model=None, requests=None, **flags)
    return explain(config, tick=tick)


def write_table(table: pd.DataFrame, out: Path) -> None:
    """As CSV or Parquet by the name's ending, whole or not at all. Raises ValueError when it cannot be written."""
    from kvarena.experiments.results import write_parquet

    with whole(out) as partial:
        if out.suffix.lower() == ".csv":
            table.to_csv(partial, index=False, lineterminator="\n")
        else:
            write_parquet(table, partial)


def draw_bounds(result: Result, table: pd.DataFrame, path: Path) -> None:
    """The figure of the bounds with its footer. Raises ValueError when it cannot be written."""
    import matplotlib as mpl
    from kvarena.experiments.bounds import plot_bounds
    from kvarena.experiments.report import result_footer, result_source
    from kvarena.experiments.style import STYLE, add_footer

    with mpl.rc_context(STYLE):
        figure: Any = plot_bounds(result, table=table).get_figure()
        add_footer(figure, result_footer(result))
        save_one(figure, path, result_source(result))


def bounds_table(result: Result, table: pd.DataFrame) -> Table:
    """Token hit rates at each pool, means over seeds, and the regret to clairvoyance."""
    from rich.table import Table

    shown = Table(title=f"Token hit rate between its bounds, {printable(result.manifest['trace'])}")
    heads = ("pool", "allocator", "random", "its own", "clairvoyant", "infinite", "regret, points")
    for head in heads:
        shown.add_column(head, justify="left" if head == "allocator" else "right")
    columns = ["random", "policy", "clairvoyant", "infinite"]
    means = table.groupby(["pool_bytes", "allocator"], sort=False)[[*columns, "regret"]].mean()
    for row in means.reset_index().to_dict("records"):
        rates = ["" if pd.isna(row[column]) else f"{100 * row[column]:.2f} %" for column in columns]
        shown.add_row(
            format_bytes(row["pool_bytes"]), printable(result.labels[row["allocator"]]), *rates, f"{row['regret']:.2f}"
        )
    if not table["proven"].all():
        shown.caption = "replies of overlapping requests: clairvoyant is a mark here, not a bound"
    return shown


def explanation_table(found: list[Explanation]) -> Table:
    """Tokens and shares by reason, and who evicted most."""
    from rich.table import Table

    totals = summarise(found)
    pool = int(found[0].table["pool_bytes"].iloc[0])
    requests = len(found[0].table)
    table = Table(title=f"Where the prompt tokens of {requests:,} requests went, pool {format_bytes(pool)}")
    table.add_column("")
    table.add_column("meaning")
    for one in found:
        table.add_column(printable(one.entry.label), justify="right")
    for name, row in totals.iterrows():
        counts = [int(row[one.entry.name]) for one in found]
        if any(counts):
            cells = [
                f"{c:,}  {100 * row[f'{one.entry.name} share']:5.2f} %" for c, one in zip(counts, found, strict=True)
            ]
            table.add_row(str(name).replace("_", " "), str(row["meaning"]), *cells)
    table.add_section()
    table.add_row("prompt tokens", "", *(f"{int(totals[one.entry.name].sum()):,}  100.00 %" for one in found))
    return table
