"""Values that compare equal and are not the same isolate all the same: 1, True, 1.0 and "1" are four tenants."""

from __future__ import annotations

import itertools

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import Sequence

LOOKALIKES = (None, 0, False, 0.0, 1, True, 1.0, "1", b"1", (1,), (True,), ("a", "bc"), ("ab", "c"))


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize("form", ["runs", "hashed"])
def test_namespaces_that_only_compare_equal_share_nothing(kind, form):
    spec = {"kind": kind, "page_size": 2} | ({"form": form} if kind == "block" else {})
    for mine, theirs in itertools.permutations(LOOKALIKES, 2):
        pool = make_allocator(spec, num_pages=12)
        for name, namespace in (("a", mine), ("b", theirs), ("c", mine)):
            seq = Sequence(name, range(7), namespace=namespace)
            pin = pool.admit(seq)
            assert pin is not None
            assert pin.hit_tokens == (6 if name == "c" else 0), (mine, theirs)
            pool.commit([(seq, 7)])
