"""Both adapters: every allocator, every page size, buffers equal to a rebuild after every operation."""

from array import array

import pytest

torch = pytest.importorskip("torch", reason="adapters need torch")

from kvarena.allocators._tail import MOST_STEPS  # noqa: E402
from kvarena.allocators.adapter import MIN_STAGED_PAGES, BlockTableAdapter, ReqToTokenAdapter  # noqa: E402
from kvarena.allocators.config import make_allocator  # noqa: E402
from kvarena.allocators.interface import AllocatorError, Commit, Release, Reservation, Sequence  # noqa: E402
from kvarena.experiments.random_ops import MAX_DRAFT, MAX_LIVE, RandomOps  # noqa: E402
from support.third_party import StackAllocator  # noqa: E402

ADAPTERS = [BlockTableAdapter, ReqToTokenAdapter]
ALLOCATORS = {
    "block": {"kind": "block"},
    "block-window": {"kind": "block", "sliding_window": 7, "retention_interval": None},
    "token": {"kind": "token"},
    "contiguous-pow2": {"kind": "contiguous", "sizing": "pow2"},
    "contiguous-buddy": {"kind": "contiguous", "sizing": "declared", "placement": "buddy"},
    "exact": {"kind": "exact"},
}
NUM_PAGES = 27


class Pages:
    """A page source with rows given by hand."""

    def __init__(self, page_size, rows, num_pages=99):
        self.page_size, self.num_pages = page_size, num_pages
        self.rows = {name: array("i", row) for name, row in rows.items()}

    def page_ids(self, seq):
        return self.rows[seq.request_id][:]


def sequence(name, num_tokens, computed=0):
    seq = Sequence(name, [0] * num_tokens)
    seq.num_computed_tokens = computed
    return seq


def adapter_over(kind, source, *seqs, **options):
    adapter = kind(source, **{"max_requests": 4, "max_tokens": 40, "slots_by": "torch", **options})
    for seq in seqs:
        adapter.add(seq)
    return adapter


