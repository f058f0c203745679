"""What the token design puts into its tree, and when: a prefill's whole pages as it is written, the rest at the end.

before   [ 4 5 6 | 7 8 9 12 ]        4 5 6 were matched; meanwhile the tree got 20 21 for the text of 7 8
after    [ 4 5 6   20 21 9 | 12 ]    7 8 are given up for its equal pages, 9 is new to it, 12 is not full yet
                 protected ^
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvarena.allocators.interface import Commit, EventKind, PageIds, Sequence
from kvarena.allocators.token_row import Row, join

if TYPE_CHECKING:
    from kvarena.allocators.token import TokenAllocator


def commit(allocator: TokenAllocator, row: Row, n: int, group: array[int]) -> Commit:
    """The KV of the row's first n tokens is written; its duplicates join `group` behind the prefill's end."""
    seq = row.seq
    if n > seq.num_computed_tokens:
        seq.num_computed_tokens = n
    if row.prefilled:
        return Commit(seq)
    prefill, before = seq.num_prefill_tokens, row.protected
    row.prefilled = n >= prefill
    runs, new_from = checkpoint(allocator, row, prefill if row.prefilled else n)
    published = row.page_ids[new_from : row.protected]
    duplicates: PageIds = ()
    if runs:
        duplicates = given_up = join(runs)
        if row.prefilled:
            group += given_up
        else:
            for run in runs:
                allocator._free.free(run)
    if allocator.events.enabled:
        note(allocator, seq, published, duplicates)
    return Commit(seq, published, (), duplicates, duplicates, (before, new_from) if runs else (0, 0))


def checkpoint(allocator: TokenAllocator, row: Row, num_tokens: int) -> tuple[list[array[int]], int]:
    """Publish the whole pages of the first `num_tokens` tokens (SGLang 0.5.22: checkpoint).

    Returns the duplicates, a run a node, and the page from which on the tree had nothing. Starts at the locked
    node: what lies above it is the tree's and held.
    """
    if not allocator._prefix_cache:
        return [], row.protected
    seq, start, old = row.seq, row.protected, row.node
    end = allocator._keys.num_pages(seq, num_tokens)
    if end <= start and row.checkpointed:
        allocator.tree.touch(old)
        return [], start
    if end < start:
        end = start
    key = allocator._keys.key(seq, start, end)
    row.node, runs, new_from = allocator.tree.insert(old, key, row.width, row.page_ids, start)
    row.protected = end
    if allocator.tree.order.uses_hits:
        allocator.tree.count_hit(row.node, until=old if row.checkpointed else None)
    row.checkpointed = True
    if seq.num_prompt_tokens < num_tokens:
        prompt = seq.num_prompt_tokens // allocator.page_size
        if 0 < prompt < end and (prompt != start or allocator.tree.order.uses_priority):
            allocator.tree.border(row.node, end, prompt)
    return runs, new_from


def finish(allocator: TokenAllocator, row: Row, duplicates: array[int]) -> array[int]:
    """Publish all that is computed; returns the pages to free: duplicates (noted in `duplicates`), then tail."""
    seq = row.seq
    computed = min(seq.num_computed_tokens, seq.num_tokens, len(row.page_ids) * allocator.page_size)
    if computed > seq.num_prefill_tokens:
        allocator._keys.refuse_reserved(seq, seq.num_prefill_tokens)
    runs, new_from = checkpoint(allocator, row, computed)
    tail = row.page_ids[row.protected :]
    given_up = join(runs) if runs else array("i")
    if allocator.events.enabled:
        note(allocator, seq, row.page_ids[new_from : row.protected], given_up)
    if not runs:
        return tail
    duplicates += given_up
    return given_up + tail


def note(allocator: TokenAllocator, seq: Sequence, published: PageIds, duplicates: PageIds) -> None:
    """Events of a checkpoint."""
    if published:
        allocator.events.add(EventKind.PUBLISH, seq.request_id, published)
    if duplicates:
        allocator.events.add(EventKind.DUPLICATE, seq.request_id, duplicates)
