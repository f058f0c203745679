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


@pytest.mark.parametrize("form", ["runs", "hashed"])
@pytest.mark.parametrize(("mine", "theirs", "pages"), [(2, 6, 1), (6, 2, 1), (2, 2, 2), (6, 10, 2), (1, 2, 2)])
def test_an_image_and_a_longer_one_of_its_content_share_only_pages_that_both_cover_alike(form, mine, theirs, pages):
    """Placeholders behind a short image are tokens, inside a long one they are the image."""
    pool = make_allocator({"kind": "block", "page_size": 4, "form": form}, num_pages=12)
    for name, length, hit in (("a", mine, 0), ("b", theirs, 4 * pages)):
        seq = Sequence(name, [7] * 12, extra_keys=[(2, length, "image")])
        pin = pool.admit(seq)
        assert pin is not None
        assert pin.hit_tokens == hit
        pool.commit([(seq, 12)])
