"""Does an allocator keep the interface's promises? `kv.testing.conformance(MyAllocator)` says so, law by law.

    report = conformance(MyAllocator)            # a class: called with num_pages (and page_size where given)
    report = conformance("sglang")               # or whatever make_allocator takes, but an instance
    print(report); report.raise_if_failed()

Laws: a fresh pool is all free; what is refused changes nothing; a live id cannot come twice; a request longer than
the pool is refused by value; all or nothing over a batch; a small request fits an emptied pool; a fork, where there
is one, shares and never lets a write of one show in the other; random operations
keep every law of `shadow.py`, and `check()`; a release reports what it gave back; events change no decision; the
same seed decides the same; both adapters (where torch is there) hold exactly what the allocator says.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from kvarena.allocators.config import AllocatorSpec, check_constructor, make_allocator
from kvarena.allocators.interface import EventLog, KVAllocator, Release, Sequence, SupportsFork
from kvarena.experiments.random_ops import MAX_DRAFT, MAX_LIVE, RandomOps
from kvarena.experiments.shadow import Actor, Contents, ShadowPool, Violation

Status = Literal["passed", "failed", "skipped"]
Make = Callable[[], KVAllocator]


@dataclass(frozen=True)
class Finding:
    """One law's result; `detail` says what broke it, or why it was skipped."""

    law: str
    status: Status
    detail: str = ""


