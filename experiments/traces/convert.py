"""Writes a trace in a form that other tools read: Mooncake JSONL with block_size on each row, or token-id JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from kvarena.experiments.traces.base import Request, Trace
from numpy.typing import NDArray

Target = Literal["mooncake", "tokens"]
TARGETS: tuple[str, ...] = ("mooncake", "tokens")

DEFAULT_BLOCK = 512


def convert_lines(trace: Trace, target: str, *, block_size: int | None = None) -> Iterator[str]:
    """JSON lines of the trace, one a request, in arrival order.

    target      `mooncake`: times in ms, prefix-chained ids of `block_size` tokens, the partial last block with an id of
                its own. `tokens`: ids of prompts and, where known, of replies.
    block_size  mooncake: tokens an id. From token ids any size, 512 unless stated; from hash ids a divisor of the
                trace's grain (an id then becomes grain / block_size ids), the grain unless stated.

    Raises ValueError for another target or an impossible block size, at once.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, found {target!r}")
    if target == "tokens":
        if block_size is not None:
            raise ValueError("block_size: expected none for token ids, which have no blocks")
        return map(_token_line, trace)
    return _mooncake_lines(trace, _checked_block(trace, block_size))


def losses(trace: Trace, target: str) -> list[str]:
    """What the trace has and the target cannot hold."""
    lost = []
    if target == "mooncake" and trace.visible.outputs != "none":
        lost.append("ids of replies are left out: Mooncake's format has no field for them")
    if target == "tokens" and trace.visible.grain > 1 and trace.visible.outputs != "none":
        lost.append("ids of replies are left out: they stand for blocks, not for tokens")
    if not trace.visible.reuse:
        lost.append("the source has lengths only: every prompt is written with ids of its own")
    return lost


def _checked_block(trace: Trace, block_size: int | None) -> int:
    grain = trace.visible.grain
    if block_size is None:
        return grain if grain > 1 else DEFAULT_BLOCK
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size: expected a whole number >= 1, found {block_size!r}")
    if grain > 1 and grain % block_size:
        raise ValueError(f"block_size: expected a divisor of the trace's grain {grain}, found {block_size}")
    return block_size


def _mooncake_lines(trace: Trace, block_size: int) -> Iterator[str]:
    chain = ChainIds(block_size)
    for request in trace:
        fields: dict[str, Any] = {
            "timestamp": _milliseconds(request.arrival_s),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": _block_ids(request, block_size, chain),
        }
        if request.session_id is not None:
            fields["session_id"] = request.session_id
        fields["block_size"] = block_size
        yield _dump(fields)


def _block_ids(request: Request, block_size: int, chain: ChainIds) -> list[int]:
    if request.hash_ids is None:
        return chain.ids(request.prompt_ids(), request.namespace)
    parts = request.grain // block_size
    if parts == 1:
        return request.hash_ids.tolist()
    finer = request.hash_ids.astype(np.int64)[:, None] * parts + np.arange(parts)
    return finer.reshape(-1)[: -(-request.num_prompt_tokens // block_size)].tolist()


class ChainIds:
    """Ids of blocks as a chained hash names them: equal exactly when block and everything before it are equal."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._index: dict[tuple[Any, bytes], int] = {}

    def ids(self, tokens: NDArray[np.int32], namespace: Any = None) -> list[int]:
        """One id for each block of the int32 tokens [n], the partial last one included; O(n)."""
        parent: Any = namespace
        found: list[int] = []
        for start in range(0, len(tokens), self.block_size):
            key = (("root", parent) if start == 0 else parent, tokens[start : start + self.block_size].tobytes())
            parent = self._index.setdefault(key, len(self._index))
            found.append(parent)
        return found


def _token_line(request: Request) -> str:
    fields: dict[str, Any] = {"request_id": request.request_id, "arrival_s": request.arrival_s}
    if request.session_id is not None:
        fields["session_id"] = request.session_id
    if request.namespace is not None:
        fields["namespace"] = request.namespace
    fields["output_length"] = request.num_output_tokens
    fields["token_ids"] = request.prompt_ids().tolist()
    replies = request.reply_ids()
    if replies is not None:
        fields["output_ids"] = replies.tolist()
    return _dump(fields)


def _milliseconds(seconds: float) -> int | float:
    value = round(seconds * 1000, 6)
    return int(value) if value.is_integer() else value


def _dump(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
