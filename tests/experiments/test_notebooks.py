"""Notebooks run from the top, say what they say, and bear outputs that a run gives today."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from support.notebooks import NOTEBOOKS, executed, text_outputs

FILES = sorted(NOTEBOOKS.glob("*.ipynb"))
MAX_LINES = 27  # a cell that holds a whole config
PATHS = re.compile(r"(?<![\w.])/(work|root|home|tmp|usr|opt|Users|mnt)/|[A-Z]:\\\\|0x[0-9a-f]{8,}")


def named(path: Path) -> str:
    return path.stem


@pytest.mark.notebook
@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_run_gives_the_committed_outputs(path):
    assert text_outputs(executed(path)) == text_outputs(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_it_opens_with_one_question_and_its_answer(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {path.stem[:2]} ")
    assert re.search(r"\*[^*]+\?\* \S", first.source.replace("\n", " "))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_cells_are_short_rendered_and_name_no_machine(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert len(cell.source.splitlines()) <= MAX_LINES
        assert not PATHS.search(cell.source)
        if cell.cell_type == "code":
            assert cell.execution_count
            assert not any(output.output_type == "error" for output in cell.outputs)
            assert not PATHS.search("".join(text_outputs(nbformat.from_dict({"cells": [cell]}))))


def test_the_two_notebooks_of_this_stage_are_there():
    assert {"01_one_request", "02_swap_allocators"} <= {path.stem for path in FILES}
