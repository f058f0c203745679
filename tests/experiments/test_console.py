"""How commands print: whole lines into a pipe, names as they are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from kvarena.experiments.console import print_rich
from kvarena.experiments.tables import Table, rich_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("columns", [100, 140, 160])
def test_a_pipe_gets_lines_of_the_columns_asked_for(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # what the user's terminal has is not what a pipe has
    print_rich("x" * columns, piped_columns=columns)
    assert capsys.readouterr().out == "x" * columns + "\n"


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "a[b", "\\[c]"])
def test_names_are_never_markup(name, capsys):
    print_rich(rich_table(Table(name, ["id", name], [[name, name]]), title=name))
    assert capsys.readouterr().out.count(name) == 4


def test_one_place_says_how_wide_a_pipe_is():
    """No module but console.py makes a Console for stdout; those for progress say stderr."""
    found = []
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Console":
                text = ast.unparse(node)
                if "stderr" not in text and path.name != "console.py":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert found == []
