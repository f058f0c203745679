"""Self-check and description of the token allocator: recompute everything from raw contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kvarena.allocators.interface import AllocatorError
from kvarena.allocators.token_keys import HashedNamespace
from kvarena.allocators.token_row import Row
from kvarena.prefix.radix_tree import Node

if TYPE_CHECKING:
    from kvarena.allocators.token import TokenAllocator

SHOWN_NODES = 40
SHOWN_IDS = 12


def verify(allocator: TokenAllocator) -> None:
    """Raise AllocatorError, with the fault and a full dump, unless every derived field can be recomputed."""
    for fault in _faults(allocator):
        raise AllocatorError(f"{fault}\n{describe(allocator, full=True)}")


def _faults(allocator: TokenAllocator) -> Iterator[str]:
    yield from allocator.tree.faults()
    yield from _row_faults(allocator)
    yield from _lock_faults(allocator)
    yield from _page_faults(allocator)


def _row_faults(allocator: TokenAllocator) -> Iterator[str]:
    free = set(allocator._free)
    rows = allocator._rows
    taken = [row.index for row in rows.values()]
    if sorted(taken + allocator._free_rows) != list(range(1, allocator.num_rows + 1)):
        yield f"rows 1..{allocator.num_rows} are not each taken or free: taken {taken}, {allocator._free_rows} free"
    for request_id, row in rows.items():
        if row.seq.request_id != request_id:
            yield f"the row of {row.seq.request_id!r} is filed under {request_id!r}"
        for position, page in enumerate(row.page_ids):
            if page in free:
                yield f"live row of {request_id!r} points at free page {page} (position {position})"
        path = allocator.tree.path_pages(row.node)
        if row.page_ids[: row.protected] != path:
            yield (
                f"row of {request_id!r}: its first {row.protected} pages are {_ids(row.page_ids[: row.protected])}, "
                f"the tree holds {_ids(path)} on the path it locks"
            )
        if row.seq.num_computed_tokens > len(row.page_ids) * allocator.page_size:
            yield (
                f"{request_id!r} has {row.seq.num_computed_tokens} computed tokens in {len(row.page_ids)} pages "
                f"of {allocator.page_size}"
            )


def _lock_faults(allocator: TokenAllocator) -> Iterator[str]:
    owners: dict[Node, list[str]] = {}
    for request_id, row in allocator._rows.items():
        owners.setdefault(row.node, []).append(request_id)
    for node in [*allocator.tree.all_roots(), *allocator.tree.nodes()]:
        locked_children = sum(child.locks > 0 for child in node.children.values())
        expected = len(owners.pop(node, ())) + locked_children + (node.parent is None)
        if node.locks != expected:
            yield f"{node!r} with pages {_ids(node.pages)} has lock count {node.locks}, its holders make {expected}"
    for node, names in owners.items():
        yield f"{names} lock {node!r}, which is not in the tree"


def _page_faults(allocator: TokenAllocator) -> Iterator[str]:
    state: dict[int, str] = {}
    in_use = 0
    for name, pages in _owners(allocator):
        for page in pages:
            if page in state:
                yield f"page {page} is in two states: {state[page]} and {name}"
            if not 1 <= page <= allocator.num_pages:
                yield f"page {page} ({name}) is outside 1..{allocator.num_pages}"
            state[page] = name
    lost = [page for page in range(1, allocator.num_pages + 1) if page not in state]
    if lost:
        yield f"leaked: nobody has pages {_ids(lost)}"
    in_use = sum(name not in ("free", "cached") for name in state.values())
    capacity = allocator.capacity()
    free, evictable = sum(1 for _ in allocator._free), sum(name == "cached" for name in state.values())
    counts = (capacity.free, capacity.evictable, capacity.in_use)
    if counts != (free, evictable, in_use):
        yield f"counts say free, evictable, in use = {counts}; the contents say {(free, evictable, in_use)}"


def _owners(allocator: TokenAllocator) -> Iterator[tuple[str, Iterable[int]]]:
    """Every page once, with the state that it has."""
    yield "free", allocator._free
    for node in allocator.tree.nodes():
        yield ("held in the tree" if node.locks else "cached"), node.pages
    for request_id, row in allocator._rows.items():
        yield f"tail of {request_id!r}", row.page_ids[row.protected :]


def describe(allocator: TokenAllocator, *, full: bool = False) -> str:
    """Counts, rows and tree as text; `full` shows every id, else long lists are cut."""
    show = str if full else _ids
    capacity = allocator.capacity()
    lines = [
        f"token allocator, {capacity.num_pages} pages of {capacity.page_size} tokens: "
        f"{capacity.free} free, {capacity.evictable} evictable, {capacity.in_use} in use",
        f"free, front first: {show(list(allocator._free) if full else _first(allocator._free))}",
    ]
    lines += [_row_line(row, show) for row in allocator._rows.values()]
    for root in allocator.tree.all_roots():
        lines.append(f"tree {_named(root.key)}:" if root.key is not None else "tree:")
        lines += _tree_lines(root, 1, show)
        if not full and len(lines) > SHOWN_NODES:
            return "\n".join([*lines[:SHOWN_NODES], "  ..."])
    return "\n".join(lines)


def _named(namespace: object) -> str:
    """A namespace without its encoding."""
    if isinstance(namespace, HashedNamespace):
        return "of page hashes" if namespace.namespace is None else f"of page hashes, {_named(namespace.namespace)}"
    return repr(namespace[1]) if isinstance(namespace, tuple) else repr(namespace)


def _row_line(row: Row, show: Callable[[object], str]) -> str:
    return (
        f"row {row.index} {row.seq!r}: pages {show(row.page_ids.tolist())}, the first {row.protected} held in the tree"
    )


def _tree_lines(node: Node, depth: int, show: Callable[[object], str]) -> list[str]:
    """One line a node, children indented. Iterative: paths can be long."""
    lines = []
    stack = [(child, depth) for child in node.children.values()]
    while stack:
        node, depth = stack.pop()
        lines.append(f"{'  ' * depth}{show(node.pages.tolist())} locks {node.locks} accessed {node.last_access}")
        stack.extend((child, depth + 1) for child in node.children.values())
    return lines


def _first(ids: Iterable[int]) -> list[int]:
    first = []
    for page in ids:
        first.append(page)
        if len(first) > SHOWN_IDS:
            break
    return first


def _ids(ids: object) -> str:
    items = list(ids)  # type: ignore[call-overload]
    shown = ", ".join(map(str, items[:SHOWN_IDS]))
    return f"[{shown}{', ...' if len(items) > SHOWN_IDS else ''}]"
