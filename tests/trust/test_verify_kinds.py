"""`kvarena verify result` knows every kind of result that kvarena writes: what can be recomputed is, and whatever is
changed in it is named; of the others it says why nothing can be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.verify_kinds import KINDS, kind_at, kind_lines
from kvarena.experiments.verify_result import verify
from support.commands import invoke
from support.kinds import MAKERS
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "results"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A result of a kind, made once."""
    done: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in done:
            name, make = MAKERS[kind]
            done[kind] = tmp_path_factory.mktemp("kind") / name
            make(done[kind])
        return done[kind]

    return of


@pytest.mark.parametrize("kind", MAKERS)
def test_a_result_of_each_kind_is_recognised_and_stands(made, kind):
    found = kind_at(made(kind))
    assert found.name == kind
    verdict = verify(made(kind))
    assert verdict.problems == []
    assert sum(verdict.checked.values()) > 0
    assert not verdict.why_not


def test_every_kind_is_made_here_or_in_another_test_or_says_why_it_is_not_verified():
    elsewhere = {"run", "sweep", "partial"}  # test_verify_result.py, test_interrupts.py
    assert {kind.name for kind in KINDS if kind.check is not None} == MAKERS.keys() | elsewhere
    assert all(len(kind.how) > 8 for kind in KINDS)
    assert len(list(kind_lines())) == len(KINDS)


def test_every_command_that_writes_to_out_is_of_a_known_kind_or_makes_no_result():
    no_result = {
        *("plot", "report", "generate", "paper", "timeline", "diagram", "demo"),  # pictures and text of something else
        *("convert", "generate", "record", "fetch"),  # traces: inputs
    }
    known = {part for kind in KINDS for part in kind.command.split()}
    writers = {
        name
        for group in [get_command(app), *(get_command(app).commands[name] for name in ("trace", "bench", "verify"))]
        for name, command in group.commands.items()
        if any(parameter.name in ("out", "figure") for parameter in command.params)
    }
    assert writers - no_result - known == set()
    assert {"compare", "run", "sweep", "capacity", "rate", "ladder", "resample", "kernels"} <= writers


def edited(path: Path, to: Path, file: str, change: Callable[[pd.DataFrame], None]) -> Path:
    """A copy in which one table was changed."""
    out = shutil.copytree(path, to / "out") if path.is_dir() else Path(shutil.copy(path, to / path.name))
    table = out / file if path.is_dir() else out
    frame = pd.read_parquet(table) if table.suffix == ".parquet" else pd.read_csv(table)
    change(frame)
    frame.to_parquet(table) if table.suffix == ".parquet" else frame.to_csv(table, index=False)
    return out


def add(column: str, amount: float, row: int = 0) -> Callable[[pd.DataFrame], None]:
    def change(frame: pd.DataFrame) -> None:
        frame[column] = frame[column].astype(float) if isinstance(amount, float) else frame[column]
        frame.loc[row, column] += amount

    return change


def put(column: str, value: Any, row: int = 0) -> Callable[[pd.DataFrame], None]:
    def change(frame: pd.DataFrame) -> None:
        frame[column] = frame[column].astype(object)
        frame.loc[row, column] = value

    return change


