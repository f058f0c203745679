"""The host tier over every allocator: after any swaps each sequence reads what it wrote."""

import doctest

import pytest
from kvarena.allocators import host
from kvarena.allocators.config import make_allocator
from kvarena.allocators.host import HostTier
from kvarena.allocators.interface import AllocatorError, Release, Sequence, SupportsSwap
from kvarena.experiments.random_ops import MAX_LIVE, RandomOps
from support.third_party import StackAllocator

ALLOCATORS = {
    "block": {"kind": "block"},
    "block-window": {"kind": "block", "sliding_window": 7, "retention_interval": None},
    "block-nocache": {"kind": "block", "prefix_cache": False},
    "token": {"kind": "token"},
    "contiguous": {"kind": "contiguous", "sizing": "pow2"},
    "exact": {"kind": "exact"},
}


class SwapOps(RandomOps):
    """Random requests that are also swapped; the shadow keeps the host's slots apart."""

    def __init__(self, allocator, seed, host_pages):
        super().__init__(allocator, seed)
        self.host = HostTier(allocator, host_pages)
        self.away = {}
        self.host_slots = {}
        self.swapped_in = 0
        self._ops |= {"swap_out": (4, self._swap_out), "swap_in": (5, self._swap_in)}

    def _swap_out(self):
        if not self.live:
            return
        actor = self.random.choice(list(self.live.values()))
        before = self.shadow.state()
        out = self.host.swap_out(actor.seq)
        if out is None:
            self.shadow.expect_unchanged(before, "refused swap out")
            return
        del self.live[actor.seq.request_id]
        self.copy(out.moves, self.shadow._slots, self.host_slots)
        self.away[actor.seq.request_id] = actor
        gone = [a for a in self.away.values() if a.seq not in self.host]
        assert bool(gone) == bool(out.dropped)
        self.preempted += gone  # to be computed again
        self.away = {name: a for name, a in self.away.items() if a.seq in self.host}

    def _swap_in(self):
        if not self.away or len(self.live) >= MAX_LIVE:
            return
        name = self.random.choice(list(self.away))
        actor, before, dump = self.away[name], self.shadow.state(), self.host.dump()
        computed = self.host._saved[name].num_tokens
        moves = self.host.swap_in(actor.seq)
        if moves is None:
            self.shadow.expect_nothing_taken(before, "refused swap in")
            assert self.host.dump() == dump
            return
        assert actor.seq.num_computed_tokens >= computed
        self.live[name] = self.away.pop(name)
        self.copy(moves, self.host_slots, self.shadow._slots)
        self.swapped_in += 1

    def copy(self, moves, source, target):
        size = self.allocator.page_size
        for move in moves:
            for offset in range(size):
                target[move.dst * size + offset] = source.get(move.src * size + offset)

    def verify(self):
        super().verify()
        self.host.check()


def test_doctests():
    result = doctest.testmod(host)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("host_pages", [6, 40])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_sequence_keeps_its_kv_over_random_swaps(name, page_size, host_pages):
    swaps = 0
    for seed in range(3):
        pool = make_allocator({**ALLOCATORS[name], "page_size": page_size}, num_pages=27)
        driver = SwapOps(pool, seed, host_pages)
        driver.run(150)
        swaps += driver.swapped_in
    assert swaps > 2  # most windowed sequences have left pages behind, and are refused


def test_an_allocator_from_outside_can_be_swapped():
    driver = SwapOps(StackAllocator(27, 5), 0, 9)
    driver.run(150)
    assert driver.swapped_in > 3


def admit(pool, seq):
    pool.admit(seq)
    pool.commit([(seq, seq.num_prefill_tokens)])


def pairs(moves):
    return [(move.src, move.dst) for move in moves]


def test_pages_that_are_still_cached_are_hit_and_not_copied():
    pool = make_allocator({"kind": "block", "page_size": 4}, num_pages=12)
    tier, a = HostTier(pool, 8), Sequence("a", range(10))
    admit(pool, a)
    assert pairs(tier.swap_out(a).moves) == [(1, 1), (2, 2), (3, 3)]
    moves = tier.swap_in(a)
    assert [move.src for move in moves] == [3]
    assert list(pool.page_ids(a))[:2] == [1, 2]
    capacity = tier.capacity()
    assert (capacity.hit_pages, capacity.copied_out, capacity.copied_in) == (2, 3, 1)


def test_the_least_recently_swapped_sequence_goes_first_and_whole():
    pool = make_allocator({"kind": "exact", "page_size": 4}, num_pages=20)
    tier = HostTier(pool, 5)
    seqs = [Sequence(name, range(100 * i, 100 * i + 8)) for i, name in enumerate("abc")]
    for seq in seqs:
        admit(pool, seq)
    assert not tier.swap_out(seqs[0]).dropped
    assert not tier.swap_out(seqs[1]).dropped
    assert tier.swap_out(seqs[2]).dropped == (1, 2)  # 2 + 2 of 5 are taken; a goes
    assert [seq in tier for seq in seqs] == [False, True, True]
    with pytest.raises(ValueError, match="request a is not on the host: never swapped out, or dropped for room"):
        tier.swap_in(seqs[0])
    assert (tier.capacity().dropped, tier.capacity().sequences) == (1, 2)


