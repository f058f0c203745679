"""The baseline from before paging: run lengths, growth, refusals, and its three kinds of waste by hand."""

import doctest

import pytest
from kvarena.allocators import _room, contiguous
from kvarena.allocators.config import contiguous as contiguous_design
from kvarena.allocators.config import design, label
from kvarena.allocators.contiguous import ContiguousAllocator
from kvarena.allocators.interface import AllocatorError, EventKind, Gate, PageMove, Release, Sequence
from kvarena.experiments.random_ops import RandomOps

SIZINGS = ("max", "pow2", "declared", "oracle")
PLACEMENTS = ("first_fit", "buddy")


def pool_of(num_pages, page_size=4, **fields):
    return ContiguousAllocator(num_pages, contiguous_design(page_size=page_size, **fields))


def request(name, num_tokens, **fields):
    return Sequence(name, range(num_tokens), **fields)


def admit(pool, seq):
    """The pages of an admitted and computed sequence, or None."""
    if pool.admit(seq) is None:
        return None
    pool.commit([(seq, seq.num_prefill_tokens)])
    pool.check()
    return list(pool.page_ids(seq))


def grow(pool, seq, n):
    """Reserve and compute n generated tokens; the reservation, or None."""
    reservation = pool.extend(seq, n)
    pool.check()
    if reservation is not None:
        for token in range(n):
            seq.append(token)
        pool.commit([(seq, seq.num_tokens)])
    return reservation


@pytest.mark.parametrize("module", [contiguous, _room], ids=lambda module: module.__name__)
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize(
    ("sizing", "tokens"),
    [("max", 64), ("pow2", 16), ("declared", 9 + 21), ("oracle", 27)],
)
def test_each_sizing_reserves_its_own_guess_rounded_to_pages(sizing, tokens):
    pool = pool_of(32, sizing=sizing, max_model_len=64)
    seq = request("a", 9, declared_max_tokens=21, oracle_tokens=27)
    assert len(admit(pool, seq)) == -(-tokens // 4)


@pytest.mark.parametrize("sizing", ["pow2", "declared", "oracle"])
def test_a_guess_is_never_below_the_prompt_nor_above_max_model_len(sizing):
    low = request("low", 9, declared_max_tokens=0, oracle_tokens=1)
    high = request("high", 33, declared_max_tokens=1000, oracle_tokens=1000)
    pool = pool_of(32, page_size=1, sizing=sizing, max_model_len=40)
    assert len(admit(pool_of(32, page_size=1, sizing=sizing), low)) >= 9
    assert pool.admit(high) is None  # 40 tokens, 32 pages: refused, not cut below its promise
    assert len(admit(pool_of(64, page_size=1, sizing=sizing, max_model_len=40), request_like(high))) == 40


def request_like(seq):
    fields = {"declared_max_tokens": seq.declared_max_tokens, "oracle_tokens": seq.oracle_tokens}
    return Sequence(seq.request_id, seq.token_ids, **fields)


@pytest.mark.parametrize("field", ["declared", "oracle"])
def test_a_sizing_without_its_number_names_the_missing_field(field):
    with pytest.raises(ValueError, match=f"request a: contiguous, sizing '{field}'.*{field}_.*found None"):
        pool_of(8, sizing=field).pin(request("a", 3))


def test_sizing_max_without_max_model_len_is_an_error():
    with pytest.raises(ValueError, match="expected max_model_len"):
        pool_of(8, sizing="max")


def test_oracle_is_named_in_every_legend():
    assert "oracle" in label(design({"kind": "contiguous", "sizing": "oracle"}))


def test_first_fit_takes_the_lowest_hole_that_is_long_enough():
    pool = pool_of(16, page_size=1, sizing="oracle")
    seqs = {name: request(name, n, oracle_tokens=n) for name, n in zip("abcde", (3, 2, 5, 1, 4), strict=True)}
    for seq in seqs.values():
        admit(pool, seq)
    pool.release([seqs["a"], seqs["c"]], Release.FINISH)
    assert admit(pool, request("f", 4, oracle_tokens=4)) == [6, 7, 8, 9]
    assert admit(pool, request("g", 2, oracle_tokens=2)) == [1, 2]


def test_buddy_runs_are_powers_of_two_at_their_multiples():
    pool = pool_of(16, page_size=1, sizing="oracle", placement="buddy")
    assert admit(pool, request("a", 3, oracle_tokens=3)) == [1, 2, 3, 4]
    assert admit(pool, request("b", 1, oracle_tokens=1)) == [5]
    assert admit(pool, request("c", 5, oracle_tokens=5)) == list(range(9, 17))
    assert admit(pool, request("d", 2, oracle_tokens=2)) == [7, 8]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_outgrown_run_grows_in_place_when_the_pages_behind_it_are_free(placement):
    pool = pool_of(16, sizing="pow2", placement=placement)
    a = request("a", 4)
    assert admit(pool, a) == [1]
    reservation = grow(pool, a, 1)
    assert (list(reservation.page_ids), reservation.moves, list(pool.page_ids(a))) == ([2], (), [1, 2])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_outgrown_run_moves_when_somebody_lies_behind_it(placement):
    pool = pool_of(16, sizing="pow2", placement=placement)
    a, b = request("a", 8), request("b", 4)
    assert (admit(pool, a), admit(pool, b)) == ([1, 2], [3])
    reservation = grow(pool, a, 1)
    new = list(pool.page_ids(a))
    assert reservation.moves == (PageMove(1, new[0]), PageMove(2, new[1]))
    assert (list(reservation.page_ids), reservation.rewritten, reservation.freed) == (new[2:], (0, 2), (1, 2))
    assert not set(new) & {1, 2, 3}
    assert admit(pool, request("c", 8)) == [1, 2]  # what it left is free again


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_outgrown_run_without_a_larger_hole_is_refused_and_keeps_its_pages(placement):
    pool = pool_of(8, sizing="pow2", placement=placement)
    a, b = request("a", 16), request("b", 16)
    assert admit(pool, a)
    assert admit(pool, b)
    before = pool.dump()
    assert grow(pool, a, 1) is None
    assert pool.dump() == before


def test_growth_stops_at_max_model_len():
    pool = pool_of(16, sizing="pow2", max_model_len=18)
    a = request("a", 16)
    admit(pool, a)
    assert list(grow(pool, a, 2).page_ids) == [5]  # 18 tokens, not 32
    pool.events.enabled = True
    assert grow(pool, a, 1) is None
    assert [(event.kind, event.reason) for event in pool.events.drain()] == [(EventKind.REFUSE, "max_model_len")]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ["large last", "large first"])
