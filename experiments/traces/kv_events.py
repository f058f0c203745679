"""KV events recorded from a running vLLM or SGLang: BlockStored, BlockRemoved, AllBlocksCleared.

Events say which blocks entered the cache, with their tokens and the block that they follow; they know no requests.
Requests are put together from chains: blocks that follow anything but the end of a request that is still growing are
a new request's prompt. What follows such an end is its reply or another request, and engines differ in that:

    vllm    a reply fills one block at a time: an event of one block goes on, one of more blocks is a new request
    sglang  a request is stored twice, after its prefill and at its end: the first event behind a prompt is the reply

So a request shows with its whole blocks alone, and one that was served from the cache to its last whole block does not
show at all: hit rates of such a trace are too low by those. Both are said with every trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvarena.experiments.traces.formats import Dropped, Format, Options, RawRequest
from kvarena.experiments.traces.rows import Row
from numpy.typing import NDArray

UNKNOWN_PARENT = "they follow a block that was stored before the recording began"
NOTES = (
    "made of KV events: requests show with their whole blocks alone, and what was served whole from the cache not at "
    "all, so hit rates are too low by those",
)

Key = tuple[Any, Any]  # namespace, block hash


@dataclass
class _Open:
    """A request that may still grow. `blocks`: keys of all of its blocks."""

    row: Row
    time: int | float
    namespace: Any
    blocks: list[Key]
    num_prompt_blocks: int
    num_stored: int
    events: int = 1


@dataclass
class _Chains:
    """Blocks that were ever stored: key -> (key of the block before or None, tokens)."""

    block_size: int
    before: dict[Key, Key | None] = field(default_factory=dict)
    tokens: dict[Key, NDArray[np.int32]] = field(default_factory=dict)

    def path(self, key: Key | None) -> list[Key]:
        """Keys from the first block to this one."""
        found: list[Key] = []
        while key is not None:
            found.append(key)
            key = self.before[key]
        return found[::-1]

    def text(self, keys: list[Key]) -> NDArray[np.int32]:
        return np.concatenate([self.tokens[key] for key in keys]) if keys else np.zeros(0, np.int32)


def parse(rows: Iterator[Row], options: Options) -> Iterator[RawRequest | Dropped]:
    """Events to raw requests, in the order in which their prompts were stored."""
    chains: _Chains | None = None
    growing: dict[Key, _Open] = {}
    waiting: list[_Open] = []
    for row in rows:
        kind = row.fields.get("type")
        if kind == "AllBlocksCleared":
            if chains is not None:
                yield from _finished(chains, waiting)
            chains, growing, waiting = None, {}, []
            continue
        if kind == "BlockRemoved":
            _hashes(row)  # what a block holds does not change with its removal; it is checked and passed over
            continue
        size = row.count("block_size", minimum=1)
        chains = chains or _Chains(size)
        if size != chains.block_size:
            row.fail("block_size", f"{chains.block_size} as in the events before", size)
        stored = _stored(row, chains, options)
        if stored is None:
            yield Dropped(UNKNOWN_PARENT)
            continue
        _place(row, stored, chains, growing, waiting, options.engine)
    if chains is not None:
        yield from _finished(chains, waiting)


def _stored(row: Row, chains: _Chains, options: Options) -> tuple[Key | None, list[Key]] | None:
    """(parent, new blocks) of an event, now known to the chains; None when its parent is not."""
    namespace = row.string("lora_name") or row.string("lora_id")
    hashes, size = _hashes(row), chains.block_size
    tokens = row.tokens("token_ids")
    if not hashes or len(tokens) != len(hashes) * size:
        row.fail("token_ids", f"{len(hashes)} blocks of {size} token ids, at least one", f"{len(tokens)} ids")
    parent: Key | None = None
    if row.has("parent_block_hash"):
        parent = (namespace, _hash(row, "parent_block_hash", row.fields["parent_block_hash"]))
        if parent not in chains.before:
            return None
    keys = [(namespace, name) for name in hashes]
    if len(set(keys)) < len(keys) or parent in keys:
        row.fail("block_hashes", "each block once, and no block before itself", f"{len(keys)} hashes")
    for place, key in enumerate(keys):
        content = tokens[place * size : (place + 1) * size]
        before = keys[place - 1] if place else parent
        if key in chains.before:
            if chains.before[key] != before or not np.array_equal(chains.tokens[key], content):
                row.fail("block_hashes", "the tokens that a hash had before", f"hash {str(key[1])[:24]} with others")
            continue
        chains.before[key], chains.tokens[key] = before, content
    return parent, keys


def _place(
    row: Row,
    stored: tuple[Key | None, list[Key]],
    chains: _Chains,
    growing: dict[Key, _Open],
    waiting: list[_Open],
    engine: str,
) -> None:
    """Give new blocks to the request that they go on, or to a new one."""
    parent, keys = stored
    request = None if parent is None else growing.get(parent)
    if request is not None and _goes_on(request, keys, engine):
        del growing[request.blocks[-1]]
        request.blocks += keys
        request.events += 1
    else:
        prompt = chains.path(parent) + keys
        request = _Open(row, row.time("ts"), keys[0][0], prompt, len(prompt), len(keys))
        waiting.append(request)
    growing[request.blocks[-1]] = request


def _goes_on(request: _Open, keys: list[Key], engine: str) -> bool:
    return len(keys) == 1 if engine == "vllm" else request.events == 1


def _finished(chains: _Chains, requests: list[_Open]) -> Iterator[RawRequest]:
    for request in requests:
        prompt = chains.text(request.blocks[: request.num_prompt_blocks])
        reply = chains.text(request.blocks[request.num_prompt_blocks :])
        yield RawRequest(
            where=request.row.where,
            num_prompt_tokens=len(prompt),
            num_output_tokens=len(reply),
            time=request.time,
            token_ids=prompt,
            output_ids=reply,
            namespace=request.namespace,
            extra={"stored_tokens": request.num_stored * chains.block_size},
        )


def _hashes(row: Row) -> list[Any]:
    return [_hash(row, "block_hashes", value) for value in row.list("block_hashes")]


def _hash(row: Row, name: str, value: Any) -> int | bytes:
    if type(value) is not int and not isinstance(value, bytes):
        row.fail(name, "hashes (whole numbers or bytes)", value)
    return value


def _matches(fields: Mapping[str, Any]) -> bool:
    return "type" in fields and "ts" in fields


FORMAT = Format(
    name="kv_events",
    about="KV events recorded from a running vLLM or SGLang",
    kind="msgpack",
    fields="msgpack: batches [ts, events] of BlockStored, BlockRemoved, AllBlocksCleared",
    grain=1,
    ticks_per_second=1,
    matches=_matches,
    parse=parse,
    options=frozenset({"engine"}),
    notes=NOTES,
)
