"""Ctrl-C: exit code 130, one line that says what was kept and where, and nothing that could be taken for a result.

SIGKILL leaves what is complete or nothing: `test_faults.py`. Sweeps, which go on where they stopped:
`tests/experiments/test_sweep.py`.
"""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments import capacity_study, ladder_ablations, one_axis, report
from kvarena.experiments.capacity import capacity_plan, small_card
from kvarena.experiments.capacity_study import load_capacity, run_study
from kvarena.experiments.compare import compare
from kvarena.experiments.config import config_from_keywords
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.ladder import ladder
from kvarena.experiments.ladder_ablations import ablations, load_ablations
from kvarena.experiments.partial import Interrupted, load_partial, partial_folder, read_partial
from kvarena.experiments.rate import load_rate, rate_plan, run_rate
from kvarena.experiments.resample import replicate
from kvarena.experiments.results import KEYS, Result, load_result
from kvarena.experiments.sweep import open_sweep
from kvarena.experiments.verify_result import verify
from support.commands import invoke
from support.interrupts import ROOT, interrupted, nth_call, stop
from support.small import OPTIONS

SETS = ("trace='chat'", "requests=40", "options={num_sessions=8}", "pool=['450 MiB', '900 MiB']", "speed=20.0")
FLAGS = ("--set", "kernel_batches=0", "--pool", "450 MiB", "--pool", "700 MiB")
CHAT = tuple(part for name, value in OPTIONS.items() for part in ("--set", f"options.{name}={value}"))


def comparison(**fields: object) -> Result:
    base = {"options": OPTIONS, "kernel_batches": 0, "pool": ["450 MiB", "700 MiB"]}
    return compare("chat", **{**base, **fields})


@cache
def whole(kind: str) -> Result:
    """Nobody interrupted this one."""
    return comparison() if kind == "compare" else run_engine(run_config({}, SETS))


@pytest.fixture
def quick_figures(monkeypatch):
    """Files where the figures go, without the seconds of drawing them."""
    monkeypatch.setattr(report, "write_figures", lambda result, folder: (folder / "figures").mkdir())
    monkeypatch.setattr(report, "write_report", lambda result, path: path.write_text("page"))


def same_rows(found: pd.DataFrame, kind: str, table: str) -> bool:
    """Whether these are rows of the undisturbed run, in its order."""
    every = getattr(whole(kind), table)
    keys = [*KEYS, "index" if table == "requests" else "step"]
    mine = every.merge(found[keys], on=keys)
    common = [name for name in found.columns if name in every.columns]
    left, right = (frame[common].astype(object).where(frame[common].notna(), None) for frame in (mine, found))
    return left.reset_index(drop=True).equals(right.reset_index(drop=True))


# --- the commands themselves, and a real signal ---


@pytest.mark.parametrize(
    ("kind", "arguments", "at", "call"),
    [
        ("compare", ("compare", "chat", *FLAGS, *CHAT), "kvarena.experiments.replay:Replay.step", 160),
        (
            "run",
            ("run", *(part for each in SETS for part in ("--set", each))),
            "kvarena.experiments.engine.simulate:Simulation._end",
            60,
        ),
    ],
)
def test_ctrl_c_keeps_what_had_finished_and_names_it_partial(tmp_path, kind, arguments, at, call):
    out = tmp_path / "out"
    done = interrupted(*arguments, "--out", str(out), "--quiet", at=at, call=call)
    assert done.returncode == 130
    assert done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert said.startswith("kvarena: interrupted; kept ")
    assert str(partial_folder(out)) in said
    assert "the same command starts anew" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    kept = load_partial(partial_folder(out))
    assert 0 < len(kept.summary) < len(whole(kind).summary)
    assert kept.warnings[0].startswith("PARTIAL: interrupted with ")
    for table in ("requests", "steps"):
        assert same_rows(getattr(kept, table), kind, table)
    unfinished = pd.read_parquet(partial_folder(out) / "unfinished.parquet")
    assert len(unfinished) > 0
    assert same_rows(unfinished, kind, "requests")
    assert set(map(tuple, unfinished[KEYS].to_numpy())).isdisjoint(map(tuple, kept.summary[KEYS].to_numpy()))


