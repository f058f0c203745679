"""The plainest prefix cache there is, as an oracle: one LRU list of ids, each request's ids touched last to first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any


def lru_hits(prompts: Iterable[Any], capacity: int) -> list[int]:
    """Ids of each prompt's longest cached prefix, looked up before its own ids go in."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for prompt in prompts:
        ids = prompt.tolist()
        found = next((place for place, item in enumerate(ids) if item not in cached), len(ids))
        hits.append(found)
        for item in reversed(ids):
            cached[item] = None
            cached.move_to_end(item)
            if len(cached) > capacity:
                cached.popitem(last=False)
    return hits
