"""`kvarena verify result`: what stands is said to stand, and whatever is changed in it is found and named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kvarena.allocators.config import block
from kvarena.experiments.cli import app
from kvarena.experiments.compare import compare
from kvarena.experiments.engine.run import run_engine
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.forking import ALPACA, frame, saving
from kvarena.experiments.results import KEYS, Result, load_result
from kvarena.experiments.style import printable
from kvarena.experiments.sweep import open_sweep, sweep
from kvarena.experiments.verify_numbers import COMPARE, RUN, UNSEEN
from kvarena.experiments.verify_result import Verdict, verify, verify_tables
from support.commands import invoke
from support.requests import request, trace
from support.small import OPTIONS, shared
from typer.testing import CliRunner

RUN_SETS = [
    *("trace='chat'", "requests=80", "options={num_sessions=12}", "pool='450 MiB'", "speed=20.0"),
    *("steps_every=1", "ttft_ms=4000.0", "tpot_ms=20.0"),
]


@cache
def engine_run(*sets: str) -> Result:
    """An engine run under pressure: preemptions, a rejection, a reply cut by the pool. Read only."""
    return run_engine(run_config({}, [*RUN_SETS, *sets]))


@cache
def contiguous_comparison() -> Result:
    """Designs that count other things: runs with reservations, and the textbook cache."""
    requests = [request(f"r{i}", range(10 * i, 10 * i + 40)) for i in range(6)]
    specs = [{"kind": "contiguous", "sizing": "pow2"}, "exact", block(page_size=4)]
    return compare(trace(requests), allocators=specs, pool="1 GiB", live=2, kernel_batches=0)


RESULTS = {
    "compare": shared,
    "other designs": contiguous_comparison,
    "run": engine_run,
    "run of sglang, closed": lambda: engine_run(
        "preset='sglang-0.5.22'", "max_num_seqs=16", "sessions='closed'", "allocator.page_size=16"
    ),
    "run with a host tier": lambda: engine_run("result_lag=0", "host_pool='1 GiB'", "max_model_len=2000"),
    "run, every tenth step": lambda: engine_run("steps_every=10"),
    "run on a fixed clock": lambda: engine_run("clock='fixed'"),
    "run of token on a fixed clock": lambda: engine_run("clock='fixed'", "allocator.kind='token'"),
    "run on both clocks": lambda: engine_run("clock='both'"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_as_they_are_written_stand(name):
    verdict = verify_tables(RESULTS[name]())
    assert verdict.problems == []
    assert verdict.checked["numbers"] >= 25 * len(RESULTS[name]().summary)
    assert verdict.checked["laws"] == 13 * len(RESULTS[name]().summary)


def test_the_run_under_pressure_shows_what_it_is_meant_to_show():
    rows = engine_run().requests
    assert rows["preemptions"].sum() > 0
    assert {"stop", "rejected", "pool"} <= set(rows["end"])


def test_a_fixed_clock_cuts_and_leaves_out_and_says_so_alike_in_rows_and_summary():
    result = engine_run("clock='fixed'")
    cut = result.requests[result.requests["end"] == "pool"]
    assert len(cut) > 0
    assert (cut["cut_output_tokens"] > 0).all()
    assert (cut["last_token_s"] <= cut["end_s"]).all()
    whole = result.requests[result.requests["end"] == "stop"]
    assert (whole["last_token_s"] > whole["first_token_s"]).any()
    assert result.summary[["mean_batch", "gpu_share", "host_share", "prefill_share"]].isna().all(axis=None)
    problems = verify_tables(replace(result, requests=result.requests.assign(output_tokens=1))).problems
    assert any("output_tokens is" in problem for problem in problems)


def test_every_summary_column_is_recomputed_or_named_as_not_in_the_rows():
    for name in ("compare", "other designs"):
        assert set(RESULTS[name]().summary.columns) - set(KEYS) <= COMPARE.keys()
        assert len(RESULTS[name]().summary.columns) >= 33
    columns = set(engine_run().summary.columns) - set(KEYS)
    assert columns <= RUN.keys() | UNSEEN.keys()
    assert len(columns & RUN.keys()) >= 50
    assert RUN.keys().isdisjoint(UNSEEN)


def changed(value: object) -> object:
    """Another value of the same kind: off by one, or by a part in a million."""
    if isinstance(value, str):
        return value + "x"
    if value is None or value != value:
        return 0.5
    return value + 1 if isinstance(value, int | np.integer) else value * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("name", ["compare", "run"])
def test_each_number_that_was_changed_is_named(name):
    result = RESULTS[name]()
    for column in sorted(set(result.summary.columns) - set(KEYS) - UNSEEN.keys() | {"evicted_pages"} - RUN.keys()):
        if name == "run" and column in UNSEEN:
            continue
        summary = result.summary.astype(object)
        summary.loc[0, column] = changed(result.summary[column].iloc[0])
        problems = verify_tables(replace(result, summary=summary)).problems
        assert any(f": {column} is " in problem for problem in problems), column


def test_a_column_of_another_version_is_said_to_be_unknown():
    result = replace(shared(), summary=shared().summary.assign(magic=1.0))
    assert "column 'magic' is none that this version can recompute" in verify_tables(result).problems[0]


# Edits of rows, each with the law that has to notice it. The summary is left alone: a forger who keeps it consistent
# would still break the law.
ROW_EDITS = {
    "a page too many": ("compare", "steps", "free", 1, "free \\+ evictable \\+ in use"),
    "a page in use too few": ("run", "steps", "in_use", -1, "free \\+ evictable \\+ in use"),
    "more shared than in use": ("compare", "steps", "shared", 10**6, "page counts"),
    "waste without pages": ("compare", "steps", "wasted_slots", 10**9, "page counts"),
    "a negative count": ("compare", "steps", "evicted_pages", -(10**6), "page counts"),
    "a hit beyond the prompt": ("compare", "requests", "hit_tokens", 10**6, "hits \\+ misses"),
    "a hit that nobody could leave": ("compare", "requests", "hit_tokens", 16, "hits \\+ misses"),
    "a prefix beyond the prompt": ("compare", "requests", "prefix_tokens", 10**6, "hits \\+ misses"),
    "a ceiling of its own": ("compare", "requests", "ceiling_tokens", 1, "ceilings"),
    "a request numbered twice": ("compare", "requests", "index", 1, "each request once"),
    "an output that does not add up": ("run", "requests", "output_tokens", 1, "output = served"),
    "an arrival after its end": ("run", "requests", "arrival_s", 1e6, "times go forward"),
    "a first token before the arrival": ("run", "requests", "first_token_s", -1e6, "times go forward"),
    "a clock that goes back": ("run", "steps", "time_s", 1e6, "times go forward"),
    "an arrival out of order": ("compare", "requests", "arrival_s", 1e6, "times go forward"),
    "a request that nobody knows of": ("run", "steps", "waiting", 50, "ended \\+ running"),
    "a fixed clock that goes back": ("run on a fixed clock", "steps", "time_s", 1e6, "times go forward"),
    "one more on a fixed clock": ("run on a fixed clock", "steps", "running", 50, "ended \\+ running"),
    "a token computed for nobody": ("run with a host tier", "steps", "new_tokens", 1, "tokens computed"),
    "tokens computed twice": ("run", "steps", "new_tokens", 10**4, "tokens computed"),
    "a prompt computed again and not said so": ("run", "requests", "recomputed_tokens", 10**4, "tokens computed"),
    "evictions that the run had not": ("compare", "steps", "evicted_pages", 10**6, "evictions"),
}


@pytest.mark.parametrize("edit", ROW_EDITS)
def test_each_law_notices_a_row_that_breaks_it(edit):
    name, table, column, add, law = ROW_EDITS[edit]
    result = RESULTS[name]()
    edited = getattr(result, table).copy()
    edited[column] = edited[column].astype(float if isinstance(add, float) else edited[column].dtype)
    edited.loc[edited.index[0], column] += add
    problems = verify_tables(replace(result, **{table: edited})).problems
    assert any(pd.Series([problem]).str.contains(law).item() for problem in problems), problems[:5]


@pytest.mark.parametrize("end", ["", "lost"])
def test_a_request_that_never_ended_is_named(end):
    rows = engine_run().requests.copy()
    rows.loc[3, "end"] = end
    problems = verify_tables(replace(engine_run(), requests=rows)).problems
    assert any("ended neither way" in problem and rows.loc[3, "request_id"] in problem for problem in problems)


def test_a_budget_that_does_not_add_up_is_named():
    manifest = json.loads(json.dumps(shared().manifest))
    manifest["budgets"][0]["kv_bytes"] += 1
    problems = verify_tables(replace(shared(), manifest=manifest)).problems
    assert sum("budget:" in problem for problem in problems) == 2


# --- folders ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared().save(tmp_path_factory.mktemp("verify") / "out")


def test_a_folder_stands_with_all_its_files(folder):
    verdict = verify(folder)
    assert verdict.problems == []
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert verdict.checked["files"] == len(files) - 1  # all but the provenance, which holds the hashes


ADDING = {
    "report in its place": lambda out: ["report", out],
    "report of another name": lambda out: ["report", out, "--out", out / "page.html"],
    "figures in their place": lambda out: ["plot", out, "--out", out / "figures"],
    "figures in a new folder": lambda out: ["plot", out, "--out", out / "more" / "figures"],
    "bounds": lambda out: ["bounds", out, "--out", out / "bounds.csv"],
    "explain": lambda out: ["explain", out, "--out", out / "why.parquet"],
}


@pytest.mark.parametrize("what", ADDING)
def test_what_a_command_adds_to_a_result_leaves_it_standing(folder, tmp_path, what):
    out = shutil.copytree(folder, tmp_path / "out")
    before = {path for path in out.rglob("*") if path.is_file()}
    invoke(*ADDING[what](out))
    assert verify(out).problems == []
    assert what.endswith("place") or {path for path in out.rglob("*") if path.is_file()} > before


def test_every_file_that_was_changed_lost_or_added_is_named(folder, tmp_path):
    out = shutil.copytree(folder, tmp_path / "out")
    (out / "figures" / "hit_rate.svg").write_bytes(b"<svg/>")
    (out / "report.html").unlink()
    (out / "figures" / "mine.png").write_bytes(b"")
    problems = verify(out).problems
    assert problems == [
        "figures/hit_rate.svg: was changed after it was written",
        "figures/mine.png: is not among the files that were written",
        "report.html: was written, and is gone",
    ]


def test_a_folder_of_before_hashes_were_kept_says_so(folder, tmp_path):
    out = shutil.copytree(folder, tmp_path / "out")
    data = json.loads((out / "provenance.json").read_text())
    del data["files"]
    (out / "provenance.json").write_text(json.dumps(data))
    verdict = verify(out)
    assert verdict.stands
    assert "holds no hashes" in verdict.notes[0]


def test_another_trace_in_the_place_of_the_replayed_one_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "t.jsonl"
    file.write_text('{"token_ids": [1, 2, 3]}\n')
    compare("t.jsonl", allocators=["vllm"], pool="1 GiB", kernel_batches=0).save("out")
    assert verify("out").problems == []
    file.write_text('{"token_ids": [1, 2, 4]}\n')
    assert "is not the trace that was replayed" in verify("out").problems[0]
    file.unlink()
    verdict = verify("out")
    assert verdict.stands
    assert "is not at hand" in verdict.notes[0]


@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_run_made_again_gives_the_same_rows(name, tmp_path, monkeypatch):
    from kvarena.experiments import report

    monkeypatch.setattr(report, "write_figures", lambda *args: [])
    monkeypatch.setattr(report, "write_report", lambda *args: None)
    out = RESULTS[name]().save(tmp_path / "out")
    assert verify(out, again=True).problems == []
    rows = pd.read_parquet(out / "requests.parquet")
    rows.loc[0, "source"] = 5  # no law and no number depends on it
    rows.to_parquet(out / "requests.parquet")
    problems = verify(out, again=True).problems
    assert "requests.parquet: was changed" in problems[0]
    assert "requests: does not come out again" in problems[1]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}
    base["allocators"] = [{"name": "vllm"}]
    out = tmp_path_factory.mktemp("sweep") / "out"
    sweep({**base, "sweep": {"live": [1, 2], "pool": ["450 MiB", "1 B"]}}, out, jobs=1)
    return out


def test_a_sweep_stands_cell_by_cell_and_says_what_is_missing(swept):
    verdict = verify(swept)
    assert verdict.problems == []
    assert verdict.notes == [  # 1 byte holds no page
        "2 of 4 cells are finished, 2 failed; the same command into the same folder goes on from there"
    ]
    assert verdict.checked["index"] == 4
    assert verdict.checked["files"] == 2 * 6


def test_a_sweep_whose_table_or_cell_was_edited_is_found(swept, tmp_path):
    out = shutil.copytree(swept, tmp_path / "out")
    text = (out / "sweep.csv").read_text()
    (out / "sweep.csv").write_text(text.replace("vllm", "mllv", 1))
    cell = next((out / "cells").iterdir())
    frame = pd.read_csv(cell / "summary.csv")
    frame["hit_tokens"] += 1
    frame.to_csv(cell / "summary.csv", index=False)
    index = json.loads((out / "sweep.json").read_text())
    index["cells"] = [{**row, "state": "finished"} for row in index["cells"]]
    (out / "sweep.json").write_text(json.dumps(index))
    problems = " | ".join(verify(out).problems)
    for said in (
        "sweep.csv: is not",
        "hit_tokens is",
        "summary.csv: was changed",
        "is failed, the index says finished",
    ):
        assert said in problems


def killed(swept, tmp_path, states, table):
    """The folder as SIGKILL leaves it: an index from before, and no table or an earlier one."""
    out = shutil.copytree(swept, tmp_path / "out")
    index = json.loads((out / "sweep.json").read_text())
    for cell, state in zip(index["cells"], states, strict=True):
        cell["state"] = state
    (out / "sweep.json").write_text(json.dumps(index))
    lines = (out / "sweep.csv").read_text().splitlines(keepends=True)
    (out / "sweep.csv").unlink()
    if table is not None:
        (out / "sweep.csv").write_text("".join(lines[: 1 + table]))
    return out, [cell["key"] for cell in index["cells"]]


KILLED = {
    "the first run": (["pending"] * 4, None),
    "a longer sweep": (["finished", "failed", "pending", "pending"], 1),
    "failed cells tried again": (["failed", "failed", "finished", "failed"], 1),
    "before its table": (["finished", "pending", "finished", "pending"], 2),
}


@pytest.mark.parametrize(("states", "table"), KILLED.values(), ids=KILLED)
def test_a_killed_sweep_stands_with_what_its_cells_say(swept, tmp_path, states, table):
    out, keys = killed(swept, tmp_path, states, table)
    verdict = verify(out)
    assert verdict.problems == []
    assert verdict.notes == [
        "2 of 4 cells are finished, 2 failed; the same command into the same folder goes on from there",
        "it was killed: its index and sweep.csv are from before, and are written anew when it goes on",
    ]
    assert invoke("verify", "result", out).exit_code == 0
    made = open_sweep(out)  # what other commands see of it
    assert [cell["state"] for cell in made.cells] == ["finished", "failed", "finished", "failed"]
    assert set(made.table["cell"]) == {keys[0], keys[2]}
    assert made.table.equals(open_sweep(swept).table)
    for folder in (out / "cells").iterdir():
        shutil.rmtree(folder)
    if "finished" not in states and table is None:
        assert verify(out).notes[0].startswith("0 of 4 cells are finished, 2 failed;")
        assert verify(out).stands


def cell_rows_edited(out, keys):
    frame = pd.read_csv(out / "cells" / keys[0] / "summary.csv")
    frame["hit_tokens"] += 1
    frame.to_csv(out / "cells" / keys[0] / "summary.csv", index=False)


def cell_cut(out, keys):
    file = out / "cells" / keys[0] / "requests.parquet"
    file.write_bytes(file.read_bytes()[:100])


DAMAGE = {
    "a number of a cell": (cell_rows_edited, "hit_tokens is"),
    "a cut file of a cell": (cell_cut, "requests.parquet"),
    "a cell without its manifest": (
        lambda out, keys: (out / "cells" / keys[0] / "result.json").unlink(),
        "result.json",
    ),
    "a cell without its summary": (lambda out, keys: (out / "cells" / keys[0] / "summary.csv").unlink(), "summary"),
    "a cell that the index has and that is gone": (
        lambda out, keys: shutil.rmtree(out / "cells" / keys[2]),
        "is pending, the index says finished",
    ),
    "a number of the table": (
        lambda out, keys: (out / "sweep.csv").write_text((out / "sweep.csv").read_text().replace("vllm", "mllv", 1)),
        "sweep.csv: is not",
    ),
    "a foreign row of the table": (
        lambda out, keys: (out / "sweep.csv").write_text((out / "sweep.csv").read_text().replace(keys[0], "abc", 1)),
        "sweep.csv: is not",
    ),
    "a point of the table": (
        lambda out, keys: (out / "sweep.csv").write_text(
            (out / "sweep.csv").read_text().replace(f"{keys[0]},1,", f"{keys[0]},7,")
        ),
        "sweep.csv: is not",
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_in_a_killed_sweep_is_wrong_all_the_same(swept, tmp_path, damage, said):
    out, keys = killed(swept, tmp_path, ["pending", "failed", "finished", "failed"], 1)
    assert verify(out).stands
    damage(out, keys)
    problems = verify(out).problems
    assert any(said in problem for problem in problems), problems
    assert invoke("verify", "result", out).exit_code == 1


def test_a_table_that_lacks_cells_is_wrong_where_nothing_was_killed(swept, tmp_path):
    out, _ = killed(swept, tmp_path, ["finished", "failed", "finished", "failed"], 1)
    assert verify(out).problems == ["sweep.csv: is not the finished cells' summaries, row for row"]


@pytest.mark.parametrize("key", ["../../elsewhere", "/etc", "", "..", 7, None, ["a"]])
def test_a_sweep_index_cannot_lead_out_of_its_folder(swept, tmp_path, key):
    out = shutil.copytree(swept, tmp_path / "out")
    index = json.loads((out / "sweep.json").read_text())
    index["cells"][0]["key"] = key
    (out / "sweep.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"sweep.json: cannot be read as a sweep .*expected a key"):
        verify(out)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_of_forks_is_computed_again(tmp_path, kind):
    table = frame([saving(ALPACA, "beam", {"kind": "block", "page_size": 16}, 2, requests=2, seed=3)])
    path = tmp_path / f"forks.{kind}"
    write = {"csv": lambda: table.to_csv(path, index=False), "parquet": lambda: table.to_parquet(path)}[kind]
    write()
    assert verify(path).problems == []
    table["saved"] += 1e-6
    write()
    assert "saved is" in verify(path).problems[0]


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00", b"lengths,method\n"])
def test_a_file_that_is_no_table_of_forks_is_one_clear_error(tmp_path, content):
    path = tmp_path / "forks.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"forks\.csv: (cannot be read|is no result of kvarena)"):
        verify(path)


def test_the_command_prints_counts_and_ends_with_one_when_something_is_wrong(folder, tmp_path):
    fine = CliRunner().invoke(app, ["verify", "result", str(folder)])
    assert fine.exit_code == 0
    assert "stands (checked: " in fine.output
    out = shutil.copytree(folder, tmp_path / "out")
    summary = pd.read_csv(out / "summary.csv")
    summary.loc[0, "token_hit_rate"] += 1e-6
    summary.to_csv(out / "summary.csv", index=False)
    wrong = CliRunner().invoke(app, ["verify", "result", str(out), "--json"])
    assert wrong.exit_code == 1
    data = json.loads(wrong.output)
    assert not data["stands"]
    assert len(data["problems"]) == 2


def test_hostile_names_reach_the_terminal_as_text(tmp_path):
    name = "\x1b[31m<b>"
    result = compare(trace([request(name, range(40))], name=name), pool="1 GiB", kernel_batches=0)
    rows = result.requests.assign(hit_tokens=99)
    verdict = verify_tables(replace(result, requests=rows))
    assert any(name in problem for problem in verdict.problems)
    assert not any("\x1b" in printable(line) for line in verdict.lines())


def test_more_problems_than_fit_a_screen_are_counted():
    verdict = Verdict(Path("x"), "compare")
    verdict.problems = [f"p{number}" for number in range(50)]
    assert "DOES NOT STAND" in next(verdict.lines())
    assert list(verdict.lines())[-1] == "  ... and 30 more"


def test_a_loaded_result_is_the_one_that_was_verified(folder):
    assert verify_tables(load_result(folder)).problems == []
