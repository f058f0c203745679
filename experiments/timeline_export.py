"""A timeline as JSON in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    process   track            what
    requests  one a lane       arrival to end; inside, the wait for the first token and the decode (engine runs)
    engine    steps            one slice a step, with batch and new tokens
    pool      pages            counters: in use, evictable, free
    pool      requests         counters: running, waiting
    pool      evictions        an instant each, with the reason and whose operation it was

Times are microseconds of the timeline's clock.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarena.experiments.timeline import Span, Timeline

REQUESTS, ENGINE, POOL = 1, 2, 3
STEPS, EVICTIONS = 1, 1
_US = 1e6
_PHASES = {"X", "i", "C", "M"}


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The whole timeline as one JSON object: traceEvents, displayTimeUnit, otherData."""
    events = [*_names(timeline), *_requests(timeline), *_steps(timeline), *_evictions(timeline)]
    reasons = Counter(mark.reason for mark in timeline.evictions)
    about = {
        "trace": timeline.title,
        "seed": timeline.seed,
        "allocator": timeline.label,
        "page_size": timeline.page_size,
        "num_pages": timeline.num_pages,
        "pool_bytes": timeline.pool_bytes,
        "clock": "simulated" if timeline.kind == "run" else "one arrival is 1 ms",
        "evictions_by_reason": dict(reasons),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace_events(timeline: Timeline, path: Path) -> int:
    """Write the JSON file (.gz packs it), whole or not at all; returns how many events it has."""
    from kvarena.experiments.traces.write import write_lines

    found = trace_events(timeline)
    check_trace_events(found)
    head = {key: value for key, value in found.items() if key != "traceEvents"}
    lines = [json.dumps(event, separators=(",", ":"), allow_nan=False) for event in found["traceEvents"]]
    body = [f"{line}," for line in lines[:-1]] + lines[-1:]
    start = json.dumps(head, allow_nan=False)[:-1] + ',"traceEvents":['
    write_lines([start, *body, "]}"], path)
    return len(lines)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    processes = {REQUESTS: "requests", ENGINE: f"engine: {timeline.label}", POOL: f"pool of {timeline.num_pages} pages"}
    for pid, name in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": STEPS, "args": {"name": "steps"}}
    yield {"ph": "M", "name": "thread_name", "pid": POOL, "tid": EVICTIONS, "args": {"name": "evictions"}}


def _requests(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Slices on lanes: a request takes the first lane that is free when it arrives, so slices never overlap."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = 0
    for span in sorted(timeline.spans, key=lambda span: span.arrival_s):
        while busy and busy[0][0] <= span.arrival_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            lanes += 1
            heapq.heappush(free, lanes)
        lane = heapq.heappop(free)
        heapq.heappush(busy, (span.end_s, lane))
        yield from _slices(span, lane)
    for lane in range(1, lanes + 1):
        yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": lane, "args": {"name": f"lane {lane}"}}


def _slices(span: Span, lane: int) -> Iterator[dict[str, Any]]:
    args = {
        "prompt tokens": span.num_prompt_tokens,
        "hit tokens": span.hit_tokens,
        "output tokens": span.output_tokens,
        "preemptions": span.preemptions,
        "end": span.end,
    }
    yield _slice(span.request_id, REQUESTS, lane, span.arrival_s, span.end_s, "request", args)
    if span.first_token_s is not None:
        yield _slice("to first token", REQUESTS, lane, span.arrival_s, span.first_token_s, "phase", {})
        yield _slice("decode", REQUESTS, lane, span.first_token_s, span.end_s, "phase", {})


def _slice(
    name: str, pid: int, tid: int, start_s: float, end_s: float, kind: str, args: Mapping[str, Any]
) -> dict[str, Any]:
    # The end is rounded, not the length: slices that meet in time meet in the file.
    start, end = _us(start_s), _us(end_s)
    about = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": start, "dur": max(end - start, 0)}
    return {**about, "args": dict(args)}


def _us(seconds: float) -> int:
    return round(seconds * _US)


def _steps(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for step in timeline.steps:
        args = {"step": step.step, "new tokens": step.new_tokens}
        name = f"{step.batch} requests" if timeline.kind == "run" else "arrival"
        yield _slice(name, ENGINE, STEPS, step.start_s, step.end_s, "step", args)
        at = _us(step.end_s)
        pages = {"in use": step.in_use, "evictable": step.evictable, "free": step.free}
        yield {"ph": "C", "name": "pages", "pid": POOL, "tid": 0, "ts": at, "args": pages}
        load = {"running": step.running, "waiting": step.waiting}
        yield {"ph": "C", "name": "requests", "pid": POOL, "tid": 0, "ts": at, "args": load}


def _evictions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for mark in timeline.evictions:
        args = {
            "reason": mark.reason,
            "by": mark.request_id or "",
            "pages": mark.num_pages,
            "first pages": list(mark.first_pages),
            "step": mark.step,
        }
        head = {"ph": "i", "name": f"evict {mark.num_pages}", "cat": "eviction", "s": "t"}
        yield {**head, "pid": POOL, "tid": EVICTIONS, "ts": _us(mark.time_s), "args": args}


# --- the format's rules ---


def check_trace_events(found: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first event that breaks a rule of the format: phase, names, times, lengths, scopes,
    numbers of counters, and slices of one track that overlap without one lying inside the other. O(n log n)."""
    events = found.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError(f"traceEvents: expected a list, found {type(events).__name__}")
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, event in enumerate(events):
        _check_event(event, f"traceEvents[{place}]")
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for track, slices in tracks.items():
        _check_nested(track, slices)


def _check_event(event: Mapping[str, Any], where: str) -> None:
    phase = event.get("ph")
    if phase not in _PHASES:
        raise ValueError(f"{where}: ph: expected one of {', '.join(sorted(_PHASES))}, found {phase!r}")
    for name, kind in (("name", str), ("pid", int), ("tid", int), ("args", dict)):
        if not isinstance(event.get(name), kind):
            raise ValueError(f"{where}: {name}: expected {kind.__name__}, found {event.get(name)!r}")
    times = {"X": ("ts", "dur"), "M": ()}.get(phase, ("ts",))
    for name in times:
        if not _is_number(event.get(name)) or event[name] < 0:
            raise ValueError(f"{where}: {name}: expected a number from 0, found {event.get(name)!r}")
    if phase == "i" and event.get("s") not in ("g", "p", "t"):
        raise ValueError(f"{where}: s: expected g, p or t, found {event.get('s')!r}")
    if phase == "C" and not (event["args"] and all(_is_number(value) for value in event["args"].values())):
        raise ValueError(f"{where}: args: expected numbers, found {event['args']!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_nested(track: tuple[int, int], slices: Sequence[tuple[int, int]]) -> None:
    stack: list[int] = []
    for start, end in sorted(slices, key=lambda pair: (pair[0], -pair[1])):
        while stack and stack[-1] <= start:
            stack.pop()
        if stack and end > stack[-1]:
            raise ValueError(f"track {track}: slice [{start}, {end}) crosses the end of another at {stack[-1]}")
        stack.append(end)
