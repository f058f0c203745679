"""BurstGPT CSV: Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type.

Newer files add Session ID and Elapsed time. A reply of 0 tokens marks a failed call: such rows are dropped and counted
unless keep_failed is set, and then stay as prompts without decode. Rows without a prompt are dropped always. Lengths
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row

FAILED = "failed: response tokens 0"
EMPTY = "empty prompt"

_REQUIRED = ("Timestamp", "Model", "Request tokens", "Response tokens")
_KNOWN = (*_REQUIRED[:1], *_REQUIRED[2:], "Total tokens", "Session ID")


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests, or drops with their reason."""
    for row in rows:
        num_prompt, num_output = row.count("Request tokens"), row.count("Response tokens")
        time = row.time("Timestamp")
        if row.has("Total tokens") and row.count("Total tokens") != num_prompt + num_output:
            row.fail("Total tokens", f"{num_prompt + num_output} = request + response", row.fields["Total tokens"])
        if num_output == 0 and not options.keep_failed:
            yield Dropped(FAILED)
        elif num_prompt == 0:
            yield Dropped(EMPTY)
        else:
            yield RawRequest(
                where=row.where,
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                time=time,
                session_id=row.string("Session ID"),
                extra=row.scalars(_KNOWN),
            )


def _matches(fields: Mapping[str, Any]) -> bool:
    return set(_REQUIRED) <= set(fields)


FORMAT = Format(
    name="burstgpt",
    about="lengths and seconds, failed calls marked by an empty reply",
    kind="csv",
    fields="CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type [, Session ID]",
    grain=0,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
    options=frozenset({"keep_failed"}),
)
