"""Why a law of `laws.py` is off, computed from the same lengths: what each part of them adds to the miss.

A reason is given where the lengths explain the whole of it, which is checked: what the allocators lost is recomputed
from the lengths, and where that does not give the measured number the reason stays empty, and `verify result` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Request

Ints = np.ndarray[Any, np.dtype[np.int64]]
CHANCE = 2.0  # standard errors that a mean of few lengths may be off by chance
SAME = 1e-6  # points or slots: sums of floats in another order


@dataclass(frozen=True)
class Ends:
    """How lengths end in a page: how many, their mean remainder, and how far that is from (S - 1) / 2."""

    count: int
    mean: float
    half: float

    @property
    def error(self) -> float:
        """Standard error of the mean of so many remainders that end anywhere, tokens."""
        return math.sqrt(((2 * self.half + 1) ** 2 - 1) / 12 / self.count)

    @property
    def by_chance(self) -> bool:
        return abs(self.mean - self.half) <= CHANCE * self.error

    def words(self) -> str:
        """Too few for a mean, or not even, with the numbers."""
        told = f"{_lengths(self.count)} leave {self.mean:.2f} tokens on average, {abs(self.mean - self.half):.2f} off"
        if self.by_chance:
            return f"{told}: so few are known to {CHANCE * self.error:.2f} only"
        return (
            f"{told}, {abs(self.mean - self.half) / self.error:.1f} standard errors: they do not end evenly in a page"
        )


def ends_of(lengths: Ints, size: int) -> Ends:
    """Each of the given lengths once; at least one."""
    return Ends(len(lengths), float((lengths % size).mean()), (size - 1) / 2)


def remainder_why(lengths: Ints, times: Ints, size: int) -> str:
    """Of distinct lengths, and how many requests know each: why their mean remainder is not (S - 1) / 2."""
    if len(lengths) == 1:
        return _one(lengths, size)
    ends = ends_of(lengths, size)
    if ends.by_chance:
        return ends.words()
    parts = [_group("several requests know", lengths[times > 1], size), _group("one knows", lengths[times == 1], size)]
    odd = int((lengths % 2).sum())
    return f"{ends.words()} ({'; '.join(part for part in parts if part)}; {odd:,} of {len(lengths):,} are odd)"


def _one(lengths: Ints, size: int) -> str:
    return f"one length is all there is, of {lengths[0]:,} tokens: it leaves {lengths[0] % size}"


def _lengths(count: int) -> str:
    return f"{count:,} length{'' if count == 1 else 's'}"


def _group(who: str, lengths: Ints, size: int) -> str:
    return f"the {len(lengths):,} that {who} leave {(lengths % size).mean():.2f}" if len(lengths) else ""


def rounding_why(known: Ints, prompt_tokens: int, size: int, lost: float) -> str:
    """Why the law by known lengths is off. `lost`: measured, percent of the prompt tokens. Empty where lengths do not
    give it."""
    if not _lengths_give(known, prompt_tokens, size, lost):
        return ""
    lengths, times = np.unique(known, return_counts=True)
    once = lengths[(times == 1) & (lengths >= size)]
    if len(once) < 2:
        return f"of those that one request knows, {_one(once, size)}" if len(once) else ""
    return f"of those that one request knows, {ends_of(once, size).words()}"


def textbook_why(known: Ints, prompt_tokens: int, size: int, lost: float) -> str:
    """Why the textbook form is off: the miss in percent of the prompt tokens, split over what the form leaves out."""
    if not _lengths_give(known, prompt_tokens, size, lost):
        return ""
    lengths, which, times = np.unique(known, return_inverse=True, return_counts=True)
    whole, several = known >= size, times[which] > 1
    apart = 100 * (known % size - np.where(whole, (size - 1) / 2, 0)) / prompt_tokens
    few, once = int(((times > 1) & (lengths >= size)).sum()), int(((times == 1) & (lengths >= size)).sum())
    parts = {
        f"{_lengths(few)} that several requests know": apart[whole & several].sum(),
        f"{_lengths(once)} that one knows": apart[whole & ~several].sum(),
        "prefixes below a page, which it takes for none": apart[~whole].sum(),
    }
    told = sorted(
        ((float(points), name) for name, points in parts.items() if abs(points) >= 0.005),
        key=lambda part: -abs(part[0]),
    )
    return f"of {apart.sum():+.2f} points: " + ", ".join(f"{points:+.2f} from {name}" for points, name in told)


def _lengths_give(known: Ints, prompt_tokens: int, size: int, lost: float) -> bool:
    return abs(100 * float((known % size).sum()) / prompt_tokens - lost) <= SAME


def tail_why(lengths: Ints, size: int, measured: float) -> str:
    """Why tails are not (S - 1) / 2. lengths: of each live request at each step (`live_lengths`). Empty where they do
    not give `measured`."""
    if not len(lengths) or abs(float((-lengths % size).mean()) - measured) > SAME:
        return ""
    distinct = np.unique(lengths)
    told = f"live requests have {_lengths(len(distinct))} over {len(lengths):,} of their steps"
    told = f"{told}, at a page's end in {(lengths % size == 0).mean():.0%}"
    return f"{told}; each length once leaves {(-distinct % size).mean():.2f} slots"


def live_lengths(requests: Sequence[Request], live: int) -> Ints:
    """Tokens with KV of each live request at each step of a replay with replies in which everything fits
    (`replay.py`): a request takes 1 / `live` of its reply a step, and its very last token is never written."""
    return np.fromiter((length for step in _steps(requests, live) for length in step), np.int64)


def _steps(requests: Sequence[Request], live: int) -> Iterator[list[int]]:
    from kvarena.experiments.replay import precedes

    held: list[tuple[Request, int]] = []  # and the tokens of its reply that are there
    for request in requests:
        if request.session_id is not None:
            held = [(one, grown) for one, grown in held if not precedes(one, request)]
        held = [*held[1 if len(held) >= live else 0 :], (request, 0)]
        held = [(one, min(grown + -(-_reply(one) // live), _reply(one))) for one, grown in held]
        yield [one.num_prompt_tokens + grown - (0 < grown == _reply(one)) for one, grown in held]


def _reply(request: Request) -> int:
    reply = request.reply_ids()
    return 0 if reply is None else len(reply)
