"""The misuse contract of `allocators/interface.py`, the same for every design."""

import doctest

import numpy as np
import pytest
from kvarena.allocators import _arguments
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Gate, Release, Sequence

DESIGNS = {
    "block by runs": {"kind": "block", "page_size": 4},
    "block by pages": {"kind": "block", "page_size": 4, "form": "hashed"},
    "block with a window": {"kind": "block", "page_size": 4, "sliding_window": 8},
    "token": {"kind": "token", "page_size": 1},
    "token by pages": {"kind": "token", "page_size": 4},
    "contiguous": {"kind": "contiguous", "page_size": 4, "sizing": "pow2"},
    "exact": {"kind": "exact", "page_size": 4},
}
NO_COUNTS = [-1, -(2**70), 1.0, 0.0, 2.5, float("nan"), "1", None, np.float64(1), np.int64(-1), [1]]


@pytest.fixture(params=DESIGNS.values(), ids=DESIGNS)
def pool(request):
    return make_allocator(request.param, num_pages=64)


def admitted(pool, name, num_tokens=9, first=0):
    seq = Sequence(name, range(first, first + num_tokens))
    assert pool.admit(seq) is not None
    pool.commit([(seq, num_tokens)])
    return seq


def picture(pool, *seqs):
    held = [(seq.num_computed_tokens, list(pool.page_ids(seq))) for seq in seqs]
    return repr(pool), pool.capacity(), held


def refused(pool, live, misuse, message):
    """`misuse` is a ValueError with that message, and changes nothing."""
    before = picture(pool, *live)
    with pytest.raises(ValueError, match=message):
        misuse()
    assert picture(pool, *live) == before
    pool.check()


STRANGER = {
    "never seen": lambda pool: Sequence("x", range(5)),
    "another one of a live id": lambda pool: Sequence("a", range(9)),
}


@pytest.mark.parametrize("stranger", STRANGER.values(), ids=STRANGER)
@pytest.mark.parametrize("verb", ["reserve", "reserve nothing", "commit", "release", "page_ids", "decode batch"])
def test_a_sequence_that_is_not_live_is_an_error_that_names_it(pool, verb, stranger):
    a, x = admitted(pool, "a"), stranger(pool)
    calls = {
        "reserve": lambda: pool.reserve([(a, 1), (x, 1)]),
        "reserve nothing": lambda: pool.reserve([(x, 0)]),
        "commit": lambda: pool.commit([(x, 1)]),
        "release": lambda: pool.release([x], Release.FINISH),
        "page_ids": lambda: pool.page_ids(x),
        "decode batch": lambda: pool.decode_batch([x]).reserve(),
    }
    if verb == "decode batch":
        x.num_computed_tokens = x.num_tokens
    refused(pool, [a], calls[verb], f"request '?{x.request_id}'? is not live")


@pytest.mark.parametrize("reason", Release)
def test_a_second_release_is_an_error_and_gives_nothing_back(pool, reason):
    gone, a = admitted(pool, "gone"), admitted(pool, "a", first=50)
    pool.release([gone], reason)
    refused(pool, [a], lambda: pool.release([gone], reason), "request '?gone'? is not live")
    refused(pool, [a], lambda: pool.release([a, gone], reason), "request '?gone'? is not live")


def test_a_pin_that_a_refusal_dropped_is_not_live(pool):
    seq = Sequence("a", range(9))
    assert pool.pin(seq) is not None
    assert pool.reserve([(seq, 10_000)]) is None
    refused(pool, [], lambda: pool.release([seq], Release.ABORT), "request '?a'? is not live")


def test_a_pin_can_be_released(pool):
    seq = Sequence("a", range(9))
    assert pool.pin(seq) is not None
    pool.release([seq], Release.ABORT)
    assert pool.capacity().in_use == 0
    pool.check()


@pytest.mark.parametrize("n", NO_COUNTS, ids=repr)
def test_reserve_takes_counts_only(pool, n):
    a, b = admitted(pool, "a"), admitted(pool, "b", first=50)
    refused(pool, [a, b], lambda: pool.reserve([(a, 1), (b, n)]), "request 'b'.*(expected|found)")
    refused(pool, [a, b], lambda: pool.extend(a, n), "request 'a'.*(expected|found)")


@pytest.mark.parametrize("n", NO_COUNTS, ids=repr)
def test_reserve_for_a_pin_takes_counts_only(pool, n):
    pinned = Sequence("p", range(5))
    pool.pin(pinned)
    with pytest.raises(ValueError, match="request 'p'"):
        pool.reserve([(pinned, n)])
    assert pool.reserve([(pinned, 5)]) is not None
    pool.check()


def test_a_float_is_refused_where_slots_are_left_and_where_pages_are_needed(pool):
    """A page of 4 with one token in it: 1.0 fits the slots that are there, 9.0 does not."""
    a = admitted(pool, "a")
    for n in (1.0, 9.0):
        refused(pool, [a], lambda n=n: pool.extend(a, n), "request 'a'")


def test_reserve_nothing_is_granted_to_the_live_and_the_pinned_but_by_block(pool):
    a, pinned = admitted(pool, "a"), Sequence("p", range(100, 105))
    pool.pin(pinned)
    if pool.kind == "block":  # vLLM 0.32.0 raises
        for seq in (a, pinned):
            with pytest.raises(ValueError, match=f"request '{seq.request_id}': expected n >= 1 tokens, found 0"):
                pool.reserve([(seq, 0)])
        return
    rows = list(pool.page_ids(a))
    (reservation,) = pool.reserve([(a, 0)])
    assert (list(reservation.page_ids), list(reservation.freed), list(pool.page_ids(a))) == ([], [], rows)
    assert pool.reserve([(pinned, 0)]) is not None
    pool.check()


