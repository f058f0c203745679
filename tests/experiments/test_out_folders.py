"""What a study command does with the place that --out or --figure names: foreign files stay, folders are made."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from kvarena.experiments import aged, claims, one_axis
from kvarena.experiments.cli import app
from kvarena.experiments.one_axis_plots import draw_axis
from kvarena.experiments.study import write_table
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
