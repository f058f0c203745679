"""Vidur CSV: arrived_at (seconds), num_prefill_tokens, num_decode_tokens; length files have no arrived_at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row

_LENGTHS = ("num_prefill_tokens", "num_decode_tokens")
_DERIVED = ("num_total_tokens", "pd_ratio")


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests. Lengths only."""
    for row in rows:
        yield RawRequest(
            where=row.where,
            num_prompt_tokens=row.count("num_prefill_tokens", minimum=1),
            num_output_tokens=row.count("num_decode_tokens"),
            time=row.time("arrived_at") if row.has("arrived_at") else None,
            extra=row.scalars((*_LENGTHS, *_DERIVED, "arrived_at")),
        )


def _matches(fields: Mapping[str, Any]) -> bool:
    return set(_LENGTHS) <= set(fields)


FORMAT = Format(
    name="vidur",
    about="lengths, with or without arrivals in seconds",
    kind="csv",
    fields="CSV: [arrived_at (s),] num_prefill_tokens, num_decode_tokens",
    grain=0,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
)
