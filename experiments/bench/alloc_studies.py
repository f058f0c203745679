"""What `kvarena bench allocators` measures beside single operations: replay, latencies, growth, memory, counts."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from kvarena.allocators.config import make_allocator
from kvarena.allocators.interface import KVAllocator, Release, Sequence
from kvarena.allocators.token import TokenAllocator
from kvarena.experiments.bench.alloc_floor import BARE, Hollow
from kvarena.experiments.bench.alloc_load import POOL_TOKENS, Prompt, page_names
from kvarena.experiments.bench.alloc_ops import (
    Timed,
    allocator,
    cycle,
    prefill,
    sequences_of,
    tree_evict,
    tree_hold,
    tree_of_leaves,
)
from kvarena.experiments.bench.real_sglang import RealSGLang
from kvarena.experiments.bench.real_vllm import RealVLLM

TRACE = "mooncake-conversation"
TRACE_POOL_TOKENS = 8_388_608
TRACE_LIVE = 16
VERBS = ("pin", "reserve", "commit", "release")
DIGEST_BYTES = 16  # what a page's hash is chained to
ID_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A design as the tables name it, and how to build it."""

    design: str
    page_size: int
    spec: dict[str, Any]


CONTENDERS = [
    Contender("block hashed", 16, {"kind": "block", "page_size": 16, "form": "hashed"}),
    Contender("block runs", 16, {"kind": "block", "page_size": 16, "form": "runs"}),
    Contender("token", 1, {"kind": "token", "page_size": 1}),
    Contender("token", 16, {"kind": "token", "page_size": 16}),
]


def sequences(load: list[Prompt], page_size: int, *, hashes: bool) -> list[Sequence]:
    """One sequence a prompt: its tokens, or the names of its pages."""
    if not hashes:
        return [Sequence(f"r{number}", prompt) for number, prompt in enumerate(load)]
    return [
        Sequence(f"r{number}", page_hashes=names, num_tokens=len(prompt))
        for number, (prompt, names) in enumerate(zip(load, page_names(load, page_size), strict=True))
    ]


def serve(owner: KVAllocator, seq: Sequence) -> int:
    """One request through all four verbs; returns its hit in tokens."""
    pin = owner.pin(seq)
    if pin is None:
        raise ValueError(f"the benchmark's pool is too small for {seq!r}")
    owner.reserve([(seq, seq.num_tokens - pin.hit_tokens)])
    owner.commit([(seq, seq.num_tokens)])
    owner.release([seq], Release.FINISH)
    return pin.hit_tokens


