"""Files that a command is told to write: folders on the way are made, foreign files stay, studies are not mixed up."""

from __future__ import annotations

import contextlib
import gzip
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from kvarena.experiments import ladder_plots, report
from kvarena.experiments.bench import kernel_plots
from kvarena.experiments.outputs import check_figure, check_table, figure_source, refuse_other_figures, save_one, whole
from kvarena.experiments.study import write_table
from kvarena.experiments.style import FORMATS, save_figure
from kvarena.experiments.sweep import sweep
from support.commands import invoke
from support.small import OPTIONS

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "results"
# Every command that draws or writes one file; what is wrong with the place is said before anything else is looked at.
ONE_FILE = [
    ("bounds", "nowhere", "--out", "x.csv"),
    ("bounds", "nowhere", "--out", "x.parquet"),
    ("bounds", "nowhere", "--figure", "x.pdf"),
    ("explain", "nowhere", "--out", "x.csv"),
    ("laws", "nowhere", "--out", "x.parquet"),
    ("laws", "nowhere", "--figure", "x.svg"),
    ("timeline", "nowhere", "--out", "x.json"),
    ("timeline", "nowhere", "--out", "x.json.gz"),
    ("timeline", "nowhere", "--figure", "x.png"),
    ("pagesize", "--saved", "nowhere", "--figure", "x.png"),
    ("aged", "--figure", "x.png"),
    ("demo", "--figure", "x.png"),
    ("forks", "--out", "x.csv"),
    ("diagram", "states", "--out", "x.md"),
    ("verify", "upstream", "vllm", "--out", "x.json"),
    ("trace", "record", "--out", "x.parquet"),
]
SCENARIO = ROOT / "tests" / "golden" / "scenarios" / "chunked.jsonl"
SCHEDULED = ROOT / "tests" / "golden" / "sched" / "extra_scenarios" / "x_never_fits.jsonl"
ANY_NAME = [
    ("trace", "generate", "chat", "--set", "num_sessions=1", "--out", "x.jsonl.gz"),
    ("trace", "convert", "mooncake_like", "--limit", "3", "--to", "tokens", "--out", "x.jsonl"),
    ("scenario", SCENARIO, "--out", "x.jsonl"),
    ("scenario", SCHEDULED, "--scheduler", "vllm", "--out", "x.jsonl"),
]
# Every command that draws figures of fixed names into a folder.
FOLDERS = [
    (("plot", SAVED / "paper" / "chat"), "hit_rate"),
    (("plot", SAVED / "paper" / "chat"), "timings"),
    (("resample", "--saved", SAVED / "paper" / "chat-resampled"), "intervals"),
    (("ladder", "--show", SAVED / "paper" / "ladder-chat"), "interactions"),
    (("ablations", "--show", SAVED / "paper" / "ablations-chat"), "ablations"),
    (("bench", "kernels", "--saved", SAVED / "h200" / "kernels.json"), "paging_cost"),
]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _into(command: tuple, folder: Path) -> tuple:
    return (*command, "--figures" if command[0] == "bench" else "--out", folder)


def _draw(stem: Path, source: str) -> None:
    figure = plt.figure()
    save_figure(figure, stem, source=source)
    plt.close(figure)


@pytest.mark.parametrize("text", [b"a,b\n1,2\n", gzip.compress(b"{}")], ids=["text", "gzip"])
@pytest.mark.parametrize("command", [*ONE_FILE, *ANY_NAME], ids=lambda command: " ".join(map(str, command)))
def test_a_file_of_others_is_never_written_over(command, text, tmp_path):
    path = tmp_path / command[-1]
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: is there and is not what this command writes"):
        invoke(*command[:-1], path)
    assert _contents(tmp_path) == {path.name: text}


@pytest.mark.parametrize("command", ONE_FILE, ids=lambda command: " ".join(command))
def test_a_place_that_takes_no_files_is_refused_first(command, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="no folder that takes files"):
        invoke(*command[:-1], tmp_path / "file" / command[-1])
    (tmp_path / command[-1]).mkdir()
    with pytest.raises(ValueError, match="expected a file, found a folder"):
        invoke(*command[:-1], tmp_path / command[-1])


@pytest.mark.parametrize("command", ONE_FILE, ids=lambda command: " ".join(command))
def test_a_file_of_another_kind_is_refused_first(command, tmp_path):
    with pytest.raises(ValueError, match=rf"{command[-2]}: expected a file \.\w+"):
        invoke(*command[:-1], tmp_path / "x.txt")


def test_what_a_command_wrote_it_writes_again_and_makes_the_folders_on_the_way(tmp_path):
    out = tmp_path / "a" / "b"
    invoke("pagesize", "chat", "--saved", SAVED / "pagesize", "--figure", out / "axis.pdf")
    check_figure(out / "axis.pdf")
    for _ in range(2):
        invoke("forks", "--requests", 1, "--out", out / "forks.csv")
        invoke("diagram", "states", "--out", out / "states.md")
    assert sorted(_contents(out)) == ["axis.pdf", "forks.csv", "states.md"]


