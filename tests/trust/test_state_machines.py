"""State machines: Hypothesis draws a design with all its fields and any order of verbs. After every rule the
allocator's answers and all of its state are those of a slow, obvious model, and `check()` holds."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvarena.allocators.config import Design, design
from kvarena.allocators.interface import Release
from support.duet import Difference, Duet
from support.duet_acts import ORDERS, RandomActs, random_duet
from support.slow_facts import SlowGate

CI = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SMALL = st.integers(0, 15)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
GATES = st.builds(
    SlowGate,
    whole_prompt=st.booleans(),
    page_rounded=st.booleans(),
    headroom=st.integers(0, 3),
    strict=st.booleans(),
    in_flight=st.none() | st.integers(1, 6),
)


@st.composite
def token_designs(draw: Any) -> Design:
    chosen = design(
        {
            "kind": "token",
            "page_size": draw(st.integers(1, 5)),
            "prefix_cache": draw(st.integers(0, 9)) > 0,
            "last_token_rule": draw(st.booleans()),
            "eviction_unit": draw(st.sampled_from(["leaf", "page"])),
            "split_touches_suffix": draw(st.booleans()),
            "demand_slack": draw(st.integers(0, 2)),
            "need_sort": draw(st.booleans()),
        }
    )
    # An order that configs do not offer for this kind, though the tree serves it.
    return chosen.model_copy(update={"eviction_order": draw(st.sampled_from(ORDERS))})


@st.composite
def block_designs(draw: Any) -> Design:
    size = draw(st.integers(1, 5))
    fields: dict[str, Any] = {
        "kind": "block",
        "page_size": size,
        "prefix_cache": draw(st.integers(0, 9)) > 0,
        "last_token_rule": draw(st.booleans()),
        "hash_fn": draw(st.sampled_from(["xxh3_64", "xxh3_128", "sha256"])),
    }
    if window := draw(st.none() | st.integers(1, 14)):
        every = draw(st.none() | st.sampled_from([0, size, 3 * size]))
        fields |= {"sliding_window": window, "retention_interval": every}
    forms = ["auto", "hashed"] if window or fields["hash_fn"] != "xxh3_64" else ["auto", "hashed", "runs"]
    return design({**fields, "form": draw(st.sampled_from(forms))})


class AllocatorMachine(RuleBasedStateMachine):
    """All verbs of the interface, forks, copies before writes, the host tier and reset, in any order."""

    designs: Any = None
    duet: Duet

    @initialize(data=st.data(), num_pages=st.integers(1, 16), host_pages=st.integers(0, 6), num_rows=st.integers(1, 6))
    def start(self, data: Any, num_pages: int, host_pages: int, num_rows: int) -> None:
        self.duet = Duet(data.draw(type(self).designs), num_pages, host_pages, num_rows)

    @rule(tokens=TOKENS, shared=st.integers(0, 60), item=SMALL, namespace=SMALL, gate=GATES)
    def arrive(self, tokens: list[int], shared: int, item: int, namespace: int, gate: SlowGate) -> None:
        self.duet.arrive(tokens, shared, item if item > 11 else 0, namespace if namespace > 9 else 0, gate)

    @rule(choice=SMALL, gate=GATES)
    def resume(self, choice: int, gate: SlowGate) -> None:
        self.duet.resume(choice, gate)

    @rule(tokens=TOKENS, shared=st.integers(0, 60), item=SMALL)
    def match(self, tokens: list[int], shared: int, item: int) -> None:
        self.duet.match(tokens, shared, item if item > 11 else 0, 0)

    @precondition(lambda self: self.duet.pairs)
    @rule(picks=st.lists(st.tuples(SMALL, st.integers(1, 9)), min_size=1, max_size=4), appended=st.booleans())
    def reserve(self, picks: list[tuple[int, int]], appended: bool) -> None:
        self.duet.reserve(picks, appended)

    @precondition(lambda self: any(pair.pending for pair in self.duet.pairs.values()))
    @rule(choice=SMALL, accepted=SMALL)
    def commit(self, choice: int, accepted: int) -> None:
        self.duet.commit(choice, accepted)

    @precondition(lambda self: self.duet.pairs)
    @rule(choice=SMALL, token=st.integers(0, 1))
    def run_ahead(self, choice: int, token: int) -> None:
        self.duet.run_ahead(choice, token)

    @precondition(lambda self: self.duet.pairs)
    @rule(choice=SMALL, token=st.integers(0, 1))
    def two_in_flight(self, choice: int, token: int) -> None:
        self.duet.two_in_flight(choice, token)

    @precondition(lambda self: self.duet.pairs)
    @rule(steps=st.integers(1, 4))
    def decode_batch(self, steps: int) -> None:
        self.duet.decode_batch(steps)

    @precondition(lambda self: self.duet.pairs)
    @rule(choices=st.lists(SMALL, min_size=1, max_size=2), reason=st.sampled_from(Release))
    def release(self, choices: list[int], reason: Release) -> None:
        self.duet.release(choices, reason)

    @precondition(lambda self: self.duet.pairs)
    @rule(choice=SMALL, tail=st.lists(st.integers(0, 1), max_size=3), whole_prompt=st.booleans(), fewer=SMALL)
    def fork(self, choice: int, tail: list[int], whole_prompt: bool, fewer: int) -> None:
        self.duet.fork(choice, tail, whole_prompt, fewer)

    @rule(tokens=st.integers(0, 30))
    def evict(self, tokens: int) -> None:
        self.duet.evict(tokens)

    @rule(choice=SMALL)
    def swap_out(self, choice: int) -> None:
        self.duet.swap_out(choice)

    @rule(choice=SMALL)
    def swap_in(self, choice: int) -> None:
        self.duet.swap_in(choice)

    @rule()
    def reset(self) -> None:
        self.duet.reset()

    @invariant()
    def alike(self) -> None:
        if hasattr(self, "duet"):
            self.duet.verify()

    def teardown(self) -> None:
        if hasattr(self, "duet"):
            self.duet.drain()


class TokenMachine(AllocatorMachine):
    designs = token_designs()


class BlockMachine(AllocatorMachine):
    designs = block_designs()


@pytest.mark.parametrize("machine", [TokenMachine, BlockMachine])
def test_any_order_of_verbs_decides_as_the_slow_model(machine):
    run_state_machine_as_test(machine, settings=CI)


# Draws of `random` reach deeper than Hypothesis does in the time: thousands of acts in tight pools.


DRAWS = [(kind, seed, 150) for kind in ("token", "block", "general", "contiguous", "exact") for seed in range(24)]
# Kept: seeds that told a fault, in the code or planted, which the first 24 do not tell.
DRAWS += [
    ("general", 1633, 250),  # a pin that was never admitted counted as a use of its pages when it finished
    ("token", 1122, 160),  # the same in the token design
    ("general", 282, 150),  # equal pages of two edges came free as one run
]


@pytest.mark.parametrize(("kind", "seed", "verbs"), DRAWS)
def test_random_verbs_in_tight_pools_decide_as_the_slow_model(kind, seed, verbs):
    rng = random.Random(seed)
    duet = random_duet(rng, kind)
    acts = RandomActs(duet, rng)
    for _ in range(verbs):
        acts.step()
    duet.drain()


ROOMY = [("token", seed, 600) for seed in range(40)]
ROOMY += [(kind, seed, 400) for kind in ("block", "general", "contiguous", "exact") for seed in range(10)]


@pytest.mark.parametrize(("kind", "seed", "verbs"), ROOMY)
def test_random_verbs_in_roomy_pools_decide_as_the_slow_model(kind, seed, verbs):
    """Prompts of many pages stay long enough to part and meet again, so that age and splits count."""
    rng = random.Random(seed)
    duet = random_duet(rng, kind, roomy=True)
    acts = RandomActs(duet, rng, pages=8)
    for _ in range(verbs):
        acts.step()
    duet.drain()


@pytest.mark.parametrize("kind", ["token", "block"])
def test_the_random_verbs_reach_what_they_are_meant_to_reach(kind, monkeypatch):
    """Every answer of every kind is seen: grants and refusals, evictions, duplicates, copies, moves, drops."""
    seen: Counter[str] = Counter()
    from support import duet as module

    plain = module.same

    def noting(what: str, ours: Any, model: Any) -> None:
        name = re.sub(r" (of|for) r\d+$", "", what)
        seen[f"{name}: {'something' if model else 'nothing'}"] += 1
        plain(what, ours, model)

    monkeypatch.setattr(module, "same", noting)
    for seed in range(100):
        rng = random.Random(1000 + seed)
        duet = random_duet(rng, kind)
        acts = RandomActs(duet, rng)
        for _ in range(120):
            acts.step()
    both = ["pin", "refused", "evicted", "fork refused", "copies of the fork", "swap out refused", "moves in"]
    both += ["evicted on demand", "batch refused", "pages of the batch", "cached by the release", "dropped", "reset"]
    both += ["freed by the release", "swap in refused"]
    own = ["duplicates", "copies", "evicted by the release", "evicted by the fork"]
    both += ["freed by the commit"] if kind == "token" else own
    for what in both:
        assert min(seen[f"{what}: something"], seen[f"{what}: nothing"]) > 0, (what, seen)
    assert seen["moves out: something"]


def test_a_difference_says_what_both_sides_have():
    duet = Duet(design("sglang"), 4)
    duet.model.free.reverse()
    with pytest.raises(Difference, match=r"free pages: the allocator has \[1, 2, 3, 4\], the model \[4, 3, 2, 1\]"):
        duet.verify()
