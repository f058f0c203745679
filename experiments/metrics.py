"""Every measure, defined once. Words are those of the glossary; nothing here runs anything.

token hit rate     sum of hit tokens / sum of prompt tokens at arrival, over first admissions. Admissions after a
                   preemption are counted apart: finding one's own pages again is no reuse. Tries that were refused
                   do not count, rejected requests neither.
request hit rate   share of first admissions with at least one hit token
last half          the same over the second half of the requests, when the cache is warm
utilisation        pages owned by live requests / num_pages (the padding page is on neither side)
slot utilisation   tokens in those pages / slots of the pool; shared pages count once
fragmentation      1 - tokens in owned pages / (owned pages x page_size), shared pages counted once
external fragmentation  1 - longest free run / free pages, for designs that need runs
tail waste         free slots in the last page of each live request
reservation        other slots of owned pages without a token: reserved runs, holes
duplicates         pages whose content another page of the cache holds too
evicted            pages whose cached content was dropped for room
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    from kvarena.allocators.interface import KVAllocator
    from kvarena.experiments.engine import rows as engine_rows
    from kvarena.experiments.replay import RequestRow, StepRow


TIME_COLUMNS = ("verb", "calls", "total_ms", "mean_us", "p50_us", "p90_us", "p99_us", "max_us")


@dataclass
class HitCounter:
    """Counts admissions, first ones and re-admissions apart.

    >>> counter = HitCounter()
    >>> counter.admitted("r0", 9, 0); counter.admitted("r0", 9, 8); counter.admitted("r1", 9, 8)
    >>> counter.token_hit_rate, counter.readmitted_hit_tokens
    (0.4444444444444444, 8)
    """

    requests: int = 0
    requests_with_hit: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    readmitted_prompt_tokens: int = 0
    readmitted_hit_tokens: int = 0

    def __post_init__(self) -> None:
        self.first_hits: dict[str, int] = {}

    def admitted(self, request_id: str, prompt_tokens: int, hit_tokens: int) -> None:
        """One admission that went through. The first of an id is what the hit rate is about."""
        if request_id in self.first_hits:
            self.readmitted_prompt_tokens += prompt_tokens
            self.readmitted_hit_tokens += hit_tokens
            return
        self.first_hits[request_id] = hit_tokens
        self.requests += 1
        self.requests_with_hit += hit_tokens > 0
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens

    @property
    def token_hit_rate(self) -> float | None:
        return ratio(self.hit_tokens, self.prompt_tokens)

    @property
    def request_hit_rate(self) -> float | None:
        return ratio(self.requests_with_hit, self.requests)


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None when there is nothing to divide by (never 0, never 1)."""
    return part / whole if whole else None


def utilisation(in_use: int, num_pages: int) -> float | None:
    """Pages owned by live requests, of all pages."""
    return ratio(in_use, num_pages)


def slot_utilisation(in_use: int, wasted_slots: int, num_pages: int, page_size: int) -> float | None:
    """Slots that hold a live request's token, of all slots."""
    return ratio(in_use * page_size - wasted_slots, num_pages * page_size)


def fragmentation(in_use: int, wasted_slots: int, page_size: int) -> float | None:
    """Slots of owned pages that hold no token; None when no page is owned."""
    return ratio(wasted_slots, in_use * page_size)


@dataclass(frozen=True)
class Misses:
    """Where the prompt tokens of one request went; the five add up to the prompt.

    hit         served from the cache
    never_seen  no earlier request began so
    last_token  known, but one token has to be computed
    rounding    known, but not a whole page
    lost        a whole page of known tokens that was not found: evicted, or not published yet
    """

    hit: int
    never_seen: int
    last_token: int
    rounding: int
    lost: int


