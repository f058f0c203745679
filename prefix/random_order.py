"""The random order: any candidate with equal chance, the yardstick below which an order does harm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class RandomQueue:
    """Candidates in no order; `pop` draws. The same calls draw the same. O(1)."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._random = random.Random(0)

    def offer(self, node: Any) -> None:
        """`node` is a candidate now."""
        if node.queued is None:
            node.queued = node.serial
            self._nodes.append(node)

    def pop(self) -> Any:
        """One of the candidates; None when there is none."""
        nodes = self._nodes
        while nodes:
            at = self._random.randrange(len(nodes))
            nodes[at], nodes[-1] = nodes[-1], nodes[at]
            node = nodes.pop()
            node.queued = None
            if not (node.locks or node.children):
                return node
        return None

    def clear(self) -> None:
        """Forget all entries; the draws go on."""
        self._nodes.clear()

    def entries(self) -> Iterator[tuple[Any, Any]]:
        """Key and node of all entries, for `check()`."""
        return ((node.queued, node) for node in self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)
