"""The first request on which two allocators differ, and why.

The reason is arithmetic where it can be (rounding, last token), and evidence where it cannot: the run is replayed up
to that request with events on, and whoever evicted the missing page is named.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.allocators.interface import EventKind
from kvarena.experiments.metrics import Misses, misses
from kvarena.experiments.replay import Replay
from kvarena.experiments.why import hit_grain

if TYPE_CHECKING:
    from kvarena.experiments.config import Config, EngineConfig
    from kvarena.experiments.loading import Workload
    from kvarena.experiments.pools import Cell
    from kvarena.experiments.results import Result
    from kvarena.experiments.traces.base import Request


@dataclass(frozen=True)
class Side:
    """One allocator's answer. `evidence` says what became of the missing page; "" when nothing is missing."""

    allocator: str
    label: str
    page_size: int
    admitted: bool
    hit_tokens: int
    ceiling_tokens: int
    evidence: str = ""


@dataclass(frozen=True)
class Divergence:
    """The first request that two allocators answer differently.

    prefix_tokens  first tokens of its prompt that an earlier request had
    source         the request that brought the last of these first; None when there is none
    """

    seed: int
    pool_bytes: int
    index: int
    request_id: str
    num_prompt_tokens: int
    prefix_tokens: int
    source: str | None
    sides: tuple[Side, Side]
    reason: str

    def __str__(self) -> str:
        return self.reason

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Divergence:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**data, "sides": tuple(Side(**side) for side in data["sides"])})


def first_divergence(result: Result, a: str | None, b: str | None, pool: int | None) -> Divergence | None:
    """See `Result.first_divergence`."""
    names = _pair(result, a, b)
    if names is None:
        return None
    recorded = result.manifest.get("divergence")
    if recorded is not None and pool in (None, recorded["pool_bytes"]):
        found = Divergence.from_dict(recorded)
        if [side.allocator for side in found.sides] == list(names):
            return found
    size = result.reference_pool if pool is None else pool
    if size not in result.pools:
        raise ValueError(f"pool: expected one of {result.pools} bytes, found {size}")
    return find_divergence(result, names, size)


def _pair(result: Result, a: str | None, b: str | None) -> tuple[str, str] | None:
    for name in (a, b):
        if name is not None and name not in result.allocators:
            raise ValueError(f"allocator {name!r} is not in this result; it has {', '.join(result.allocators)}")
    entries = {entry["name"]: entry for entry in result.manifest["allocators"]}
    names = [name for name, entry in entries.items() if entry["shares_prefixes"]]
    first = a or next((name for name in names if name != b), None)
    if first is None:
        return None
    others = [name for name in names if name != first]
    # Another design says more than another page size of the same one.
    others.sort(key=lambda name: entries[name]["kind"] == entries[first]["kind"])
    second = b or next(iter(others), None)
    return None if second is None else (first, second)


def find_divergence(result: Result, names: tuple[str, str], pool: int) -> Divergence | None:
    """The first differing request of the first seed at `pool`, without evidence."""
    seed = int(result.summary["seed"].iloc[0])
    rows = result.requests
    rows = rows[(rows["seed"] == seed) & (rows["pool_bytes"] == pool)]
    a, b = (rows[rows["allocator"] == name].reset_index(drop=True) for name in names)
    differs = (a["hit_tokens"] != b["hit_tokens"]) | (a["admitted"] != b["admitted"])
    if not differs.any():
        return None
    at = differs.tolist().index(True)
    row, source = a.iloc[at], int(a["source"].iloc[at])
    sides = tuple(_side(result, name, frame.iloc[at]) for name, frame in zip(names, (a, b), strict=True))
    head = {
        "seed": seed,
        "pool_bytes": int(pool),
        "index": int(row["index"]),
        "request_id": str(row["request_id"]),
        "num_prompt_tokens": int(row["num_prompt_tokens"]),
        "prefix_tokens": int(row["prefix_tokens"]),
        "source": None if source < 0 else str(a["request_id"].iloc[source]),
    }
    return _with_reason(result, head, (sides[0], sides[1]))


def _with_reason(result: Result, head: dict[str, Any], sides: tuple[Side, Side]) -> Divergence:
    rules = {one["name"]: (one["last_token_rule"], hit_grain(result, one)) for one in result.manifest["allocators"]}
    return Divergence(**head, sides=sides, reason=_reason(head, sides, rules))


def _side(result: Result, name: str, row: pd.Series) -> Side:
    entry = next(entry for entry in result.manifest["allocators"] if entry["name"] == name)
    return Side(
        allocator=name,
        label=entry["label"],
        page_size=entry["page_size"],
        admitted=bool(row["admitted"]),
        hit_tokens=int(row["hit_tokens"]),
        ceiling_tokens=int(row["ceiling_tokens"]),
    )