@pytest.mark.parametrize("slots_by", ["triton", "torch"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_example_of_the_module(kind, slots_by):
    a, b = sequence("a", 7, computed=6), sequence("b", 3)
    source = Pages(4, {"a": [5, 2], "b": [7]})
    adapter = adapter_over(kind, source, a, b, max_requests=3, max_tokens=8, slots_by=slots_by)
    batch = adapter.batch([a, b], [1, 3], pad_requests=3, pad_tokens=6)
    assert batch.table.seq_lens.tolist() == [7, 3, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 4, 4]
    assert batch.positions.tolist() == [6, 0, 1, 2, 0, 0]
    assert batch.slot_mapping.tolist() == [10, 28, 29, 30, -1, -1]
    assert [column.tolist() for column in batch.table.to_csr(4)] == [[0, 2, 3, 3], [5, 2, 7], [3, 3, 0]]
    assert (batch.num_requests, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (2, 4, 3, 7)
    if kind is BlockTableAdapter:
        assert (batch.table.rows.tolist(), batch.table.tokens_per_entry) == ([0, 1, 2], 4)
        assert batch.table.entries[:, 0].tolist() == [5, 7, 0]
    else:
        assert (batch.table.rows.tolist(), batch.table.tokens_per_entry) == ([1, 2, 0], 1)
        assert batch.table.entries[1].tolist() == [20, 21, 22, 23, 8, 9, 10, 11]
        assert not batch.table.entries[0].any()


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_buffers_equal_a_rebuild_after_every_operation(name, page_size, kind):
    for seed in range(2):
        pool = make_allocator({**ALLOCATORS[name], "page_size": page_size}, num_pages=NUM_PAGES)
        width = 2 * NUM_PAGES * page_size + 80 * MAX_DRAFT  # a windowed row outgrows the pool
        adapter = kind(pool, max_requests=MAX_LIVE, max_tokens=width, slots_by="torch")
        RandomOps(pool, seed, [adapter]).run(80)  # compares rows, device entries and slot mappings each time


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", ALLOCATORS)
def test_slot_mappings_by_the_kernel_are_the_owned_slots(name, kind):
    pool = make_allocator({**ALLOCATORS[name], "page_size": 4}, num_pages=NUM_PAGES)
    adapter = kind(pool, max_requests=MAX_LIVE, max_tokens=2 * NUM_PAGES * 4)
    RandomOps(pool, 3, [adapter]).run(25)


# Case adapter-03 and its kind: full last pages, empty rows, page size 1.
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize(
    ("page_size", "seq_lens"),
    [
        (16, [100, 16, 1, 32]),
        (4, [8, 9, 0]),
        (1, [3, 1]),
        (64, [0]),
        (64, [63, 64, 65, 128]),
        (1, [0, 0, 5]),
        (3, [3, 4, 6, 0]),
    ],
)
def test_csr_counts_pages_and_full_last_pages(kind, page_size, seq_lens):
    rows, page = {}, 1
    for number, length in enumerate(seq_lens):
        count = -(-length // page_size)
        rows[f"r{number}"] = list(range(page + count - 1, page - 1, -1))  # high ids first
        page += count
    seqs = [sequence(name, max(length, 1)) for name, length in zip(rows, seq_lens, strict=True)]
    adapter = adapter_over(kind, Pages(page_size, rows), *seqs, max_tokens=128)
    indptr, indices, last = adapter.batch(seqs, seq_lens).table.to_csr(page_size)
    pages = [len(row) for row in rows.values()]
    assert indptr.tolist() == [sum(pages[:b]) for b in range(len(pages) + 1)]
    assert indices.tolist() == [page for row in rows.values() for page in row]
    assert last.tolist() == [n - (count - 1) * page_size if n else 0 for n, count in zip(seq_lens, pages, strict=True)]


# Case adapter-04 and its kind: nothing past a row is read, written or named.
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("slots_by", ["triton", "torch"])
def test_a_position_past_the_row_raises_and_never_names_the_next_row(kind, slots_by):
    a, b = sequence("a", 9, computed=7), sequence("b", 8)
    source = Pages(4, {"a": [3, 4], "b": [6, 7]})
    adapter = adapter_over(kind, source, a, b, max_tokens=8, slots_by=slots_by)
    with pytest.raises(ValueError, match="request a: 9 tokens after this step, its row covers 8"):
        adapter.batch([a, b], [2, 1])
    assert adapter.batch([a, b], [1, 8]).slot_mapping.tolist() == [19, *range(24, 32)]


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("way", ["add", "reservation", "refresh"])
def test_more_pages_than_a_row_holds_raise_and_change_nothing(kind, way):
    a, b = sequence("a", 8), sequence("b", 4)
    source = Pages(4, {"a": [3, 4], "b": [6]})
    adapter = adapter_over(kind, source, b, *([] if way == "add" else [a]), max_tokens=7)
    source.rows["a"].append(9)
    calls = {
        "add": lambda: adapter.add(a),
        "reservation": lambda: adapter.update(Reservation(a, array("i", [9]))),
        "refresh": lambda: adapter.refresh(a),
    }
    with pytest.raises(ValueError, match=r"request a needs 3 pages: a row holds 2 \(8 tokens, page_size 4"):
        calls[way]()
    assert (a in adapter, list(adapter.row(b))) == (way != "add", [6])
    if way != "add":
        assert list(adapter.row(a)) == [3, 4]


@pytest.mark.parametrize("slots_by", ["triton", "torch"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_padding_reads_row_zero_and_writes_nothing(kind, slots_by):
    a = sequence("a", 6)
    adapter = adapter_over(kind, Pages(4, {"a": [5, 2]}), a, slots_by=slots_by)
    adapter.batch([a], [6])
    batch = adapter.batch([a], [6], pad_requests=4, pad_tokens=20)
    table = batch.table
    assert table.seq_lens.tolist() == [6, 0, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 6, 6, 6, 6]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 23, 8, 9, *[-1] * 14]
    assert not table.entries[table.rows[1:].long()].any()  # the page that nobody owns
    empty = adapter.batch([], [], pad_requests=3, pad_tokens=5)
    assert empty.slot_mapping.tolist() == [-1] * 5
    assert empty.table.seq_lens.tolist() == [0, 0, 0]
    assert not empty.table.entries[empty.table.rows.long()].any()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_large_batch_before_leaves_nothing_in_a_small_one(kind):
    names = "abcd"
    seqs = [sequence(name, 12) for name in names]
    rows = {name: [10 * i + 1, 10 * i + 2, 10 * i + 3] for i, name in enumerate(names, 1)}
    adapter = adapter_over(kind, Pages(4, rows), *seqs)
    adapter.batch(seqs, [12] * 4)
    batch = adapter.batch([seqs[3]], [5], pad_requests=2, pad_tokens=7)
    assert batch.table.slots(0).tolist() == [164, 165, 166, 167, 168]
    assert (batch.table.slots(1).tolist(), batch.slot_mapping[5:].tolist()) == ([], [-1, -1])


# Case adapter-06 and its kind: nothing of a row outlives its sequence.
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("spec", ["block", "token", "contiguous", "exact"])
@pytest.mark.parametrize("reason", list(Release))
def test_no_page_of_a_row_outlives_a_preemption(spec, reason, kind):
    fields = {"sizing": "oracle"} if spec == "contiguous" else {}
    pool = make_allocator({"kind": spec, "page_size": 4, **fields}, num_pages=4)
    adapter = adapter_over(kind, pool)
    a = Sequence("a", range(8), oracle_tokens=9)
    b = Sequence("b", range(100, 109), oracle_tokens=9)
    decode(pool, adapter, a)
    assert adapter.row(a) == pool.page_ids(a)
    pool.release([a], reason)
    adapter.remove(a)
    assert a not in adapter
    with pytest.raises(ValueError, match="request a has no row"):
        adapter.batch([a], [1])
    admitted(pool, adapter, b)
    adapter.check([b])
    a.resume()
    assert pool.admit(a) is None  # needs 3 pages, 1 is left
    assert a not in adapter
    pool.release([b], Release.FINISH)
    adapter.remove(b)
    admitted(pool, adapter, a)
    adapter.check([a])
    assert adapter.row(a) == pool.page_ids(a)


def admitted(pool, adapter, seq):
    pin = pool.pin(seq)
    adapter.update_all(pool.reserve([(seq, seq.num_prefill_tokens - pin.hit_tokens)]))
    adapter.update_all(pool.commit([(seq, seq.num_prefill_tokens)]))


def decode(pool, adapter, seq):
    admitted(pool, adapter, seq)
    seq.append(7)
    adapter.update_all(pool.reserve([(seq, 1)]))
    adapter.batch([seq], [1])
    adapter.update_all(pool.commit([(seq, seq.num_tokens)]))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_duplicates_point_at_the_first_copy(kind):
    pool = make_allocator({"kind": "token", "page_size": 4}, num_pages=12)
    adapter = adapter_over(kind, pool)
    a, b = Sequence("a", range(9)), Sequence("b", range(9))
    for seq in (a, b):
        pool.pin(seq)
        adapter.update_all(pool.reserve([(seq, 9)]))
    adapter.batch([a, b], [9, 9])
    commits = pool.commit([(a, 9), (b, 9)])
    assert commits[1].rewritten != (0, 0)
    adapter.update_all(commits)
    adapter.check([a, b])
    assert adapter.row(a)[:2] == adapter.row(b)[:2]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_step_sends_only_what_changed_in_one_copy(kind, monkeypatch):
    pool = make_allocator({"kind": "block", "page_size": 16}, num_pages=3000)
    adapter = kind(pool, max_requests=256, max_tokens=256, slots_by="torch")
    seqs = [Sequence(f"r{i}", [i] * 31) for i in range(256)]
    for seq in seqs:
        admitted(pool, adapter, seq)
    adapter.batch(seqs, [0] * 256)
    copies = []
    send = adapter._upload.send
    monkeypatch.setattr(adapter._upload, "send", lambda count: copies.append(count) or send(count))
    header = 4 * 256 + 2 + 256  # and the page of each new token
    for step in range(3):
        for seq in seqs:
            seq.append(step)
        adapter.update_all(pool.reserve([(seq, 1) for seq in seqs]))
        adapter.batch(seqs, [1] * 256)
        pool.commit([(seq, seq.num_tokens) for seq in seqs])
    changed = (4 if kind is BlockTableAdapter else 3) * 256
    assert copies == [header, header + changed, header]  # the 33rd token opens a page for each request
    adapter.check(seqs)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("spec", ["block", "token", "exact"])
def test_a_decode_batch_tells_all_its_pages_in_one_call(spec, kind):
    pool = make_allocator({"kind": spec, "page_size": 4}, num_pages=60)
    adapter = adapter_over(kind, pool, max_requests=8)
    seqs = [Sequence(f"r{i}", [i] * (3 + i)) for i in range(6)]
    for seq in seqs:
        admitted(pool, adapter, seq)
    steps = pool.decode_batch(seqs)
    for _ in range(9):
        adapter.update_step(steps.reserve())
        slots = [int(pool.page_ids(s)[s.num_computed_tokens // 4]) * 4 + s.num_computed_tokens % 4 for s in seqs]
        assert adapter.batch(seqs, [1] * 6).slot_mapping.tolist() == slots
        steps.commit()
    adapter.check(seqs)


def with_a_batch(spec, kind, page_size, lens, **options):
    """An adapter over live sequences of these lengths, and their decode batch."""
    pool = make_allocator({"kind": spec, "page_size": page_size}, num_pages=1200 // page_size)
    adapter = adapter_over(kind, pool, max_requests=8, **options)
    seqs = [Sequence(f"r{i}", [i] * length) for i, length in enumerate(lens)]
    for seq in seqs:
        admitted(pool, adapter, seq)
    return pool, adapter, seqs, pool.decode_batch(seqs)


@pytest.mark.parametrize("way", ["update_step", "decode"])
def test_a_decode_batch_past_a_row_raises_and_changes_nothing(way):
    _, adapter, seqs, steps = with_a_batch("token", BlockTableAdapter, 4, [4, 8], max_tokens=8)
    with pytest.raises(ValueError, match="request r1 needs 3 pages: a row holds 2"):
        getattr(adapter, way)(steps.reserve())
    assert [len(adapter.row(seq)) for seq in seqs] == [1, 2]


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("spec", ["block", "token", "exact"])
def test_decode_gives_what_update_step_and_batch_give(spec, page_size, kind):
    """Also where the allocator keeps no column of lengths (exact), and after a member was served beside the batch."""
    sides = [with_a_batch(spec, kind, page_size, [3, 9, 4, 1]) for _ in range(2)]
    for number in range(12):
        found = []
        for way, (_, adapter, seqs, steps) in zip((1, 2), sides, strict=True):
            step = steps.reserve()
            if way == 1:
                batch = adapter.decode(step, pad_requests=6, pad_tokens=7)
            else:
                adapter.update_step(step)
                batch = adapter.batch(seqs, [1] * 4, pad_requests=6, pad_tokens=7)
            table = batch.table
            tensors = (batch.slot_mapping, batch.query_start_loc, batch.positions, table.seq_lens, table.entries)
            found.append(([tensor.tolist() for tensor in tensors], batch[4:]))
            steps.commit()
        assert found[0] == found[1]
        if number == 6:
            for pool, adapter, seqs, _ in sides:
                adapter.update_all(pool.reserve([(seqs[1], 9)]))
    for _, adapter, seqs, _ in sides:
        adapter.check(seqs)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("way", ["decode", "update_step and batch"])
def test_steps_of_the_same_members_send_three_numbers_a_row(way, page_size, kind):
    """From the third step on; rows are written behind, and read right whoever asks for them whenever."""
    pool, adapter, seqs, steps = with_a_batch("token", kind, page_size, [3, 9, 4, 1], max_tokens=200)
    whole, short = [], []
    for upload, sent in ((adapter._upload, whole), (adapter._inbox, short)):
        upload.send = lambda count, sent=sent, send=upload.send: sent.append(count) or send(count)
    for number in range(2 * MOST_STEPS):
        step = steps.reserve()
        if way == "decode":
            adapter.decode(step)
        else:
            adapter.update_step(step)
            adapter.batch(seqs, [1] * 4)
        steps.commit()
        if number in (20, 21, 2 * MOST_STEPS - 40):
            assert [adapter.row(seq) for seq in seqs] == [pool.page_ids(seq) for seq in seqs]
    adapter.check(seqs)
    assert len(whole) <= 2 + 4  # after each reading one whole step or two
    assert short == [3 * 8] * (2 * MOST_STEPS - len(whole))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_page_told_between_two_steps_of_the_same_members_arrives(kind):
    """Twice before a step, for one member, and by a list: the step behind has every page."""
    pool, adapter, seqs, steps = with_a_batch("token", kind, 1, [3, 5])
    for _ in range(3):
        adapter.decode(steps.reserve())
        steps.commit()
    first = steps.reserve()
    adapter.update_step(first)
    adapter.update_all(pool.reserve([(seqs[0], 2)]))
    batch = adapter.batch(seqs, [1, 1])
    assert batch.slot_mapping.tolist() == [pool.page_ids(seq)[seq.num_computed_tokens] for seq in seqs]
    steps.commit()
    adapter.check(seqs)
    adapter.decode(steps.reserve())
    adapter.check(seqs)


@pytest.mark.parametrize("spec", ["block", "token"])
@pytest.mark.parametrize("told", [1, 3], ids=["whole step", "three numbers a row"])
def test_decode_refuses_a_member_whose_pages_nobody_told(told, spec):
    _, adapter, seqs, steps = with_a_batch(spec, ReqToTokenAdapter, 4, [4 - told, 4 - told])
    for _ in range(told):
        adapter.decode(steps.reserve())
        steps.commit()
    assert steps.reserve().page_ids  # taken, and not told
    steps.commit()
    with pytest.raises(ValueError, match="request r0: 6 tokens after this step, its row covers 4"):
        adapter.decode(steps.reserve())
    for seq in seqs:
        adapter.refresh(seq)
    adapter.check(seqs)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_more_changes_than_the_step_buffer_holds_all_arrive(kind):
    count = MIN_STAGED_PAGES + 7
    a, b = sequence("a", count), sequence("b", 2)
    adapter = adapter_over(kind, Pages(1, {"a": range(count, 0, -1), "b": [7, 8]}), a, b, max_tokens=count)
    batch = adapter.batch([a, b], [count, 2])
    assert batch.slot_mapping.tolist() == [*range(count, 0, -1), 7, 8]
    adapter.check([a, b])


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_entry_changed_twice_before_a_batch_has_its_last_page(kind):
    a = sequence("a", 8)
    source = Pages(4, {"a": [5, 2]})
    adapter = adapter_over(kind, source, a)
    for page in (9, 11, 8):
        source.rows["a"][0] = page
        adapter.update(Commit(a, rewritten=(0, 1)))
    adapter.check([a])
    adapter.remove(a)
    source.rows["a"] = array("i", [3])
    adapter.add(a)
    adapter.check([a])


@pytest.mark.parametrize("kind", ADAPTERS)
def test_buffers_stay_where_they_are(kind):
    seqs = [sequence(name, 40) for name in "abc"]
    rows = {name: list(range(10 * i + 1, 10 * i + 11)) for i, name in enumerate("abc")}
    adapter = adapter_over(kind, Pages(4, rows), *seqs)

    def pointers(batch):
        table = batch.table
        tensors = (
            table.entries,
            table.rows,
            table.seq_lens,
            batch.slot_mapping,
            batch.query_start_loc,
            batch.positions,
        )
        return [tensor.data_ptr() for tensor in tensors]

    first = pointers(adapter.batch(seqs, [40, 3, 1]))
    assert pointers(adapter.batch(seqs[:1], [2])) == first  # what a captured graph replays on
    assert pointers(adapter.batch([], [], pad_requests=4, pad_tokens=9)) == first


def test_device_bytes_are_counted_buffer_by_buffer():
    source = Pages(4, {})
    sizes = {"max_requests": 8, "max_tokens": 40, "max_batch_tokens": 100}
    block = adapter_over(BlockTableAdapter, source, **sizes).nbytes()
    token = adapter_over(ReqToTokenAdapter, source, **sizes).nbytes()
    assert (block["entries"], block["gathered"], token["entries"]) == (9 * 10 * 4, 8 * 10 * 4, 9 * 40 * 4)
    assert block["slot_mapping"] == token["slot_mapping"] == 100 * 8
    assert sum(token.values()) - token["entries"] < sum(block.values())


def test_rows_are_given_once_and_run_out_with_an_error():
    seqs = [sequence(name, 4) for name in "abcde"]
    source = Pages(4, {seq.request_id: [i + 1] for i, seq in enumerate(seqs)})
    adapter = adapter_over(ReqToTokenAdapter, source, *seqs[:4])
    with pytest.raises(ValueError, match=r"request e: all 4 rows are taken \(max_requests\)"):
        adapter.add(seqs[4])
    with pytest.raises(ValueError, match="request a has a row already"):
        adapter.add(seqs[0])
    adapter.remove(seqs[2])
    adapter.add(seqs[4])
    adapter.check([seqs[0], seqs[1], seqs[3], seqs[4]])
    assert len(adapter) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ad, a: ad.batch([a, a], [1, 1]), "named twice"),
        (lambda ad, a: ad.batch([a], [-1]), "expected 1 numbers >= 0"),
        (lambda ad, a: ad.batch([a], [1, 2]), "expected 1 numbers >= 0"),
        (lambda ad, a: ad.batch([a], [1], pad_requests=5), "padded to 5: at most 4 fit"),
        (lambda ad, a: ad.batch([a], [4], pad_tokens=3), "batch of 4 tokens, padded to 3"),
        (lambda ad, a: ad.batch([a], [4], pad_tokens=9000), "at most 8192 fit"),
        (lambda ad, a: ad.remove(sequence("b", 1)), "request b has no row"),
        (lambda ad, a: ad.refresh(sequence("b", 1)), "request b has no row"),
        (lambda ad, a: ad.update(Commit(sequence("b", 1))), "its reservation was never seen"),
        (lambda ad, a: adapter_over(BlockTableAdapter, Pages(4, {}), max_requests=0), "max_requests: expected"),
        (lambda ad, a: adapter_over(BlockTableAdapter, Pages(4, {}), max_tokens=0), "max_tokens: expected"),
        (lambda ad, a: adapter_over(BlockTableAdapter, Pages(4, {}), slots_by="numpy"), "slots_by: expected"),
    ],
)
def test_misuse_raises_and_the_next_batch_is_right(call, message):
    a = sequence("a", 4)
    adapter = adapter_over(BlockTableAdapter, Pages(4, {"a": [9]}), a)
    with pytest.raises(ValueError, match=message):
        call(adapter, a)
    assert adapter.batch([a], [4]).slot_mapping.tolist() == [36, 37, 38, 39]


def stale_host(adapter, source, a):
    source.rows["a"][1] = 50


def stale_device(adapter, source, a):
    adapter.entries[adapter.host.index(a), 0] += 1


def forgotten_reservation(adapter, source, a):
    source.rows["a"].append(50)


def row_lost(adapter, source, a):
    adapter.remove(a)


def row_doubly_free(adapter, source, a):
    adapter.host._free.append(adapter.host.index(a))


def padding_row_used_on_the_host(adapter, source, a):
    adapter.host._pages[0, 0] = 5


def padding_row_used_on_the_device(adapter, source, a):
    adapter.entries[0, 0] = 5


FAULTS = [
    stale_host,
    stale_device,
    forgotten_reservation,
    row_lost,
    row_doubly_free,
    padding_row_used_on_the_host,
    padding_row_used_on_the_device,
]


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_check_finds_a_planted_fault(fault, kind):
    a = sequence("a", 8)
    source = Pages(4, {"a": [5, 2]})
    adapter = adapter_over(kind, source, a)
    adapter.check([a])
    fault(adapter, source, a)
    with pytest.raises(AllocatorError):
        adapter.check([a])


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_allocator_from_outside_needs_nothing_special(kind):
    pool = StackAllocator(num_pages=NUM_PAGES, page_size=5)
    adapter = kind(pool, max_requests=MAX_LIVE, max_tokens=NUM_PAGES * 5, slots_by="torch")
    RandomOps(pool, 1, [adapter]).run(80)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned copies and streams need a CUDA device")
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("way", ["decode", "update_step and batch"])
def test_on_a_card_steps_never_wait_for_the_device_and_buffers_are_right(way, page_size, kind):
    pool = make_allocator({"kind": "token", "page_size": page_size}, num_pages=4096 // page_size)
    adapter = kind(pool, max_requests=8, max_tokens=1024, device="cuda")
    seqs = [Sequence(f"r{i}", [i] * (40 + i)) for i in range(6)]
    for seq in seqs:
        admitted(pool, adapter, seq)
    steps = pool.decode_batch(seqs)
    slots = []
    for number in range(40):
        step = steps.reserve()
        if number > 2:  # the first steps compile
            torch.cuda.set_sync_debug_mode("error")
        try:
            if way == "decode":
                batch = adapter.decode(step, pad_requests=8, pad_tokens=8)
            else:
                adapter.update_step(step)
                batch = adapter.batch(seqs, [1] * 6, pad_requests=8, pad_tokens=8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        slots.append((batch.slot_mapping.clone(), [pool.page_ids(seq) for seq in seqs], 40 + number))
        steps.commit()
    adapter.check(seqs)
    for found, pages, first in slots:
        positions = [first + i for i in range(6)]
        owned = [row[p // page_size] * page_size + p % page_size for row, p in zip(pages, positions, strict=True)]
        assert found.tolist() == [*owned, -1, -1]
