"""One sequence through an allocator, verb by verb, as a table to read: what a notebook shows and a lecture draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
from kvarena.allocators.interface import Event, KVAllocator, Release, Sequence


class Walk:
    """Carries out verbs on one allocator and keeps a row of each: arguments, pages, events, capacity.

    >>> from kvarena.allocators.config import make_allocator
    >>> walk = Walk(make_allocator({"kind": "block", "page_size": 4}, num_pages=8))
    >>> walk.arrive(Sequence("a", range(6)))
    >>> walk.table()[["verb", "pages", "free"]].values.tolist()
    [['pin a', '', 8], ['reserve a', '1 2', 6], ['commit a', '1 2', 6]]
    """

    def __init__(self, allocator: KVAllocator) -> None:
        self.allocator = allocator
        self.rows: list[dict[str, Any]] = []
        allocator.events.enabled = True

    def arrive(self, seq: Sequence) -> None:
        """pin, reserve the prompt behind the hit, commit it. Raises ValueError when there is no room."""
        pin = self._do("pin", seq, lambda: self.allocator.pin(seq))
        if pin is None:
            raise ValueError(f"request {seq.request_id}: no room in {self.allocator.num_pages} pages")
        need = seq.num_prefill_tokens - pin.hit_tokens
        self._do("reserve", seq, lambda: self.allocator.reserve([(seq, need)]))
        self._do("commit", seq, lambda: self.allocator.commit([(seq, seq.num_prefill_tokens)]))

    def decode(self, seq: Sequence, token: int) -> None:
        """One generated token: its slot, then its KV."""
        seq.append(token)
        self._do("reserve", seq, lambda: self.allocator.reserve([(seq, 1)]))
        self._do("commit", seq, lambda: self.allocator.commit([(seq, seq.num_tokens)]))

    def finish(self, seq: Sequence) -> None:
        """The request ends; what its design keeps stays cached."""
        self._do("release", seq, lambda: self.allocator.release([seq], Release.FINISH))

    def slots(self, seq: Sequence) -> list[int]:
        """Slot of each token with KV: page x page_size + offset."""
        size, pages = self.allocator.page_size, self.allocator.page_ids(seq)
        return [pages[i // size] * size + i % size for i in range(seq.num_computed_tokens)]

    def table(self) -> pd.DataFrame:
        """One row a verb."""
        return pd.DataFrame(self.rows)

    def _do(self, verb: str, seq: Sequence, act: Callable[[], Any]) -> Any:
        answer = act()
        capacity = self.allocator.capacity()
        live = verb == "commit" or (verb == "reserve" and answer is not None)
        self.rows.append(
            {
                "verb": f"{verb} {seq.request_id}",
                "computed tokens": seq.num_computed_tokens,
                "pages": " ".join(map(str, self.allocator.page_ids(seq))) if live else "",
                "events": "; ".join(_text(event) for event in self.allocator.events.drain()),
                "free": capacity.free,
                "evictable": capacity.evictable,
                "in use": capacity.in_use,
            }
        )
        return answer


def _text(event: Event) -> str:
    pages = " ".join(map(str, event.page_ids))
    reason = f"({event.reason})" if event.reason else ""
    return " ".join(part for part in (event.kind.value, pages, reason) if part)
