"""A document cannot show what its results do not give: a changed figure, table or input is told."""

from pathlib import Path

import numpy as np
import pytest
from kvarena.experiments import paper
from matplotlib.image import imsave
from support.commands import invoke

ITEM = """
[[item]]
target = "{target}"
redraw = ["draw", "{{out}}"]
makes = "{makes}"
inputs = ["saved.json"]
rerun = ["make"]
machine = "any CPU"
minutes = 1
seeds = "0"
expect = "x"
"""


def checkout(root: Path, target: str, makes: str) -> list[paper.Item]:
    (root / "docs").mkdir(exist_ok=True)
    (root / paper.LIST).write_text(ITEM.format(target=target, makes=makes))
    (root / "saved.json").write_text("1")
    return paper.load_items(root)


def picture(path: Path, level: float = 0.5) -> None:
    imsave(path, np.full((8, 8, 3), level))


def outcome(items, root, draw, **options) -> str:
    [found] = paper.redraw(items, root, root / "out", lambda arguments: draw(Path(arguments[1])), **options)
    return found.fault


def test_a_figure_that_is_the_same_passes_and_another_number_in_it_fails(tmp_path):
    items = checkout(tmp_path, "docs/a.png", "a.png")
    picture(tmp_path / "docs" / "a.png")
    assert outcome(items, tmp_path, lambda out: picture(out / "a.png")) == ""
    assert outcome(items, tmp_path, lambda out: picture(out / "a.png", 0.502)) == ""
    assert "differs by" in outcome(items, tmp_path, lambda out: picture(out / "a.png", 0.6))
    assert "redrawn 8 x 4" in outcome(items, tmp_path, lambda out: imsave(out / "a.png", np.zeros((4, 8, 3))))


def test_a_missing_figure_is_told_and_update_writes_it(tmp_path):
    items = checkout(tmp_path, "docs/new/a.png", "a.png")
    assert "is not there" in outcome(items, tmp_path, lambda out: picture(out / "a.png"))
    assert outcome(items, tmp_path, lambda out: picture(out / "a.png"), update=True) == ""
    assert (tmp_path / "docs/new/a.png").is_file()


def test_a_marked_part_is_compared_letter_by_letter_and_updated_alone(tmp_path):
    items = checkout(tmp_path, "docs/page.md#rows", "rows.md")
    page = tmp_path / "docs" / "page.md"
    page.write_text("before\n<!-- rows -->\n\n| 1 |\n\n<!-- /rows -->\nafter\n")
    assert outcome(items, tmp_path, lambda out: (out / "rows.md").write_text("| 1 |\n")) == ""
    fault = outcome(items, tmp_path, lambda out: (out / "rows.md").write_text(r"| \1 2 |"))
    assert "'| 1 |'" in fault
    assert outcome(items, tmp_path, lambda out: (out / "rows.md").write_text(r"| \1 2 |"), update=True) == ""
    assert page.read_text() == "before\n<!-- rows -->\n\n| \\1 2 |\n\n<!-- /rows -->\nafter\n"


def test_a_page_without_its_mark_is_a_fault_not_a_pass(tmp_path):
    items = checkout(tmp_path, "docs/page.md#rows", "rows.md")
    (tmp_path / "docs" / "page.md").write_text("nothing")
    assert "no part between" in outcome(items, tmp_path, lambda out: (out / "rows.md").write_text(""))


@pytest.mark.parametrize(("draw", "text"), [(lambda out: None, "made no"), (lambda out: int("x"), "invalid literal")])
def test_a_redraw_that_fails_is_a_fault_of_its_item(tmp_path, draw, text):
    items = checkout(tmp_path, "docs/a.png", "a.png")
    assert text in outcome(items, tmp_path, draw)


def test_the_artifact_page_follows_the_inputs(tmp_path):
    items = checkout(tmp_path, "docs/a.png", "a.png")
    before = paper.artifact(items, tmp_path)
    (tmp_path / "saved.json").write_text("2")
    assert paper.artifact(items, tmp_path) != before
    (tmp_path / "saved.json").unlink()
    with pytest.raises(ValueError, match=r"saved\.json: an input"):
        paper.artifact(items, tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "item"),
        ("[[item]]\n", "Field required"),
        ("[[item", "docs/paper.toml"),
        (ITEM.format(target="a", makes="b") + "x = 1", "x"),
    ],
)
def test_a_damaged_list_is_refused(tmp_path, text, fault):
    (tmp_path / "docs").mkdir()
    (tmp_path / paper.LIST).write_text(text)
    with pytest.raises(ValueError, match=fault):
        paper.load_items(tmp_path)


def test_outside_a_checkout_the_command_says_so(tmp_path):
    with pytest.raises(ValueError, match="run from the folder of a checkout"):
        paper.load_items(tmp_path)


def test_an_only_that_matches_nothing_is_refused_and_does_not_pass(tmp_path, monkeypatch):
    checkout(tmp_path, "docs/a.png", "a.png")
    monkeypatch.chdir(tmp_path)
    for only in (["nosuch"], ["a.png", "nosuch"], ["docs/b"]):
        flags = [flag for part in only for flag in ("--only", part)]
        with pytest.raises(ValueError, match=r"--only: expected a part of docs/a\.png; found '(nosuch|docs/b)'"):
            invoke("paper", *flags)
    assert not (tmp_path / "out").exists()


def test_nothing_that_lies_in_the_output_folder_is_deleted(tmp_path):
    items = checkout(tmp_path, "docs/a.png", "a.png")
    picture(tmp_path / "docs" / "a.png")
    mine = tmp_path / "out" / "00-a" / "thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("x")
    assert outcome(items, tmp_path, lambda out: picture(out / "a.png")) == ""
    assert mine.read_text() == "x"
    assert (tmp_path / "out" / "00-a.png").is_file()
