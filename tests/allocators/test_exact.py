"""The textbook prefix cache: whole prompts, counted users, freed with the last one."""

import doctest

import pytest
from kvarena.allocators import exact
from kvarena.allocators.config import exact as exact_design
from kvarena.allocators.exact import ExactAllocator
from kvarena.allocators.interface import AllocatorError, EventKind, Gate, Release, Sequence
from kvarena.experiments.random_ops import RandomOps

CONSTANT = {"xxh3_128": None, "constant": lambda data: 0}


def pool_of(num_pages, page_size=4, hash_fn=None):
    return ExactAllocator(num_pages, exact_design(page_size=page_size), hash_fn=hash_fn)


def request(name, num_tokens, first=0, **fields):
    return Sequence(name, range(first, first + num_tokens), **fields)


def admit(pool, seq):
    """(hit tokens, pages) of an admitted and computed sequence, or None."""
    pin = pool.admit(seq)
    if pin is None:
        return None
    pool.commit([(seq, seq.num_prefill_tokens)])
    pool.check()
    return pin.hit_tokens, list(pool.page_ids(seq))


def release(pool, seq, reason=Release.FINISH):
    freed = list(pool.release([seq], reason).freed)
    pool.check()
    return freed


def test_doctests():
    result = doctest.testmod(exact)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 32, 33])
def test_a_hit_is_the_whole_pages_before_the_last_token(page_size, length):
    pool = pool_of(100, page_size)
    first, second = admit(pool, request("a", length)), admit(pool, request("b", length))
    shared = (length - 1) // page_size
    assert (first[0], second[0]) == (0, shared * page_size)
    assert second[1][:shared] == first[1][:shared]
    assert not set(second[1][shared:]) & set(first[1])


@pytest.mark.parametrize("other", [request("b", 8), request("b", 10), request("b", 9, first=1), request("b", 4)])
def test_anything_less_than_the_whole_prompt_is_a_miss(other):
    pool = pool_of(20)
    admit(pool, request("a", 9))
    assert admit(pool, other)[0] == 0


@pytest.mark.parametrize("hash_name", CONSTANT)
@pytest.mark.parametrize(
    "fields",
    [{"namespace": "tenant"}, {"namespace": ("salt", "x")}, {"extra_keys": [(2, 1, "image")]}],
    ids=["namespace", "salt", "image"],
)
def test_equal_tokens_under_another_key_share_nothing(fields, hash_name):
    pool = pool_of(20, hash_fn=CONSTANT[hash_name])
    assert admit(pool, request("a", 9, **fields))[0] == 0
    assert admit(pool, request("b", 9))[0] == 0
    assert admit(pool, request("c", 9, **fields))[0] == 8


def test_a_constant_hash_changes_no_decision():
    for seed in range(6):
        runs = []
        for hash_fn in CONSTANT.values():
            driver = RandomOps(pool_of(24, hash_fn=hash_fn), seed)
            driver.run(200)
            runs.append(driver.decisions)
        assert runs[0] == runs[1]


def test_prompts_given_as_page_ids_hit_by_ids_and_length():
    pool = pool_of(20)
    hits = []
    for name, ids, length in (("a", [5, 6, 7], 11), ("b", [5, 6, 7], 11), ("c", [5, 6, 7], 12), ("d", [5, 6], 8)):
        hits.append(admit(pool, Sequence(name, page_hashes=ids, num_tokens=length))[0])
    assert hits == [0, 8, 0, 0]


def test_a_prompt_is_registered_when_its_last_chunk_is_computed():
    pool = pool_of(20)
    a = request("a", 9)
    pool.pin(a)
    for end in (4, 8):
        pool.extend(a, 4)
        assert pool.commit([(a, end)])[0].published == ()
    assert pool.admit(request("early", 9)).hit_tokens == 0
    pool.extend(a, 1)
    assert pool.commit([(a, 9)])[0].published == tuple(pool.page_ids(a)[:2])
    assert pool.admit(request("late", 9)).hit_tokens == 8


def test_the_last_user_frees_the_prompt_whoever_wrote_it():
    pool = pool_of(20)
    a, b, c = (request(name, 9) for name in "abc")
    pages = admit(pool, a)[1]
    admit(pool, b), admit(pool, c)
    assert pool.capacity().shared == 2
    assert release(pool, a) == pages[2:]
    assert release(pool, b, Release.PREEMPT) == [4]
    assert admit(pool, request("d", 9))[0] == 8
    assert release(pool, c) == [5]
    pool.release([next(iter(pool._live.values())).seq], Release.ABORT)
    assert pool.capacity().free == 20
    assert admit(pool, request("e", 9))[0] == 0


def test_a_second_copy_stays_private_and_is_counted_a_duplicate():
    pool = pool_of(20)
    a, b = request("a", 9), request("b", 9)
    pool.admit(a), pool.admit(b)  # both before either is computed
    pool.events.enabled = True
    pool.commit([(a, 9), (b, 9)])
    pool.check()
    assert [event.kind for event in pool.events.drain()] == [EventKind.PUBLISH, EventKind.DUPLICATE]
    assert (pool.capacity().duplicates, pool.capacity().shared) == (2, 0)
    release(pool, a)
    assert pool.capacity().duplicates == 0
    assert admit(pool, request("c", 9))[0] == 0  # b's copy was never registered


