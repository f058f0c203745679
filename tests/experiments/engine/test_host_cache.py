"""Host tiers with real copies: KV is bit for bit each one's own after any sequence of swaps, evictions and loads."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="KV that can be read needs torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.allocators.host_cache import HostCache  # noqa: E402
from kvarena.allocators.interface import PageMove, Release, Sequence  # noqa: E402
from kvarena.experiments.engine.paged_memory import MemoryOptions  # noqa: E402
from support.engine import PAIRS  # noqa: E402
from support.threads import one_thread  # noqa: E402
from support.truth import TruthEngine, beam_model  # noqa: E402


@pytest.fixture(autouse=True)
def _threads():
    with one_thread():
        yield


def spec(kind: str, page_size: int) -> dict[str, Any]:
    return {"kind": kind, "page_size": page_size}


@st.composite
def loads(draw: Any) -> dict[str, Any]:
    """An engine with host tiers, too small for its requests, and what arrives at which step."""
    policy, kind = draw(st.sampled_from(PAIRS))
    page_size = draw(st.sampled_from([1, 4]))
    return {
        "policy": policy,
        "kind": kind,
        "page_size": page_size,
        "num_pages": draw(st.integers(40, 64)) // page_size,
        "lag": draw(st.integers(0, 1)),
        "host_pages": draw(st.sampled_from([0, 3, 30])),
        "host_cache_pages": draw(st.sampled_from([1, 5, 60])),
        "layout": draw(st.sampled_from(["split", "page_major"])),
        "order": draw(st.sampled_from(["fcfs", "lpm", "priority"])),
        "drafts": draw(st.integers(0, 4)),
        "arrivals": draw(
            st.lists(
                st.tuples(
                    st.integers(0, 4),  # which head
                    st.integers(1, 18),  # of how many tokens
                    st.integers(0, 5),  # tokens of its own
                    st.integers(1, 14),  # output
                    st.sampled_from([1, 1, 2, 3, -3]),  # samples, or beams
                    st.integers(0, 6),  # steps until the next one
                ),
                min_size=4,
                max_size=12,
            )
        ),
    }


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(loads())
def test_kv_is_bitwise_each_ones_own_after_any_sequence_of_swaps(load: dict[str, Any]) -> None:
    engine = TruthEngine(
        load["policy"],
        spec(load["kind"], load["page_size"]),
        load["num_pages"],
        options=MemoryOptions(layout=load["layout"]),
        result_lag=load["lag"],
        host_pages=load["host_pages"],
        host_cache_pages=load["host_cache_pages"],
        order=load["order"],
        language_model=beam_model(5),
        max_num_seqs=12,
    )
    if load["drafts"] and not load["lag"]:
        engine.scheduler.speculate(engine.outputs.drafter(0.6), load["drafts"])
    for number, (head, length, own, output, samples, pause) in enumerate(load["arrivals"]):
        tokens = [*range(100 * head, 100 * head + length), *range(5000 + 10 * number, 5000 + 10 * number + own)]
        beams = samples < 0 and load["policy"] == "vllm"
        branches = {"beam_width": -samples} if beams else {"samples": abs(samples)}
        engine.add(f"r{number}", tokens, output, **{**branches, "priority": number % 3})
        for _ in range(pause):
            engine.step()
            assert engine.scheduler.cache is not None
            engine.scheduler.cache.check()
    engine.run()
    for name, request in engine.requests.items():
        assert request.done
        first = engine.outputs._at(name, 0).token
        assert request.beams or engine.output(name) == list(range(first, first + request.num_output))


def test_a_page_is_copied_before_it_goes_to_the_host() -> None:
    """A sample gets its own page for a shared one and is swapped out in the same step: what goes out is the copy."""
    engine = TruthEngine("vllm", spec("block", 4), 12, host_pages=40, result_lag=1)
    for number, (length, samples) in enumerate(((16, 4), (7, 4), (11, 2), (9, 3), (10, 2))):
        engine.add(f"r{number}", range(100 * number, 100 * number + length), 12, samples=samples)
    both = 0
    while engine.engine.has_work:
        plan = engine.step().plan
        copied = {move.dst for way, moves in plan.moves if way == "copy" for move in moves}
        both += any(move.src in copied for way, moves in plan.moves if way == "out" for move in moves)
    assert both > 0


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_evicted_is_loaded_back_on_a_hit(policy: str, kind: str, lag: int, page_size: int) -> None:
    """Five prompts by turns in a pool for two: the second round finds on the host what the first one computed."""
    engine = TruthEngine(policy, spec(kind, page_size), 64 // page_size, result_lag=lag, host_cache_pages=400)
    for turn in range(2):
        for number in range(5):
            engine.add(f"r{number}-{turn}", range(100 * number, 100 * number + 21), 3)
            engine.run()
    cache = engine.scheduler.cache
    assert cache is not None
    again = [engine.requests[f"r{number}-1"] for number in range(5)]
    assert sum(request.host_hits[0] for request in again) >= 4 * 16
    for request in again:
        assert request.hits[0] + request.host_hits[0] == 20
    counts = cache.host_capacity()
    assert counts.hit_tokens == sum(request.host_hits[0] for request in engine.requests.values())
    assert counts.copied_in * page_size == counts.hit_tokens
    assert engine.executor.memory.moved_pages == counts.copied_in + counts.copied_out


@pytest.mark.parametrize(("policy", "kind"), PAIRS)
def test_a_token_is_a_hit_of_one_tier(policy: str, kind: str) -> None:
    """Device hits come first, host hits behind them; with a host cache the two are what an endless pool would hit."""
    hits: dict[bool, list[int]] = {}
    for endless in (True, False):
        engine = TruthEngine(policy, spec(kind, 4), 1000 if endless else 16, host_cache_pages=1000)
        for number in range(24):
            engine.add(f"r{number}", range(100 * (number % 5), 100 * (number % 5) + 9 + number), 2)
            engine.run()
        requests = engine.requests.values()
        hits[endless] = [request.hits[0] + request.host_hits[0] for request in requests]
        assert (sum(request.host_hits[0] for request in requests) > 0) != endless
        counts, room = engine.scheduler.cache.host_capacity(), engine.inner.capacity()  # type: ignore[union-attr]
        assert counts.twins <= min(counts.cached, room.evictable)
    assert hits[True] == hits[False]


def test_full_host_drops_what_was_used_least_recently() -> None:
    moves: list[tuple[str, tuple[PageMove, ...]]] = []
    cache = HostCache(make_allocator("vllm", num_pages=2), 2, lambda way, pages: moves.append((way, pages)))

    def once(name: str, first: int) -> int:
        seq = Sequence(name, range(first, first + 17))
        pin = cache.admit(seq)
        assert pin is not None
        cache.commit([(seq, 17)])
        cache.release([seq], Release.FINISH)
        cache.check()
        return pin.hit_tokens

    for number, first in enumerate((0, 100, 200, 300)):  # 0 and 100 go to the host, then 200 in place of 0
        assert once(f"r{number}", first) == 0
    assert [way for way, _ in moves] == ["out"] * 3
    assert cache.host_capacity().dropped == 1
    assert once("gone", 0) == 0
    assert once("kept", 200) == 16
    assert moves[-1][0] == "in"


def test_other_namespaces_and_items_are_other_content() -> None:
    cache = HostCache(make_allocator("vllm", num_pages=2), 50, lambda way, pages: None)
    hits = []
    for turn in range(2):
        for number, fields in enumerate(
            ({}, {"namespace": "lora"}, {"extra_keys": [(3, 4, "image")]}, {"extra_keys": [(3, 4, "other")]})
        ):
            seq = Sequence(f"{turn}-{number}", range(20), **fields)  # type: ignore[arg-type]
            pin = cache.admit(seq)
            assert pin is not None
            hits.append(pin.hit_tokens)
            cache.commit([(seq, 20)])
            cache.release([seq], Release.FINISH)
    assert hits == [0, 0, 0, 0, 16, 16, 16, 16]


def test_a_refused_admission_loads_nothing_and_unlocks() -> None:
    moves: list[str] = []
    cache = HostCache(make_allocator("vllm", num_pages=3), 50, lambda way, pages: moves.append(way))
    first = Sequence("a", range(40))
    assert cache.admit(first) is not None
    cache.commit([(first, 40)])
    cache.release([first], Release.FINISH)
    other = Sequence("b", range(500, 540))
    assert cache.admit(other) is not None  # a's pages go to the host
    cache.commit([(other, 40)])
    again = Sequence("c", range(40))
    assert cache.pin(again) is None
    moves.clear()
    from kvarena.allocators.interface import Gate

    pin = cache.pin(again, Gate(whole_prompt=False))
    assert pin is not None
    assert pin.hit_tokens == 32
    assert cache.reserve([(again, 8)]) is None
    assert moves == []
    cache.check()
    assert not cache._locked
    cache.release([other], Release.FINISH)
    assert cache.admit(Sequence("d", range(40))) is not None
    assert moves.count("in") == 1


def _small(kind: str) -> tuple[HostCache, list[tuple[str, tuple[PageMove, ...]]]]:
    moves: list[tuple[str, tuple[PageMove, ...]]] = []
    pool = make_allocator({"kind": kind, "page_size": 4}, num_pages=8)
    return HostCache(pool, 8, lambda way, pages: moves.append((way, pages))), moves


def _cached(cache: HostCache, name: str, tokens: range) -> None:
    seq = Sequence(name, tokens)
    assert cache.admit(seq) is not None
    cache.commit([(seq, len(tokens))])
    cache.release([seq], Release.FINISH)


def test_what_a_refused_reservation_evicts_is_found_on_the_host() -> None:
    """SGLang's demand evicts first and is refused afterwards."""
    cache, moves = _small("token")
    _cached(cache, "a", range(16))
    other = Sequence("b", range(100, 112))
    assert cache.admit(other) is not None
    cache.commit([(other, 12)])
    other.append(7)
    assert cache.reserve([(other, 60)]) is None
    assert cache.room() == (5, 0)
    assert [(way, [page.src for page in pages]) for way, pages in moves] == [("out", [1, 2, 3, 4])]
    again = Sequence("again", range(16))
    pin = cache.pin(again)
    assert pin is not None
    assert (pin.hit_tokens, cache.hit_tokens(again)) == (12, 12)
    assert cache.reserve([(again, 4)]) is not None
    assert moves[-1][0] == "in"
    cache.check()
    assert not cache.events.rows
    assert not cache.events.enabled


