"""What was checked in a result, and what did not hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHOWN = 20  # problems printed of one result


@dataclass
class Verdict:
    """What was checked in one result, and what did not hold.

    checked   kind of check -> how often it was made
    problems  one line each; none: the result stands
    unseen    numbers that the rows cannot give back, with the reason
    notes     what could not be checked here, such as a trace that is not at hand
    why_not   why nothing can be recomputed at all; empty: something was
    """

    path: Path
    what: str
    checked: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    why_not: str = ""

    @property
    def stands(self) -> bool:
        return not self.problems

    def check(self, kind: str, fine: bool, problem: str) -> None:
        """Count one check, and note its fault."""
        self.checked[kind] += 1
        if not fine:
            self.problems.append(problem)

    def lines(self) -> Iterator[str]:
        """For people: counts, then what is wrong."""
        counts = ", ".join(f"{count:,} {kind}" for kind, count in self.checked.items())
        if self.why_not and self.stands:
            yield f"{self.path}: {self.what}: NOT VERIFIED ({self.why_not})"
        else:
            yield f"{self.path}: {self.what}: {'stands' if self.stands else 'DOES NOT STAND'} (checked: {counts})"
        for reason in dict.fromkeys(self.unseen.values()):
            names = ", ".join(name for name, why in self.unseen.items() if why == reason)
            yield f"  not in the rows: {names} ({reason})"
        yield from (f"  note: {note}" for note in self.notes)
        yield from (f"  WRONG {problem}" for problem in self.problems[:SHOWN])
        if len(self.problems) > SHOWN:
            yield f"  ... and {len(self.problems) - SHOWN} more"


def verdict_json(verdict: Verdict) -> str:
    """One line for programs. `stands` is null for what cannot be verified."""
    stands = None if verdict.why_not and verdict.stands else verdict.stands
    data = {"path": str(verdict.path), "what": verdict.what, "stands": stands, "why_not": verdict.why_not}
    return json.dumps({**data, "checked": dict(verdict.checked), "problems": verdict.problems})
