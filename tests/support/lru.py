"""Plain LRU over blocks, written apart from kvarena's allocators: the oracle for hit rates on traces.

The longest contiguous prefix found before the request's own blocks go in counts as hit. Then every block of the
request is used, first to last (`fwd`) or last to first (`rev`), and the least recently used blocks go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class LruResult:
    """Counts over a whole run; lengths in tokens."""

    accesses: int = 0
    hits: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.accesses

    @property
    def token_rate(self) -> float:
        return self.hit_tokens / self.tokens


def replay_lru(
    requests: Iterable[tuple[Sequence[int], int]], capacity: int | None, *, grain: int, reverse: bool = False
) -> LruResult:
    """requests: (block ids, prompt tokens); capacity in blocks, None = no end."""
    cached: OrderedDict[int, None] = OrderedDict()
    result = LruResult()
    for blocks, num_tokens in requests:
        hits = 0
        while hits < len(blocks) and blocks[hits] in cached:
            hits += 1
        result.accesses += len(blocks)
        result.hits += hits
        result.tokens += num_tokens
        result.hit_tokens += min(hits * grain, num_tokens)
        for block in reversed(blocks) if reverse else blocks:
            if block in cached:
                cached.move_to_end(block)
            else:
                cached[block] = None
                if capacity is not None and len(cached) > capacity:
                    cached.popitem(last=False)
                    result.evictions += 1
    return result
