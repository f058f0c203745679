"""The token design decides as SGLang 0.5.22 did, on every golden log and every case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarena.experiments.scenarios import Scenario, ScenarioRunner, read_scenario, run_scenario
from support.golden import find_log, first_difference, line_difference, load_cases, load_jsonl, log_files, plain_name

CHECK_EVERY = 7  # ops of a long scenario between two full verifications; shorter ones are verified after each op
LONG = 400  # ops
OPTIONS: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang_admission": {"admission": "sglang"},
    "sglang_need_sort": {"need_sort": True},
}
LOGS = [(folder, path) for folder in OPTIONS for path in log_files(folder)]


def decisions(scenario: Scenario, **options: Any) -> Iterator[dict[str, Any]]:
    """The decision log, the allocator verified along the way."""
    if len(scenario.ops) <= LONG:
        yield from run_scenario(scenario, "token", check=True, **options)
        return
    runner = ScenarioRunner.for_scenario(scenario.header, "token", **options)
    yield scenario.header
    for number, (_, op) in enumerate(scenario.ops, 1):
        yield runner.decide(op)
        if number % CHECK_EVERY == 0 or number == len(scenario.ops):
            runner.allocator.check()


@pytest.mark.parametrize(("folder", "log"), LOGS, ids=[f"{folder}-{plain_name(log)}" for folder, log in LOGS])
def test_every_field_of_every_decision_is_sglangs(folder: str, log: Path) -> None:
    name, page_size = plain_name(log).rsplit(".p", 1)
    scenario = read_scenario(find_log("scenarios", name))
    ours = decisions(scenario, page_size=int(page_size), **OPTIONS[folder])
    assert first_difference(load_jsonl(log), ours) is None


def test_the_logs_cover_what_they_should() -> None:
    counts = {folder: sum(at == folder for at, _ in LOGS) for folder in OPTIONS}
    assert counts == {"sglang": 91, "sglang_admission": 21, "sglang_need_sort": 17}


CASES = [case for area in ("block", "radix", "engine") for case in load_cases(area) if "radix" in case["expect"]]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_reported_fault_is_absent(case: dict[str, Any]) -> None:
    runner = ScenarioRunner.for_scenario(case["input"]["header"], "token")
    tree = runner.allocator.tree  # type: ignore[attr-defined]
    for number, (op, expected) in enumerate(zip(case["input"]["ops"], case["expect"]["radix"], strict=True), 1):
        ours = runner.decide(op)
        runner.allocator.check()
        assert line_difference(expected, ours) is None, f"op {number}"
        if "protected" in expected:
            assert sum(len(node.pages) for node in tree.nodes() if node.locks) == expected["protected"]


def test_all_cases_with_a_radix_answer_are_here() -> None:
    assert {case["id"] for case in CASES} >= {
        "block-02", "block-06", "block-09", "block-11", "radix-03", "radix-04", "radix-05", "radix-06", "radix-07",
        "engine-01", "engine-02",
    }  # fmt: skip
