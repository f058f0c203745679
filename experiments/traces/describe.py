"""What a trace is and what it can show: counts, quantiles, reuse, and the ceilings of an infinite cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from kvarena.experiments.ceilings import IdLengths, PrefixTree, ceiling_tokens
from kvarena.experiments.metrics import percentile
from kvarena.experiments.traces.base import Request, Trace, Visible
from kvarena.experiments.traces.visible import IN_FLIGHT_S, ChainCheck, VisibleMeasure

SCHEMA_VERSION = 1
PAGE_SIZES = (1, 16, 64, 256)
LEVELS = (50, 90, 99)


def describe(trace: Trace) -> dict[str, Any]:
    """What `kvarena trace describe` prints, as plain values. One pass; memory grows with the distinct prefixes."""
    survey = _Survey(trace.visible)
    for request in trace:
        survey.add(request)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": trace.name,
        "source": _plain(trace.source),
        "warnings": list(trace.warnings),
        "visible": asdict(trace.visible),
        "cannot_show": cannot_show(trace.visible),
        **survey.result(),
    }


def cannot_show(visible: Visible) -> list[str]:
    """The factors that are "not observable here", each with its reason."""
    found = []
    if not visible.reuse:
        found.append("reuse: the source has lengths only, every prompt gets ids of its own and no prefix can hit")
    if visible.grain > 1:
        found.append(f"page rounding below {visible.grain} tokens: one id stands for {visible.grain} tokens")
    if visible.outputs == "none":
        found.append("hits on generated tokens: replies have no ids (report none and unreachable as a band)")
    if visible.outputs == "unreachable":
        found.append("hits on generated tokens: replies have ids, but no later prompt contains any of them")
    if not visible.publish_time:
        found.append(f"the time of publishing: no prefix is used again within {IN_FLIGHT_S:g} s of its first arrival")
    if not visible.sessions:
        found.append("sessions: requests are not grouped, so think time and session affinity cannot be replayed")
    return found


class _Survey:
    """Gathers the figures of `describe`, request by request."""

    def __init__(self, visible: Visible) -> None:
        self._visible = visible
        self._measure = VisibleMeasure(exhaustive=True)
        self._chains = ChainCheck()
        self._ages: list[float] = []
        self._prompts = PrefixTree()
        self._lengths = IdLengths()
        self._with_replies = PrefixTree()
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._arrivals: list[float] = []
        self._known: dict[str, list[int]] = {"prompts": [], "prompts_and_replies": []}
        self._sessions: dict[str, int] = {}
        self._uses = np.zeros(0, np.int64)
        self._namespaces: set[Any] = set()

    def add(self, request: Request) -> None:
        self._measure.feed(request, request.arrival_s)
        self._inputs.append(request.num_prompt_tokens)
        self._outputs.append(request.num_output_tokens)
        self._arrivals.append(request.arrival_s)
        self._namespaces.add(request.namespace)
        if request.session_id is not None:
            self._sessions[request.session_id] = self._sessions.get(request.session_id, 0) + 1
        if self._visible.reuse:
            self._add_ids(request)

    def _add_ids(self, request: Request) -> None:
        index = len(self._inputs) - 1
        self._chains.feed(request)
        ids = request.prompt_ids() if request.hash_ids is None else request.hash_ids
        known, source = self._prompts.add(ids, index, request.namespace)
        if request.grain > 1:
            known = self._lengths.tokens(ids, known, request.num_prompt_tokens, request.grain, request.namespace)
            self._lengths.add(ids, request.num_prompt_tokens, request.grain, request.namespace)
        if source >= 0:
            self._ages.append(request.arrival_s - self._arrivals[source])
        self._known["prompts"].append(min(known, request.num_prompt_tokens))
        if request.hash_ids is not None:
            self._count_uses(request.hash_ids)
        replies = request.reply_ids()
        if self._visible.outputs == "recorded" and request.grain == 1:
            known = self._with_replies.add(ids, index, request.namespace)[0]
            self._known["prompts_and_replies"].append(known)
            if replies is not None:
                # The last token's KV is never written.
                self._with_replies.add(np.concatenate([ids, replies[:-1]]), index, request.namespace)

    def _count_uses(self, ids: Any) -> None:
        grown = int(ids.max()) + 1 - len(self._uses)
        if grown > 0:
            self._uses = np.concatenate([self._uses, np.zeros(max(grown, len(self._uses)), np.int64)])
        self._uses[ids] += 1

    def result(self) -> dict[str, Any]:
        span = self._arrivals[-1]
        return {
            "requests": len(self._inputs),
            "span_s": span,
            "rate_per_s": len(self._inputs) / span if span > 0 else None,
            "input_tokens": _quantiles(self._inputs),
            "output_tokens": _quantiles(self._outputs),
            "sessions": _sessions(self._sessions),
            "namespaces": len(self._namespaces),
            "ids": self._ids(),
            "replies_with_ids": self._measure.replies,
            "replies_that_return": self._measure.returned,
            "reuse": self._reuse(),
            "ceilings": list(self._ceilings()),
        }

    def _ids(self) -> str:
        """What ids are: none, token, chained (each behind one prefix) or content (some behind several)."""
        if not self._visible.reuse:
            return "none"
        if not len(self._uses):
            return "token"
        return "content" if self._chains.unchained else "chained"

    def _reuse(self) -> dict[str, Any] | None:
        if not self._visible.reuse:
            return None
        grain = self._visible.grain
        found: dict[str, Any] = {
            "distinct_prefix_tokens": self._prompts.num_ids * grain,
            "requests_that_share": sum(known > 0 for known in self._known["prompts"]),
        }
        if self._ages:
            ages = sorted(self._ages)
            found |= {f"prefix_age_s_p{level}": float(percentile(ages, level / 100)) for level in LEVELS}
        uses = self._uses[self._uses > 0]
        if len(uses):
            found |= {
                "distinct_ids": len(uses),
                "id_accesses": int(uses.sum()),
                "ids_used_once_share": float((uses == 1).mean()),
                "id_hit_rate": 1.0 - len(uses) / int(uses.sum()),
            }
        return found

    def _ceilings(self) -> Iterator[dict[str, Any]]:
        """Token hit rate of an infinite cache, last-token rule off, whole run and last half of the requests."""
        half = len(self._inputs) // 2
        grain = self._visible.grain
        sizes = [size for size in PAGE_SIZES if size > 1 or grain == 1]
        for published, known in self._known.items():
            for size in sorted({*sizes, grain}) if known else ():
                served = [
                    ceiling_tokens(prefix, length, size, False)
                    for prefix, length in zip(known, self._inputs, strict=True)
                ]
                if size == grain:  # the trace's own unit: its partial last id counts with its real tokens
                    served = known
                yield {
                    "page_size": size,
                    "published": published,
                    "token_hit_rate": sum(served) / sum(self._inputs),
                    "token_hit_rate_last_half": sum(served[half:]) / sum(self._inputs[half:]),
                }


def _quantiles(values: list[int]) -> dict[str, float]:
    """Percentiles are those of all tables: nearest rank, a value that is there."""
    found = {"total": float(sum(values)), "mean": float(np.mean(values)), "min": float(min(values))}
    ordered = sorted(values)
    found |= {f"p{level}": float(percentile(ordered, level / 100)) for level in LEVELS}
    return found | {"max": float(max(values))}


def _sessions(sizes: dict[str, int]) -> dict[str, float] | None:
    if not sizes:
        return None
    return {"count": len(sizes), "mean_requests": float(np.mean(list(sizes.values()))), "max": max(sizes.values())}


def _plain(source: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in source.items() if value is not None}
