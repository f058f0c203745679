"""From a finished comparison back to its requests and cells, so that it can be replayed and asked more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvarena.experiments.config import Config, config_from_mapping

if TYPE_CHECKING:
    from kvarena.experiments.pools import Cell
    from kvarena.experiments.results import Result

IN_MEMORY = "in memory"


def config_again(result: Result) -> Config:
    """The config of a comparison. Raises ValueError for another kind of result."""
    if result.manifest["kind"] != "compare":
        raise ValueError(f"expected the result of a comparison, found one of kind {result.manifest['kind']!r}")
    return config_from_mapping(result.config)


def cells_again(result: Result, source: Any = None) -> tuple[Config, list[Cell]]:
    """The config and every cell of a comparison, with the requests loaded anew.

    source  the trace, when it was an object in memory. Raises ValueError when that is needed, and when the requests
            are not those of the result (the trace changed).
    """
    from kvarena.experiments.loading import load_workloads
    from kvarena.experiments.pools import plan

    config = config_again(result)
    if config.workload.trace == IN_MEMORY and source is None:
        raise ValueError("source: this result's trace was an object in memory; pass it again")
    workloads = load_workloads(config, source)
    for workload in workloads:
        rows = result.requests[result.requests["seed"] == workload.seed]
        known = rows["request_id"].iloc[: len(workload.requests)].tolist()
        if known != [request.request_id for request in workload.requests]:
            raise ValueError(f"seed {workload.seed}: the trace's requests are not those of the result")
    return config, plan(config, workloads, config.entries())
