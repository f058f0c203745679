"""Fork and copy-on-write by hand: who shares which page, who copies when, and what a refusal leaves."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.allocators.config import design as make_design
from kvarena.allocators.config import make_allocator
from kvarena.allocators.host import HostTier
from kvarena.allocators.interface import (
    AllocatorError,
    EventKind,
    Gate,
    PageCopy,
    Release,
    Sequence,
    SupportsFork,
)
from kvarena.allocators.token import TokenAllocator
from kvarena.experiments.random_ops import RandomOps

FORMS = ("hashed", "runs")
ALL = [*FORMS, "token"]


def pool(design: str, num_pages: int = 12, page_size: int = 4, **options: Any) -> Any:
    kind = {"kind": "token"} if design == "token" else {"kind": "block", "form": design}
    return make_allocator({**kind, "page_size": page_size, **options}, num_pages=num_pages)


def live(allocator: Any, name: str, tokens: Any, **options: Any) -> Sequence:
    seq = Sequence(name, tokens, **options)
    assert allocator.admit(seq) is not None
    allocator.commit([(seq, seq.num_tokens)])
    return seq


def fork(allocator: Any, parent: Sequence, name: str, own: Any = ()) -> Sequence:
    child = Sequence(name, [*parent.token_ids[: parent.num_computed_tokens], *own], namespace=parent.namespace)
    assert allocator.fork(parent, child) is not None
    allocator.check()
    return child


def write(allocator: Any, seq: Sequence, token: int) -> list[PageCopy]:
    """One more token, from slot to commit; returns the copies that it took."""
    start = seq.num_computed_tokens
    seq.append(token)
    copies = allocator.prepare_write(seq, start, start + 1)
    assert copies is not None
    assert allocator.extend(seq, 1) is not None
    allocator.commit([(seq, start + 1)])
    allocator.check()
    return copies


@pytest.mark.parametrize("design", [*ALL, "contiguous", "exact"])
def test_the_designs_that_fork_say_so(design: str) -> None:
    spec = {"kind": "contiguous", "sizing": "pow2"} if design == "contiguous" else {"kind": design}
    allocator = pool(design) if design in ALL else make_allocator(spec, num_pages=8)
    assert isinstance(allocator, SupportsFork) == (design in ALL)


# --- who shares what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_block_shares_every_page_and_the_first_writer_copies(form: str) -> None:
    allocator = pool(form)
    parent = live(allocator, "p", range(10))
    child = fork(allocator, parent, "c")
    assert allocator.page_ids(child) == allocator.page_ids(parent)
    capacity = allocator.capacity()
    assert (capacity.in_use, capacity.shared, capacity.wasted_slots) == (3, 3, 4)
    assert write(allocator, child, 50) == [PageCopy(3, 4)]
    assert (list(allocator.page_ids(parent)), list(allocator.page_ids(child))) == ([1, 2, 3], [1, 2, 4])
    assert (allocator.capacity().in_use, allocator.capacity().shared) == (4, 2)
    assert write(allocator, parent, 60) == []  # ref count 1: in place


@pytest.mark.parametrize("form", FORMS)
def test_of_n_holders_all_but_the_last_copy(form: str) -> None:
    allocator = pool(form, num_pages=16)
    parent = live(allocator, "p", range(6))
    family = [parent, *(fork(allocator, parent, f"c{i}") for i in range(3))]
    assert [len(write(allocator, seq, 50 + i)) for i, seq in enumerate(family)] == [1, 1, 1, 0]
    tails = [allocator.page_ids(seq)[1] for seq in family]
    assert len(set(tails)) == 4
    assert allocator.capacity().shared == 1


def test_token_copies_the_tail_at_once_and_shares_the_whole_pages() -> None:
    allocator = pool("token")
    parent = live(allocator, "p", range(10))
    child = Sequence("c", range(10))
    made = allocator.fork(parent, child)
    assert made.copies == (PageCopy(3, 4),)
    assert list(allocator.page_ids(child)) == [1, 2, 4]
    assert allocator.capacity().shared == 2
    assert (write(allocator, child, 50), write(allocator, parent, 60)) == ([], [])


@pytest.mark.parametrize("design", ALL)
@pytest.mark.parametrize("tokens", [4, 8, 1])
def test_on_a_page_border_nothing_is_copied(design: str, tokens: int) -> None:
    allocator = pool(design, page_size=1 if tokens == 1 else 4)
    parent = live(allocator, "p", range(tokens))
    child = fork(allocator, parent, "c")
    assert (write(allocator, parent, 50), write(allocator, child, 51)) == ([], [])
    assert allocator.capacity().shared == (1 if tokens == 1 else tokens // 4)


@pytest.mark.parametrize("design", ALL)
def test_a_fork_in_the_middle_of_a_reply_shares_what_was_generated(design: str) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(3))
    for token in range(100, 107):
        write(allocator, parent, token)
    child = fork(allocator, parent, "c")
    assert allocator.capacity().shared == (2 if design == "token" else 3)
    assert child.num_computed_tokens == 10
    assert child.num_prefill_tokens == 10
    twin = Sequence("t", [*parent.token_ids, 5])
    assert allocator.match(twin).hit_tokens == 8  # pages that the parent filled by generating


def test_a_token_fork_tells_of_the_duplicates_that_its_checkpoint_merged() -> None:
    allocator = pool("token")
    first, second = live(allocator, "a", [1, 2]), live(allocator, "b", [1, 2])
    for seq in (first, second):
        write(allocator, seq, 3)
        write(allocator, seq, 4)
    assert fork(allocator, first, "fa") is not None
    child = Sequence("fb", second.token_ids)
    made = allocator.fork(second, child)
    assert (list(made.commit.freed), made.commit.rewritten) == ([2], (0, 1))
    assert list(allocator.page_ids(second)) == list(allocator.page_ids(first)) == list(allocator.page_ids(child))
    allocator.check()


@pytest.mark.parametrize("design", ALL)
def test_a_forked_agent_computes_its_own_prompt_behind_the_shared_past(design: str) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(8))
    child = fork(allocator, parent, "c", own=range(200, 207))
    assert (child.num_computed_tokens, child.num_prefill_tokens) == (8, 15)
    assert allocator.prepare_write(child, 8, 15) == []
    assert allocator.extend(child, 7) is not None
    allocator.commit([(child, 15)])
    allocator.check()
    assert allocator.match(Sequence("t", [*range(8), *range(200, 207)])).hit_tokens == 12


@pytest.mark.parametrize("form", FORMS)
def test_a_page_that_the_parent_has_published_ahead_is_copied_at_once(form: str) -> None:
    allocator = pool(form)
    parent = live(allocator, "p", range(5))
    for token in (5, 6, 7):
        parent.append(token)
    allocator.extend(parent, 3)  # page 2 now serves tokens 4..7, of which one is written
    child = Sequence("c", range(5))
    made = allocator.fork(parent, child)
    assert made.copies == (PageCopy(2, 3),)
    assert list(allocator.page_ids(child)) == [1, 3]
    allocator.check()
    allocator.commit([(parent, 8)])
    assert write(allocator, child, 99) == []
    assert allocator.match(Sequence("t", range(9))).hit_tokens == 8


@pytest.mark.parametrize("form", FORMS)
def test_a_page_with_a_step_in_flight_is_copied_at_once(form: str) -> None:
    """Result lag 1: the scheduler has raised the parent's length, its token is being written."""
    allocator = pool(form)
    parent = live(allocator, "p", range(5))
    allocator.extend(parent, 1)
    parent.num_computed_tokens = 6
    child = Sequence("c", range(5))
    assert allocator.fork(parent, child).copies == (PageCopy(2, 3),)
    assert child.num_computed_tokens == 5
    parent.append(70)
    allocator.commit([(parent, 6)])
    allocator.check()


