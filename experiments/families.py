"""Another draw of the same trace: its sessions or prefix families, drawn anew with replacement.

Requests of a trace are not independent: those of a session, or of a family with one prefix, belong together. A resample
draws whole groups, as many as there are. A group drawn twice must not hit its own copy, which would be reuse that the
trace does not have. So each copy branches off where the group leaves what it shares with other groups: at the first
token of its own every request of the copy has a fresh one. All that groups share (a system prompt) stays shared.

    trace     A: s s a a a    B: s s b b       (s: shared by groups; each letter a token)
    resample  A: s s a a a    A': s s x a a    (x: a token that occurs nowhere else)

Groups keep their times. A copy starts when one of the groups that were not drawn would have: there are as many, so
every start of the trace is taken once, and load is what it was. Where the trace's clock ticks so coarsely that requests
arrive together, each moves by a random part of a tick, so that no result rests on the order of a file's lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from kvarena.experiments.traces.base import MAX_TOKEN

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Request, Trace
    from numpy.typing import NDArray

MOST_OF_A_FAMILY = 0.02
"""A larger share of the requests than this is not one family while its prefixes still part."""
FEWEST_GROUPS = 20
"""With fewer groups a resample says little about the trace."""


@dataclass(frozen=True)
class Groups:
    """What is drawn.

    unit    "session", or "family": requests with a common prefix, cut so that none has over 2 % of the requests
    label   int64 [requests], the group of each, 0 .. count-1 in order of first arrival
    depth   int64 [requests], ids at the head of each path that occur in other groups too
    """

    unit: str
    label: NDArray[np.int64]
    depth: NDArray[np.int64]

    @property
    def count(self) -> int:
        """How many groups."""
        return int(self.label.max()) + 1 if self.label.size else 0


def group(requests: Sequence[Request]) -> Groups:
    """The groups of a trace: sessions where all requests have one, else prefix families.

    O(ids log requests). Raises ValueError when there are fewer than 20 groups: a resample would say little.
    """
    paths = [_path(request) for request in requests]
    keys = [_key(request, path) for request, path in zip(requests, paths, strict=True)]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    common = _common(requests, paths, order)
    sessions = [request.session_id for request in requests]
    if sessions and None not in sessions:
        unit, label = "session", _dense(sessions)
    else:
        unit, label = "family", _dense(_families(common, order).tolist())
    groups = Groups(unit, label, _depths(label, order, common))
    if groups.count < FEWEST_GROUPS:
        raise ValueError(
            f"resample: the trace has {groups.count} {unit} groups; at least {FEWEST_GROUPS} are needed, or a "
            "resample says little about it"
        )
    return groups


def resample(requests: Sequence[Request], draw: int, groups: Groups | None = None) -> list[Request]:
    """The `draw`-th resample, >= 1; the same number gives the same requests. Sorted by arrival.

    Copies have `~k` after their request and session ids. Reply ids of hashed traces are dropped: no replay uses them.
    Raises ValueError as `group` does.
    """
    if draw < 1:
        raise ValueError(f"resample: expected a number from 1, found {draw}")
    groups = groups or group(requests)
    rng = np.random.default_rng([draw, groups.count])
    times = np.bincount(rng.integers(groups.count, size=groups.count), minlength=groups.count)
    first = 1 + max(int(_path(request).max(initial=0)) for request in requests)
    if first + groups.count > MAX_TOKEN:
        raise ValueError(f"resample: the trace has ids up to {first - 1}, which leaves no fresh ones below 2^31")
    starts = np.full(groups.count, np.inf)
    np.minimum.at(starts, groups.label, [request.arrival_s for request in requests])
    left_over = iter(rng.permutation(np.flatnonzero(times == 0)).tolist())
    slots = {(label, copy): next(left_over) for label in range(groups.count) for copy in range(1, times[label])}
    out = []
    for index, request in enumerate(requests):
        label = int(groups.label[index])
        out += [request] if times[label] else []
        for copy in range(1, times[label]):
            slot = slots[label, copy]
            later = request.arrival_s - starts[label] + starts[slot]
            out.append(_copied(request, copy, int(groups.depth[index]), first + slot, float(later)))
    tick = _tick(np.array([request.arrival_s for request in requests]))
    return _dense_ids(_jittered(out, tick, rng))


def groups_of(trace: Trace, limit: int | None = None) -> tuple[list[Request], Groups]:
    """The first `limit` requests and their groups. Raises ValueError as `group` does, and for a trace of lengths, whose
    requests share nothing: its ids are made up."""
    if not trace.visible.reuse:
        raise ValueError(f"resample: {trace.name} has lengths only, so its requests share nothing and form no groups")
    requests = list(trace)[:limit]
    return requests, group(requests)


def resampled(trace: Trace, draw: int, limit: int | None = None) -> Trace:
    """A trace of the `draw`-th resample of the first `limit` requests. Raises ValueError as `groups_of` does."""
    requests, groups = groups_of(trace, limit)
    made = resample(requests, draw, groups)
    note = f"resample {draw} of its {groups.count} {groups.unit} groups"
    return replace(
        trace,
        read=lambda: iter(made),
        num_requests=len(made),
        source={**trace.source, "resample": draw},
        warnings=[*trace.warnings, note],
    )


# --- grouping ---


def _path(request: Request) -> NDArray[np.int32]:
    """Ids from the root on: prompt and reply, or the hashes of the prompt."""
    if request.hash_ids is not None:
        return request.hash_ids
    if request.token_ids is None:
        raise ValueError(f"resample: request {request.request_id} has lengths only, so no prefix can be kept")
    if request.output_ids is None:
        return request.token_ids
    return np.concatenate([request.token_ids, request.output_ids])


def _key(request: Request, path: NDArray[np.int32]) -> tuple[str, bytes]:
    return repr(request.namespace), path.astype(">i4").tobytes()


def _common(requests: Sequence[Request], paths: list[NDArray[np.int32]], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids that each path in sorted order shares with the one before it, int64 [requests]; 0 for the first."""
    common = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        before, here = order[place - 1], order[place]
        if requests[before].namespace == requests[here].namespace:
            common[place] = _shared(paths[before], paths[here])
    return common


