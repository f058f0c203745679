"""The block design behind its interface: what each verb does, refuses and reports."""

from __future__ import annotations

import doctest
import io
from typing import Any

import pytest
from kvarena.allocators import free_queue, window
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.config import design
from kvarena.allocators.free_queue import FreeQueue
from kvarena.allocators.interface import EventKind, Gate, Release, Sequence
from support.block_actors import picture

FORM = ["auto"]


@pytest.fixture(params=["hashed", "runs"], autouse=True)
def form(request: pytest.FixtureRequest) -> None:
    """Every test holds for both forms; a window asks for the hashed one."""
    FORM[0] = request.param


def make(num_pages: int = 16, page_size: int = 4, **fields: Any) -> BlockAllocator:
    form = "hashed" if "sliding_window" in fields else FORM[0]
    return BlockAllocator(num_pages, design({"kind": "block", "page_size": page_size, "form": form, **fields}))


def queue(allocator: BlockAllocator) -> list[int]:
    return list(allocator._store.queue())


def admit(allocator: BlockAllocator, name: str, tokens: list[int], **keys: Any) -> Sequence:
    seq = Sequence(name, tokens, **keys)
    assert allocator.admit(seq) is not None
    allocator.commit([(seq, seq.num_tokens)])
    return seq


def finish(allocator: BlockAllocator, name: str, tokens: list[int], **keys: Any) -> None:
    allocator.release([admit(allocator, name, tokens, **keys)], Release.FINISH)


@pytest.mark.parametrize("module", [free_queue, window])
def test_docstring_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


# free queue


def test_the_queue_keeps_order_through_every_kind_of_change() -> None:
    pages = FreeQueue(6)
    pages.remove([1, 6, 3])
    assert list(pages) == [2, 4, 5]
    pages.append([])
    pages.prepend([])
    pages.prepend([6, 1])
    pages.append([3])
    assert list(pages) == [6, 1, 2, 4, 5, 3]
    assert pages.take(6) == [6, 1, 2, 4, 5, 3]
    assert (list(pages), len(pages), pages.problems()) == ([], 0, [])
    pages.append([2])
    assert (list(pages), pages.problems()) == ([2], [])


# pin


def test_a_pin_and_its_refusal_leave_no_trace() -> None:
    allocator = make(6)
    finish(allocator, "old", list(range(9)))
    before = picture(allocator)
    seq = Sequence("big", [*range(8), *range(100, 118)])
    assert allocator.pin(seq) is None
    assert picture(allocator) == before
    assert seq.num_computed_tokens == 0
    small = Sequence("small", list(range(9)))
    pin = allocator.pin(small)
    assert pin is not None
    assert (pin.hit_tokens, list(pin.page_ids), small.num_computed_tokens) == (8, [1, 2], 8)
    assert {**picture(allocator), "pins": {}} == before
    allocator.release([small], Release.ABORT)
    assert picture(allocator) == before


def test_a_live_or_pinned_id_cannot_be_pinned_again() -> None:
    allocator = make()
    seq = Sequence("r", [1])
    allocator.pin(seq)
    for again in (seq, Sequence("r", [2])):
        with pytest.raises(ValueError, match="'r' is already live"):
            allocator.pin(again)
    allocator.reserve([(seq, 1)])
    with pytest.raises(ValueError, match="'r' is already live"):
        allocator.pin(seq)


def test_the_gate_wants_the_whole_prompt_even_when_a_chunk_is_taken() -> None:
    allocator = make(4)
    assert allocator.pin(Sequence("r", list(range(17)))) is None
    seq = Sequence("r", list(range(17)))
    assert allocator.pin(seq, Gate(whole_prompt=False)) is not None
    assert allocator.extend(seq, 16) is not None


def test_promises_to_earlier_chunked_prompts_are_not_subtracted() -> None:
    allocator = make(4)
    first, second = Sequence("a", list(range(16))), Sequence("b", list(range(50, 62)))
    assert allocator.admit(first, n=4) is not None
    assert allocator.admit(second, n=12) is not None
    allocator.commit([(first, 4)])
    assert allocator.extend(first, 4) is None