def test_a_full_hit_on_a_page_border_recomputes_its_last_page_privately():
    pool = pool_of(20)
    a, b = request("a", 8), request("b", 8)
    assert admit(pool, a) == (0, [1, 2])
    assert admit(pool, b) == (4, [1, 3])
    assert (pool.capacity().in_use, pool.capacity().duplicates) == (3, 1)
    assert release(pool, a) == []  # page 2 stays with the prompt until its last user goes
    assert sorted(release(pool, b)) == [1, 2, 3]


def test_a_preempted_request_finds_only_its_prompt_and_only_while_another_holds_it():
    pool = pool_of(20)
    a, b = request("a", 9), request("b", 9)
    admit(pool, a), admit(pool, b)
    for token in range(8):
        a.append(token)
        pool.extend(a, 1)
        pool.commit([(a, a.num_tokens)])
    release(pool, a, Release.PREEMPT)
    a.resume()
    assert admit(pool, a)[0] == 8
    release(pool, a, Release.PREEMPT), release(pool, b)
    a.resume()
    assert admit(pool, a)[0] == 0


def test_a_refusal_leaves_no_trace():
    pool = pool_of(6)
    a, b = request("a", 9), request("b", 9)
    admit(pool, a), admit(pool, b)
    c, d = request("c", 9), request("d", 17, first=90)
    admit(pool, c)
    before = pool.dump()
    assert pool.pin(d) is None
    assert pool.reserve([(a, 3), (b, 12)]) is None  # either alone fits
    pool.check()
    assert pool.dump() == before
    release(pool, c)
    pool.pin(c)
    assert pool.reserve([(c, 100)]) is None
    pool.check()
    with pytest.raises(ValueError, match="request c is not live"):
        pool.page_ids(c)


@pytest.mark.parametrize(
    ("gate", "admitted"),
    [
        (Gate(), True),
        (Gate(strict=True), False),
        (Gate(headroom=1), False),
        (Gate(page_rounded=False, headroom=3), True),
        (Gate(page_rounded=False, headroom=4), False),
        (Gate(whole_prompt=False, headroom=1), True),
        (Gate(whole_prompt=False, headroom=2), False),
    ],
)
def test_the_gate_counts_what_a_hit_leaves(gate, admitted):
    pool = pool_of(6)
    admit(pool, request("a", 9))
    admit(pool, request("filler", 1, first=50))
    admit(pool, request("other", 1, first=60))
    assert (pool.pin(request("b", 9), gate) is not None) is admitted  # 1 token is left, 1 page free


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_requests_keep_every_law(page_size):
    for seed in range(8):
        RandomOps(pool_of(24, page_size), seed).run(200)


def test_capacity_counts_slots_without_a_token():
    pool = pool_of(20)
    admit(pool, request("a", 9)), admit(pool, request("b", 9))
    assert pool.capacity().wasted_slots == 3 + 3  # each one's third page holds one token


def test_misuse_is_an_error_and_changes_nothing():
    pool = pool_of(8)
    a = request("a", 5)
    admit(pool, a)
    before = pool.dump()
    for call, message in (
        (lambda: pool.pin(request("a", 2)), "request a is live already"),
        (lambda: pool.commit([(a, 9)]), "commit of 9 tokens, its pages have 8 slots"),
        (lambda: pool.reserve([(a, -1)]), "tokens to reserve: expected an integer of at least 0, found -1"),
        (lambda: pool.release([a, request("ghost", 1)], Release.FINISH), "request ghost is not live"),
        (lambda: pool.release([a, a], Release.FINISH), "request 'a' stands twice in one call"),
        (lambda: pool.release([request("a", 5)], Release.FINISH), "request a is not live, another of its id is"),
        (lambda: pool.reserve([(request("a", 5), 1)]), "request a is not live, another of its id is"),
        (lambda: pool.commit([(request("a", 5), 1)]), "request a is not live, another of its id is"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert pool.dump() == before


def leak(pool, a, b):
    pool._free.pop()


def two_states(pool, a, b):
    pool._free.append(pool._live["b"].row[-1])


def twice_free(pool, a, b):
    pool._free.append(pool._free[0])


def wrong_user_count(pool, a, b):
    pool._live["a"].prompt.users += 1


def live_row_on_a_free_page(pool, a, b):
    pool._live["b"].row[-1] = pool._free[0]


def shared_page_swapped(pool, a, b):
    pool._live["b"].row[0], pool._live["b"].row[1] = pool._live["b"].row[1], pool._live["b"].row[0]


def wrong_token_count(pool, a, b):
    pool._live["a"].used = 100


def prompt_forgotten(pool, a, b):
    pool._index.remove(pool._live["a"].prompt)


def pinned_and_live(pool, a, b):
    pool._pinned["a"] = pool._live["a"]


def page_outside_the_pool(pool, a, b):
    pool._free.append(pool.num_pages + 1)


FAULTS = [
    leak,
    two_states,
    twice_free,
    wrong_user_count,
    live_row_on_a_free_page,
    shared_page_swapped,
    wrong_token_count,
    prompt_forgotten,
    pinned_and_live,
    page_outside_the_pool,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_check_finds_a_planted_fault_and_dumps_the_pool(fault):
    pool = pool_of(16)
    a, b = request("a", 9), request("b", 9)
    admit(pool, a), admit(pool, b)
    fault(pool, a, b)
    with pytest.raises(AllocatorError, match="free, next first"):
        pool.check()