@pytest.mark.parametrize("command", ANY_NAME, ids=lambda command: " ".join(map(str, command)))
def test_lines_that_a_command_wrote_it_writes_again(command, tmp_path):
    path = tmp_path / "a" / command[-1]
    for _ in range(2):
        invoke(*command[:-1], path)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_no_command_writes_over_what_it_reads(tmp_path):
    for given, command in ((SCENARIO, ("scenario",)), (SCHEDULED, ("scenario", "--scheduler", "vllm"))):
        path = tmp_path / given.name
        path.write_bytes(given.read_bytes())
        with pytest.raises(ValueError, match="is there and is not what this command writes"):
            invoke(*command, path, "--out", path)
        assert path.read_bytes() == given.read_bytes()
    path = tmp_path / "trace.jsonl"
    invoke("trace", "generate", "chat", "--set", "num_sessions=1", "--out", path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is the trace that is read"):
        invoke("trace", "convert", path, "--to", "mooncake", "--out", tmp_path / "." / "trace.jsonl")
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_is_known_by_its_columns(suffix, tmp_path):
    path = tmp_path / f"table{suffix}"
    write_table(pd.DataFrame({"law": [1], "holds": [True]}), path)
    check_table(path, ("law", "holds"))
    with pytest.raises(ValueError, match="not what this command writes"):
        check_table(path, ("regret",))


@pytest.mark.parametrize("kind", [*FORMATS, "PNG"])
def test_a_figure_says_who_drew_it_and_from_what(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    save_one(plt.figure(), path, "0123456789abcdef")
    assert figure_source(path) == "0123456789abcdef"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    check_figure(path)
    plt.figure().savefig(path)  # a user's own, of the same name
    plt.close("all")
    with pytest.raises(ValueError, match="not what this command writes"):
        check_figure(path)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("command", "name"), FOLDERS, ids=lambda item: str(item)[:20])
def test_figures_of_others_in_the_folder_stay(command, name, kind, tmp_path):
    path = tmp_path / f"{name}.{kind}"
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: is there.*--force"):
        invoke(*_into(command, tmp_path))
    assert _contents(tmp_path) == {path.name: b"mine"}


@pytest.mark.parametrize("source", ["", "0123456789abcdef"])
@pytest.mark.parametrize(("command", "name"), FOLDERS, ids=lambda item: str(item)[:20])
def test_figures_of_another_result_in_the_folder_stay(command, name, source, tmp_path):
    _draw(tmp_path / name, source)
    before = _contents(tmp_path)
    with pytest.raises(ValueError, match="figure of another result; give another folder, or --force"):
        invoke(*_into(command, tmp_path))
    assert _contents(tmp_path) == before


@pytest.mark.parametrize("other", ["rate", "study", "sweep"])
def test_plot_leaves_the_folder_of_another_result_alone(other, tmp_path, monkeypatch):
    place = tmp_path / "out"
    if other == "sweep":
        base = {"workload": {"trace": "chat", "options": OPTIONS, "requests": 6}, "pool": {"pool": "1 GiB"}}
        sweep({**base, "sweep": {"live": [1]}}, place, jobs=1)
    else:
        shutil.copytree(SAVED / other, place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    chat = SAVED / "paper" / "chat"
    with pytest.raises(ValueError, match=r"out: holds another result \(.*\); give another folder, or --force"):
        invoke("plot", chat, "--out", place)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    monkeypatch.setattr(report, "write_figures", lambda result, folder: [])
    invoke("plot", chat, "--out", place, "--force")
    own = shutil.copytree(chat, tmp_path / "own")
    invoke("plot", own, "--out", own)  # a result's own folder takes its figures
    invoke("plot", own, "--out", own / "more")


def test_the_same_result_is_drawn_again_into_its_folder(tmp_path):
    command = ("resample", "--saved", SAVED / "paper" / "chat-resampled", "--out", tmp_path)
    _draw(tmp_path / "intervals", "0123456789abcdef")
    invoke(*command, "--force")
    drawn = _contents(tmp_path)
    invoke(*command)
    assert _contents(tmp_path) == drawn
    source = figure_source(tmp_path / "intervals.png")
    assert source not in (None, "0123456789abcdef")
    refuse_other_figures(tmp_path, ["intervals"], source)


@pytest.mark.parametrize(("command", "name"), [FOLDERS[0], *FOLDERS[3:]], ids=lambda item: str(item)[:20])
def test_force_draws_over_other_figures(command, name, tmp_path, monkeypatch):
    drawn = []
    for module in (report, ladder_plots, kernel_plots):
        monkeypatch.setattr(module, "save_figure", lambda figure, stem, source: drawn.append((stem.name, source)) or [])
    monkeypatch.setattr(report, "drawn", lambda *args: contextlib.nullcontext())
    _draw(tmp_path / name, "0123456789abcdef")
    invoke(*_into(command, tmp_path), "--force")
    assert len({source for _, source in drawn}) == 1
    assert name in dict(drawn)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("x")])
def test_a_file_that_was_not_finished_leaves_the_old_one_and_nothing_else(error, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write() -> None:
        with whole(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises((ValueError, KeyboardInterrupt, RuntimeError)):
        write()
    assert _contents(tmp_path) == {"a.txt": b"old"}
