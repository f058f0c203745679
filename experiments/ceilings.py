"""What an infinite cache would have served: the ceiling of every prefix cache, at each design's own grain.

A tree that never forgets tells, for each request, how many of its first tokens any earlier request began with.
Page rounding and the last-token rule turn that one number into the ceiling of each design.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from kvarena.experiments.traces.base import Request
    from numpy.typing import NDArray


class _Node:
    """One edge and what follows it: `ids` are the bytes of int32 ids, `first_user` the request that brought them."""

    __slots__ = ("children", "first_user", "ids")

    def __init__(self, ids: bytes, first_user: int) -> None:
        self.ids = ids
        self.first_user = first_user
        self.children: dict[bytes, _Node] = {}


class PrefixTree:
    """All sequences so far, each prefix once.

    >>> import numpy as np
    >>> tree = PrefixTree()
    >>> tree.add(np.array([1, 2, 3], "int32"), 0)
    (0, -1)
    >>> tree.add(np.array([1, 2, 9], "int32"), 1)
    (2, 0)
    >>> tree.num_ids
    4
    """

    def __init__(self) -> None:
        self._roots: dict[Any, _Node] = {}
        self.num_ids = 0

    def add(self, ids: NDArray[np.int32], user: int, namespace: Any = None) -> tuple[int, int]:
        """Insert int32 ids [n]; returns how many of the first ids were known, and who brought the last of these
        (-1: nobody). Costs O(n) bytes compared."""
        node = self._roots.setdefault(namespace, _Node(b"", -1))
        data, at, source = ids.tobytes(), 0, -1
        while at < len(data):
            child = node.children.get(data[at : at + 4])
            if child is None:
                break
            shared = _common(child.ids, data, at)
            at += shared
            source = child.first_user
            if shared < len(child.ids):
                node = _split(node, child, shared)
                break
            node = child
        if at < len(data):
            _grow(node, data[at:], user)
            self.num_ids += (len(data) - at) // 4
        return at // 4, source

    def known(self, ids: NDArray[np.int32], namespace: Any = None) -> tuple[int, int]:
        """What `add` would return, inserting nothing."""
        node, data, at, source = self._roots.get(namespace), ids.tobytes(), 0, -1
        while node is not None and at < len(data):
            child = node.children.get(data[at : at + 4])
            if child is None:
                break
            shared = _common(child.ids, data, at)
            at += shared
            source = child.first_user
            node = child if shared == len(child.ids) else None
        return at // 4, source


class IdLengths:
    """How many tokens of each hash id a prompt has had so far: a last id that is cut off stands for fewer than `grain`.

    >>> import numpy as np
    >>> lengths = IdLengths()
    >>> lengths.add(np.array([0, 1], "int32"), 700, 512)
    >>> lengths.tokens(np.array([0, 1, 2], "int32"), 2, 1500, 512)
    700
    """

    def __init__(self) -> None:
        self._most: dict[Any, NDArray[np.int64]] = {}

    def add(self, ids: NDArray[np.int32], num_tokens: int, grain: int, namespace: Any = None) -> None:
        """Take a prompt of `num_tokens` tokens with these ids, int32 [n], 0 or above."""
        import numpy as np

        top, most = int(ids.max()) + 1, self._most.get(namespace, np.zeros(0, np.int64))
        if top > len(most):
            most = self._most[namespace] = np.concatenate([most, np.zeros(2 * top - len(most), np.int64)])
        most[ids[:-1]] = grain
        most[ids[-1]] = max(int(most[ids[-1]]), num_tokens - (len(ids) - 1) * grain)

    def tokens(self, ids: NDArray[np.int32], known: int, num_tokens: int, grain: int, namespace: Any = None) -> int:
        """Tokens of the first `known` ids that earlier prompts had, of a prompt of `num_tokens`."""
        if not known:
            return 0
        return min((known - 1) * grain + int(self._most[namespace][ids[known - 1]]), num_tokens)


def _common(edge: bytes, data: bytes, at: int) -> int:
    """Bytes, in whole ids, that `edge` and `data[at:]` share."""
    if data.startswith(edge, at):
        return len(edge)
    import numpy as np

    length = min(len(edge), len(data) - at)
    left = np.frombuffer(edge, "<i4", length // 4)
    differs = np.flatnonzero(left != np.frombuffer(data, "<i4", length // 4, at))
    return 4 * int(differs[0]) if differs.size else length


def _grow(node: _Node, rest: bytes, user: int) -> None:
    """New ids behind a node. A text that grows step by step stays one edge, or its next step would walk all before."""
    if node.first_user == user and not node.children:
        node.ids += rest
    else:
        node.children[rest[:4]] = _Node(rest, user)


def _split(parent: _Node, child: _Node, at: int) -> _Node:
    """Cut the edge of `child` after `at` bytes; the upper part takes its place under `parent`."""
    upper = _Node(child.ids[:at], child.first_user)
    upper.children[child.ids[at : at + 4]] = child
    parent.children[upper.ids[:4]] = upper
    child.ids = child.ids[at:]
    return upper


@dataclass(frozen=True)
class Reuse:
    """Reuse in a list of requests, whoever serves it.

    prefix_tokens    per request: tokens of the longest prefix that an earlier request had
    source           per request: index of the request that brought the last of these tokens, -1 for none
    distinct_tokens  tokens of all distinct prefixes together: the working set
    """

    prefix_tokens: list[int]
    source: list[int]
    distinct_tokens: int


def measure_reuse(requests: Sequence[Request], *, replies: bool = False, last_token: bool = False) -> Reuse:
    """Walk the requests in order through a tree that never forgets.

    replies: what is published includes each reply but its last token, whose KV is not written.
    last_token: that too, as in an engine whose steps run ahead of their results.
    Replies under ids of their own (`outputs.py`) in a trace of coarser ids serve nothing and are left out.
    A trace of hash ids is walked id by id (`grain` tokens each). A last id that is cut off should be an id of its own;
    where it stands for more tokens in another prompt, those that both have are known.
    """
    tree, lengths = PrefixTree(), IdLengths()
    prefix, source = [], []
    grain, fine = 1, replies and any(map(_has_tokens_of_later_prompts, requests))
    for index, request in enumerate(requests):
        ids, grain = (request.prompt_ids(), 1) if fine else _ids(request)
        known, brought_by = tree.add(ids, index, request.namespace)
        if grain > 1:
            known = lengths.tokens(ids, known, request.num_prompt_tokens, grain, request.namespace)
            lengths.add(ids, request.num_prompt_tokens, grain, request.namespace)
        prefix.append(min(known, request.num_prompt_tokens))
        source.append(brought_by)
        reply = request.reply_ids() if replies and grain == 1 else None
        if reply is not None and len(reply) > (not last_token):
            tree.add(_joined(ids, reply if last_token else reply[:-1]), index, request.namespace)
    return Reuse(prefix, source, tree.num_ids * grain)


def _has_tokens_of_later_prompts(request: Request) -> bool:
    """Whether a reply at token grain can return in a trace of coarser ids; ids below zero are nobody's."""
    reply = request.reply_tokens
    return reply is not None and len(reply) > 0 and int(reply[0]) >= 0


