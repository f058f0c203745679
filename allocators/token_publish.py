"""What the token design puts into its tree, and when: a prefill's whole pages as it is written, the rest at the end.

before   [ 4 5 6 | 7 8 9 12 ]        4 5 6 were matched; meanwhile the tree got 20 21 for the text of 7 8
after    [ 4 5 6   20 21 9 | 12 ]    7 8 are given up for its equal pages, 9 is new to it, 12 is not full yet
                 protected ^
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvarena.allocators.interface import Commit, EventKind, PageIds, Sequence
from kvarena.allocators.token_row import Row, join_own

if TYPE_CHECKING:
    from kvarena.allocators.token import TokenAllocator


def commit(allocator: TokenAllocator, row: Row, n: int, group: list[array[int]]) -> Commit:
    """The KV of the row's first n tokens is written; its duplicates join `group` behind the prefill's end."""
    seq = row.seq
    if n > seq.num_computed_tokens:
        seq.num_computed_tokens = n
    if row.prefilled:
        return Commit(seq)
    if n >= seq.num_prefill_tokens:
        n, row.prefilled = seq.num_prefill_tokens, True
    runs, new = checkpoint(allocator, row, n)
    if row.prefilled:
        row.text = b""
    # A view, no copy: the tree never changes a node's pages in place.
    published: PageIds = () if new is None else memoryview(new).toreadonly()
    duplicates = _give_up(allocator, runs, group if row.prefilled else None) if runs else ()
    if allocator.events.enabled:
        note(allocator, seq, published, duplicates)
    if not runs:
        return Commit(seq, published)
    new_from = row.protected - len(published)
    return Commit(seq, published, (), duplicates, duplicates, (new_from - len(duplicates), new_from))


def _give_up(allocator: TokenAllocator, runs: list[array[int]], group: list[array[int]] | None) -> PageIds:
    """Free duplicates at once, or with the rest of `group`; returns them in one array."""
    duplicates = join_own(runs)
    if group is not None:
        group += runs
    else:
        for run in runs:
            allocator._free.free(run)
    return duplicates


def checkpoint(allocator: TokenAllocator, row: Row, num_tokens: int) -> tuple[list[array[int]], array[int] | None]:
    """Publish the whole pages of the first `num_tokens` tokens (SGLang 0.5.22: checkpoint).

    Returns the duplicates, a run a node, and the pages that are new to the tree, which end at `row.protected`; they
    are the tree's own. Starts at the locked node: what lies above it is the tree's and held.
    """
    if not allocator._prefix_cache:
        return [], None
    seq, tree, start = row.seq, allocator.tree, row.protected
    end = num_tokens // allocator.page_size if seq.page_hashes is None else allocator._keys.num_pages(seq, num_tokens)
    if end <= start:
        if row.checkpointed:
            tree.touch(row.node)
            return [], None
        end = start
    width, text = row.width, row.text
    if end * width <= len(text):
        key = text[start * width : end * width]  # all of it where nothing was cached: the same object, no copy
    else:
        key = allocator._keys.key(seq, start, end)
    node, runs, new_from = tree.insert(row.node, key, width, row.page_ids, start)
    if tree.uses_hits:
        tree.count_hit(node, until=row.node if row.checkpointed else None)
    new = node.pages if new_from < end else None
    row.node, row.protected, row.checkpointed = node, end, True
    if seq.num_prompt_tokens < num_tokens:
        prompt = seq.num_prompt_tokens // allocator.page_size
        if 0 < prompt < end and (prompt != start or tree.uses_priority):
            above = tree.border(node, end, prompt)
            if tree.uses_priority:
                tree.raise_priority(above)
    return runs, new


def finish(allocator: TokenAllocator, row: Row) -> list[array[int]]:
    """Publish all that is computed; returns the duplicates, a run a node. What is left private is the tail."""
    runs, new = checkpoint(allocator, row, nameable(allocator, row))
    if allocator.events.enabled:
        note(allocator, row.seq, new or (), join_own(runs))
    return runs


def nameable(allocator: TokenAllocator, row: Row) -> int:
    """Computed tokens that are known, hence can be published. ValueError for a generated one in the reserved range."""
    seq = row.seq
    computed, prefill = seq.num_computed_tokens, seq.num_prefill_tokens
    if computed <= prefill and row.prefilled:
        return computed  # checked when it was matched
    computed = min(computed, seq.num_tokens, len(row.page_ids) * allocator.page_size)
    if computed > prefill and allocator._prefix_cache:
        allocator._keys.refuse_reserved(seq, prefill)
    return computed


def note(allocator: TokenAllocator, seq: Sequence, published: PageIds, duplicates: PageIds) -> None:
    """Events of a checkpoint."""
    if published:
        allocator.events.add(EventKind.PUBLISH, seq.request_id, published)
    if duplicates:
        allocator.events.add(EventKind.DUPLICATE, seq.request_id, duplicates)