def _reason(head: dict[str, Any], sides: tuple[Side, Side], rules: dict[str, tuple[bool, int]]) -> str:
    known = head["prefix_tokens"]
    shared = f"{known:,} of its {head['num_prompt_tokens']:,} prompt tokens begin like {head['source']}"
    if head["source"] is None:
        shared = f"no earlier request begins like its {head['num_prompt_tokens']:,} prompt tokens"
    lines = [f"request {head['request_id']} (number {head['index'] + 1} in order of arrival): {shared}."]
    for side in sides:
        last_token, grain = rules[side.allocator]
        split = misses(head["num_prompt_tokens"], known, side.hit_tokens, grain, last_token)
        lines.append(f"{side.label}: {_answer(side, split, grain)}")
    return "\n".join(lines)


def _answer(side: Side, split: Misses, grain: int) -> str:
    if not side.admitted:
        return "rejected it."
    causes = []
    if split.last_token:
        causes.append("the last token is always computed")
    if split.rounding:
        what = (
            f"page of {side.page_size}" if grain == side.page_size else f"unit of {grain} in a page of {side.page_size}"
        )
        causes.append(f"{split.rounding} tokens do not fill a {what}")
    if split.lost:
        gone = f"{split.lost:,} tokens were not there" if split.lost > 0 else f"{-split.lost:,} more than known"
        causes.append(f"{gone}{f' ({side.evidence})' if side.evidence else ''}")
    return f"{side.hit_tokens:,} tokens hit{': ' if causes else ''}{'; '.join(causes)}."


# --- evidence, while the requests are at hand ---


def record_divergence(result: Result, config: Config, workload: Workload, cells: list[Cell]) -> dict[str, Any] | None:
    """The first divergence of a fresh run with its evidence, as plain data. The reference pool is asked first."""
    names = _pair(result, None, None)
    if names is None:
        return None
    for pool in [result.reference_pool, *result.pools]:
        found = find_divergence(result, names, pool)
        if found is not None:
            row = asdict(_with_evidence(result, found, config, workload, cells))
            return {**row, "sides": list(row["sides"])}
    return None


def _with_evidence(
    result: Result, found: Divergence, config: Config, workload: Workload, cells: list[Cell]
) -> Divergence:
    sides = []
    for side in found.sides:
        if side.admitted and side.hit_tokens < side.ceiling_tokens:
            cell = next(
                c
                for c in cells
                if (c.workload.seed, c.pool_bytes, c.entry.name) == (found.seed, found.pool_bytes, side.allocator)
            )
            text = fate_of_page(cell, config.engine, workload.requests, found.index, side.hit_tokens)
            side = Side(**{**asdict(side), "evidence": text})
        sides.append(side)
    head = {name: value for name, value in asdict(found).items() if name not in ("sides", "reason")}
    return _with_reason(result, head, (sides[0], sides[1]))


def fate_of_page(cell: Cell, engine: EngineConfig, requests: ListLike[Request], index: int, position: int) -> str:
    """What became of the page that held token `position` of request `index`'s prefix, before that request came."""
    holder = last_holder(requests, index, position, replies=engine.outputs == "replay")
    if holder is None:
        return "no earlier request had it"
    name = requests[holder].request_id
    size = cell.entry.page_size
    page, fate = None, ""
    replay = Replay(cell.entry.build(cell.budget.num_pages), engine)
    replay.allocator.events.enabled = True
    for step in range(index):
        replay.step(step, requests[step])
        pages = replay.pages_of(name) if step >= holder else None
        if pages is not None:
            page, fate = (pages[position // size] if position // size < len(pages) else None), ""
        for event in replay.allocator.events.drain():
            if event.kind is EventKind.EVICT and pages is None and page in event.page_ids and not fate:
                fate = f"page {page} with tokens {position // size * size:,} and on, last used by {name}, was evicted "
                fate += f"to make room for {event.request_id}"
    if fate or page is None:
        return fate or f"{name} had not written it"
    return f"{name} still ran and had not published it" if replay.pages_of(name) else f"{name} left it unpublished"


def last_holder(requests: ListLike[Request], index: int, position: int, *, replies: bool) -> int | None:
    """The latest request before `index` whose tokens agree with its prompt up to and including `position`."""
    import numpy as np

    wanted = np.asarray(requests[index].prompt_ids())[: position + 1]
    for earlier in range(index - 1, -1, -1):
        request = requests[earlier]
        ids = np.asarray(request.prompt_ids())[: position + 1]
        reply = request.reply_ids() if replies else None
        if reply is not None and len(ids) < len(wanted):
            ids = np.concatenate([ids, reply[:-1][: len(wanted) - len(ids)]])
        if request.namespace == requests[index].namespace and np.array_equal(ids, wanted):
            return earlier
    return None