def _ids(request: Request) -> tuple[Any, int]:
    import numpy as np

    if request.token_ids is not None:
        return np.ascontiguousarray(request.token_ids, np.int32), 1
    if request.hash_ids is None:
        raise ValueError(f"request {request.request_id}: the trace has lengths only, no ids to replay")
    return np.ascontiguousarray(request.hash_ids, np.int32), request.grain


def _joined(prompt: Any, reply: Any) -> Any:
    import numpy as np

    return np.concatenate([prompt, np.asarray(reply, np.int32)])


def ceiling_tokens(prefix: int, num_prompt_tokens: int, page_size: int, last_token_rule: bool) -> int:
    """The most tokens a request can find cached: whole pages of the known prefix, never the last token.

    >>> ceiling_tokens(1003, 2000, 16, True), ceiling_tokens(32, 32, 16, True), ceiling_tokens(32, 32, 1, True)
    (992, 16, 31)
    """
    limit = num_prompt_tokens - 1 if last_token_rule else num_prompt_tokens
    return min(prefix, limit) // page_size * page_size


def ceilings(reuse: Reuse, lengths: Iterable[int], page_size: int, last_token_rule: bool) -> list[int]:
    """`ceiling_tokens` of every request."""
    return [
        ceiling_tokens(prefix, length, page_size, last_token_rule)
        for prefix, length in zip(reuse.prefix_tokens, lengths, strict=True)
    ]
