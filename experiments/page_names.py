"""Names for the whole pages of a trace: two pages have one name exactly if their tokens, and all before them, agree.

All requests together form a tree of texts; its edges are the segments, and a request is a path of whole segments. Pages
of a segment are always used together, so a bound can reason about segments and still be exact page by page. The tree is
built from the trace alone: no allocator has a say in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.prefix.page_text import encode
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Request

ID_BYTES = 4


class _Node:
    """One edge: bytes of whole pages, and its number among the segments."""

    __slots__ = ("children", "edge", "segment")

    def __init__(self, edge: bytes) -> None:
        self.edge = edge
        self.children: dict[bytes, _Node] = {}
        self.segment = -1


@dataclass
class PageNames:
    """The pages of every request, in order.

    page_size  tokens a page
    paths      per request: numbers of its segments, root first
    lengths    pages of each segment
    parents    segment above each segment, -1 at a root
    prompt_pages  per request: whole pages of its prompt (with `partial`: its last, partial page too)
    limits     per request: pages that a hit may cover (the last-token rule)
    tokens     per request: prompt tokens
    """

    page_size: int
    paths: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    prompt_pages: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Distinct pages: the working set."""
        return sum(self.lengths)

    def starts(self) -> NDArray[np.int64]:
        """First page name of each segment; the names of a segment follow each other."""
        return np.concatenate([[0], np.cumsum(self.lengths[:-1], dtype=np.int64)]).astype(np.int64)

    def pages(self, request: int, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Names of a request's pages, int64 [prompt pages, then those that its reply completes]."""
        runs = [np.arange(starts[s], starts[s] + self.lengths[s]) for s in self.paths[request]]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)

    def hit_tokens(self, request: int, pages: int) -> int:
        """Tokens in the first `pages` pages of a prompt."""
        return min(pages * self.page_size, self.tokens[request])


def name_pages(
    requests: Sequence[Request],
    page_size: int,
    *,
    last_token_rule: bool = True,
    replies: bool = False,
    partial: bool = False,
) -> PageNames:
    """Name the whole pages of all requests. Costs one byte comparison of each text, twice.

    replies  the pages that a reply completes are used too, its last token left out (its KV is never written)
    partial  every hash id counts as a page, the last one too, as public tables of hashed traces count;
             page_size must be the trace's grain
    """
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, found {page_size}")
    names = PageNames(page_size)
    roots: dict[Any, _Node] = {}
    for request in requests:
        text, width = _text(request, page_size, replies, partial)
        prompt = len(request.hash_ids) if partial and request.hash_ids is not None else None
        names.prompt_pages.append(request.num_prompt_tokens // page_size if prompt is None else prompt)
        names.tokens.append(request.num_prompt_tokens)
        capped = (request.num_prompt_tokens - last_token_rule) // page_size
        names.limits.append(names.prompt_pages[-1] if prompt is not None and not last_token_rule else capped)
        # A border where a hit has to end, so that every segment counts as a whole or not at all.
        for end in (names.limits[-1], names.prompt_pages[-1], len(text) // width):
            _insert(_root(roots, request, width), text[: end * width], width)
    for request in requests:
        text, width = _text(request, page_size, replies, partial)
        names.paths.append(list(_walk(names, _root(roots, request, width), text, width)))
    return names


def _root(roots: dict[Any, _Node], request: Request, width: int) -> _Node:
    space = None if request.namespace is None else encode(request.namespace)
    return roots.setdefault((space, width), _Node(b""))


def _text(request: Request, page_size: int, replies: bool, partial: bool) -> tuple[bytes, int]:
    """(bytes of the request's whole pages, bytes a page). Ids that stand for whole pages are taken as they are."""
    if partial:
        if request.hash_ids is None or page_size != request.grain:
            raise ValueError(f"request {request.request_id}: partial pages need hash ids of {page_size} tokens each")
        return np.ascontiguousarray(request.hash_ids, np.int32).tobytes(), ID_BYTES
    replied = replies and request.reply_ids() is not None and request.num_output_tokens > 1
    if request.hash_ids is not None and request.token_ids is None and request.grain % page_size == 0 and not replied:
        share = request.grain // page_size
        ids = np.add.outer(request.hash_ids.astype(np.int64) * share, np.arange(share)).reshape(-1)
        return ids[: request.num_prompt_tokens // page_size].astype(np.int32).tobytes(), ID_BYTES
    ids = np.ascontiguousarray(request.prompt_ids(), np.int32)
    if replied:
        ids = np.concatenate([ids, np.asarray(request.reply_ids(), np.int32)[:-1]])
    return ids[: len(ids) // page_size * page_size].tobytes(), ID_BYTES * page_size


def _insert(node: _Node, text: bytes, width: int) -> None:
    """Put a text into the tree, with a border at its end."""
    at = 0
    while at < len(text):
        key = text[at : at + width]
        child = node.children.get(key)
        if child is None:
            node.children[key] = _Node(text[at:])
            return
        shared = shared_bytes(child.edge, text, at, width)
        if shared < len(child.edge):
            _split(node, child, shared, width)
            child = node.children[key]
        node, at = child, at + shared


def shared_bytes(edge: bytes, text: bytes, at: int, width: int) -> int:
    """Bytes, in whole pages of `width`, that `edge` and `text[at:]` have in common."""
    if text.startswith(edge, at):
        return len(edge)
    count = min(len(edge), len(text) - at) // ID_BYTES
    differs = np.flatnonzero(np.frombuffer(edge, "<i4", count) != np.frombuffer(text, "<i4", count, at))
    common = ID_BYTES * int(differs[0]) if differs.size else ID_BYTES * count
    return common // width * width


def _split(parent: _Node, child: _Node, at: int, width: int) -> None:
    upper = _Node(child.edge[:at])
    parent.children[upper.edge[:width]] = upper
    child.edge = child.edge[at:]
    upper.children[child.edge[:width]] = child


def _walk(names: PageNames, node: _Node, text: bytes, width: int) -> Iterator[int]:
    """Segments of a text that stands in the finished tree; each gets its number on first use."""
    at, above = 0, -1
    while at < len(text):
        node = node.children[text[at : at + width]]
        if node.segment < 0:
            node.segment = len(names.lengths)
            names.lengths.append(len(node.edge) // width)
            names.parents.append(above)
        yield node.segment
        above, at = node.segment, at + len(node.edge)
