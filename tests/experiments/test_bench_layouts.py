"""Layouts recorded from aged pools: files that round-trip, tables that name their slots, broken files refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvarena.experiments.bench.recorded import FOLDER, layout_table, load_layouts, read_layouts, write_layout
from kvarena.experiments.bench.shapes import POOL_SLOTS

PAGED = [[8, 9, 10, 11, 0, 1], [4, 5, 6, 7, 12]]


@pytest.mark.parametrize("kind", ["block_table", "req_to_token"])
@pytest.mark.parametrize(("page_size", "slots"), [(4, PAGED), (1, [[9, 3, 4], [7]])])
def test_a_file_round_trips_into_a_table_that_names_its_slots(
    tmp_path: Path, kind: str, page_size: int, slots: list[list[int]]
) -> None:
    write_layout(tmp_path / "aged.parquet", "token", page_size, slots)
    (layout,) = load_layouts(tmp_path)
    assert (layout.name, layout.allocator, layout.page_size) == ("aged", "token", page_size)
    assert layout.lens == tuple(map(len, slots))
    table = layout_table(layout, kind, "cpu")
    assert table.tokens_per_entry == (page_size if kind == "block_table" else 1)
    for request, row in enumerate(slots):
        assert table.slots(request).tolist() == row


def test_run_length_counts_neighbours(tmp_path: Path) -> None:
    write_layout(tmp_path / "a.parquet", "token", 1, [[5, 6, 7, 8], [3, 1, 0, 9]])
    assert load_layouts(tmp_path)[0].run_length == 8 / 5


def test_copies_are_disjoint_and_alike(tmp_path: Path) -> None:
    write_layout(tmp_path / "a.parquet", "block", 4, PAGED)
    layout = load_layouts(tmp_path)[0]
    copies = layout.copies(3 * 4096, most=16)
    taken = np.concatenate([row for copy in copies for row in copy.slots])
    assert len(copies) == 3
    assert len(set(taken.tolist())) == len(taken)
    assert [copy.run_length for copy in copies] == [layout.run_length] * 3
    assert len(layout.copies(10, most=16)) == 1


@pytest.mark.parametrize("placement", ["in_order", "shuffled"])
def test_pages_placed_otherwise_are_shared_alike(tmp_path: Path, placement: str) -> None:
    shared = [[8, 9, 10, 11, 0, 1], [8, 9, 10, 11, 4, 5, 6, 7, 12]]
    write_layout(tmp_path / "a.parquet", "block", 4, shared)
    layout = load_layouts(tmp_path)[0]
    placed = layout.placed(placement, 4096, seed=3)
    assert placed.lens == layout.lens
    assert placed.unique_tokens == layout.unique_tokens == 11
    assert (placed.slots[0][:4] == placed.slots[1][:4]).all()
    assert all((row % 4 == np.arange(len(row)) % 4).all() for row in placed.slots)
    if placement == "in_order":
        assert placed.slots[0].tolist() == [0, 1, 2, 3, 4, 5]
        assert placed.slots[1].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    with pytest.raises(ValueError, match="placement: expected in_order or shuffled"):
        layout.placed("sorted", 4096)


@pytest.mark.parametrize(
    ("page_size", "slots", "message"),
    [
        (3, [[0]], "page_size: expected a power of two, found 3"),
        (4, [[1, 2, 3]], "expected the slots of a page to be consecutive"),
        (4, [[0, 1, 2, 3, 4, 6]], "expected the slots of a page to be consecutive"),
        (1, [[0], []], "request 1: slots: expected at least one"),
        (1, [[-1]], "expected at least one, all from 0 on"),
    ],
)
def test_broken_batches_are_refused(tmp_path: Path, page_size: int, slots: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_layout(tmp_path / "a.parquet", "block", page_size, slots)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"not one")
    with pytest.raises(ValueError, match=r"a\.parquet: expected a Parquet file"):
        read_layouts(path)
    pq.write_table(pa.table({"allocator": ["block"], "slots": [[1]]}), path)
    with pytest.raises(ValueError, match="found none named page_size, request"):
        read_layouts(path)
    twice = {"allocator": ["block"] * 2, "page_size": [1, 1], "request": [0, 0], "slots": [[1], [2]]}
    pq.write_table(pa.table(twice), path)
    with pytest.raises(ValueError, match="request 0: expected one row a request, found two"):
        read_layouts(path)


def test_no_folder_means_no_layouts(tmp_path: Path) -> None:
    assert load_layouts(tmp_path / "absent") == []


def test_the_layouts_of_the_project_fit_the_benchmark_s_pool() -> None:
    layouts = load_layouts(FOLDER)
    assert layouts
    for layout in layouts:
        assert max(int(row.max()) for row in layout.slots) < POOL_SLOTS
