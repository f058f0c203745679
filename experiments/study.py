"""What stands between the study's commands and its work: choosing cells by what was typed, and tables to print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.allocators.interface import AllocatorError
from kvarena.experiments.alike import CELL_KEYS, unlike_requests
from kvarena.experiments.budget import format_bytes, parse_bytes
from kvarena.experiments.explain import REASONS, Explanation, explain, explain_every_cell, summarise
from kvarena.experiments.outputs import save_one, whole
from kvarena.experiments.style import printable
from kvarena.experiments.sweep_points import alike, headline, shown, value_words, varied
from kvarena.experiments.wrong_kind import reads

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


REASONS_FILE = "reasons.csv"  # of a folder that keeps them
FACTS = ("label", "page_size", "num_pages", "token_hit_rate", "token_hit_rate_last_half", "token_hit_rate_ceiling")


def explain_sweep(folder: Path, tick: Tick = None) -> pd.DataFrame:
    """Explain every finished comparison of a sweep, at every pool: a row a cell, seed, pool and allocator, with the
    fields of the sweep that vary (named as in sweep.csv), its rates, prompt tokens, hit tokens and the tokens of each
    reason, summed over all requests (each of which adds up, or explaining stops with an error). Raises ValueError when
    nothing is finished, or a cell is an engine run."""
    from kvarena.experiments.sweep import open_sweep

    made = open_sweep(folder)
    points = varied({cell["key"]: cell["point"] for cell in made.cells if cell["state"] == "finished"})
    rows = []
    for key, point in points.items():
        result = made.result(key)
        for one in explain_every_cell(result, tick):
            keys = {name: one.table[name].iloc[0] for name in ("seed", "pool_bytes", "allocator")}
            told = {"cell": key, **point, **study_row(result, keys)}
            rows.append({**told, "requests": len(one.table), **_adding_up(one)})
    if not rows:
        raise ValueError(f"{folder}: no finished comparison to explain")
    return pd.DataFrame(rows)


def study_row(result: Result, keys: dict[str, Any]) -> dict[str, Any]:
    """What tells one cell of a comparison from others, and its rates."""
    found = result.summary
    for name, value in keys.items():
        found = found[found[name] == value]
    config = result.config
    told = {"trace": result.manifest["trace"], "unit": config["workload"]["unit"]}
    told |= {"live": config["engine"]["live"], "outputs": config["engine"]["outputs"]}
    return {**told, **keys, **{name: found[name].iloc[0] for name in FACTS}}


@reads("reasons of a sweep")
def load_reasons(path: Path) -> pd.DataFrame:
    """What `explain SWEEP --out` wrote. Raises ValueError when it is something else."""
    try:
        table = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as the reasons of a sweep ({error})") from None
    if missing := {"cell", "trace", "unit", "pool_bytes", "prompt_tokens", *FACTS, *REASONS} - set(table):
        raise ValueError(f"{path}: not the reasons of a sweep: no column {sorted(missing)[0]}")
    return table


def study_page(rows: pd.DataFrame) -> str:
    """A sweep's reasons as Markdown: a table a cell, a line a pool and a column an allocator: token hit rate (points of
    what was evicted before). Means over seeds."""
    parts = []
    for _, cell in rows.groupby("cell", sort=False):
        first = cell.iloc[0]
        sharing = f"{first['live']} at once, " if first["live"] > 1 else ""
        replies = "replies replayed" if first["outputs"] == "replay" else "prompts only"
        by_ids = "an id a page" if (cell["page_size"] == 1).all() else "by ids"
        unit = by_ids if first["unit"] == "ids" else "tokens"
        parts.append(
            f"**{first['trace']}**, {unit}, {sharing}{replies}{headline(cell)}; {first['requests']:,} requests\n"
        )
        names = list(dict.fromkeys(cell["allocator"]))
        parts.append(f"| pool | {' | '.join(names)} |\n| --- | {' | '.join('---:' for _ in names)} |")
        for pool, same in cell.groupby("pool_bytes"):
            room = int(same["num_pages"].iloc[0] * same["page_size"].iloc[0])
            pages = f" ({room:,} ids)" if first["unit"] == "ids" else ""
            shares = [_share(same[same["allocator"] == name]) for name in names]
            parts.append(f"| {format_bytes(int(str(pool)))}{pages} | {' | '.join(shares)} |")
        ceilings = [f"{100 * cell.loc[cell['allocator'] == n, 'token_hit_rate_ceiling'].mean():.2f}" for n in names]
        parts.append(f"| infinite | {' | '.join(ceilings)} |\n")
    return "\n".join(parts)


def _share(rows: pd.DataFrame) -> str:
    evicted = 100 * rows["evicted"].sum() / max(rows["prompt_tokens"].sum() - rows["refused"].sum(), 1)
    return f"{100 * rows['token_hit_rate'].mean():.2f} ({evicted:.2f})"


def _adding_up(one: Explanation) -> dict[str, int]:
    """Tokens over all requests. Raises AllocatorError where those of one request do not add up to its prompt."""
    told = one.table["hit_tokens"] + one.table[list(REASONS)].sum(axis=1)
    if wrong := one.table.loc[told != one.table["num_prompt_tokens"], "request_id"].tolist():
        raise AllocatorError(f"request {wrong[0]}: hits and reasons are not its prompt tokens ({len(wrong)} requests)")
    sums = one.table[["num_prompt_tokens", "hit_tokens", *REASONS]].sum()
    return {"prompt_tokens" if name == "num_prompt_tokens" else str(name): int(n) for name, n in sums.items()}


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
        regret = "" if pd.isna(row["regret"]) else f"{row['regret']:.2f}"
        shown.add_row(format_bytes(row["pool_bytes"]), printable(result.labels[row["allocator"]]), *rates, regret)
    seeds = table["seed"].nunique()
    notes = [f"means of {seeds} seeds"] if seeds > 1 else []
    if not table["proven"].all():
        notes.append("replies of overlapping requests: clairvoyant is a mark here, not a bound")
    notes += unlike_requests(rows for _, rows in result.requests.groupby(list(CELL_KEYS), sort=False))
    shown.caption = "; ".join(notes) or None
    return shown


def explanation_table(found: list[Explanation]) -> Table:
    """Tokens and shares by reason, of one seed and pool."""
    first = found[0].table
    pool, seed = (int(first[key].iloc[0]) for key in ("pool_bytes", "seed"))
    title = f"Where the prompt tokens of {len(first):,} requests went, pool {format_bytes(pool)}, seed {seed}"
    return _reasons_table(title, found, summarise(found), "prompt tokens")


def readmission_table(found: list[Explanation]) -> Table:
    """The same of admissions after a preemption, which find mostly what the request itself had computed."""
    count = sum(len(one.readmitted) for one in found)
    title = f"Apart: tokens of {count:,} admissions after a preemption (what they find of themselves is no reuse)"
    again = [replace(one, table=one.readmitted) for one in found]
    return _reasons_table(title, again, summarise(again), "tokens")


def _reasons_table(title: str, found: list[Explanation], totals: pd.DataFrame, all_of: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("")
    table.add_column("meaning")
    for one in found:
        table.add_column(printable(one.entry.label), justify="right")
    refused = [int(one.table["refused"].sum()) for one in found]
    for name, row in totals.drop("refused").iterrows():
        counts = [int(row[one.entry.name]) for one in found]
        if any(counts):
            cells = [
                f"{c:,}  {100 * row[f'{one.entry.name} share']:5.2f} %" for c, one in zip(counts, found, strict=True)
            ]
            table.add_row(str(name).replace("_", " "), str(row["meaning"]), *cells)
    table.add_section()
    admitted = [int(totals[one.entry.name].sum()) - n for one, n in zip(found, refused, strict=True)]
    table.add_row(all_of, "", *(f"{n:,}  100.00 %" if n else "0" for n in admitted))
    if any(refused):
        table.add_row("refused", f"{REASONS['refused']}: in no share", *(f"{n:,}{' ' * 10}" for n in refused))
    return table


def sweep_reasons_table(rows: pd.DataFrame) -> Table:
    """A row a trace, swept fields, pool and allocator of an explained sweep: shares of the prompt tokens that were
    admitted (refused: of all), means over seeds."""
    from rich.table import Table

    reasons = [name for name in REASONS if rows[name].any()]
    table = Table(title=f"Where the prompt tokens went: {len(rows):,} cells, every request adds up")
    fields = shown(rows)
    keyed = ["cell"] if alike(rows, fields) else []
    for head in (*keyed, "trace", *fields.values(), "pool", "allocator"):
        table.add_column(head)
    points = rows.drop_duplicates("cell").set_index("cell")[[*fields]]
    for head in ("served", *reasons):
        table.add_column(f"{head.replace('_', ' ')}, %{' of all' if head == 'refused' else ''}", justify="right")
    sums = rows.groupby(["cell", "trace", "pool_bytes", "allocator"], sort=False)[
        ["prompt_tokens", "hit_tokens", *reasons]
    ].sum()
    for row in sums.reset_index().to_dict("records"):
        of = {"refused": row["prompt_tokens"]}
        admitted = row["prompt_tokens"] - row.get("refused", 0)
        shares = [100 * row[name] / max(of.get(name, admitted), 1) for name in ("hit_tokens", *reasons)]
        point = [printable(value_words(value)) for value in points.loc[row["cell"]]]
        told = (
            *[row[name][:10] for name in keyed],
            printable(row["trace"]),
            *point,
            format_bytes(row["pool_bytes"]),
            row["allocator"],
        )
        table.add_row(*told, *(f"{s:.2f}" for s in shares))
    return table
