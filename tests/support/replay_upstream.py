"""Replays the recorded scenarios through a real package and compares each answer with the recorded one.

Run as a script: PACKAGE GOLDEN. The package comes from KVARENA_PEERS. Ends with 1 at the first difference.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from kvarena.experiments.scenarios import read_scenario, scenario_files
from kvarena.experiments.upstream.compare import load

LOGS = {
    "vllm": {"vllm": ("scenarios", {}), "vllm_sliding_window": ("sliding_window_scenarios", {})},
    "sglang": {
        "sglang": ("scenarios", {}),
        "sglang_admission": ("scenarios", {"admission": "sglang"}),
        "sglang_need_sort": ("scenarios", {"need_sort": True}),
    },
}


def read_log(path: Path) -> list[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main(package: str, golden: Path) -> int:
    upstream, decisions = load(package), 0
    for folder, (source, rules) in LOGS[package].items():
        scenarios = {each.name: each for each in map(read_scenario, scenario_files(golden / source))}
        for path in sorted((golden / folder).glob("*.jsonl*")):
            header, *wanted = read_log(path)
            scenario = scenarios[header["name"]]
            runner = upstream.theirs({**scenario.header, "page_size": header["page_size"], **rules})
            for (_, op), want in zip(scenario.ops, wanted, strict=True):
                got = runner.decide(op)
                for name in set(want) - {"i", "skipped"}:
                    if got[name] != want[name]:
                        print(f"{path.name}, op {want['i']} {op['op']}: {name} is {got[name]}, recorded {want[name]}")
                        return 1
                decisions += 1
    print(f"{decisions} decisions as recorded")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
