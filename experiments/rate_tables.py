"""Tables of a rate study for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarena.experiments.rate import RateResult
    from rich.table import Table

COLUMNS = {
    "share": ("rate / sat.", ".2f"),
    "rate_per_s": ("req./s", ".2f"),
    "normalised_ms": ("ms a token", ".1f"),
    "ttft_p50_ms": ("TTFT p50", ",.0f"),
    "ttft_p90_ms": ("p90", ",.0f"),
    "ttft_p99_ms": ("p99, ms", ",.0f"),
    "tpot_p50_ms": ("TPOT p50", ".1f"),
    "tpot_p90_ms": ("p90", ".1f"),
    "tpot_p99_ms": ("p99, ms", ".1f"),
    "requests_per_s": ("served/s", ".2f"),
    "goodput_per_s": ("goodput/s", ".2f"),
    "mean_batch": ("batch", ".1f"),
    "token_hit_rate": ("token hits", ".1%"),
    "prefill_saved": ("FLOPs saved", ".1%"),
    "preemptions": ("preempt.", ",.0f"),
}


def rates_table(result: RateResult) -> Table:
    """A row a rate and allocator."""
    from rich.table import Table

    about = result.manifest
    title = (
        f"{about['trace']}, {about['requests']:,} requests; latencies in ms, normalised: ms a token; goodput at "
        f"{about['goodput_limits']}; feedback clock"
    )
    shown = Table(title=title, title_justify="left")
    shown.add_column("allocator")
    for head, _ in COLUMNS.values():
        shown.add_column(head, justify="right")
    for row in result.rates.sort_values(["share", "allocator"], kind="stable").to_dict("records"):
        cells = [_cell(row[name], text) for name, (_, text) in COLUMNS.items()]
        shown.add_row(str(row["allocator"]), *cells)
    return shown


def _cell(value: float, text: str) -> str:
    return "–" if value != value else format(value, text)


def _times(value: float) -> str:
    return "–" if value != value else f"{value:.2f}x"


def knee_lines(result: RateResult) -> list[str]:
    """Saturation and knee of each allocator."""
    lines = []
    for name, rate in result.manifest["saturation_per_s"].items():
        knee = result.manifest["knee_per_s"].get(name)
        where = "no knee up to the highest rate" if knee is None else f"knee at {knee:.2f} requests/s"
        lines.append(f"{name}: serves a backlog at {rate:.2f} requests/s; {where} (normalised latency doubled)")
    return lines


def hits_table(result: RateResult) -> Table:
    """What a hit is worth."""
    from rich.table import Table

    shown = Table(title="Throughput of a backlog against no prefix cache", title_justify="left")
    for head in ("allocator", "hits, % of tokens", "gain", "Amdahl", "prefill's share without cache", "FLOPs saved"):
        shown.add_column(head, justify="left" if head == "allocator" else "right")
    for row in result.hits.to_dict("records"):
        cells = [_cell(row["token_hit_rate"], ".1%"), *(_times(row[name]) for name in ("gain", "amdahl"))]
        shares = [_cell(row[name], ".1%") for name in ("prefill_share", "prefill_saved")]
        shown.add_row(str(row["allocator"]), *cells, *shares)
    return shown
