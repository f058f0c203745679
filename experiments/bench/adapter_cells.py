"""What a step through an adapter costs on a card: the host's time to enqueue it, the device's time to carry it out.

Decode steps of 256 requests in which no page changes (page size 16), and in which every request gets one (page size 1):
`decode` by the verb for a decode batch, which reads the batch's column of lengths; `lists` by the verbs for any batch,
`update_step` and `batch`, which read every sequence; `floor` is what no way can leave out, the copy and the launch.
And a prompt of 8,192 tokens arrives. `must` of decode steps, both ways: 60 us of the host, 5 us of the device.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from kvarena.allocators.decode_batch import StepReservation
from kvarena.allocators.interface import Reservation, Sequence
from kvarena.experiments.bench.timing import capture, host_all, time_all
from kvarena.kernels.step import StepBuffers, apply_decode, apply_step, gather_rows

REQUESTS = 256
PROMPT = 8192
DEVICE = "cuda"


class _Pages:
    """A page source whose rows only grow: the adapter's cost without an allocator's."""

    num_pages = 2**24

    def __init__(self, page_size: int, tokens: int) -> None:
        self.page_size = page_size
        self.pages = array("i", range(1, tokens // page_size + 1))

    def page_ids(self, seq: Sequence) -> array[int]:
        return self.pages


def adapter_rows() -> Iterator[dict[str, Any]]:
    """Host rows first, device rows behind them."""
    calls = {
        (kind, name, page_size): call
        for kind in ("block_table", "req_to_token")
        for name, page_size, call in _host_calls(kind)
    }
    for (kind, name, page_size), timed in host_all(calls).items():
        row = {"op": "host", "what": f"adapter_{name}", "table": kind, "page": page_size, "kernel": "kvarena"}
        found = timed.row()
        yield row | {"us": found["us"], "spread": found["spread"]}
    for labels, call in _device_calls():
        device = time_all({"kvarena": capture([call], times=20)})["kvarena"]
        yield {"op": "adapter", **labels, "kernel": "kvarena", "us": round(device.us, 2), "spread": device.spread}


def _host_calls(kind: str) -> Iterator[tuple[str, int, Callable[[], object]]]:
    for page_size, pages in ((16, ""), (1, "_new_pages")):
        yield f"decode{pages}", page_size, _decode(kind, page_size, at_once=True)
        yield f"lists{pages}", page_size, _decode(kind, page_size, at_once=False)
    yield "floor", 16, _floor(kind, 16)
    yield "prefill", 16, _prefill(kind, 16)


def _adapter(kind: str, source: _Pages, max_tokens: int) -> Any:
    from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter

    make = BlockTableAdapter if kind == "block_table" else ReqToTokenAdapter
    return make(source, max_requests=REQUESTS, max_tokens=max_tokens, device=DEVICE)


def _decode(kind: str, page_size: int, at_once: bool) -> Callable[[], object]:
    """A decode step of 256 requests; at page size 1 each of them gets a page."""
    adapter = _adapter(kind, _Pages(page_size, 1024), 8192)
    seqs = [Sequence(str(number), [1] * 1024) for number in range(REQUESTS)]
    for seq in seqs:
        adapter.add(seq)
        seq.num_computed_tokens = 1000
    ones, taken = [1] * REQUESTS, REQUESTS if page_size == 1 else 0
    reserved = StepReservation(seqs, range(taken), array("i", range(1, taken + 1)))
    reserved.computed = np.full(REQUESTS, 1000, dtype=np.intp)

    def step() -> None:
        adapter.update_step(reserved)
        adapter.batch(seqs, ones)

    return functools.partial(adapter.decode, reserved) if at_once else step


def _floor(kind: str, page_size: int) -> Callable[[], object]:
    """One copy of a step's numbers and one launch over them, which are not written anew."""
    adapter = _adapter(kind, _Pages(page_size, 1024), 8192)
    size = 4 * REQUESTS + 2 + REQUESTS

    def step() -> None:
        adapter._upload.host_buffer()
        adapter._upload.send(size)
        apply_step(adapter._buffers, REQUESTS, REQUESTS, 1, 0, size)

    return step


def _prefill(kind: str, page_size: int) -> Callable[[], object]:
    """A new prompt of 8,192 tokens in place of the last one."""
    source = _Pages(page_size, PROMPT)
    adapter, seq = _adapter(kind, source, PROMPT), Sequence("prompt", [1] * PROMPT)

    def step() -> None:
        if seq in adapter:
            adapter.remove(seq)
        adapter.update(Reservation(seq, source.pages))
        adapter.batch([seq], [PROMPT])

    return step


def _device_calls() -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    """Launches over buffers that were packed before."""
    for kind, page_size in (("block_table", 16), ("block_table", 1), ("req_to_token", 16), ("req_to_token", 1)):
        labels = {"table": kind, "page": page_size}
        decode = _packed(kind, page_size, [1] * REQUESTS)
        changes = REQUESTS  # the worst step: all of them get a page
        at = 4 * REQUESTS + 2 + REQUESTS
        yield (
            {"what": "decode", **labels, "requests": REQUESTS},
            lambda s=decode, n=changes, at=at: apply_step(s, REQUESTS, REQUESTS, 1, n, at),  # type: ignore[misc]
        )
        prefill = _packed(kind, page_size, [PROMPT])
        pages = PROMPT // page_size
        yield (
            {"what": "prefill", **labels, "tokens": PROMPT},
            lambda s=prefill, n=pages, at=4 * REQUESTS + 2 + pages: apply_step(s, 1, PROMPT, PROMPT, n, at),  # type: ignore[misc]
        )
        inbox = torch.arange(3 * REQUESTS, dtype=torch.int32, device=DEVICE) % (PROMPT // page_size)
        yield (
            {"what": "decode_same_members", **labels, "requests": REQUESTS},
            lambda s=decode, inbox=inbox: apply_decode(s, inbox, REQUESTS, REQUESTS),  # type: ignore[misc]
        )
        if kind == "block_table":
            yield {"what": "gather", **labels}, lambda s=decode: gather_rows(s, REQUESTS, s.entries.shape[1], 0)  # type: ignore[misc]


def _packed(kind: str, page_size: int, new: list[int]) -> StepBuffers:
    """Buffers with a step in which each request computes `new` tokens, in pages that are all new."""
    expand = 1 if kind == "block_table" else page_size
    count, columns = len(new), PROMPT // page_size
    pages_each = [-(-n // page_size) for n in new]
    owners = [b for b, n in enumerate(pages_each) for _ in range(n)]
    inside = [i for n in pages_each for i in range(n)]
    pages = torch.randperm(2**20)[: len(owners)].tolist()
    zeros = [0] * (REQUESTS - count)
    starts = [sum(new[:b]) for b in range(count + 1)] + [sum(new)] * (REQUESTS - count)
    page_start = [sum(pages_each[:b]) for b in range(count + 1)] + zeros
    rows = [b + 1 for b in range(count)]
    numbers = [*rows, *zeros, *new, *zeros, *starts, *page_start, *pages]
    numbers += [*(b + 1 for b in owners), *inside, *pages, *owners]
    packed = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    entries = torch.zeros(REQUESTS + 1, columns * expand, dtype=torch.int32, device=DEVICE)
    gathered = torch.zeros_like(entries[1:]) if kind == "block_table" else None
    positions, slots = (torch.zeros(PROMPT, dtype=torch.int64, device=DEVICE) for _ in range(2))
    return StepBuffers(packed, entries, gathered, positions, slots, REQUESTS, page_size, expand)
