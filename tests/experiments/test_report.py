"""One page for whatever was saved: complete, self-contained, escaped, refused where it would harm."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kvarena.experiments.cli import app
from kvarena.experiments.compare import compare
from kvarena.experiments.report_pages import from_rich, report, worded
from kvarena.experiments.results import finished_folder
from kvarena.experiments.sweep import sweep
from kvarena.experiments.tables import Table
from rich.table import Table as RichTable
from support.small import OPTIONS
from typer.testing import CliRunner

REPO = Path(__file__).resolve().parents[2]
# folder -> how many figures its page has, and words that must be on it
SAVED = {
    "results/paper/chat": (5, ("At a pool of", "Allocator time a call", "machine.cpu", "vLLM 0.32.0")),
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
