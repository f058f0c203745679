"""Verification of a `RunTree`: everything derived is recomputed from nodes and runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvarena.prefix.run_tree import Node, Run, RunTree


def nodes(tree: RunTree) -> Iterator[Node]:
    """Every node, roots first."""
    waiting = list(tree._roots.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def tree_problems(tree: RunTree) -> list[str]:
    """What is wrong with nodes, idle list and counters; empty when sound. Terminates on any list of idle runs."""
    found = _list_problems(tree)
    if found:
        return found
    for node in nodes(tree):
        found += _node_problems(node)
    idle = set(tree.idle())
    in_tree = {run for node in nodes(tree) for run in node.copies}
    found += [_named(run, "is idle and serves nobody") for run in idle - in_tree]
    found += [_named(run, "is idle and has holders") for run in idle if run.refs]
    found += [_named(run, "is leaked: no holder, and not in the free queue") for run in in_tree - idle if not run.refs]
    evictable = sum(len(run.pages) for run in idle)
    if evictable != tree.evictable:
        found.append(f"evictable is {tree.evictable}, {evictable} pages of idle runs")
    duplicates = sum(len(node) * max(len(node.copies) - 1, 0) for node in nodes(tree))
    if duplicates != tree.duplicates:
        found.append(f"duplicates is {tree.duplicates}, counted {duplicates}")
    return found


def _list_problems(tree: RunTree) -> list[str]:
    seen: set[Run] = set()
    before, run = tree._ends, tree._ends.after
    while run is not tree._ends:
        if run in seen:
            return [_named(run, "stands in the queue twice")]
        if run.before is not before:
            return [_named(run, "does not name the run before it in the queue")]
        seen.add(run)
        before, run = run, run.after
    return [] if tree._ends.before is before else ["the queue does not end with the run that it names as its tail"]


def _node_problems(node: Node) -> Iterator[str]:
    for key, child in node.children.items():
        if child.key != key or child.parent is not node:
            yield f"node {child.key!r} stands under key {key!r} of another node or name"
    if node.parent is None:
        if node.copies or node.edge:
            yield "a root has pages"
        return
    first = node.key[0] if isinstance(node.key, tuple) else node.key
    if not node.edge or len(node.edge) % node.width or node.edge[: node.width] != first:
        yield f"node {node.key!r}: its text does not begin with its key, in whole pages"
    if isinstance(node.key, tuple) and len(node) != 1:
        yield f"node {node.key!r}: a page with an item stands alone"
    if not (node.copies or node.children or node.users):
        yield f"node {node.key!r} leads nowhere"
    for run in node.copies:
        if run.node is not node or len(run.pages) != len(node):
            yield _named(run, f"does not fit its node of {len(node)} pages")


def holder_problems(tree: RunTree, held: Counter[Run], users: Counter[int]) -> Iterator[str]:
    """Do ref counts equal holders? `held` counts the rows of each run, `users` those that end in a node, by id."""
    for run in {*held, *(run for node in nodes(tree) for run in node.copies)}:
        if run.refs != held[run]:
            yield _named(run, f"has ref count {run.refs}, {held[run]} rows name it")
        if run.node is None and run not in tree.withdrawn:
            yield _named(run, "is held as published and serves nobody")
    shared = sum(len(run.pages) for run, count in held.items() if count > 1)
    if shared != tree.shared:
        yield f"shared is {tree.shared}, counted {shared}"
    for node in nodes(tree):
        if node.users != users[id(node)]:
            yield f"node {node.key!r}: {node.users} users, {users[id(node)]} rows end in it"


def text_above(node: Node) -> list[Any]:
    """Keys of all pages from the root to the end of `node`."""
    keys: list[Any] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        pages = [at.edge[i : i + at.width] for i in range(0, len(at.edge), at.width)]
        keys[:0] = [at.key] if isinstance(at.key, tuple) else pages
        at = at.parent
    return keys


def _named(run: Run, what: str) -> str:
    return f"run of pages {list(run.pages)} {what}"