@pytest.mark.parametrize(("headroom", "admitted"), [(0, True), (1, True), (2, False)])
def test_headroom_stays_free(headroom: int, admitted: bool) -> None:
    allocator = make(4)
    seq = Sequence("r", list(range(12)))
    assert (allocator.admit(seq, gate=Gate(headroom=headroom)) is not None) is admitted


def test_headroom_also_holds_when_the_whole_prompt_is_not_tested() -> None:
    allocator = make(4)
    seq = Sequence("r", list(range(40)))
    assert allocator.pin(seq, Gate(whole_prompt=False, headroom=2)) is not None
    assert allocator.reserve([(seq, 12)]) is None
    assert allocator.pin(seq, Gate(whole_prompt=False, headroom=2)) is not None
    assert allocator.reserve([(seq, 8)]) is not None
    allocator.commit([(seq, 8)])
    assert allocator.reserve([(seq, 8)]) is not None


@pytest.mark.parametrize(
    ("gate", "most"),
    [
        (Gate(), 16),
        (Gate(strict=True), 12),
        (Gate(page_rounded=False), 16),
        (Gate(page_rounded=False, strict=True), 15),
        (Gate(page_rounded=False, strict=True, headroom=4), 11),
    ],
)
def test_gates_in_pages_and_in_tokens(gate: Gate, most: int) -> None:
    allocator = make(4)
    assert allocator.pin(Sequence("fits", list(range(most))), gate) is not None
    assert allocator.pin(Sequence("too long", list(range(most + 1))), gate) is None


def test_idle_hit_pages_count_as_needed() -> None:
    allocator = make(4)
    finish(allocator, "old", list(range(8)))
    assert allocator.pin(Sequence("fits", [*range(8), *range(50, 58)])) is not None
    assert allocator.pin(Sequence("not", [*range(8), *range(50, 59)])) is None
    allocator = make(4)
    admit(allocator, "old", list(range(8)))
    assert allocator.pin(Sequence("fits", [*range(8), *range(50, 58)])) is not None


def test_hits_are_touched_before_pages_are_taken() -> None:
    allocator = make(3)
    finish(allocator, "old", list(range(12)))
    seq = admit(allocator, "new", list(range(12)))
    assert list(allocator.page_ids(seq)) == [1, 2, 3]


def test_a_pending_pin_survives_what_others_reserve() -> None:
    allocator = make(3)
    finish(allocator, "old", list(range(8)))
    pinned, other = Sequence("pinned", list(range(9))), Sequence("other", [50])
    pin = allocator.pin(pinned)
    assert pin is not None
    assert allocator.admit(other) is not None
    assert list(allocator.page_ids(other)) == [3]
    assert allocator.admit(Sequence("third", [60])) is None
    allocator.check()
    assert allocator.reserve([(pinned, 0)]) is not None
    assert list(allocator.page_ids(pinned)) == [1, 2]
    allocator.check()


def test_a_pending_pin_that_is_let_go_returns_its_pages_to_the_tail() -> None:
    allocator = make(4)
    finish(allocator, "old", list(range(8)))
    pinned = Sequence("pinned", list(range(9)))
    allocator.pin(pinned)
    admit(allocator, "other", [50])
    allocator.release([pinned], Release.ABORT)
    allocator.check()
    assert queue(allocator)[-2:] == [2, 1]


def test_match_sees_the_last_token_and_changes_nothing() -> None:
    allocator = make()
    finish(allocator, "old", list(range(8)))
    before = picture(allocator)
    found = allocator.match(Sequence("probe", list(range(8))))
    assert (found.hit_tokens, found.path) == (8, (1, 2))
    assert allocator.match(Sequence("probe", [5])).hit_tokens == 0
    assert picture(allocator) == before
    assert make(prefix_cache=False).match(Sequence("probe", [5])).hit_tokens == 0


# reserve and commit