def _shared(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    size = min(a.size, b.size)
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


def _families(common: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """A label for each request. A range of sorted requests parts where it has least in common, until it is small."""
    label = np.zeros(len(order), np.int64)
    most = max(1, int(MOST_OF_A_FAMILY * len(order)))
    waiting, number = [(0, len(order))], 0
    while waiting:
        start, end = waiting.pop()
        if end - start <= most:
            label[order[start:end]] = number
            number += 1
            continue
        inner = common[start + 1 : end]
        cuts = start + 1 + np.flatnonzero(inner == inner.min())
        edges = [start, *cuts.tolist(), end]
        waiting += pairwise(edges)
    return label


def _dense(labels: Sequence[Any]) -> NDArray[np.int64]:
    """Labels as 0, 1, ... in order of first use."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)


def _depths(label: NDArray[np.int64], order: NDArray[np.int64], common: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids that each path shares with the nearest request of another group, on either side in sorted order."""
    depth = np.zeros(len(order), np.int64)
    for places in (range(1, len(order)), range(len(order) - 2, -1, -1)):
        step = 1 if places.step > 0 else -1
        shared = 0
        for place in places:
            link = int(common[place] if step > 0 else common[place + 1])
            same = label[order[place]] == label[order[place - step]]
            shared = min(link, shared) if same else link
            depth[order[place]] = max(depth[order[place]], shared)
    return depth


# --- rebuilding ---


def _copied(request: Request, copy: int, depth: int, token: int, arrival_s: float) -> Request:
    """The request as one of another group: its first id beyond what groups share is a fresh one."""
    changed: dict[str, Any] = {"request_id": f"{request.request_id}~{copy}", "arrival_s": arrival_s}
    if request.session_id is not None:
        changed["session_id"] = f"{request.session_id}~{copy}"
    prompt = request.num_prompt_tokens
    if request.hash_ids is not None:
        changed["hash_ids"] = _with_token(request.hash_ids, depth, token)
    elif request.token_ids is not None and depth < prompt:
        changed["token_ids"] = _with_token(request.token_ids, depth, token)
    elif request.output_ids is not None:
        changed["output_ids"] = _with_token(request.output_ids, depth - prompt, token)
    return replace(request, **changed)


def _with_token(ids: NDArray[np.int32], place: int, token: int) -> NDArray[np.int32]:
    if place >= ids.size:
        return ids
    out = ids.copy()
    out[place] = token
    return out


def _jittered(requests: list[Request], tick: float, rng: np.random.Generator) -> list[Request]:
    """Sorted by arrival, each moved by a random part of the clock's tick, seconds."""
    times = np.array([request.arrival_s for request in requests])
    times = times + rng.uniform(0, tick, times.size)
    return [replace(requests[i], arrival_s=float(times[i])) for i in np.argsort(times, kind="stable")]


def _tick(times: NDArray[np.float64]) -> float:
    """The step of a clock that gives several requests one arrival, seconds; 0 when none do. Resolved to 1 us."""
    distinct = np.unique(np.round(times * 1e6).astype(np.int64))
    if distinct.size < 2 or distinct.size == times.size:
        return 0.0
    return float(np.gcd.reduce(np.diff(distinct))) / 1e6


def _dense_ids(requests: list[Request]) -> list[Request]:
    """Hash ids as 0, 1, ... in order of first use, as readers give them. Token ids stay."""
    numbers: dict[int, int] = {}
    out = []
    for request in requests:
        if request.hash_ids is None:
            out.append(request)
            continue
        ids = [numbers.setdefault(i, len(numbers)) for i in request.hash_ids.tolist()]
        out.append(replace(request, hash_ids=np.array(ids, np.int32), output_ids=None))
    return out