def test_what_a_copy_on_write_displaces_goes_to_the_host_before_it() -> None:
    cache, moves = _small("block")
    parent = Sequence("p", range(100, 110))
    assert cache.admit(parent) is not None
    cache.commit([(parent, 10)])
    _cached(cache, "a", range(20))
    child = Sequence("c", [*range(100, 110), 5], num_prompt_tokens=10)
    assert cache.fork(parent, child) is not None
    assert moves == []
    copies = cache.prepare_write(parent, 10, 11)
    assert copies is not None
    assert [(way, [page.src for page in pages]) for way, pages in moves] == [("out", [copies[0].dst])]
    cache.check()


def test_a_name_that_comes_back_with_other_tokens_has_other_keys() -> None:
    """Preempted, its keys are kept for when it comes back; another sequence of that name is none of it."""
    cache, moves = _small("token")
    first = Sequence("a", range(16))
    assert cache.admit(first) is not None
    cache.commit([(first, 16)])
    cache.release([first], Release.PREEMPT)
    _cached(cache, "b", range(100, 124))  # the pool is full: what "a" had goes to the host
    assert any(way == "out" for way, _ in moves)
    other = Sequence("a", range(500, 516))
    assert cache.admit(other) is not None
    assert cache.hit_tokens(other) == 0
    cache.check()


