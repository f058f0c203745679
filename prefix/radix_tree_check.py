"""Verification of a `RadixTree`: everything derived is recomputed from its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarena.prefix.radix_tree import Node, RadixTree


def faults(tree: RadixTree) -> Iterator[str]:
    """What is inconsistent, one sentence each; nothing for a sound tree. O(nodes)."""
    evictable = 0
    waiting = {node for key, node in tree.queue.entries() if key == node.queued}
    for node in tree.nodes():
        yield from _node_faults(node)
        if node.locks == 0:
            evictable += len(node.pages)
        if node.is_candidate and node not in waiting:
            yield f"{node!r} could be evicted but is not queued"
    if evictable != tree.evictable_pages:
        yield f"evictable count is {tree.evictable_pages}, unlocked nodes hold {evictable} pages"


def _node_faults(node: Node) -> Iterator[str]:
    width = len(node.edge) // max(len(node.pages), 1)
    if not node.pages or len(node.edge) != width * len(node.pages):
        yield f"{node!r}: an edge of {len(node.edge)} bytes for {len(node.pages)} pages"
    elif node.key != node.edge[:width] or node.parent.children.get(node.key) is not node:
        yield f"{node!r} is not filed under its first page"
    if any(child.parent is not node for child in node.children.values()):
        yield f"{node!r}: a child names another parent"
    if node.locks < sum(child.locks > 0 for child in node.children.values()):
        yield f"{node!r}: fewer locks than locked children"
