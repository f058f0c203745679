"""Qwen-Bailian JSONL: prefix ids of 16 tokens each, times in seconds, chats linked to their parents.

Fields: chat_id, parent_chat_id (-1 = root), timestamp (s), input_length, output_length, type, turn, hash_ids. Each row
is a whole request: input_length counts the full prompt of that call, so turns are never added up. A parent that the
file does not hold is no error, since public traces are cut out of longer ones; its children share a session all the
same. The publisher does not say that ids are chained: the loader checks and warns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.mooncake import block_names, row_grain
from kvarena.experiments.traces.rows import Row

GRAIN = 16
ROOT = "-1"

_KNOWN = ("timestamp", "input_length", "output_length", "hash_ids")


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests; the session is the first chat of the chain that is known."""
    sessions: dict[str, str] = {}
    for row in rows:
        grain = row_grain(row, options, GRAIN)
        num_prompt = row.count("input_length", minimum=1)
        yield RawRequest(
            where=row.where,
            num_prompt_tokens=num_prompt,
            num_output_tokens=row.count("output_length"),
            time=row.time("timestamp"),
            grain=grain,
            names=block_names(row, num_prompt, grain, options),
            session_id=_session(row, sessions),
            extra=row.scalars(_KNOWN),
        )


def _session(row: Row, sessions: dict[str, str]) -> str:
    chat, parent = row.string("chat_id"), row.string("parent_chat_id")
    if chat is None or parent is None:
        row.fail("chat_id" if chat is None else "parent_chat_id", "a chat's number (-1 = no parent)", None)
    session = chat if parent == ROOT else sessions.get(parent, parent)
    return sessions.setdefault(chat, session)


def _matches(fields: Mapping[str, Any]) -> bool:
    return {"chat_id", "parent_chat_id", "timestamp", "hash_ids"} <= set(fields)


FORMAT = Format(
    name="bailian",
    about="prefix ids of 16 tokens with chats and turns, seconds",
    kind="jsonl",
    fields="JSONL: chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn, hash_ids",
    grain=GRAIN,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
    options=frozenset({"grain", "full_blocks"}),
)
