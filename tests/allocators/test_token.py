"""The token design through its interface: what each verb does, gives back, and refuses."""

import random
from array import array

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import EventKind, Gate, KVAllocator, Release, Sequence
from kvarena.allocators.token import TokenAllocator


def make(num_pages: int = 32, **fields: object) -> TokenAllocator:
    allocator = make_allocator({"kind": "token", "page_size": 4, **fields}, num_pages=num_pages)
    assert isinstance(allocator, TokenAllocator)
    allocator.events.enabled = True
    return allocator


def prefill(allocator: KVAllocator, seq: Sequence) -> int:
    """Admit and commit the whole of it; returns the hit."""
    pin = allocator.admit(seq)
    assert pin is not None
    allocator.commit([(seq, seq.num_prefill_tokens)])
    return pin.hit_tokens


def run_through(allocator: KVAllocator, seq: Sequence) -> int:
    hit = prefill(allocator, seq)
    allocator.release([seq], Release.FINISH)
    return hit


# --- pin ---


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_a_hit_is_whole_pages_and_never_the_last_token(page_size: int) -> None:
    for length in range(1, 3 * page_size + 2):
        allocator = make(page_size=page_size)
        tokens = list(range(length))
        run_through(allocator, Sequence("a", tokens))
        assert run_through(allocator, Sequence("b", tokens)) == (length - 1) // page_size * page_size
        assert run_through(allocator, Sequence("c", [*tokens, 99])) == length // page_size * page_size
        allocator.check()


def test_without_the_last_token_rule_a_hit_covers_the_whole_prompt() -> None:
    allocator = make(last_token_rule=False)
    run_through(allocator, Sequence("a", range(8)))
    assert run_through(allocator, Sequence("b", range(8))) == 8
    allocator.check()


def test_the_room_test_holds_the_matched_prefix() -> None:
    allocator = make(num_pages=4)
    run_through(allocator, Sequence("a", range(12)))
    # 12 tokens are cached and 4 slots free: a prompt that hits 8 has 2 pages left, one of them behind an eviction.
    assert allocator.pin(Sequence("b", [*range(8), *range(50, 62)])) is None
    assert prefill(allocator, Sequence("c", [*range(8), *range(50, 58)])) == 8
    allocator.check()


def test_a_refused_pin_keeps_the_split_and_the_touch_of_its_match() -> None:
    allocator = make(num_pages=7)
    run_through(allocator, Sequence("old", range(16)))
    run_through(allocator, Sequence("new", range(100, 108)))
    refused = Sequence("big", [*range(8), *range(200, 224)])
    assert allocator.pin(refused) is None
    assert refused.num_computed_tokens == 0
    allocator.check()
    assert sorted(len(node.pages) for node in allocator.tree.nodes()) == [2, 2, 2]
    # The touched halves outlive the leaf that was the newest before.
    assert [list(run) for run in allocator.tree.evict(1)] == [[5, 6]]


@pytest.mark.parametrize(
    ("gate", "fits"),
    [
        (Gate(), 16),
        (Gate(strict=True), 12),
        (Gate(headroom=1), 12),
        (Gate(page_rounded=False), 16),
        (Gate(page_rounded=False, headroom=3), 13),
        (Gate(page_rounded=False, headroom=4, strict=True), 11),
        (Gate(whole_prompt=False), 40),
    ],
)
def test_the_gate_admits_up_to_its_limit(gate: Gate, fits: int) -> None:
    assert make(num_pages=4).pin(Sequence("a", range(fits)), gate) is not None
    if gate.whole_prompt:
        assert make(num_pages=4).pin(Sequence("a", range(fits + 1)), gate) is None


def test_a_pin_dropped_by_a_refused_reserve_leaves_no_lock_and_no_row() -> None:
    allocator = make(num_pages=4)
    run_through(allocator, Sequence("a", range(8)))
    seq = Sequence("b", [*range(8), *range(70, 90)])
    assert allocator.pin(seq, Gate(whole_prompt=False)) is not None
    assert allocator.reserve([(seq, 20)]) is None
    allocator.check()
    assert allocator.room() == (2, 2)
    assert seq.num_computed_tokens == 0
    with pytest.raises(ValueError, match="'b' is not live"):
        allocator.page_ids(seq)


