"""What stands between the study's commands and its work: choosing cells by what was typed, and tables to print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from kvarena.experiments.budget import format_bytes, parse_bytes
from kvarena.experiments.explain import Explanation, explain, summarise
from kvarena.experiments.style import printable

if TYPE_CHECKING:
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


def write_table(found: list[Explanation], out: Path) -> None:
    """A row a request and allocator, as CSV or Parquet by the name's ending. Raises ValueError when it cannot be."""
    table = pd.concat([one.table for one in found], ignore_index=True)
    partial = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".csv":
            table.to_csv(partial, index=False, lineterminator="\n")
        else:
            from kvarena.experiments.results import write_parquet

            write_parquet(table, partial)
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{out}: cannot be written ({error.strerror})") from None


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