# kind, file, change, what must be said
EDITS = [
    ("capacity", "capacity.csv", add("measured", 1), "ideal - parts is"),
    ("capacity", "capacity.csv", add("predicted", 1), "predicted is"),
    ("capacity", "capacity.csv", add("ideal", 1), "ideal is"),
    ("capacity", "capacity.csv", add("lost_tail", 1), "lost_tail is"),
    ("capacity", "capacity.csv", add("num_pages", 1), "pages, sizing has"),
    ("capacity", "bursts.csv", put("carried", False), "carried False, stopped by"),
    ("capacity", "bursts.csv", put("carried", True, 1), "one more is not carried"),
    ("capacity", "bursts.csv", add("preemptions", 1), "yet preempted"),
    ("capacity", "bursts.csv", add("tokens_per_s", 0.01), "tokens a second"),
    ("capacity", "sizing.csv", add("kv_bytes", 1), "bytes of KV"),
    ("capacity", "sizing.csv", add("unused_bytes", 1), "lines are"),
    ("rate", "rates.csv", add("rate_per_s", 1e-3), "rate is"),
    ("rate", "rates.csv", add("ttft_p50_ms", 1e9), "percentiles of ttft fall"),
    ("rate", "rates.csv", add("goodput_per_s", 1e9), "goodput"),
    ("rate", "rates.csv", put("normalised_ms", 1e-9), "knee of"),
    ("rate", "hits.csv", add("amdahl", 1e-3), "Amdahl's gain is"),
    ("ladder", "attribution.csv", add("value", 1.0), "value is"),
    ("ladder", "attribution.csv", add("low", -1.0), "low is"),
    ("ladder", "attribution.csv", add("whole", 1.0), "whole shares add up to"),
    ("ladder", "interactions.csv", add("value", 1.0), "interactions.csv: hit_tokens of"),
    ("ladder", "subsets.csv", add("hit_tokens", 1, 1), "not its cell's"),
    ("ladder", "subsets.csv", add("mask", 1), "not every subset"),
    ("ladder", "sweep/sweep.csv", add("hit_tokens", 1), "sweep.csv: is not the finished cells'"),
    ("ablations", "ablations.csv", add("hit_tokens", 1), "hit rates are of"),
    ("ablations", "ablations.csv", put("design", "mine"), "not every design once"),
    ("ablations", "ablations.csv", put("evicted_pages", -1), "a count below 0"),
    ("resample", "intervals.csv", add("difference", 1e-3), "difference is"),
    ("resample", "intervals.csv", add("high", 1e-3), "high is"),
    ("resample", "intervals.csv", add("p", 1e-3), "p is"),
    ("resample", "intervals.csv", add("q", -1e-3), "q is"),
    ("resample", "sweep.csv", add("token_hit_rate", 1e-3), "not its cell's"),
    ("page-size study", "pagesize.csv", add("concurrency", 1), "requests, not"),
    ("page-size study", "pagesize.csv", put("token_hit_rate", 1.2), "hit rate 1.2"),
    ("page-size study", "pagesize.csv", put("tail_tokens", 64.0), "free slots in a page"),
    ("page-size study", "pagesize.csv", put("page_size", 4), "not every design and page size once"),
    ("page-size study", "pagesize.csv", put("time_us", 0.0), "less time in all"),
    ("aged pools", "aged_churn.csv", add("tokens_a_run", 1.0), "tokens_a_run is"),
    ("laws", "", put("holds", False), "holds is False"),
    ("laws", "", put("measured", 3.0), "holds is True"),
    ("reasons", "", add("hit_tokens", 1), "reasons and hits are"),
    ("reasons of a sweep", "", add("evicted", 1), "reasons and hits are"),
    ("reasons of a sweep", "", add("token_hit_rate", 1e-3), "token_hit_rate is"),
    ("bounds", "", add("policy", 1.0), "hits"),
    ("bounds", "", add("regret", 1e-3), "regret is"),
    ("forks", "", add("saved", 1e-6), "saved is"),
]


@pytest.mark.parametrize(("kind", "file", "change", "said"), EDITS, ids=[f"{e[0]}-{e[3]}" for e in EDITS])
def test_what_was_changed_is_named(made, tmp_path, kind, file, change, said):
    problems = verify(edited(made(kind), tmp_path, file, change)).problems
    assert any(said in problem for problem in problems), problems[:4]


def test_a_verdict_a_sum_and_a_layout_that_were_changed_are_named(made, tmp_path):
    out = shutil.copytree(made("claims"), tmp_path / "claims")
    data = json.loads((out / "claims.json").read_text())
    data["findings"][0]["verdict"] = "refuted" if data["findings"][0]["verdict"] != "refuted" else "reproduced"
    data["findings"][1]["sha256"] = "0" * 64
    (out / "claims.json").write_text(json.dumps(data))
    problems = " | ".join(verify(out).problems)
    assert "by its values" in problems
    assert "another file than the claim's is now" in problems

    sums = json.loads(made("live verification").read_text())
    sums["ops"] += 1
    (tmp_path / "v.json").write_text(json.dumps(sums))
    assert "its settings are" in verify(tmp_path / "v.json").problems[0]

    def twice(frame: pd.DataFrame) -> None:
        slots = frame["slots"].iloc[0].copy()
        slots[-1] = slots[0]
        frame.at[0, "slots"] = slots

    assert "a slot twice" in verify(edited(made("aged pools"), tmp_path, "aged.parquet", twice)).problems[0]