@pytest.mark.parametrize("form", FORMS)
def test_neither_publishes_a_partial_page_while_both_hold_it(form: str) -> None:
    allocator = pool(form)
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c")
    for seq, token in ((parent, 60), (child, 70)):
        seq.append(token)
        seq.append(token + 1)
    allocator.extend(parent, 2)  # reserved before it prepared: the page would be full now
    assert allocator.match(Sequence("t", parent.token_ids)).hit_tokens == 4
    allocator.check()
    assert allocator.prepare_write(parent, 6, 8) == [PageCopy(2, 3)]
    assert allocator.match(Sequence("t", parent.token_ids)).hit_tokens == 8
    assert allocator.prepare_write(child, 6, 8) == []
    assert allocator.extend(child, 2)
    allocator.commit([(parent, 8), (child, 8)])
    assert allocator.match(Sequence("t", child.token_ids)).path == (1, 2)
    allocator.check()


# --- refusals and misuse -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_refused_copy_changes_nothing_and_succeeds_after_room_is_made(form: str) -> None:
    allocator = pool(form, num_pages=3)
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c")
    other = live(allocator, "o", [9])
    before, text = allocator.capacity(), repr(allocator)
    assert allocator.prepare_write(child, 6, 7) is None
    assert (allocator.capacity(), repr(allocator)) == (before, text)
    allocator.release([other], Release.FINISH)
    assert allocator.prepare_write(child, 6, 7) == [PageCopy(2, 3)]
    allocator.check()


