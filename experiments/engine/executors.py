"""What runs a step. `ScriptedExecutor` yields recorded outputs; how long that takes is the clock's affair."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvarena.experiments.engine.scheduler import Sample, Scheduled, StepPlan


class HiddenOutputs:
    """The true outputs of requests, which no scheduler sees.

    A token stands at a position of the sequence, so a token that is dropped and sampled again is the same one.
    """

    def __init__(self) -> None:
        self._outputs: dict[str, Seq[int]] = {}

    def add(self, request_id: str, output: Seq[int]) -> None:
        """The true output of a request, at least one token."""
        if not len(output):
            raise ValueError(f"request {request_id}: the true output is empty; expected at least one token")
        self._outputs[request_id] = output

    def forget(self, request_id: str) -> None:
        self._outputs.pop(request_id, None)

    def sample(self, entry: Scheduled) -> Sample | None:
        """The token that the entry's last position yields; `stop` at the true end, and what follows it is no token."""
        if not entry.samples:
            return None
        output = self._outputs.get(entry.request.id, ())
        index = entry.end - entry.request.seq.num_prompt_tokens
        if index >= len(output):
            return Sample(0, True)
        return Sample(int(output[index]), index == len(output) - 1)


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
