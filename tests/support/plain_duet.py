"""A duet of the baselines: no forks, no windows, no tree; everything else as in `duet`."""

from __future__ import annotations

from typing import Any

from kvarena.allocators.config import make_allocator
from kvarena.allocators.host import HostTier
from kvarena.allocators.interface import Release, Sequence
from support.duet import Duet, Pair, same
from support.slow_baselines import SlowContiguous, SlowExact, declared, oracle
from support.slow_facts import Facts
from support.slow_host import SlowHost


class PlainDuet(Duet):
    """`contiguous` or `exact` beside its model."""

    def __post_init__(self) -> None:
        chosen = self.design
        self.ours: Any = make_allocator(chosen, num_pages=self.num_pages)
        if chosen.kind == "exact":
            self.model: Any = SlowExact(self.num_pages, chosen.page_size)
        else:
            buddy = chosen.placement == "buddy"
            self.model = SlowContiguous(self.num_pages, chosen.page_size, chosen.sizing, buddy, chosen.max_model_len)
        self.host, self.slow_host = HostTier(self.ours, self.host_pages), SlowHost(self.host_pages, chosen.page_size)

    def _new(self, tokens: list[int], shared: int, item: int, namespace: int) -> Pair:
        pair = super()._new(tokens, shared, item, namespace)
        pair.seq = Sequence(
            pair.facts.name,
            pair.facts.tokens,
            namespace=pair.facts.namespace,
            extra_keys=pair.facts.items,
            declared_max_tokens=declared(pair.facts),
            oracle_tokens=oracle(pair.facts),
        )
        return pair

    def _prepared(self, pair: Pair, n: int) -> bool:
        return True

    def _model_reserve(self, wants: list[tuple[str, int]]) -> Any:
        return self.model.reserve(wants)

    def _same_commit(self, pair: Pair, done: Any, end: int) -> None:
        same("given up", done.duplicates, ())
        self.model.commit(pair.facts.name, end)

    def _model_commit_to(self, facts: Facts, end: int) -> None:
        self.model.commit(facts.name, end)

    def _model_release(self, names: list[str], reason: Release) -> dict[str, list[int]]:
        return self.model.release(names)

    def _row(self, facts: Facts) -> list[int]:
        return list(self.model.holds[facts.name].row)

    def fork(self, choice: int, tail: list[int], whole_prompt: bool, fewer: int = 0) -> None:
        """Neither baseline forks."""

    def match(self, tokens: list[int], shared: int, item: int, namespace: int) -> None:
        """Theirs is a pin let go again."""

    def evict(self, tokens: int) -> None:
        same("evicted on demand", self.ours.evict(tokens), [])

    def _same_order(self) -> None:
        if self.design.kind == "exact":
            same("free stack", list(reversed(self.ours._free)), self.model.free)
        else:
            free = {page for start, count in self.ours._free.runs() for page in range(start, start + count)}
            same("free pages", sorted(free), [p for p, owner in enumerate(self.model.owner) if owner is None])

    def _same_row(self, pair: Pair) -> None:
        if not pair.pinned:
            same(f"row of {pair.facts.name}", self.ours.page_ids(pair.seq), self._row(pair.facts))