@pytest.mark.parametrize("form", FORMS)
def test_a_refused_copy_succeeds_without_one_when_the_other_holder_goes(form: str) -> None:
    allocator = pool(form, num_pages=2)
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c")
    assert allocator.prepare_write(child, 6, 7) is None
    allocator.release([parent], Release.PREEMPT)
    assert write(allocator, child, 50) == []


def test_a_token_fork_without_room_for_the_tail_changes_nothing() -> None:
    allocator = pool("token", num_pages=2)
    parent = live(allocator, "p", range(6))
    before, text = allocator.capacity(), repr(allocator)
    assert allocator.fork(parent, Sequence("c", range(6))) is None
    assert (allocator.capacity(), repr(allocator)) == (before, text)


def test_a_token_fork_without_a_free_row_is_refused() -> None:
    allocator = TokenAllocator(8, make_design({"kind": "token"}), num_rows=1)
    parent = live(allocator, "p", range(4))
    allocator.events.enabled = True
    assert allocator.fork(parent, Sequence("c", range(4))) is None
    assert [(event.kind, event.reason) for event in allocator.events.drain()] == [(EventKind.REFUSE, "no free row")]


@pytest.mark.parametrize("design", ALL)
def test_misuse_is_named(design: str) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(6), namespace="tenant")
    stranger = Sequence("x", range(6))
    for child, message in (
        (parent, "'p' is already live"),
        (Sequence("c", range(6)), "the same namespace"),
        (Sequence("c", range(5), namespace="tenant"), "the 6 computed tokens of 'p'"),
        (Sequence("c", [0, 1, 2, 3, 4, 9], namespace="tenant"), "the 6 computed tokens of 'p'"),
        (Sequence("c", range(6), namespace="tenant", extra_keys=[(5, 1, "cat")]), "items"),
    ):
        with pytest.raises(ValueError, match=message):
            allocator.fork(parent, child)
    with pytest.raises(ValueError, match="'x' is not live"):
        allocator.fork(stranger, Sequence("c", range(6)))
    with pytest.raises(ValueError, match="'x' is not live"):
        allocator.prepare_write(stranger, 0, 1)
    with pytest.raises(ValueError, match=r"prepares to write \[5, 7\), 6 tokens are computed"):
        allocator.prepare_write(parent, 5, 7)
    allocator.check()
    pinned = Sequence("q", range(30, 36))
    allocator.pin(pinned)
    with pytest.raises(ValueError, match="reserve before it forks"):
        allocator.fork(pinned, Sequence("c", range(30, 36)))