@dataclass
class Report:
    """Results of all laws on one allocator. Truthy when none failed."""

    allocator: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "failed"]

    def __bool__(self) -> bool:
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the table when a law failed."""
        if self.failures:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        width = max((len(finding.law) for finding in self.findings), default=0)
        rows = [f"  {f.status:7}  {f.law:{width}}  {f.detail}".rstrip() for f in self.findings]
        passed = sum(finding.status == "passed" for finding in self.findings)
        return "\n".join([f"{self.allocator}: {passed} of {len(self.findings)} laws passed", *rows])


def conformance(
    allocator: AllocatorSpec,
    *,
    num_pages: int = 24,
    page_size: int | None = None,
    seeds: Iterable[int] = range(4),
    ops: int = 200,
    **overrides: Any,
) -> Report:
    """Run every law on fresh pools of `num_pages` pages; nothing is raised for a broken law, the report says it.

    allocator  a KVAllocator class, or what `make_allocator` takes; ValueError for an instance, since every law
               needs a pool of its own
    page_size  passed on when given
    seeds, ops random runs, and operations a run
    overrides  passed on to the allocator

    Costs about 1 ms an operation, and seeds x ops x 4 operations.
    """
    if isinstance(allocator, KVAllocator):
        raise ValueError("allocator: expected a class or a spec, found an instance; every law needs a fresh pool")
    if num_pages < 8:
        raise ValueError(f"num_pages: expected at least 8, so that requests can share a pool, found {num_pages}")
    options = overrides if page_size is None else {**overrides, "page_size": page_size}
    if not isinstance(allocator, type):
        make_allocator(allocator, num_pages=num_pages, **options)  # a wrong spec is no broken law
    elif not issubclass(allocator, KVAllocator):
        raise ValueError(f"allocator: expected a subclass of KVAllocator, found {allocator!r}")
    else:
        check_constructor(allocator, num_pages=num_pages, **options)  # nor is a wrong constructor
    chosen = list(seeds)

    def make() -> KVAllocator:
        return make_allocator(allocator, num_pages=num_pages, **options)

    report = Report(getattr(allocator, "__name__", str(allocator)))
    for name, law in _LAWS.items():
        report.findings.append(_try(name, partial(law, make)))
    if _can_fork(make):
        report.findings.append(_try("forks share, writes do not", partial(_forks, make)))
    for name, random_law in _RANDOM_LAWS.items():
        report.findings.append(_try(name, partial(random_law, make, chosen, ops)))
    return report


def _can_fork(make: Make) -> bool:
    try:
        return isinstance(make(), SupportsFork)
    except Exception:  # every law reports it
        return False


class _Skipped(Exception):
    """A law that cannot be tested here, with the reason."""


def _try(name: str, law: Callable[[], None]) -> Finding:
    try:
        law()
    except _Skipped as reason:
        return Finding(name, "skipped", str(reason))
    except Violation as violation:
        return Finding(name, "failed", str(violation))
    except Exception as error:  # any other error of the allocator is a finding too, never a crash of the report
        return Finding(name, "failed", f"raised {type(error).__name__}: {error}")
    return Finding(name, "passed")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def _sequence(name: str, num_tokens: int, first: int = 0) -> Sequence:
    tokens = range(first, first + num_tokens)
    return Sequence(name, tokens, declared_max_tokens=4, oracle_tokens=num_tokens + 4)


def _admit(pool: KVAllocator, seq: Sequence) -> bool:
    if pool.admit(seq) is None:
        return False
    pool.commit([(seq, seq.num_prefill_tokens)])
    return True


def _fill(pool: KVAllocator) -> list[Sequence]:
    """Unlike requests of two pages each until one is refused."""
    live: list[Sequence] = []
    for number in range(pool.num_pages + 1):
        seq = _sequence(f"fill{number}", 2 * pool.page_size, first=number * 2 * pool.page_size)
        if not _admit(pool, seq):
            return live
        live.append(seq)
    raise Violation(f"capacity: {len(live)} requests of 2 pages each fit {pool.num_pages} pages")


# --- laws on one pool ----------------------------------------------------------------------------------------


def _fresh_pool(make: Make) -> None:
    pool = make()
    capacity = pool.capacity()
    _expect(isinstance(pool, KVAllocator), f"expected a KVAllocator, found {type(pool).__name__}")
    _expect(pool.page_size >= 1, f"page_size: expected at least 1, found {pool.page_size}")
    _expect(
        capacity.free == pool.num_pages and not capacity.in_use and not capacity.evictable,
        f"a fresh pool of {pool.num_pages} pages: expected all free, found {capacity}",
    )
    _expect(isinstance(pool.events, EventLog) and not pool.events.enabled, "events: expected an EventLog, off")
    _expect(_admit(pool, _sequence("a", 1)), "a request of one token is refused by an empty pool")
    _expect(not pool.events.rows, "events: rows were recorded although the log is off")


def _refusals(make: Make) -> None:
    pool = make()
    live = _fill(pool)
    _expect(bool(live), "a request of 2 pages is refused by an empty pool")
    actors = {seq.request_id: Actor(seq) for seq in live}
    shadow = ShadowPool(pool, actors)
    before = shadow.state()
    late = _sequence("late", 2 * pool.page_size, first=10**6)
    _expect(pool.admit(late) is None, "an admission that was refused a moment ago was granted, nothing in between")
    shadow.expect_unchanged(before, "refused admission")
    _expect(pool.reset() is False, "reset: expected False while sequences are live")
    shadow.expect_unchanged(before, "refused reset")
    pool.release([live.pop()], Release.FINISH)
    _expect(_admit(pool, late), "a refused request was not admitted after as large a one had gone")


def _too_long(make: Make) -> None:
    pool = make()
    slots = pool.num_pages * pool.page_size
    seq = _sequence("long", slots + 1)
    _expect(pool.admit(seq) is None, f"a request of {slots + 1} tokens was admitted to {slots} slots")
    _expect(pool.capacity().in_use == 0, "a request longer than the pool was refused and left pages in use")


def _live_ids(make: Make) -> None:
    pool = make()
    _expect(_admit(pool, _sequence("a", 3)), "a request of 3 tokens is refused by an empty pool")
    in_use = pool.capacity().in_use
    try:
        pool.pin(_sequence("a", 5))
    except ValueError:
        _expect(pool.capacity().in_use == in_use, "live ids: the refused second 'a' left pages in use")
        return
    raise Violation("live ids: a second request with the id of a live one was taken; expected ValueError")


def _all_or_nothing(make: Make) -> None:
    """A batch of which some would fit: each of many sequences wants a page, the room of one sequence is left."""
    pool = make()
    live = _fill(pool)
    if live:
        pool.release([live.pop()], Release.FINISH)
    shadow = ShadowPool(pool, {seq.request_id: Actor(seq) for seq in live})
    for n in (pool.page_size, 2 * pool.page_size, pool.num_pages * pool.page_size):
        before = shadow.state()
        results = pool.reserve([(seq, n) for seq in live])
        if results is None:
            shadow.expect_nothing_taken(before, "refused batch")
            capacity = pool.capacity()
            room = capacity.free + capacity.evictable
            _expect(room >= before.capacity.free + before.capacity.evictable, f"refused batch: {room} pages are left")
        for seq in live if results is not None else ():
            pages, end = len(pool.page_ids(seq)), seq.num_computed_tokens + n
            _expect(
                pages * pool.page_size >= end, f"granted batch: {seq.request_id} has {pages} pages for {end} tokens"
            )
    _expect(results is None or not live, "a batch in which each sequence needs the whole pool was granted")


def _emptied_pool(make: Make) -> None:
    pool = make()
    for generation in range(3):
        live = _fill(pool)
        _expect(bool(live), f"generation {generation}: a request of 2 pages is refused by a pool without live requests")
        pool.release(live, Release.FINISH)
        capacity = pool.capacity()
        _expect(capacity.in_use == 0, f"leak: {capacity.in_use} pages in use although no sequence is live")
    _expect(pool.reset() and pool.capacity().free == pool.num_pages, "reset: expected True and all pages free")


def _forks(make: Make) -> None:
    """A parent and a child with a partial page: no page more than is copied, each finds its own KV whoever writes or
    ends first, and what finds no room changes nothing."""
    for child_first in (False, True):
        pool = make()
        _expect(isinstance(pool, SupportsFork), "fork: expected every pool to support it, as the first did")
        live: dict[str, Actor] = {}
        shadow, contents = ShadowPool(pool, live), Contents()
        n = 2 * pool.page_size + pool.page_size // 2
        parent = Actor(_sequence("parent", n))
        contents.note(parent)
        _expect(pool.admit(parent.seq) is not None, f"a request of {n} tokens is refused by an empty pool")
        live["parent"] = parent
        shadow.write(parent, shadow.slots_of(parent, n))
        pool.commit([(parent.seq, n)])
        child = Actor(_sequence("child", n))
        contents.note(child)
        _fork_into(pool, shadow, parent, child)
        for number, actor in enumerate((child, parent) if child_first else (parent, child)):
            _write_one(pool, shadow, contents, actor, 10**6 + number)
        _refused_fork(pool, shadow, child)
        for actor in (child, parent) if child_first else (parent, child):
            del live[actor.seq.request_id]
            pool.release([actor.seq], Release.FINISH)
            shadow.verify()
        _expect(pool.capacity().in_use == 0, "fork: pages stay in use although parent and child are gone")


def _fork_into(pool: Any, shadow: ShadowPool, parent: Actor, child: Actor) -> None:
    before = pool.capacity().in_use
    fork = pool.fork(parent.seq, child.seq)
    _expect(fork is not None, "a fork is refused by a pool with room")
    shadow.live["child"] = child  # type: ignore[index]
    shadow.move(fork.copies)
    shadow.verify()
    grown = pool.capacity().in_use - before
    _expect(grown == len(fork.copies), f"fork: {grown} pages more are in use, {len(fork.copies)} are copied")


def _write_one(pool: Any, shadow: ShadowPool, contents: Contents, actor: Actor, token: int) -> None:
    seq, start = actor.seq, actor.seq.num_computed_tokens
    seq.append(token)
    contents.note(actor)
    copies = pool.prepare_write(seq, start, start + 1)
    _expect(
        copies is not None and pool.extend(seq, 1) is not None, "a write after a fork is refused by a pool with room"
    )
    shadow.move(copies)
    shadow.write(actor, shadow.slots_of(actor, 1))
    pool.commit([(seq, start + 1)])
    shadow.verify()


def _refused_fork(pool: Any, shadow: ShadowPool, parent: Actor) -> None:
    """In a full pool a fork is refused whole, or needs no page at once."""
    filled = _fill(pool)
    before, child = shadow.state(), Sequence("late child", parent.seq.token_ids)
    if pool.fork(parent.seq, child) is None:
        shadow.expect_unchanged(before, "refused fork")
    else:
        pool.release([child], Release.ABORT)
    pool.release(filled, Release.FINISH)


_LAWS: dict[str, Callable[[Make], None]] = {
    "a fresh pool is free": _fresh_pool,
    "refusals change nothing": _refusals,
    "too long is refused": _too_long,
    "live ids are unique": _live_ids,
    "batches are all or nothing": _all_or_nothing,
    "everything comes back": _emptied_pool,
}


# --- laws under random operations ----------------------------------------------------------------------------


def _random_operations(make: Make, seeds: list[int], ops: int) -> None:
    for seed in seeds:
        _run(RandomOps(make(), seed), seed, ops)


def _run(driver: RandomOps, seed: int, ops: int) -> RandomOps:
    try:
        driver.run(ops)
    except Violation as violation:
        raise Violation(f"seed {seed}, {driver.last_op}: {violation}") from None
    except Exception as error:
        raise Violation(f"seed {seed}, {driver.last_op}: raised {type(error).__name__}: {error}") from error
    return driver


def _repeatable(make: Make, seeds: list[int], ops: int) -> None:
    for seed in seeds[:2]:
        quiet = RandomOps(make(), seed)
        pool = make()
        pool.events.enabled = True
        logged = RandomOps(pool, seed)
        first, second = (_run(driver, seed, ops).decisions for driver in (quiet, logged))
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if at is not None:
            raise Violation(
                f"seed {seed}: decision {at} was {first[at]} and, repeated with events on, {second[at]}: decisions "
                "depend on chance or on the event log"
            )


def _adapters(make: Make, seeds: list[int], ops: int) -> None:
    if importlib.util.find_spec("torch") is None:
        raise _Skipped("torch is not installed")
    from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter

    for seed in seeds[:2]:
        pool = make()
        # Rows of a windowed design grow past the pool: what the window left behind names the padding page.
        width = 2 * pool.num_pages * pool.page_size + MAX_DRAFT * ops
        adapters = [
            kind(pool, max_requests=MAX_LIVE, max_tokens=width, slots_by="torch")
            for kind in (BlockTableAdapter, ReqToTokenAdapter)
        ]
        _run(RandomOps(pool, seed, adapters), seed, ops)


_RANDOM_LAWS: dict[str, Callable[[Make, list[int], int], None]] = {
    "random operations": _random_operations,
    "decisions are repeatable": _repeatable,
    "adapters hold what is owned": _adapters,
}
