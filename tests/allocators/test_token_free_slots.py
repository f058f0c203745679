"""Free pages come back in SGLang 0.5.22's order: the fast lists against one plain list."""

import random
from array import array

import pytest
from kvarena.allocators.free_slots import TRIM, FreePages


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


@pytest.mark.parametrize("fifo", [True, False])
def test_a_queue_that_is_used_for_long_stays_as_short_as_its_content(fifo: bool) -> None:
    free = FreePages(4 * TRIM, fifo=fifo)
    for _ in range(100):
        free.free(free.take(TRIM))
    assert len(free._returned.ids) <= 8 * TRIM
