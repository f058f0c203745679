"""Random neutral operations (the format of `experiments/scenarios.py`) that find an allocator's corners.

Few token values, so that prompts share prefixes, diverge inside pages and fill the cache with equal pages; pools of a
few dozen pages, so that hits, evictions and refusals are all common.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 3
MAX_LIVE = 6
WEIGHTS = {
    "arrive": 8,
    "again": 2,
    "decode": 14,
    "run": 1,
    "step": 6,
    "finish": 3,
    "preempt": 2,
    "reset": 1,
    "stray": 0.3,
}


@dataclass
class Known:
    """What the generator knows of a request."""

    tokens: list[int]
    key: dict[str, Any] = field(default_factory=dict)


class RandomRequests:
    """A stream of operations that depends on a seed and on the answers to the operations before.

    header   of a scenario: page_size, num_slots, max_model_len
    keys     requests may carry a LoRA, a salt, images
    batches  there are `step` operations: one token for several requests in one call
    """

    def __init__(self, seed: int, header: dict[str, Any], *, keys: bool, batches: bool = False) -> None:
        self.random = random.Random(seed)
        self.page_size: int = header["page_size"]
        pool = header["num_slots"] // self.page_size * self.page_size
        # Now and then a prompt that no pool holds; never one past the model.
        self.longest = min(header["max_model_len"] - 2, pool + 2 * self.page_size)
        self.limit = header["max_model_len"]
        self.keys = keys
        self.batches = batches
        self.live: dict[str, Known] = {}
        self.preempted: dict[str, Known] = {}
        self.before: list[Known] = []
        self.count = 0
        self.running: list[str] = []  # decodes that are still to come

    def next(self) -> dict[str, Any]:
        """The next operation."""
        if self.running:
            return self._decode_of(self.running.pop())
        names = [name for name in WEIGHTS if self._possible(name)]
        name = self.random.choices(names, [WEIGHTS[name] for name in names])[0]
        op: dict[str, Any] = getattr(self, f"_{name}")()
        return op

    def learn(self, op: dict[str, Any], answer: dict[str, Any]) -> None:
        """Take note of what an operation did."""
        verb = op["op"]
        if verb == "arrive":
            self.preempted.pop(op["id"], None)
        if not answer["ok"]:
            return
        if verb == "arrive":
            self.live[op["id"]] = Known(list(op["tokens"]), op.get("key", {}))
        elif verb == "decode":
            self.live[op["id"]].tokens.append(op["token"])
        elif verb == "step":
            for name, token in zip(op["ids"], op["tokens"], strict=True):
                self.live[name].tokens.append(token)
        elif verb in ("finish", "preempt"):
            known = self.live.pop(op["id"])
            self.before = [*self.before[-7:], known]
            if verb == "preempt":
                self.preempted[op["id"]] = known
        self.running = [name for name in self.running if name in self.live]

    def _possible(self, name: str) -> bool:
        if name == "arrive":
            return len(self.live) < MAX_LIVE
        if name == "again":
            return len(self.live) < MAX_LIVE and bool(self.preempted)
        if name == "reset":
            return not self.live
        if name == "step":
            return self.batches and bool(self._growing())
        return name == "stray" or bool(self.live)

    def _arrive(self) -> dict[str, Any]:
        self.count += 1
        known = self._prompt()
        return self._arrival(f"r{self.count}", known)

    def _again(self) -> dict[str, Any]:
        """A preempted request comes back, now and then with other tokens."""
        name = self.random.choice(list(self.preempted))
        known = self.preempted[name]
        if self.random.random() < 0.1:
            known = Known([*known.tokens[:-1], VOCABULARY + 1], known.key)
        return self._arrival(name, known)

    def _arrival(self, name: str, known: Known) -> dict[str, Any]:
        op: dict[str, Any] = {"op": "arrive", "id": name, "tokens": list(known.tokens)}
        if self.random.random() < 0.3:
            op["chunk"] = self.random.randint(1, 3 * self.page_size)
        return op | ({"key": known.key} if known.key else {})

    def _prompt(self) -> Known:
        """New tokens behind nothing, or behind a part of a prompt that came before."""
        draw = self.random
        others = [*self.before, *self.live.values()]
        old = draw.choice(others) if others and draw.random() < 0.75 else Known([])
        kept = draw.choice([len(old.tokens), draw.randint(0, len(old.tokens))])
        length = draw.choice([1, draw.randint(1, 3 * self.page_size), draw.randint(1, 8 * self.page_size)])
        if draw.random() < 0.05:
            length = self.longest
        tokens = old.tokens[:kept] + [draw.randrange(VOCABULARY) for _ in range(length)]
        tokens = tokens[: self.longest]
        key = old.key if draw.random() < 0.8 else {}
        if self.keys and draw.random() < 0.2:
            key = self._new_key(len(tokens))
        return Known(tokens, self._fitting(key, len(tokens)))

    def _new_key(self, length: int) -> dict[str, Any]:
        draw = self.random
        kind = draw.choice(["lora", "salt", "mm"])
        if kind == "lora":
            return {"lora": [f"lora{draw.randrange(2)}", "path"]}
        if kind == "salt":
            return {"salt": f"salt{draw.randrange(2)}"}
        offset = draw.randrange(length)
        return {"mm": [[offset, draw.randint(1, length - offset), f"image{draw.randrange(2)}"]]}

    @staticmethod
    def _fitting(key: dict[str, Any], length: int) -> dict[str, Any]:
        """Images end inside the prompt."""
        items = [item for item in key.get("mm", ()) if item[0] + item[1] <= length]
        rest = {name: value for name, value in key.items() if name != "mm"}
        return rest | ({"mm": items} if items else {})

    def _decode(self) -> dict[str, Any]:
        return self._decode_of(self.random.choice(list(self.live)))

    def _decode_of(self, name: str) -> dict[str, Any]:
        if len(self.live[name].tokens) >= self.limit - 1:
            return {"op": "finish", "id": name}
        return {"op": "decode", "id": name, "token": self.random.randrange(VOCABULARY)}

    def _run(self) -> dict[str, Any]:
        """All of them decode, a few steps long."""
        steps = self.random.randint(1, 2 * self.page_size)
        self.running = [name for _ in range(min(steps, 40)) for name in reversed(self.live)]
        return self._decode_of(self.running.pop())

    def _growing(self) -> list[str]:
        return [name for name, known in self.live.items() if len(known.tokens) < self.limit - 1]

    def _step(self) -> dict[str, Any]:
        names = self._growing()
        names = self.random.sample(names, self.random.randint(1, len(names)))
        return {"op": "step", "ids": names, "tokens": [self.random.randrange(VOCABULARY) for _ in names]}

    def _finish(self) -> dict[str, Any]:
        return {"op": "finish", "id": self.random.choice(list(self.live))}

    def _preempt(self) -> dict[str, Any]:
        return {"op": "preempt", "id": self.random.choice(list(self.live))}

    def _reset(self) -> dict[str, Any]:
        return {"op": "reset"}

    def _stray(self) -> dict[str, Any]:
        """About a request that is not there."""
        verb = self.random.choice(["decode", "finish", "preempt"])
        return {"op": verb, "id": "nobody"} | ({"token": 0} if verb == "decode" else {})
