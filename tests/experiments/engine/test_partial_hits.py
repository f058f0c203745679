"""Hits that end inside a page (`hash_unit`, at the end of a prompt): the page is copied before it is written."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="KV that can be read needs torch")

from kvarena.allocators.interface import Reservation  # noqa: E402
from support.threads import one_thread  # noqa: E402
from support.truth import TruthEngine  # noqa: E402

FINE: dict[str, Any] = {"kind": "block", "page_size": 8, "hash_unit": 2}


@pytest.fixture(autouse=True)
def _threads():
    with one_thread():
        yield


def watch_copies(engine: TruthEngine) -> list[int]:
    """Pages copied by reservations, as they come."""
    copied: list[int] = []
    watcher = engine.executor.memory
    reserved = watcher.reserved

    def noted(reservations: list[Reservation]) -> None:
        copied.append(sum(len(each.moves) for each in reservations))
        reserved(reservations)

    watcher.reserved = noted  # type: ignore[method-assign]
    return copied


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_pages", [60, 9])
@pytest.mark.parametrize("host_pages", [0, 6])
def test_kv_is_each_ones_own_where_hits_end_inside_pages(
    policy: str, lag: int, num_pages: int, host_pages: int
) -> None:
    """One after the other, then all together: in the smaller pool they preempt, swap, and come back."""
    engine = TruthEngine(policy, FINE, num_pages, result_lag=lag, host_pages=host_pages)
    copied = watch_copies(engine)
    for number in range(6):
        engine.add(f"a{number}", range(11 + 2 * number), 4)  # a prompt that others go on from
        engine.run()
    for number in range(6):
        engine.add(f"b{number}", [*range(11 + 2 * number), *range(900 + 20 * number, 904 + 20 * number)], 24)
        engine.step()
    engine.run()
    inside = [name for name, request in engine.requests.items() if request.hits[0] % 8]
    assert len(inside) >= 3
    assert sum(copied) >= len(inside)
    for name, request in engine.requests.items():
        first = engine.outputs._at(name, 0).token
        assert engine.output(name) == list(range(first, first + request.num_output))
    if num_pages == 9:
        assert sum(request.num_preemptions for request in engine.requests.values()) > 0


def test_whole_pages_alone_hit_less() -> None:
    hits = {}
    for unit in (None, 2):
        engine = TruthEngine("vllm", {**FINE, "hash_unit": unit}, 60)
        for number in range(4):
            engine.add(f"r{number}", range(13 + 3 * number), 2)
            engine.run()
        hits[unit] = [request.hits[0] for request in engine.requests.values()]
    assert hits[None] == [0, 8, 16, 16]
    assert sum(hits[2]) > sum(hits[None])


def test_a_host_cache_refuses_them() -> None:
    with pytest.raises(ValueError, match="no hash_unit"):
        TruthEngine("vllm", FINE, 20, host_cache_pages=5)
