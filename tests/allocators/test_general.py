"""The general form decides as the fast forms at their values, and the ends meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kvarena.allocators.config import GENERAL, design, make_allocator
from kvarena.allocators.general import GeneralAllocator
from kvarena.allocators.interface import KVAllocator
from kvarena.experiments.random_ops import RandomOps
from kvarena.experiments.scenarios import Scenario, ScenarioRunner, read_scenario, run_scenario
from support.block_actors import Actors
from support.crowd import Crowd
from support.golden import find_log, first_difference, load_jsonl, log_files, plain_name

LONG = 400  # ops; longer scenarios are verified every CHECK_EVERY ops
CHECK_EVERY = 60
TOKEN_OPTIONS: dict[str, dict[str, Any]] = {"sglang": {}, "sglang_admission": {"admission": "sglang"}}
TOKEN_LOGS = [(folder, plain_name(path)) for folder in TOKEN_OPTIONS for path in log_files(folder)]
BLOCK_LOGS = [plain_name(path) for path in log_files("vllm")]
RULES = {kind: design({"kind": kind, "page_size": 4}) for kind in ("block", "token")}


def all_rules_of(kind: str) -> dict[str, Any]:
    """Every field by which block and token differ, at the values of `kind`."""
    return {name: getattr(RULES[kind], name) for name in GENERAL}


def decisions(
    scenario: Scenario, kind: str, protocol: str | None = None, admission: str = "exact", **fields: Any
) -> Iterator[dict[str, Any]]:
    """A decision log of the general form. `protocol`: the upstream whose scheduler drives it, if not its kind's."""
    page_size = fields.pop("page_size", None)
    runner = ScenarioRunner.for_scenario(scenario.header, kind, page_size=page_size, admission=admission, **fields)
    allocator = runner.allocator
    assert isinstance(allocator, GeneralAllocator)
    if protocol is not None:
        allocator.kind = protocol  # type: ignore[misc]
    yield scenario.header
    for number, (_, op) in enumerate(scenario.ops, 1):
        yield runner.decide(op)
        if len(scenario.ops) <= LONG or number % CHECK_EVERY == 0:
            allocator.check()


@pytest.mark.parametrize("name", BLOCK_LOGS)
def test_at_blocks_values_every_decision_is_vllms(name: str) -> None:
    ours = decisions(read_scenario(find_log("scenarios", name)), "block", form="general")
    assert first_difference(load_jsonl(find_log("vllm", name)), ours) is None


@pytest.mark.parametrize(("folder", "name"), TOKEN_LOGS)
def test_at_tokens_values_every_decision_is_sglangs(folder: str, name: str) -> None:
    scenario, size = name.rsplit(".p", 1)
    ours = decisions(
        read_scenario(find_log("scenarios", scenario)),
        "token",
        form="general",
        page_size=int(size),
        **TOKEN_OPTIONS[folder],
    )
    assert first_difference(load_jsonl(find_log(folder, name)), ours) is None


@pytest.mark.parametrize("name", BLOCK_LOGS)
def test_token_with_all_rules_of_block_decides_as_vllm(name: str) -> None:
    ours = decisions(read_scenario(find_log("scenarios", name)), "token", "block", **all_rules_of("block"))
    assert first_difference(load_jsonl(find_log("vllm", name)), ours) is None


@pytest.mark.parametrize(("folder", "name"), TOKEN_LOGS)
def test_block_with_all_rules_of_token_decides_as_sglang(folder: str, name: str) -> None:
    scenario, size = name.rsplit(".p", 1)
    ours = decisions(
        read_scenario(find_log("scenarios", scenario)),
        "block",
        "token",
        page_size=int(size),
        **TOKEN_OPTIONS[folder],
        **all_rules_of("token"),
    )
    assert first_difference(load_jsonl(find_log(folder, name)), ours) is None


def test_the_logs_cover_what_they_should() -> None:
    assert len(BLOCK_LOGS) == 46
    assert [sum(folder == at for at, _ in TOKEN_LOGS) for folder in TOKEN_OPTIONS] == [91, 21]


# --- against the fast forms, on random requests ---

FAST: dict[str, dict[str, Any]] = {
    "block": {"kind": "block", "page_size": 4},
    "block page 1": {"kind": "block", "page_size": 1},
    "block page 3": {"kind": "block", "page_size": 3},
    "block no cache": {"kind": "block", "page_size": 4, "prefix_cache": False},
    "token": {"kind": "token", "page_size": 4},
    "token page 1": {"kind": "token", "page_size": 1},
    "token page 3": {"kind": "token", "page_size": 3},
    "token no cache": {"kind": "token", "page_size": 4, "prefix_cache": False},
    "token page unit": {"kind": "token", "page_size": 4, "eviction_unit": "page"},
    "token no slack": {"kind": "token", "page_size": 4, "demand_slack": 0},
    "token slack 2": {"kind": "token", "page_size": 2, "demand_slack": 2},
    "token suffix kept": {"kind": "token", "page_size": 4, "split_touches_suffix": False},
    **{
        f"token {order} {unit}": {"kind": "token", "page_size": 2, "eviction_order": order, "eviction_unit": unit}
        for order in ("lfu", "fifo", "mru", "filo", "slru", "priority")
        for unit in ("leaf", "page")
    },
}


