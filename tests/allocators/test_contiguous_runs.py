"""Free runs under both placements against a plain list of free pages."""

import doctest
import random

import pytest
from kvarena.allocators import _runs
from kvarena.allocators._runs import Buddy, FirstFit
from kvarena.allocators.interface import AllocatorError

KINDS = [FirstFit, Buddy]


def test_doctests():
    result = doctest.testmod(_runs)
    assert result.attempted
    assert not result.failed


def pages(run):
    return set(range(run[0], run[0] + run[1]))


@pytest.mark.parametrize("num_pages", [1, 2, 7, 16, 21, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_random_placing_growing_and_giving_back(kind, num_pages):
    rng = random.Random(num_pages)
    runs, free, taken = kind(num_pages), set(range(1, num_pages + 1)), []
    fresh = runs.runs()
    for _ in range(400):
        want = rng.randint(1, max(num_pages // 2, 1))
        action = rng.random()
        if action < 0.5 and (run := runs.place(want)) is not None:
            assert run[1] >= want
            assert pages(run) <= free
            free -= pages(run)
            taken.append(run)
        elif action < 0.7 and taken:
            run = taken.pop(rng.randrange(len(taken)))
            grown = runs.grow(run, run[1] + want)
            if grown is not None:
                assert grown[0] == run[0]
                assert grown[1] >= run[1] + want
                assert pages(grown) - pages(run) <= free
            taken.append(grown or run)
            free -= pages(taken[-1])
        elif taken:
            run = taken.pop(rng.randrange(len(taken)))
            runs.give(run)
            free |= pages(run)
        assert set().union(*map(pages, runs.runs())) == free if free else not runs.runs()
        assert runs.free_pages == len(free)
        runs.check()
        assert runs.largest() == max((length for _, length in runs.runs()), default=0)
    for run in taken:
        runs.give(run)
    assert runs.runs() == fresh  # whatever the order, all is joined again


def longest_stretch(free):
    best = length = 0
    for page in range(1, max(free, default=0) + 1):
        length = length + 1 if page in free else 0
        best = max(best, length)
    return best


def test_first_fit_refuses_only_when_no_stretch_is_long_enough():
    rng = random.Random(1)
    runs, free, taken = FirstFit(40), set(range(1, 41)), []
    refused = 0
    for _ in range(600):
        want = rng.randint(1, 12)
        run = runs.place(want)
        assert (run is None) == (longest_stretch(free) < want)
        if run is None:
            refused += 1
            run = taken.pop(rng.randrange(len(taken)))
            runs.give(run)
            free |= pages(run)
        else:
            taken.append(run)
            free -= pages(run)
    assert refused > 50


def test_the_upper_half_of_a_grown_run_can_be_given_back_alone():
    for kind in KINDS:
        runs = kind(16)
        run = runs.place(2)
        before = runs.runs()
        grown = runs.grow(run, 5)
        runs.give((run[0] + run[1], grown[1] - run[1]))
        assert runs.runs() == before


def test_runs_that_should_have_been_joined_are_an_error():
    first_fit, buddy, misplaced = FirstFit(8), Buddy(8), Buddy(8)
    first_fit._lengths.clear()
    first_fit._lengths.update({1: 3, 4: 5})
    buddy._starts[3].clear()
    buddy._starts[2].update([1, 5])
    misplaced._starts[3].clear()
    misplaced._starts[1].add(2)
    for runs, message in (
        (first_fit, "touches 4"),
        (buddy, "other half is free too"),
        (misplaced, "not at a multiple"),
    ):
        with pytest.raises(AllocatorError, match=message):
            runs.check()