def test_reserve_nothing_makes_a_pin_with_a_hit_live(pool):
    admitted(pool, "a")
    if pool.kind == "block":
        assert pool.reserve([(next(iter(pool._rows.values())).seq, 4)]) is not None
    pinned = Sequence("p", range(9))
    pin = pool.pin(pinned)
    if not pin.hit_tokens:
        assert pool.kind == "contiguous"
        return
    assert pool.reserve([(pinned, 0)]) is not None
    assert list(pool.page_ids(pinned)) == list(pin.page_ids)
    pool.check()


@pytest.mark.parametrize("counts", [(1, 1), (1, 30), (30, 30)], ids=str)
def test_a_sequence_twice_in_one_reserve_is_an_error(pool, counts):
    """Whether the slots are there already or pages are needed."""
    a, b = admitted(pool, "a"), admitted(pool, "b", first=50)
    wants = [(a, counts[0]), (b, 1), (a, counts[1])]
    refused(pool, [a, b], lambda: pool.reserve(wants), "request 'a' stands twice")
    refused(pool, [a, b], lambda: pool.reserve(iter(wants)), "request 'a' stands twice")


def test_a_pin_twice_in_one_reserve_is_an_error_and_the_pin_stays(pool):
    pinned = Sequence("p", range(5))
    pool.pin(pinned)
    with pytest.raises(ValueError, match="request 'p' stands twice"):
        pool.reserve([(pinned, 1), (pinned, 5)])
    assert pool.reserve([(pinned, 5)]) is not None
    pool.check()


@pytest.mark.parametrize("reason", Release)
def test_a_sequence_twice_in_one_release_is_an_error(pool, reason):
    a, b = admitted(pool, "a"), admitted(pool, "b", first=50)
    refused(pool, [a, b], lambda: pool.release([a, b, a], reason), "request 'a' stands twice")


@pytest.mark.parametrize("n", NO_COUNTS, ids=repr)
def test_commit_takes_counts_only(pool, n):
    a = admitted(pool, "a")
    refused(pool, [a], lambda: pool.commit([(a, n)]), "request '?a'?")


def test_commit_past_what_is_reserved_is_an_error(pool):
    a = admitted(pool, "a")
    slots = len(pool.page_ids(a)) * pool.page_size
    refused(pool, [a], lambda: pool.commit([(a, slots + 1)]), f"request '?a'?.* {slots} slots|slots for {slots}")


@pytest.mark.parametrize("n", [0, 1, 8])
def test_commit_never_lowers_the_length(pool, n):
    a = admitted(pool, "a")
    before = picture(pool, a)
    (commit,) = pool.commit([(a, n)])
    assert (list(commit.published), list(commit.freed), commit.rewritten) == ([], [], (0, 0))
    assert picture(pool, a) == before
    pool.check()


def test_a_late_commit_publishes_as_the_one_in_time(pool):
    """A scheduler that runs ahead has raised the length; the prompt is cached all the same."""
    a = Sequence("a", range(9))
    pool.admit(a)
    a.num_computed_tokens = 9
    pool.commit([(a, 9)])
    assert a.num_computed_tokens == 9
    in_time = make_allocator(pool.design, num_pages=64)
    admitted(in_time, "a")
    assert pool.match(Sequence("b", range(9))).hit_tokens == in_time.match(Sequence("b", range(9))).hit_tokens


@pytest.mark.parametrize("num_tokens", NO_COUNTS, ids=repr)
def test_evict_takes_counts_only(pool, num_tokens):
    a = admitted(pool, "a")
    pool.release([admitted(pool, "gone", first=50)], Release.FINISH)
    refused(pool, [a], lambda: pool.evict(num_tokens), "num_tokens: expected an integer of at least 0")


@pytest.mark.parametrize("reason", ["finish", "FINISH", None, 1], ids=repr)
def test_a_reason_must_be_a_release(pool, reason):
    a = admitted(pool, "a")
    for seqs in ([a], []):
        refused(
            pool, [a], lambda seqs=seqs: pool.release(seqs, reason), "Release.FINISH, Release.PREEMPT, Release.ABORT"
        )


def test_integers_of_other_types_count(pool):
    a = admitted(pool, "a")
    assert pool.extend(a, np.int64(3)) is not None
    pool.commit([(a, np.int32(12))])
    assert (a.num_computed_tokens, type(a.num_computed_tokens)) == (12, int)
    assert pool.evict(np.uint8(0)) == []
    pool.check()


@pytest.mark.parametrize("names", [{"request_id": ["r"]}, {"request_id": "r", "namespace": {}}], ids=str)
def test_a_name_that_cannot_be_hashed_is_refused_where_it_is_given(names):
    wrong = "namespace" if "namespace" in names else "request_id"
    with pytest.raises(ValueError, match=f"{wrong}: expected a hashable value, found"):
        Sequence(token_ids=[1, 2], **names)
    assert Sequence(("a", 1), [1, 2], namespace=("lora", 2)).request_id == ("a", 1)


def test_the_examples_hold():
    assert doctest.testmod(_arguments).failed == 0


@pytest.mark.parametrize("field", ["headroom", "max_in_flight_tokens"])
def test_a_gate_counts_in_whole_numbers(field):
    for value in NO_COUNTS:
        if value is not None or field == "headroom":
            with pytest.raises(ValueError, match=f"{field}: expected an int of at least 0"):
                Gate(**{field: value})
    for value in (0, 3, np.int64(3)):
        assert getattr(Gate(**{field: value}), field) == value
