"""OpenAI chat requests (JSONL, or a JSON list), made token ids by a tokenizer that the caller gives.

One row is one request: `messages` (or body.messages, as batch files have it), each with role and content (text, or a
list of text parts). A last message of role assistant is the reply. Optional: arrival_s, session_id, id or custom_id.

tokenizer(text) -> token ids, or its name as module:name. Messages are rendered one by one, so that prompt and reply of
one request are, token for token, the start of the next. A tokenizer with `apply_chat_template` (as Hugging Face's have)
renders the prompt itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np
from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row
from kvarena.experiments.traces.tokens import arrival
from numpy.typing import NDArray

ASSISTANT = "assistant"


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Rows to raw requests. Raises ValueError without a tokenizer."""
    tokenizer = need_tokenizer("openai", options)
    for row in rows:
        body = row if row.has("messages") else Row(f"{row.where} body", _body(row))
        messages = [(role(entry), text(entry)) for entry in body.rows("messages")]
        reply = messages.pop()[1] if messages and messages[-1][0] == ASSISTANT else None
        if not messages:
            body.fail("messages", "at least one message before the reply", body.fields.get("messages"))
        prompt = render_prompt(tokenizer, messages, body)
        output = None if reply is None else encode(tokenizer, reply, body)
        time, ticks = arrival(row)
        yield RawRequest(
            where=row.where,
            num_prompt_tokens=len(prompt),
            num_output_tokens=0 if output is None else len(output),
            time=time,
            ticks_per_second=ticks,
            request_id=row.string("custom_id") or row.string("id"),
            token_ids=prompt,
            output_ids=output,
            session_id=row.string("session_id"),
        )


def need_tokenizer(name: str, options: Options) -> Any:
    """The caller's tokenizer, or the one that a text `module:name` stands for.

    Raises ValueError when there is none: text has no token ids of its own.
    """
    found = options.tokenizer
    if isinstance(found, str) and ":" in found:
        module, _, attribute = found.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"option tokenizer: expected an importable module:name, found {found!r} ({error})"
            ) from None
    if not callable(found):
        raise ValueError(f"format {name!r}: expected the option tokenizer (text -> token ids), found {found!r}")
    return found


def render_prompt(tokenizer: Any, messages: list[tuple[str, str]], row: Row) -> NDArray[np.int32]:
    """Token ids of the messages and of the header under which the reply will stand, int32 [n]."""
    if hasattr(tokenizer, "apply_chat_template"):
        listed = [{"role": name, "content": content} for name, content in messages]
        ids = tokenizer.apply_chat_template(listed, tokenize=True, add_generation_prompt=True, return_dict=False)
        return as_tokens(ids, row)
    parts = [encode(tokenizer, f"<|{name}|>\n{content}\n", row) for name, content in messages]
    return np.concatenate([*parts, encode(tokenizer, f"<|{ASSISTANT}|>\n", row)])


def encode(tokenizer: Any, content: str, row: Row) -> NDArray[np.int32]:
    """Token ids of the text, int32 [n]."""
    return as_tokens(tokenizer(content), row)


def as_tokens(ids: Any, row: Row) -> NDArray[np.int32]:
    """What a tokenizer gave, checked: a list of ids, or a mapping that has them as input_ids."""
    found = ids["input_ids"] if isinstance(ids, Mapping) else ids
    return Row(row.where, {"tokenizer": found}).tokens("tokenizer")


def role(entry: Row) -> str:
    name = entry.string("role")
    if not name:
        entry.fail("role", "a role such as user", None)
    return name


def text(entry: Row) -> str:
    """Text of a message. Raises ValueError for parts that are no text (images, audio): they have no token ids here."""
    content = entry.fields.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = entry.rows("content")
    for part in parts:
        if not isinstance(part.fields.get("text"), str):
            part.fail("text", "a part of type text", part.fields.get("type"))
    return "".join(part.fields["text"] for part in parts)


def _body(row: Row) -> Mapping[str, Any]:
    body = row.fields.get("body")
    if not isinstance(body, dict):
        row.fail("messages", "a list of messages (or body.messages)", row.fields.get("messages"))
    return body


def _matches(fields: Mapping[str, Any]) -> bool:
    body = fields.get("body")
    return "messages" in fields or (isinstance(body, dict) and "messages" in body)


FORMAT = Format(
    name="openai",
    about="chat messages as text, with a tokenizer",
    kind="jsonl",
    fields="JSONL or JSON: messages[role, content] [, arrival_s, session_id] (option tokenizer)",
    grain=1,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
    options=frozenset({"tokenizer"}),
)
