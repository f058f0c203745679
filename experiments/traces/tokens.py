"""Token-id JSONL: the ids of each prompt, and of its reply where known.

Two spellings, told apart by their fields:
    token_ids [, output_ids, output_length, arrival_s, request_id, session_id, namespace]       kvarena, prefixlens
    input_tok_ids, output_tok_ids [, input_toks, output_toks], arrival_time_ns                   LLMServingSim
The unit of time is part of the field's name; without a time, rows keep the order of the file and all arrive at 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NANOSECONDS = 10**9

_KNOWN = (
    "token_ids",
    "output_ids",
    "output_length",
    "arrival_s",
    "request_id",
    "session_id",
    "namespace",
    "input_tok_ids",
    "output_tok_ids",
    "input_toks",
    "output_toks",
    "arrival_time_ns",
)


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests."""
    for row in rows:
        yield _servingsim(row) if "input_tok_ids" in row.fields else _plain(row)


def _plain(row: Row) -> RawRequest:
    prompt = _prompt(row, "token_ids")
    time, ticks = arrival(row)
    output = row.tokens("output_ids") if row.has("output_ids") else None
    return RawRequest(
        where=row.where,
        num_prompt_tokens=len(prompt),
        num_output_tokens=_stated(row, "output_length", output),
        time=time,
        ticks_per_second=ticks,
        request_id=row.string("request_id"),
        token_ids=prompt,
        output_ids=output,
        session_id=row.string("session_id"),
        namespace=row.string("namespace"),
        extra=row.scalars(_KNOWN),
    )


def _servingsim(row: Row) -> RawRequest:
    time, ticks = arrival(row)
    prompt, output, num_output = reply_of_servingsim(row)
    if prompt is None:
        row.fail("input_tok_ids", "a list", None)
    return RawRequest(
        where=row.where,
        num_prompt_tokens=len(prompt),
        num_output_tokens=num_output,
        time=time,
        ticks_per_second=ticks,
        request_id=row.string("request_id"),
        token_ids=prompt,
        output_ids=output,
        session_id=row.string("session_id"),
        extra=row.scalars(_KNOWN),
    )


def reply_of_servingsim(row: Row) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None, int]:
    """(ids of the prompt, ids of the reply, length of the reply) of LLMServingSim's fields; ids None where missing."""
    prompt = _prompt(row, "input_tok_ids") if row.has("input_tok_ids") else None
    output = row.tokens("output_tok_ids") if row.has("output_tok_ids") else None
    if prompt is not None and row.has("input_toks") and row.count("input_toks") != len(prompt):
        row.fail("input_toks", f"{len(prompt)}, the length of input_tok_ids", row.fields["input_toks"])
    if output is None and not row.has("output_toks"):
        row.fail("output_toks", "a whole number, or output_tok_ids", None)
    return prompt, output, _stated(row, "output_toks", output)


def _prompt(row: Row, field: str) -> NDArray[np.int32]:
    prompt = row.tokens(field)
    if not len(prompt):
        row.fail(field, "at least one token id", "an empty list")
    return prompt


def _stated(row: Row, field: str, output: NDArray[np.int32] | None) -> int:
    """Length of the reply: the stated one, which must agree with its ids; 0 when neither is there."""
    if not row.has(field):
        return 0 if output is None else len(output)
    stated = row.count(field)
    if output is not None and stated != len(output):
        row.fail(field, f"{len(output)}, the number of ids of the reply", stated)
    return stated


def arrival(row: Row) -> tuple[int | float | None, int]:
    """(arrival or None, its ticks a second) from arrival_time_ns or arrival_s. Raises for a time without unit."""
    if row.has("arrival_time_ns"):
        return row.time("arrival_time_ns"), NANOSECONDS
    if row.has("arrival_s"):
        return row.time("arrival_s"), 1
    if row.has("timestamp"):
        row.fail("timestamp", "a field with a unit here (arrival_s or arrival_time_ns)", row.fields["timestamp"])
    return None, 1


def _matches(fields: Mapping[str, Any]) -> bool:
    return bool({"token_ids", "input_tok_ids"} & set(fields))


FORMAT = Format(
    name="tokens",
    about="token ids of prompts, and of replies where known",
    kind="jsonl",
    fields="JSONL: token_ids [, output_ids, arrival_s ...] | input_tok_ids, output_tok_ids, arrival_time_ns",
    grain=1,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
)