def test_ablations_come_out_again_and_an_edited_row_does_not(made, tmp_path):
    assert verify(made("ablations"), again=True).problems == []
    out = edited(made("ablations"), tmp_path, "ablations.csv", add("table_bytes_appended", 4))
    assert verify(out).problems == []  # nothing beside it says so
    assert "run again" in verify(out, again=True).problems[0]


@pytest.mark.parametrize("saved", ["kernels.json", "safety.json", "capacity.json", "step_times.json", "check.json"])
def test_what_was_measured_is_not_said_to_stand(saved):
    verdict = verify(SAVED / "h200" / saved)
    assert len(verdict.why_not) > 20
    (line,) = verdict.lines()
    assert ": NOT VERIFIED (" in line
    assert " stands" not in line
    done = CliRunner().invoke(app, ["verify", "result", str(SAVED / "h200" / saved), "--json"])
    assert done.exit_code == 3
    assert json.loads(done.output)["stands"] is None


def test_a_decision_log_says_what_it_is_compared_with(tmp_path):
    invoke(
        "scenario", ROOT / "tests/golden/scenarios/page4.jsonl", "--allocator", "block", "--out", tmp_path / "l.jsonl"
    )
    assert "compare it with the recorded ones" in verify(tmp_path / "l.jsonl").why_not


@pytest.mark.parametrize(
    "saved", ["rate", "paper/ladder-chat", "paper/chat-resampled", "claims", "pagesize", "laws.csv"]
)
def test_the_saved_studies_stand(saved):
    assert verify(SAVED / saved).problems == []


# --- several, and what is none ---


def test_each_of_several_results_is_reported_and_the_worst_gives_the_exit_code(made, tmp_path):
    good, bad = made("laws"), edited(made("laws"), tmp_path, "", put("holds", False))
    (tmp_path / "nothing").mkdir()
    measured = tmp_path / "kernels.json"
    measured.write_text('{"schema_version": 1, "parts": {}}')

    def codes(*paths: Path) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", "result", *map(str, paths)])
        return done.exit_code, done.output

    code, said = codes(tmp_path / "absent.csv", bad, tmp_path / "nothing", good, measured)
    assert code == 1
    for text in (
        "absent.csv: is not there",
        "DOES NOT STAND",
        "nothing: is no result",
        "laws.csv: laws",
        "NOT VERIFIED",
    ):
        assert text in said
    assert codes(tmp_path / "nothing", good, measured)[0] == 2
    assert codes(good, measured)[0] == 3
    assert codes(good)[0] == 0


def test_a_folder_that_is_none_says_where_one_lies(made, tmp_path):
    parent = made("ladder").parent
    with pytest.raises(
        ValueError, match=r"is no result of kvarena that is finished; .*kvarena verify kinds.*out is one"
    ):
        verify(parent)
    shutil.copytree(made("ladder") / "sweep", tmp_path / "half" / "sweep")  # a ladder that was interrupted
    with pytest.raises(ValueError, match=r"half: is no result .*half/sweep is one"):
        verify(tmp_path / "half")
    with pytest.raises(ValueError, match=r"cells: is no result of kvarena"):
        verify(made("ladder") / "sweep" / "cells")


@pytest.mark.parametrize(
    "content", [b"", b"[" * 5000, b"\xff\xfe\x00", b"[1]", b'{"kind": 3}', b'{"schema_version": 1}']
)
@pytest.mark.parametrize("name", ["result.json", "study.json", "ladder.json", "ablations.json", "pagesize.json",
                                  "claims.json", "sweep.json", "aged.parquet", "partial.json"])  # fmt: skip
def test_a_broken_result_of_any_kind_is_one_clear_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        verify(tmp_path)
