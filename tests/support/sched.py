"""Golden scheduler logs: where they lie, what each was recorded with, and which scenario it answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.golden import GOLDEN, load_jsonl, plain_name

SCHED = GOLDEN / "sched"
DECISIONS = ("scheduled", "admitted", "hit", "preempted", "finished", "running", "waiting", "free", "evictable")

# What the recordings say beyond the decisions: page ids and evictions; queue flags and the ratio.
EXTRA = {
    "vllm": ("new_pages", "evicted", "resumed", "sampled"),
    "sglang": ("kind", "new_token_ratio", "batch_is_full", "chunked"),
}


def first_difference(golden: dict[str, Any], ours: dict[str, Any], policy: str) -> str | None:
    """What differs first in one step. Order counts, also inside objects: `scheduled` is in batch order."""
    for key in DECISIONS:
        if json.dumps(golden[key]) != json.dumps(ours[key]):
            return f"step {golden['step']}: {key} is {ours[key]}, golden {golden[key]}"
    for key in EXTRA[policy]:
        if json.dumps(golden["extra"][key]) != json.dumps(ours["extra"][key]):
            return f"step {golden['step']}: extra.{key} is {ours['extra'][key]}, golden {golden['extra'][key]}"
    return None


@dataclass(frozen=True)
class GoldenSched:
    """One recorded log and the options with which ours has to answer."""

    path: Path
    policy: str
    scenario: Path
    options: dict[str, Any]

    @property
    def id(self) -> str:
        return f"{self.path.parent.name}-{plain_name(self.path)}"


def scenario_paths() -> list[Path]:
    """Every scheduler scenario, the ones of single options included."""
    paths = [*(SCHED / "scenarios").iterdir(), *(SCHED / "extra_scenarios").iterdir()]
    return sorted(paths, key=lambda path: path.name)


def golden_scheds() -> list[GoldenSched]:
    """Every recorded scheduler log, by folder and name."""
    scenarios = {plain_name(path): path for path in scenario_paths()}
    found = []
    for folder in ("vllm", "vllm_lag1", "vllm_extra", "sglang"):
        for path in sorted((SCHED / folder).iterdir()):
            name, *rest = plain_name(path).split(".")
            options: dict[str, Any] = {"lag": int(folder == "vllm_lag1")}
            if folder == "sglang":
                options = {"page_size": int(rest[0][1:]), "order": rest[1], "lag": int("lag1" in rest)}
            policy = "sglang" if folder == "sglang" else "vllm"
            found.append(GoldenSched(path, policy, scenarios[name], options))
    return found


__all__ = [
    "SCHED",
    "GoldenSched",
    "first_difference",
    "golden_scheds",
    "load_jsonl",
    "plain_name",
    "scenario_paths",
]
