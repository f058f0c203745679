"""Device time by CUDA graphs: capture once, replay alternately, take medians.

A graph holds many calls, so launch gaps are as short as in a captured model; events around one replay, divided by
the calls in it, give the time of a call. Competitors are replayed in turn, forwards then backwards (A-B-B-A), so a
drift of clocks meets all of them alike. A pause before a replay lets the power budget recover.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timed:
    """Times of one competitor: microseconds a call, one number a replay."""

    samples: tuple[float, ...]

    @property
    def us(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Middle half of the samples, as a share of the median: smaller differences are ties."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.us


@dataclass(frozen=True)
class Graph:
    """A captured CUDA graph and the number of calls in it."""

    graph: torch.cuda.CUDAGraph
    calls: int

    def replay_us(self) -> float:
        """Microseconds a call of one replay, by events; waits for the device."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / self.calls


def capture(calls: Sequence[Callable[[], object]], times: int = 1) -> Graph:
    """Warm `calls` up, then capture all of them, `times` over, into one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            for call in calls:
                call()
    torch.cuda.synchronize()
    return Graph(graph, times * len(calls))


def time_all(graphs: Mapping[str, Graph], replays: int = 7, pause_s: float = 0.0) -> dict[str, Timed]:
    """Replay each graph once to warm, then `replays` times, alternating the order; samples by name."""
    names = list(graphs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        graphs[name].replay_us()
    for turn in range(replays):
        for name in names if turn % 2 == 0 else reversed(names):
            if pause_s:
                time.sleep(pause_s)
            samples[name].append(graphs[name].replay_us())
    return {name: Timed(tuple(values)) for name, values in samples.items()}


def host_us(call: Callable[[], object], repeats: int = 200) -> float:
    """Host time of an eager call in microseconds, the device idle again before each block of ten: median of blocks."""
    for _ in range(5):
        call()
    blocks = []
    for _ in range(max(1, repeats // 10)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        blocks.append((time.perf_counter() - start) / 10)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(blocks)
