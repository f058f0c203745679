"""RAGPulse: components with content ids, chained here into true prefixes at token grain.

A folder with 0_trace*.jsonl (or that file) and, beside it, the lengths of the components: *1_sys_prompt*,
*2_passages*, *3_history*, *4_user_input*, *5_web_search* (.jsonl, also .gz). Fields of the trace: timestamp (seconds,
as text; the file is not sorted), input_length, output_length, session_id, hash_ids{sys_prompt, passages_ids, history,
web_search, user_input}.

The ids name content wherever it stands. Read as prefix ids they give 72 % hits, more than twice what a prefix cache can
get (31 %). Here a component is a run of tokens of its own and a prompt is its components in the order listed, so a hit
is what a prefix cache would find. Their lengths add up to a few tokens less than input_length: the rest is put at the
end, the same tokens in every prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from kvarena.experiments.traces.base import MAX_TOKEN
from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.lines import TextFile
from kvarena.experiments.traces.rows import Row, RowSource, json_rows
from numpy.typing import NDArray

COMPONENTS = {
    "sys_prompt": ("1_sys_prompt", "sys_prompt_id"),
    "passages_ids": ("2_passages", "passage_id"),
    "history": ("3_history", "history_id"),
    "web_search": ("5_web_search", "web_search_id"),
    "user_input": ("4_user_input", "user_input_id"),
}
"""Field of hash_ids -> (name of its file of lengths, its field there), in prompt order."""

REST_TOKENS = 4096
"""Tokens 0 to 4095 are the rest that no component accounts for."""

MAX_OWN_TOKENS = 2**24
"""The longest component: its ids are made here, 64 MiB of them."""

_KNOWN = ("timestamp", "input_length", "output_length", "hash_ids", "session_id")


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests; needs the path of the trace to find the lengths."""
    if options.path is None:
        raise ValueError("ragpulse: expected a path (the lengths of the components stand beside the trace)")
    folder = options.path if options.path.is_dir() else options.path.parent
    content = _Content(folder)
    for row in rows:
        num_prompt = row.count("input_length", minimum=1)
        yield RawRequest(
            where=row.where,
            num_prompt_tokens=num_prompt,
            num_output_tokens=row.count("output_length"),
            time=Row(row.where, row.fields, text=True).time("timestamp"),
            token_ids=content.prompt(row, num_prompt),
            session_id=row.string("session_id"),
            extra=row.scalars(_KNOWN),
        )


class _Content:
    """A run of tokens for each component, given out at its first use."""

    def __init__(self, folder: Path) -> None:
        self._lengths = {field: _lengths(folder, *names) for field, names in COMPONENTS.items()}
        self._starts: dict[tuple[str, int], int] = {}
        self._next = REST_TOKENS

    def prompt(self, row: Row, num_prompt: int) -> NDArray[np.int32]:
        """Token ids, int32 [num_prompt]. Raises ValueError for an unknown component or a sum that does not fit."""
        parts = [self._run(row, field, name) for field, names in _listed(row).items() for name in names]
        known = sum(map(len, parts))
        if not 0 <= num_prompt - known <= REST_TOKENS:
            row.fail("input_length", f"{known} tokens of components and at most {REST_TOKENS} more", num_prompt)
        return np.concatenate([*parts, np.arange(num_prompt - known, dtype=np.int32)])

    def _run(self, row: Row, field: str, name: int) -> NDArray[np.int32]:
        length = self._lengths[field].get(name)
        if length is None:
            row.fail(f"hash_ids.{field}", f"an id of the file {COMPONENTS[field][0]}", name)
        start = self._starts.setdefault((field, name), self._next)
        if start == self._next:
            self._next += length
            if self._next > MAX_TOKEN:
                row.fail(f"hash_ids.{field}", "at most 2^31 tokens of distinct components", name)
        return np.arange(start, start + length, dtype=np.int32)


def _listed(row: Row) -> dict[str, list[int]]:
    ids = row.fields.get("hash_ids")
    if not isinstance(ids, dict) or not set(ids) <= set(COMPONENTS):
        row.fail("hash_ids", f"an object with {', '.join(COMPONENTS)}", ids)
    inner = Row(f"{row.where} hash_ids", ids)
    return {field: inner.names(field) if inner.has(field) else [] for field in COMPONENTS}


def _lengths(folder: Path, name: str, field: str) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for row in json_rows(TextFile(_one_file(folder, name))):
        length = row.count("token_length", minimum=1)
        if length > MAX_OWN_TOKENS:
            row.fail("token_length", f"at most {MAX_OWN_TOKENS} tokens", length)
        lengths[row.count(field)] = length
    return lengths


def _one_file(folder: Path, name: str) -> Path:
    found = sorted(file for file in folder.glob(f"*{name}*.jsonl*") if file.is_file())
    if len(found) != 1:
        raise ValueError(f"{folder}: expected one file *{name}*.jsonl, found {len(found)}")
    return found[0]


def open_folder(path: Path) -> RowSource:
    """Rows of the folder's 0_trace file."""
    file = TextFile(_one_file(path, "0_trace"))
    return lambda: json_rows(file)


def _holds(path: Path) -> bool:
    return any(path.glob("*0_trace*.jsonl*"))


def _matches(fields: Mapping[str, Any]) -> bool:
    return isinstance(fields.get("hash_ids"), dict)


FORMAT = Format(
    name="ragpulse",
    about="components of RAG prompts, chained into true prefixes, seconds",
    kind="jsonl",
    fields="folder of JSONL: 0_trace (timestamp (s), hash_ids{sys_prompt, ...}) and 1_ to 5_ (lengths)",
    grain=1,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
    open_folder=open_folder,
    holds=_holds,
)
