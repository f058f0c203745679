"""Hash JSONL with output ids (derived from LMCache's agent traces): Mooncake's fields and `output_hash_ids`.

Ids stand for 16 tokens each and are prefix-chained; times are milliseconds. output_hash_ids name the full blocks that
the reply completes, the prompt's partial tail included: floor((input + output) / grain) - floor(input / grain) ids.
The published magagent file holds calls without any input text: such rows are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.mooncake import block_names, row_grain
from kvarena.experiments.traces.rows import Row

GRAIN = 16

_KNOWN = (
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "output_hash_ids",
    "request_id",
    "session_id",
    "block_size",
    "block_tokens",
)


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests."""
    for row in rows:
        grain = row_grain(row, options, GRAIN)
        num_prompt = row.count("input_length")
        if num_prompt == 0:
            yield Dropped("empty prompt")
            continue
        num_output = row.count("output_length")
        yield RawRequest(
            where=row.where,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            time=row.time("timestamp"),
            grain=grain,
            request_id=row.string("request_id"),
            names=block_names(row, num_prompt, grain, options),
            output_names=_output_names(row, num_prompt, num_output, grain),
            session_id=row.string("session_id"),
            extra=row.scalars(_KNOWN),
        )


def _output_names(row: Row, num_prompt: int, num_output: int, grain: int) -> list[Any]:
    names: list[Any] = row.names("output_hash_ids")
    expected = (num_prompt + num_output) // grain - num_prompt // grain
    if len(names) != expected:
        rule = f"floor(({num_prompt} + {num_output}) / {grain}) - floor({num_prompt} / {grain})"
        row.fail("output_hash_ids", f"{expected} ids = {rule}", len(names))
    return names


def _matches(fields: Mapping[str, Any]) -> bool:
    return {"timestamp", "input_length", "output_length", "hash_ids", "output_hash_ids"} <= set(fields)


FORMAT = Format(
    name="hashes",
    about="prefix-chained ids of 16 tokens with ids of the replies, milliseconds",
    kind="jsonl",
    fields="JSONL: timestamp (ms), input_length, output_length, hash_ids, output_hash_ids [, session_id, block_size]",
    grain=GRAIN,
    ticks_per_second=1000,
    matches=_matches,
    parse=parse,
    options=frozenset({"grain", "full_blocks"}),
)
