"""What a study command does with the place that --out or --figure names: foreign files stay, folders are made."""

from __future__ import annotations

import errno
import os
import re
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from kvarena.allocators.config import _CLASSES
from kvarena.experiments import aged, claims, one_axis
from kvarena.experiments.cli import app
from kvarena.experiments.one_axis_plots import draw_axis
from kvarena.experiments.outputs import refuse_unwritable
from kvarena.experiments.study import write_table
from matplotlib.figure import Figure
from support.commands import invoke
from typer.main import get_command

ROOT = Path(__file__).parents[2]
CLAIM = "shared_prompt_201_pages"
STUDIES = [
    ("claims", CLAIM, "--quiet"),
    ("claims", CLAIM, "--saved", ROOT / "results" / "claims"),
    ("pagesize", "chat", "--requests", 40, "--rounds", 1, "--quiet"),
    ("aged", "--hours", 2, "--quiet"),
    ("capacity", "--saved", ROOT / "results" / "capacity"),
    ("rate", "--saved", ROOT / "results" / "rate"),
    ("bench", "allocators", "--saved", ROOT / "results" / "allocators" / "run1"),
]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["notes.txt", "claims.md", "pagesize.csv", "aged_churn.csv", "rate.png"])
@pytest.mark.parametrize("command", STUDIES, ids=lambda command: " ".join(map(str, command[:1])))
def test_a_folder_of_other_files_is_refused_before_anything_runs(command, name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        invoke(*command, "--out", tmp_path)
    assert _contents(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("command", STUDIES, ids=lambda command: command[0])
def test_a_file_is_no_folder(command, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file"):
        invoke(*command, "--out", tmp_path / "file")
    assert _contents(tmp_path) == {"file": b"mine"}


RATE = ROOT / "experiments" / "configs" / "rate.toml"
RUN = ROOT / "experiments" / "configs" / "run-chat.toml"
SWEEP = ROOT / "experiments" / "configs" / "study.toml"
CHAT = ROOT / "results" / "paper" / "chat"
SCENARIO = ROOT / "tests" / "golden" / "scenarios" / "chunked.jsonl"
SCHEDULED = ROOT / "tests" / "golden" / "sched" / "extra_scenarios" / "x_never_fits.jsonl"
PLACES = [
    *(("--out", one) for one in STUDIES),
    *(("--out", (*one, "--quiet")) for one in [("compare", "chat"), ("run", RUN), ("ladder", "chat"), ("rate", RATE)]),
    *(("--out", (*one, "--quiet")) for one in [("ablations", "chat"), ("resample", "chat"), ("capacity",)]),
    ("--out", ("sweep", SWEEP, "--quiet")),
    ("--out", ("bench", "allocators", "--quick")),
    ("--figures", ("bench", "kernels", "--saved", ROOT / "results" / "h200" / "kernels.json")),
    ("--out", ("plot", CHAT)),
    ("--out", ("resample", "--saved", ROOT / "results" / "paper" / "chat-resampled")),
    ("--out", ("ladder", "--show", ROOT / "results" / "paper" / "ladder-chat")),
    ("--out", ("ablations", "--show", ROOT / "results" / "paper" / "ablations-chat")),
    ("--out", ("paper", "--only", "laws")),
    ("--out", ("scenario", SCENARIO.parent)),
    ("--out/x.jsonl", ("scenario", SCENARIO)),
    ("--out/x.jsonl", ("scenario", SCHEDULED, "--scheduler", "vllm")),
    ("--out/x.html", ("report", CHAT)),
    ("--out/x.csv", ("bounds", CHAT)),
    ("--figure/x.png", ("bounds", CHAT)),
    ("--out/x.csv", ("explain", CHAT)),
    ("--out/x.md", ("explain", "--saved", ROOT / "results" / "study" / "reasons.csv")),
    ("--out/x.csv", ("explain", "--trace", "chat", "--pool", "450 MiB", "--quiet")),
    ("--out/x.json", ("timeline", CHAT)),
    ("--figure/x.png", ("timeline", CHAT)),
    ("--out/x.csv", ("laws",)),
    ("--figure/x.png", ("laws", "--saved", ROOT / "results" / "laws.csv")),
    ("--figure/x.png", ("aged",)),
    ("--figure/x.png", ("pagesize", "--saved", ROOT / "results" / "pagesize")),
    ("--figure/x.png", ("demo",)),
    ("--out/x.csv", ("forks",)),
    ("--out/x.md", ("diagram", "states")),
    ("--out/x.json", ("verify", "upstream", "vllm")),
    ("--out/x.parquet", ("trace", "record")),
    ("--out/x.jsonl", ("trace", "generate", "chat")),
    ("--out/x.jsonl", ("trace", "convert", "chat", "--to", "tokens")),
]


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A folder that takes nothing, though its rights say so (a read-only mount, /proc), while no allocator is made."""
    folder = tmp_path / "locked"
    folder.mkdir()
    mkdir = os.mkdir

    def refused(path, *rest, **more):
        if folder in Path(path).parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *rest, **more)

    def ran(*_, **__):
        raise AssertionError("something ran before the place was looked at")

    monkeypatch.setattr(os, "mkdir", refused)
    for module, name in _CLASSES.values():
        monkeypatch.setattr(getattr(import_module(module), name), "__init__", ran)
    monkeypatch.setattr(Figure, "savefig", ran)
    return folder


@pytest.mark.parametrize(("option", "command"), PLACES, ids=lambda item: " ".join(map(str, item))[:60])
def test_a_place_that_cannot_be_made_is_refused_before_anything_runs(option, command, locked):
    option, _, name = option.partition("/")
    with pytest.raises(ValueError, match=rf"{re.escape(str(locked))}\S*: cannot be written.*Read-only"):
        invoke(*command, option, locked / "a" / name)
    assert list(locked.iterdir()) == []


def test_every_command_that_writes_somewhere_is_asked_for_such_a_place():
    writers = {
        path[-1]
        for path, command in _commands(get_command(app))
        if any(set(parameter.opts) & {"--out", "--figure", "--figures"} for parameter in command.params)
    }
    asked = {part for _, command in PLACES for part in map(str, command)}
    assert writers - asked - {"init"} == set()


def test_looking_at_a_place_leaves_nothing_behind(tmp_path):
    for path in (tmp_path / "a" / "b" / "c.csv", tmp_path / "c.csv"):
        refuse_unwritable(path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="cannot be written"):
        refuse_unwritable(tmp_path / ("x" * 300))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is Linux's")
def test_proc_takes_no_result(tmp_path):
    for path in (Path("/proc/foo"), Path("/proc/foo/a.csv"), Path("/proc/self/a/b")):
        with pytest.raises(ValueError, match=f"{path}: cannot be written"):
            refuse_unwritable(path)


def test_an_earlier_output_of_the_kind_is_taken():
    one_axis.refuse_other(ROOT / "results" / "pagesize")
    claims.refuse_other(ROOT / "results" / "claims")
    aged.refuse_other(aged.shipped_folder())


def test_the_page_alone_is_an_earlier_output(tmp_path):
    for _ in range(2):
        invoke("claims", CLAIM, "--saved", ROOT / "results" / "claims", "--out", tmp_path)
    assert list(_contents(tmp_path)) == ["claims.md"]


def test_saved_resamples_are_drawn_into_a_folder_that_is_not_there_yet(tmp_path):
    saved = ROOT / "results" / "paper" / "chat-resampled"
    invoke("resample", "--saved", saved, "--out", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "intervals.png").is_file()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_that_cannot_be_written_says_why(suffix, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"table\.\w+: cannot be written \((?!None)"):
        write_table(pd.DataFrame({"a": [1]}), tmp_path / "file" / f"table{suffix}")
    assert _contents(tmp_path) == {"file": b"mine"}


def test_a_diagram_is_never_written_over_another_kind_of_file(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"expected a file \.md"):
        invoke("diagram", "states", "--out", tmp_path / "notes.txt")
    assert _contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    "arguments",
    [("--loads", "chat,chat"), ("--loads", ","), ("--designs", "token-1,token-1"), ("--panels", "equal,equal")],
)
def test_a_capacity_study_has_each_cell_once(arguments):
    with pytest.raises(ValueError, match="each once"):
        invoke("capacity", *arguments)


@pytest.mark.parametrize("name", ["--rows", "--declared", "--max-model-len"])
def test_counts_of_the_capacity_study_are_at_least_one(name):
    assert invoke("capacity", name, 0).exit_code == 2


def _commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(("path", "command"), list(_commands(get_command(app))), ids=lambda item: str(item)[:40])
def test_no_help_text_is_eaten_as_markup(path, command):
    """Rich reads [name] as a style, and swallows it."""
    from rich.text import Text

    for text in [command.help, *(parameter.help for parameter in command.params if parameter.name != "help")]:
        plain = (text or "").replace("\\[", "[")
        assert Text.from_markup(text or "").plain == plain, f"{' '.join(path)}: escape [ as \\["


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_figure_of_few_workloads_holds_its_legend_and_footer(count):
    study = one_axis.load(ROOT / "results" / "pagesize")
    names = list(dict.fromkeys(study.rows["workload"]))[:count]
    with mpl.rc_context({"figure.dpi": 100}):
        figure = draw_axis(study, one_axis.kernel_times(), names)
        figure.canvas.draw()
        for item in [*figure.legends, *figure.texts]:
            box = item.get_window_extent()
            assert box.x0 >= 0, item
            assert box.x1 <= figure.bbox.width, item
        plt.close(figure)
