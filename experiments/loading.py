"""From a config's [workload] to the requests of each seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvarena.experiments.ceilings import Reuse, measure_reuse
from kvarena.experiments.config import Config, ConfigError
from kvarena.experiments.replay import longest_tokens

if TYPE_CHECKING:
    from kvarena.experiments.traces.base import Request, Trace, Visible


@dataclass
class Workload:
    """The requests of one seed, as they are replayed, and what reuse they have.

    tokens_per_id  tokens that one replayed token stands for (1, or the trace's grain when ids are replayed)
    """

    seed: int
    trace: Trace
    requests: list[Request]
    reuse: Reuse
    tokens_per_id: int
    longest: int
    longest_id: str

    @property
    def working_set_tokens(self) -> int:
        """Tokens of all distinct prefixes."""
        return self.reuse.distinct_tokens * self.tokens_per_id


def load_workloads(config: Config, source: Any = None) -> list[Workload]:
    """The requests of each seed. A trace without randomness has one run, whatever the seeds."""
    seeds = config.workload.seed_list if is_seeded(config, source) else config.workload.seed_list[:1]
    return [_load(config, seed, source) for seed in seeds]


def is_seeded(config: Config, source: Any = None) -> bool:
    """Whether the workload draws from a seed: a built-in one, or a recording by its path."""
    from kvarena.experiments import workloads
    from kvarena.experiments.traces import is_recording

    named = config.workload.trace if source is None else source
    return (isinstance(named, str) and named in workloads.NAMES) or is_recording(named)


def trace_of(config: Config, seed: int, source: Any = None) -> Trace:
    """The trace that a config names, its first `requests`, as it is: not resampled, with the replies that it has."""
    from kvarena.experiments.traces import load_trace

    asked = config.workload
    options = {**asked.options, "seed": seed} if is_seeded(config, source) else dict(asked.options)
    return load_trace(asked.trace if source is None else source, asked.format, limit=asked.requests, **options)


def _load(config: Config, seed: int, source: Any) -> Workload:
    from kvarena.experiments.families import resampled

    asked, trace = config.workload, trace_of(config, seed, source)
    if asked.resample is not None:
        trace = resampled(trace, asked.resample, asked.requests)
    requests = list(trace)
    requests = requests if asked.resample is not None else requests[: asked.requests]
    if not requests:
        raise ConfigError("workload.trace", f"{trace.name} has no requests")
    tokens_per_id = 1
    if asked.unit == "ids":
        requests, tokens_per_id = as_ids(requests), trace.visible.grain
    requests, visible = _assume(config, requests, trace.visible, tokens_per_id)
    trace = replace(trace, visible=visible)
    replied = any(request.reply_ids() is not None for request in requests)
    if config.engine.outputs == "replay" and trace.visible.grain > 1 and not replied:
        raise ConfigError(
            "engine.outputs",
            f"'replay' needs token ids; one id of {trace.name} stands for {trace.visible.grain} tokens",
        )
    longest, name = longest_tokens(requests, config.engine.outputs)
    reuse = measure_reuse(requests, replies=config.engine.outputs == "replay")
    return Workload(seed, trace, requests, reuse, tokens_per_id, longest, name)


def _assume(
    config: Config, requests: list[Request], visible: Visible, tokens_per_id: int
) -> tuple[list[Request], Visible]:
    """The requests under what the config assumes of replies."""
    from kvarena.experiments.traces.outputs import with_outputs

    if config.workload.replies == "band" and config.engine.outputs == "replay":
        raise ConfigError(
            "workload.replies",
            "'band' is for a comparison of prompts (outputs = 'none'), which it replays once more with replies",
        )
    try:
        return with_outputs(requests, visible, config.workload.replies, tokens_per_id=tokens_per_id)
    except ValueError as error:
        raise ConfigError("workload.replies", str(error)) from None


def as_ids(requests: list[Request]) -> list[Request]:
    """Each hash id as one token: the trace at its own grain."""
    for request in requests:
        if request.hash_ids is None:
            raise ConfigError("workload.unit", "'ids' needs a trace with hash ids; this one has token ids")
    return [
        replace(r, grain=1, token_ids=r.hash_ids, hash_ids=None, output_ids=None, num_prompt_tokens=len(r.hash_ids))
        for r in requests
        if r.hash_ids is not None
    ]
