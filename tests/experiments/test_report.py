"""One page for whatever was saved: complete, self-contained, escaped, refused where it would harm."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from kvarena.experiments import report_pages, report_readers
from kvarena.experiments.changed import DRAWN, changed_files
from kvarena.experiments.cli import app
from kvarena.experiments.compare import compare
from kvarena.experiments.report_pages import from_rich, reader_of, report, worded
from kvarena.experiments.results import finished_folder
from kvarena.experiments.sweep import sweep
from kvarena.experiments.tables import Table
from kvarena.experiments.verify_kinds import KINDS, kind_name
from kvarena.experiments.verify_result import verify
from rich.table import Table as RichTable
from support.kinds import MAKERS, make_comparison
from support.small import OPTIONS
from typer.testing import CliRunner

REPO = Path(__file__).resolve().parents[2]
# folder -> how many figures its page has, and words that must be on it
SAVED = {
    "results/paper/chat": (
        5,
        ("At a pool of", "Where the prompt tokens went, pool ", "Allocator time a call", "machine.cpu", "vLLM 0.32.0"),
    ),
    "results/paper/ladder-chat": (3, ("128 subsets", "Not observable here", "split_touches_suffix")),
    "results/paper/ablations-tree": (1, ("linked list", "released forwards")),
    "results/paper/chat-resampled": (1, ("95 % intervals", "false discovery")),
    "results/claims": (0, ("shared_prompt_201_pages", "refuted", "claims.radix_overhead")),
    "results/pagesize": (2, ("Best page size", "generated_shared_prefix")),
    "results/capacity": (1, ("block", "predicted")),
    "results/rate": (1, ("Where it bends",)),
    "experiments/bench/layouts": (1, ("token",)),
    "results/allocators/run1": (1, ("Times",)),
    "results/h200/kernels.json": (6, ("Targets", "NVIDIA H200")),
    "results/h200/model.json": (0, ("NVIDIA H200", "allocator_ms", "page_tables_equal")),
    "results/h200/sanitizer.json": (0, ("memcheck",)),
    "results/laws.csv": (1, ("rounding",)),
    "results/study": (0, ("mooncake-conversation", "machine.cpu")),
    "results/upstream/vllm-0.32.0.json": (0, ("hashed, page 16", "300000")),
}


class Tags(HTMLParser):
    """What a page is made of, and whether its tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.sources: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(source.startswith("data:image/svg+xml;base64,") for source in tags.sources)
    assert not {"script", "link", "iframe"} & set(tags.counts)
    assert "url(" not in page
    return tags


@pytest.mark.parametrize("saved", list(SAVED))
def test_every_kind_of_saved_result_has_a_self_contained_page(saved):
    figures, words = SAVED[saved]
    tags = parsed(report(REPO / saved))
    text = " ".join(tags.text)
    assert tags.counts.get("img", 0) == figures
    for word in words:
        assert word in text
    assert tags.counts["h1"] == 1


PARTS = {".csv", ".parquet", ".json", ".jsonl", ".toml"}  # of a result's folder
BESIDE = {".md", ".txt", *DRAWN}  # pages, tables for people and figures beside a result


def test_all_that_lies_in_results_has_a_page_or_the_error_says_which_result_has(monkeypatch):
    """Nothing is left over: every file is a result, a part of one, or text and pictures beside one."""
    monkeypatch.setattr(report_pages, "_figure", lambda draw, caption: "")  # without the seconds of drawing
    for path in sorted((REPO / "results").rglob("*")):
        kind = kind_name(path)
        if kind is not None:
            tags = parsed(report(path))
            assert tags.counts["h1"] == 1, path
            assert tags.counts.get("td", 0) + tags.counts.get("pre", 0) > 2, path
            assert "files changed since" not in report(path), path
            continue
        with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
            report(path)
        message = str(raised.value)
        if path.is_dir():
            assert re.search(r"results/\S+ is one;", message), message
        elif path.suffix in PARTS:
            assert f"give its folder, {path.parent}" in message
        else:
            assert path.suffix in BESIDE, path


