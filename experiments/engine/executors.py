"""What runs a step. `ScriptedExecutor` yields recorded outputs; how long that takes is the clock's affair."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from kvarena.experiments.engine.beams import Beams, Candidate
from kvarena.experiments.engine.request import EngineRequest
from kvarena.experiments.engine.scheduler import Drafter, Sample, Scheduled, StepPlan

LanguageModel = Callable[[str, tuple[int, ...], int], Iterable[Candidate]]


class HiddenOutputs:
    """The true outputs of requests, which no scheduler sees.

    A token stands at a position of the sequence, so a token that is dropped and sampled again is the same one. The
    other replies of a request with samples are those of the ids `id/1`, `id/2`, ...

    language_model  (request id, tokens generated, how many) -> candidates of a beam, best first
    """

    def __init__(self, language_model: LanguageModel | None = None) -> None:
        self._outputs: dict[str, Seq[int]] = {}
        self.language_model = language_model

    def add(self, request_id: str, output: Seq[int]) -> None:
        """The true output of a request, at least one token."""
        if not len(output):
            raise ValueError(f"request {request_id}: the true output is empty; expected at least one token")
        self._outputs[request_id] = output

    def forget(self, request_id: str) -> None:
        self._outputs.pop(request_id, None)

    def sample(self, entry: Scheduled) -> Sample | None:
        """The token that the entry's last position yields; `stop` at the true end, and what follows it is no token.

        Raises ValueError for a beam without a language model.
        """
        if not entry.samples:
            return None
        request = entry.request
        if request.beams is not None:
            return self._beam(request, request.beams)
        index = entry.end - len(entry.drafts) - request.seq.num_prompt_tokens
        accepted = self._accepted(request.id, index, entry.drafts)
        sample = self._at(request.id, index + accepted)
        others: tuple[Sample, ...] = ()
        if request.samples > 1 and not request.branched:
            others = tuple(self._at(f"{request.id}/{number}", index) for number in range(1, request.samples))
        return replace(sample, accepted=accepted, others=others) if accepted or others else sample

    def _at(self, request_id: str, index: int) -> Sample:
        output = self._outputs.get(request_id, ())
        if index >= len(output):
            return Sample(0, True)
        return Sample(int(output[index]), index == len(output) - 1)

    def _accepted(self, request_id: str, index: int, drafts: tuple[int, ...]) -> int:
        """How many drafts are the output's own; never its last token, which the model samples itself."""
        output = self._outputs.get(request_id, ())
        count = 0
        while count < len(drafts) and index + count < len(output) - 1 and drafts[count] == output[index + count]:
            count += 1
        return count

    def _beam(self, request: EngineRequest, beams: Beams) -> Sample:
        if self.language_model is None:
            raise ValueError(f"request {request.id}: its beams need a language model, the outputs have none")
        generated = tuple(request.seq.token_ids[request.seq.num_prompt_tokens :])
        return Sample(0, candidates=tuple(self.language_model(beams.root or request.id, generated, beams.width)))

    def drafter(self, share: float, seed: int = 0) -> Drafter:
        """Guesses that are right with this probability each, the same for a position whenever it is asked for."""
        if not 0 <= share <= 1:
            raise ValueError(f"share: expected from 0 to 1, found {share}")

        def draft(request: EngineRequest, count: int) -> list[int]:
            output, start = self._outputs.get(request.id, ()), request.num_output
            return [
                int(output[at]) + (random.Random(f"{seed}/{request.id}/{at}").random() >= share)
                for at in range(start, min(start + count, len(output)))
            ]

        return draft


class UnnamedOutputs:
    """Outputs of requests whose trace has their length alone: ids that no prompt holds and no two requests share."""

    FIRST = -(2**30)  # traces have ids from 0 on; below this the token design keeps ids for images

    def __init__(self) -> None:
        self._next = self.FIRST

    def take(self, num_tokens: int) -> range:
        """`num_tokens` fresh ids. Raises ValueError when 2^30 have been taken."""
        start = self._next
        self._next += num_tokens
        if self._next > 0:
            raise ValueError(f"outputs without ids: more than {-self.FIRST} tokens in one run")
        return range(start, self._next)


class ScriptedExecutor:
    """Yields the hidden outputs, in no time."""

    def __init__(self, outputs: HiddenOutputs) -> None:
        self.outputs = outputs

    def launch(self, plan: StepPlan) -> None:
        """Nothing runs."""

    def collect(self, plan: StepPlan) -> list[Sample | None]:
        return [self.outputs.sample(entry) for entry in plan.batch]
