"""Free pages come back in SGLang 0.5.22's order: the fast lists against one plain list."""

import random
from array import array

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.free_slots import BLOCK, TRIM, FreePages
from kvarena.allocators.interface import Release, Sequence


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("fifo", [True, False])
def test_takes_and_frees_as_one_plain_list_would(fifo: bool, need_sort: bool) -> None:
    rng = random.Random(f"{fifo} {need_sort}")
    num_pages = 6 * TRIM
    free, plain, waiting = FreePages(num_pages, fifo=fifo, need_sort=need_sort), list(range(1, num_pages + 1)), []
    held: list[int] = []
    for _ in range(1000):
        if rng.random() < 0.5 and free.count:
            n = rng.randint(0, min(free.count, rng.choice([1, 40, 4000])))
            if n > len(plain):
                plain, waiting = sorted(plain + waiting), []
            taken = list(free.take(n))
            assert taken == plain[:n]
            del plain[:n]
            held += taken
        elif held:
            rng.shuffle(held)
            n = rng.randint(1, min(len(held), rng.choice([1, 40, 4000])))
            run, held = held[:n], held[n:]
            each = rng.random() < 0.3
            (free.free_each if each else free.free)(array("i", run))
            if need_sort:
                waiting += run
            elif fifo:
                plain += run
            else:
                plain = (run[::-1] if each else run) + plain
        assert free.count == len(plain) + len(waiting)
        assert free.num_ready == len(plain)
    assert list(free) == plain + waiting
    free.clear()
    assert list(free) == list(range(1, num_pages + 1))


@pytest.mark.parametrize("taken", [0, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("fifo", [True, False])
def test_a_cleared_pool_hands_out_all_ids_ascending_however_far_it_was_used(fifo: bool, taken: int) -> None:
    free = FreePages(4 * BLOCK, fifo=fifo)
    for n in (taken // 2, taken - taken // 2):
        free.take(n)[:] = array("i", [0] * n)  # the caller's own
    for _ in range(2):
        free.clear()
        runs = [free.take(n) for n in (5, BLOCK - 7, 4 * BLOCK - (BLOCK - 2))]
        assert [page for run in runs for page in run] == list(range(1, 4 * BLOCK + 1))


@pytest.mark.parametrize("fifo", [True, False])
def test_a_queue_that_is_used_for_long_stays_as_short_as_its_content(fifo: bool) -> None:
    free = FreePages(4 * TRIM, fifo=fifo)
    for _ in range(100):
        free.free(free.take(TRIM))
    assert len(free._returned.ids) <= 8 * TRIM


def test_a_decode_without_room_leaves_waiting_pages_unsorted() -> None:
    """SGLang 0.5.22 with sorted free lists turns a decode away before it looks at the free pages: what waits then is
    merged later, with what came meanwhile. Found by driving both (seed 7, page size 4)."""
    pool = make_allocator({"kind": "token", "page_size": 4, "need_sort": True, "prefix_cache": False}, num_pages=6)
    a, b, c, d = (Sequence(name, range(100 * i, 100 * i + size)) for i, (name, size) in
                  enumerate((("a", 4), ("b", 8), ("c", 8), ("d", 4))))  # fmt: skip
    for seq in (a, b, c, d):
        assert pool.admit(seq) is not None
        pool.commit([(seq, seq.num_tokens)])
    assert [list(pool.page_ids(seq)) for seq in (a, b, c, d)] == [[1], [2, 3], [4, 5], [6]]
    pool.release([c], Release.FINISH)  # 4 and 5 wait
    for seq in (a, b, d):
        seq.append(7)
    assert pool.reserve([(a, 1), (b, 1), (d, 1)]) is None  # three pages, two are free
    pool.release([b], Release.ABORT)  # 2 and 3 wait too
    assert list(pool.reserve([(d, 1)])[0].page_ids) == [2]
