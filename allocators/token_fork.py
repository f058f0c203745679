"""Fork of the token design: what a child shares with its parent is what the tree holds.

    parent   [ tree tree | tail ]          10 tokens computed, S = 4: two whole pages and a partial one
    child    [ tree tree | copy ]          fork: the parent's whole pages are checkpointed, the child locks their node,
                                           the unaligned tail is copied to a page of its own

A page outside of the tree has one owner, so no write ever hits a shared page. SGLang 0.5.22 has no fork; its samples
of one prompt are requests of their own that meet in the tree, and this is where they would stand after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarena.allocators import token_publish
from kvarena.allocators.fork_rules import check_child, check_range, shared_tokens, start_child
from kvarena.allocators.interface import Commit, EventKind, Fork, PageCopy, PageIds, Sequence
from kvarena.allocators.token_keys import refuse_items
from kvarena.allocators.token_row import Row, join_own

if TYPE_CHECKING:
    from kvarena.allocators.token import TokenAllocator


def fork(allocator: TokenAllocator, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> Fork | None:
    """Checkpoint the parent, lock its node for the child, copy what the tree does not take. O(pages).

    Not in the tree are a partial page, pages of generated tokens under given page hashes, and, without a prefix
    cache, everything. None: no row is free, or no room for the copies. With `num_tokens` the tree may hold more of
    the parent than is shared: the child locks as much of its path.
    """
    row = _admitted(allocator._touched_row(parent))
    computed = shared_tokens(parent, min(parent.num_computed_tokens, parent.num_tokens), num_tokens)
    check_child(parent, child, computed, child.request_id in allocator._rows)
    if allocator._prefix_cache:
        refuse_items(child)
        allocator._keys.refuse_reserved(child)  # what it shares is the parent's, so that is looked at too
    num_pages, protected = -(-computed // allocator.page_size), _pages_in_tree(allocator, row, computed)
    if not _fits(allocator, child, num_pages - protected):
        return None
    commit = _checkpoint(allocator, row, computed)
    node, count = allocator.tree.border(row.node, row.protected, protected), num_pages - protected
    evicted = allocator._evict(count - allocator._free.count, child.request_id)
    if allocator._free.need_sort and count > allocator._free.num_ready:
        allocator._free.merge()
    taken = allocator._free.take(count)
    copies = tuple(map(PageCopy, row.page_ids[protected:num_pages], taken))
    shared = row.page_ids[:protected]
    new = Row(child, allocator._free_rows.pop(), node, shared + taken, row.width)
    new.protected = protected
    new.admitted = new.checkpointed = True
    allocator.tree.lock(node)
    allocator._rows[child.request_id] = new
    start_child(child, computed)
    new.prefilled = computed >= child.num_prefill_tokens
    made = Fork(parent, child, copies, commit, evicted)
    if allocator.events.enabled:
        _note(allocator, made, shared, taken)
    return made


def prepare_write(allocator: TokenAllocator, seq: Sequence, start: int, end: int) -> list[PageCopy]:
    """Nothing to copy: what lies behind the computed tokens is the sequence's own."""
    _admitted(allocator._row(seq))
    check_range(seq, start, end)
    return []


def _admitted(row: Row) -> Row:
    if not row.admitted:
        raise ValueError(f"request {row.seq.request_id!r} is pinned only: reserve before it forks or writes")
    return row


def _pages_in_tree(allocator: TokenAllocator, row: Row, computed: int) -> int:
    """Whole pages of the first `computed` tokens that the tree holds once they are checkpointed."""
    if not allocator._prefix_cache:
        return 0
    return min(max(row.protected, allocator._keys.num_pages(row.seq, computed)), computed // allocator.page_size)


def _fits(allocator: TokenAllocator, child: Sequence, count: int) -> bool:
    """Whether a row and `count` pages are there. Tells before anything is changed: a checkpoint only frees pages."""
    if not allocator._free_rows:
        allocator._refuse(child, "no free row")
        return False
    if count > sum(allocator.room()):
        allocator._refuse(child, "no room")
        return False
    return True


def _note(allocator: TokenAllocator, made: Fork, shared: PageIds, taken: PageIds) -> None:
    events, child = allocator.events, made.child.request_id
    events.add(EventKind.FORK, child, shared, made.parent.request_id)
    if taken:
        events.add(EventKind.RESERVE, child, taken)
    for copy in made.copies:
        events.add(EventKind.COPY, child, (copy.src, copy.dst))


def _checkpoint(allocator: TokenAllocator, row: Row, computed: int) -> Commit:
    before = row.protected
    runs, new = token_publish.checkpoint(allocator, row, computed)
    new_from = row.protected - len(new or ())
    published, duplicates = row.page_ids[new_from : row.protected], join_own(runs)
    if duplicates:
        allocator._free.free(duplicates)
    if allocator.events.enabled:
        token_publish.note(allocator, row.seq, published, duplicates)
    return Commit(row.seq, published, (), duplicates, duplicates, (before, new_from) if runs else (0, 0))
