"""Tile sizes of the attention kernels: small functions of shapes, from measurements that results/h200 holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvarena.kernels._numbers import ceil_div, next_power_of_two

BOX_ROWS = 64  # pages of this many tokens hold whole blocks of keys, which a descriptor (TMA) fetches in one piece
L2_BYTES = 24 * 2**20  # of K and V that programs in flight share: L2 holds it beside what passes through
MAX_PROGRAMS = 16384  # splits stop here: wide tables of short requests would launch mostly empty programs


@dataclass(frozen=True)
class DecodeConfig:
    """Tile of one program and the number of programs that share a request."""

    block_n: int  # positions a step
    num_warps: int
    num_stages: int  # loads in flight
    min_chunk: int  # tokens a split, at least
    num_splits: int


def decode_config(
    batch: int, kv_blocks: int, capacity: int, row_bytes: int, itemsize: int = 2, block_h: int = 16
) -> DecodeConfig:
    """Tile sizes from shapes alone.

    batch      requests
    kv_blocks  KV heads x blocks of query heads
    capacity   tokens that a row of the table can name (or the window, if smaller)
    row_bytes  bytes of one K row in the pool
    itemsize   bytes of one number in the pool
    block_h    query heads of a program, padded

    From runs on one H200 (results/h200). A program takes 256 to 4,096 tokens, chosen so that all of them are just
    under two waves of what the multiprocessors hold at once, or many: one program with 128-token blocks (the most
    bytes in flight, where a chunk is long or work is plenty), two or three with 64, four with 32 where requests are
    short. From 2^24 tokens on chunks are shorter again: a long request in a mixed batch must not end last.
    With 32-token blocks of short requests one warp a program is enough, and looks up each place in the table once; two
    warps both do, which costs 1 % on tables with an entry a token.
    Blocks are for rows of 256 bytes: longer ones halve them so that loads in flight fit in shared memory, rows of
    128 bytes (one-byte caches, head_dim 64) want more programs or stages.
    """
    programs = batch * kv_blocks
    work = programs * capacity
    odd_rows = 256 < row_bytes < 512  # head_dim 192: three quarters of what a block of 256 numbers holds
    chunk = min(4096, max(256, next_power_of_two(work // 512)))
    if work >= 2**20:
        chunk = 4096 if work < 2**21 else min(4096, max(1024, next_power_of_two(work // 2048)))
    if work >= 2**24 or odd_rows:
        chunk = min(chunk, 2048)
    num_splits = max(1, min(ceil_div(capacity, chunk), MAX_PROGRAMS // max(programs, 1)))
    length = min(chunk, capacity)
    if work <= 2**17:
        block_n, num_warps, num_stages = 32, 2, 5
    elif odd_rows and work >= 2**19:
        return DecodeConfig(32, 2, 4, chunk, num_splits)
    elif work >= 2**21:
        block_n, num_warps, num_stages = (128, 4, 4) if row_bytes > 128 or itemsize == 1 else (64, 2, 4)
    elif length >= 4096:
        block_n, num_warps, num_stages = (128, 4, 4) if row_bytes > 128 else (128, 4, 6)
    elif work >= 2**20 and length <= 1024:
        single = block_h <= 16 and itemsize == 2 and 128 < row_bytes <= 256
        block_n, num_warps, num_stages = 32, 1 if single else 2, 4
    else:
        block_n, num_warps, num_stages = 64, 2, 3
    while row_bytes > 256 and block_n > 16:
        row_bytes //= 2
        block_n //= 2
    return DecodeConfig(block_n, num_warps, num_stages, chunk, num_splits)


@dataclass(frozen=True)
class ExtendConfig:
    """Tile of one program."""

    block_m: int  # rows: tokens x query heads of one KV head
    block_n: int  # keys a step
    num_warps: int
    num_stages: int  # loads in flight


def extend_config(
    num_tokens: int,
    batch: int,
    group: int,
    block_d: int,
    itemsize: int,
    plain: bool = True,
    boxes: bool = False,
    capacity: int = 0,
) -> ExtendConfig:
    """Tile sizes from shapes alone.

    num_tokens  T, new tokens; batch  B; so T / B x G rows a request and KV head on average
    group       query heads of one KV head, G
    block_d     larger of the padded head dims
    itemsize    bytes of one number of q
    plain       no softcap, no ALiBi, K and V of q's dtype: nothing else needs registers
    boxes       K and V can come by descriptors (TMA); blocks of more than BOX_ROWS keys do without
    capacity    tokens that a row of the table can name

    From runs on one H200: descriptors where pages allow, with two programs on a multiprocessor; 256 rows x 128 keys by
    pointers where requests are long; 64 rows for a few new tokens on long prefixes (memory bound). Tiles shrink
    where Q, K and V in flight would not fit in shared memory (head_dim above 128), or where sm_90 would spill
    registers (tests/kernels/test_compile.py prints the report).
    """
    rows = max(num_tokens // max(batch, 1), 1) * group
    if itemsize == 4:
        shape = (64, 16, 8, 2) if block_d <= 128 else (32, 16, 8, 2)
    elif block_d > 128:
        wide = (128, 64, 8, 2) if plain else (128, 32, 8, 2)
        shape = (64, 32, 4, 2) if rows <= 64 else wide
    elif rows <= 64:
        shape = (64, 64, 4, 3)
    elif boxes:
        shape = (128, 64, 4, 2)
    elif plain and block_d == 128 and rows > 128 and capacity >= 2048:
        shape = (256, 128, 8, 2)
    else:
        shape = (256, 64, 8, 3) if rows > 128 and plain else (128, 64, 8, 3)
    block_m, block_n, num_warps, num_stages = shape
    return ExtendConfig(max(block_m, next_power_of_two(group)), block_n, num_warps, num_stages)


def heads_together(num_kv_heads: int, head_bytes: int) -> int:
    """KV heads whose tiles run side by side: the most, a divisor of all, whose K and V fit in L2.

    head_bytes  K and V of one head of the longest request that the table can name
    """
    fit = max(1, L2_BYTES // max(head_bytes, 1))
    return max(n for n in range(1, min(fit, num_kv_heads) + 1) if num_kv_heads % n == 0)
