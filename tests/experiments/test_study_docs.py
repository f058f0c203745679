"""The pages on explaining and sweeping: what they show runs as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from kvarena.experiments.ledger import REASONS
from kvarena.experiments.sweep_plan import sweep_cells

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["explain.md", "sweeps.md"])
def test_python_on_the_page_runs(page, tmp_path, capsys):
    (code,) = blocks(page, "python")
    exec(compile(code, page, "exec"), {"OUT": tmp_path / "out"})
    assert capsys.readouterr().out.strip()


def test_configs_on_the_page_are_sweeps():
    grid, listed = blocks("sweeps.md", "toml")
    assert len(sweep_cells(tomllib.loads(grid))) == 8
    base = {name: part for name, part in tomllib.loads(grid).items() if name != "sweep"}
    assert len(sweep_cells({**base, **tomllib.loads(listed)})) == 2


def test_every_reason_is_on_the_page():
    page = (DOCS / "explain.md").read_text(encoding="utf-8")
    assert [reason for reason in REASONS if f"| `{reason}` |" not in page] == []
