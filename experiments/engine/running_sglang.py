"""What SGLang 0.5.22's scheduler keeps of the requests that decode: the batch, and how much output they will need."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvarena.experiments.engine.request import EngineRequest

RETRACT_STEPS = 20  # tokens reckoned with for each request left, after a retraction


class NewTokenRatio:
    """Share of the declared output that running requests are reckoned to need.

    SGLang 0.5.22: starts at 0.7 x conservativeness, falls to 0.14 of that in 600 decode steps, is set anew
    by a retraction, and starts over when the engine is idle.
    """

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(0.7 * conservativeness, 1.0)
        self.floor = self.initial * 0.14
        self.step = (self.initial - self.floor) / 600
        self.value = self.initial

    def decay(self) -> None:
        self.value = max(self.value - self.step, self.floor)

    def after_retraction(self, kept: list[EngineRequest]) -> None:
        generated = sum(request.num_output for request in kept)
        limit = sum(request.max_tokens for request in kept)
        self.value = min(1.0, (generated + RETRACT_STEPS * len(kept)) / (limit + 1))

    def reset(self) -> None:
        self.value = self.initial


@dataclass(slots=True)
class RunningBatch:
    """The decode batch. Finished requests stay in it until the next decode pass looks.

    full          nobody is admitted while set
    prefill_only  every member asked for no token at all: it never decodes
    """

    requests: list[EngineRequest] = field(default_factory=list)
    full: bool = False
    prefill_only: bool = False

    def drop_done(self) -> None:
        self.requests = [request for request in self.requests if not request.done]

    def join(self, members: list[EngineRequest]) -> None:
        """Members of a prefill batch start to decode; an empty batch takes over what the prefill batch was."""
        prefill_only = all(request.max_tokens == 0 for request in members)
        if not self.requests:
            self.full, self.prefill_only = False, prefill_only
        else:
            self.prefill_only = self.prefill_only and prefill_only
        self.requests.extend(members)