def test_rows_are_taken_from_the_tail_and_a_pin_without_one_is_refused() -> None:
    spec = make().design
    allocator = TokenAllocator(32, spec, num_rows=2)
    seqs = [Sequence(name, [number]) for number, name in enumerate("abc")]
    assert allocator.admit(seqs[0]) is not None
    assert allocator.admit(seqs[1]) is not None
    assert [allocator.row_index(seq) for seq in seqs[:2]] == [2, 1]
    assert allocator.admit(seqs[2]) is None
    allocator.release([seqs[0]], Release.ABORT)
    assert allocator.admit(seqs[2]) is not None
    assert allocator.row_index(seqs[2]) == 2
    assert allocator.capacity().free_rows == 0
    allocator.check()


# --- reserve ---


def test_demand_is_summed_over_the_batch_before_anything_is_evicted() -> None:
    """Two decodes inside a page each ask for a page (SGLang 0.5.22): together they evict two leaves, one call."""
    evictions = {}
    for slack in (0, 1):
        allocator = make(num_pages=8, demand_slack=slack)
        live = [Sequence(name, [number] * 5) for number, name in enumerate("ab")]
        for seq in live:
            prefill(allocator, seq)
        for number in (7, 8):
            run_through(allocator, Sequence(f"old{number}", [number] * 4))
        assert allocator.extend(live[0], 11) is not None  # its surplus takes the last free pages
        assert allocator.room() == (0, 2)
        for seq in live:
            seq.append(1)
        reservations = allocator.reserve([(seq, 1) for seq in live])
        assert reservations is not None
        assert [list(reservation.page_ids) for reservation in reservations] == [[], []]
        evictions[slack] = [list(reservation.evicted) for reservation in reservations]
        allocator.check()
    assert evictions == {0: [[], []], 1: [[5, 6], []]}


def test_a_prefill_batch_evicts_for_its_sum_where_single_calls_evict_less() -> None:
    """4 of 5 pages are cached. In one call: 8 tokens and 2 pages on top are 4 pages, 1 is free, so 3 leaves go. One
    by one: the first asks for 2 pages and 1 leaf goes, the second again."""
    left = {}
    for batched in (True, False):
        allocator = make(num_pages=5)
        for number in range(4):
            run_through(allocator, Sequence(f"old{number}", [number] * 4))
        pair = [Sequence(name, [50 + number] * 4) for number, name in enumerate("ab")]
        for seq in pair:
            assert allocator.pin(seq) is not None
        for call in [pair] if batched else [[seq] for seq in pair]:
            assert allocator.reserve([(seq, 4) for seq in call]) is not None
        allocator.check()
        left[batched] = allocator.room()
    assert left == {True: (2, 1), False: (1, 2)}


def test_a_decode_batch_that_does_not_fit_whole_takes_nothing() -> None:
    allocator = make(num_pages=3)
    live = [Sequence(name, [number] * 4) for number, name in enumerate("ab")]
    for seq in live:
        prefill(allocator, seq)
        seq.append(1)
    assert allocator.reserve([(seq, 1) for seq in live]) is None
    assert allocator.room() == (1, 0)
    assert [len(allocator.page_ids(seq)) for seq in live] == [1, 1]
    allocator.check()


def test_surplus_slots_stay_with_the_sequence() -> None:
    allocator = make()
    seq = Sequence("a", range(4))
    prefill(allocator, seq)
    first = allocator.extend(seq, 9)
    assert first is not None
    assert len(first.page_ids) == 3
    seq.append(1)
    allocator.commit([(seq, 5)])
    again = allocator.extend(seq, 8)
    assert again is not None
    assert len(again.page_ids) == 0
    allocator.check()
    released = allocator.release([seq], Release.FINISH)
    assert list(released.freed) == list(first.page_ids)
    assert allocator.room() == (31, 1)


# --- commit ---


