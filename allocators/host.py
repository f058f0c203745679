"""Host tier: a sequence's pages move to host memory and back instead of being computed again.

It stands on the interface alone, so it serves every allocator. Swapping out copies the pages of the computed tokens
to host pages and releases the sequence as a preemption. Swapping in admits it like any other request: what the
prefix cache still holds is hit, not copied; the rest gets new device pages and its KV back from the host. When host
pages run short, whole sequences go, least recently swapped out first; they have to be computed again.

The caller carries out the moves, in order and at once: those of `swap_out` before the device pages are written
again, those of `swap_in` before anything reads the sequence, which other admissions of the same step may do.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from kvarena.allocators._room import pages_for
from kvarena.allocators.interface import (
    PADDING_PAGE,
    AllocatorError,
    Gate,
    KVAllocator,
    PageMove,
    Release,
    Sequence,
    SwapOut,
)


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Where the host pages are, and what moved so far.

    free + in_use = num_pages. `hit_pages` are device pages found cached at a swap-in, so that no page was copied for
    them; `copied_in` and `copied_out` count pages; `dropped` counts sequences whose host pages had to go.
    """

    num_pages: int
    free: int
    in_use: int
    sequences: int
    copied_out: int
    copied_in: int
    hit_pages: int
    dropped: int


@dataclass(frozen=True, slots=True)
class _Saved:
    """Host pages in position order, and the tokens in them."""

    seq: Sequence
    pages: array[int]
    num_tokens: int


class HostTier:
    """Swap space of `num_pages` host pages, ids from 1 as on the device, beside one allocator.

    Conservation law, checked by `check()`: free + in use = num_pages, each host page is free or one sequence's.

    >>> from kvarena.allocators.config import make_allocator
    >>> pool = make_allocator({"kind": "contiguous", "page_size": 4, "sizing": "pow2"}, num_pages=8)
    >>> host, a = HostTier(pool, num_pages=3), Sequence("a", range(9))
    >>> pool.admit(a) is not None, pool.commit([(a, 9)])[0].published
    (True, ())
    >>> [(move.src, move.dst) for move in host.swap_out(a).moves], a in host, pool.capacity().free
    ([(1, 1), (2, 2), (3, 3)], True, 8)
    >>> [(move.src, move.dst) for move in host.swap_in(a)], a in host, a.num_computed_tokens
    ([(1, 1), (2, 2), (3, 3)], False, 9)
    """

    def __init__(self, allocator: KVAllocator, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages: expected at least 0 host pages, found {num_pages}")
        self.allocator = allocator
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._saved: OrderedDict[str, _Saved] = OrderedDict()  # least recently swapped out first
        self.copies: tuple[PageMove, ...] = ()
        self._copied_out = self._copied_in = self._hit_pages = self._dropped = 0

    def __contains__(self, seq: Sequence) -> bool:
        """Whether the sequence's KV is on the host."""
        return seq.request_id in self._saved

    def swap_out(self, seq: Sequence) -> SwapOut | None:
        """Move a live sequence's computed tokens to the host and release its device pages.

        None, and nothing changed: it has more pages than the whole host tier, or computed none, or a sliding window
        left pages behind (coming back it would publish them without content). `dropped` are host pages whose
        sequences had to go. Moves: device page to host page.
        """
        if seq in self:
            raise ValueError(f"request {seq.request_id} is swapped out already")
        num_tokens = seq.num_computed_tokens
        device = self.allocator.page_ids(seq)[: pages_for(num_tokens, self.allocator.page_size)]
        if not 0 < len(device) <= self.num_pages or PADDING_PAGE in device:
            return None
        dropped = self._make_room(len(device))
        host = array("i", [self._free.pop() for _ in device])
        self._saved[seq.request_id] = _Saved(seq, host, num_tokens)
        self.allocator.release([seq], Release.PREEMPT)
        moves = _moves(device, host)
        self._copied_out += len(moves)
        return SwapOut(tuple(moves), tuple(dropped))

    def _make_room(self, need: int) -> list[int]:
        dropped: list[int] = []
        while len(self._free) < need:
            dropped += self._forget(next(iter(self._saved)))
            self._dropped += 1
        return dropped

    def _forget(self, name: str) -> list[int]:
        pages = self._saved.pop(name).pages
        self._free.extend(reversed(pages))
        return pages.tolist()

    def swap_in(self, seq: Sequence, gate: Gate | None = None) -> list[PageMove] | None:
        """Admit a swapped sequence again, with as many computed tokens as it had. Moves: host page to device page.

        `copies` are then what the reservation asks for, on the device and before the moves: a hit may end in a page.
        None: no room on the device; it stays on the host. ValueError: its KV is not on the host.
        """
        saved = self._get(seq)
        seq.resume()
        pin = self.allocator.pin(seq, gate)
        reserved = None
        if pin is not None:
            reserved = self.allocator.reserve([(seq, max(saved.num_tokens - pin.hit_tokens, 0))])
        if pin is None or reserved is None:
            seq.num_computed_tokens = 0
            return None
        self.copies = reserved[0].moves
        self.allocator.commit([(seq, max(saved.num_tokens, pin.hit_tokens))])
        hit_pages = pin.hit_tokens // self.allocator.page_size
        moves = _moves(saved.pages[hit_pages:], self.allocator.page_ids(seq)[hit_pages:])
        self._hit_pages += len(saved.pages) - len(moves)
        self._copied_in += len(moves)
        self._forget(seq.request_id)
        return moves

    def drop(self, seq: Sequence) -> list[int]:
        """Give up a swapped sequence's host pages (it was aborted, or will be computed again)."""
        self._get(seq)
        return self._forget(seq.request_id)

    def _get(self, seq: Sequence) -> _Saved:
        saved = self._saved.get(seq.request_id)
        if saved is None:
            raise ValueError(f"request {seq.request_id} is not on the host: never swapped out, or dropped for room")
        return saved

    def capacity(self) -> HostCapacity:
        """Host pages by state, and counts so far."""
        free = len(self._free)
        counts = (self._copied_out, self._copied_in, self._hit_pages, self._dropped)
        return HostCapacity(self.num_pages, free, self.num_pages - free, len(self._saved), *counts)

    def check(self) -> None:
        """Count every host page's owners. Raises AllocatorError with a full dump."""
        owned = [page for saved in self._saved.values() for page in saved.pages]
        if sorted([*owned, *self._free]) != list(range(1, self.num_pages + 1)):
            raise AllocatorError(f"host pages are not each free or one sequence's\n{self.dump()}")
        for saved in self._saved.values():
            if len(saved.pages) != pages_for(saved.num_tokens, self.allocator.page_size):
                raise AllocatorError(f"request {saved.seq.request_id}: wrong number of host pages\n{self.dump()}")

    def dump(self) -> str:
        """Every sequence and free host page."""
        rows = [f"  {name}: {saved.num_tokens} tokens in {list(saved.pages)}" for name, saved in self._saved.items()]
        return "\n".join([f"host tier, {self.num_pages} pages, free {list(reversed(self._free))}", *rows])

    def __repr__(self) -> str:
        return self.dump()


def _moves(sources: array[int], targets: array[int]) -> list[PageMove]:
    """Pairs up to the shorter list; a page that a hit left behind a window needs no copy."""
    return [PageMove(src, dst) for src, dst in zip(sources, targets, strict=False) if dst != PADDING_PAGE]
