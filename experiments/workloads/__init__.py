"""Workloads that need no download, each from a seed.

A workload is one small module: `Shape`, a frozen dataclass of its parameters, and `make(seed, shape) -> Trace`. NAMES
maps its name to the module.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

from kvarena.experiments.traces.base import Request, Trace, adjusted

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
    "recording",
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
    return adjusted(module.make(seed, module.Shape(**parameters)), speed, limit)


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