@pytest.mark.parametrize("enabled", [False, True])
def test_events_that_somebody_records_stay_theirs(enabled: bool) -> None:
    cache, _ = _small("token")
    cache.events.enabled = enabled
    _cached(cache, "a", range(16))
    assert bool(cache.events.rows) == cache.events.enabled == enabled


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        HostCache(make_allocator("vllm", num_pages=3), 0, lambda way, pages: None)
    with pytest.raises(ValueError, match="host_cache_pages"):
        TruthEngine("vllm", spec("block", 4), 8, host_cache_pages=-1)


@pytest.mark.parametrize("kind", ["block", "token"])
def test_swaps_copy_each_page_once_each_way(kind: str) -> None:
    """Runs of consecutive host pages travel together, straight between the pool and their places on the host."""
    engine = TruthEngine("vllm", spec(kind, 4), 14, host_pages=30)
    memory, places = engine.executor.memory, []
    backend = memory.backend

    def gather(layers: Any, ids: Any, out: Any = None) -> Any:
        places.append((len(ids), out.data_ptr() >= memory.host.data_ptr()))
        return backend.gather_pages(layers, ids, out)

    from dataclasses import replace

    memory.backend = replace(backend, gather_pages=gather)
    for number in range(6):
        engine.add(f"r{number}", range(100 * number, 100 * number + 9), 12)
    engine.run()
    assert places
    assert all(inside for _, inside in places)
    out = sum(len(request.hits) > 1 for request in engine.requests.values())
    assert len(places) <= sum(request.num_preemptions for request in engine.requests.values())
    assert out > 0
