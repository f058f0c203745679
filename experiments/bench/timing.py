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
from typing import TypeVar

import torch

K = TypeVar("K")


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


@dataclass(frozen=True)
class HostTimed:
    """Times on the host's clock, microseconds, one number a sample.

    whole   from the call until the device is idle (of `wall_all`; else as `own`)
    own     from the call until it returns
    """

    whole: tuple[float, ...]
    own: tuple[float, ...]

    def row(self) -> dict[str, float]:
        """us (median of `whole`), its spread (middle half over the median), host_us (median of `own`)."""
        low, middle, high = statistics.quantiles(self.whole, n=4)
        host = statistics.median(self.own)
        return {"us": round(middle, 1), "spread": round((high - low) / middle, 4), "host_us": round(host, 1)}


def _rounds(
    calls: Mapping[K, Callable[[], object]], rounds: int, sample: Callable[[Callable[[], object]], None]
) -> None:
    """Samples of all calls in each round, forwards and backwards, rounds a fifth of a second apart.

    A host has slow moments, up to twice as slow, that last longer than all samples of a round. The host is kept busy
    between rounds, as an engine keeps it: a virtual core that sleeps comes back slow. It sleeps once, before the first:
    torch's CPU threads, if something woke them, spin for a while.
    """
    time.sleep(0.35)
    for number in range(rounds):
        if number:
            _stay_busy(0.2)
        for name in calls if number % 2 == 0 else reversed(list(calls)):
            sample(calls[name])


def _stay_busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def host_all(calls: Mapping[K, Callable[[], object]], rounds: int = 8, blocks: int = 4) -> dict[K, HostTimed]:
    """Host time of eager calls; a sample is the mean of ten calls in a row, the device idle before the first."""
    samples: dict[Callable[[], object], list[float]] = {call: [] for call in calls.values()}

    def sample(call: Callable[[], object]) -> None:
        for _ in range(3):  # caches are cold behind the calls before
            call()
        for _ in range(blocks):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                call()
            samples[call].append(1e5 * (time.perf_counter() - start))
        torch.cuda.synchronize()

    _rounds(calls, rounds, sample)
    return {name: HostTimed(tuple(samples[call]), tuple(samples[call])) for name, call in calls.items()}


def wall_all(calls: Mapping[K, Callable[[], object]], rounds: int = 8, repeats: int = 8) -> dict[K, HostTimed]:
    """Host clock from the call until the device is idle, and until the call returns."""
    samples: dict[Callable[[], object], list[tuple[float, float]]] = {call: [] for call in calls.values()}

    def sample(call: Callable[[], object]) -> None:
        for repeat in range(repeats + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            returned = time.perf_counter()
            torch.cuda.synchronize()
            if repeat:  # caches are cold behind the calls before
                samples[call].append((1e6 * (time.perf_counter() - start), 1e6 * (returned - start)))

    _rounds(calls, rounds, sample)
    return {
        name: HostTimed(tuple(whole for whole, _ in samples[call]), tuple(own for _, own in samples[call]))
        for name, call in calls.items()
    }
