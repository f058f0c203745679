"""SGLang 0.5.22's admission of a burst, pass by pass, from lengths alone.

A pass takes prompts in order until one is refused or the pass's prompt tokens are spent, and runs alone: nobody decodes
while prompts are admitted. Nobody counts as waiting for room as long as every pass takes some. What the first pass
refuses, because its own prompts are charged their whole declared output, the second may take: its running batch is new,
its full flag down, and those who run are charged 0.7 of what is left of their output. Any later refusal leaves the flag
up until somebody ends.
"""

from __future__ import annotations

import math

import numpy as np
from kvarena.experiments.capacity_loads import Ints, Load
from kvarena.experiments.capacity_prefill import Prefill, Prefixes, Rules, Twice

RATIO = 0.7  # share of what is left of the declared output that a running request is reckoned to need at first
OUTPUT_CAP = 4096


def max_tokens(load: Load, rules: Rules) -> Ints:
    """Output that SGLang 0.5.22 lets each request have, int64 [N]: what is declared (never below its true output), cut
    to the context, and to a pool that holds prompt, output and a page. Below 1: the request is turned away."""
    size = rules.page_size
    row = np.maximum(rules.max_model_len - load.prompts, 1)
    pool = (rules.num_pages + load.prompts // -size) * size - size - 1
    return np.minimum(np.maximum(load.outputs, rules.declared), np.minimum(row, pool))


def sglang_prefill(load: Load, rules: Rules) -> Prefill | None:
    """When prompts are computed: all before the first decode, which is step 1; None when somebody waits for room or a
    row, or is turned away. O(requests x passes)."""
    if int(max_tokens(load, rules).min()) < 1:
        return None
    nought = np.zeros(len(load), np.int64)
    if not rules.reserves and rules.publish == "reserve":
        return Prefill(nought, nought, [], [])  # nobody is refused, and nothing is computed twice
    admission = _Admission(load, rules)
    while admission.next < len(load) or admission.rest:
        if not admission.run_pass():
            return None
    return Prefill(nought, nought, admission.duplicates(), [])


class _Admission:
    """Passes over the waiting list. `free`: tokens of free pages; `rest`: tokens left of the prompt in chunks."""

    def __init__(self, load: Load, rules: Rules) -> None:
        self.load, self.rules, self.size = load, rules, rules.page_size
        self.prefixes = Prefixes(load, rules)
        self.outputs = max_tokens(load, rules)
        self.chunk = max(rules.chunk_tokens // self.size, 1) * self.size
        self.free = rules.num_pages * self.size
        self.number = -1  # of this pass
        self.next = self.rest = 0
        self.joins: list[int] = []  # for each who runs, the pass that computed the end of its prompt
        self.batch: list[bool] = []  # of the pass before: prompts taken, and whether they were done in it
        self.full = False

    def run_pass(self) -> bool:
        """Whether this pass takes anything; if not, those who run decode in it."""
        self._merge()
        if self.full:
            return False
        self.reserved, self.left, self.taken = self._reserve(), self.chunk, 0
        self.slots = self.rules.rows - len(self.joins) - bool(self.rest)
        if self.rest:
            self._take(self.next - 1, self.rest, min(self.rest, self.left))
        self.merged = self.prefixes.merged(self.number)
        while self._goes_on():
            pass
        self.free -= self.taken
        return bool(self.batch)

    def _merge(self) -> None:
        """Those whose prompt is done run from now on. The full flag falls when they are the first, and when the batch
        gets shorter by its prompt in chunks."""
        done = sum(self.batch)
        if done < len(self.batch) or not self.joins:
            self.full = False
        self.joins += [self.number] * done
        self.number, self.batch = self.number + 1, []

    def _reserve(self) -> float:
        """0.7 of what those who run may still generate. The first token of the last pass is not known yet (lag 1)."""
        if not self.rules.reserves:
            return 0.0
        joins = np.array(self.joins, np.int64)
        order = self.outputs[: len(joins)] - (joins + self.rules.lag < self.number)
        return RATIO * float(np.minimum(order, OUTPUT_CAP).sum())

    def _goes_on(self) -> bool:
        """Try the next of the waiting list; whether the pass goes on behind it."""
        if self.next >= len(self.load):
            return False
        if len(self.batch) >= self.slots:
            self.full = True
        if self.full or self.left <= 0:
            return False
        new = self.prefixes.new_tokens(self.next, self.number)
        if not self._fits(new, int(self.outputs[self.next])):
            self.full = bool(self.batch or self.joins)
            return False
        tokens = new if self._whole(new) <= self.left else self.left
        self.next += 1
        self._take(self.next - 1, new, tokens)
        return self.left > 0

    def _fits(self, new: int, output: int) -> bool:
        if not self.rules.reserves:
            return True
        need = new + min(output, OUTPUT_CAP) + self.size + math.floor(self.reserved)
        return need < self.free + self.merged

    def _take(self, number: int, new: int, tokens: int) -> None:
        """`tokens` of the `new` ones of a prompt are computed in this pass."""
        self.rest, whole = new - tokens, self._whole(tokens)
        output = 0 if self.rest else min(int(self.outputs[number]), OUTPUT_CAP)
        self.batch.append(not self.rest)
        self.taken, self.left = self.taken + whole, self.left - whole
        self.reserved += whole + self.size + output
        if self.rest:
            self.prefixes.chunk(number, self.number, self._computed(number))
        else:
            self.prefixes.computed(number, self.number)

    def _computed(self, number: int) -> int:
        """New tokens of a prompt that are computed by the end of this pass."""
        return int(self.load.prompts[number]) - self.prefixes.found(number) - self.rest

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self.size) * self.size

    def duplicates(self) -> list[Twice]:
        """What is still held twice when the first decode runs, in steps from the last pass on, which is step 0."""
        return [(0, until - self.number, tokens) for _, until, tokens in self.prefixes.twice if until > self.number]
