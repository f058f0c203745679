"""ShareGPT conversations (a JSON list, or JSONL), made token ids by a tokenizer that the caller gives.

One row is one conversation: `conversations` with from (human, gpt, system ...) and value. Every reply of the model is
a request, whose prompt is all that came before it: each prompt starts with the prompt and reply before it, token for
token. There are no arrival times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.openai import ASSISTANT, encode, need_tokenizer
from kvarena.experiments.traces.rows import Row
from numpy.typing import NDArray

_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT}


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Conversations to raw requests. Raises ValueError without a tokenizer."""
    tokenizer = need_tokenizer("sharegpt", options)
    for number, row in enumerate(rows):
        requests = list(_requests(row, tokenizer, row.string("id") or f"conversation{number}"))
        if not requests:
            yield Dropped("conversation without a reply after a message")
        yield from requests


def _requests(row: Row, tokenizer: Any, session: str) -> Iterator[RawRequest]:
    parts: list[NDArray[np.int32]] = []
    for entry in row.rows("conversations"):
        speaker, content = entry.string("from"), entry.fields.get("value")
        if speaker is None or not isinstance(content, str):
            entry.fail("from" if speaker is None else "value", "text", content)
        name = _ROLES.get(speaker, speaker)
        parts.append(encode(tokenizer, f"<|{name}|>\n", entry))
        said = encode(tokenizer, f"{content}\n", entry)
        if name == ASSISTANT and len(parts) > 1:
            prompt = np.concatenate(parts)
            yield RawRequest(
                where=entry.where,
                num_prompt_tokens=len(prompt),
                num_output_tokens=len(said),
                token_ids=prompt,
                output_ids=said,
                session_id=session,
            )
        parts.append(said)


def _matches(fields: Mapping[str, Any]) -> bool:
    return isinstance(fields.get("conversations"), list)


FORMAT = Format(
    name="sharegpt",
    about="conversations as text, with a tokenizer",
    kind="jsonl",
    fields="JSON or JSONL: id, conversations[from, value] (option tokenizer)",
    grain=1,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
    options=frozenset({"tokenizer"}),
)
