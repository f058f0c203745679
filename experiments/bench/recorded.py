"""Page layouts recorded from aged pools, as one more placement of the decode benchmark.

A layout file is a Parquet with one row a request of one recorded decode batch:

    allocator   string       the allocator that owned the pages, "block" or "token" say
    page_size   int32        tokens a page, a power of two
    request     int32        number of the request in the batch, 0, 1, 2, ...
    slots       list<int32>  slot of each of its tokens, position order; the slots of a page are consecutive

A file may hold several (allocator, page_size) batches. They lie in `experiments/bench/layouts/`; the benchmark runs
every file there is. Slots of a batch lie in [0, POOL_SLOTS).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvarena.kernels.page_table import PageTable

FOLDER = Path(__file__).parent / "layouts"
COLUMNS = ("allocator", "page_size", "request", "slots")


@dataclass(frozen=True)
class Layout:
    """One recorded batch.

    name       file, without its ending
    allocator  as recorded
    page_size  tokens a page
    slots      int64 [tokens] of each request, position order
    """

    name: str
    allocator: str
    page_size: int
    slots: tuple[NDArray[np.int64], ...]

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(len(row) for row in self.slots)

    @property
    def run_length(self) -> float:
        """Mean run of neighbouring slots, in tokens: 1 where no slot follows its neighbour."""
        breaks = sum(1 + int((np.diff(row) != 1).sum()) for row in self.slots)
        return sum(self.lens) / breaks

    def moved(self, by: int) -> Layout:
        """The same layout `by` slots further on; by is a multiple of the page size."""
        return Layout(self.name, self.allocator, self.page_size, tuple(row + by for row in self.slots))

    def first(self, count: int) -> Layout:
        """The first `count` requests of the batch."""
        return Layout(self.name, self.allocator, self.page_size, self.slots[:count])

    @property
    def unique_tokens(self) -> int:
        """Slots that are named at least once: requests that share a prefix name the same ones."""
        return len(np.unique(np.concatenate(self.slots)))

    def placed(self, placement: str, pool_slots: int, seed: int = 0) -> Layout:
        """The same batch, with the same sharing, its pages elsewhere: `in_order` of first use, or `shuffled`."""
        size = self.page_size
        pages, first = np.unique(np.concatenate(self.slots) // size, return_index=True)
        targets = np.empty(int(pages.max()) + 1, np.int64)
        if placement == "in_order":
            targets[pages[np.argsort(first)]] = np.arange(len(pages))
        elif placement == "shuffled":
            targets[pages] = np.random.default_rng(seed).permutation(pool_slots // size)[: len(pages)]
        else:
            raise ValueError(f"placement: expected in_order or shuffled, found {placement!r}")
        rows = tuple(targets[row // size] * size + row % size for row in self.slots)
        return Layout(self.name, self.allocator, size, rows)

    def copies(self, pool_slots: int, most: int) -> list[Layout]:
        """As many disjoint copies as the pool holds, at most `most`: benchmarks rotate over them."""
        span = -(-(max(int(row.max()) for row in self.slots) + 1) // 4096) * 4096
        return [self.moved(i * span) for i in range(max(1, min(most, pool_slots // span)))]


def load_layouts(folder: Path = FOLDER) -> list[Layout]:
    """All batches of all layout files of a folder, by file name; [] where there is none.

    ValueError: a file that is not one, naming file, column or request, expected and found.
    """
    return [layout for path in sorted(folder.glob("*.parquet")) for layout in read_layouts(path)]


def read_layouts(path: Path) -> list[Layout]:
    """The batches of one file, in the order in which they first appear."""
    import pyarrow
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file, found {error}") from None
    if missing := set(COLUMNS) - set(table.column_names):
        raise ValueError(
            f"{path}: expected columns {', '.join(COLUMNS)}, found none named {', '.join(sorted(missing))}"
        )
    batches: dict[tuple[str, int], dict[int, NDArray[np.int64]]] = {}
    for allocator, page_size, request, slots in zip(*(table[name].to_pylist() for name in COLUMNS), strict=True):
        batch = batches.setdefault((allocator, page_size), {})
        place = f"{path}: {allocator}, page_size {page_size}, request {request}"
        if request in batch:
            raise ValueError(f"{place}: expected one row a request, found two")
        batch[request] = _checked(place, page_size, slots)
    return [
        Layout(path.stem, allocator, size, tuple(batch[i] for i in sorted(batch)))
        for (allocator, size), batch in batches.items()
    ]


def _checked(place: str, page_size: Any, slots: Any) -> NDArray[np.int64]:
    """The slots of one request, whole pages in a row."""
    if not isinstance(page_size, int) or page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"{place}: page_size: expected a power of two, found {page_size!r}")
    row = np.array(slots if slots is not None else [], dtype=np.int64)
    if not len(row) or row.min() < 0:
        raise ValueError(f"{place}: slots: expected at least one, all from 0 on, found {row.tolist()[:8]}")
    starts = np.repeat(row[::page_size], page_size)[: len(row)]
    if (starts % page_size).any() or (row != starts + np.arange(len(row)) % page_size).any():
        raise ValueError(f"{place}: slots: expected the slots of a page to be consecutive, found others")
    return row


def write_layout(path: Path, allocator: str, page_size: int, slots: list[list[int]]) -> None:
    """One batch as a layout file; ValueError for slots that `read_layouts` would refuse."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for i, row in enumerate(slots):
        _checked(f"{path}: request {i}", page_size, row)
    columns = {
        "allocator": pa.array([allocator] * len(slots), pa.string()),
        "page_size": pa.array([page_size] * len(slots), pa.int32()),
        "request": pa.array(range(len(slots)), pa.int32()),
        "slots": pa.array(slots, pa.list_(pa.int32())),
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


def layout_table(layout: Layout, kind: str, device: str = "cuda") -> PageTable:
    """The page table of a layout; kind: block_table or req_to_token."""
    import torch
    from kvarena.kernels.page_table import PageTable

    size = layout.page_size if kind == "block_table" else 1
    columns = [row[::size] // size for row in layout.slots]
    entries = np.zeros((len(columns), max(map(len, columns))), np.int32)
    for i, row in enumerate(columns):
        entries[i, : len(row)] = row
    numbers = (entries, np.arange(len(columns), dtype=np.int32), np.array(layout.lens, np.int32))
    on_device = [torch.from_numpy(array).to(device) for array in numbers]
    return PageTable(on_device[0], on_device[1], on_device[2], size)