def both_forms(fields: dict[str, Any], num_pages: int) -> list[KVAllocator]:
    fast = make_allocator(fields, num_pages=num_pages)
    general = make_allocator({**fields, "form": "general"}, num_pages=num_pages)
    assert isinstance(general, GeneralAllocator)
    assert not isinstance(fast, GeneralAllocator)
    return [fast, general]


def in_random_ops(allocator: KVAllocator, seed: int, ops: int) -> RandomOps:
    run = RandomOps(allocator, seed)
    run._ops.pop("fork", None)  # the general form has none
    run.run(ops)
    return run


def comparable(decisions: list[Any], order_tells_ids: bool) -> list[Any]:
    """What must be equal: everything, or all but the names of pages. Empty lists also tell of copies for forks."""
    told = [decision for decision in decisions if decision != []]
    return told if order_tells_ids else [_without_ids(decision) for decision in told]


def _without_ids(decision: Any) -> Any:
    if isinstance(decision, tuple) and len(decision) == 2 and isinstance(decision[1], tuple):
        return decision[0], len(decision[1])  # a pin: hit, pages
    return len(decision) if isinstance(decision, tuple | list) else decision


@pytest.mark.parametrize("name", FAST)
def test_random_requests_see_no_difference_to_the_fast_form(name: str) -> None:
    fields = FAST[name]
    # Without edges (page by page, suffix kept) the general form draws none: equal pages come back in another order.
    same_ids = fields["kind"] == "block" or fields.get("eviction_unit", "leaf") == "leaf"
    for seed, num_pages in ((0, 10), (1, 24), (2, 60)):
        runs = [in_random_ops(allocator, seed, 120) for allocator in both_forms(fields, num_pages)]
        first, second = (comparable(run.decisions, same_ids) for run in runs)
        assert first == second


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["block", "block page 1", "block no cache"])
def test_block_actors_with_results_that_come_late_see_no_difference(name: str, seed: int) -> None:
    both: list[Any] = both_forms(FAST[name], 25)
    users = [Actors(allocator, seed) for allocator in both]
    for _ in range(150):
        assert users[0].step() == users[1].step()
        assert both[0].room() == both[1].room()
        assert both[0].capacity().duplicates == both[1].capacity().duplicates
        assert both[0].capacity().shared == both[1].capacity().shared
    both[1].check()


@pytest.mark.parametrize("given", [False, True], ids=["tokens", "given_ids"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_pages", "page_size"), [(9, 4), (40, 2), (64, 1)])
def test_a_crowd_in_every_stage_sees_no_difference_to_block(
    num_pages: int, page_size: int, seed: int, given: bool
) -> None:
    both = both_forms({"kind": "block", "page_size": page_size}, num_pages)
    crowds = [Crowd(allocator, seed, given) for allocator in both]
    for _ in range(150):
        assert crowds[0].step() == crowds[1].step()
        assert both[0].room() == both[1].room()
    both[1].check()


# --- what lies between the ends keeps every law ---


@pytest.mark.parametrize("seed", range(24))
def test_any_mixture_of_rules_keeps_every_law(seed: int) -> None:
    import random

    rng = random.Random(seed)
    values: dict[str, Any] = {
        name: rng.choice([getattr(RULES[kind], name) for kind in RULES])
        for name in sorted(GENERAL - {"eviction_order", "hash_unit"})
    }
    values["hash_unit"] = rng.choice([None, 1, 2]) if seed % 2 else None
    orders = ["lru"] if values["index"] == "queue" else ["lru", "lfu", "fifo", "mru", "random", "sieve"]
    values["eviction_order"] = rng.choice(orders)
    spec = {"kind": rng.choice(["block", "token"]), "page_size": 4, "form": "general", **values}
    run = in_random_ops(make_allocator(spec, num_pages=rng.choice([10, 24, 60])), seed, 150)
    assert len(run.decisions) > 100


def test_run_scenario_takes_the_general_form_by_name() -> None:
    scenario = read_scenario(find_log("scenarios", "single_token"))
    log = list(run_scenario(scenario, "block", form="general", check=True))
    assert first_difference(load_jsonl(find_log("vllm", "single_token")), log) is None