def test_every_kind_that_verify_knows_has_a_reader(tmp_path):
    """A kind is a folder that the readers of folders know, or a file; a folder without a reader would be refused."""
    folders = {"resample", "sweep", "compare", "run", "capacity", "rate", "ladder", "ablations"}
    folders |= {"page-size study", "claims", "aged pools", "allocator benchmark"}
    assert folders < {kind.name for kind in KINDS}
    named = dict.fromkeys(("compare", "run", "capacity", "rate"), "result.json")
    for kind in (kind for kind in KINDS if kind.name in folders):
        folder = tmp_path / kind.name
        folder.mkdir()
        for name in (*report_readers.KINDS, "aged.parquet"):
            (folder / name).write_text(json.dumps({"kind": kind.name}) if name == named.get(kind.name) else "")
            if kind_name(folder) == kind.name:
                break
            (folder / name).unlink()
        assert kind_name(folder) == kind.name
        if kind.name == "aged pools":
            (folder / "aged_churn.csv").write_text("")
        assert reader_of(folder) in report_readers.KINDS.values()
    logs = tmp_path / "decisions.jsonl"
    logs.write_text('{"peer": "vllm", "answer": [1, {"a": "<b>"}]}\n')
    assert "&lt;b&gt;" in report(logs)
    for name in ("forks", "bounds", "reasons"):
        file, make = MAKERS[name]
        make(tmp_path / file)
        assert "<td>" in report(tmp_path / file)


def test_shares_are_per_cent_and_their_differences_points():
    page = report(REPO / "results" / "paper" / "chat")
    table = page[page.index("Where the prompt tokens went") :].partition("</table>")[0]
    rows = table.split("<tr>")[2:]
    assert rows
    assert all((row.count(" %</td>"), row.count(" points</td>")) == (2, 1) for row in rows)


def test_a_long_table_shows_its_first_rows_and_says_how_many_there_are(tmp_path):
    table = tmp_path / "bounds.csv"
    row = "0,1,a,0.1,0.2,0.3,10,True\n"
    table.write_text("seed,pool_bytes,allocator,policy,clairvoyant,infinite,regret,proven\n" + 1234 * row)
    page = report(table)
    assert page.count("<tr>") == 201
    assert "the first 200 of 1,234 rows; the file has all" in page


def changed_copy(tmp_path):
    folder = shutil.copytree(REPO / "results" / "paper" / "chat", tmp_path / "chat")
    table = pd.read_parquet(folder / "requests.parquet")
    table["hit_tokens"] += 1
    table.to_parquet(folder / "requests.parquet")
    pd.read_parquet(folder / "steps.parquet").to_parquet(folder / "steps.parquet", compression="gzip")
    return folder


def test_what_was_changed_since_it_was_written_is_warned_of_on_the_page_and_beside_it(tmp_path):
    right = REPO / "results" / "paper" / "chat"
    assert changed_files(right) == []
    folder = changed_copy(tmp_path)
    warning = "files changed since written: requests.parquet, steps.parquet"
    for command in (["report", folder, "--out", tmp_path / "page.html"], ["plot", folder, "--out", tmp_path / "figs"]):
        done = CliRunner().invoke(app, [str(part) for part in command])
        assert done.exit_code == 0
        assert warning in done.stderr
        assert warning not in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert warning in page
    assert page.index("class='warning'") < page.index("<table")
    for command in (["report", right, "--out", tmp_path / "page.html"], ["plot", right, "--out", tmp_path / "two"]):
        assert "changed since" not in CliRunner().invoke(app, [str(part) for part in command]).stderr


@pytest.mark.parametrize("command", [["bounds"], ["explain", "--quiet"], ["timeline"]])
def test_commands_that_replay_a_result_warn_of_what_was_changed_in_it(command, tmp_path):
    made, changed = tmp_path / "made", tmp_path / "changed"
    make_comparison(made)
    shutil.copytree(made, changed)
    table = pd.read_parquet(changed / "steps.parquet")
    table.to_parquet(changed / "steps.parquet", compression="gzip")
    for folder, warned in ((made, False), (changed, True)):
        done = CliRunner().invoke(app, [*command, str(folder)])
        assert done.exit_code == 0, (done.output, done.exception)
        assert ("WARNING: files changed since written: steps.parquet" in done.stderr) is warned


