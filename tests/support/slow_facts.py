"""What a slow model knows of a request: kept by itself, never read from the sequence that an allocator writes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Facts:
    """One request as its user sees it. `computed` follows from the verbs alone."""

    name: str
    tokens: list[int]
    namespace: Any = None
    items: tuple[tuple[int, int, Any], ...] = ()
    prompt: int = 0
    prefill: int = 0
    computed: int = 0
    saved: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)
        self.prefill = self.prefill or len(self.tokens)


@dataclass(frozen=True)
class SlowGate:
    """The admission test, as the interface states it."""

    whole_prompt: bool = True
    page_rounded: bool = True
    headroom: int = 0
    strict: bool = False
    in_flight: int | None = None


def pages(tokens: int, size: int) -> int:
    """Pages that hold so many tokens."""
    return (tokens + size - 1) // size
