"""The block design decides as vLLM 0.32.0 did, on every golden log, whatever hashes its pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvarena.allocators.block import BlockAllocator
from kvarena.experiments.scenarios import ScenarioRunner, read_scenario, run_scenario
from support.golden import find_log, first_difference, load_jsonl, log_files, plain_name

FULL = [("vllm", "scenarios", plain_name(path)) for path in log_files("vllm")]
WINDOWED = [
    ("vllm_sliding_window", "sliding_window_scenarios", plain_name(path)) for path in log_files("vllm_sliding_window")
]
BOTH_FORMS = [
    pytest.param(*row, form, id=f"{row[0]}-{row[2]}-{form}")
    for rows, forms in ((FULL, ("hashed", "runs")), (WINDOWED, ("hashed",)))
    for row in rows
    for form in forms
]
ALL = [pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in FULL + WINDOWED]


def constant(data: bytes) -> bytes:
    """Every page collides with every other."""
    return b"same"


def short(data: bytes) -> bytes:
    """Some pages collide."""
    return bytes([sum(data) % 7])


def decisions(path: Path, hash_fn: Any) -> Iterator[dict[str, Any]]:
    parsed = read_scenario(path)
    runner = ScenarioRunner.for_scenario(parsed.header, "block")
    made = runner.allocator
    assert isinstance(made, BlockAllocator)
    runner.allocator = BlockAllocator(made.num_pages, made.design, hash_fn=hash_fn)
    runner.allocator.events.enabled = True
    yield parsed.header
    for _, op in parsed.ops:
        yield runner.decide(op)
    runner.allocator.check()


@pytest.mark.parametrize(("logs", "scenarios", "name", "form"), BOTH_FORMS)
def test_every_field_of_every_decision_is_vllms(logs: str, scenarios: str, name: str, form: str) -> None:
    ours = run_scenario(read_scenario(find_log(scenarios, name)), "block", check=True, form=form)
    assert first_difference(load_jsonl(find_log(logs, name)), ours) is None


@pytest.mark.parametrize("hash_fn", [constant, short, "sha256", "xxh3_64"], ids=["constant", "short", "sha256", "xxh3"])
@pytest.mark.parametrize(("logs", "scenarios", "name"), ALL)
def test_decisions_do_not_depend_on_the_hash_function(logs: str, scenarios: str, name: str, hash_fn: Any) -> None:
    ours = decisions(find_log(scenarios, name), hash_fn)
    assert first_difference(load_jsonl(find_log(logs, name)), ours) is None


def test_the_logs_cover_what_they_should() -> None:
    assert len(FULL) == 46
    assert len(WINDOWED) == 11