def test_surplus_slots_stay_and_rejected_drafts_are_not_published() -> None:
    allocator = make()
    seq = admit(allocator, "r", list(range(3)))
    assert list(allocator.reserve([(seq, 6)])[0].page_ids) == [2, 3]  # type: ignore[index]
    seq.append(3)
    allocator.commit([(seq, 4)])
    assert allocator.match(Sequence("probe", [0, 1, 2, 3, 4])).hit_tokens == 0
    assert allocator.capacity().wasted_slots == 8
    assert list(allocator.extend(seq, 5).page_ids) == []  # type: ignore[union-attr]
    assert allocator.match(Sequence("probe", [0, 1, 2, 3])).hit_tokens == 4
    allocator.check()


def test_a_page_filled_by_decode_is_published_when_the_step_is_reserved() -> None:
    allocator = make()
    seq = admit(allocator, "r", [1, 2, 3])
    seq.append(4)
    assert allocator.match(Sequence("probe", [1, 2, 3, 4])).hit_tokens == 0
    allocator.extend(seq, 1)
    assert allocator.match(Sequence("probe", [1, 2, 3, 4])).hit_tokens == 4


def test_a_request_that_ends_on_a_sampled_token_does_not_publish_its_page() -> None:
    allocator = make()
    seq = admit(allocator, "r", [1, 2, 3])
    seq.append(4)
    allocator.release([seq], Release.FINISH)
    assert allocator.match(Sequence("probe", [1, 2, 3, 4])).hit_tokens == 0


def test_a_scheduler_that_runs_ahead_publishes_when_results_arrive() -> None:
    allocator = make()
    seq = admit(allocator, "r", [1, 2, 3])
    allocator.extend(seq, 1)
    seq.num_computed_tokens = 4
    assert allocator.match(Sequence("probe", [1, 2, 3, 4])).hit_tokens == 0
    seq.append(4)
    allocator.commit([(seq, 4)])
    assert allocator.match(Sequence("probe", [1, 2, 3, 4])).hit_tokens == 4
    allocator.check()


def test_a_second_request_in_the_same_step_hits_the_first_ones_pages() -> None:
    allocator = make()
    first, second = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    allocator.admit(first)
    pin = allocator.admit(second)
    assert pin is not None
    assert pin.hit_tokens == 8


def test_aborted_work_is_not_found() -> None:
    allocator = make()
    finish(allocator, "old", list(range(4)))
    seq = Sequence("r", list(range(12)))
    allocator.admit(seq, n=8)
    allocator.commit([(seq, 8)])
    allocator.extend(seq, 4)
    done = allocator.release([seq], Release.ABORT)
    assert (list(done.freed), list(done.cached), list(done.evicted)) == ([3], [2, 1], [3])
    assert allocator.match(Sequence("probe", list(range(12)))).hit_tokens == 8
    allocator.check()


@pytest.mark.parametrize("reason", [Release.FINISH, Release.PREEMPT])
def test_finish_and_preemption_keep_what_was_published(reason: Release) -> None:
    allocator = make()
    seq = Sequence("r", list(range(10)))
    allocator.admit(seq)
    done = allocator.release([seq], reason)
    assert (list(done.freed), list(done.cached), seq.num_computed_tokens) == ([3], [2, 1], 0)
    assert queue(allocator) == [3, *range(4, 17), 2, 1]


def test_a_page_held_by_two_is_counted_once_and_freed_last() -> None:
    allocator = make()
    first, second = admit(allocator, "a", list(range(9))), admit(allocator, "b", list(range(9)))
    counts = allocator.capacity()
    assert (counts.in_use, counts.shared, counts.free) == (4, 2, 12)
    assert list(allocator.release([first], Release.FINISH).cached) == []
    assert allocator.capacity().shared == 0
    assert list(allocator.release([second], Release.FINISH).cached) == [2, 1]


def test_duplicates_are_kept_and_counted() -> None:
    allocator = make()
    finish(allocator, "a", list(range(8)))
    seq = Sequence("b", list(range(8)))
    allocator.pin(seq)
    reservation = allocator.extend(seq, 4)
    assert reservation is not None
    assert (list(reservation.page_ids), list(reservation.duplicates)) == ([3], [3])
    assert allocator.capacity().duplicates == 1


