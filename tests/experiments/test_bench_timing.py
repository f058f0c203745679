"""Times on the host's clock: calls in turns, both ways round, medians over all rounds."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvarena.experiments.bench import timing


class Clock:
    """A clock that calls move; device work is done when somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.queued = 0.0, 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(timing, "_stay_busy", lambda seconds: None)
        monkeypatch.setattr(timing.torch.cuda, "synchronize", self.wait)

    def wait(self) -> None:
        self.now += self.queued
        self.queued = 0.0

    def call(self, host: float, device: float) -> None:
        self.now += 1e-6 * host
        self.queued += 1e-6 * device


def test_a_call_ends_when_the_device_is_idle_and_its_own_part_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {"short": lambda: clock.call(5, 20), "long": lambda: clock.call(30, 100)}
    rows = {name: timed.row() for name, timed in timing.wall_all(calls).items()}
    assert rows["short"] == {"us": 25.0, "spread": 0.0, "host_us": 5.0}
    assert rows["long"] == {"us": 130.0, "spread": 0.0, "host_us": 30.0}


def test_host_time_leaves_the_device_out_and_is_a_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert timing.host_all({"only": lambda: clock.call(7, 50)})["only"].row()["us"] == 7.0


def test_a_slow_moment_of_the_host_moves_no_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses = Clock(monkeypatch), []
    monkeypatch.setattr(timing, "_stay_busy", pauses.append)
    seen = []

    def call(name: str) -> None:
        seen.append(name)
        clock.call(20 if len(pauses) in (3, 4) else 10, 0)  # two of eight rounds at half speed

    calls = {name: lambda name=name: call(name) for name in "ab"}
    rows = {name: timed.row() for name, timed in timing.host_all(calls).items()}
    assert {name: row["us"] for name, row in rows.items()} == {"a": 10.0, "b": 10.0}
    assert rows["a"]["spread"] > 0
    turns = [name for name, before in zip(seen, [None, *seen], strict=False) if name != before]
    assert turns == list("ababababa")  # forwards, then backwards: who ends a round begins the next
