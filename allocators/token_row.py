"""What a live sequence holds in the token design, and how many pages a call asks for on behalf of several."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from kvarena.allocators.interface import Sequence
from kvarena.prefix.radix_tree import Node

if TYPE_CHECKING:
    from kvarena.allocators.token_batch import TokenDecodeBatch


class Row:
    """One row of req_to_token.

    index         its place in req_to_token, from 1
    page_ids      array('i'), position order; always the same object
    node          the tree node whose lock it holds; [0, protected) of `page_ids` is the path to it
    width         bytes of the tree's key a page
    text          the tree's key of the prefill, made when it was matched; b"" once the prefill is checkpointed
    admitted      reserved at least once; a row that is not goes with the first refusal
    prefilled     the checkpoint of the whole prefill has run: what follows is decode
    checkpointed  at least one checkpoint has run
    batch         the decode batch that has bound this row, told when another verb touches it
    """

    __slots__ = (
        "admitted",
        "batch",
        "checkpointed",
        "index",
        "node",
        "page_ids",
        "prefilled",
        "protected",
        "seq",
        "text",
        "width",
    )

    def __init__(
        self, seq: Sequence, index: int, node: Node, page_ids: array[int], width: int, text: bytes = b""
    ) -> None:
        self.seq = seq
        self.index = index
        self.node = node
        self.page_ids = page_ids
        self.width = width
        self.text = text
        self.protected = len(page_ids)
        self.admitted = self.prefilled = self.checkpointed = False
        self.batch: TokenDecodeBatch | None = None

    @property
    def decoding(self) -> bool:
        """Whether all of the prefill is computed."""
        return self.seq.num_computed_tokens >= self.seq.num_prefill_tokens


Plan: TypeAlias = list[tuple[Row, int, int]]  # of a reserve: row, tokens wanted, new pages


def demand(plan: Plan, page_size: int, slack: int) -> int:
    """Pages to make room for, `slack` > 0 and page_size > 1.

    SGLang 0.5.22: a prefill asks for its new tokens and a page on top, a decode for a page even when it needs none.
    """
    tokens = 0
    for row, n, new in plan:
        seq = row.seq
        decoding = seq.num_computed_tokens >= seq.num_prefill_tokens
        tokens += max(new, slack) * page_size if decoding else n + slack * page_size
    return -(-tokens // page_size)


def merge_bound(plan: Plan, page_size: int, fits: bool) -> int:
    """Ready pages below which waiting ones are merged, page_size > 1. `fits`: there is room for the plan.

    SGLang 0.5.22 with need_sort: a loose bound, not the need: a page a decode, new tokens and a page a prefill. A
    decode for which there is no room is turned away before the free pages are looked at, so it merges nothing.
    """
    decodes = [n for row, n, _ in plan if row.decoding and fits]
    prefills = [n for row, n, _ in plan if not row.decoding]
    return max(len(decodes), sum(prefills) // page_size + len(prefills) + 1 if prefills else 0)


def join_own(runs: list[array[int]]) -> array[int]:
    """Page ids of all runs in one array; a single run, which must be the caller's own, is the answer itself."""
    if len(runs) == 1:
        return runs[0]
    joined = array("i")
    for run in runs:
        joined += run
    return joined


def shared_pages(rows: Iterable[Row]) -> int:
    """Pages on the path of more than one row: where a walk up meets one made before."""
    seen: set[Node] = set()
    shared: set[Node] = set()
    for row in rows:
        node = row.node
        while node.parent is not None and node not in seen:
            seen.add(node)
            node = node.parent
        while node.parent is not None and node not in shared:
            shared.add(node)
            node = node.parent
    return sum(len(node.pages) for node in shared)
