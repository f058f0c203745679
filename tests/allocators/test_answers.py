"""What the verbs answer can be read, compared, copied and sent to another process, in every design."""

from __future__ import annotations

import copy
import pickle
from array import array

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Commit, Pin, Release, Released, Reservation, Sequence

DESIGNS = [
    {"kind": "token", "page_size": 1},
    {"kind": "token", "page_size": 4},
    {"kind": "block", "page_size": 4},
    {"kind": "block", "page_size": 4, "form": "hashed"},
    {"kind": "block", "page_size": 4, "form": "general"},
    {"kind": "contiguous", "sizing": "pow2"},
    {"kind": "exact"},
]


def answers(spec):
    owner, seq = make_allocator(spec, num_pages=64), Sequence("a", list(range(9)))
    seq.declared_max_tokens = 1
    pin = owner.pin(seq)
    (reserved,) = owner.reserve([(seq, 9)])
    (committed,) = owner.commit([(seq, 9)])
    return [pin, reserved, committed, owner.release([seq], Release.FINISH)]


@pytest.mark.parametrize("spec", DESIGNS, ids=lambda spec: " ".join(map(str, spec.values())))
def test_answers_print_their_pages_and_survive_a_copy_and_a_pickle(spec):
    for answer in answers(spec):
        assert "memory at" not in repr(answer)
        assert repr(answer).startswith(f"{type(answer).__name__}(")
        for twin in (copy.copy(answer), pickle.loads(pickle.dumps(answer))):
            assert type(twin) is type(answer)
            assert repr(twin) == repr(answer)


def test_pages_are_shown_as_a_list_and_long_ones_are_cut_short():
    view = memoryview(array("i", range(5, 8)))
    assert repr(Released(freed=view)) == "Released(freed=[5, 6, 7], cached=(), evicted=(), duplicates=())"
    assert "page_ids=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... 4,096 in all]" in repr(
        Pin(Sequence("a", [1]), 4096, array("i", range(4096)))
    )
    assert pickle.loads(pickle.dumps(Released(freed=view))).freed == array("i", [5, 6, 7])


def test_answers_are_equal_by_their_pages():
    seq = Sequence("a", [1, 2])
    pages = array("i", [3, 4])
    assert Commit(seq, memoryview(pages).toreadonly()) == Commit(seq, pages)
    assert Reservation(seq, pages) != Reservation(seq, array("i", [3]))
