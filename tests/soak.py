"""`make soak`: a million random verbs for each allocator beside its slow model, all state compared after every one.

    python tests/soak.py [--ops 1000000] [--kind block] [--seed 0]

Prints throughput, resident memory after warm-up and at the end, and the violations found. Exit code 1 for any
violation, and when memory grew: an allocator lives for `LIFE` verbs, so what leaks in one shows in the sum of many.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT)]

from support.duet_acts import RandomActs, random_duet  # noqa: E402

KINDS = ("block", "token", "general", "contiguous", "exact")
LIFE = 5000
WARM_SHARE = 0.2
GROWTH_BYTES = 24 * 2**20  # of resident memory after warm-up: an interpreter's own arenas move by about 10 MiB


@dataclass(frozen=True)
class Report:
    """What a kind's soak found. Bytes are resident memory; `violations` are (seed, verb, text)."""

    kind: str
    ops: int
    seconds: float
    designs: int
    warm_bytes: int
    end_bytes: int
    violations: list[tuple[int, int, str]]

    @property
    def grew(self) -> bool:
        return self.end_bytes - self.warm_bytes > GROWTH_BYTES

    def __str__(self) -> str:
        text = (
            f"{self.kind:<10} {self.ops:>9,} verbs, {self.designs} designs, {self.ops / self.seconds:>7,.0f} verbs/s, "
        )
        text += f"memory {self.warm_bytes / 2**20:.1f} MiB after warm-up, {self.end_bytes / 2**20:.1f} MiB at the end"
        text += " (GREW)" if self.grew else ""
        return f"{text}, {len(self.violations)} violations"


def resident_bytes() -> int:
    """Resident memory now; 0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(kind: str, ops: int, first_seed: int) -> Report:
    """`ops` verbs over many designs, each for `LIFE` verbs. A violation ends its design's life, not the soak."""
    done = designs = warm = 0
    violations: list[tuple[int, int, str]] = []
    started = time.process_time()
    while done < ops:
        seed = first_seed + designs
        count, fault = live(kind, seed, min(LIFE, ops - done))
        done, designs = done + max(count, 1), designs + 1
        if fault:
            violations.append((seed, count, fault))
        if not warm and done >= WARM_SHARE * ops:
            warm = resident_bytes()
    return Report(kind, done, time.process_time() - started, designs, warm, resident_bytes(), violations)


def live(kind: str, seed: int, ops: int) -> tuple[int, str]:
    """One allocator's life: verbs carried out, and what went wrong ("": nothing). Every second pool is a roomy one."""
    rng, roomy = random.Random(seed), seed % 2 == 1
    duet = random_duet(rng, kind, roomy)
    acts = RandomActs(duet, rng, pages=8 if roomy else 3)
    try:
        for _ in range(ops):
            acts.step()
        duet.drain()
    except Exception as error:
        return duet.acts, f"{type(error).__name__}: {error}"[:400]
    return duet.acts, ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=1_000_000, help="verbs for each allocator")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of the first design")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(arguments)
    kinds = given.kind or KINDS
    with ProcessPoolExecutor(given.jobs, max_tasks_per_child=1) as pool:
        reports = []
        for report in pool.map(soak, kinds, [given.ops] * len(kinds), [given.seed] * len(kinds)):
            print(report, flush=True)
            reports.append(report)
    total: Counter[str] = Counter()
    for report in reports:
        for seed, verb, fault in report.violations[:10]:
            print(f"  {report.kind}, seed {seed}, verb {verb}: {fault}")
        total["verbs"] += report.ops
        total["violations"] += len(report.violations)
    print(f"{total['verbs']:,} verbs, {total['violations']} violations")
    return 1 if total["violations"] or any(report.grew for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