def test_a_refused_batch_takes_everything_back(placement, order):
    pool = pool_of(16, sizing="pow2", placement=placement)
    live = [request("a", 8), request("b", 8), request("c", 8)]
    for seq in live:
        admit(pool, seq)
    before = pool.dump()
    wants = [(live[0], 1), (live[1], 1), (live[2], 60)]
    new = request("d", 4)
    pool.pin(new)
    assert pool.reserve([*(wants if order == "large last" else reversed(wants)), (new, 4)]) is None
    pool.check()
    assert pool.dump() == before  # rows, free runs and counts; the pin of d is gone too


def test_a_moved_run_is_not_handed_out_in_the_same_call():
    pool = pool_of(16, sizing="pow2")
    a, b, c = request("a", 8), request("b", 4), request("c", 8)
    admit(pool, a), admit(pool, b)
    pool.pin(c)
    moved, placed = pool.reserve([(a, 1), (c, 8)])
    assert moved.freed == (1, 2)
    assert not {1, 2} & set(placed.page_ids)  # still being copied from


@pytest.mark.parametrize(
    ("gate", "admitted"),
    [
        (Gate(), True),
        (Gate(strict=True), False),
        (Gate(headroom=1), False),
        (Gate(page_rounded=False), True),
        (Gate(page_rounded=False, headroom=1), False),
    ],
)
def test_the_gate_counts_the_whole_run(gate, admitted):
    pool = pool_of(4, sizing="pow2")
    assert (pool.pin(request("a", 9), gate) is not None) is admitted  # 16 slots


