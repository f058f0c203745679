"""What the real packages took, as recorded once, and what ours is asked to reach.

The recorded figures are medians of process CPU time in alternating runs on two shared cores, 2026-11-29: vLLM
0.32.0's KVCacheManager, SGLang 0.5.22's unified radix cache with its Rust core. Single absolute figures vary by up
to 40 % from run to run and with the machine, ratios are steadier. They say how slow the packages were under their
driver and on that machine: driven here, in turns with ours, they are 1.6 to 3 times faster. So a ratio counts against
what this run measured, and the recorded figure stands in only where a package cannot be imported.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "recorded 2026-11-29: vllm 0.32.0, sglang 0.5.22 (Rust core)"


@dataclass(frozen=True, slots=True)
class Mark:
    """A yardstick of one measurement.

    real        the real package's figure in the row's unit; None: it has no such operation
    must, aim   what is asked for: a ratio to `real`, or with `absolute` a figure in the row's unit
    """

    real: float | None = None
    must: float | None = None
    aim: float | None = None
    absolute: bool = False


def times_better(ours: float, real: float, unit: str) -> float:
    """How many times better ours is: of rates the higher one is, of everything else the lower."""
    return ours / real if unit.startswith("requests") else real / ours


def verdict(found: float | None, mark: Mark, unit: str) -> str | None:
    """ "aim", "must" or "no"; None where nothing is asked for. `found` is a ratio, or the figure itself where a figure
    is asked for; None: nothing was found, which meets nothing."""
    if mark.must is None:
        return None
    more_is_better = unit.startswith("requests") or not mark.absolute

    def reached(wanted: float | None) -> bool:
        if wanted is None or found is None:
            return False
        return found >= wanted if more_is_better else found <= wanted

    return "aim" if reached(mark.aim) else "must" if reached(mark.must) else "no"


Key = tuple[str, str, str, int]  # study, name, design (block hashed, block runs, token), page size

MARKS: dict[Key, Mark] = {
    ("replay", "tokens", "block hashed", 16): Mark(2_018, 6, 10),
    ("replay", "tokens", "block runs", 16): Mark(2_018, 20, 34),
    ("replay", "page hashes", "block hashed", 16): Mark(None, 18_000, 25_000, absolute=True),
    ("replay", "page hashes", "block runs", 16): Mark(None, 50_000, 80_000, absolute=True),
    ("replay", "tokens", "token", 1): Mark(862, 40, 68),
    ("replay", "tokens", "token", 16): Mark(530, 60, 110),
    ("op", "look up 4,096 cached tokens", "block hashed", 16): Mark(387, 10, 15),
    ("op", "look up 4,096 cached tokens", "block runs", 16): Mark(387, 20, 100),
    ("op", "look up 32,768 cached tokens", "block hashed", 16): Mark(3_054, 10, 15),
    ("op", "look up 32,768 cached tokens", "block runs", 16): Mark(3_054, 20, 100),
    # 629 and 4,951 us of sha256 and 387 and 3,054 us of look-up, recorded apart
    ("op", "hash and look up 4,096 cached tokens", "block hashed", 16): Mark(1_016),
    ("op", "hash and look up 32,768 cached tokens", "block hashed", 16): Mark(8_005),
    ("op", "free a request of 100 pages", "block hashed", 16): Mark(20.7, 1, None),
    ("op", "free a request of 100 pages", "block runs", 16): Mark(20.7, 8, 15),
    ("op", "decode step of 256", "block hashed", 16): Mark(2_719, 15, 30),
    ("op", "decode step of 256", "block runs", 16): Mark(2_719, 15, 30),
    ("op", "decode step of 256", "token", 1): Mark(225, 8, 15),
    ("op", "decode step of 256", "token", 16): Mark(286, 8, 15),
    ("op", "take 1 page", "token", 1): Mark(9.4),
    ("op", "take 1 page", "token", 16): Mark(36),
    ("op", "match 4,096 over 32 nodes", "token", 1): Mark(32, 1, 1.3),
    ("op", "match 4,096 over 32 nodes", "token", 16): Mark(65, 1, 1.3),
    ("op", "match 32,768 over 256 nodes", "token", 1): Mark(156, 0.7, 1),
    ("op", "match 32,768 over 256 nodes", "token", 16): Mark(338, 0.7, 1),
    ("op", "insert 4,096 new tokens", "token", 1): Mark(499, 20, 50),
    ("op", "insert 4,096 new tokens", "token", 16): Mark(853, 20, 50),
    ("op", "admit 4,096 uncached tokens", "token", 1): Mark(1_468, 20, 50),
    ("op", "admit 4,096 uncached tokens", "token", 16): Mark(2_789, 20, 50),
    ("op", "finish 4,096 + 256 tokens", "token", 1): Mark(775),
    ("op", "finish 4,096 + 256 tokens", "token", 16): Mark(840),
    ("op", "evict 4,096 tokens of 1,000 leaves", "token", 1): Mark(1_808, 8, 15),
    ("op", "evict 4,096 tokens of 20,000 leaves", "token", 1): Mark(2_713, 6, 10),
    ("op", "evict one leaf of 20,000", "token", 1): Mark(363),
    ("op", "evict one leaf of 20,000", "token", 16): Mark(556),
    ("memory", "bytes a cached token", "block runs", 16): Mark(286 / 16, 14, 5, absolute=True),
    ("memory", "bytes a cached token", "block hashed", 16): Mark(286 / 16, 14, 5, absolute=True),
    ("memory", "bytes a cached token", "token", 1): Mark(34, 16, 12, absolute=True),
    ("memory", "bytes a cached token", "token", 16): Mark(30, 8, 4, absolute=True),
    ("memory", "bytes a radix node", "token", 1): Mark(None, 600, None, absolute=True),
    ("memory", "seconds to build 1,000,000 pages", "block hashed", 16): Mark(None, 1, None, absolute=True),
    ("memory", "seconds to build 1,000,000 pages", "block runs", 16): Mark(None, 1, None, absolute=True),
    ("memory", "seconds to build 1,000,000 pages", "token", 1): Mark(None, 1, None, absolute=True),
    ("memory", "seconds to build 1,000,000 pages", "token", 16): Mark(None, 1, None, absolute=True),
    ("slowdown", "request of 64 pages, pool full", "block hashed", 16): Mark(None, 2, None, absolute=True),
    ("slowdown", "request of 64 pages, pool full", "block runs", 16): Mark(None, 1.5, None, absolute=True),
    ("slowdown", "request of 64 pages, pool full", "token", 1): Mark(None, 2, None, absolute=True),
    ("slowdown", "request of 64 pages, pool full", "token", 16): Mark(None, 2, None, absolute=True),
    ("slowdown", "evict the oldest of all leaves", "token", 1): Mark(None, 2, None, absolute=True),
    ("slowdown", "match, touch and hold a leaf", "token", 1): Mark(None, 2, None, absolute=True),
}