def misses(prompt_tokens: int, prefix_tokens: int, hit_tokens: int, page_size: int, last_token_rule: bool) -> Misses:
    """Split a prompt by what became of its tokens.

    >>> misses(prompt_tokens=40, prefix_tokens=40, hit_tokens=16, page_size=16, last_token_rule=True)
    Misses(hit=16, never_seen=0, last_token=1, rounding=7, lost=16)
    """
    usable = min(prefix_tokens, prompt_tokens - 1 if last_token_rule else prompt_tokens)
    rounding = usable % page_size
    return Misses(
        hit=hit_tokens,
        never_seen=prompt_tokens - prefix_tokens,
        last_token=prefix_tokens - usable,
        rounding=rounding,
        lost=usable - rounding - hit_tokens,
    )


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean; None of nothing. The sum is exact, since what `sum` gives differs between Python 3.11 and 3.12,
    and files must not."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sorted values do not exceed (nearest rank).

    >>> percentile([1, 2, 3, 4], 0.5), percentile([1, 2, 3, 4], 0.99)
    (2, 4)
    """
    rank = max(1, -(-int(len(ordered) * share * 1_000_000) // 1_000_000))
    return ordered[min(rank, len(ordered)) - 1]


def count_hits(rows: Iterable[RequestRow] | Iterable[engine_rows.RequestRow]) -> HitCounter:
    """The counter over the admitted requests, each row one: its first admission alone."""
    counter = HitCounter()
    for row in rows:
        if row.admitted:
            counter.admitted(f"{row.index}", row.num_prompt_tokens, row.hit_tokens)
    return counter


def summarise_requests(rows: Sequence[RequestRow]) -> dict[str, float | int | None]:
    """The request columns of a summary row."""
    whole, half = count_hits(rows), count_hits(row for row in rows if row.index >= len(rows) // 2)
    counts = asdict(whole)
    return {
        "token_hit_rate": whole.token_hit_rate,
        "token_hit_rate_last_half": half.token_hit_rate,
        "request_hit_rate": whole.request_hit_rate,
        "admitted": counts.pop("requests"),
        "rejected": sum(not row.admitted for row in rows),
        "refusals": sum(row.refusals for row in rows),
        **counts,
        "reply_tokens": sum(row.reply_tokens for row in rows),
        "cut_output_tokens": sum(row.cut_output_tokens for row in rows),
        "evicted_pages": sum(row.evicted_pages for row in rows),
        "duplicate_pages_seen": sum(row.duplicate_pages for row in rows),
    }


def pool_fields(allocator: KVAllocator, lengths: Sequence[int], in_flight: int = 0) -> dict[str, int]:
    """The fields of a step's row that say how the pool stands.

    lengths    tokens with KV of each live request, those that a launched step is writing included
    in_flight  how many such there are: their slots are no waste, and most designs count them as empty until the commit
    """
    capacity, size = allocator.capacity(), allocator.page_size
    tails = sum(-n % size for n in lengths)
    return {
        "free": capacity.free,
        "evictable": capacity.evictable,
        "in_use": capacity.in_use,
        "shared": capacity.shared,
        "duplicates": capacity.duplicates,
        "wasted_slots": max(capacity.wasted_slots - in_flight, min(capacity.wasted_slots, tails)),
        "tail_slots": tails,
        "live_tokens": sum(lengths),
    }


def summarise_steps(
    rows: Sequence[StepRow] | Sequence[engine_rows.StepRow], num_pages: int, page_size: int, token_bytes: int
) -> dict[str, float | int | None]:
    """The pool columns of a summary row: means over the recorded steps, waste in bytes."""
    page_bytes = page_size * token_bytes
    used = [row for row in rows if row.in_use]
    # An allocator that leaves wasted_slots at 0 does not count waste; its tails are known all the same.
    counted = all(row.wasted_slots >= row.tail_slots for row in rows)
    return {
        "utilisation": mean(row.in_use / num_pages for row in rows),
        "peak_in_use_pages": max((row.in_use for row in rows), default=0),
        "slot_utilisation": mean((r.in_use * page_size - r.wasted_slots) / (num_pages * page_size) for r in rows)
        if counted
        else None,
        "fragmentation": mean(row.wasted_slots / (row.in_use * page_size) for row in used) if counted else None,
        "external_fragmentation": mean(
            row.external_fragmentation for row in rows if row.external_fragmentation is not None
        ),
        "tail_waste_bytes": mean(row.tail_slots * token_bytes for row in rows),
        "reservation_bytes": mean((row.wasted_slots - row.tail_slots) * token_bytes for row in rows)
        if counted
        else None,
        "duplicate_bytes": mean(row.duplicates * page_bytes for row in rows),
        "free_share": mean(row.free / num_pages for row in rows),
        "evictable_share": mean(row.evictable / num_pages for row in rows),
    }


def summarise_times(nanoseconds: dict[str, array[int]]) -> list[dict[str, float | int | str]]:
    """One row a verb ("step": all verbs of a step together): calls, sum, mean and tails in microseconds. Measured
    times, so never in summary.csv."""
    rows: list[dict[str, float | int | str]] = []
    for verb, values in nanoseconds.items():
        if not values:
            continue
        ordered = sorted(values)
        rows.append(
            {
                "verb": verb,
                "calls": len(ordered),
                "total_ms": sum(ordered) / 1e6,
                "mean_us": sum(ordered) / len(ordered) / 1e3,
                "p50_us": percentile(ordered, 0.5) / 1e3,
                "p90_us": percentile(ordered, 0.9) / 1e3,
                "p99_us": percentile(ordered, 0.99) / 1e3,
                "max_us": ordered[-1] / 1e3,
            }
        )
    return rows
