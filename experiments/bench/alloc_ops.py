"""Single operations of the allocators, timed: each sample prepares its own state outside the clock.

An operation is a factory: called once it builds what all samples share, and returns a `Timed`: `before()` cleans up
behind the last sample and prepares the next one, `work(state)` is what is timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from kvarena.allocators.config import make_allocator
from kvarena.allocators.free_slots import FreePages
from kvarena.allocators.interface import KVAllocator, Release, Sequence
from kvarena.experiments.bench.alloc_load import Prompt
from kvarena.prefix.radix_tree import Node, RadixTree

TOKEN_BYTES = 4
POOL_TOKENS = 4_000_000
LEAF_TOKENS = 64
DECODES = 256


@dataclass(frozen=True, slots=True)
class Timed:
    """`work(before())` once a sample, of which `work` is timed; it holds `calls` operations.

    Reading the clock takes a tenth of the shortest operations, so what an empty sample takes is taken off.
    """

    before: Callable[[], Any]
    work: Callable[[Any], object]
    calls: int = 1

    def sample(self) -> float:
        """Microseconds of process CPU time of one operation; 0 for one that takes nothing."""
        return max(self._nanoseconds() - clock_cost(), 0) / self.calls / 1000

    def _nanoseconds(self) -> int:
        state = self.before()
        start = time.process_time_ns()
        self.work(state)
        return time.process_time_ns() - start


@cache
def clock_cost() -> float:
    """Nanoseconds of an empty sample, median of a thousand: the reading of the clock and the call."""
    empty = Timed(lambda: None, lambda _: None)
    return statistics.median([empty._nanoseconds() for _ in range(1001)][1:])


@dataclass(frozen=True, slots=True)
class Op:
    """`design` is what tables show; `make()` builds the shared state."""

    name: str
    design: str
    page_size: int
    make: Callable[[], Timed]


def allocator(spec: dict[str, Any], tokens: int = POOL_TOKENS) -> KVAllocator:
    """An allocator with a pool of that many tokens."""
    return make_allocator(spec, num_pages=tokens // spec["page_size"])


def prompts(length: int) -> Callable[[], Prompt]:
    """A source of prompts of that length that share no prefix."""
    rng = np.random.default_rng(0)
    return lambda: rng.integers(0, 2**30, length, dtype=np.int32)


def sequences_of(length: int) -> Callable[[], Sequence]:
    """A source of sequences of that length that share no prefix."""
    fresh, numbers = prompts(length), itertools.count()
    return lambda: Sequence(f"p{next(numbers)}", fresh())


def prefill(owner: KVAllocator, seq: Sequence) -> None:
    """Admit and commit the whole of it."""
    if owner.admit(seq) is None:
        raise ValueError(f"the pool of the benchmark is too small for {seq!r}")
    owner.commit([(seq, seq.num_prefill_tokens)])


# --- both designs ---


def decode_step(spec: dict[str, Any], *, commit: bool = False) -> Timed:
    """A slot for one more token of each of 256 sequences, in one call; lengths differ, so pages fill by turns.

    With `commit` the call that raises their lengths is timed too; the real packages have no such call.
    """
    owner = allocator(spec)
    seqs = [Sequence(f"r{number}", [number] * (100 + number)) for number in range(DECODES)]
    for seq in seqs:
        prefill(owner, seq)
    batch = owner.decode_batch(seqs)
    batch.reserve()

    def before() -> None:
        if not commit:
            batch.commit()
        for seq in seqs:
            seq.append(7)

    def work(_: None) -> None:
        if commit:
            batch.commit()
        batch.reserve()

    return Timed(before, work)


def lookup(spec: dict[str, Any], length: int, *, keys_known: bool) -> Timed:
    """Match a cached prompt, as a queue that sorts by hits does.

    Keys known: the sequence was looked up before, as the real package keeps the hashes of a request; else a new
    sequence is made of the tokens each time, which the hashed form has to hash first.
    """
    owner, tokens = allocator(spec), prompts(length)()
    seq = Sequence("p", tokens)
    prefill(owner, seq)
    owner.release([seq], Release.FINISH)
    numbers = itertools.count()
    if not keys_known:
        return Timed(lambda: tokens, lambda ids: owner.match(Sequence(f"q{next(numbers)}", ids)))

    def before() -> Sequence:
        again = Sequence(f"q{next(numbers)}", tokens)
        owner.match(again)
        return again

    return Timed(before, owner.match)


def release_pages(spec: dict[str, Any], num_pages: int, times: int = 32) -> Timed:
    """Release a request of that many full pages, one after the other; they stay cached."""
    owner = allocator(spec)
    fresh = sequences_of(num_pages * spec["page_size"])

    def before() -> list[list[Sequence]]:
        live = [[fresh()] for _ in range(times)]
        for (seq,) in live:
            prefill(owner, seq)
        return live

    def work(live: list[list[Sequence]]) -> None:
        for seqs in live:
            owner.release(seqs, Release.FINISH)

    return Timed(before, work, times)


def admit(spec: dict[str, Any], length: int) -> Timed:
    """Make a sequence of a prompt that is not cached, pin it and reserve for it."""
    owner, fresh = allocator(spec), prompts(length)
    live: list[Sequence] = []

    def before() -> Prompt:
        owner.release(live, Release.ABORT)
        live.clear()
        return fresh()

    def work(tokens: Prompt) -> None:
        live.append(Sequence("p", tokens))
        owner.admit(live[0])

    return Timed(before, work)


def cycle(spec: dict[str, Any], num_pages: int, pages_each: int = 64) -> Timed:
    """A request of 64 pages through all four verbs, in a pool that is full of cached requests."""
    owner = allocator(spec, num_pages * spec["page_size"])
    fresh = sequences_of(pages_each * spec["page_size"])

    def serve(seq: Sequence) -> None:
        prefill(owner, seq)
        owner.release([seq], Release.FINISH)

    for _ in range(num_pages // pages_each + 1):
        serve(fresh())
    return Timed(fresh, serve)


# --- token ---


def finish(spec: dict[str, Any], prompt: int, generated: int) -> Timed:
    """The end of a request with that many tokens: publish, free, unlock."""
    owner = allocator(spec)
    fresh = sequences_of(prompt)

    def before() -> list[Sequence]:
        owner.reset()
        seq = fresh()
        prefill(owner, seq)
        for token in range(generated):
            seq.append(token)
        owner.extend(seq, generated)
        owner.commit([(seq, seq.num_tokens)])
        return [seq]

    return Timed(before, lambda seqs: owner.release(seqs, Release.FINISH))


def take_one(spec: dict[str, Any], times: int = 1000) -> Timed:
    """One page off the free list, a thousand times."""
    free = FreePages(POOL_TOKENS // spec["page_size"], fifo=spec["page_size"] == 1)

    def work(_: None) -> None:
        for _number in range(times):
            free.take(1)

    return Timed(free.clear, work, times)


def path_match(page_size: int, tokens: int, nodes: int) -> Timed:
    """Match a prompt that is stored as a path of so many nodes."""
    tree, width = RadixTree(), TOKEN_BYTES * page_size
    seq = sequences_of(tokens)()
    data = seq.token_ids.tobytes()
    pages = array("i", range(1, tokens // page_size + 1))
    node: Node = tree.root()
    tree.lock(node)
    step = len(pages) // nodes
    for start in range(0, len(pages), step):
        node, _, _ = tree.insert(node, data[start * width : (start + step) * width], width, pages, start)
    tree.unlock(node)
    return Timed(lambda: seq.token_ids, lambda ids: tree.match(ids.tobytes(), width))


def insert(spec: dict[str, Any], tokens: int) -> Timed:
    """Publish a prompt of which the tree has nothing: the commit behind its prefill."""
    owner, fresh = allocator(spec), sequences_of(tokens)
    live: list[Sequence] = []

    def before() -> list[tuple[Sequence, int]]:
        owner.release(live, Release.FINISH)
        owner.reset()
        live[:] = [fresh()]
        owner.admit(live[0])
        return [(live[0], tokens)]

    return Timed(before, owner.commit)


def tree_of_leaves(num_leaves: int, page_size: int, leaf_tokens: int = LEAF_TOKENS) -> Callable[[], RadixTree]:
    """A tree with that many unlocked leaves under the root; called again it fills up what was evicted."""
    tree, width = RadixTree(), TOKEN_BYTES * page_size
    count = leaf_tokens // page_size
    numbers = itertools.count()

    def filled() -> RadixTree:
        root = tree.root()
        while tree.evictable_pages < num_leaves * count:
            tree.lock(root)
            number = next(numbers)
            first = array("i", [number % 2**31]).tobytes()
            key = first + bytes(width * count - len(first))
            node, _, _ = tree.insert(root, key, width, array("i", range(count)))
            tree.unlock(node)
        return tree

    return filled


def tree_evict(page_size: int, num_leaves: int, tokens: int, leaf_tokens: int = LEAF_TOKENS) -> Timed:
    """Let the oldest leaves go until so many tokens are free."""
    filled = tree_of_leaves(num_leaves, page_size, leaf_tokens)
    return Timed(filled, lambda tree: tree.evict(max(tokens // page_size, 1)))


def tree_hold(num_leaves: int, times: int = 100) -> Timed:
    """Match a leaf, lock it, unlock it, anywhere in a tree of leaves."""
    tree = tree_of_leaves(num_leaves, 1, 1)()
    keys = [node.edge for node in tree.nodes()][:: max(num_leaves // 1000, 1)]
    starts = itertools.cycle(range(0, len(keys) - times + 1, times))

    def work(chosen: list[bytes]) -> None:
        for key in chosen:
            node, _ = tree.match(key, TOKEN_BYTES)
            tree.lock(node)
            tree.unlock(node)

    def before() -> list[bytes]:
        start = next(starts)
        return keys[start : start + times]

    return Timed(before, work, times)


# --- the list ---


def token_ops() -> list[Op]:
    """Operations of the token design at page 1 and 16."""
    ops = []
    for size in (1, 16):
        spec = {"kind": "token", "page_size": size}

        def add(name: str, make: Callable[..., Timed], *arguments: Any, size: int = size, **more: Any) -> None:
            ops.append(Op(name, "token", size, lambda: make(*arguments, **more)))

        add("take 1 page", take_one, spec)
        add("match 4,096 over 32 nodes", path_match, size, 4096, 32)
        add("match 32,768 over 256 nodes", path_match, size, 32_768, 256)
        add("insert 4,096 new tokens", insert, spec, 4096)
        add("admit 4,096 uncached tokens", admit, spec, 4096)
        add("finish 4,096 + 256 tokens", finish, spec, 4096, 256)
        add("decode step of 256", decode_step, spec)
        add("decode step of 256, commit too", decode_step, spec, commit=True)
        add("evict 4,096 tokens of 1,000 leaves", tree_evict, size, 1000, 4096)
        add("evict 4,096 tokens of 20,000 leaves", tree_evict, size, 20_000, 4096)
        add("evict one leaf of 20,000", tree_evict, size, 20_000, 1)
    return ops


def block_ops() -> list[Op]:
    """Operations of the block design, in both forms."""
    ops = []
    for form in ("hashed", "runs"):
        spec = {"kind": "block", "page_size": 16, "form": form}

        def add(name: str, make: Callable[..., Timed], *arguments: Any, form: str = form, **more: Any) -> None:
            ops.append(Op(name, f"block {form}", 16, lambda: make(*arguments, **more)))

        for length in (4096, 32_768):
            add(f"look up {length:,} cached tokens", lookup, spec, length, keys_known=True)
            if form == "hashed":
                add(f"hash and look up {length:,} cached tokens", lookup, spec, length, keys_known=False)
        add("admit 100 new pages", admit, spec, 1600)
        add("free a request of 100 pages", release_pages, spec, 100)
        add("decode step of 256", decode_step, spec)
        add("decode step of 256, commit too", decode_step, spec, commit=True)
    return ops
