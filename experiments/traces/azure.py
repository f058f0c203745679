"""Azure LLM inference CSV: TIMESTAMP,ContextTokens,GeneratedTokens (and NumImages in the multimodal one).

Times are absolute, with up to nine fractional digits (the files have seven, one more than strptime takes) and an
optional UTC offset. Lengths only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row

NANOSECONDS = 10**9

_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_KNOWN = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests; times in nanoseconds."""
    for row in rows:
        yield RawRequest(
            where=row.where,
            num_prompt_tokens=row.count("ContextTokens", minimum=1),
            num_output_tokens=row.count("GeneratedTokens"),
            time=_nanoseconds(row),
            extra=row.scalars(_KNOWN),
        )


def _nanoseconds(row: Row) -> int:
    text = str(row.fields.get("TIMESTAMP"))
    found = _TIME.fullmatch(text.strip())
    expected = "a time such as 2023-11-16 18:17:03.9799600"
    if found is None:
        row.fail("TIMESTAMP", expected, row.fields.get("TIMESTAMP"))
    try:
        moment = datetime.fromisoformat(found[1] + (found[3] or "+00:00").replace("Z", "+00:00"))
    except ValueError:
        row.fail("TIMESTAMP", expected, text)
    whole = int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds())
    return whole * NANOSECONDS + int((found[2] or "0").ljust(9, "0"))


def _matches(fields: Mapping[str, Any]) -> bool:
    return set(_KNOWN) <= set(fields)


FORMAT = Format(
    name="azure",
    about="lengths and absolute times",
    kind="csv",
    fields="CSV: TIMESTAMP, ContextTokens, GeneratedTokens [, NumImages]",
    grain=0,
    ticks_per_second=NANOSECONDS,
    matches=_matches,
    parse=parse,
)
