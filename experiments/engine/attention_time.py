"""How long attention takes in one layer, from the lengths of a batch and the way the kernels share it out.

A batch of decodes (`paged_decode`): each sequence is cut in chunks by the kernel's own rule (`kernels/tiles.py`), a
chunk of one KV head is a program, and so many programs run at once. A program reads `token_us` a token, slower the
more run beside it; all of them together read no faster than the memory or the L2 cache:

    us = base + split + smooth max(token_us x span x (1 + crowding x share of places taken),
                                   bytes / L2, distinct / DRAM)

`span`: tokens that the busiest place works through, chunks being handed out in order. `distinct`: bytes of pages, a
shared prefix counted once, which is what has to come from memory.

Any other batch (`paged_extend`): 32 tokens of a sequence with 4 query heads a KV head are a tile, a decoding sequence
has one to itself, and tiles are handed out longest first:

    us = base + tile_us x tiles a place + smooth max(longest_us x longest tile, key_us x keys a place, bytes / rate)

and once a step (once a layer before the list was shared) the list of tiles is made: `list_us`, and `long_list_us` more
from 64 sequences on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kvarena.kernels.tiles import decode_config

PLACES = 132  # multiprocessors of an H200
HELD = 3  # programs that one of them holds, with blocks of 128 positions; twice as many for half the block
ROWS = 128  # of a tile of extend: tokens x query heads of a KV head
KEYS = 128  # a step of a tile
LONG_LIST = 64  # sequences from which the list of tiles takes `long_list_us` more
WIDTH = 256  # numbers of K and V of one token and KV head for which `key_us` is stated: head_dim 128
CHUNK_BYTES = 512  # K and V of one token and KV head for which `token_us` is stated: head_dim 128, bf16
TableKind = Literal["block_table", "req_to_token"]
Number = TypeVar("Number", float, Any)  # a float, or an array of them


@dataclass(frozen=True)
class Layout:
    """What the kernels see of a model and an allocator.

    kv_heads, group  KV heads, and query heads of each
    row_bytes        K of one token and KV head; kv_bytes: K and V; width: numbers of both
    page_size, table of the pool and its page table
    table_tokens     tokens that a row of the table can name
    """

    kv_heads: int
    group: int
    row_bytes: int
    kv_bytes: int
    width: int
    page_size: int = 16
    table: TableKind = "block_table"
    table_tokens: int = 32_768


@dataclass(frozen=True)
class DecodeTimes:
    """Coefficients of decode attention; microseconds and GB/s. See the module's head.

    token_us  a token of a chunk, by the kernel's block of 128, 64 or 32 positions
    pages     {"block_table/16": 1.08, ...}: times longer on that table and page size while latency binds
    """

    base_us: float = 4.0
    split_us: float = 2.0
    token_us: dict[str, float] = field(default_factory=lambda: {"128": 0.017, "64": 0.026, "32": 0.03})
    crowding: float = 0.3
    l2_gbps: float = 8000.0
    dram_gbps: float = 0.85 * 4800
    sharpness: float = 4.0
    pages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ExtendTimes:
    """Coefficients of extend attention; microseconds and GB/s. See the module's head.

    longest_us, key_us  a key of the longest tile alone, and of all tiles of a place
    """

    base_us: float = 6.0
    tile_us: float = 1.0
    longest_us: float = 0.003
    key_us: float = 0.0145
    gbps: float = 0.85 * 4800
    sharpness: float = 2.0
    list_us: float = 4.0
    long_list_us: float = 30.0
    pages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """One layer of a decode batch. `taken`: share of the places that have a program."""

    block: int
    span: float
    taken: float
    split: bool
    read_bytes: float
    distinct_bytes: float


@dataclass(frozen=True, slots=True)
class ExtendWork:
    """One layer of any other batch; `keys` and `tiles` are those of one place."""

    longest: float
    keys: float
    tiles: float
    read_bytes: float
    sequences: int


def decode_work(lengths: Sequence[int], layout: Layout, distinct_tokens: int) -> DecodeWork:
    """Of sequences with one new token; `lengths` tokens with KV after it, at least one. O(B log B)."""
    chosen = decode_config(len(lengths), layout.kv_heads, layout.table_tokens, layout.row_bytes)
    chunks: list[int] = []
    for length in lengths:
        per_split = -(-length // chosen.num_splits)
        chunk = max(-(-per_split // chosen.block_n) * chosen.block_n, chosen.min_chunk)
        whole, rest = divmod(length, chunk)
        chunks += [chunk] * whole
        if rest:
            chunks.append(rest)
    # Rows longer than 256 bytes are read in smaller blocks, so that as many bytes are in flight. Times are known of
    # blocks of 128, 64 and 32: what lies between counts as the smaller one.
    wide = chosen.block_n * max(layout.row_bytes, 256) // 256
    block = min(max(1 << (wide.bit_length() - 1), 32), 128)
    places = PLACES * HELD * 128 // block
    tokens = sum(lengths)
    token_bytes = layout.kv_heads * layout.kv_bytes
    return DecodeWork(
        block,
        _span(chunks, max(places // layout.kv_heads, 1)) * layout.kv_bytes / CHUNK_BYTES,
        min(len(chunks) * layout.kv_heads / places, 1.0),
        chosen.num_splits > 1,
        float(tokens * token_bytes),
        float(min(tokens, distinct_tokens) * token_bytes),
    )


def _span(chunks: Sequence[int], places: int) -> int:
    """Tokens of the busiest place, chunks being handed out in order.

    >>> _span([5, 5, 5], 2), _span([7, 1, 1, 1], 2)
    (10, 7)
    """
    if len(chunks) <= places:
        return max(chunks)
    busy = list(chunks[:places])
    heapq.heapify(busy)
    for chunk in chunks[places:]:
        heapq.heapreplace(busy, busy[0] + chunk)
    return max(busy)


def extend_work(entries: Iterable[tuple[int, int]], layout: Layout) -> ExtendWork:
    """Of (tokens before, new tokens) of each sequence. O(tiles)."""
    per_tile = max(ROWS // layout.group, 1)
    keys = longest = tiles = read = sequences = 0
    for before, new in entries:
        sequences += 1
        read += before + new
        for end in range(per_tile, new + per_tile, per_tile):
            seen = -(-(before + min(new, end)) // KEYS) * KEYS
            keys += seen
            longest = max(longest, seen)
            tiles += 1
    share, scale = layout.kv_heads / PLACES, layout.width / WIDTH
    read_bytes = float(read * layout.kv_heads * layout.kv_bytes)
    return ExtendWork(longest * scale, keys * share * scale, tiles * share, read_bytes, sequences)


def decode_us(times: DecodeTimes, work: Any, token_us: Number, factor: Number) -> Number:
    """Microseconds of one layer; `work` a DecodeWork, or arrays under the same names."""
    latency = token_us * factor * work.span * (1 + times.crowding * work.taken)
    reading = _larger(work.read_bytes / times.l2_gbps, work.distinct_bytes / times.dram_gbps) / 1e3
    power = times.sharpness
    return times.base_us + times.split_us * work.split + (latency**power + reading**power) ** (1 / power)


def extend_us(times: ExtendTimes, work: Any, factor: Number) -> Number:
    """Microseconds of one layer without the list of tiles; `work` an ExtendWork, or arrays under the same names."""
    power = times.sharpness
    latency, computing = times.longest_us * work.longest * factor, times.key_us * work.keys * factor
    reading = work.read_bytes / times.gbps / 1e3
    together = (latency**power + computing**power + reading**power) ** (1 / power)
    return times.base_us + times.tile_us * work.tiles + together


def list_us(times: ExtendTimes, sequences: Any) -> Any:
    """Microseconds of making the list of tiles once."""
    return times.list_us + times.long_list_us * (sequences >= LONG_LIST)


def _larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays."""
    return (a + b + abs(a - b)) / 2


def page_factor(pages: Mapping[str, float], table: str, page_size: int) -> float:
    """The factor of the largest page measured on this table that is not larger; 1 where there is none.

    >>> page_factor({"block_table/16": 1.1, "block_table/64": 1.2}, "block_table", 32)
    1.1
    """
    sizes = [int(key.split("/")[1]) for key in pages if key.split("/")[0] == table]
    known = [size for size in sizes if size <= page_size] or sorted(sizes)[:1]
    return pages[f"{table}/{max(known)}"] if known else 1.0
