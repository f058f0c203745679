"""LLMServingSim JSONL: flat rows with lengths, and agentic rows with sub_requests (both may stand in one file).

Flat: input_toks, output_toks, arrival_time_ns. Agentic: session_id, arrival_time_ns, sub_requests[input_toks,
output_toks, tool_duration_ns]; a sub-request starts tool_duration_ns after the reply before it. That reply's own time
is the server's and not in the file, so it counts as 0 here; extra["delay_s"] keeps the tool's time for engines that
wait.
Either may carry input_tok_ids and output_tok_ids. (Flat rows with ids throughout are read by `tokens` just as well.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row
from kvarena.experiments.traces.tokens import NANOSECONDS, reply_of_servingsim

_KNOWN = ("input_toks", "output_toks", "arrival_time_ns", "input_tok_ids", "output_tok_ids", "sub_requests")


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests; times in nanoseconds."""
    for number, row in enumerate(rows):
        if not row.has("sub_requests"):
            yield _request(row, row.time("arrival_time_ns"), row.string("session_id"))
            continue
        session = row.string("session_id") or f"session{number}"
        time, delay = row.time("arrival_time_ns"), None
        for part in row.rows("sub_requests"):
            request = _request(part, time, session)
            if delay is not None:
                request.extra["delay_s"] = delay / NANOSECONDS
            yield request
            delay = part.time("tool_duration_ns") if part.has("tool_duration_ns") else 0
            time += delay


def _request(row: Row, time: int | float, session: str | None) -> RawRequest:
    prompt, output, num_output = reply_of_servingsim(row)
    return RawRequest(
        where=row.where,
        num_prompt_tokens=row.count("input_toks", minimum=1) if prompt is None else len(prompt),
        num_output_tokens=num_output,
        time=time,
        token_ids=prompt,
        output_ids=output,
        session_id=session,
        extra=row.scalars(_KNOWN),
    )


def _matches(fields: Mapping[str, Any]) -> bool:
    return "arrival_time_ns" in fields and bool({"input_toks", "sub_requests"} & set(fields))


FORMAT = Format(
    name="llmservingsim",
    about="lengths or token ids, sessions of sub-requests, nanoseconds",
    kind="jsonl",
    fields="JSONL: input_toks, output_toks, arrival_time_ns | session_id, arrival_time_ns, sub_requests[...]",
    grain=0,
    ticks_per_second=NANOSECONDS,
    matches=_matches,
    parse=parse,
)
