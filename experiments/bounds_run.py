"""Bounds beside an engine run.

The requests are taken in the order in which they were first admitted, each with the reply that it generated, as one
stream through a pool of as many pages without overlap. So all of them are marks and none is a bound (`proven` False):
in the run a reply enters the cache later than its request's admission, requests that overlap hold their pages at once,
and who is thrown back computes its prompt twice. Hits are those of first admissions, as in the summary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd
from kvarena.experiments.bounds import RATES, bound_rates
from kvarena.experiments.ceilings import measure_reuse
from kvarena.experiments.explain_run import as_run

if TYPE_CHECKING:
    from kvarena.experiments.results import Result
    from kvarena.experiments.traces.base import Request


def bounds_of_run(result: Result) -> pd.DataFrame:
    """`bounds` of an engine run: a row a seed, pool and allocator."""
    from kvarena.experiments.engine.run import cells_of

    rows: list[dict[str, Any]] = []
    for entry, workload, pool, num_pages in cells_of(result.config):
        keys = {"seed": workload.seed, "pool_bytes": pool, "allocator": entry.name}
        table = result.requests
        for name, value in keys.items():
            table = table[table[name] == value]
        if table["request_id"].tolist() != [request.request_id for request in workload.requests]:
            raise ValueError(f"seed {workload.seed}: the trace's requests are not those of the result")
        ahead = entry.serves_last_tokens(int(result.config["engine"]["result_lag"]))
        admitted = _as_admitted(as_run(workload.requests), table, ahead)
        known = measure_reuse(admitted, replies=True).prefix_tokens
        hits = int(table.loc[table["admitted"], "hit_tokens"].sum())
        rates = bound_rates(admitted, known, hits, entry, num_pages, replies=True, seed=workload.seed)
        labels = {"label": entry.label, "page_size": entry.page_size, "num_pages": num_pages}
        rows.append({**keys, **labels, **rates, "proven": False})
    return pd.DataFrame(rows).astype(dict.fromkeys(RATES, float))


def _as_admitted(requests: list[Request], table: pd.DataFrame, ahead: bool) -> list[Request]:
    """Admitted requests in the order of their first admission (those of one step in order of arrival), each with as
    much of its reply as it generated; `ahead`: and one more, so that the last one counts as written."""
    rows = table[table["admitted"]].sort_values(["admitted_s", "index"], kind="stable")
    return [
        _cut(requests[index], count + ahead) for index, count in zip(rows["index"], rows["output_tokens"], strict=True)
    ]


def _cut(request: Request, output_tokens: int) -> Request:
    part = "output_ids" if request.grain == 1 else "reply_tokens"
    reply = getattr(request, part)[:output_tokens]
    return replace(request, num_output_tokens=output_tokens, **{part: reply})
