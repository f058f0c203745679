"""Result folders: whole or absent, equal for equal configs, reloading to the same tables, refusing unlike ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from kvarena.allocators.config import block
from kvarena.experiments import report
from kvarena.experiments.compare import compare
from kvarena.experiments.results import finished_folder, load_result, merge_results
from support.requests import request, trace
from support.small import shared, small

MEASURED = ("provenance.json", "timings.parquet", "timings.pdf", "timings.png", "timings.svg")
FIGURES = ("hit_rate", "occupancy", "waste", "evictions")
FILES = {
    *("config.toml", "result.json", "requests.parquet", "steps.parquet", "summary.csv", "report.html", *MEASURED),
    *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("pdf", "png", "svg")),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return shared().save(tmp_path_factory.mktemp("result") / "out")


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_folder_holds_every_file(saved):
    assert set(contents(saved)) == FILES
    assert [p.name for p in saved.parent.iterdir()] == ["out"]


def test_equal_configs_give_equal_bytes_but_for_measured_files(saved, tmp_path):
    again = small(seeds=2, live=4, outputs="replay").save(tmp_path / "again")
    first, second = contents(saved), contents(again)
    differing = [name for name in first if first[name] != second[name]]
    assert set(differing) <= set(MEASURED)


def test_no_figure_or_page_bears_a_date(saved):
    year = json.loads((saved / "provenance.json").read_text())["started"][:4].encode()
    for name, data in contents(saved).items():
        if name.endswith((".svg", ".html")):
            assert b"<dc:date>" not in data
            assert b"started" not in data
        if name.endswith(".pdf"):
            assert b"CreationDate" not in data
            assert b"(D:" + year not in data


def test_a_result_reloads_to_the_same_tables(saved):
    loaded = load_result(saved)
    for name in ("requests", "steps", "summary", "timings"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(shared(), name), check_dtype=name != "summary")
    assert loaded.config == shared().config
    assert loaded.manifest == shared().manifest
    assert loaded.visible == shared().visible
    assert str(loaded.first_divergence()) == str(shared().first_divergence())


def test_saving_a_loaded_result_writes_the_same_bytes(saved, tmp_path):
    again = load_result(saved).save(tmp_path / "copy")
    first, second = contents(saved), contents(again)
    assert {name for name in first if first[name] != second[name]} == set()


def test_the_saved_config_runs_to_the_same_result(saved):
    again = compare(config=saved / "config.toml")
    pd.testing.assert_frame_equal(again.requests, shared().requests)


def test_every_file_bears_the_schema_version(saved):
    assert (saved / "config.toml").read_text().startswith("schema_version = 1")
    for name in ("result.json", "provenance.json"):
        assert json.loads((saved / name).read_text())["schema_version"] == 1
    assert set(pd.read_csv(saved / "summary.csv")["schema_version"]) == {1}
    for name in ("requests", "steps", "timings"):
        assert pq.read_schema(saved / f"{name}.parquet").metadata[b"schema_version"] == b"1"
    assert "name='schema_version' content='1'" in (saved / "report.html").read_text()
    for name in ("hit_rate.svg", "hit_rate.pdf", "hit_rate.png"):
        assert b"schema_version 1" in (saved / "figures" / name).read_bytes()


@pytest.fixture
def broken_report(monkeypatch):
    """The last file of a folder fails; drawing, which takes seconds, is left out."""

    def broken(*args):
        raise RuntimeError("disk gone")

    monkeypatch.setattr(report, "write_figures", lambda *args: [])
    monkeypatch.setattr(report, "write_report", broken)


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(report, "write_figures", lambda *args: [])
    monkeypatch.setattr(report, "write_report", lambda *args: None)


def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "out")


@pytest.mark.usefixtures("broken_report")
def test_a_failure_on_the_way_leaves_no_result_and_keeps_the_tables_beside_its_place(tmp_path):
    with pytest.raises(ValueError, match=r"could not be made \(RuntimeError: disk gone\); kept 1 of 2 parts"):
        shared().save(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


@pytest.mark.usefixtures("broken_report")
def test_a_failure_keeps_the_earlier_result(saved, tmp_path):
    out = copied(saved, tmp_path)
    before = contents(out)
    with pytest.raises(ValueError, match="disk gone"):
        shared().save(out)
    assert contents(out) == before


@pytest.mark.usefixtures("undrawn")
def test_an_earlier_result_is_replaced(saved, tmp_path):
    out = copied(saved, tmp_path)
    small(live=2).save(out)
    assert load_result(out).config["engine"]["live"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("undrawn")
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".out.999999999.partial").mkdir()
    (tmp_path / ".out.999999999.old").mkdir()
    (tmp_path / ".other.999999999.partial").mkdir()
    shared().save(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.999999999.partial", "out"]


def test_a_result_whose_writer_was_killed_between_the_two_renames_is_put_in_place(saved, tmp_path):
    finished, replaced = tmp_path / ".out.999999999.partial", tmp_path / ".out.999999999.old"
    shutil.copytree(saved, finished)
    shutil.copytree(saved, replaced)
    (finished / "which.txt").write_text("the new one")
    with pytest.raises(RuntimeError, match="next run fails"), finished_folder(tmp_path / "out"):
        raise RuntimeError("next run fails")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "which.txt").read_text() == "the new one"


def test_a_folder_of_something_else_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        small(out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="expected a folder, found a file"):
        small(out=tmp_path / "notes.txt")


@pytest.mark.parametrize("mine", ["notes.txt", "figures/mine.txt", "sub/result.json", "timings.txt"])
def test_a_file_of_the_user_in_an_earlier_result_is_never_deleted(saved, tmp_path, mine):
    out = copied(saved, tmp_path)
    (out / mine).parent.mkdir(exist_ok=True)
    (out / mine).write_text("mine")
    before = contents(out)
    with pytest.raises(ValueError, match="holds other files"):
        shared().save(out)
    assert contents(out) == before


@pytest.mark.parametrize("text", ['{"my": "data"}', "[1]", "not JSON"])
def test_a_result_json_of_another_program_makes_no_earlier_result(tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text(text)
    with pytest.raises(ValueError, match="holds other files"):
        shared().save(tmp_path / "out")
    assert contents(tmp_path / "out") == {"result.json": text.encode()}


@pytest.mark.usefixtures("undrawn")
def test_a_link_to_a_folder_stays_a_link(saved, tmp_path):
    copied(saved, tmp_path)
    for name in ("out", "not there yet"):
        (tmp_path / "link").symlink_to(name)
        shared().save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert load_result(tmp_path / name).config == shared().config
        (tmp_path / "link").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["not there yet", "out"]


def test_the_current_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "figures").mkdir()
    for place in (tmp_path, tmp_path / "figures"):
        monkeypatch.chdir(place)
        with pytest.raises(ValueError, match="where you stand"):
            small(out=tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_runs_that_end_at_once_leave_one_whole_result(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with finished_folder(out) as first:
        shared()._write_tables(first)
        monkeypatch.setattr("os.getpid", lambda: 1)  # the other run's
        rename, late = Path.rename, []

        def between(path, target):
            if path == first and not late:
                late.append(shared().save(out))
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", between)
    assert load_result(out).config == shared().config
    assert late
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["result.json", "config.toml", "summary.csv", "requests.parquet", "provenance.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage"])
def test_a_damaged_folder_is_one_clear_error(saved, tmp_path, name, damage):
    out = copied(saved, tmp_path)
    file = out / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 3] if damage == "cut" else b"\x00\xff not this")
    with pytest.raises(ValueError, match="out"):
        load_result(out)


@pytest.mark.parametrize("field", ["kind", "visible", "allocators", "pools", "budgets", "warnings", "kernel_check"])
@pytest.mark.parametrize("edit", ["dropped", "null"])
def test_a_field_that_was_edited_away_is_named(saved, tmp_path, field, edit):
    out = copied(saved, tmp_path)
    data = json.loads((out / "result.json").read_text())
    data.pop(field) if edit == "dropped" else data.update({field: None})
    (out / "result.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"out: .*result.json: {field}: expected .*, found None"):
        load_result(out)


EDITS = {
    "fewer requests": ("requests", lambda frame: frame[:-1], r"requests: expected \d+ rows"),
    "one allocator less": ("steps", lambda frame: frame[frame["allocator"] == "vllm"], "found a difference at"),
    "no column": ("requests", lambda frame: frame.drop(columns="hit_tokens"), "column 'hit_tokens' is missing"),
    "no key": ("timings", lambda frame: frame.drop(columns="seed"), "column 'seed' is missing"),
    "text for numbers": ("steps", lambda frame: frame.assign(free="many"), "column 'free': expected numbers"),
    "no steps": ("steps", lambda frame: frame[:0], "found a difference at"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_tables_that_do_not_belong_together_are_one_clear_error(saved, tmp_path, edit):
    out = copied(saved, tmp_path)
    name, change, says = EDITS[edit]
    change(pd.read_parquet(out / f"{name}.parquet")).to_parquet(out / f"{name}.parquet")
    with pytest.raises(ValueError, match=f"out: not a whole result folder .*{says}"):
        load_result(out)


def test_an_unwritable_place_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no folder that takes files"):
        small(out=tmp_path / "file" / "out")


# --- laying over ---


def test_results_of_other_allocators_lie_over_each_other(saved):
    other = small(seeds=2, live=4, outputs="replay", allocators=[block(page_size=64)], pool=pools(saved))
    merged = merge_results([load_result(saved), other])
    assert merged.allocators == ["vllm", "sglang", "block-page_size=64"]
    assert set(merged.summary["allocator"]) == set(merged.allocators)
    assert len(merged.requests) == len(shared().requests) + len(other.requests)


def test_a_result_given_twice_is_refused(saved):
    result = load_result(saved)
    alone = replace(result, manifest={**result.manifest, "allocators": result.manifest["allocators"][1:]}, path=None)
    for given in ([result, result], [result, load_result(saved)], [result, alone], [alone, result, alone]):
        with pytest.raises(ValueError, match="adds no allocator to the results before it"):
            merge_results(given)
    with pytest.raises(ValueError, match="one Result or more"):
        merge_results([])
    assert merge_results([result]) is result


def pools(saved):
    return [f"{size} B" for size in load_result(saved).pools]


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"live": 2}, "engine.live"), ({"model": "qwen-2.5-7b"}, "pool.model"), ({"seeds": 1}, "workload.seeds")],
)
def test_unlike_results_are_refused_naming_the_fields(saved, fields, named):
    other = small(**{"seeds": 2, "live": 4, "outputs": "replay", **fields})
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        merge_results([load_result(saved), other])


def test_another_trace_under_the_same_name_is_refused():
    first = compare(trace([request("a", range(40))]), pool="1 GiB", kernel_batches=0)
    other = replace(first, provenance={**first.provenance, "inputs": [{"sha256": "another"}]})
    with pytest.raises(ValueError, match="contents"):
        merge_results([first, other])


def test_one_trace_at_two_places_is_one_trace(tmp_path):
    results = []
    for place, name in (("here", "vllm"), ("there", "sglang")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "t.jsonl").write_text('{"token_ids": [1, 2, 3]}\n')
        path = tmp_path / place / "t.jsonl"
        results.append(compare(path, allocators=[name], pool="1 GiB", kernel_batches=0))
    assert merge_results(results).allocators == ["vllm", "sglang"]


@pytest.mark.parametrize("other", [[range(40), range(50, 90)], [range(40), range(39)], [range(40)]])
def test_other_requests_in_memory_are_refused(other):
    results = [
        compare([list(tokens) for tokens in prompts], allocators=[name], pool="1 GiB", kernel_batches=0)
        for name, prompts in (("vllm", [range(40), range(40)]), ("sglang", other))
    ]
    with pytest.raises(ValueError, match="differ in more than the allocators"):
        merge_results(results)


def test_one_name_with_other_rules_is_refused(saved):
    spec = {"name": "vllm", "kind": "block", "page_size": 64}
    other = small(seeds=2, live=4, outputs="replay", allocators=[spec], pool=pools(saved))
    with pytest.raises(ValueError, match="'vllm' has other rules"):
        merge_results([load_result(saved), other])


# --- the page ---


class Page(HTMLParser):
    """Collects tags and what they load from elsewhere."""

    def __init__(self):
        super().__init__()
        self.tags, self.loads, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_self_contained_and_whole(saved):
    page = Page()
    page.feed((saved / "report.html").read_text())
    assert "script" not in page.tags
    assert all(item.startswith("data:image/svg+xml;base64,") for item in page.loads)
    assert page.tags.count("img") == 4
    text = " ".join(page.text)
    for needed in ("Token hit rate", "First request on which the designs differ", "What the trace can show", "Kernels"):
        assert needed in text


HOSTILE = "<script>alert('x')</script>\x1b[31m&\"'"


def test_hostile_names_stay_text(tmp_path):
    rows = [request(HOSTILE, range(40)), request(f"{HOSTILE} again", range(40))]
    result = compare(trace(rows, name=HOSTILE), pool="1 GiB", kernel_batches=0)
    page = Page()
    page.feed((result.save(tmp_path / "out") / "report.html").read_text())
    assert "script" not in page.tags
    assert "<script>alert" in " ".join(page.text)
    notebook = Page()
    notebook.feed(result._repr_html_())
    assert "script" not in notebook.tags