def test_waste_by_kind_matches_a_hand_count():
    pool = pool_of(16, page_size=4, sizing="max", max_model_len=24)
    a, b = request("a", 9, oracle_tokens=14), request("b", 3, oracle_tokens=3)
    admit(pool, a), admit(pool, b)
    waste = pool.waste()
    # a: 24 slots, 9 used, 5 to come, 10 never; b: 24 slots, 3 used, 21 never. 4 of 16 pages are free, in one run.
    assert (waste.used_slots, waste.reservation_slots, waste.internal_slots) == (12, 5, 31)
    assert (waste.free_pages, waste.largest_free_run, waste.external_fragmentation) == (4, 4, 0.0)
    capacity = pool.capacity()
    assert (capacity.free, capacity.evictable, capacity.in_use, capacity.wasted_slots) == (4, 0, 12, 36)
    pool.release([a], Release.FINISH)
    waste = pool.waste()
    assert (waste.free_pages, waste.largest_free_run, waste.external_fragmentation) == (10, 6, pytest.approx(0.4))


def test_a_refusal_by_fragmentation_is_told_from_one_by_capacity():
    pool = pool_of(6, page_size=1, sizing="oracle")
    seqs = [request(name, 2, oracle_tokens=2) for name in "abc"]
    for seq in seqs:
        admit(pool, seq)
    pool.release([seqs[0], seqs[2]], Release.FINISH)
    pool.events.enabled = True
    assert pool.pin(request("d", 3, oracle_tokens=3)) is None  # 4 free, 2 + 2
    assert pool.pin(request("e", 5, oracle_tokens=5)) is None  # 4 free
    assert [event.reason for event in pool.events.drain()] == ["fragmentation", "capacity"]
    assert pool.waste().refused_by_fragmentation == 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("sizing", SIZINGS)
def test_random_requests_keep_every_law(sizing, placement, page_size):
    limit = 12 * page_size if sizing == "max" else None
    for seed in range(4):
        pool = pool_of(27, page_size=page_size, sizing=sizing, placement=placement, max_model_len=limit)
        RandomOps(pool, seed).run(150)


def test_live_ids_commits_and_releases_are_checked():
    pool = pool_of(8, sizing="pow2")
    a = request("a", 5)
    admit(pool, a)
    with pytest.raises(ValueError, match="request a is live already"):
        pool.pin(request("a", 2))
    with pytest.raises(ValueError, match="commit of 9 tokens, its run has 8 slots"):
        pool.commit([(a, 9)])
    for verb in (lambda s: pool.commit([(s, 0)]), lambda s: pool.release([s], Release.ABORT), pool.page_ids):
        with pytest.raises(ValueError, match="request ghost is not live"):
            verb(request("ghost", 1))
        with pytest.raises(ValueError, match="request a is not live, another of its id is"):
            verb(request("a", 5))
    with pytest.raises(ValueError, match="request a is not live, another of its id is"):
        pool.reserve([(request("a", 5), 1)])
    with pytest.raises(ValueError, match="tokens to reserve: expected an integer of at least 0, found -1"):
        pool.reserve([(a, -1)])
    with pytest.raises(ValueError, match="request 'a' stands twice in one call"):
        pool.release([a, a], Release.FINISH)
    assert list(pool.page_ids(a)) == [1, 2]
    pool.check()


def leak(pool, a, b):
    pool._free.place(1)
    pool._free.free_pages += 1


def two_states(pool, a, b):
    pool._free._lengths[pool._live["b"].run[0]] = 1


def two_owners(pool, a, b):
    pool._live["a"].run = pool._live["b"].run


def freed_under_a_live_row(pool, a, b):
    pool._free.give(pool._live["a"].run)


def wrong_free_count(pool, a, b):
    pool._free.free_pages += 1


def more_tokens_than_slots(pool, a, b):
    a.num_computed_tokens = 100


def pinned_and_live(pool, a, b):
    pool._pinned["a"] = a


FAULTS = [
    leak,
    two_states,
    two_owners,
    freed_under_a_live_row,
    wrong_free_count,
    more_tokens_than_slots,
    pinned_and_live,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_check_finds_a_planted_fault_and_dumps_the_pool(fault):
    pool = pool_of(16, sizing="pow2")
    a, b = request("a", 8), request("b", 4)
    admit(pool, a), admit(pool, b)
    fault(pool, a, b)
    with pytest.raises(AllocatorError, match=r"free runs \(page\+pages\)"):
        pool.check()
