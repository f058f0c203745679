"""Single operations of the allocators, timed: each sample makes its own state outside the clock.

An operation is a factory: called once it builds what all samples share, and returns `sample`, which prepares, times
and cleans up, and gives back nanoseconds of process CPU time for one operation.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator, Release, Sequence
from kvarena.prefix.radix_tree import Node, RadixTree

Sample = Callable[[], float]
TOKEN_BYTES = 4
POOL_TOKENS = 4_000_000
LEAF_TOKENS = 64
DECODES = 256


@dataclass(frozen=True, slots=True)
class Op:
    """`design` is what tables show; `make()` builds the shared state and returns the sampler."""

    name: str
    design: str
    page_size: int
    make: Callable[[], Sample]
    calls: int = 1  # operations in one sample

    def measure(self, samples: int) -> list[float]:
        """Microseconds an operation, one value a sample. The first, cold one is dropped."""
        sample = self.make()
        sample()
        return [sample() / 1000 for _ in range(samples)]


def clocked(work: Callable[[], Any], calls: int = 1) -> float:
    """Nanoseconds of CPU time that one of `calls` operations in `work` took."""
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / calls


def allocator(spec: dict[str, Any], tokens: int = POOL_TOKENS) -> KVAllocator:
    """An allocator with a pool of that many tokens."""
    return make_allocator(spec, num_pages=tokens // spec["page_size"])


def prompts(length: int) -> Callable[[], Sequence]:
    """A source of sequences of that length that share no prefix."""
    rng, numbers = np.random.default_rng(0), itertools.count()

    def fresh() -> Sequence:
        return Sequence(f"p{next(numbers)}", rng.integers(0, 2**30, length, dtype=np.int32))

    return fresh


def prefill(owner: KVAllocator, seq: Sequence) -> None:
    """Admit and commit the whole of it."""
    if owner.admit(seq) is None:
        raise ValueError(f"the pool of the benchmark is too small for {seq!r}")
    owner.commit([(seq, seq.num_prefill_tokens)])


# --- both designs ---


def decode_step(spec: dict[str, Any]) -> Sample:
    """A slot for one more token of each of 256 sequences, in one call; lengths differ, so pages fill by turns."""
    owner = allocator(spec)
    seqs = [Sequence(f"r{number}", [number] * (100 + number)) for number in range(DECODES)]
    for seq in seqs:
        prefill(owner, seq)
    batch = owner.decode_batch(seqs)

    def sample() -> float:
        for seq in seqs:
            seq.append(7)
        taken = clocked(batch.reserve)
        batch.commit()
        return taken

    return sample


def lookup(spec: dict[str, Any], length: int) -> Sample:
    """Match a cached prompt, keys and all, as a queue that sorts by hits does."""
    owner = allocator(spec)
    seq = prompts(length)()
    prefill(owner, seq)
    owner.release([seq], Release.FINISH)
    asked = [Sequence(f"q{number}", seq.token_ids) for number in range(10_000)]

    def sample() -> float:
        one = asked.pop()  # keys that a sequence remembers must not make the next look-up cheaper
        return clocked(lambda: owner.match(one))

    return sample


def release_pages(spec: dict[str, Any], num_pages: int) -> Sample:
    """Release a request of that many full pages; they stay cached."""
    owner = allocator(spec)
    fresh = prompts(num_pages * spec["page_size"])

    def sample() -> float:
        seq = fresh()
        prefill(owner, seq)
        return clocked(lambda: owner.release([seq], Release.FINISH))

    return sample


def admit(spec: dict[str, Any], length: int) -> Sample:
    """pin and reserve a prompt that is not cached."""
    owner = allocator(spec)
    fresh = prompts(length)

    def sample() -> float:
        seq = fresh()
        taken = clocked(lambda: owner.admit(seq))
        owner.release([seq], Release.ABORT)
        return taken

    return sample


def cycle(spec: dict[str, Any], num_pages: int, pages_each: int = 64) -> Sample:
    """A request of 64 pages through all four verbs, in a pool that is full of cached requests."""
    owner = allocator(spec, num_pages * spec["page_size"])
    fresh = prompts(pages_each * spec["page_size"])
    for _ in range(num_pages // pages_each + 1):
        seq = fresh()
        prefill(owner, seq)
        owner.release([seq], Release.FINISH)

    def sample() -> float:
        seq = fresh()

        def work() -> None:
            owner.admit(seq)
            owner.commit([(seq, seq.num_tokens)])
            owner.release([seq], Release.FINISH)

        return clocked(work)

    return sample


# --- token ---


def finish(spec: dict[str, Any], prompt: int, generated: int) -> Sample:
    """The end of a request with that many tokens: publish, free, unlock."""
    owner = allocator(spec)
    fresh = prompts(prompt)

    def sample() -> float:
        seq = fresh()
        prefill(owner, seq)
        for token in range(generated):
            seq.append(token)
        owner.extend(seq, generated)
        owner.commit([(seq, seq.num_tokens)])
        taken = clocked(lambda: owner.release([seq], Release.FINISH))
        owner.reset()
        return taken

    return sample


def take_one(spec: dict[str, Any]) -> Sample:
    """One page off the free list."""
    owner: Any = allocator(spec)
    free = owner._free

    def sample() -> float:
        def work() -> None:
            for _ in range(1000):
                free.take(1)

        taken = clocked(work, 1000)
        free.clear()
        return taken

    return sample


def path_match(page_size: int, tokens: int, nodes: int) -> Sample:
    """Match a prompt that is stored as a path of so many nodes."""
    tree, width = RadixTree(), TOKEN_BYTES * page_size
    seq = prompts(tokens)()
    data = seq.token_ids.tobytes()
    pages = array("i", range(1, tokens // page_size + 1))
    node: Node = tree.root()
    tree.lock(node)
    step = len(pages) // nodes
    for start in range(0, len(pages), step):
        node, _, _ = tree.insert(node, data[start * width : (start + step) * width], width, pages, start)
    tree.unlock(node)
    return lambda: clocked(lambda: tree.match(seq.token_ids.tobytes(), width))


def tree_insert(page_size: int, tokens: int) -> Sample:
    """Publish a prompt of which the tree has nothing."""
    tree, width = RadixTree(), TOKEN_BYTES * page_size
    fresh = prompts(tokens)
    pages = array("i", range(1, tokens // page_size + 1))

    def sample() -> float:
        seq = fresh()
        root = tree.root()
        tree.lock(root)
        ends: list[Node] = []

        def work() -> None:
            ends.append(tree.insert(root, seq.token_ids.tobytes(), width, pages)[0])

        taken = clocked(work)
        tree.unlock(ends[0])
        tree.evict(len(pages))
        return taken

    return sample


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


def tree_evict(page_size: int, num_leaves: int, tokens: int) -> Sample:
    """Let the oldest leaves go until so many tokens are free."""
    filled = tree_of_leaves(num_leaves, page_size)

    def sample() -> float:
        tree = filled()
        return clocked(lambda: tree.evict(max(tokens // page_size, 1)))

    return sample


# --- the list ---


def token_ops() -> list[Op]:
    """Operations of the token design at page 1 and 16."""
    ops = []
    for size in (1, 16):
        spec = {"kind": "token", "page_size": size}

        def add(name: str, make: Callable[..., Sample], *arguments: Any, size: int = size) -> None:
            ops.append(Op(name, "token", size, lambda: make(*arguments)))

        add("take 1 page", take_one, spec)
        add("match 4,096 over 32 nodes", path_match, size, 4096, 32)
        add("match 32,768 over 256 nodes", path_match, size, 32_768, 256)
        add("insert 4,096 new tokens", tree_insert, size, 4096)
        add("admit 4,096 uncached tokens", admit, spec, 4096)
        add("finish 4,096 + 256 tokens", finish, spec, 4096, 256)
        add("decode step of 256", decode_step, spec)
        add("evict 4,096 tokens of 1,000 leaves", tree_evict, size, 1000, 4096)
        add("evict 4,096 tokens of 20,000 leaves", tree_evict, size, 20_000, 4096)
        add("evict one leaf of 20,000", tree_evict, size, 20_000, 1)
    return ops


def block_ops() -> list[Op]:
    """Operations of the block design, in both forms."""
    ops = []
    for form in ("hashed", "runs"):
        spec = {"kind": "block", "page_size": 16, "form": form}

        def add(name: str, make: Callable[..., Sample], *arguments: Any, form: str = form) -> None:
            ops.append(Op(name, f"block {form}", 16, lambda: make(*arguments)))

        add("look up 4,096 cached tokens", lookup, spec, 4096)
        add("look up 32,768 cached tokens", lookup, spec, 32_768)
        add("admit 100 new pages", admit, spec, 1600)
        add("free a request of 100 pages", release_pages, spec, 100)
        add("decode step of 256", decode_step, spec)
    return ops
