"""WEKA kv-cache-tester: one JSON object a conversation (a folder of .json files, one such file, or JSONL).

Conversation: id, block_size (64), hash_id_scope ("local" = ids are the file's own), requests[]. Request: t (seconds
from the start of the conversation), type ("n", "s" or "subagent"), in, out, hash_ids. A sub-agent has requests[] of its
own, whose t counts from the marker's, and shares the parent's ids. hash_ids cover full blocks only, floor(in / 64); the
tail gets an id of its own.

Conversations have no common clock: the k-th (by file name) starts at k x start_every_s. Exact copies of an earlier
conversation (18 of the 710 published) look like fresh sessions, since their ids are local: they are dropped and counted
unless keep_copies is set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.lines import MAX_DOCUMENT_BYTES, TextFile
from kvarena.experiments.traces.rows import Row, RowSource, document_rows
from numpy.typing import NDArray

GRAIN = 64
SUBAGENT = "subagent"

_ID_BITS = 32
"""Local ids of a conversation fit so many bits; the conversation's number stands above them."""


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Conversations to raw requests."""
    seen: set[bytes] = set()
    kept = 0
    for row in rows:
        digest = hashlib.sha256(json.dumps(row.fields.get("requests"), sort_keys=True).encode()).digest()
        if digest in seen and not options.keep_copies:
            yield Dropped("conversation is an exact copy of an earlier one")
            continue
        seen.add(digest)
        yield from _Conversation(row, kept, options).requests()
        kept += 1


class _Conversation:
    """Requests of one conversation, with ids made global."""

    def __init__(self, row: Row, number: int, options: Options) -> None:
        self._row = row
        self._start = number * options.start_every_s
        self._local = row.fields.get("hash_id_scope", "local") == "local"
        self._offset = (number + 1) << _ID_BITS if self._local else 0
        self._grain = row.count("block_size", minimum=1) if row.has("block_size") else options.grain or GRAIN
        self._name = row.string("id") or f"conversation{number}"
        self._tails = 0
        self._number = number

    def requests(self) -> Iterator[RawRequest]:
        yield from self._requests(self._row, self._start, self._name)

    def _requests(self, row: Row, start: float, session: str) -> Iterator[RawRequest]:
        for entry in row.rows("requests"):
            time = start + entry.time("t")
            if entry.fields.get("type") == SUBAGENT:
                yield from self._requests(entry, time, f"{session}/{entry.string('agent_id')}")
            else:
                yield self._request(entry, time, session)

    def _request(self, entry: Row, time: float, session: str) -> RawRequest:
        num_prompt = entry.count("in", minimum=1)
        return RawRequest(
            where=entry.where,
            num_prompt_tokens=num_prompt,
            num_output_tokens=entry.count("out"),
            time=time,
            grain=self._grain,
            names=self._names(entry, num_prompt),
            session_id=session,
            extra=entry.scalars(("t", "in", "out", "hash_ids")),
        )

    def _names(self, entry: Row, num_prompt: int) -> NDArray[np.int64]:
        local = entry.names("hash_ids")
        full, partial = divmod(num_prompt, self._grain)
        if len(local) != full:
            entry.fail("hash_ids", f"{full} ids = floor({num_prompt} tokens / {self._grain})", len(local))
        for name in local:
            if not 0 <= name < 1 << _ID_BITS:
                entry.fail("hash_ids", f"ids from 0 to 2^{_ID_BITS} - 1", name)
        names = np.array(local, np.int64) + self._offset
        if not partial:
            return names
        self._tails += 1
        return np.append(names, -((self._number + 1) << _ID_BITS) - self._tails)


def open_folder(path: Path) -> RowSource:
    """Rows of all conversations of a folder, by file name."""
    files = [TextFile(file, max_line_bytes=MAX_DOCUMENT_BYTES) for file in _files(path)]
    if not files:
        raise ValueError(f"{path}: expected files *.json or *.json.gz, found none")

    def rows() -> Iterator[Row]:
        for file in files:
            yield from document_rows(file)

    return rows


def _files(path: Path) -> list[Path]:
    return sorted(file for pattern in ("*.json", "*.json.gz") for file in path.glob(pattern) if file.is_file())


def _holds(path: Path) -> bool:
    return any("trace" in file.name for file in _files(path))


def _matches(fields: Mapping[str, Any]) -> bool:
    return {"block_size", "requests"} <= set(fields) and isinstance(fields.get("requests"), list)


FORMAT = Format(
    name="weka",
    about="agent conversations with sub-agents, full blocks of 64 tokens, seconds",
    kind="jsonl",
    fields="folder of JSON, JSON or JSONL: id, block_size, hash_id_scope, requests[t (s), type, in, out, hash_ids]",
    grain=GRAIN,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
    options=frozenset({"grain", "keep_copies", "start_every_s"}),
    open_folder=open_folder,
    holds=_holds,
)