def test_sigterm_keeps_what_had_finished_as_ctrl_c_does(tmp_path):
    arguments = ("compare", "chat", *FLAGS, *CHAT, "--out", str(tmp_path / "out"), "--quiet")
    done = interrupted(*arguments, at="kvarena.experiments.replay:Replay.step", call=160, by=signal.SIGTERM)
    assert done.returncode == 143
    (said,) = done.stderr.splitlines()
    assert said.startswith("kvarena: terminated; kept ")
    assert len(load_partial(partial_folder(tmp_path / "out")).summary) > 0


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What an interrupted comparison left, 2 of its 4 cells and a piece of the third."""
    out = tmp_path_factory.mktemp("left") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*nth_call("kvarena.experiments.replay:Replay.step", 160, stop))
        with pytest.raises(Interrupted):
            comparison(out=out)
    return partial_folder(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_written_into_what_an_interrupted_command_left(left, tmp_path):
    before = contents(left)
    chat = ROOT / "results" / "paper" / "chat"
    laws = ["laws", "--saved", ROOT / "results" / "laws.csv"]
    for arguments in (
        ["report", chat, "--out", left / "page.html"],
        ["report", chat, "--out", left / "deeper" / "page.html"],
        ["plot", chat, "--out", left / "figures"],
        ["plot", chat, "--out", left, "--force"],
        [*laws, "--out", left / "laws.csv"],
        [*laws, "--figure", left / "laws.png"],
        ["config", "init", left / "config2.toml"],
    ):
        with pytest.raises(ValueError, match=r"is what an interrupted command left; give another place"):
            invoke(*arguments)
    assert contents(left) == before
    (tmp_path / "partial.json").write_text("[1, 2]")  # of another program
    invoke(*laws, "--out", tmp_path / "laws.csv")
    assert (tmp_path / "laws.csv").is_file()


def test_nothing_that_reads_results_takes_a_partial_one(left, tmp_path):
    readers = (
        ["plot", left, "--out", tmp_path / "figures"],
        ["bounds", left],
        ["explain", left],
        ["timeline", left, "--out", tmp_path / "t.json"],
        ["report", left],
        ["report", left, "--out", tmp_path / "page.html"],
        ["report", left / "summary.csv", "--out", tmp_path / "page.html"],
    )
    before = contents(left)
    for arguments in readers:
        with pytest.raises(ValueError, match=r"is PARTIAL and no result: .* interrupted with 2 of 4 cells"):
            invoke(*arguments)
    assert list(tmp_path.iterdir()) == []
    assert contents(left) == before
    moved = left.rename(left.with_name("out"))  # under the name of a result it is none either
    with pytest.raises(ValueError, match="is PARTIAL and no result"):
        load_result(moved)
    moved.rename(left)


def test_verify_checks_the_finished_cells_and_never_says_that_it_stands(left, capsys):
    verdict = verify(left)
    assert len(verdict.problems) == 1
    assert "is PARTIAL and no result" in verdict.problems[0]
    assert verdict.what.startswith("PARTIAL compare of chat, 2 cells")
    assert verdict.checked["numbers"] >= 2 * 25
    assert verdict.checked["files"] == len(read_partial(left)["files"])
    assert invoke("verify", "result", left).exit_code == 1


def test_a_partial_result_is_not_saved_as_a_result(left, tmp_path):
    with pytest.raises(ValueError, match="is no result, and is not saved as one"):
        load_partial(left).save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_of_a_partial_result_says_so(left):
    assert report.result_footer(load_partial(left)).startswith("PARTIAL · kvarena")


# --- at every stage ---

STAGES = {
    "while a cell begins": ("kvarena.experiments.compare:Replay", 3, 2),
    "while a cell is summed up": ("kvarena.experiments.compare:_measured", 3, 2),
    "while kernels are checked": ("kvarena.experiments.samples:Samples.check", 1, 4),
    "while the first difference is looked for": ("kvarena.experiments.divergence:record_divergence", 1, 4),
}


@pytest.mark.parametrize("stage", STAGES)
def test_finished_and_missing_cells_are_all_cells_at_every_stage(stage, tmp_path, monkeypatch):
    target, call, cells = STAGES[stage]
    monkeypatch.setattr(*nth_call(target, call, stop))
    with pytest.raises(Interrupted, match=f"kept {cells} of "):
        comparison(out=tmp_path / "out")
    about = read_partial(tmp_path / "out.partial")
    assert len(about["finished"]) == cells
    assert about["missing"]
    assert set(about["finished"]).isdisjoint(about["missing"])
    assert len(load_partial(tmp_path / "out.partial").summary) == cells
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


@pytest.mark.parametrize("stage", ["write_figures", "write_report"])
def test_tables_stay_when_drawing_is_interrupted(stage, tmp_path, monkeypatch, quick_figures):
    result = whole("compare")
    result.save(tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(report, stage, lambda *arguments: stop())
    with pytest.raises(Interrupted, match=r"kept 1 of 2 parts"):
        result.save(tmp_path / "out")
    assert load_partial(tmp_path / "out.partial").summary.equals(load_result(tmp_path / "out").summary)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_before_anything_has_finished_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(*nth_call("kvarena.experiments.compare:Replay", 1, stop))
    with pytest.raises(Interrupted, match="nothing had finished, nothing was kept"):
        comparison(out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_a_place_nothing_is_kept_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(*nth_call("kvarena.experiments.replay:Replay.step", 160, stop))
    with pytest.raises(Interrupted, match="no --out was given"):
        comparison()
    assert list(tmp_path.iterdir()) == []


def test_a_second_ctrl_c_while_keeping_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(*nth_call("kvarena.experiments.replay:Replay.step", 160, stop))
    monkeypatch.setattr(*nth_call("kvarena.experiments.results:write_parquet", 2, stop))
    with pytest.raises(KeyboardInterrupt):
        comparison(out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_interrupted_run_left_is_replaced_and_foreign_files_are_not(tmp_path, monkeypatch):
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(*nth_call("kvarena.experiments.replay:Replay.step", 160, stop))
            with pytest.raises(Interrupted):
                comparison(out=tmp_path / "out")
    (tmp_path / "out.partial" / "mine.txt").write_text("mine")
    config = run_config({}, SETS)
    for start in (lambda: comparison(out=tmp_path / "out"), lambda: run_engine(config, out=tmp_path / "out")):
        with pytest.raises(ValueError, match=r"out\.partial: .*holds other files \(mine\.txt\); move it away"):
            start()
    assert (tmp_path / "out.partial" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "[" * 5000, '{"schema_version": 1}', '{"schema_version": 2, "partial": true}', "\udcff",
     '{"schema_version": 1, "partial": true, "kind": "compare", "unit": 3, "flying": "", "files": {}}',
     '{"schema_version": 1, "partial": true, "kind": "x", "unit": "x", "flying": "", "files": {}, "finished": [1]}'],
)  # fmt: skip
def test_a_broken_note_of_a_partial_result_is_one_clear_error(tmp_path, content):
    (tmp_path / "partial.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    for read in (load_result, load_partial, verify):
        with pytest.raises(ValueError, match=r"partial\.json: cannot be read as what an interrupted command left"):
            read(tmp_path)


# --- studies ---


def kept_tables(out: Path, kind: str, *names: str) -> dict[str, pd.DataFrame]:
    """The tables of an interrupted study, after checks that hold for all of them."""
    folder = partial_folder(out)
    about = read_partial(folder)
    assert about["kind"] == kind
    assert set(about["files"]) == {f"{name}.csv" for name in names}
    assert not out.exists()
    verdict = verify(folder)
    assert len(verdict.problems) == 1
    assert "is PARTIAL and no result" in verdict.problems[0]
    before = contents(folder)
    with pytest.raises(ValueError, match=f"is PARTIAL and no result: the {kind} was interrupted"):
        invoke("report", folder)
    assert contents(folder) == before
    return {name: pd.read_csv(folder / f"{name}.csv", keep_default_na=False) for name in names}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_capacity_study_keeps_its_finished_cells(tmp_path, jobs):
    plan = capacity_plan(
        "smollm2-135m",
        on=small_card("smollm2-135m", 400),
        panels=["equal"],
        loads=["short"],
        designs=["block-16", "token-16", "token-64"],
        rows=64,
        max_model_len=4096,
    )
    told: list[str] = []

    def tick(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            stop()

    with pytest.raises(Interrupted, match="kept 2 of 3 cells"):
        run_study(plan, beyond=False, jobs=jobs, tick=tick, out=tmp_path / "out")
    tables = kept_tables(tmp_path / "out", "capacity", *capacity_study.TABLES)
    assert [f"{row.panel}/{row.load}/{row.design}" for row in tables["capacity"].itertuples()] == [
        cell.name for cell in plan if any(text.startswith(f"{cell.name}:") for text in told)
    ]
    with pytest.raises(ValueError, match="is PARTIAL and no result"):
        load_capacity(tmp_path / "out.partial")


def test_a_rate_study_keeps_its_finished_rates(tmp_path):
    workload = {"trace": "chat", "options": {"num_sessions": 6}, "requests": 24}
    plan = rate_plan({"workload": workload, "pool": {"pool": "1 GiB"}, "rate": {"shares": [0.5, 1.0], "hit_rates": []}})
    told: list[str] = []

    def tick(text: str) -> None:
        told.append(text)
        if len(told) == 5:  # two of the backlog, two of the first rate, one of the second
            stop()

    with pytest.raises(Interrupted, match="kept 1 of 2 rates"):
        run_rate(plan, tick=tick, out=tmp_path / "out")
    rates = kept_tables(tmp_path / "out", "rate", "rates")["rates"]
    assert rates["share"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="is PARTIAL and no result"):
        load_rate(tmp_path / "out.partial")


def test_a_page_size_study_keeps_its_finished_workloads(tmp_path, monkeypatch):
    monkeypatch.setattr(one_axis, "concurrency", lambda *arguments: 1)
    monkeypatch.setattr(*nth_call("kvarena.experiments.one_axis:_replayed", 6, stop))
    with pytest.raises(Interrupted, match="kept 1 of 2 workloads"):
        one_axis.study(["chat", "few_shot"], pages=[1, 16], requests=20, rounds=1, out=tmp_path / "out")
    rows = kept_tables(tmp_path / "out", "pagesize", "pagesize")["pagesize"]
    assert set(rows["workload"]) == {"chat"}
    with pytest.raises(ValueError, match="is PARTIAL and no result"):
        one_axis.load(tmp_path / "out.partial")


def test_ablations_keep_their_finished_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(*nth_call("kvarena.experiments.ladder_ablations:_row", 4, stop))
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}
    with pytest.raises(Interrupted, match=r"kept 3 of \d+ cells"):
        ablations(base, tmp_path / "out")
    rows = kept_tables(tmp_path / "out", "ablations", "ablations")["ablations"]
    assert rows["design"].tolist() == list(ladder_ablations.DESIGNS)[:3]
    with pytest.raises(ValueError, match="is PARTIAL and no result"):
        load_ablations(tmp_path / "out.partial")


def test_claims_keep_their_findings_and_say_how_to_go_on(tmp_path):
    names = ("shared_prompt_201_pages", "gqa_3x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*nth_call("kvarena.experiments.claims:test_claim", 2, stop))
        done = invoke("claims", *names, "--out", tmp_path / "out")
    assert done.exit_code == 130
    rows = json.loads((tmp_path / "out" / "claims.json").read_text())["findings"]
    assert len(rows) == 1
    assert verify(tmp_path / "out").problems == []


def walk(out: Path) -> None:
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}
    ladder(base, out, groups=["duplicates"], jobs=1, rounds=0)


def test_a_ladder_that_is_stopped_while_it_takes_times_says_that_its_cells_are_kept(tmp_path, monkeypatch):
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}
    monkeypatch.setattr(*nth_call("kvarena.experiments.ladder:measured", 1, stop))
    with pytest.raises(Interrupted, match=r"all \d+ cells are finished in .*; the same command goes on from there"):
        ladder(base, tmp_path / "out", groups=["duplicates"], jobs=1, rounds=1)
    states = {cell["state"] for cell in open_sweep(tmp_path / "out" / "sweep").cells}
    assert states == {"finished"}


def redraw(out: Path) -> None:
    fields = {"trace": "chat", "options": {"num_sessions": 24}, "pool": "1 GiB", "kernel_batches": 0}
    replicate(config_from_keywords(fields), out, replicates=10, jobs=1)


@pytest.mark.parametrize(("study", "cells"), [(walk, "sweep"), (redraw, "")])
def test_studies_made_of_a_sweep_say_that_they_go_on_from_there(study, cells, tmp_path, monkeypatch):
    monkeypatch.setattr(*nth_call("kvarena.experiments.sweep:_store", 2, stop))
    with pytest.raises(Interrupted, match=r"1 of \d+ cells are finished in .*; the same command goes on from there"):
        study(tmp_path / "out")
    states = [cell["state"] for cell in open_sweep(tmp_path / "out" / cells).cells]
    assert states.count("finished") == 1
    assert set(states) == {"finished", "pending"}
