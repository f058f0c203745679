"""Acts of a `Duet` drawn from a `random.Random`: weighted, biased towards shared prefixes and tight pools."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvarena.allocators.config import Design, design
from kvarena.allocators.interface import Release
from support.duet import Duet
from support.general_duet import GeneralDuet
from support.plain_duet import PlainDuet
from support.slow_facts import SlowGate

ORDERS = ("lru", "lfu", "fifo", "filo", "mru", "priority", "slru")


def _shared_fields(rng: random.Random, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "page_size": rng.choice([1, 1, 2, 3, 4, 5]),
        "prefix_cache": rng.random() < 0.9,
        "last_token_rule": rng.random() < 0.8,
    }


def random_design(rng: random.Random, kind: str) -> Design:
    """Every field that the kind honours, drawn."""
    fields = _shared_fields(rng, kind)
    if kind == "token":
        fields |= {
            "eviction_unit": rng.choice(["leaf", "page"]),
            "split_touches_suffix": rng.random() < 0.7,
            "demand_slack": rng.choice([0, 1, 1, 2]),
            "need_sort": rng.random() < 0.3,
        }
        return design(fields).model_copy(update={"eviction_order": rng.choice(ORDERS)})
    if rng.random() < 0.35:
        every = rng.choice([None, 0, fields["page_size"], 3 * fields["page_size"]])
        fields |= {"sliding_window": rng.randint(1, 14), "retention_interval": every}
    fields["hash_fn"] = rng.choice(["xxh3_64", "xxh3_128", "sha256"])
    plain = "sliding_window" not in fields and fields["hash_fn"] == "xxh3_64"
    fields["form"] = rng.choice(["auto", "hashed", "runs"] if plain else ["auto", "hashed"])
    return design(fields)


def random_general(rng: random.Random) -> Design:
    """Fields of either design that the general form carries out with the same pages."""
    kind = rng.choice(["block", "token"])
    fields = _shared_fields(rng, kind)
    if kind == "token":
        fields |= {"demand_slack": rng.choice([0, 1, 1, 2]), "eviction_order": rng.choice(ORDERS)}
    return design(fields)


def random_duet(rng: random.Random, kind: str, roomy: bool = False) -> Duet:
    """A small pool, a host tier and few rows, all drawn, under a drawn design. Pools are tight, so that everything runs
    out; `roomy` ones hold several prompts of many pages, so that prefixes part, meet again and age."""
    pages = rng.randint(12, 40) if roomy else rng.choice([rng.randint(1, 8), rng.randint(4, 16)])
    sizes = (pages, rng.randint(0, 6), rng.randint(1, 6))
    if kind in ("token", "block"):
        return Duet(random_design(rng, kind), *sizes)
    if kind == "general":
        return GeneralDuet(random_general(rng), *sizes)
    fields: dict[str, Any] = {"kind": kind, "page_size": rng.choice([1, 1, 2, 3, 4])}
    if kind == "contiguous":
        fields |= {"sizing": rng.choice(["max", "pow2", "declared", "oracle"])}
        fields |= {"placement": rng.choice(["first_fit", "buddy"]), "max_model_len": rng.randint(8, 40)}
        if fields["sizing"] != "max" and rng.random() < 0.5:
            del fields["max_model_len"]
    return PlainDuet(design(fields), 2 * sizes[0], *sizes[1:])


def random_gate(rng: random.Random) -> SlowGate:
    if rng.random() < 0.6:
        return SlowGate()
    return SlowGate(
        whole_prompt=rng.random() < 0.7,
        page_rounded=rng.random() < 0.6,
        headroom=rng.choice([0, 1, 3]),
        strict=rng.random() < 0.5,
        in_flight=rng.choice([None, None, 4]),
    )


class RandomActs:
    """Acts on one duet; `step` takes one and verifies all state. Prompts have up to `pages` pages and a few tokens, and
    each token is another than the usual with chance `other`."""

    def __init__(self, duet: Duet, rng: random.Random, pages: int = 3, other: float = 0.1) -> None:
        self.duet, self.rng = duet, rng
        self.pages, self.other = pages, other
        self.weights: dict[Callable[[], None], int] = {
            self._arrive: 6,
            self._reserve: 10,
            self._commit: 12,
            self._release: 4,
            self._run_ahead: 2,
            self._two_in_flight: 2,
            self._decode_batch: 2,
            self._fork: 4,
            self._match: 1,
            self._evict: 1,
            self._swap: 5,
            self._resume: 2,
            duet.reset: 1,
        }

    def step(self) -> None:
        acts, weights = zip(*self.weights.items(), strict=True)
        self.rng.choices(acts, weights)[0]()
        self.duet.verify()

    def _number(self) -> int:
        return self.rng.randrange(16)

    def _tokens(self) -> list[int]:
        size = self.duet.design.page_size
        longest = min(self.pages * size + 4, self.duet.num_pages * size)
        return [int(self.rng.random() < self.other) for _ in range(self.rng.randint(1, longest))]

    def _prompt(self) -> tuple[list[int], int, int, int]:
        item = self._number() if self.rng.random() < 0.2 else 0
        return self._tokens(), self.rng.randrange(40), item, self._number() if self.rng.random() < 0.3 else 0

    def _arrive(self) -> None:
        self.duet.arrive(*self._prompt(), random_gate(self.rng))

    def _resume(self) -> None:
        self.duet.resume(self._number(), random_gate(self.rng))

    def _match(self) -> None:
        self.duet.match(*self._prompt())

    def _reserve(self) -> None:
        picks = [(self._number(), self.rng.randint(1, 9)) for _ in range(self.rng.randint(1, 4))]
        self.duet.reserve(picks, self.rng.random() < 0.6)

    def _commit(self) -> None:
        self.duet.commit(self._number(), self._number())

    def _run_ahead(self) -> None:
        self.duet.run_ahead(self._number(), self.rng.randrange(2))

    def _two_in_flight(self) -> None:
        self.duet.two_in_flight(self._number(), self.rng.randrange(2))

    def _decode_batch(self) -> None:
        self.duet.decode_batch(self.rng.randint(1, 4))

    def _release(self) -> None:
        reasons = (Release.FINISH, Release.FINISH, Release.PREEMPT, Release.ABORT)
        self.duet.release([self._number() for _ in range(self.rng.randint(1, 2))], self.rng.choice(reasons))

    def _fork(self) -> None:
        tail = self._tokens()[:3] if self.rng.random() < 0.6 else []
        fewer = self._number() if self.rng.random() < 0.4 else 0
        self.duet.fork(self._number(), tail, self.rng.random() < 0.4, fewer)

    def _evict(self) -> None:
        self.duet.evict(self.rng.randrange(20))

    def _swap(self) -> None:
        (self.duet.swap_out if self.rng.random() < 0.4 else self.duet.swap_in)(self._number())