def test_a_batch_takes_all_or_nothing() -> None:
    allocator = make(4)
    seqs = [admit(allocator, name, [i] * 4) for i, name in enumerate("abc")]
    before = picture(allocator)
    assert allocator.reserve([(seq, 1) for seq in seqs]) is None
    assert picture(allocator) == before
    assert allocator.reserve([(seqs[0], 1)]) is not None


def test_a_batch_of_pins_shares_idle_hits_and_is_dropped_as_one() -> None:
    allocator = make(4)
    finish(allocator, "old", list(range(8)))
    seqs = [Sequence(name, [*range(8), i]) for i, name in enumerate("ab")]
    for seq in seqs:
        assert allocator.pin(seq) is not None
    assert allocator.reserve([(seqs[0], 1), (seqs[1], 1)]) is not None
    assert [list(allocator.page_ids(seq)) for seq in seqs] == [[1, 2, 3], [1, 2, 4]]
    allocator.release(seqs, Release.FINISH)
    before = picture(allocator)
    for seq in seqs:
        assert allocator.pin(seq) is not None
    assert allocator.reserve([(seqs[0], 1), (seqs[1], 9)]) is None
    assert picture(allocator) == before


def test_waste_counts_slots_without_a_written_token() -> None:
    allocator = make()
    seq = Sequence("r", list(range(6)))
    allocator.admit(seq)
    assert allocator.capacity().wasted_slots == 8
    allocator.commit([(seq, 6)])
    assert allocator.capacity().wasted_slots == 2
    other = admit(allocator, "b", list(range(6)))
    assert allocator.capacity().wasted_slots == 4
    allocator.release([seq, other], Release.FINISH)
    assert allocator.capacity().wasted_slots == 0


# given page ids


def given(name: str, ids: list[int], num_tokens: int, **keys: Any) -> Sequence:
    return Sequence(name, page_hashes=ids, num_tokens=num_tokens, **keys)


def test_given_ids_serve_as_keys() -> None:
    allocator = make()
    for seq in (given("a", [7, 8, 9], 11), given("b", [7, 8, 5], 12)):
        pin = allocator.admit(seq)
        assert pin is not None
        allocator.commit([(seq, seq.num_tokens)])
        allocator.check()
    assert pin.hit_tokens == 8
    assert allocator.match(given("probe", [7, 8, 9], 12)).hit_tokens == 8
    assert allocator.match(given("probe", [7, 8, 5], 12)).hit_tokens == 12
    assert allocator.match(given("probe", [7, 8, 5], 12, namespace="tenant")).hit_tokens == 0


def test_replies_to_given_ids_have_no_name_and_are_not_published() -> None:
    allocator = make()
    seq = given("a", [7], 4)
    allocator.admit(seq)
    allocator.commit([(seq, 4)])
    for _ in range(6):
        seq.append(0)
    allocator.extend(seq, 6)
    allocator.commit([(seq, 10)])
    allocator.check()
    assert list(allocator.release([seq], Release.FINISH).cached) == [1]


# sliding window


def test_pages_leave_the_window_even_when_the_step_is_refused() -> None:
    allocator = make(3, sliding_window=4, retention_interval=None)
    seq = admit(allocator, "r", list(range(12)))
    seq.append(12)
    reservation = allocator.extend(seq, 1)
    assert reservation is not None
    assert (reservation.rewritten, list(reservation.freed), list(reservation.page_ids)) == ((0, 2), [2, 1], [2])
    assert list(allocator.page_ids(seq)) == [0, 0, 3, 2]
    other = Sequence("o", [50])
    assert allocator.admit(other) is not None
    allocator.commit([(seq, 13), (other, 1)])
    assert allocator.extend(seq, 20) is None
    assert list(allocator.page_ids(seq)) == [0, 0, 3, 2]
    seq.token_ids.extend(range(13, 16))
    assert allocator.extend(seq, 3) is not None
    allocator.commit([(seq, 16)])
    assert allocator.extend(seq, 40) is None
    assert list(allocator.page_ids(seq)) == [0, 0, 0, 2]
    allocator.check()


