"""Workloads that need no download, each from a seed.

A workload is one small module: `Shape`, a frozen dataclass of its parameters, and `make(seed, shape) -> Trace`. NAMES
maps its name to the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from itertools import islice
from typing import Any

from kvarena.experiments.traces.base import Request, Trace

_MODULES = (
    "chat",
    "mooncake_like",
    "generated_shared_prefix",
    "prefix_repetition",
    "agents",
    "few_shot",
    "tree_of_thought",
    "long_document_qa",
    "no_reuse",
    "hit_rate",
)

NAMES: dict[str, str] = {name: f"kvarena.experiments.workloads.{name}" for name in _MODULES}


def make(name: str, *, seed: int = 0, speed: float = 1.0, limit: int | None = None, **parameters: Any) -> Trace:
    """The built-in workload of that name. Raises ValueError for an unknown name or parameter."""
    module = _module(name)
    allowed = defaults(name)
    for parameter in parameters:
        if parameter not in allowed:
            raise ValueError(
                f"workload {name!r}: unknown parameter {parameter!r}: expected one of seed, {', '.join(allowed)}"
            )
    return _adjusted(module.make(seed, module.Shape(**parameters)), speed, limit)


def defaults(name: str) -> dict[str, Any]:
    """Parameters of a workload, seed aside, with their default values."""
    return {entry.name: entry.default for entry in fields(_module(name).Shape)}


def about(name: str) -> str:
    """One line on the workload: the first sentence of its module."""
    text = (_module(name).__doc__ or "").strip().split("\n\n")[0]
    return " ".join(text.split()).split(": ", 1)[-1]


def _module(name: str) -> Any:
    if name not in NAMES:
        raise ValueError(f"unknown workload {name!r}: expected one of {', '.join(NAMES)}")
    return import_module(NAMES[name])


def _adjusted(trace: Trace, speed: float, limit: int | None) -> Trace:
    if speed == 1.0 and limit is None:
        return trace

    def read() -> Iterator[Request]:
        for request in islice(trace.read(), limit):
            yield replace(request, arrival_s=request.arrival_s / speed)

    count = trace.num_requests if limit is None else min(limit, trace.num_requests or limit)
    return replace(trace, read=read, num_requests=count, source={**trace.source, "speed": speed, "limit": limit})


def trace_of(name: str, requests: list[Request], parameters: dict[str, Any]) -> Trace:
    """A Trace over requests that are held in arrival order; what it can show is measured, not stated."""
    from kvarena.experiments.traces.visible import VisibleMeasure

    measure = VisibleMeasure()
    for request in requests:
        measure.feed(request, request.arrival_s)
    return Trace(
        name=name,
        visible=measure.visible(requests[0].grain),
        read=lambda: iter(requests),
        num_requests=len(requests),
        source={"workload": name, **parameters},
    )
