"""The host tier once more: a list of free pages and a list of who is on it, oldest first."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.slow_facts import Facts, pages


@dataclass
class SlowHost:
    """`saved` are (name, host pages, tokens), least recently swapped out first."""

    num_pages: int
    size: int
    free: list[int] = field(default_factory=list)
    saved: list[tuple[str, list[int], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_pages + 1))

    def swap_out(self, facts: Facts, row: list[int]) -> tuple[list[tuple[int, int]], list[int]] | None:
        """Moves and dropped host pages; None: it does not fit, computed nothing, or a window left pages behind."""
        device = row[: pages(facts.computed, self.size)]
        if not device or len(device) > self.num_pages or 0 in device:
            return None
        dropped = []
        while len(self.free) < len(device):
            _, host, _ = self.saved.pop(0)
            dropped += host
            self.free = host + self.free
        host, self.free = self.free[: len(device)], self.free[len(device) :]
        self.saved.append((facts.name, host, facts.computed))
        return list(zip(device, host, strict=True)), dropped

    def tokens(self, name: str) -> int:
        return next(tokens for other, _, tokens in self.saved if other == name)

    def drop(self, name: str) -> list[int]:
        """Give its host pages up."""
        _, host, _ = next(entry for entry in self.saved if entry[0] == name)
        self.saved = [entry for entry in self.saved if entry[0] != name]
        self.free = host + self.free
        return host

    def swap_in(self, name: str, row: list[int], hit_pages: int) -> list[tuple[int, int]]:
        """Moves of what the device did not hold any more."""
        tokens = self.tokens(name)
        host = self.drop(name)
        targets = row[hit_pages : pages(tokens, self.size)]
        return [(src, dst) for src, dst in zip(host[hit_pages:], targets, strict=False) if dst]
