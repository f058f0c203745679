"""Page counts and the admission test, as the two baselines use them."""

from __future__ import annotations

from kvarena.allocators.interface import Gate


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens.

    >>> pages_for(0, 16), pages_for(16, 16), pages_for(17, 16)
    (0, 1, 2)
    """
    return -(-num_tokens // page_size)


def admits(gate: Gate, num_tokens: int, page_size: int, free_pages: int) -> bool:
    """Whether `num_tokens` new tokens and the gate's headroom fit `free_pages`; headroom and test as `Gate` says.

    >>> admits(Gate(), 33, 16, 3), admits(Gate(strict=True), 33, 16, 3), admits(Gate(headroom=1), 33, 16, 3)
    (True, False, False)
    >>> admits(Gate(page_rounded=False, headroom=15), 33, 16, 3)
    True
    """
    if gate.page_rounded:
        need, room = pages_for(num_tokens, page_size) + gate.headroom, free_pages
    else:
        need, room = num_tokens + gate.headroom, free_pages * page_size
    return need < room if gate.strict else need <= room