def test_what_cannot_be_swapped_is_refused_and_stays():
    pool = make_allocator({"kind": "exact", "page_size": 4}, num_pages=20)
    tier, large, small = HostTier(pool, 2), Sequence("large", range(9)), Sequence("small", range(50, 54))
    admit(pool, large), admit(pool, small)
    tier.swap_out(small)
    assert tier.swap_out(large) is None  # 3 pages, 2 on the host: nobody is dropped for it
    assert small in tier
    assert list(pool.page_ids(large)) == [1, 2, 3]
    with pytest.raises(ValueError, match="request small is swapped out already"):
        tier.swap_out(small)
    with pytest.raises(ValueError, match="not live"):
        HostTier(pool, 4).swap_out(Sequence("ghost", [1]))
    assert HostTier(pool, 0).swap_out(large) is None
    with pytest.raises(ValueError, match="expected at least 0 host pages"):
        HostTier(pool, -1)


def test_swap_in_without_room_leaves_the_sequence_on_the_host():
    pool = make_allocator({"kind": "exact", "page_size": 4}, num_pages=4)
    tier, a, b = HostTier(pool, 4), Sequence("a", range(9)), Sequence("b", range(50, 59))
    admit(pool, a)
    tier.swap_out(a)
    admit(pool, b)
    before = (pool.dump(), tier.dump())
    assert tier.swap_in(a) is None
    assert (pool.dump(), tier.dump()) == before
    assert a.num_computed_tokens == 0
    pool.release([b], Release.FINISH)
    assert tier.swap_in(a) is not None
    assert a.num_computed_tokens == 9
    tier.swap_out(a)
    assert tier.drop(a) == [1, 2, 3]
    assert tier.capacity().free == 4


def test_the_tier_is_what_the_engine_asks_for():
    assert isinstance(HostTier(StackAllocator(4), 2), SupportsSwap)


@pytest.mark.parametrize("fault", ["leak", "two owners", "short row"])
def test_check_finds_a_planted_fault(fault):
    pool = make_allocator({"kind": "exact", "page_size": 4}, num_pages=20)
    tier, a = HostTier(pool, 8), Sequence("a", range(9))
    admit(pool, a)
    tier.swap_out(a)
    if fault == "leak":
        tier._free.pop()
    elif fault == "two owners":
        tier._free.append(tier._saved["a"].pages[0])
    else:
        tier._free.append(tier._saved["a"].pages.pop())
    with pytest.raises(AllocatorError, match="host tier, 8 pages"):
        tier.check()


@pytest.mark.parametrize("kind", ["block", "token", "contiguous"])
def test_bytes_moved_by_gather_and_scatter_come_back_bit_for_bit(kind):
    torch = pytest.importorskip("torch", reason="pools need torch")
    from kvarena.kernels.pool import KVPool
    from kvarena.kernels.reference import gather_pages, scatter_pages

    fields = {"sizing": "pow2"} if kind == "contiguous" else {}
    pool = make_allocator({"kind": kind, "page_size": 4, **fields}, num_pages=10)
    device, away = (KVPool(2, n, 4, 1, 64, dtype=torch.float32) for n in (10, 10))
    tier = HostTier(pool, 10)
    seqs = [Sequence(name, range(100 * i, 100 * i + 13)) for i, name in enumerate("ab")]
    content = {}

    def rows(seq):
        pages = torch.tensor(list(pool.page_ids(seq)))
        return torch.stack([view[pages].flatten(0, 1)[:13] for layer in (0, 1) for view in views(device, layer)])

    def move(moves, source, target):
        if moves:
            packed = gather_pages(source.layers, [m.src for m in moves])
            scatter_pages(packed, target.layers, [m.dst for m in moves])

    for seq in seqs:
        admit(pool, seq)
        for layer in (0, 1):
            for view in views(device, layer):
                view[torch.tensor(list(pool.page_ids(seq)))] = torch.randn(len(pool.page_ids(seq)), 4, 1, 64)
        content[seq.request_id] = rows(seq)
        move(tier.swap_out(seq).moves, device, away)
        pool.reset()
        device.fill_(float("nan"))
    for seq in reversed(seqs):
        move(tier.swap_in(seq), away, device)
    for seq in seqs:
        assert torch.equal(rows(seq), content[seq.request_id])


def views(pool, layer):
    return pool.key(layer), pool.value(layer)


def test_a_sequence_whose_window_left_pages_behind_is_not_swapped():
    """Its row would come back longer than what was saved, and publish pages without content."""
    pool = make_allocator({"kind": "block", "page_size": 4, "sliding_window": 5}, num_pages=12)
    tier, a = HostTier(pool, 12), Sequence("a", range(17))
    admit(pool, a)
    a.append(1)
    pool.extend(a, 1)
    pool.commit([(a, 18)])
    assert pool.page_ids(a)[0] == 0
    assert tier.swap_out(a) is None
    assert a not in tier
    assert pool.page_ids(a)
