"""Sweeps: every cell once, failures on record, and nothing lost whatever is killed."""

from __future__ import annotations

import doctest
import json
import multiprocessing
import os
import shutil
import signal
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments import sweep_plan
from kvarena.experiments.config import config_from_mapping
from kvarena.experiments.sweep import open_sweep, sweep
from kvarena.experiments.sweep_plan import code_digest, load_sweep, points, sweep_cells
from kvarena.experiments.sweep_workers import LocalWorkers, Outcome, carry_out
from kvarena.experiments.verify_result import verify
from support.sweeps import BASE, GRID, DeadlyCell, config_file, finished, group_is_gone, start, wait_for, written

CELLS = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The small sweep from beginning to end in two processes."""
    folder = tmp_path_factory.mktemp("sweep")
    config = config_file(folder / "sweep.toml")
    return config, sweep(config, folder / "out", jobs=2)


# --- the plan ---


def test_doctests():
    assert doctest.testmod(sweep_plan).failed == 0


def test_a_grid_is_every_combination_and_a_list_is_what_stands_there():
    assert len(points(GRID)) == CELLS
    assert points(GRID)[1] == {"live": 1, "allocators.0.page_size": 16, "outputs": "replay"}
    listed = [{"live": 1, "pool": "10 %"}, {"engine": {"outputs": "replay"}}]
    assert points(listed) == [{"live": 1, "pool": "10 %"}, {"engine.outputs": "replay"}]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, r"sweep: expected a table \[sweep\] of lists, or tables \[\[sweep\]\]"),
        ({}, "sweep: expected a table"),
        ([], "sweep: expected a table"),
        ([{"live": 1}, 3], "sweep: expected a table"),
        ({"live": 3}, "sweep.live: expected a list of values, found 3"),
        ({"live": []}, r"sweep.live: expected a list of values, found \[\]"),
        ({"live": [1, 0]}, r"cell 2 \(live=0\): engine.live: .* found 0"),
        ({"lives": [1]}, r"cell 1 \(lives=1\): lives: unknown field; known: trace"),
        ({"allocators.0.page_size": [16, "x"]}, r"cell 2 .*page_size"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(part, message, tmp_path):
    data = {**BASE, "sweep": part} if part is not None else BASE
    with pytest.raises(ValueError, match=message):
        sweep(data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.toml: cannot be read as a config"):
        load_sweep(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ValueError, match=r"bad.toml: not TOML"):
        load_sweep(tmp_path / "bad.toml")
    with pytest.raises(ValueError, match=r"s.toml: cell 1 .*: engine.live"):
        load_sweep(config_file(tmp_path / "s.toml", sweep={"live": [-1]}))


def test_values_of_every_type_reach_the_config():
    data = {
        "pool": {"pool": ["1 GiB"]},
        "sweep": [
            {"workload": {"options": {"num_sessions": 3, "retry_share": 0.25}}, "requests": 7},
            {"pool": [100, "2 %"], "allocators": [{"kind": "block", "prefix_cache": False}, "vllm"]},
            {"trace": 'a "quoted" \\ näme'},
        ],
    }
    first, second, third = (cell.config for cell in sweep_cells(data))
    assert first["workload"]["options"] == {"num_sessions": 3, "retry_share": 0.25}
    assert first["workload"]["requests"] == 7
    assert second["pool"]["pool"] == [100, "2 %"]
    assert second["allocators"][0]["prefix_cache"] is False
    assert third["workload"]["trace"] == 'a "quoted" \\ näme'


def test_equal_cells_are_one_and_kernels_are_left_out_unless_asked_for():
    cells = sweep_cells({**BASE, "sweep": [{"live": 1}, {"engine.live": 1}, {"engine": {"kernel_batches": 3}}]})
    assert [cell.config["engine"]["kernel_batches"] for cell in cells] == [0, 3]


def test_a_key_changes_with_config_code_and_contents_of_the_trace(tmp_path, monkeypatch):
    trace = tmp_path / "t.jsonl"

    def key(**fields):
        (cell,) = sweep_cells({"workload": {"trace": str(trace)}, "sweep": [{"pool": "1 GiB", **fields}]})
        return cell.key

    trace.write_text('{"token_ids": [1, 2]}\n')
    first = key()
    assert key() == first
    assert key(live=2) != first
    trace.write_text('{"token_ids": [1, 2, 3]}\n')
    os.utime(trace, ns=(1, 1))
    changed = key()
    assert changed != first
    monkeypatch.setattr(sweep_plan, "code_digest", lambda: "another version")
    assert key() != changed


# --- what is written ---


def test_every_cell_is_a_result_and_the_table_holds_them_all(undisturbed):
    config, done = undisturbed
    assert [cell["state"] for cell in done.cells] == ["finished"] * CELLS
    assert [cell["point"] for cell in done.cells] == points(GRID)
    assert len(done.table) == CELLS * 2 * 2
    assert not done.failures
    for cell in load_sweep(config)[:3]:
        result = done.result(cell.key)
        rows = done.table[done.table["cell"] == cell.key]
        assert rows["token_hit_rate"].tolist() == result.summary["token_hit_rate"].tolist()
        assert (rows["sweep.live"] == cell.point["live"]).all()
        assert set(carry_out(cell, ".", code_digest()).files) == {path.name for path in result.path.iterdir()}


def test_the_number_of_processes_does_not_matter(undisturbed, tmp_path):
    config, done = undisturbed
    sweep(config, tmp_path / "one", jobs=1)
    assert written(tmp_path / "one") == written(done.path)


def test_finished_cells_are_taken_over_by_a_longer_sweep(tmp_path):
    short, long = ({**BASE, "sweep": {"live": live}} for live in ([1, 2], [1, 2, 3]))
    sweep(short, tmp_path / "out", jobs=1)
    before = {path.name: path.stat().st_ino for path in finished(tmp_path / "out")}
    done = sweep(long, tmp_path / "out", jobs=1)
    after = {path.name: path.stat().st_ino for path in finished(tmp_path / "out")}
    assert len(after) == 3
    assert before.items() <= after.items()
    assert done.table["sweep.live"].unique().tolist() == [1, 2, 3]


def test_a_failing_cell_is_recorded_with_its_traceback_and_stops_nothing(tmp_path):
    data = {**BASE, "sweep": {"pool": ["600 MiB", "1 MiB", "700 MiB"]}}
    done = sweep(data, tmp_path / "out", jobs=1)
    assert [cell["state"] for cell in done.cells] == ["finished", "failed", "finished"]
    (failure,) = done.failures.values()
    assert failure["point"] == {"pool": "1 MiB"}
    assert failure["error"].startswith("PoolTooSmallError: pool: 1048576 bytes hold no page")
    assert "Traceback (most recent call last)" in failure["traceback"]
    assert done.table["sweep.pool"].unique().tolist() == ["600 MiB", "700 MiB"]
    again = sweep(data, tmp_path / "out", jobs=1)
    assert [cell["state"] for cell in again.cells] == ["finished", "failed", "finished"]


def test_a_failed_cell_that_succeeds_later_is_no_longer_on_record(tmp_path):
    trace = tmp_path / "late.jsonl"
    data = {"workload": {"trace": str(trace)}, "pool": {"pool": "1 GiB"}, "sweep": {"live": [1]}}
    (first,) = sweep_cells(data)
    done = sweep(data, tmp_path / "out", jobs=1)
    assert list(done.failures) == [first.key]
    trace.write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [1, 2, 4]}\n')
    done = sweep(data, tmp_path / "out", jobs=1)
    assert [cell["state"] for cell in done.cells] == ["finished"]
    assert not done.failures


def test_engine_runs_are_swept_by_the_same_command(tmp_path):
    options = {"num_sessions": 3, "num_system_prompts": 1, "max_message": 40, "max_reply": 20}
    data = {
        "workload": {"trace": "chat", "options": options},
        "pool": {"pool": "1 GiB"},
        "allocator": {"name": "vllm"},
        "sweep": {"scheduler": ["vllm", "sglang"]},
    }
    done = sweep(data, tmp_path / "out", jobs=1)
    assert not done.failures
    assert done.result(done.cells[1]["key"]).manifest["kind"] == "run"
    assert done.table["sweep.scheduler"].tolist() == ["vllm", "sglang"]


def test_a_worker_with_other_code_does_not_carry_out_a_cell():
    (cell,) = sweep_cells({**BASE, "sweep": {"live": [1]}})
    outcome = carry_out(cell, ".", "another version")
    assert outcome.failed
    assert "not that of the sweep" in outcome.error


# --- processes that die ---


def test_a_cell_that_kills_its_process_fails_alone():
    cells = sweep_cells({**BASE, "sweep": {"live": [1, 2, 3, 4]}})
    deadly = DeadlyCell("deadly", "compare", {}, {})
    found = {cell.key: outcome for cell, outcome in LocalWorkers(2).outcomes([cells[0], deadly, *cells[1:]])}
    assert len(found) == 5
    assert [key for key, outcome in found.items() if outcome.failed] == ["deadly"]
    assert "process that ran it died" in found["deadly"].error


def test_leaving_early_stops_the_processes_at_once():
    cells = sweep_cells({**BASE, "sweep": {"live": [1, 2, 3, 4]}})
    before = set(multiprocessing.active_children())
    outcomes = LocalWorkers(2).outcomes(cells)
    next(outcomes)
    outcomes.close()
    wait_for(lambda: not set(multiprocessing.active_children()) - before, 20)


def test_sigkill_at_any_moment_and_again_ends_with_the_results_of_an_undisturbed_run(undisturbed, tmp_path):
    config, done = undisturbed
    out = tmp_path / "out"
    for goal in (0, 2, 5, 9):
        process = start("sweep", config, "--out", out, "--jobs", 2, "--quiet")
        # Before the first cell, and at whatever moment finds this many of them finished.
        wait_for(lambda goal=goal: (out / "sweep.json").is_file() and len(finished(out)) >= goal)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        wait_for(lambda group=process.pid: group_is_gone(group), 20)
        verdict = verify(out)
        assert verdict.problems == []
        assert verdict.notes[0].startswith(f"{len(finished(out))} of {CELLS} cells are finished; the same command")
        assert [cell["state"] for cell in open_sweep(out).cells].count("finished") == len(finished(out))
        for folder in finished(out):
            assert {p.name for p in folder.iterdir()} == {p.name for p in (done.path / "cells" / folder.name).iterdir()}
    survived = {path.name: path.stat().st_ino for path in finished(out)}
    assert 9 <= len(survived) <= CELLS
    assert start("sweep", config, "--out", out, "--jobs", 2, "--quiet").wait(120) == 0
    assert written(out) == written(done.path)
    assert survived.items() <= {path.name: path.stat().st_ino for path in finished(out)}.items()


def test_what_a_killed_sweep_left_half_is_cleared(undisturbed, tmp_path):
    config, done = undisturbed
    out = tmp_path / "out"
    shutil.copytree(done.path, out)
    half = out / "cells" / ".0123.77.partial"
    half.mkdir()
    (half / "result.json").write_text("{")
    (out / ".sweep.csv.77.partial").write_text("half")
    shutil.rmtree(finished(out)[0])
    sweep(config, out, jobs=1)
    assert written(out) == written(done.path)


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.killpg, signal.SIGTERM, 143), (os.kill, signal.SIGTERM, 143)],
    ids=["ctrl-c", "sigterm-group", "sigterm"],
)
def test_an_interrupt_says_so_in_one_line_and_keeps_what_is_finished(undisturbed, tmp_path, send, number, code):
    config, done = undisturbed
    out = tmp_path / "out"
    process = start("sweep", config, "--out", out, "--jobs", 2, "--quiet")
    wait_for(lambda: len(finished(out)) >= 2)
    send(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    (said,) = errors.splitlines()
    assert said.startswith(f"kvarena: {'interrupted' if code == 130 else 'terminated'}; ")
    assert "the same command goes on from there" in said
    wait_for(lambda: group_is_gone(process.pid), 20)
    kept = open_sweep(out)
    states = [cell["state"] for cell in kept.cells]
    assert states.count("finished") == len(finished(out)) >= 2
    assert set(kept.table["cell"]) == {cell["key"] for cell in kept.cells if cell["state"] == "finished"}
    everything = written(done.path)
    for path, content in written(out).items():
        assert path in ("sweep.json", "sweep.csv") or content == everything[path]


# --- the folder ---


def test_two_sweeps_do_not_write_to_one_folder(tmp_path):
    config = config_file(tmp_path / "sweep.toml")
    process = start("sweep", config, "--out", tmp_path / "out", "--jobs", 1, "--quiet")
    try:
        wait_for(lambda: (tmp_path / "out" / "sweep.json").is_file())
        with pytest.raises(ValueError, match="another sweep is writing there"):
            sweep(config, tmp_path / "out", jobs=1)
    finally:
        process.kill()
        process.communicate()


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\)"):
        sweep({**BASE, "sweep": {"live": [1]}}, tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a folder, found a file"):
        sweep({**BASE, "sweep": {"live": [1]}}, tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be read as a sweep"):
        open_sweep(tmp_path / "mine")
    with pytest.raises(ValueError, match="jobs: expected at least 1"):
        LocalWorkers(0)


def test_an_outcome_without_files_has_failed():
    assert Outcome(error="x").failed
    assert not Outcome({"a": b""}).failed


# --- the command line ---


def test_the_command_says_how_far_it_is_and_what_failed(tmp_path):
    config = config_file(tmp_path / "s.toml", sweep={"pool": ["600 MiB", "1 MiB"]})
    process = start("sweep", config, "--out", tmp_path / "out", "--jobs", 1)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out.strip() == f"1 of 2 cells finished: {tmp_path / 'out' / 'sweep.csv'}"
    assert "cell 1 of 2: pool=600 MiB; about" in errors
    assert "cell 2 of 2: pool=1 MiB: FAILED, PoolTooSmallError: pool: 1048576 bytes hold no page" in errors
    assert "failed: {'pool': '1 MiB'}: PoolTooSmallError" in errors
    again = start("sweep", config, "--out", tmp_path / "out", "--jobs", 1).communicate(timeout=120)[1]
    assert again.startswith("1 of 2 cells are finished already\ncell 2 of 2: ")
    index = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [cell["state"] for cell in index["cells"]] == ["finished", "failed"]


def test_the_shipped_example_is_a_sweep():
    import kvarena.experiments.configs as configs

    path = Path(next(iter(configs.__path__))) / "sweep-chat.toml"
    data = tomllib.loads(path.read_text())
    assert len(load_sweep(path)) == len(points(data["sweep"])) > 1
    config_from_mapping({name: part for name, part in data.items() if name != "sweep"})


def test_the_table_reads_back_with_numbers(undisturbed):
    _, done = undisturbed
    assert pd.api.types.is_float_dtype(done.table["token_hit_rate"])
    assert open_sweep(done.path).table.equals(done.table)
