"""What a sliding window changes for the block design, by the rules of vLLM 0.32.0. Plain arithmetic, no state."""

from __future__ import annotations

from collections.abc import Sequence

from kvarena.allocators.config import Design
from kvarena.allocators.interface import PADDING_PAGE, Gate


class SlidingWindow:
    """A query sees `tokens` tokens, itself included.

    tail_pages  whole pages before a page border that the token after it still sees: ceil((tokens - 1) / page_size)
    interval    None publishes every full page, 0 the prompt's tail, k also a tail before every multiple of k tokens

    >>> window = SlidingWindow(Design(page_size=4, sliding_window=8, retention_interval=0))
    >>> window.tail_pages, [p for p in range(10) if window.retains(p, num_prompt_tokens=17)]
    (2, [2, 3])
    >>> window.left_behind(20, [0, 7, 8, 9, 3])
    (1, 3)
    """

    __slots__ = ("interval", "page_size", "tail_pages", "tokens")

    def __init__(self, design: Design) -> None:
        self.tokens = design.sliding_window or 1
        self.page_size = design.page_size
        self.interval = design.retention_interval
        if self.interval and self.interval % self.page_size:
            raise ValueError(
                f"retention_interval: expected a multiple of the page size {self.page_size}, found {self.interval}"
            )
        self.tail_pages = -(-(self.tokens - 1) // self.page_size)

    def admission_cap(self, gate: Gate, otherwise: int) -> int:
        """Most pages one admission is asked for: what stays in the window, what is in flight, one page more."""
        if gate.max_in_flight_tokens is None:
            return otherwise
        return -(-(self.tokens - 1 + gate.max_in_flight_tokens) // self.page_size) + 1

    def left_behind(self, written: int, pages: Sequence[int]) -> tuple[int, int]:
        """Row entries [low, high) that no token after the first `written` ones can see and that still name a page."""
        high = min(max(written - self.tokens + 1, 0) // self.page_size, len(pages))
        low = high
        while low and pages[low - 1] != PADDING_PAGE:
            low -= 1
        return low, high

    def retains(self, position: int, num_prompt_tokens: int) -> bool:
        """Is the full page at `position` published?

        With an interval only pages where a later prompt may join: those that the prompt's last hit border needs
        (`num_prompt_tokens` is the original prompt's, also after a preemption), and at k those that a multiple of
        k tokens needs.
        """
        if self.interval is None:
            return True
        border = (num_prompt_tokens - 1) // self.page_size
        if border - self.tail_pages <= position < border:
            return True
        if self.interval == 0:
            return False
        every = self.interval // self.page_size
        return position >= (position // every + 1) * every - self.tail_pages
