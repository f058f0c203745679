"""Ablations: what is counted is what the rules do, folders reload, the figure shows every series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvarena.experiments.ladder_ablations import DESIGNS, Ablations, ablations, load_ablations
from kvarena.experiments.ladder_plots import (
    plot_ablation_duplicates,
    plot_ablation_hits,
    plot_ablation_tables,
    plot_removal,
)
from typer.testing import CliRunner

BASE: dict[str, Any] = {
    "workload": {"trace": "tree_of_thought", "requests": 200},
    "pool": {"pool": ["40 %", "100 %"]},
    "engine": {"live": 6, "outputs": "replay"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Ablations:
    return ablations(BASE, tmp_path_factory.mktemp("ablations") / "out", lengths=[100, 5_000])


def column(made: Ablations, design: str, name: str) -> list[Any]:
    return made.table.loc[made.table["design"] == design, name].tolist()


def test_kept_duplicates_take_pages_and_merged_ones_rewrite_tables(made: Ablations) -> None:
    for kept, merged in (("block", "block, merged"), ("token, kept", "token")):
        assert sum(column(made, kept, "duplicate_bytes")) > 0
        assert sum(column(made, merged, "duplicate_bytes")) == 0
        assert sum(column(made, kept, "table_bytes_rewritten")) == 0
    # Merged when written: entries that stood are rewritten. Merged when reserved: they are written once.
    assert min(column(made, "token", "table_bytes_rewritten")) > 0
    assert sum(column(made, "block, merged", "table_bytes_rewritten")) == 0
    assert min(column(made, "block", "table_bytes_appended")) > 0


def test_cached_content_goes_while_pages_are_free_where_pages_without_content_queue_up(made: Ablations) -> None:
    assert column(made, "block", "evicted_pages")[-1] <= column(made, "unhashed to the tail", "evicted_pages")[-1]
    assert len(made.table) == 2 * len(DESIGNS)


def test_leaving_the_middle_of_a_deque_is_a_search(made: Ablations) -> None:
    wide = made.removal.pivot(index="length", columns="queue", values="ns_a_page")
    assert (wide["deque"] > wide["linked list"]).all()
    assert wide["deque"].iloc[1] > 5 * wide["deque"].iloc[0]  # 50 times as long


def test_a_folder_reloads_and_foreign_ones_are_refused(made: Ablations, tmp_path: Path) -> None:
    assert made.path is not None
    again = load_ablations(made.path)
    assert again.manifest == made.manifest
    assert again.table["hit_tokens"].tolist() == made.table["hit_tokens"].tolist()
    with pytest.raises(ValueError, match="not finished ablations"):
        load_ablations(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="holds other files"):
        ablations(BASE, tmp_path, lengths=[100])


def test_every_series_is_drawn_and_nothing_is_no_bar_of_its_own(made: Ablations) -> None:
    import matplotlib.pyplot as plt

    assert len(plot_ablation_hits(made).patches) == 3 * 2
    assert len(plot_ablation_tables(made).patches) == 4 * 2
    assert len(plot_ablation_duplicates(made).patches) == 4 * 2
    assert [line.get_label() for line in plot_removal(made).lines] == ["linked list", "deque"]
    empty = Ablations(made.manifest, made.table.assign(duplicate_bytes=0), made.removal)
    assert plot_ablation_duplicates(empty).texts[0].get_text() == "none in this workload"
    plt.close("all")


def test_the_command_shows_and_draws_again(made: Ablations, tmp_path: Path) -> None:
    from kvarena.experiments.cli import app

    done = CliRunner().invoke(app, ["ablations", "--show", str(made.path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "released forwards" in done.output
    assert (tmp_path / "ablations.png").is_file()
    assert isinstance(CliRunner().invoke(app, ["ablations", "chat"]).exception, ValueError)
