"""What the kernel benchmark runs on: points, placements of tokens in the pool, page tables of both kinds.

Lengths, heads and pool size are those of published comparisons on the same card, so that numbers line up: one K and
one V pool of 1,310,720 slots x 8 heads x 128, which every kernel and peer reads in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from kvarena.kernels.page_table import PageTable
from numpy.typing import NDArray
from torch import Tensor

POOL_SLOTS = 1_310_720
HEAD_DIM = 128


def _mixed_lengths() -> tuple[int, ...]:
    """128 lengths spread evenly in log from 128 to 16,384 tokens, in a fixed random order."""
    lengths = np.geomspace(128, 16_384, 128).round().astype(int)
    return tuple(int(n) for n in np.random.default_rng(7).permutation(lengths))


DECODE_POINTS: dict[str, tuple[int, ...]] = {
    "1x8k": (8192,),
    "1x128k": (131_072,),
    "8x8k": (8192,) * 8,
    "32x4k": (4096,) * 32,
    "64x2k": (2048,) * 64,
    "128x1k": (1024,) * 128,
    "256x1k": (1024,) * 256,
    "64x16k": (16_384,) * 64,
    "256x4k": (4096,) * 256,
    "mix128": _mixed_lengths(),
}


@dataclass(frozen=True)
class ExtendShape:
    """Requests of one extend step: new tokens and cached prefix of each."""

    new: tuple[int, ...]
    prefix: tuple[int, ...]

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(n + p for n, p in zip(self.new, self.prefix, strict=True))

    def flops(self, num_heads: int) -> int:
        """Multiply-adds x 2 of QK^T and PV under the causal mask, counted exactly."""
        pairs = sum(n * p + n * (n + 1) // 2 for n, p in zip(self.new, self.prefix, strict=True))
        return 4 * num_heads * HEAD_DIM * pairs


def _mixed_shape() -> ExtendShape:
    """16 requests, new 16 to 2,048 tokens, prefix 0 to 30,000."""
    rng = np.random.default_rng(11)
    new = np.geomspace(16, 2048, 16).round().astype(int)
    prefix = np.linspace(0, 30_000, 16).round().astype(int)
    return ExtendShape(tuple(int(n) for n in rng.permutation(new)), tuple(int(n) for n in rng.permutation(prefix)))


def _uniform(new: int, prefix: int, batch: int) -> ExtendShape:
    return ExtendShape((new,) * batch, (prefix,) * batch)


EXTEND_SHAPES: dict[str, ExtendShape] = {
    "512/0x16": _uniform(512, 0, 16),
    "2048/0x4": _uniform(2048, 0, 4),
    "8192/0x1": _uniform(8192, 0, 1),
    "512/4096x8": _uniform(512, 4096, 8),
    "128/16384x8": _uniform(128, 16_384, 8),
    "16/8192x32": _uniform(16, 8192, 32),
    "8192/32768x1": _uniform(8192, 32_768, 1),
    "mix16": _mixed_shape(),
}
SEVEN = tuple(EXTEND_SHAPES)[:7]

PLACEMENTS = ("shuffled", "in_order", "identity", "groups16", "groups64", "window64", "window1024")


def place_pages(num_pages: int, pool_pages: int, page_size: int, placement: str, seed: int) -> NDArray[np.int64]:
    """Page ids of `num_pages` consecutive pages of requests, [num_pages], all different.

    shuffled    drawn at random over the whole pool
    in_order    one after the other, from a random start; identity: from page 0
    groupsN     runs of N tokens at random places (runs of one page where a page is larger)
    windowN     in order, but shuffled inside windows of N tokens
    """
    rng = np.random.default_rng(seed)
    if placement == "identity":
        return np.arange(num_pages, dtype=np.int64)
    if placement == "in_order":
        return (np.arange(num_pages) + int(rng.integers(pool_pages - num_pages + 1))).astype(np.int64)
    if placement == "shuffled":
        return rng.permutation(pool_pages)[:num_pages].astype(np.int64)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {', '.join(PLACEMENTS)}, found {placement!r}")
    kind = placement.rstrip("0123456789")
    run = max(1, int(placement.removeprefix(kind)) // page_size)
    if kind == "groups":
        starts = rng.permutation(pool_pages // run)[: -(-num_pages // run)] * run
        return (starts[:, None] + np.arange(run)[None, :]).reshape(-1)[:num_pages].astype(np.int64)
    windows = np.arange(-(-num_pages // run) * run).reshape(-1, run)
    return rng.permuted(windows, axis=1).reshape(-1)[:num_pages].astype(np.int64)


def make_table(
    lens: tuple[int, ...],
    page_size: int,
    placement: str,
    seed: int,
    *,
    kind: str = "block_table",
    pool_slots: int = POOL_SLOTS,
    device: str = "cuda",
) -> PageTable:
    """A PageTable over fresh pages for requests of `lens` tokens.

    kind  block_table, req_to_token, or one_entry: a single entry a request, so that nothing is looked up (equal
          lengths, a power of two; the slots are those of placement identity)
    """
    if kind == "one_entry":
        return _one_entry(lens, device)
    counts = [-(-n // page_size) for n in lens]
    pages = place_pages(sum(counts), pool_slots // page_size, page_size, placement, seed)
    entries = np.zeros((len(lens), max(counts)), np.int64)
    start = 0
    for row, count in enumerate(counts):
        entries[row, :count] = pages[start : start + count]
        start += count
    rows = np.arange(len(lens))
    if kind == "req_to_token":
        slots = entries[:, :, None] * page_size + np.arange(page_size)
        entries = slots.reshape(len(lens), -1)
        rows = np.random.default_rng(seed).permutation(len(lens))
        shuffled = np.empty_like(entries)
        shuffled[rows] = entries
        entries = shuffled

    def to_device(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device)

    tokens_per_entry = page_size if kind == "block_table" else 1
    return PageTable(to_device(entries), to_device(rows), to_device(np.array(lens)), tokens_per_entry)


def _one_entry(lens: tuple[int, ...], device: str) -> PageTable:
    length = lens[0]
    if len(set(lens)) > 1 or length & (length - 1):
        raise ValueError(f"lens: expected equal powers of two for one_entry, found {sorted(set(lens))}")
    rows = torch.arange(len(lens), dtype=torch.int32, device=device)
    return PageTable(rows[:, None].contiguous(), rows, torch.full_like(rows, length), length)


def make_starts(new: tuple[int, ...], device: str = "cuda") -> Tensor:
    """query_start_loc int32 [B + 1]."""
    return torch.tensor([0, *np.cumsum(new).tolist()], dtype=torch.int32, device=device)
