"""Wrappers of an allocator: what is measured, and what they leave as it was."""

from __future__ import annotations

import pytest
from kvarena.allocators.config import make_allocator
from kvarena.allocators.forwarding import ForwardingAllocator
from kvarena.allocators.host_cache import HostCache
from kvarena.allocators.interface import KVAllocator, Release, Sequence
from kvarena.experiments.engine.metered import VERBS, MeteredAllocator

DESIGNS = ("vllm", "sglang")


def use_every_verb(allocator: KVAllocator) -> dict[str, object]:
    """Call each verb once or more, and return what can be seen of the outcome."""
    parent, child = Sequence("parent", range(20)), Sequence("child", range(20))
    match = allocator.match(parent)
    pin = allocator.admit(parent)
    allocator.commit([(parent, 20)])
    fork = allocator.fork(parent, child)  # type: ignore[attr-defined]
    parent.append(7)
    copies = allocator.prepare_write(parent, 20, 21)  # type: ignore[attr-defined]
    seen = {"match": match, "pin": pin, "fork": fork, "copies": copies, "row": allocator.page_ids(child)}
    allocator.release([parent, child], Release.ABORT)
    evicted = allocator.evict(16)
    return {**seen, "evicted": evicted, "capacity": allocator.capacity(), "room": allocator.room()}


@pytest.mark.parametrize("design", DESIGNS)
def test_the_total_holds_the_time_of_every_verb(design: str) -> None:
    metered = MeteredAllocator(make_allocator(design, num_pages=64))
    use_every_verb(metered)
    assert [verb for verb in VERBS if not metered.nanoseconds[verb]] == []
    assert metered.total_ns == sum(sum(times) for times in metered.nanoseconds.values())


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(
    "wrap", [ForwardingAllocator, MeteredAllocator, lambda inner: HostCache(inner, 8, lambda *_: None)]
)
def test_a_wrapper_decides_as_what_it_wraps(design: str, wrap: type[ForwardingAllocator]) -> None:
    bare = use_every_verb(make_allocator(design, num_pages=64))
    assert repr(use_every_verb(wrap(make_allocator(design, num_pages=64)))) == repr(bare)


@pytest.mark.parametrize(
    "wrap", [ForwardingAllocator, MeteredAllocator, lambda inner: HostCache(inner, 8, lambda *_: None)]
)
@pytest.mark.parametrize("verb", ["fork", "prepare_write"])
def test_a_wrapper_of_a_design_without_fork_says_so(wrap: type[ForwardingAllocator], verb: str) -> None:
    wrapper = wrap(make_allocator("contiguous", num_pages=256, max_model_len=64))
    seq = Sequence("a", range(8))
    wants = (seq, Sequence("b", range(8))) if verb == "fork" else (seq, 0, 1)
    with pytest.raises(ValueError, match="has no fork"):
        getattr(wrapper, verb)(*wants)