def test_equal_prompts_in_flight_end_on_the_first_writers_pages() -> None:
    """The kind of radix-03, at every page size and length: the second one's row is rebound, its own pages freed."""
    for page_size in (1, 2, 4, 16):
        for length in (1, page_size, 2 * page_size, 2 * page_size + 1, 5 * page_size - 1):
            allocator = make(num_pages=64, page_size=page_size)
            pair = [Sequence("a", range(length)), Sequence("b", range(length))]
            for seq in pair:
                assert allocator.admit(seq) is not None
            own = [allocator.page_ids(seq) for seq in pair]
            first, second = allocator.commit([(seq, length) for seq in pair])
            whole = length // page_size
            assert list(first.published) == list(own[0][:whole])
            assert list(second.duplicates) == list(second.freed) == list(own[1][:whole])
            assert second.rewritten == ((0, whole) if whole else (0, 0))
            assert list(allocator.page_ids(pair[1])) == [*own[0][:whole], *own[1][whole:]]
            allocator.check()
            allocator.release(pair, Release.FINISH)
            assert allocator.room() == (64 - whole, whole)
            allocator.check()


@pytest.mark.parametrize("chunk", [8, 16])
def test_an_inner_chunks_duplicates_are_freed_node_by_node_and_the_ends_as_one_group(chunk: int) -> None:
    """The follower matched nothing; meanwhile others stored its path as four nodes of a page. At page_size > 1 a
    later call lies in front of an earlier one: an inner chunk's two pages change places, the end's do not."""
    allocator = make(num_pages=64)
    follower = Sequence("late", range(16))
    assert allocator.pin(follower) is not None
    for end in (4, 8, 12, 16):
        run_through(allocator, Sequence(f"first{end}", [*range(end), 77]))
    runs = []
    for at in range(0, 16, chunk):
        reservation = allocator.extend(follower, chunk)
        assert reservation is not None
        runs.append(list(reservation.page_ids))
        allocator.commit([(follower, at + chunk)])
        allocator.check()
    assert list(allocator.page_ids(follower)) == [1, 2, 3, 4]
    if chunk == 8:
        assert runs[1] == runs[0][::-1], "the second chunk takes what the first one gave back"
    assert list(allocator._free)[: chunk // 4] == runs[-1]


def test_a_commit_of_decoded_tokens_publishes_nothing() -> None:
    allocator = make()
    seq = Sequence("a", range(3))
    prefill(allocator, seq)
    for token in range(9):
        seq.append(token)
        allocator.extend(seq, 1)
        (done,) = allocator.commit([(seq, seq.num_tokens)])
        assert not done.published
    assert allocator.tree.evictable_pages == 0
    assert not list(allocator.tree.nodes())
    released = allocator.release([seq], Release.FINISH)
    assert list(released.cached) == [1, 2, 3]
    assert run_through(allocator, Sequence("b", [0, 1, 2, *range(9), 5])) == 12


# --- release ---


@pytest.mark.parametrize("reason", [Release.PREEMPT, Release.ABORT])
def test_only_what_was_checkpointed_survives_a_preemption(reason: Release) -> None:
    allocator = make()
    seq = Sequence("a", range(6))
    prefill(allocator, seq)
    for token in range(7):
        seq.append(token)
        allocator.extend(seq, 1)
        allocator.commit([(seq, seq.num_tokens)])
    pages = list(allocator.page_ids(seq))
    released = allocator.release([seq], reason)
    assert list(released.cached) == pages[:1]
    assert list(released.freed) == pages[1:]
    assert seq.num_computed_tokens == 0
    allocator.check()
    seq.resume()
    assert prefill(allocator, seq) == 4


def test_a_finish_frees_duplicates_then_tail_in_one_group() -> None:
    allocator = make(num_pages=64)
    twins = [Sequence(name, range(4)) for name in "ab"]
    for seq in twins:
        prefill(allocator, seq)
    for seq in twins:
        for token in range(6):
            seq.append(token)
            allocator.extend(seq, 1)
            allocator.commit([(seq, seq.num_tokens)])
    allocator.release([twins[0]], Release.FINISH)
    row = allocator.page_ids(twins[1])
    released = allocator.release([twins[1]], Release.FINISH)
    assert list(released.duplicates) == list(row[1:2])
    assert list(released.freed) == list(row[1:])
    assert list(allocator._free)[: len(row) - 1] == list(row[1:])
    allocator.check()


def test_a_length_that_the_scheduler_ran_ahead_with_is_cut_to_known_tokens() -> None:
    """Result lag: one more step was launched for a sequence that turns out to have ended."""
    allocator = make(page_size=1)
    seq = Sequence("a", range(4))
    prefill(allocator, seq)
    allocator.extend(seq, 2)
    seq.append(9)
    seq.num_computed_tokens = 6
    released = allocator.release([seq], Release.FINISH)
    assert list(released.cached) == [1, 2, 3, 4, 5]
    assert list(released.freed) == [6]
    allocator.check()


# --- evict, reset ---


def test_evict_makes_only_the_room_that_is_lacking() -> None:
    allocator = make(num_pages=8)
    for number in range(4):
        run_through(allocator, Sequence(f"r{number}", [number] * 4))
    assert allocator.evict(16) == []
    assert allocator.evict(17) == [1]
    assert allocator.evict(1000) == [2, 3, 4]
    assert allocator.room() == (8, 0)
    allocator.check()


def test_reset_hands_ids_out_ascending_again_but_not_while_a_sequence_is_live() -> None:
    allocator = make()
    seq = Sequence("a", range(20))
    prefill(allocator, seq)
    assert allocator.reset() is False
    allocator.release([seq], Release.FINISH)
    assert allocator.reset() is True
    allocator.events.drain()
    assert allocator.room() == (32, 0)
    other = Sequence("b", range(20))
    assert prefill(allocator, other) == 0
    assert list(allocator.page_ids(other)) == [1, 2, 3, 4, 5]


def test_without_a_prefix_cache_nothing_is_shared_or_kept() -> None:
    for page_size in (1, 4):
        allocator = make(page_size=page_size, prefix_cache=False)
        for name in "abc":
            assert run_through(allocator, Sequence(name, range(9))) == 0
            allocator.check()
            assert allocator.room() == (32, 0)
        pair = [Sequence(name, range(9)) for name in "ab"]
        for seq in pair:
            prefill(allocator, seq)
        assert not set(allocator.page_ids(pair[0])) & set(allocator.page_ids(pair[1]))


def test_without_a_prefix_cache_every_generated_token_ends_well() -> None:
    """No id is refused where none is looked up: a finish and a fork take what the pin took."""
    allocator = make(page_size=1, prefix_cache=False)
    seq = Sequence("a", [-(2**31), 3])
    prefill(allocator, seq)
    seq.append(-(2**31) + 1)
    allocator.extend(seq, 1)
    allocator.commit([(seq, 3)])
    child = Sequence("c", seq.token_ids)
    assert allocator.fork(seq, child) is not None
    allocator.release([seq, child], Release.FINISH)
    allocator.check()
    assert allocator.room() == (32, 0)


# --- what separates sequences ---


def test_namespaces_share_nothing_and_leave_nothing_behind() -> None:
    """The kind of block-09: equal values under other names are other namespaces."""
    allocator = make(num_pages=256)
    spaces = [None, ("lora", "X"), ("salt", "X"), "X", (("lora", ("X", "/1")),), (("lora", ("X", "/2")),), 1, True, 1.0]
    for number, space in enumerate(spaces):
        assert run_through(allocator, Sequence(f"a{number}", range(9), namespace=space)) == 0
    for number, space in enumerate(spaces):
        assert run_through(allocator, Sequence(f"b{number}", range(9), namespace=space)) == 8
    allocator.check()
    allocator.evict(10**6)
    assert not allocator.tree.roots
    refused = Sequence("huge", range(10**4), namespace="never seen")
    assert allocator.pin(refused) is None
    assert allocator.match(Sequence("asked", range(8), namespace="never seen")).hit_tokens == 0
    assert not allocator.tree.roots


def image_prompt(name: str, *items: tuple[int, int, object], length: int = 16) -> Sequence:
    covered = {at for offset, size, _ in items for at in range(offset, offset + size)}
    tokens = [900 if at in covered else at for at in range(length)]
    return Sequence(name, tokens, extra_keys=items)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_are_shared_up_to_the_first_other_image(page_size: int) -> None:
    """The kind of block-10: equal placeholders, other content; also contents equal in their low bits."""
    contents = ["0x10005", "0x20005", 5, 5 + 2**16, 5 + 2**32, b"x", ("a", 1), 1, True, 1.0]
    allocator = make(num_pages=1024, page_size=page_size)
    for number, content in enumerate(contents):
        hit = run_through(allocator, image_prompt(f"a{number}", (6, 4, content), length=33))
        assert hit == (6 // page_size * page_size if number else 0)
    for number, content in enumerate(contents):
        hit = run_through(allocator, image_prompt(f"b{number}", (6, 4, content), length=33))
        assert hit == 32 // page_size * page_size
    allocator.check()


def test_an_image_and_plain_placeholders_differ_and_so_do_two_images_and_a_longer_one() -> None:
    allocator = make(num_pages=256, page_size=1)
    run_through(allocator, Sequence("plain", [0, *[900] * 8, 1]))
    twice = Sequence("twice", [0, *[900] * 8, 1], extra_keys=[(1, 4, "p"), (5, 4, "p")])
    once = Sequence("once", [0, *[900] * 8, 1], extra_keys=[(1, 8, "p")])
    assert run_through(allocator, twice) == 1
    assert run_through(allocator, once) == 5
    tail = Sequence("again", [0, *[900] * 8, 1], extra_keys=[(1, 8, "p")])
    assert run_through(allocator, tail) == 9


def test_an_image_that_was_cut_by_the_hit_is_continued_rightly() -> None:
    """The checkpoint starts inside an item that the match ended in."""
    allocator = make(page_size=4)
    assert run_through(allocator, image_prompt("a", (2, 12, "p"), length=9)) == 0
    assert run_through(allocator, image_prompt("b", (2, 12, "p"), length=17)) == 8
    assert run_through(allocator, image_prompt("c", (2, 12, "p"), length=17)) == 16


@pytest.mark.parametrize("form", ["auto", "general"])
@pytest.mark.parametrize(
    "items",
    [[(0, 4, "p"), (0, 4, "q")], [(0, 8, "p"), (2, 2, "q")], [(4, 4, "q"), (2, 3, "p")], [(-1, 2, "p")], [(3, 0, "p")]],
)
def test_items_that_overlap_or_lie_nowhere_are_refused(items: list[tuple[int, int, str]], form: str) -> None:
    """One of two items at one position would be lost from the key: other content would be a hit."""
    allocator = make_allocator({"kind": "token", "page_size": 4, "form": form}, num_pages=32)
    assert prefill(allocator, Sequence("plain", [9] * 16)) == 0
    for verb in (allocator.pin, allocator.match):
        with pytest.raises(ValueError, match=r"request 'a': extra_keys: expected offset >= \d+, .* found"):
            verb(Sequence("a", [9] * 16, extra_keys=items))
    allocator.check()
    assert allocator.pin(Sequence("b", [9] * 16, extra_keys=[(4, 2, "q"), (2, 2, "p"), (6, 99, "r")])) is not None


@pytest.mark.parametrize("token", [-(2**31), -(2**30) - 1])
def test_a_token_from_the_range_of_image_ids_is_an_error(token: int) -> None:
    allocator = make()
    with pytest.raises(ValueError, match="reserved for images"):
        allocator.pin(Sequence("a", [1, 2, token, 4, 5]))
    with pytest.raises(ValueError, match="reserved for images"):
        allocator.pin(Sequence("b", [1, 2, token, 4, 5], extra_keys=[(0, 2, "p")]))
    assert allocator.pin(Sequence("c", [1, 2, token, 4, 5], extra_keys=[(1, 3, "p")])) is not None
    assert allocator.pin(Sequence("d", [-(2**30), -1, 2**31 - 1, 0, 5])) is not None


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_group_with_a_token_that_is_refused_gives_nothing_back(page_size: int) -> None:
    allocator = make(page_size=page_size)
    good, bad = Sequence("good", range(9)), Sequence("bad", range(20, 29))
    for seq, token in ((good, 5), (bad, -(2**31))):
        prefill(allocator, seq)
        seq.append(token)
        allocator.extend(seq, 1)
        allocator.commit([(seq, 10)])
    before = allocator.capacity()
    with pytest.raises(ValueError, match=r"request bad: .* reserved for images"):
        allocator.release([good, bad], Release.FINISH)
    assert allocator.capacity() == before
    allocator.check()
    allocator.release([good], Release.FINISH)
    allocator.release([bad], Release.ABORT)
    allocator.check()


@pytest.mark.parametrize("length", [1, 3, 1012, 5000])
@pytest.mark.parametrize("place", [0, -1])
def test_a_token_from_the_range_of_image_ids_is_found_anywhere(length: int, place: int) -> None:
    allocator = make(num_pages=8192)
    tokens = [2**31 - 1] * length
    tokens[place] = -(2**30) - 1
    with pytest.raises(ValueError, match=rf"at position {place % length} is below"):
        allocator.pin(Sequence("a", tokens))
    tokens[place] = -(2**30)
    assert allocator.admit(Sequence("a", tokens)) is not None


def test_what_a_commit_published_is_a_view_that_nobody_can_write_and_that_stays() -> None:
    allocator = make(num_pages=12, page_size=1, eviction_unit="page")
    seq = Sequence("a", range(8))
    prefill(allocator, seq)
    allocator.release([seq], Release.FINISH)
    other = Sequence("b", range(50, 54))
    allocator.admit(other)
    published = allocator.commit([(other, 4)])[0].published
    shown = list(published)
    assert shown == list(allocator.page_ids(other))
    with pytest.raises(TypeError):
        published[0] = 7  # type: ignore[index]
    allocator.release([other], Release.FINISH)
    for count in range(1, 13):
        allocator.evict(count)
    assert list(published) == shown
    allocator.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefill_in_chunks_publishes_the_text_that_was_matched(page_size: int) -> None:
    """Tokens that come before the prefill is through belong to what is decoded and are published at the end."""
    allocator = make(num_pages=64, page_size=page_size)
    seq = Sequence("a", range(20))
    pin = allocator.pin(seq)
    assert pin is not None
    for end in (7, 13, 20):
        allocator.extend(seq, end - seq.num_computed_tokens)
        allocator.commit([(seq, end)])
        assert allocator.match(Sequence("m", range(20))).hit_tokens == end // page_size * page_size
        if end == 13:
            seq.append(99)
    allocator.extend(seq, 1)
    allocator.commit([(seq, 21)])
    allocator.release([seq], Release.FINISH)
    again = Sequence("m", [*range(20), 99])
    assert allocator.match(again).hit_tokens == 21 // page_size * page_size
    allocator.check()


def test_hashed_sequences_hit_as_the_tokens_behind_them_would() -> None:
    rng = random.Random(5)
    hashed, plain = make(num_pages=40), make(num_pages=40)
    prompts = [[rng.randint(0, 2) for _ in range(rng.randint(1, 6))] for _ in range(120)]
    for number, ids in enumerate(prompts):
        # A page's name stands for all before it, as in a trace.
        names = [hash(tuple(ids[: at + 1])) % (2**31 - 1) for at in range(len(ids))]
        length = 4 * len(ids) - rng.randint(0, 3)
        tokens = [name + at for name in names for at in range(4)][:length]
        one = run_through(hashed, Sequence(f"r{number}", page_hashes=names, num_tokens=length))
        two = run_through(plain, Sequence(f"r{number}", [token % (2**31) for token in tokens]))
        assert one == two
        assert hashed.room() == plain.room()
        hashed.check()


@pytest.mark.parametrize("form", ["auto", "general"])
@pytest.mark.parametrize("given", range(8))
def test_pages_of_a_prompt_without_a_name_stay_private(given: int, form: str) -> None:
    """A trace that names fewer pages than the prompt has, or more."""
    allocator = make_allocator({"kind": "token", "page_size": 4, "form": form}, num_pages=32)
    for name, hit in (("a", 0), ("b", 4 * min(given, 4))):
        seq = Sequence(name, page_hashes=range(given), num_tokens=20)
        assert prefill(allocator, seq) == hit
        allocator.check()
        seq.append(0)
        allocator.extend(seq, 1)
        allocator.commit([(seq, 21)])
        allocator.release([seq], Release.FINISH)
        allocator.check()
        assert allocator.room() == (32 - min(given, 5), min(given, 5))


def test_generated_tokens_of_a_hashed_sequence_are_never_found() -> None:
    allocator = make()
    seq = Sequence("a", page_hashes=[1, 2], num_tokens=8)
    prefill(allocator, seq)
    for _ in range(8):
        seq.append(0)
        allocator.extend(seq, 1)
        allocator.commit([(seq, seq.num_tokens)])
    allocator.release([seq], Release.FINISH)
    assert allocator.room() == (30, 2)
    assert run_through(allocator, Sequence("tokens", [1, 2, 3, 4, 5])) == 0


# --- accounts and errors ---


def test_capacity_counts_shared_pages_once_and_waste_in_slots() -> None:
    allocator = make(num_pages=64)
    seqs = [Sequence(name, [*range(8), *[number] * 5]) for number, name in enumerate("abc")]
    for seq in seqs:
        prefill(allocator, seq)
    capacity = allocator.capacity()
    assert (capacity.in_use, capacity.shared, capacity.wasted_slots) == (2 + 3 * 2, 2, 3 * 3)
    assert capacity.free + capacity.evictable + capacity.in_use == 64
    deeper = Sequence("d", [*range(8), *[0] * 5, 1, 1, 1, 1])
    prefill(allocator, deeper)
    assert allocator.capacity().shared == 3


def test_match_names_the_path_and_holds_nothing() -> None:
    allocator = make()
    run_through(allocator, Sequence("a", range(12)))
    run_through(allocator, Sequence("b", [*range(8), *range(50, 58)]))
    first, second = (allocator.match(Sequence("x", tokens)) for tokens in (range(12), [*range(8), *range(50, 58)]))
    assert (first.hit_tokens, second.hit_tokens) == (12, 16)
    assert first.path[0] == second.path[0]
    assert first.path[1] < second.path[1]
    assert allocator.room()[1] == 5
    allocator.check()


def test_events_name_what_happened_in_order() -> None:
    allocator = make(num_pages=3)
    run_through(allocator, Sequence("a", range(8)))
    live = Sequence("b", [*range(4), *range(9, 14)])
    prefill(allocator, live)
    assert allocator.pin(Sequence("c", range(8))) is None
    kinds = [(event.kind, event.request_id, event.page_ids) for event in allocator.events.drain()]
    assert kinds == [
        (EventKind.RESERVE, "a", (1, 2)),
        (EventKind.PUBLISH, "a", (1, 2)),
        (EventKind.RELEASE, "a", ()),
        (EventKind.HIT, "b", (1,)),
        (EventKind.EVICT, "b", (2,)),
        (EventKind.RESERVE, "b", (2, 3)),
        (EventKind.PUBLISH, "b", (2,)),
        (EventKind.REFUSE, "c", ()),
    ]


def test_misuse_raises_and_names_the_request() -> None:
    allocator = make()
    seq = Sequence("a", range(4))
    with pytest.raises(ValueError, match="'a' is not live"):
        allocator.reserve([(seq, 1)])
    prefill(allocator, seq)
    with pytest.raises(ValueError, match="'a' is live already"):
        allocator.pin(Sequence("a", [1]))
    with pytest.raises(ValueError, match="'a' is not live"):
        allocator.extend(Sequence("a", [1]), 1)
    with pytest.raises(ValueError, match="tokens to reserve: expected an integer of at least 0, found -1"):
        allocator.extend(seq, -1)
    with pytest.raises(ValueError, match="cannot commit 5 tokens, 4 slots"):
        allocator.commit([(seq, 5)])
    with pytest.raises(ValueError, match="'a' stands twice"):
        allocator.release([seq, seq], Release.FINISH)
    with pytest.raises(ValueError, match="num_tokens"):
        allocator.evict(-1)
    with pytest.raises(ValueError, match="num_pages"):
        TokenAllocator(0, allocator.design)
    allocator.check()


def test_page_ids_are_a_copy_in_position_order() -> None:
    allocator = make()
    seq = Sequence("a", range(9))
    prefill(allocator, seq)
    pages = allocator.page_ids(seq)
    assert isinstance(pages, array)
    assert pages.typecode == "i"
    pages[0] = 31
    assert list(allocator.page_ids(seq)) == [1, 2, 3]


def test_repr_shows_counts_rows_and_tree() -> None:
    allocator = make(num_pages=500)
    run_through(allocator, Sequence("a", range(40)))
    prefill(allocator, Sequence("b", range(10)))
    text = repr(allocator)
    for part in ("500 pages of 4 tokens", "489 free", "Sequence('b'", "tree:", "locks 1"):
        assert part in text
    for number in range(60):
        run_through(allocator, Sequence(f"r{number}", [number + 100] * 4))
    assert len(repr(allocator).splitlines()) < 50