@pytest.mark.parametrize("design", ALL)
def test_a_parent_that_computed_nothing_has_nothing_to_share(design: str) -> None:
    allocator = pool(design)
    parent = Sequence("p", range(6))
    allocator.admit(parent)
    with pytest.raises(ValueError, match="nothing of it is computed"):
        allocator.fork(parent, Sequence("c", range(6)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", ["ref count", "forgotten"])
def test_check_notices_a_wrong_holder_count_and_a_forgotten_open_page(form: str, fault: str) -> None:
    allocator = pool(form)
    parent = live(allocator, "p", range(6))
    fork(allocator, parent, "c")
    if fault == "forgotten":
        allocator._open.clear()
    elif form == "hashed":
        del allocator._store.often[2]
    else:
        allocator._store._often.clear()
    with pytest.raises(AllocatorError, match=r"which others hold|ref count is 1|without serving hits"):
        allocator.check()


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reasons", [(a, b) for a in Release for b in Release], ids=lambda r: f"{r[0].name}-{r[1].name}"
)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("child_first", [False, True])
@pytest.mark.parametrize("design", ALL)
def test_parent_and_child_end_in_either_order(design: str, child_first: bool, written: bool, reasons: Any) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(10))
    child = fork(allocator, parent, "c")
    if written:
        write(allocator, child, 50)
    first, second = (child, parent) if child_first else (parent, child)
    allocator.release([first], reasons[0])
    allocator.check()
    assert len(allocator.page_ids(second)) == 3
    assert allocator.capacity().shared == 0
    assert write(allocator, second, 60) == []
    allocator.release([second], reasons[1])
    allocator.check()
    assert allocator.capacity().in_use == 0
    assert allocator.reset()
    assert allocator.capacity().free == 12


@pytest.mark.parametrize("design", ALL)
def test_a_preempted_child_comes_back_through_the_prefix_cache(design: str) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(10))
    child = fork(allocator, parent, "c", own=[50])
    allocator.release([child], Release.PREEMPT)
    child.resume()
    pin = allocator.admit(child)
    assert pin is not None
    assert pin.hit_tokens == 8
    allocator.check()


@pytest.mark.parametrize("design", ALL)
def test_a_swapped_parent_leaves_the_child_its_pages_and_comes_back(design: str) -> None:
    allocator = pool(design)
    host = HostTier(allocator, num_pages=6)
    parent = live(allocator, "p", range(10))
    child = fork(allocator, parent, "c")
    pages = allocator.page_ids(child)
    assert host.swap_out(parent) is not None
    assert allocator.page_ids(child) == pages
    assert allocator.capacity().shared == 0
    assert write(allocator, child, 50) == []
    moves = host.swap_in(parent)
    assert moves is not None
    assert [move.dst for move in moves] == [allocator.page_ids(parent)[2]]
    assert parent.num_computed_tokens == 10
    assert allocator.capacity().shared == 2
    allocator.check()


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_takes_no_page_that_a_pin_names(form: str) -> None:
    allocator = pool(form, num_pages=4)
    allocator.release([live(allocator, "old", range(100, 108))], Release.FINISH)  # two cached pages
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c")
    late = Sequence("late", [*range(100, 108), 1])
    assert allocator.pin(late, Gate(whole_prompt=False)).hit_tokens == 8
    assert allocator.prepare_write(child, 6, 7) is None
    allocator.check()


@pytest.mark.parametrize("retention", [None, 0, 8])
def test_under_a_sliding_window_each_leaves_pages_behind_by_itself(retention: int | None) -> None:
    allocator = make_allocator(
        {"kind": "block", "page_size": 4, "sliding_window": 6, "retention_interval": retention}, num_pages=16
    )
    parent = live(allocator, "p", range(10))
    child = fork(allocator, parent, "c")
    for token in range(50, 60):
        write(allocator, parent, token)
    assert allocator.page_ids(parent)[0] == 0
    assert allocator.page_ids(child)[0] != 0
    for token in range(70, 80):
        write(allocator, child, token)
    assert allocator.page_ids(child)[0] == 0
    assert allocator.capacity().shared == 0
    allocator.release([parent, child], Release.FINISH)
    assert allocator.capacity().in_use == 0


@pytest.mark.parametrize("design", ALL)
def test_given_page_hashes_fork_too(design: str) -> None:
    allocator = pool(design)
    parent = Sequence("p", page_hashes=[5, 6], num_tokens=10, num_prompt_tokens=10)
    allocator.admit(parent)
    allocator.commit([(parent, 10)])
    child = Sequence("c", page_hashes=[5, 6], num_tokens=10, num_prompt_tokens=10)
    assert allocator.fork(parent, child) is not None
    for seq in (parent, child):
        for _ in range(6):
            write(allocator, seq, 0)
    with pytest.raises(ValueError, match="computed tokens of 'p'"):
        allocator.fork(parent, Sequence("d", page_hashes=[5, 7], num_tokens=16, num_prompt_tokens=10))
    grandchild = Sequence("g", page_hashes=[5, 6], num_tokens=16, num_prompt_tokens=10)
    assert allocator.fork(parent, grandchild) is not None
    write(allocator, grandchild, 0)
    allocator.release([parent, child, grandchild], Release.FINISH)
    allocator.check()
    assert allocator.capacity().in_use == 0


