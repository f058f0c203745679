"""The two baselines once more: a contiguous pool as one list of owners, the whole-prompt cache as a list of prompts."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from support.slow_facts import Facts, SlowGate, pages


def admits(gate: SlowGate, tokens: int, size: int, free: int) -> bool:
    """The gate over plainly free pages."""
    need = pages(tokens, size) if gate.page_rounded else tokens
    room = free if gate.page_rounded else free * size
    need += gate.headroom
    return need < room if gate.strict else need <= room


def power_of_two(number: int) -> int:
    """The least one that is not below `number`."""
    power = 1
    while power < number:
        power *= 2
    return power


def declared(facts: Facts) -> int:
    """What a test's client declares; and `oracle` below: how long it will really get."""
    return 1 + facts.prompt % 7


def oracle(facts: Facts) -> int:
    return facts.prompt + facts.prompt % 5


@dataclass
class SlowRun:
    facts: Facts
    row: list[int]
    asked: int


@dataclass
class SlowContiguous:
    """`owner[p]` is who has page p; None: free. Page 0 is nobody's."""

    num_pages: int
    size: int
    sizing: str
    buddy: bool
    longest: int | None
    owner: list[Any] = field(default_factory=list)
    holds: dict[str, SlowRun] = field(default_factory=dict)
    pins: dict[str, Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owner = ["padding"] + [None] * self.num_pages

    # --- runs ---

    def _is_free(self, start: int, count: int) -> bool:
        return start + count <= self.num_pages + 1 and all(o is None for o in self.owner[start : start + count])

    def _find(self, count: int) -> list[int] | None:
        """Where a run of `count` pages goes: the lowest place, for the buddy rule the smallest block that will do."""
        if not self.buddy:
            starts = [start for start in range(1, self.num_pages + 1) if self._is_free(start, count)]
            starts = [start for start in starts if start == 1 or self.owner[start - 1] is not None]
            return list(range(starts[0], starts[0] + count)) if starts else None
        for block in (power_of_two(count) << k for k in range(self.num_pages.bit_length() + 1)):
            for start in range(1, self.num_pages + 1, block):
                if self._is_block(start, block):
                    return list(range(start, start + power_of_two(count)))
        return None

    def _is_block(self, start: int, block: int) -> bool:
        """Free, and not the half of a larger free block."""
        whole = (start - 1) // (2 * block) * 2 * block + 1
        return self._is_free(start, block) and not self._is_free(whole, 2 * block)

    def _longest_free(self) -> int:
        return max((n for n in range(1, self.num_pages + 1) if self._find(n) is not None), default=0)

    def _own(self, name: str, row: list[int]) -> None:
        for page in row:
            self.owner[page] = name

    # --- verbs ---

    def promise(self, facts: Facts, tokens: int) -> int | None:
        if self.longest is not None and tokens > self.longest:
            return None
        guesses = {"declared": declared(facts) + facts.prompt, "oracle": oracle(facts), "pow2": power_of_two(tokens)}
        guess = max(tokens, guesses.get(self.sizing, self.longest or tokens))
        return guess if self.longest is None else min(guess, self.longest)

    def pin(self, facts: Facts, gate: SlowGate) -> list[int] | None:
        tokens, free = self.promise(facts, facts.prefill), self.owner.count(None)
        if tokens is None or not admits(gate, tokens, self.size, free):
            return None
        if self._longest_free() < pages(tokens, self.size):
            return None
        self.pins[facts.name] = facts
        facts.computed = 0
        return []

    def reserve(self, wants: list[tuple[str, int]]) -> list[dict[str, Any]] | None:
        """All or nothing, on a copy; runs that were left stay taken until the call is done."""
        before = self.owner[:], {name: deepcopy(hold) for name, hold in self.holds.items()}
        answers: list[dict[str, Any]] = []
        left: list[int] = []
        for name, n in wants:
            answer = self._place(name, n) if name in self.pins else self._grow(name, n)
            if answer is None:
                self._undo(before, [name for name, _ in wants])
                return None
            left += answer["freed"]
            answers.append(answer)
        self._own(None, left)  # type: ignore[arg-type]
        return answers

    def _undo(self, before: tuple[list[Any], dict[str, SlowRun]], names: list[str]) -> None:
        facts = {name: hold.facts for name, hold in self.holds.items()}
        self.owner, self.holds = before
        for name, hold in self.holds.items():
            hold.facts = facts[name]
        for name in names:
            self.pins.pop(name, None)

    def _answer(self, taken: list[int], moves: list[tuple[int, int]] | None = None, freed: Any = ()) -> dict[str, Any]:
        return {"taken": taken, "moves": moves or [], "freed": list(freed), "evicted": [], "duplicates": []}

    def _place(self, name: str, n: int) -> dict[str, Any] | None:
        facts = self.pins[name]
        promised = self.promise(facts, max(n, facts.prefill))
        row = None if promised is None else self._find(pages(promised, self.size))
        if row is None:
            return None
        self._own(name, row)
        self.holds[name] = SlowRun(self.pins.pop(name), row, n)
        return self._answer(list(row))

    def _grow(self, name: str, n: int) -> dict[str, Any] | None:
        hold = self.holds[name]
        tokens = hold.facts.computed + n
        if self.longest is not None and tokens > self.longest:
            return None
        hold.asked = max(hold.asked, tokens)
        if tokens <= len(hold.row) * self.size:
            return self._answer([])
        count = pages(min(power_of_two(tokens), self.longest or 2 * tokens), self.size)
        count = power_of_two(count) if self.buddy else count
        end, more = hold.row[-1] + 1, count - len(hold.row)
        aligned = not self.buddy or (hold.row[0] - 1) % count == 0
        if aligned and self._is_free(end, more):
            added = list(range(end, end + more))
            hold.row = hold.row + added
            self._own(name, added)
            return self._answer(added)
        row = self._find(count)
        if row is None:
            return None
        old, hold.row = hold.row, row
        self._own(name, row)
        return self._answer(row[len(old) :], list(zip(old, row, strict=False)), old)

    def commit(self, name: str, n: int) -> None:
        facts = self.holds[name].facts
        facts.computed = max(facts.computed, n)

    def release(self, names: list[str]) -> dict[str, list[int]]:
        freed: list[int] = []
        for name in names:
            if name in self.pins:
                self.pins.pop(name).computed = 0
                continue
            hold = self.holds.pop(name)
            hold.facts.computed = 0
            self._own(None, hold.row)  # type: ignore[arg-type]
            freed += hold.row
        return {"freed": freed, "cached": [], "evicted": []}

    def reset(self) -> bool:
        return not self.holds and not self.pins

    def counts(self) -> dict[str, int]:
        free = self.owner.count(None)
        in_use = self.num_pages - free
        asked = sum(hold.asked for hold in self.holds.values())
        return {"free": free, "evictable": 0, "in_use": in_use, "wasted_slots": in_use * self.size - asked}


@dataclass
class SlowPrompt:
    text: Any
    row: list[int]
    users: int = 1


@dataclass
class SlowUser:
    facts: Facts
    row: list[int]
    shared: int = 0
    prompt: SlowPrompt | None = None
    repeats: bool = False
    asked: int = 0


@dataclass
class SlowExact:
    """`free` is a stack, its top first; `holds` are pinned and live requests alike."""

    num_pages: int
    size: int
    free: list[int] = field(default_factory=list)
    prompts: list[SlowPrompt] = field(default_factory=list)
    holds: dict[str, SlowUser] = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_pages + 1))

    def _text(self, facts: Facts) -> Any:
        return facts.tokens[: facts.prompt], repr(facts.namespace), repr(facts.items)

    def _known(self, facts: Facts) -> SlowPrompt | None:
        return next((prompt for prompt in self.prompts if prompt.text == self._text(facts)), None)

    def pin(self, facts: Facts, gate: SlowGate) -> list[int] | None:
        prompt = self._known(facts)
        count = 0 if prompt is None else min(len(prompt.row), (facts.prefill - 1) // self.size)
        new = facts.prefill - count * self.size if gate.whole_prompt else 0
        if not admits(gate, new, self.size, len(self.free)):
            return None
        user = SlowUser(facts, [])
        if prompt is not None and count:
            prompt.users += 1
            user = SlowUser(facts, prompt.row[:count], count, prompt, asked=count * self.size)
        self.holds[facts.name] = user
        self.pins.add(facts.name)
        facts.computed = count * self.size
        return list(user.row)

    def reserve(self, wants: list[tuple[str, int]]) -> list[dict[str, list[int]]] | None:
        users = [(self.holds[name], self.holds[name].facts.computed + n) for name, n in wants]
        counts = [max(pages(end, self.size) - len(user.row), 0) for user, end in users]
        if sum(counts) > len(self.free):
            for name, _ in wants:
                if name in self.pins:
                    self.pins.remove(name)
                    self._leave(self.holds.pop(name))
            return None
        answers = []
        for (user, end), count in zip(users, counts, strict=True):
            taken, self.free = self.free[:count], self.free[count:]
            user.row = user.row + taken
            user.asked = max(user.asked, end)
            self.pins.discard(user.facts.name)
            answers.append({"taken": taken, "evicted": [], "freed": [], "duplicates": []})
        return answers

    def commit(self, name: str, n: int) -> None:
        user = self.holds[name]
        facts, count = user.facts, user.facts.prompt // self.size
        facts.computed = max(facts.computed, n)
        if user.prompt is not None or user.repeats or not count or n < facts.prompt:
            return
        if self._known(facts) is not None:
            user.repeats = True
            return
        user.prompt, user.shared = SlowPrompt(self._text(facts), user.row[:count]), count
        self.prompts.append(user.prompt)

    def _leave(self, user: SlowUser) -> list[int]:
        if user.prompt is None:
            return []
        user.prompt.users -= 1
        if user.prompt.users:
            return []
        self.prompts = [prompt for prompt in self.prompts if prompt is not user.prompt]
        self.free = user.prompt.row + self.free
        return user.prompt.row

    def release(self, names: list[str]) -> dict[str, list[int]]:
        freed: list[int] = []
        for name in names:
            user = self.holds.pop(name)
            self.pins.discard(name)
            freed += self._leave(user) + user.row[user.shared :]
            self.free = user.row[user.shared :] + self.free
            user.facts.computed = 0
        return {"freed": freed, "cached": [], "evicted": []}

    def reset(self) -> bool:
        return not self.holds

    def counts(self) -> dict[str, int]:
        in_use = self.num_pages - len(self.free)
        filled = sum(len(prompt.row) for prompt in self.prompts) * self.size
        filled += sum(max(user.asked - user.shared * self.size, 0) for user in self.holds.values())
        return {
            "free": len(self.free),
            "evictable": 0,
            "in_use": in_use,
            "shared": sum(len(prompt.row) for prompt in self.prompts if prompt.users > 1),
            "wasted_slots": in_use * self.size - filled,
        }
