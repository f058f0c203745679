"""Allocator time of a ladder's subsets: measured apart from the counts, side by side in one process.

Each round runs every subset once, one round forwards and the next backwards, so that a machine that grows slower or
faster favours nobody; the time is the process's CPU time inside the allocator's verbs, which other processes do not
enter. A share is that of the medians over rounds; its spread is the range of the shares of single rounds, and where
that holds zero the share is within noise.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvarena.allocators.forwarding import ForwardingAllocator
from kvarena.allocators.interface import Commit, Gate, KVAllocator, Pin, Release, Released, Reservation
from kvarena.allocators.interface import Sequence as KVSequence
from kvarena.experiments.config import config_from_mapping
from kvarena.experiments.foreign import read_json
from kvarena.experiments.ladder_plan import NAME, LadderPlan
from kvarena.experiments.loading import Workload, load_workloads
from kvarena.experiments.pools import plan as plan_pools
from kvarena.experiments.replay import Replay
from kvarena.experiments.sweep import write_whole
from kvarena.experiments.sweep_plan import SweepCell

Times = dict[int, list[list[float]]]  # pool in bytes -> per round, per subset: microseconds a request
Job = tuple[int, int, int, Callable[[], int]]  # pool, subset, requests, and what runs it and returns nanoseconds


class CpuClock(ForwardingAllocator):
    """Passes everything on; `nanoseconds` of the process's CPU time were spent inside."""

    def __init__(self, inner: KVAllocator) -> None:
        super().__init__(inner)
        self.nanoseconds = 0

    def pin(self, seq: KVSequence, gate: Gate | None = None) -> Pin | None:
        start = time.process_time_ns()
        pin = self.inner.pin(seq, gate)
        self.nanoseconds += time.process_time_ns() - start
        return pin

    def reserve(self, wants: Iterable[tuple[KVSequence, int]]) -> list[Reservation] | None:
        start = time.process_time_ns()
        reservations = self.inner.reserve(wants)
        self.nanoseconds += time.process_time_ns() - start
        return reservations

    def commit(self, done: Iterable[tuple[KVSequence, int]]) -> list[Commit]:
        start = time.process_time_ns()
        commits = self.inner.commit(done)
        self.nanoseconds += time.process_time_ns() - start
        return commits

    def release(self, seqs: Iterable[KVSequence], reason: Release) -> Released:
        start = time.process_time_ns()
        released = self.inner.release(seqs, reason)
        self.nanoseconds += time.process_time_ns() - start
        return released

    def evict(self, num_tokens: int) -> list[int]:
        start = time.process_time_ns()
        evicted = self.inner.evict(num_tokens)
        self.nanoseconds += time.process_time_ns() - start
        return evicted


class Pace:
    """Says through `tick` that a round begins, and every `every` seconds how far it is and how long the rest takes."""

    def __init__(self, rounds: int, runs: int, tick: Callable[[str], None] | None, every: float = 15.0) -> None:
        self.rounds, self.runs, self.tick, self.every = rounds, runs, tick, every
        self.begun = 0
        self.start = self.said = time.monotonic()

    def next(self) -> None:
        """Another run begins."""
        turn, place = divmod(self.begun, self.runs)
        now = time.monotonic()
        if self.tick is not None and (place == 0 or now - self.said >= self.every):
            left = (now - self.start) / self.begun * (self.rounds * self.runs - self.begun) if self.begun else None
            about = "" if left is None else f"; about {left:.0f} s left"
            self.tick(f"allocator time: round {turn + 1} of {self.rounds}, run {place + 1} of {self.runs}{about}")
            self.said = now
        self.begun += 1


def measure(plan: LadderPlan, workloads: Sequence[Workload], rounds: int, tick: Callable[[str], None] | None) -> Times:
    """Run every subset `rounds` times. Seeds add up; pools stay apart. Costs as much as the ladder, each round."""
    jobs = [job for mask, cell in enumerate(plan.cells) for job in _jobs(plan, mask, cell, workloads)]
    pools = sorted({pool for pool, _, _, _ in jobs})
    found: Times = {pool: [] for pool in pools}
    pace = Pace(rounds, len(jobs), tick)
    for turn in range(rounds):
        spent = {pool: [[0, 0] for _ in plan.cells] for pool in pools}
        for pool, mask, requests, run in jobs if turn % 2 == 0 else reversed(jobs):
            pace.next()
            spent[pool][mask][0] += _undisturbed(run)
            spent[pool][mask][1] += requests
        for pool in pools:
            found[pool].append([ns / 1e3 / max(count, 1) for ns, count in spent[pool]])
    return found


def medians(times: Sequence[Sequence[float]]) -> list[float]:
    """Per subset, over rounds."""
    return [median(values) for values in zip(*times, strict=True)]


def _undisturbed(run: Callable[[], int]) -> int:
    """Without a garbage collection that an earlier run had brought about."""
    gc.collect()
    gc.disable()
    try:
        return run()
    finally:
        gc.enable()


def _jobs(plan: LadderPlan, mask: int, cell: SweepCell, workloads: Sequence[Workload]) -> Iterable[Job]:
    return _run_jobs(mask, cell, workloads) if plan.kind == "run" else _replay_jobs(plan, mask, cell, workloads)


def _replay_jobs(plan: LadderPlan, mask: int, cell: SweepCell, workloads: Sequence[Workload]) -> Iterable[Job]:
    config = config_from_mapping(cell.config)
    same = cell.config["workload"] == plan.cells[0].config["workload"]
    loaded = list(workloads) if same else load_workloads(config)
    for one in plan_pools(config, loaded, config.entries()):

        def run(one: Any = one) -> int:
            clock = CpuClock(one.entry.build(one.budget.num_pages))
            engine = config.engine.model_copy(update={"steps_every": max(len(one.workload.requests), 1)})
            Replay(clock, engine).run(one.workload.requests)
            return clock.nanoseconds

        yield one.pool_bytes, mask, len(one.workload.requests), run


def _run_jobs(mask: int, cell: SweepCell, workloads: Sequence[Workload]) -> Iterable[Job]:
    from kvarena.experiments.budget import parse_bytes
    from kvarena.experiments.engine.run import record_again

    for workload in workloads:
        for size in cell.config["pool"]["pool"]:

            def run(seed: int = workload.seed, pool: int = parse_bytes(size)) -> int:
                clocks: list[CpuClock] = []

                def watch(inner: KVAllocator, *_: Any) -> KVAllocator:
                    clocks.append(CpuClock(inner))
                    return clocks[-1]

                record_again(cell.config, NAME, pool, seed, watch=watch)
                return clocks[-1].nanoseconds

            yield parse_bytes(size), mask, len(workload.requests), run


# --- kept, so that a second call measures nothing ---

FILE = "rounds.json"


def measured(
    folder: Path, plan: LadderPlan, workloads: Sequence[Workload], rounds: int, tick: Callable[[str], None] | None
) -> Times:
    """`measure`, or what an earlier call measured of the very same cells and left in `folder`."""
    cells = [cell.key for cell in plan.cells]
    if (folder / FILE).is_file():
        kept = read_json(folder / FILE)
        if kept.get("cells") == cells and kept.get("rounds") == rounds:
            return {int(pool): times for pool, times in kept["us_a_request"].items()}
    times = measure(plan, workloads, rounds, tick)
    data = {"rounds": rounds, "cells": cells, "us_a_request": times}
    write_whole(folder / FILE, json.dumps(data) + "\n")
    return times
