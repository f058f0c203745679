"""The SIEVE order, as an example of adding one: a class with `offer`, `pop`, `clear`, `entries`, and a row in `ORDERS`.

One line by age and a hand that walks from the oldest to the newest and starts again. What was used since the hand
passed it last is spared once; what was not goes. New content is never moved, so one-time content goes quickly and
what returns stays (Zhang et al., NSDI 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from sortedcontainers import SortedKeyList


class SieveQueue:
    """Candidates for eviction by age. O(log n) for `offer`; for `pop` too, and as much for each one that it spares."""

    def __init__(self) -> None:
        self._line: Any = SortedKeyList(key=attrgetter("queued"))
        self._hand = (0, 0)  # where it stands: (created, serial) of the last one it looked at
        self._passed: dict[int, int] = {}  # serial -> hits when the hand spared it; who published it hit it once

    def offer(self, node: Any) -> None:
        """`node` is a candidate now."""
        if node.queued is None:
            node.queued = (node.created, node.serial)
            self._line.add(node)

    def pop(self) -> Any:
        """The first candidate from the hand on that was not used since the hand passed it; None when there is none."""
        while self._line:
            at = self._line.bisect_key_right(self._hand)
            node = self._line[at if at < len(self._line) else 0]
            if not (node.locks or node.children):
                self._hand = node.queued
                if node.hits > self._passed.get(node.serial, 1):
                    self._passed[node.serial] = node.hits
                    continue
                self._passed.pop(node.serial, None)
            self._line.remove(node)
            node.queued = None
            if not (node.locks or node.children):
                return node
        return None

    def clear(self) -> None:
        """Forget all entries."""
        self._line.clear()
        self._passed.clear()

    def entries(self) -> Iterator[tuple[Any, Any]]:
        """Key and node of all entries, for `check()`."""
        return ((node.queued, node) for node in self._line)

    def __len__(self) -> int:
        return len(self._line)
