"""Faults that other projects had, as cases for the block design, and the kinds they stand for."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.config import design
from kvarena.allocators.interface import Release, Sequence
from kvarena.experiments.scenarios import ScenarioRunner
from support.golden import line_difference, load_cases

CASES = load_cases("block", "engine-01", "engine-02")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any]) -> None:
    runner = ScenarioRunner.for_scenario(case["input"]["header"], "block")
    for op, expected in zip(case["input"]["ops"], case["expect"]["block"], strict=True):
        line = runner.decide(op)
        runner.allocator.check()
        assert line_difference(expected, line) is None, f"op {expected['i']}"


def make(num_pages: int, page_size: int = 4, **fields: Any) -> BlockAllocator:
    return BlockAllocator(num_pages, design({"kind": "block", "page_size": page_size, **fields}))


def serve(allocator: BlockAllocator, name: str, tokens: list[int], **keys: Any) -> int:
    """Admit and finish one request; returns its hit in tokens."""
    seq = Sequence(name, tokens, **keys)
    pin = allocator.admit(seq)
    assert pin is not None
    allocator.commit([(seq, seq.num_tokens)])
    allocator.release([seq], Release.FINISH)
    allocator.check()
    return pin.hit_tokens


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7, 16])
def test_a_fully_cached_prompt_hits_whole_pages_and_leaves_a_token(page_size: int) -> None:
    allocator = make(200, page_size)
    tokens = list(range(4 * page_size + 3))
    serve(allocator, "first", tokens)
    for length in range(1, len(tokens) + 1):
        hit = serve(allocator, f"r{length}", tokens[:length])
        assert hit == (length - 1) // page_size * page_size


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_without_the_last_token_rule_a_prompt_hits_all_its_whole_pages(page_size: int) -> None:
    allocator = make(200, page_size, last_token_rule=False)
    tokens = list(range(4 * page_size))
    serve(allocator, "first", tokens)
    for length in range(1, len(tokens) + 1):
        assert serve(allocator, f"r{length}", tokens[:length]) == length // page_size * page_size
    assert allocator.capacity().duplicates == 0


@pytest.mark.parametrize("length", [2, 3, 6])
@pytest.mark.parametrize("demand", [1, 2, 5])
def test_a_request_is_evicted_from_its_tail(length: int, demand: int) -> None:
    allocator = make(length)
    tokens = list(range(4 * length))
    serve(allocator, "cached", tokens)
    demand = min(demand, length - 1)
    serve(allocator, "pusher", [1000 + i for i in range(4 * demand)])
    survived = length - demand
    assert allocator.match(Sequence("probe", tokens)).hit_tokens == 4 * survived


def test_without_a_prefix_cache_nothing_is_hashed_kept_or_evicted() -> None:
    calls: list[bytes] = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return b"x"

    allocator = BlockAllocator(6, design({"kind": "block", "page_size": 2, "prefix_cache": False}), hash_fn=counting)
    calls.clear()
    allocator.events.enabled = True
    for number in range(8):
        assert serve(allocator, f"r{number}", list(range(7))) == 0
        assert allocator.room() == (6, 0)
    assert calls == []
    assert not {"evict", "publish", "hit"} & {event.kind.value for event in allocator.events.drain()}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_without_a_prefix_cache_the_last_freed_page_is_reused_first(count: int) -> None:
    allocator = make(8, prefix_cache=False)
    seqs = [Sequence(f"r{i}", list(range(4 * (i + 1)))) for i in range(count)]
    expected: list[int] = list(range(1, 9))
    rows = []
    for seq in seqs[:3]:
        if allocator.admit(seq) is not None:
            rows.append(list(allocator.page_ids(seq)))
            expected = expected[len(rows[-1]) :]
    for seq, row in zip(seqs, rows, strict=False):
        allocator.release([seq], Release.FINISH)
        expected = row[::-1] + expected
    assert list(allocator._store.queue()) == expected


LORA = {"namespace": (("lora", ("X", "/x1")),)}
WALLS: list[dict[str, Any]] = [
    {},
    LORA,
    {"namespace": (("lora", ("X", "/x2")),)},
    {"namespace": (("lora", ("Y", "/x1")),)},
    {"namespace": (("salt", "X"),)},
    {"namespace": (("salt", "/x1"),)},
    {"namespace": "X"},
    {"namespace": (("lora", ("X", "/x1")), ("salt", "X"))},
    {**LORA, "extra_keys": [(0, 2, "X")]},
    {"extra_keys": [(0, 2, "X")]},
    {"extra_keys": [(1, 2, "X")]},
    {"extra_keys": [(0, 2, "Y")]},
]


@pytest.mark.parametrize(("mine", "theirs"), list(combinations(WALLS, 2)))
def test_requests_whose_keys_differ_share_nothing(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    allocator = make(32)
    tokens = list(range(1, 14))
    assert serve(allocator, "a", tokens, **mine) == 0
    assert serve(allocator, "b", tokens, **theirs) == 0
    assert serve(allocator, "c", tokens, **mine) == 12
    assert serve(allocator, "d", tokens, **theirs) == 12


@pytest.mark.parametrize("offset", range(13))
@pytest.mark.parametrize(("left", "right"), [("0x10005", "0x20005"), (5, 5 + (1 << 16)), (b"a", "a"), (1, True)])
def test_another_picture_is_shared_up_to_the_page_it_begins_in(offset: int, left: Any, right: Any) -> None:
    allocator = make(64)
    tokens = [9] * 17
    serve(allocator, "a", tokens, extra_keys=[(offset, 3, left)])
    assert serve(allocator, "b", tokens, extra_keys=[(offset, 3, right)]) == offset // 4 * 4
    assert serve(allocator, "c", tokens, extra_keys=[(offset, 3, left)]) == 16
    assert serve(allocator, "d", [*tokens[:16], 1], extra_keys=[(offset, 3, left)]) == 16


def test_placeholders_that_python_hashes_alike_are_told_apart() -> None:
    allocator = make(32)
    assert hash((-1, -1)) == hash((-2, -2))
    serve(allocator, "a", [-1] * 4 + [5])
    assert serve(allocator, "b", [-2] * 4 + [5]) == 0
    assert serve(allocator, "c", [-1] * 4 + [6]) == 4


@pytest.mark.parametrize("length", range(1, 17))
def test_a_pool_full_of_idle_content_admits_whatever_fits_the_pool(length: int) -> None:
    allocator = make(4)
    serve(allocator, "old", list(range(16)))
    assert allocator.room() == (0, 4)
    assert serve(allocator, "new", [100 + i for i in range(length)]) == 0


@pytest.mark.parametrize("num_pages", [1, 2, 5])
@pytest.mark.parametrize("reason", list(Release))
def test_the_last_request_out_of_room_is_refused_and_can_still_leave(num_pages: int, reason: Release) -> None:
    allocator = make(num_pages)
    seq = Sequence("only", list(range(num_pages * 4)))
    assert allocator.admit(seq) is not None
    allocator.commit([(seq, seq.num_tokens)])
    seq.append(7)
    assert allocator.extend(seq, 1) is None
    seq.pop()
    allocator.check()
    allocator.release([seq], reason)
    allocator.check()
    assert sum(allocator.room()) == num_pages
    assert serve(allocator, "again", list(range(num_pages * 4))) == (num_pages - 1) * 4


def test_a_refused_arrival_that_comes_back_hits_once_it_is_admitted() -> None:
    allocator = make(4)
    first, second = Sequence("a", list(range(1, 13))), Sequence("b", [*range(1, 9), *range(20, 25)])
    assert allocator.admit(first) is not None
    allocator.commit([(first, 12)])
    assert allocator.admit(second) is None
    assert allocator.admit(second) is None
    allocator.release([first], Release.FINISH)
    pin = allocator.admit(second)
    assert pin is not None
    assert pin.hit_tokens == 8


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    allocator = make(16)
    seq = Sequence("r0", list(range(1, 10)))
    hits = []
    for _ in range(3):
        pin = allocator.admit(seq)
        assert pin is not None
        hits.append(pin.hit_tokens)
        allocator.commit([(seq, seq.num_tokens)])
        allocator.release([seq], Release.PREEMPT)
        seq.resume()
    assert hits == [0, 8, 8]