def test_a_window_hit_names_only_the_pages_in_sight() -> None:
    allocator = make(sliding_window=5, retention_interval=None)
    finish(allocator, "old", list(range(13)))
    pin = allocator.pin(Sequence("new", list(range(13))))
    assert pin is not None
    assert (pin.hit_tokens, list(pin.page_ids)) == (12, [0, 0, 3])


@pytest.mark.parametrize(("in_flight", "admitted"), [(None, False), (3, True), (8, True), (9, False)])
def test_a_window_caps_what_admission_asks_for(in_flight: int | None, admitted: bool) -> None:
    allocator = make(5, sliding_window=9)
    gate = Gate(max_in_flight_tokens=in_flight)
    assert (allocator.pin(Sequence("r", list(range(100))), gate) is not None) is admitted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 8, "retention_interval": 6}, "multiple of the page size 4, found 6"),
        ({"retention_interval": 8}, "only a sliding window"),
        ({"sliding_window": 8, "form": "runs"}, "a sliding window"),
    ],
)
def test_impossible_designs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


# evict, reset, events, errors


def test_evict_drops_the_least_recently_released_and_keeps_places() -> None:
    allocator = make(4)
    finish(allocator, "a", list(range(8)))
    finish(allocator, "b", list(range(50, 58)))
    order = queue(allocator)
    assert allocator.evict(0) == []
    assert allocator.evict(5) == [2, 1]
    assert allocator.evict(8) == []
    assert queue(allocator) == order
    assert allocator.evict(1000) == [4, 3]
    allocator.check()


def test_reset_waits_for_the_last_sequence_and_keeps_the_queue() -> None:
    allocator = make(6)
    seq = Sequence("r", list(range(8)))
    allocator.pin(seq)
    assert not allocator.reset()
    allocator.reserve([(seq, 8)])
    before = picture(allocator)
    assert not allocator.reset()
    assert picture(allocator) == before
    allocator.release([seq], Release.FINISH)
    order = queue(allocator)
    allocator.events.enabled = True
    assert allocator.reset()
    (event,) = allocator.events.drain()
    assert (event.kind, event.page_ids, event.reason) == (EventKind.EVICT, (1, 2), "reset")
    assert (queue(allocator), allocator.room()) == (order, (6, 0))
    assert allocator.reset()
    assert allocator.events.drain() == []


def test_events_of_one_life() -> None:
    allocator = make(3)
    finish(allocator, "old", list(range(8)))
    allocator.events.enabled = True
    seq = admit(allocator, "r", list(range(8)))
    seq.append(8)
    allocator.extend(seq, 9)
    allocator.release([seq], Release.PREEMPT)
    assert [(e.kind.value, e.request_id, e.page_ids, e.reason) for e in allocator.events.drain()] == [
        ("hit", "r", (1,), ""),
        ("reserve", "r", (3,), ""),
        ("publish", "r", (3,), ""),
        ("duplicate", "r", (3,), ""),
        ("refuse", "r", (), "capacity: needs 3 pages, 1 free or evictable"),
        ("release", "r", (3, 1), "preempt"),
    ]
    admit(allocator, "s", list(range(50, 60)))
    evictions = [e for e in allocator.events.drain() if e.kind is EventKind.EVICT]
    assert [(e.page_ids, e.reason) for e in evictions] == [((2, 3, 1), "capacity")]
    assert allocator.pin(Sequence("t", [1])) is None
    assert allocator.events.drain()[-1].reason == "gate: needs 1, has 0"


def test_no_event_is_kept_unless_asked_for() -> None:
    allocator = make()
    finish(allocator, "old", list(range(8)))
    assert allocator.events.rows == []


