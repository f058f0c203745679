"""Mooncake JSONL: prefix-chained hash ids of 512 tokens each, times in milliseconds.

Fields: timestamp (ms), input_length, output_length, hash_ids; optional request_id, session_id, delay (ms after the
session's row before, for rows without a timestamp) and block_size (or block_tokens). The partial last block has an id
of its own, so len(hash_ids) = ceil(input_length / grain) on every row: measured on the published conversation and
synthetic traces (kvcache-ai/Mooncake, FAST25-release).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row

GRAIN = 512

_KNOWN = (
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "request_id",
    "session_id",
    "delay",
    "block_size",
    "block_tokens",
)


def row_grain(row: Row, options: Options, default: int) -> int:
    """Tokens an id: the row's block_size, else the caller's, else the format's. Raises ValueError when they differ."""
    grain = options.grain
    for field in ("block_size", "block_tokens"):
        if row.has(field):
            stated = row.count(field, minimum=1)
            if grain is not None and stated != grain:
                row.fail(field, f"{grain}, as stated elsewhere for this trace", stated)
            grain = stated
    return default if grain is None else grain


def block_names(row: Row, num_tokens: int, grain: int, options: Options) -> list[Any]:
    """hash_ids, checked against the prompt's length; with `full_blocks` the tail gets a name of its own."""
    names: list[Any] = row.names("hash_ids")
    blocks = -(-num_tokens // grain)
    expected = num_tokens // grain if options.full_blocks else blocks
    if len(names) != expected:
        rule = "floor" if options.full_blocks else "ceil"
        hint = ""
        if not options.full_blocks and len(names) == num_tokens // grain:
            hint = " (full blocks only: the option full_blocks reads those)"
        row.fail("hash_ids", f"{expected} ids = {rule}({num_tokens} tokens / {grain}){hint}", len(names))
    if len(names) < blocks:
        names = [*names, ("tail", row.where)]
    return names


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests; a row with `delay` and no timestamp follows its session's row before."""
    session_time: dict[str, int | float] = {}
    for row in rows:
        grain = row_grain(row, options, GRAIN)
        num_prompt = row.count("input_length", minimum=1)
        session = row.string("session_id")
        time = _time(row, session, session_time)
        if session is not None:
            session_time[session] = time
        extra = row.scalars(_KNOWN)
        if row.has("delay"):
            extra["delay_s"] = row.time("delay") / 1000
        yield RawRequest(
            where=row.where,
            num_prompt_tokens=num_prompt,
            num_output_tokens=row.count("output_length"),
            time=time,
            grain=grain,
            request_id=row.string("request_id"),
            names=block_names(row, num_prompt, grain, options),
            session_id=session,
            extra=extra,
        )


def _time(row: Row, session: str | None, session_time: dict[str, int | float]) -> int | float:
    if row.has("timestamp") or not row.has("delay"):
        return row.time("timestamp")
    if session is None or session not in session_time:
        row.fail("timestamp", "a time, or a delay after an earlier row of the same session_id", None)
    return session_time[session] + row.time("delay")


def _matches(fields: Mapping[str, Any]) -> bool:
    return {"input_length", "output_length", "hash_ids"} <= set(fields) and bool({"timestamp", "delay"} & set(fields))


FORMAT = Format(
    name="mooncake",
    about="prefix-chained ids of 512 tokens, milliseconds",
    kind="jsonl",
    fields="JSONL: timestamp (ms), input_length, output_length, hash_ids [, session_id, delay, block_size]",
    grain=GRAIN,
    ticks_per_second=1000,
    matches=_matches,
    parse=parse,
    options=frozenset({"grain", "full_blocks"}),
)
