"""The beams of one request: which are alive, how good they are, what their next tokens could be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarena.experiments.engine.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """One continuation of a beam: a token, its log-probability, and whether it ends the reply."""

    token: int
    logprob: float
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam: its generated tokens and the sum of their log-probabilities."""

    tokens: tuple[int, ...]
    score: float


@dataclass(slots=True)
class Beams:
    """The beams of one request.

    root      id of the request; its forks are named after it
    members   live beams, best first
    scores    of each live beam, by request id
    results   candidates of those whose step is done, by request id
    finished  hypotheses that ended, in the order in which they did
    setbacks  times that they were thrown back since they last went on
    """

    width: int
    root: str = ""
    members: list[EngineRequest] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    results: dict[str, tuple[Candidate, ...]] = field(default_factory=dict)
    finished: list[Hypothesis] = field(default_factory=list)
    count: int = 0  # forks made so far: they name beams
    setbacks: int = 0

    @property
    def complete(self) -> bool:
        """Every beam has its candidates."""
        return bool(self.members) and all(member.id in self.results for member in self.members)

    def best(self) -> list[Hypothesis]:
        """Finished hypotheses, best first, at most `width`."""
        return sorted(self.finished, key=lambda each: -each.score)[: self.width]
