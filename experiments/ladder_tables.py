"""A ladder as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.ladder import TIME, Ladder
from kvarena.experiments.style import printable
from kvarena.experiments.tables import NOISE

if TYPE_CHECKING:
    from kvarena.experiments.ladder_ablations import Ablations
    from rich.table import Table

STRONGEST = 6  # pairs that are printed


def ladder_tables(made: Ladder, pool: int | None = None) -> Iterator[Any]:
    """Attribution, what cannot be seen, and the strongest pairs, at one pool; by default at each of them."""
    for size in made.manifest["pools"] if pool is None else [pool]:
        yield _attribution(made, size)
        if made.manifest["held"]:
            yield _held(made, size)
        yield _pairs(made, size)


def _attribution(made: Ladder, pool: int) -> Table:
    from rich.table import Table

    manifest = made.manifest
    table = Table(
        title=f"From {manifest['ends'][0]} to {manifest['ends'][1]}: {printable(manifest['trace'])}, "
        f"pool {format_bytes(pool)}, {2 ** len(made.rungs)} subsets"
    )
    thrown = "preemptions" if manifest["of"] == "run" else "early ends"
    timed = bool(manifest.get("time_rounds", 0))
    heads = ["hit tokens", "points", "least..most, points", "concurrency", thrown]
    heads += ["allocator µs a request (rounds)"] if timed else []
    table.add_column("rung")
    table.add_column("from -> to")
    for head in heads:
        table.add_column(head, justify="right")
    parts = {name: made.of(name, pool) for name in ("hit_tokens", "token_hit_rate", "concurrency", "preemptions", TIME)}
    for place, rung in enumerate(made.rungs):
        row = {name: part.iloc[place] for name, part in parts.items()}
        rate = row["token_hit_rate"]
        table.add_row(
            rung,
            _ends(manifest["rungs"][rung]),
            f"{int(row['hit_tokens']['whole']):+,}",
            f"{100 * rate['value']:+.3f}",
            f"{100 * rate['low']:+.2f}..{100 * rate['high']:+.2f}",
            f"{row['concurrency']['value']:+.3f}",
            f"{int(row['preemptions']['whole']):+,}",
            *([_time(row[TIME])] if timed else []),
        )
    table.add_section()
    totals = {name: part["value"].sum() for name, part in parts.items()}
    table.add_row(
        "all of them",
        "",
        f"{int(parts['hit_tokens']['whole'].sum()):+,}",
        f"{100 * totals['token_hit_rate']:+.3f}",
        "",
        f"{totals['concurrency']:+.3f}",
        f"{int(parts['preemptions']['whole'].sum()):+,}",
        *([f"{totals[TIME]:+.1f}"] if timed else []),
    )
    low, high = (100 * made.end("token_hit_rate", upper=upper, pool=pool) for upper in (False, True))
    notes = [f"token hit rate {low:.3f} % to {high:.3f} %", f"outputs: {manifest['visible']['outputs']}", made.unit]
    notes.append(_how_timed(made, parts[TIME]))
    table.caption = "; ".join(note for note in notes if note)
    return table


def _time(row: Any) -> str:
    """The share, the range of single rounds, and a mark where that holds zero."""
    noise = NOISE if row["within_noise"] else ""
    return f"{row['value']:+,.0f} ({row['spread_low']:+,.0f}..{row['spread_high']:+,.0f}){noise}"


def _how_timed(made: Ladder, rows: Any) -> str:
    rounds = made.manifest.get("time_rounds", 0)
    if not rounds:
        return "time: not shown, since it was taken once on the wall clock; --rounds 3 measures it"
    marked = f"; {NOISE.strip()}: within noise" if rows["within_noise"].any() else ""
    low, high = rows["lower_us"].iloc[0], rows["upper_us"].iloc[0]
    return (
        f"time: CPU of the general form, {low:,.0f} to {high:,.0f} us, medians of {rounds} rounds (their range){marked}"
    )


def _ends(fields: dict[str, list[Any]]) -> str:
    return ", ".join(f"{name} {_text(low)} -> {_text(high)}" for name, (low, high) in fields.items())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _held(made: Ladder, pool: int) -> Table:
    from rich.table import Table

    table = Table(title=f"Not observable here{_at(made, pool)}")
    table.add_column("field")
    table.add_column("why")
    for name, why in made.manifest["held"].items():
        table.add_row(name, why)
    rest = next(row for row in made.manifest["checks"] if row["pool_bytes"] == pool)["not_observable_changes"]
    table.caption = f"all of them switched at the upper end: {rest['hit_tokens']:+,} hit tokens"
    return table


def _at(made: Ladder, pool: int) -> str:
    return f", pool {format_bytes(pool)}" if len(made.manifest["pools"]) > 1 else ""


def _pairs(made: Ladder, pool: int) -> Table:
    from rich.table import Table

    table = Table(title=f"Pairs that do more (+) or less (-) together than apart, hit tokens{_at(made, pool)}")
    table.add_column("rung")
    table.add_column("with")
    table.add_column("interaction", justify="right")
    frame = made.interactions
    frame = frame[(frame["metric"] == "hit_tokens") & (frame["pool_bytes"] == pool) & (frame["value"] != 0)]
    frame = frame.reindex(frame["value"].abs().sort_values(ascending=False, kind="stable").index)
    for row in frame.head(STRONGEST).to_dict("records"):
        table.add_row(row["a"], row["b"], f"{row['value']:+,.1f}")
    if frame.empty:
        table.caption = "none: the rungs add up"
    return table


def _page(made: Ablations) -> str:
    """Manifests of before by-ids pages were told had single tokens."""
    tokens_per_id = made.manifest.get("tokens_per_id", 1)
    size = made.manifest["config"]["allocators"][0]["page_size"]
    return f"{size} tokens" if tokens_per_id == 1 else f"{size} id{'s' * (size > 1)} ({size * tokens_per_id:,} tokens)"


def ablation_tables(made: Ablations) -> Iterator[Table]:
    """What was counted for each pool and design, and the measured queues."""
    from rich.table import Table

    table = Table(title=f"With and without: {printable(made.manifest['trace'])}, pages of {_page(made)}")
    for head in ("pool", "design"):
        table.add_column(head)
    for head in ("token hit rate", "evicted pages", "duplicates, mean", "table bytes rewritten a step"):
        table.add_column(head, justify="right")
    columns = ["token_hit_rate", "evicted_pages", "duplicate_bytes", "table_bytes_rewritten", "steps"]
    means = made.table.groupby(["pool_bytes", "design"], sort=False)[columns].mean()
    for row in means.reset_index().to_dict("records"):
        table.add_row(
            format_bytes(row["pool_bytes"]),
            row["design"],
            f"{100 * row['token_hit_rate']:.2f} %",
            f"{row['evicted_pages']:,.0f}",
            format_bytes(round(row["duplicate_bytes"])),
            f"{row['table_bytes_rewritten'] / row['steps']:,.1f}",
        )
    yield table
    queues = Table(title="A page leaves the middle of the free queue, ns of process time, measured")
    queues.add_column("pages in the queue", justify="right")
    for name in ("linked list", "deque"):
        queues.add_column(name, justify="right")
    wide = made.removal.pivot(index="length", columns="queue", values="ns_a_page")
    for length, linked, plain in zip(wide.index, wide["linked list"], wide["deque"], strict=True):
        queues.add_row(f"{length:,}", f"{linked:,.0f}", f"{plain:,.0f}")
    yield queues
