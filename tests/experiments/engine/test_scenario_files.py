"""Scheduler scenarios as files: what a broken one says, what the command line writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.engine.running_sglang import NewTokenRatio
from kvarena.experiments.engine.scenario import read_sched_scenario
from support.golden import find_log, load_jsonl
from support.sched import SCHED
from typer.testing import CliRunner

HEADER = {
    "format": "kv-sched/1",
    "name": "small",
    "num_slots": 64,
    "page_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}
ROW = {"step": 0, "id": "r0", "tokens": [1, 2, 3], "max_tokens": 4, "output": [5, 6]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        ([], None, "empty"),
        ([{**HEADER, "format": "kv-scenario/1"}], 1, "kv-sched/1"),
        ([{**HEADER, "num_slots": 0}], 1, "num_slots"),
        ([{**HEADER, "max_num_seqs": 2.5}], 1, "max_num_seqs"),
        ([{**HEADER, "page_size": True}], 1, "page_size"),
        ([HEADER, "{"], 2, "expected JSON"),
        ([HEADER, "[1]"], 2, "object"),
        ([HEADER, {**ROW, "step": -1}], 2, "step"),
        ([HEADER, {**ROW, "tokens": []}], 2, "tokens"),
        ([HEADER, {**ROW, "tokens": [1, "2"]}], 2, "tokens"),
        ([HEADER, {**ROW, "output": []}], 2, "output"),
        ([HEADER, {**ROW, "output": [1] * 5}], 2, "max_tokens is 4"),
        ([HEADER, {**ROW, "max_tokens": 0}], 2, "max_tokens"),
        ([HEADER, {**ROW, "id": 7}], 2, "id"),
        ([HEADER, {**ROW, "step": 3}, {**ROW, "id": "r1", "step": 2}], 3, "step"),
        ([HEADER, ROW, ROW], 3, "twice"),
    ],
)
def test_a_broken_scenario_names_file_line_and_field(
    tmp_path: Path, rows: list[Any], line: int | None, says: str
) -> None:
    path = write(tmp_path / "s.jsonl", *rows)
    with pytest.raises(ValueError, match=says) as caught:
        read_sched_scenario(path)
    assert str(path) in str(caught.value)
    if line is not None:
        assert f"{path}:{line}:" in str(caught.value)


def test_a_truncated_gzip_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(HEADER).encode())[:-9])
    with pytest.raises(ValueError, match=r"s\.jsonl\.gz"):
        read_sched_scenario(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["scenario", *arguments])


def test_the_command_writes_a_folder_of_logs_named_as_the_recorded_ones(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("max_seqs", "chunk_cap"):
        source = next((SCHED / "scenarios").glob(f"{name}.jsonl*"))
        (folder / source.name).write_bytes(source.read_bytes())
    out = tmp_path / "out"
    assert run(str(folder), "--scheduler", "vllm", "--out", str(out)).exit_code == 0
    assert (
        run(str(folder), "--scheduler", "sglang", "--page-size", "1", "--order", "lpm", "--out", str(out)).exit_code
        == 0
    )
    assert run(str(folder), "--scheduler", "sglang", "--page-size", "1", "--lag", "1", "--out", str(out)).exit_code == 0
    written = sorted(path.name for path in out.iterdir())
    names = ["", ".p1.fcfs.lag1", ".p1.lpm"]
    assert written == sorted(f"{name}{kind}.jsonl" for name in ("chunk_cap", "max_seqs") for kind in names)
    golden = load_jsonl(find_log("sched/sglang", "max_seqs.p1.lpm"))
    ours = load_jsonl(out / "max_seqs.p1.lpm.jsonl")
    assert [line["scheduled"] for line in ours[1:]] == [line["scheduled"] for line in golden[1:]]


def test_the_log_and_stderr_say_who_was_rejected_and_why(tmp_path: Path) -> None:
    path = next((SCHED / "extra_scenarios").glob("x_never_fits.jsonl*"))
    done = run(str(path), "--scheduler", "vllm", "--out", str(tmp_path / "log.jsonl"))
    assert done.exit_code == 0
    rejected = [line["extra"]["rejected"] for line in load_jsonl(tmp_path / "log.jsonl")[1:]]
    message = next(row for row in rejected if row)["r1"]
    assert "32 pages" in message
    assert "500 tokens" in message
    assert "24" in message
    assert message in done.stderr


@pytest.mark.parametrize("options", [["--scheduler", "orca"], ["--scheduler", "vllm", "--order", "x"]])
def test_unknown_names_are_refused(options: list[str]) -> None:
    path = next((SCHED / "scenarios").glob("max_seqs.jsonl*"))
    done = run(str(path), *options)
    assert isinstance(done.exception, ValueError)
    assert "expected" in str(done.exception)


def test_the_ratio_decays_in_600_steps_and_follows_a_retraction() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == 0.7
    for _ in range(600):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    ratio.decay()
    assert ratio.value == ratio.floor
    ratio.reset()
    assert ratio.value == 0.7
    assert NewTokenRatio(2.0).value == 1.0