def test_a_changed_file_is_seen_in_every_folder_with_hashes_and_a_figure_or_a_note_of_ours_is_none(tmp_path):
    folder = shutil.copytree(REPO / "results" / "paper" / "chat", tmp_path / "chat")
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    assert changed_files(folder) == []
    assert verify(folder).problems == []
    (folder / "summary.csv").unlink()
    assert changed_files(folder) == ["summary.csv"]
    for above in ("cells/1234", "sweep/cells/1234"):
        shutil.copytree(folder, tmp_path / "s" / above)
    assert changed_files(tmp_path / "s") == ["cells/1234/summary.csv", "sweep/cells/1234/summary.csv"]
    (folder / "provenance.json").unlink()
    about = {"files": {"summary.csv": "0" * 64, "requests.parquet": "0" * 64}}
    (folder / "partial.json").write_text(json.dumps(about))
    assert changed_files(folder) == ["requests.parquet", "summary.csv"]


def test_a_sweep_has_its_cells_rates_and_failures(tmp_path):
    base = {"workload": {"trace": "chat", "options": OPTIONS}, "pool": {"pool": "450 MiB"}}
    sweep({**base, "sweep": {"live": [1, 2]}}, tmp_path / "s", jobs=1)
    index = json.loads((tmp_path / "s" / "sweep.json").read_text())
    lost = index["cells"][1]
    shutil.rmtree(tmp_path / "s" / "cells" / lost["key"])
    lost["state"] = "failed"
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(index))
    (tmp_path / "s" / "failed").mkdir()
    record = {"point": lost["point"], "error": "OSError: <b>disk</b>", "traceback": "..."}
    (tmp_path / "s" / "failed" / f"{lost['key']}.json").write_text(json.dumps(record))
    page = report(tmp_path / "s")
    text = " ".join(parsed(page).text)
    assert "1 finished, 1 failed, 0 pending" in text
    assert "Failed: " in text
    assert "&lt;b&gt;disk&lt;/b&gt;" in page
    assert page.count("<img ") == 1


def test_hostile_names_of_a_trace_stay_text(tmp_path):
    hostile = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    rows = [{"token_ids": [*range(20)], "request_id": f"</pre><script>{n}\u202e"} for n in range(4)]
    hostile.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compare(str(hostile), pool="40 MiB", kernel_batches=0)
    with finished_folder(tmp_path / "out") as partial:
        result._write_tables(partial)
    page = report(tmp_path / "out")
    tags = parsed(page)
    assert tags.counts["img"] == 5
    assert "onerror=alert(1)&gt;" in page
    assert "\u202e" not in page


def test_the_same_folder_gives_the_same_page():
    folder = REPO / "results" / "paper" / "chat-resampled"
    assert report(folder) == report(folder)


def test_the_command_writes_into_the_result_or_where_it_is_told_and_over_nothing_else(tmp_path):
    runner, folder = CliRunner(), tmp_path / "claims"
    shutil.copytree(REPO / "results" / "claims", folder)
    done = runner.invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert runner.invoke(app, ["report", str(folder)]).exit_code == 0  # its own page may be written again
    other = tmp_path / "mine.html"
    other.write_text("<p>a diary</p>")
    for arguments, message in (
        ([str(folder), "--out", str(other)], "is not what this command writes"),
        ([str(tmp_path)], "no result of ours"),
        ([str(tmp_path / "nowhere")], "no result of ours"),
        ([str(folder), "--out", str(tmp_path / "page.pdf")], "expected a file .html"),
    ):
        done = runner.invoke(app, ["report", *arguments])
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)
    assert other.read_text() == "<p>a diary</p>"


def test_a_broken_result_is_an_error_that_names_it(tmp_path):
    (tmp_path / "ladder.json").write_text("{")
    with pytest.raises(ValueError, match="not a finished ladder"):
        report(tmp_path)


def test_tables_of_a_terminal_keep_their_text_and_words_stand_left():
    table = RichTable(title="a <title>")
    table.add_column("name")
    table.add_column("number", justify="right")
    table.add_row("a & b", "1")
    plain = from_rich(table)
    assert (plain.title, plain.columns, plain.rows) == ("a <title>", ["name", "number"], [["a & b", "1"]])
    markup = worded(Table("t", ["name", "number"], [["a & b", "1"]]), {0})
    assert "<td class='w'>a &amp; b</td><td>1</td>" in markup
