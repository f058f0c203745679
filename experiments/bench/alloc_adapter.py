"""What an adapter costs the host: the step's changes noted, packed and copied; nothing is launched.

Both adapters over both designs, page sizes 1 and 16. Time is the host's part alone (`slots_by="nobody"`, buffers on
the CPU): what a card adds is one launch and the way of one small copy, which `kvarena bench kernels` measures.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvarena.allocators.interface import Release, Sequence
from kvarena.experiments.bench.alloc_ops import Timed, allocator, prefill, sequences_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (1, 16, 64, 256, 1024)
PREFILL_TOKENS = 8192
MAX_TOKENS = 16_384
DESIGNS = ("block", "token")
TABLES = ("block_table", "req_to_token")
PAGE_SIZES = (1, 16)


def missing() -> str | None:
    """None where adapters can be built; else why not."""
    if importlib.util.find_spec("torch") is None:
        return "adapters need torch (extra: kernels); their cost is left out"
    return None


def decode_step(design: str, page_size: int, table: str, batch_size: int) -> Timed:
    """The decode step of `batch_size` sequences, one token each; lengths differ, so pages fill by turns."""
    owner = allocator({"kind": design, "page_size": page_size})
    seqs = [Sequence(f"r{number}", [number] * (100 + number % 256)) for number in range(batch_size)]
    adapter = _adapter(owner, table, max_requests=batch_size)
    for seq in seqs:
        prefill(owner, seq)
        adapter.add(seq)
    steps, ones = owner.decode_batch(seqs), [1] * batch_size

    def reserved() -> Any:
        for seq in seqs:
            seq.append(7)
        step = steps.reserve()
        if step is None:
            raise ValueError("the pool of the benchmark is too small for a decode step")
        return step

    def before() -> Any:
        steps.commit()
        return reserved()

    def work(step: Any) -> None:
        adapter.update_step(step)
        adapter.batch(seqs, ones)

    work(reserved())
    return Timed(before, work)


def prefill_step(design: str, page_size: int, table: str) -> Timed:
    """The step that brings a new prompt of 8,192 tokens."""
    owner = allocator({"kind": design, "page_size": page_size})
    adapter = _adapter(owner, table, max_requests=256)
    fresh = sequences_of(PREFILL_TOKENS)
    live: list[Sequence] = []

    def before() -> Any:
        for seq in live:
            owner.release([seq], Release.ABORT)
            adapter.remove(seq)
        live[:] = [fresh()]
        owner.pin(live[0])
        return owner.reserve([(live[0], PREFILL_TOKENS)])

    def work(reservations: Any) -> None:
        adapter.update_all(reservations)
        adapter.batch(live, [PREFILL_TOKENS])

    return Timed(before, work)


def _adapter(owner: Any, table: str, max_requests: int) -> Any:
    import torch
    from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter

    torch.set_num_threads(1)  # waking a second one costs more than these copies, and spins on the CPU clock
    make = BlockTableAdapter if table == "block_table" else ReqToTokenAdapter
    return make(owner, max_requests=max_requests, max_tokens=MAX_TOKENS, slots_by="nobody")


def adapter_steps(largest_batch: int = BATCHES[-1]) -> Iterator[tuple[str, str, int, dict[int, Timed]]]:
    """(what, design, page size, by requests)."""
    batches = [size for size in BATCHES if size <= largest_batch]
    for design, page_size, table in itertools.product(DESIGNS, PAGE_SIZES, TABLES):
        steps = {size: decode_step(design, page_size, table, size) for size in batches}
        yield f"{table}, decode", design, page_size, steps
        yield f"{table}, prefill of 8,192", design, page_size, {1: prefill_step(design, page_size, table)}


def adapter_figure(rows: Iterable[dict[str, Any]]) -> Figure:
    """Host time of a decode step against its requests, one panel for each page size."""
    from kvarena.experiments.style import KIND_COLOURS, MARKERS
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["study"] == "adapter" and row["name"].endswith("decode")]
    figure = Figure(figsize=(6.8, 2.9), layout="constrained")
    panels = figure.subplots(1, len(PAGE_SIZES), squeeze=False, sharey=True)
    for page_size, ax in zip(PAGE_SIZES, panels[0], strict=True):
        for design, table in itertools.product(DESIGNS, TABLES):
            name = f"{table}, decode"
            line = [r for r in rows if (r["design"], r["page_size"], r["name"]) == (design, page_size, name)]
            ax.plot(
                [row["size"] for row in line],
                [row["value"] for row in line],
                color=KIND_COLOURS[design],
                marker=MARKERS[design],
                linestyle="-" if table == "block_table" else "--",
                label=f"{design}, {table}",
            )
        ax.set_xscale("log", base=2)
        ax.set_xticks(BATCHES, [f"{size:,}" for size in BATCHES])
        ax.set_ylim(bottom=0)
        ax.set_title(f"page size {page_size}")
        ax.set_xlabel("requests in the decode step")
    panels[0][0].set_ylabel("CPU time of the host, µs a step")
    panels[0][0].legend(handlelength=3)
    return figure
