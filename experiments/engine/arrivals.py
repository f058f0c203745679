"""When requests reach the engine: at the trace's times, or, in a session, some time after the turn before ended."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Request

NOMINAL_S_PER_TOKEN = 0.02  # time of a reply token that a trace's gaps between turns are taken to contain


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the trace and its place in it."""

    index: int
    request: Request
    arrival_s: float


class Arrivals:
    """The stream of arrivals on the engine's clock.

    open    every request comes at its own time / speed
    closed  a turn comes when the turn before it has ended and its think time is over. Think time: `think_s`, else the
            delay that the trace states (mooncake, llmservingsim), else its gap between the two less the reply's nominal
            time. A retry (same prompt, same turn) keeps its distance.

    The turn before is the last earlier request of the session with a shorter prompt.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        sessions: Literal["open", "closed"] = "open",
        speed: float = 1.0,
        think_s: float | None = None,
        limit: int | None = None,
    ) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._after: dict[str, list[tuple[float, int, Request]]] = {}
        self.num_requests = 0
        earlier: dict[str, deque[Request]] = {}
        for index, request in enumerate(requests):
            if limit is not None and index >= limit:
                break
            self.num_requests += 1
            before = _turn_before(request, earlier) if sessions == "closed" else None
            if before is None:
                heapq.heappush(self._heap, (request.arrival_s / speed, index, request))
            else:
                pause = _pause_s(before, request, think_s)
                self._after.setdefault(before.request_id, []).append((pause / speed, index, request))

    @property
    def next_s(self) -> float | None:
        """Time of the next known arrival; None when all are in or wait for a turn to end."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[Arrival]:
        """Requests that have arrived by now, in order of time."""
        arrived = []
        while self._heap and self._heap[0][0] <= now_s:
            at, index, request = heapq.heappop(self._heap)
            arrived.append(Arrival(index, request, at))
        return arrived

    def ended(self, request_id: str, now_s: float) -> None:
        """A request ended (or was rejected): the turns after it get their time."""
        for pause, index, request in self._after.pop(request_id, ()):
            heapq.heappush(self._heap, (now_s + pause, index, request))


def priority_of(request: Request) -> int:
    """What order `priority` goes by: the trace's field of that name, 0 where there is none; smaller goes first.

    Raises ValueError for what is no whole number.
    """
    value = request.extra.get("priority", 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0:
        raise ValueError(f"request {request.request_id}: priority: expected a whole number, found {value!r}")
    return int(value)


def _turn_before(request: Request, earlier: dict[str, deque[Request]]) -> Request | None:
    if request.session_id is None:
        return None
    turns = earlier.setdefault(request.session_id, deque(maxlen=64))
    before = next((turn for turn in reversed(turns) if turn.num_prompt_tokens < request.num_prompt_tokens), None)
    turns.append(request)
    return before


def _pause_s(before: Request, request: Request, think_s: float | None) -> float:
    if think_s is not None:
        return think_s
    if "delay_s" in request.extra:
        return max(float(request.extra["delay_s"]), 0.0)
    nominal = before.num_output_tokens * NOMINAL_S_PER_TOKEN
    return max(request.arrival_s - before.arrival_s - nominal, 0.0)