@contextmanager
def _settled() -> Iterator[None]:
    """What the benchmark itself keeps is not walked by collections inside the clock, neither ours nor the others'."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _rate(serve_one: Callable[[Any], object], requests: Iterable[Any], count: int) -> float:
    """Requests a second of CPU time, events off."""
    with _settled():
        start = time.process_time()
        for request in requests:
            serve_one(request)
        taken = time.process_time() - start
    return count / taken


def replay_rate(contender: Contender, load: list[Prompt]) -> float:
    """Requests a second of CPU time, from int32 arrays on: a sequence is made, served, and given back."""
    owner, numbers = allocator(contender.spec, POOL_TOKENS), itertools.count()
    return _rate(lambda prompt: serve(owner, Sequence(f"r{next(numbers)}", prompt)), load, len(load))


def verbs_rate(contender: Contender, seqs: list[Sequence]) -> float:
    """The four verbs alone: sequences are made beforehand."""
    owner = allocator(contender.spec, POOL_TOKENS)
    for seq in seqs:
        seq.memo = None  # page keys remembered from another run
    return _rate(lambda seq: serve(owner, seq), seqs, len(seqs))


def gate(load: list[Prompt]) -> None:
    """Nothing is timed before the forms agree: block's two decide alike, checks hold. Raises AllocatorError."""
    hits: dict[str, list[int]] = {}
    for contender in CONTENDERS:
        owner = allocator(contender.spec, POOL_TOKENS // 16)
        found = [serve(owner, seq) for seq in sequences(load, contender.page_size, hashes=False)]
        owner.check()
        hits[f"{contender.design} {contender.page_size}"] = found
    if hits["block hashed 16"] != hits["block runs 16"]:
        raise ValueError("block: the two forms found different hits; times would compare different work")


@dataclass(frozen=True)
class Decisions:
    """What ours decides on a load: hits in tokens, and (free, evictable) pages at the end."""

    hits: list[int]
    room: tuple[int, int]


def decisions(load: list[Prompt], kind: str, page_size: int) -> Decisions:
    owner = allocator({"kind": kind, "page_size": page_size}, POOL_TOKENS)
    hits = [serve(owner, seq) for seq in sequences(load, page_size, hashes=False)]
    return Decisions(hits, owner.room())


def real_rate(load: list[Prompt], kind: str, page_size: int, expected: Decisions, *, lean: bool) -> float:
    """The same replay through the real package of a design; its decisions are compared with ours before it counts.

    Not lean: as its engine calls it, from int32 arrays on. Lean: from its own input form (lists of ints for vLLM,
    arrays of int64 for SGLang), made beforehand.
    """
    real = (RealVLLM if kind == "block" else RealSGLang)(POOL_TOKENS, page_size)
    requests: list[Any] = [real.lean_input(prompt) for prompt in load] if lean else load
    serve_one = real.serve_lean if lean else real.serve
    hits: list[int] = []

    def note(request: Any) -> None:
        hits.append(serve_one(request))

    rate = _rate(note, requests, len(load))
    if Decisions(hits, real.room()) != expected:
        raise ValueError(
            f"{kind}, page size {page_size}: the real package decided otherwise; times would compare different work"
        )
    return rate


def floor_rate(contender: Contender, load: list[Prompt], expected: Decisions) -> float:
    """The least that Python has to do for this replay: a structure without an interface and an interface without a
    structure, one after the other. The hits of the first are compared with ours before it counts."""
    bare = BARE[contender.design, contender.page_size](POOL_TOKENS, contender.page_size)
    hits: list[int] = []
    structure = _rate(lambda prompt: hits.append(bare.serve(prompt)), load, len(load))
    if hits != expected.hits:
        raise ValueError(f"{contender.design}, page size {contender.page_size}: the floor found other hits than ours")
    hollow: Any = Hollow(contender.page_size)
    numbers = itertools.count()
    verbs = _rate(lambda prompt: serve(hollow, Sequence(f"r{next(numbers)}", prompt)), load, len(load))
    return 1 / (1 / structure + 1 / verbs)


@dataclass(frozen=True)
class Replayed:
    """A replay whose calls are timed one by one. `latencies`: nanoseconds of wall time of every call, by verb."""

    name: str
    latencies: Callable[[Contender], Mapping[str, SequenceOf[int]]]


def recorded_replay(num_requests: int, say: Callable[[str], None]) -> Replayed | None:
    """The first requests of a recorded trace, tokens spelled out, 16 of them live; None where the trace is not held."""
    from kvarena.experiments.config import EngineConfig
    from kvarena.experiments.replay import Replay
    from kvarena.experiments.traces import load_trace

    try:
        trace = load_trace(TRACE, limit=num_requests)
    except ValueError as error:
        say(f"latencies are of the benchmark's own load: {error}")
        return None

    def latencies(contender: Contender) -> Mapping[str, SequenceOf[int]]:
        with _settled():
            replay = Replay(
                allocator(contender.spec, TRACE_POOL_TOKENS), EngineConfig(live=TRACE_LIVE, too_long="reject")
            )
            return replay.run(trace).nanoseconds

    return Replayed(f"{TRACE}, {num_requests:,} requests, {TRACE_LIVE} live, {TRACE_POOL_TOKENS:,} tokens", latencies)


def own_replay(load: list[Prompt]) -> Replayed:
    """The benchmark's own load, a request at a time."""
    return Replayed(f"own load, {len(load):,} requests", lambda contender: _own_latencies(contender, load))


def _own_latencies(contender: Contender, load: list[Prompt]) -> Mapping[str, SequenceOf[int]]:
    owner = allocator(contender.spec, POOL_TOKENS)
    found: dict[str, list[int]] = {verb: [] for verb in VERBS}
    clock = time.perf_counter_ns
    with _settled():
        for seq in sequences(load, contender.page_size, hashes=False):
            times = [clock()]
            pin = owner.pin(seq)
            times.append(clock())
            owner.reserve([(seq, seq.num_tokens - (pin.hit_tokens if pin else 0))])
            times.append(clock())
            owner.commit([(seq, seq.num_tokens)])
            times.append(clock())
            owner.release([seq], Release.FINISH)
            times.append(clock())
            for verb, taken in zip(VERBS, np.diff(times), strict=True):
                found[verb].append(int(taken))
    return found


@dataclass
class Counts:
    """Work that follows from the decisions and not from how they are carried out; sums over a replay.

    bytes_hashed   each whole page of a prompt once: its tokens and the hash it is chained to (block)
    pages_touched  pages held by a hit, taken, published, evicted or let go
    nodes_visited  nodes on the path of each match, insert and release (token)
    bytes_copied   4 for each page id that moves: free list to row, row to index, index to free list
    """

    bytes_hashed: int = 0
    pages_touched: int = 0
    nodes_visited: int = 0
    bytes_copied: int = 0


def counts(contender: Contender, seqs: list[Sequence]) -> dict[str, int]:
    """Operation counts of a replay."""
    owner, total = allocator(contender.spec, POOL_TOKENS), Counts()
    size = contender.page_size
    for seq in seqs:
        pin = owner.pin(seq)
        if pin is None:
            raise ValueError(f"the benchmark's pool is too small for {seq!r}")
        total.nodes_visited += _depth(owner, seq)
        taken = owner.extend(seq, seq.num_tokens - pin.hit_tokens)
        if taken is None:
            raise ValueError(f"the benchmark's pool is too small for {seq!r}")
        (done,) = owner.commit([(seq, seq.num_tokens)])
        total.nodes_visited += 2 * _depth(owner, seq)  # at the commit and at the release
        released = owner.release([seq], Release.FINISH)
        whole = seq.num_tokens // size
        evicted, published = len(taken.evicted), whole - len(pin.page_ids)
        total.pages_touched += len(pin.page_ids) + len(taken.page_ids) + published + evicted
        total.pages_touched += len(released.cached) + len(released.freed)
        total.bytes_copied += ID_BYTES * (len(taken.page_ids) + published + evicted + len(released.freed))
        total.bytes_copied += ID_BYTES * len(done.duplicates)
        if contender.spec["kind"] == "block":
            total.bytes_hashed += whole * (ID_BYTES * size + DIGEST_BYTES)
    return asdict(total)


def _depth(owner: KVAllocator, seq: Sequence) -> int:
    if not isinstance(owner, TokenAllocator):
        return 0
    node, depth = owner._rows[seq.request_id].node, 0
    while node.parent is not None:
        node, depth = node.parent, depth + 1
    return depth


def growth(largest: int) -> Iterator[tuple[str, str, int, dict[int, Timed]]]:
    """(what, design, page size, timed by size), sizes rising by tens from 10^4 pages or 10^3 leaves."""
    pages, leaves = list(_tens(10_000, largest)), list(_tens(1000, largest))
    for contender in CONTENDERS:
        timed = {size: cycle(contender.spec, size) for size in pages}
        yield "request of 64 pages, pool full", contender.design, contender.page_size, timed
    evicting = {size: tree_evict(1, size, 1, leaf_tokens=1) for size in leaves}
    yield "evict the oldest of all leaves", "token", 1, evicting
    del evicting
    yield "match, touch and hold a leaf", "token", 1, {size: tree_hold(size) for size in leaves}


def _tens(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 10


def memory(contender: Contender, num_tokens: int) -> float:
    """Bytes a cached token: a pool filled with leaves of 1,024 tokens, all memory of the allocator counted."""
    size = contender.page_size
    fresh = sequences_of(1024)
    allocator(contender.spec, size)  # what it imports is no memory of its pages
    gc.collect()
    tracemalloc.start()
    owner = allocator(contender.spec, num_tokens)
    for _ in range(num_tokens // 1024):
        seq = fresh()
        prefill(owner, seq)
        owner.release([seq], Release.FINISH)
        del seq
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    capacity = owner.capacity()
    return used / ((capacity.num_pages - capacity.free) * size)


def node_bytes(num_leaves: int = 20_000) -> float:
    """Bytes of a radix node with its edge of one page, its place under its parent and its queue entry."""
    gc.collect()
    tracemalloc.start()
    tree = tree_of_leaves(num_leaves, 1, 1)()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / sum(1 for _ in tree.nodes())


def build_seconds(contender: Contender, num_pages: int = 1_000_000) -> float:
    """CPU seconds to make an allocator of a million pages."""
    start = time.process_time()
    make_allocator(contender.spec, num_pages=num_pages)
    return time.process_time() - start