def test_misuse_raises_and_changes_nothing() -> None:
    allocator = make()
    seq, stranger = admit(allocator, "r", [1, 2, 3]), Sequence("x", [1])
    before = picture(allocator)
    for misuse, message in [
        (lambda: allocator.reserve([(stranger, 1)]), "'x' is not live"),
        (lambda: allocator.reserve([(seq, 0)]), "expected n >= 1 tokens, found 0"),
        (lambda: allocator.reserve([(seq, -1)]), "expected n >= 1 tokens, found -1"),
        (lambda: allocator.reserve([(seq, 4), (seq, 4)]), "twice"),
        (lambda: allocator.reserve([(seq, 9), (stranger, 1)]), "'x' is not live"),
        (lambda: allocator.commit([(stranger, 1)]), "'x' is not live"),
        (lambda: allocator.commit([(seq, 5)]), "commits 5 tokens, has slots for 4"),
        (lambda: allocator.commit([(seq, -1)]), "commits -1 tokens"),
        (lambda: allocator.page_ids(stranger), "'x' is not live"),
        (lambda: allocator.reserve([(Sequence("r", [1]), 1)]), "'r' is not live"),
        (lambda: allocator.release([Sequence("r", [1])], Release.FINISH), "another sequence"),
    ]:
        with pytest.raises(ValueError, match=message):
            misuse()
        assert picture(allocator) == before
    pinned = Sequence("p", [5])
    allocator.pin(pinned)
    with pytest.raises(ValueError, match="expected n >= 1 tokens, found 0"):
        allocator.reserve([(pinned, 0)])


@pytest.mark.parametrize("num_pages", [0, -3])
def test_a_pool_has_at_least_one_page(num_pages: int) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        make(num_pages)


def test_page_ids_are_a_copy() -> None:
    allocator = make()
    seq = admit(allocator, "r", [1])
    allocator.page_ids(seq)[0] = 9
    assert list(allocator.page_ids(seq)) == [1]


def test_tokens_are_hashed_once_over_refusals_and_preemptions() -> None:
    calls: list[bytes] = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return data[-8:]

    allocator = BlockAllocator(4, design({"kind": "block", "page_size": 2}), hash_fn=counting)
    blocker, seq = Sequence("blocker", [9]), Sequence("r", list(range(8)))
    allocator.admit(blocker)
    calls.clear()
    for _ in range(5):
        assert allocator.admit(seq) is None
    assert len(calls) == 1 + 4
    allocator.release([blocker], Release.FINISH)
    for _ in range(3):
        assert allocator.admit(seq) is not None
        allocator.commit([(seq, seq.num_tokens)])
        allocator.release([seq], Release.PREEMPT)
    assert len(calls) == 1 + 4


def test_changed_tokens_are_hashed_again() -> None:
    allocator = make()
    seq = Sequence("r", list(range(8)))
    allocator.match(seq)
    seq.token_ids[0] = 5
    allocator.admit(seq)
    allocator.check()
    assert allocator.match(Sequence("probe", [5, *range(1, 8)])).hit_tokens == 8


def test_one_sequence_can_be_asked_of_two_allocators() -> None:
    one, other = make(), make(page_size=2)
    seq = Sequence("r", list(range(8)))
    for allocator in (one, other, one):
        assert allocator.match(seq).hit_tokens == 0
    finish(one, "old", list(range(8)))
    assert (one.match(seq).hit_tokens, other.match(seq).hit_tokens) == (8, 0)


def test_the_display_shows_pages_owners_and_queue() -> None:
    allocator = make(9)
    admit(allocator, "alice", list(range(9)))
    admit(allocator, "bob", list(range(9)))
    finish(allocator, "carol", list(range(50, 55)))
    allocator.pin(Sequence("dave", list(range(9))))
    text = repr(allocator)
    assert "9 pages x 4 tokens, 4 free, 1 evictable, 4 in use" in text
    assert "row alice: 1*(2) 2*(2) 3 (9/12 tokens)" in text
    assert "pin dave: 1*(2) 2*(2) (8/8 tokens)" in text
    assert "queue, head first: 6 7 8 9 5*" in text
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(allocator)
    assert "alice" in console.export_text()
