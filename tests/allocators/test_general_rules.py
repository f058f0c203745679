"""Each switch of the general form does what its name says, seen in a few requests; what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.allocators.block import BlockAllocator
from kvarena.allocators.config import Design, design, make_allocator
from kvarena.allocators.general import GeneralAllocator
from kvarena.allocators.interface import EventKind, KVAllocator, Release, Sequence
from kvarena.allocators.token import TokenAllocator
from kvarena.experiments.conformance import conformance
from kvarena.experiments.random_ops import RandomOps


def make(kind: str, num_pages: int, **fields: Any) -> KVAllocator:
    allocator = make_allocator({"kind": kind, "page_size": 4, "form": "general", **fields}, num_pages=num_pages)
    allocator.events.enabled = True
    return allocator


def live(allocator: KVAllocator, name: str, tokens: list[int], generated: int = 0) -> Sequence:
    """An admitted, computed request, with some tokens generated one by one."""
    seq = Sequence(name, tokens)
    assert allocator.admit(seq) is not None
    allocator.commit([(seq, seq.num_prefill_tokens)])
    for token in range(generated):
        seq.append(token)
        assert allocator.extend(seq, 1) is not None
        allocator.commit([(seq, seq.num_tokens)])
    allocator.check()
    return seq


def end(allocator: KVAllocator, *seqs: Sequence, reason: Release = Release.FINISH) -> None:
    allocator.release(seqs, reason)
    allocator.check()


def hit(allocator: KVAllocator, tokens: list[int]) -> int:
    return allocator.match(Sequence("probe", tokens)).hit_tokens


A, B, C = list(range(100, 112)), list(range(200, 212)), list(range(300, 312))  # three pages each


# --- publishing ---


def test_publish_says_whether_reserved_pages_serve_before_they_are_written() -> None:
    for publish, expected in (("reserve", 12), ("commit", 0)):
        allocator = make("block", 20, publish=publish)
        allocator.admit(Sequence("a", A))
        assert hit(allocator, A) == expected


@pytest.mark.parametrize(("publish", "kind"), [("reserve", "block"), ("commit", "block"), ("commit", "token")])
def test_publish_generated_says_whether_replies_serve_before_their_end(publish: str, kind: str) -> None:
    for generated, expected in (("filled", 16), ("finish", 12)):
        allocator = make(kind, 20, publish=publish, publish_generated=generated)
        seq = live(allocator, "a", A, generated=5)
        assert hit(allocator, [*A, 0, 1, 2, 3]) == expected
        end(allocator, seq)
        assert hit(allocator, [*A, 0, 1, 2, 3]) == 16


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("generated", ["filled", "finish"])
def test_preempt_keeps_says_whether_generated_pages_stay(kind: str, generated: str) -> None:
    for keeps, expected in (("all", 16), ("checkpointed", 12)):
        allocator = make(kind, 20, publish_generated=generated, preempt_keeps=keeps)
        end(allocator, live(allocator, "a", A, generated=5), reason=Release.PREEMPT)
        assert hit(allocator, [*A, 0, 1, 2, 3]) == expected


def test_generated_pages_that_another_request_shares_outlive_a_preemption() -> None:
    allocator = make("block", 20, preempt_keeps="checkpointed")
    first = live(allocator, "a", A, generated=5)
    second = live(allocator, "b", [*A, 0, 1, 2, 3, 9])
    assert allocator.page_ids(second)[3] == allocator.page_ids(first)[3]
    end(allocator, first, reason=Release.PREEMPT)
    assert hit(allocator, [*A, 0, 1, 2, 3]) == 16


# --- duplicates ---


@pytest.mark.parametrize("publish", ["reserve", "commit"])
@pytest.mark.parametrize("kind", ["block", "token"])
def test_duplicates_are_kept_side_by_side_or_given_up_for_the_first(kind: str, publish: str) -> None:
    for duplicates, pages in (("keep", 4), ("merge", 3)):
        allocator = make(kind, 20, duplicates=duplicates, publish=publish)
        first, second = live(allocator, "a", A), live(allocator, "b", A)  # the last page is computed again
        rows = [list(allocator.page_ids(seq)) for seq in (first, second)]
        assert (rows[0] == rows[1]) == (duplicates == "merge")
        assert allocator.capacity().in_use == pages
        assert allocator.capacity().duplicates == (duplicates == "keep")


# --- eviction ---


@pytest.mark.parametrize("index", ["queue", "tree"])
def test_eviction_unit_says_whether_a_page_or_a_whole_leaf_goes(index: str) -> None:
    for unit, gone in (("page", 1), ("leaf", 3)):
        allocator = make("block", 6, eviction_unit=unit, index=index)
        end(allocator, live(allocator, "a", A))
        end(allocator, live(allocator, "b", B[:8]))
        allocator.events.drain()
        live(allocator, "c", C[:8])  # one page is free, one is short
        assert sum(len(event.page_ids) for event in allocator.events.drain() if event.kind is EventKind.EVICT) == gone
        assert hit(allocator, A) == 12 - 4 * gone


@pytest.mark.parametrize("kind", ["block", "token"])
def test_recency_says_whether_a_refused_match_counts_as_use(kind: str) -> None:
    for recency, survivor in (("release", B), ("access", A)):
        allocator = make(kind, 8, recency=recency, split_touches_suffix=False, eviction_unit="page")
        end(allocator, live(allocator, "a", A[:8]))
        end(allocator, live(allocator, "b", B[:8]))
        assert allocator.pin(Sequence("too long", [*A, *range(400, 440)])) is None
        allocator.evict(4 * 6)
        assert hit(allocator, survivor[:8]) == 8


def test_split_touches_suffix_keeps_what_was_cut_off() -> None:
    for touches, kept in ((True, A), (False, B)):
        allocator = make("block", 8, split_touches_suffix=touches)
        end(allocator, live(allocator, "a", A[:8]))
        end(allocator, live(allocator, "b", B[:8]))
        hit(allocator, [*A[:4], 7, 7, 7, 7])  # ends inside the edge of a
        allocator.evict(4 * 5)
        assert hit(allocator, kept[:8]) == 8


def test_demand_slack_evicts_more_than_is_needed() -> None:
    for slack, gone in ((0, 0), (1, 1), (2, 2)):
        allocator = make("block", 6, demand_slack=slack)
        end(allocator, live(allocator, "a", A))
        allocator.events.drain()
        live(allocator, "b", B)  # three pages, all free
        assert sum(len(event.page_ids) for event in allocator.events.drain() if event.kind is EventKind.EVICT) == gone


@pytest.mark.parametrize("kind", ["block", "token"])
def test_refused_evicts_says_whether_a_refusal_costs_cached_content(kind: str) -> None:
    for evicts, expected in ((True, 0), (False, 8)):
        allocator = make(kind, 4, refused_evicts=evicts, demand_slack=0)
        end(allocator, live(allocator, "a", A[:8]))
        seq = live(allocator, "b", B[:8])
        assert allocator.reserve([(seq, 12)]) is None
        assert hit(allocator, A[:8]) == expected


def test_unhashed_to_head_spares_cached_content_while_pages_are_free() -> None:
    for to_head, expected in ((True, 12), (False, 0)):
        allocator = make("block", 8, unhashed_to_head=to_head)
        end(allocator, live(allocator, "a", A))
        for number in range(8):  # pages without content, freed before all others or behind the content of a
            end(allocator, live(allocator, f"x{number}", [number]))
        assert hit(allocator, A) == expected
        assert sum(allocator.room()) == 8


def test_reversed_release_keeps_the_beginning_of_a_chain() -> None:
    for backwards, expected in ((True, 8), (False, 0)):
        allocator = make("block", 6, reversed_release=backwards)
        end(allocator, live(allocator, "a", A))
        allocator.evict(4 * 4)  # one page more than is free
        assert hit(allocator, A) == expected
        assert allocator.room() == (4, 2)


# --- partial-block hits ---


@pytest.mark.parametrize("kind", ["block", "token"])
def test_a_hit_may_end_inside_a_page_which_is_copied_before_it_is_written(kind: str) -> None:
    allocator = make(kind, 20, hash_unit=2)
    first = live(allocator, "a", [*A, 1, 2, 3])  # three pages, and [1, 2] of a fourth by hash unit
    second = Sequence("b", [*A, 1, 2, 9, 9, 9])
    pin = allocator.pin(second)
    assert pin is not None
    assert (pin.hit_tokens, list(pin.page_ids)) == (14, list(allocator.page_ids(first)))
    reservations = allocator.reserve([(second, 3)])
    assert reservations is not None
    row = allocator.page_ids(second)
    assert [(move.src, move.dst) for move in reservations[0].moves] == [(allocator.page_ids(first)[3], row[3])]
    assert row[3] not in allocator.page_ids(first)
    allocator.check()
    end(allocator, first)
    assert pin.page_ids[3] not in allocator.evict(80)  # held until the copy has been carried out
    allocator.commit([(second, 17)])
    allocator.check()
    end(allocator, second)


def test_without_a_hash_unit_hits_are_whole_pages() -> None:
    allocator = make("block", 20)
    live(allocator, "a", [*A, 1, 2, 3])
    assert hit(allocator, [*A, 1, 2, 3]) == 12


def test_a_beginning_serves_only_once_it_is_written() -> None:
    allocator = make("block", 20, hash_unit=1)
    seq = Sequence("a", [1, 2, 3])
    allocator.admit(seq)
    assert hit(allocator, [1, 2, 3]) == 0
    allocator.commit([(seq, 3)])
    assert hit(allocator, [1, 2, 3]) == 3
    assert hit(allocator, [1, 2, 4]) == 0  # only the prompt's own end was offered, not every beginning


def test_a_page_that_serves_a_beginning_is_evicted_like_any_other() -> None:
    for kind in ("block", "token"):
        allocator = make(kind, 6, hash_unit=1)
        end(allocator, live(allocator, "a", [*A[:4], 1, 2]))
        assert allocator.room() == (4, 2)
        assert hit(allocator, [*A[:4], 1, 2]) == 6
        assert len(allocator.evict(24)) == 2
        allocator.check()
        assert hit(allocator, [*A[:4], 1, 2]) == 0


@pytest.mark.parametrize("kind", ["block", "token"])
def test_copies_keep_every_law_under_random_requests_and_do_happen(kind: str) -> None:
    allocator = make(kind, 40, hash_unit=1, page_size=6)
    RandomOps(allocator, 5).run(250)
    assert any(event.kind is EventKind.COPY for event in allocator.events.rows)


# --- orders ---

QUEUE_ORDERS = ("lru", "lfu", "fifo", "slru", "priority", "random", "sieve")
TREE_ORDERS = (*QUEUE_ORDERS, "mru", "filo")


@pytest.mark.parametrize("order", TREE_ORDERS)
@pytest.mark.parametrize("kind", ["block", "token"])
def test_every_order_that_makes_sense_keeps_every_law(kind: str, order: str) -> None:
    if kind == "block" and order not in QUEUE_ORDERS:
        with pytest.raises(ValueError, match="in a flat queue the newest page is the start of a chain"):
            design({"kind": kind, "eviction_order": order})
        return
    allocator = make_allocator({"kind": kind, "page_size": 3, "eviction_order": order, "form": "general"}, num_pages=20)
    RandomOps(allocator, 3).run(120)


def test_an_order_decides_what_goes() -> None:
    gone: dict[str, int] = {}
    for order in ("lru", "mru", "lfu", "fifo"):
        allocator = make("token", 12, eviction_order=order)
        for name, tokens, times in (("a", A, 3), ("b", B, 1), ("c", C, 1)):
            for number in range(times):
                end(allocator, live(allocator, f"{name}{number}", tokens))
        end(allocator, live(allocator, "a again", A))
        allocator.evict(4 * 4)  # three pages are free
        gone[order] = next(index for index, tokens in enumerate((A, B, C)) if hit(allocator, tokens) < 12)
    assert gone == {"lru": 1, "mru": 0, "lfu": 1, "fifo": 0}


# --- which form is taken, and what is refused ---


def test_the_general_form_is_taken_where_nothing_faster_honours_a_field() -> None:
    for fields, form in (
        ({"kind": "block"}, BlockAllocator),
        ({"kind": "token"}, TokenAllocator),
        ({"kind": "token", "eviction_unit": "page", "demand_slack": 0}, TokenAllocator),
        ({"kind": "token", "eviction_order": "sieve"}, TokenAllocator),
        ({"kind": "block", "duplicates": "merge"}, GeneralAllocator),
        ({"kind": "token", "publish": "reserve"}, GeneralAllocator),
        ({"kind": "block", "form": "general"}, GeneralAllocator),
        ({"kind": "token", "form": "general"}, GeneralAllocator),
    ):
        assert type(make_allocator(fields, num_pages=4)) is form


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "block", "duplicates": "merge", "sliding_window": 64}, "not honoured together with duplicates"),
        ({"kind": "block", "duplicates": "merge", "hash_fn": "sha256"}, "not honoured together with duplicates"),
        ({"kind": "token", "publish": "reserve", "need_sort": True}, "not honoured together with publish"),
        ({"kind": "block", "form": "general", "sliding_window": 64}, "not honoured together with form = 'general'"),
        ({"kind": "block", "form": "general", "hash_fn": "sha256"}, "not honoured together with form = 'general'"),
        ({"kind": "token", "form": "general", "need_sort": True}, "not honoured together with form = 'general'"),
        ({"kind": "block", "recency": "access", "form": "runs"}, "form = 'runs' does not honour recency"),
        ({"kind": "token", "form": "hashed"}, "form = 'hashed' is one of kind 'block'"),
        ({"kind": "exact", "form": "general"}, "not honoured by kind 'exact'"),
        ({"kind": "contiguous", "duplicates": "merge"}, "not honoured by kind 'contiguous'"),
        ({"kind": "block", "eviction_order": "mru"}, "needs index = 'tree'"),
        ({"kind": "block", "eviction_order": "lfu", "unhashed_to_head": False}, "by time"),
        ({"kind": "block", "hash_unit": 16}, "expected a divisor of the page size 16 below it"),
        ({"kind": "block", "hash_unit": 5}, "expected a divisor of the page size 16 below it"),
        ({"kind": "token", "hash_unit": 1}, "expected a divisor of the page size 1 below it"),
        ({"kind": "block", "hash_unit": 4, "prefix_cache": False}, "needs prefix_cache = True"),
        ({"kind": "block", "eviction_order": "s3fifo"}, "eviction_order"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        design(fields)


def test_a_design_says_which_fields_are_switched() -> None:
    chosen: Design = design({"kind": "block", "duplicates": "merge", "page_size": 8, "recency": "access"})
    assert set(chosen.switched) == {"duplicates", "recency"}
    assert chosen.is_general
    assert not design("vllm").is_general


@pytest.mark.parametrize("kind", ["block", "token"])
def test_the_general_form_conforms(kind: str) -> None:
    report = conformance({"kind": kind, "form": "general"}, page_size=4, seeds=[0], ops=60)
    assert report, str(report)


def test_hits_inside_pages_stay_below_the_ceiling_of_their_unit() -> None:
    from kvarena.experiments.compare import compare

    turns = [[*range(n)] for n in (3, 5, 10, 13, 21, 21)]
    rules = {"kind": "block", "page_size": 8, "hash_unit": 2, "name": "x"}
    result = compare(turns, allocators=[rules], pool=20, kernel_batches=0)
    hits, most = result.requests["hit_tokens"], result.requests["ceiling_tokens"]
    assert (hits <= most).all()
    assert (hits % 8 != 0).any()