@pytest.mark.parametrize("design", ALL)
def test_events_tell_of_forks_and_copies(design: str) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(6))
    allocator.events.enabled = True
    child = fork(allocator, parent, "c")
    write(allocator, child, 50)
    rows = [(e.kind, e.request_id, e.page_ids, e.reason) for e in allocator.events.drain()]
    shared = (1,) if design == "token" else (1, 2)
    assert (EventKind.FORK, "c", shared, "p") in rows
    assert (EventKind.COPY, "c", (2, 3), "") in rows
    assert (EventKind.RESERVE, "c", (3,), "") in rows


# --- speculative decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("design", ALL)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("accepted", range(5))
def test_rejected_draft_tokens_are_rolled_back_and_never_published(design: str, page_size: int, accepted: int) -> None:
    """Four drafts and the token that verification adds: slots for 5, `accepted` drafts and one more are kept."""
    allocator = pool(design, page_size=page_size, num_pages=24)
    seq = live(allocator, "s", range(7))
    drafts = [100, 101, 102, 103]
    seq.append(50)
    assert allocator.extend(seq, 1 + len(drafts)) is not None
    slots = len(allocator.page_ids(seq)) * page_size
    for token in drafts[:accepted]:
        seq.append(token)
    allocator.commit([(seq, 8 + accepted)])
    allocator.check()
    assert seq.num_computed_tokens == 8 + accepted
    assert len(allocator.page_ids(seq)) * page_size == slots  # surplus slots stay
    assert allocator.extend(seq, 1) is not None  # written over, no page taken for what the rejected left
    assert len(allocator.page_ids(seq)) * page_size == max(slots, -(-(9 + accepted) // page_size) * page_size)
    allocator.release([seq], Release.FINISH)
    allocator.check()
    whole = Sequence("t", [*range(7), 50, *drafts, 0])
    assert allocator.match(whole).hit_tokens == (8 + accepted) // page_size * page_size


@pytest.mark.parametrize("design", ALL)
def test_drafts_of_a_fork_are_written_to_its_own_pages(design: str) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c", own=[50])
    copies = allocator.prepare_write(child, 6, 10)
    assert len(copies) == (0 if design == "token" else 1)
    assert allocator.extend(child, 4) is not None
    assert not set(allocator.page_ids(child)[1:]) & set(allocator.page_ids(parent))
    allocator.commit([(child, 7)])
    allocator.release([child], Release.ABORT)
    allocator.check()
    assert allocator.match(Sequence("t", [*range(6), 50, 51, 52, 53])).hit_tokens == 4
    assert write(allocator, parent, 60) == []


# --- found by planting faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_last_holder_writes_without_asking(form: str) -> None:
    allocator = pool(form)
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c")
    allocator.release([child], Release.ABORT)
    for token in range(50, 56):
        parent.append(token)
        assert allocator.extend(parent, 1) is not None
        allocator.commit([(parent, parent.num_tokens)])
        allocator.check()
    assert allocator.match(Sequence("t", parent.token_ids)).hit_tokens == 12


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_that_evicts_says_so_in_the_events(form: str) -> None:
    """Whoever keeps evicted content elsewhere hears of it by the event alone: a copy has no list of what it evicted."""
    allocator = pool(form, num_pages=3)
    allocator.release([live(allocator, "old", range(90, 94))], Release.FINISH)
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c")
    allocator.events.enabled = True
    assert write(allocator, child, 50) == [PageCopy(3, 1)]
    told = [(event.kind, event.request_id, list(event.page_ids)) for event in allocator.events.rows]
    assert (EventKind.EVICT, "c", [1]) in told
    allocator.release([child, parent], Release.FINISH)
    assert [kind for kind, _, _ in told].count(EventKind.EVICT) == 1


def test_a_token_fork_evicts_to_copy_the_tail() -> None:
    allocator = pool("token", num_pages=3, demand_slack=0)
    allocator.release([live(allocator, "old", range(90, 94))], Release.FINISH)
    parent = live(allocator, "p", range(6))
    made = allocator.fork(parent, Sequence("c", range(6)))
    assert (list(made.evicted), made.copies) == ([1], (PageCopy(3, 1),))
    allocator.check()


@pytest.mark.parametrize("design", ALL)
def test_a_child_whose_prompt_is_computed_only_decodes(design: str) -> None:
    allocator = pool(design)
    parent = live(allocator, "p", range(3))
    for token in range(100, 107):
        write(allocator, parent, token)
    child = Sequence("c", [*parent.token_ids, 5], num_prompt_tokens=3)
    assert allocator.fork(parent, child) is not None
    assert (child.num_computed_tokens, child.num_prefill_tokens) == (10, 10)
    assert allocator.prepare_write(child, 10, 11) is not None
    batch = allocator.decode_batch([child])
    assert batch.reserve() is not None
    batch.commit()
    allocator.check()
    assert child.num_computed_tokens == 11


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_passes_over_pinned_pages_at_the_head_of_the_queue(form: str) -> None:
    allocator = pool(form, num_pages=5)
    for name, tokens in (("old", range(100, 108)), ("newer", range(200, 204))):
        allocator.release([live(allocator, name, tokens)], Release.FINISH)
    parent = live(allocator, "p", range(6))
    child = fork(allocator, parent, "c")
    late = Sequence("late", [*range(100, 108), 1])
    pinned = allocator.pin(late, Gate(whole_prompt=False))
    assert pinned.hit_tokens == 8
    copies = allocator.prepare_write(child, 6, 7)
    assert len(copies) == 1
    assert copies[0].dst not in pinned.page_ids
    assert allocator.match(Sequence("t", range(100, 109))).hit_tokens == 8
    allocator.check()


def test_a_token_fork_refuses_to_publish_a_token_of_the_reserved_range() -> None:
    allocator = pool("token")
    parent = live(allocator, "p", range(6))
    write(allocator, parent, -(2**31) + 5)
    text = repr(allocator)
    with pytest.raises(ValueError, match="reserved for images"):
        allocator.fork(parent, Sequence("c", parent.token_ids))
    assert repr(allocator) == text


@pytest.mark.parametrize("num_tokens", [2, 6])
def test_a_child_with_a_token_of_the_reserved_range_is_refused(num_tokens: int) -> None:
    """Its own tokens are published as they come: one from the range would be taken for an image."""
    allocator = pool("token", page_size=1)
    parent = live(allocator, "p", range(6))
    text = repr(allocator)
    child = Sequence("c", [*range(num_tokens), -(2**31), -(2**31) + 1])
    with pytest.raises(ValueError, match=f"request c: .* position {num_tokens} .* reserved for images"):
        allocator.fork(parent, child, num_tokens)
    assert repr(allocator) == text
    image = Sequence("i", [*range(num_tokens), 7, 7], extra_keys=[(num_tokens, 2, "cat")])
    assert allocator.match(image).hit_tokens == num_tokens


@pytest.mark.parametrize("child_first", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("design", ALL)
def test_a_child_of_fewer_tokens_holds_their_pages_and_no_more(design: str, page_size: int, child_first: bool) -> None:
    """However much of the parent the cache holds, in one edge or in several."""
    length = 3 * page_size + 1
    for num_tokens in range(1, length + 1):
        allocator = pool(design, num_pages=32, page_size=page_size)
        first = live(allocator, "first", range(2 * page_size))
        parent = live(allocator, "p", range(length))
        child = Sequence("c", [*range(num_tokens), *range(100, 100 + page_size)])
        made = allocator.fork(parent, child, num_tokens)
        allocator.check()
        whole = num_tokens // page_size
        own, parents = allocator.page_ids(child), allocator.page_ids(parent)
        assert own[:whole] == parents[:whole]
        assert len(own) == whole + len(made.copies) or num_tokens == length
        assert all(copy.src == parents[whole] and copy.dst == own[whole] for copy in made.copies)
        assert allocator.prepare_write(child, num_tokens, child.num_tokens) is not None
        assert allocator.extend(child, page_size) is not None
        allocator.commit([(child, child.num_tokens)])
        allocator.check()
        assert list(allocator.page_ids(parent)) == list(parents)
        for seq in (child, parent, first) if child_first else (parent, first, child):
            allocator.release([seq], Release.FINISH)
            allocator.check()
        assert allocator.capacity().in_use == 0
        hits = [allocator.match(Sequence("m", seq.token_ids)).hit_tokens for seq in (parent, child)]
        assert hits == [seq.num_tokens // page_size * page_size for seq in (parent, child)]


@pytest.mark.parametrize("num_tokens", range(1, 29))
def test_a_child_that_would_see_what_a_window_left_behind_is_refused(num_tokens: int) -> None:
    window, size = 6, 4
    allocator = pool("hashed", num_pages=40, page_size=size, sliding_window=window)
    parent = live(allocator, "p", range(20))
    for token in range(8):
        write(allocator, parent, token)
    gone = list(allocator.page_ids(parent)).count(0)
    child, text = Sequence("c", parent.token_ids[:num_tokens]), repr(allocator)
    if max(num_tokens - window + 1, 0) < min(gone * size, num_tokens):
        with pytest.raises(ValueError, match="left pages behind its window of 6 tokens"):
            allocator.fork(parent, child, num_tokens)
        assert repr(allocator) == text
    else:
        assert allocator.fork(parent, child, num_tokens) is not None
    allocator.check()


@pytest.mark.parametrize("reserve_first", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_prepared_page_serves_nobody_before_its_reserve_is_granted(form: str, reserve_first: bool) -> None:
    allocator = pool(form)
    parent = live(allocator, "p", [1, 2, 3, 4, 5, 6, 7])
    child = fork(allocator, parent, "c")
    child.append(8)
    if reserve_first:
        assert allocator.extend(child, 1) is not None
    assert len(allocator.prepare_write(child, 7, 8)) == 1
    same = Sequence("s", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert allocator.match(same).hit_tokens == (8 if reserve_first else 4)
    if not reserve_first:
        child.pop()  # as after a refusal: the text that follows is another one
        child.append(9)
        assert allocator.extend(child, 1) is not None
    allocator.check()
    assert allocator.match(same).hit_tokens == (8 if reserve_first else 4)
    assert allocator.match(Sequence("o", [1, 2, 3, 4, 5, 6, 7, 9])).hit_tokens == (4 if reserve_first else 8)


@pytest.mark.parametrize("seed", [3, 4, 6, 7])
@pytest.mark.parametrize("form", FORMS)
def test_random_users_that_fork_in_a_small_pool_break_no_law(form: str, seed: int) -> None:
    RandomOps(pool(form, num_pages=20), seed).run(450)


@pytest.mark.parametrize("form", ["hashed", "runs"])
@pytest.mark.parametrize("num_tokens", range(1, 21))
def test_a_fork_shares_pages_whose_content_an_abort_took_back(form: str, num_tokens: int) -> None:
    """The parent still holds them, though they serve nobody any more: any beginning of them can be shared."""
    pool = make_allocator({"kind": "block", "page_size": 4, "form": form}, num_pages=32)
    first, parent = Sequence("first", range(20)), Sequence("parent", range(21))
    assert pool.admit(first) is not None
    assert pool.admit(parent) is not None
    assert list(pool.page_ids(parent))[:5] == list(pool.page_ids(first))
    pool.release([first], Release.ABORT)
    pool.commit([(parent, parent.num_tokens - parent.num_computed_tokens)])
    child = Sequence("child", [*range(num_tokens), 99])
    made = pool.fork(parent, child, num_tokens)
    assert made is not None
    shared = num_tokens // 4
    assert list(pool.page_ids(child))[:shared] == list(pool.page_ids(parent))[:shared]
    pool.check()
    pool.release([parent], Release.FINISH)
    pool.check()
    pool.release([child], Release.FINISH)
    pool.check()
    assert pool.capacity().free + pool.capacity().evictable == 32
