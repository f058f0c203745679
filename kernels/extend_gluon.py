"""paged_extend on Hopper in Gluon: the work list, the launcher, and what this path can take.

out = softmax(scale q K^T + causal mask) V over the page table, for head_dim 128 in bf16 or fp16. The device code is
`kvarena.kernels._hopper`; the plain Triton kernel of `kvarena.kernels.extend` is its readable form and takes every
case that `why_not` names (other cards, other Triton releases, other head sizes, window, softcap, ALiBi, scales).

Pages of 8 tokens and more are read by TMA boxes, smaller ones by a gather of rows. Unowned slots may hold anything:
keys past the end are masked, and values past the end are zeroed in shared memory before they meet a probability of
0 (the gather repeats the last token instead).

The work list is made on the device from `query_start_loc` and `seq_lens`, without waiting for it: one small kernel,
once a step for all layers, or inside each call when no plan is given. Size of the list and grid depend on shapes
only, so a captured CUDA graph stays right when lengths change.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from kvarena.kernels._direct import Descriptors
from kvarena.kernels._launch import (
    LOG2E,
    Launch,
    Remembered,
    call_key,
    ceil_div,
    is_power_of_two,
    next_power_of_two,
    num_sms,
    table_key,
)
from kvarena.kernels.page_table import PageTable
from torch import Tensor

TRITON = (3, 6)  # the experimental API that _hopper is written for
HEAD_DIM = 128
TILE_ROWS = 128  # query rows a tile: tokens times the query heads of one KV head
RECORD = 8
MIN_BOX = 8  # tokens: a TMA box must cover whole 8-row groups of the swizzled buffer
L2_GROUP_BYTES = 24 * 2**20  # K and V that tiles in flight share: fits the 50-60 MB L2 with room for the next group

_loaded: dict[str, Any] = {}  # "module", or "reason" for which there is none


@triton.jit
def _tiles_from(extent, prefix, total, tiles, TT: tl.constexpr):
    """How many of a sequence's tiles reach at least `extent` keys."""
    below = (tl.maximum(extent - prefix, 0) + TT - 1) // TT - 1
    count = tiles - tl.minimum(tl.maximum(below, 0), tl.maximum(tiles - 1, 0))
    return tl.where((total >= extent) & (tiles > 0), count, 0)


@triton.jit
def _plan_kernel(
    start_ptr,
    rows_ptr,
    seq_ptr,
    tiles_ptr,
    batch,
    num_tokens,
    state_at,
    GROUP_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TT: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Grid (candidates / BLOCK, HEADS): each program places BLOCK tiles of one KV head at their rank in the list.

    Order: groups of (sequence, KV head) pairs whose K and V fit L2; inside a group most keys first; ties by pair.
    Tokens behind the last request are one more sequence, of length 0.
    """
    head = tl.program_id(1)
    o_b = tl.arange(0, BATCH)
    m_b = o_b <= batch
    start = tl.load(start_ptr + o_b, mask=m_b, other=num_tokens)
    new = tl.load(start_ptr + o_b + 1, mask=o_b < batch, other=num_tokens) - start
    total = tl.load(seq_ptr + o_b, mask=o_b < batch, other=0)
    size = tl.maximum(total, 1)
    tiles = tl.where(m_b, (new + TT - 1) // TT, 0)
    ends = tl.cumsum(tiles, 0)
    pairs = (tl.cumsum(tl.where(m_b, size, 0), 0) - size) * HEADS  # tokens of K in all pairs before this sequence's
    if (tl.program_id(0) == 0) & (head == 0):
        state_ptr = tiles_ptr + state_at
        tl.store(state_ptr, tl.sum(tiles, 0) * HEADS)
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr + 2, 0)

    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_i = i < tl.sum(tiles, 0)
    b = tl.sum((i[:, None] >= ends[None, :]).to(tl.int32), 1)  # [BLOCK]: sequence of each tile
    b = tl.minimum(b, batch)
    mine = o_b[None, :] == b[:, None]  # [BLOCK, BATCH]
    t = i - tl.sum(tl.where(mine, (ends - tiles)[None, :], 0), 1)
    my_start = tl.sum(tl.where(mine, start[None, :], 0), 1)
    my_new = tl.sum(tl.where(mine, new[None, :], 0), 1)
    my_total = tl.sum(tl.where(mine, total[None, :], 0), 1)
    my_pair = tl.sum(tl.where(mine, (pairs + head * size)[None, :], 0), 1)
    extent = my_total - my_new + tl.minimum((t + 1) * TT, my_new)

    group = (my_pair // GROUP_TOKENS) * GROUP_TOKENS
    first = tl.maximum(group[:, None] - pairs[None, :], 0)
    first = tl.minimum((first + size[None, :] - 1) // size[None, :], HEADS)  # heads in earlier groups
    last = tl.maximum(group[:, None] + GROUP_TOKENS - pairs[None, :], 0)
    last = tl.minimum((last + size[None, :] - 1) // size[None, :], HEADS)
    longer = extent[:, None] + (o_b[None, :] >= b[:, None]).to(tl.int32)
    longer = _tiles_from(longer, (total - new)[None, :], total[None, :], tiles[None, :], TT)
    rank = first * tiles[None, :] + (last - first) * longer + tl.where(mine, head - first, 0)
    record = tiles_ptr + tl.sum(tl.where(m_b[None, :], rank, 0), 1) * RECORD
    tl.store(record, my_start + t * TT, mask=m_i)
    tl.store(record + 1, tl.minimum(my_new - t * TT, TT), mask=m_i)
    tl.store(record + 2, my_total - my_new + t * TT, mask=m_i)
    tl.store(record + 3, my_total, mask=m_i)
    tl.store(record + 4, tl.load(rows_ptr + b, mask=m_i & (b < batch), other=0), mask=m_i)
    tl.store(record + 5, tl.zeros([BLOCK], tl.int32) + head, mask=m_i)


@dataclass(frozen=True)
class ExtendPlan:
    """Work list of one step, for every layer of one model; not for two streams at once (they would share a counter).

    buffer           int32 [most tiles + 1, 8]: the tiles, and behind them the state
    tokens_per_tile  128 / (HQ / HKV)
    num_kv_heads     HKV
    """

    buffer: Tensor
    tokens_per_tile: int
    num_kv_heads: int

    @property
    def tiles(self) -> Tensor:
        """int32 [most tiles, 8]: first query token, tokens, position, seq_len, table row, KV head."""
        return self.buffer[:-1]

    @property
    def state(self) -> Tensor:
        """int32 [8]: tiles in the list, next tile, CTAs done; the rest is not used."""
        return self.buffer[-1]


def plan_extend(
    table: PageTable, query_start_loc: Tensor, num_tokens: int, num_heads: int, num_kv_heads: int
) -> ExtendPlan:
    """Sort the tiles of T = `num_tokens` new tokens on the device: no host sync, sizes from shapes only.

    query_start_loc  int32 [B + 1]
    Cost: one kernel, 3 to 10 us for up to 2,000 tiles; O(tiles x B) work.
    """
    key = (call_key(query_start_loc), table_key(table), num_tokens, num_heads, num_kv_heads)
    call = _plans.get(key)
    if call is None:
        call = _plans[key] = _prepare_plan(table.seq_lens.shape[0], num_tokens, num_heads, num_kv_heads)
    rows, tokens_per_tile, fill = call
    buffer = torch.empty((rows, RECORD), dtype=torch.int32, device=query_start_loc.device)
    fill((query_start_loc, table.rows, table.seq_lens, buffer))
    return ExtendPlan(buffer, tokens_per_tile, num_kv_heads)


_plans = Remembered()


def _prepare_plan(batch: int, num_tokens: int, num_heads: int, num_kv_heads: int) -> tuple[int, int, Launch]:
    """(rows of the buffer, tokens a tile, launch) of plans of one shape."""
    tokens_per_tile = TILE_ROWS // (num_heads // num_kv_heads)
    most = num_tokens // tokens_per_tile + batch + 1
    padded = next_power_of_two(batch + 1)
    block = max(1, min(64, 8192 // padded))
    constants = {
        "GROUP_TOKENS": L2_GROUP_BYTES // (2 * HEAD_DIM * 2),
        "HEADS": num_kv_heads,
        "TT": tokens_per_tile,
        "BATCH": padded,
        "BLOCK": block,
        "RECORD": RECORD,
        "num_warps": 4,
    }
    rows = ceil_div(most * num_kv_heads, 2) * 2  # so that the state's place is a multiple of 16, whatever the batch
    numbers = (batch, num_tokens, rows * RECORD)
    grid = (ceil_div(most, block), num_kv_heads, 1)
    return rows + 1, tokens_per_tile, Launch(_plan_kernel, grid, numbers, constants)


def load_module() -> Any:
    """The device code, or None: another Triton than 3.6 is told once, in a warning, and plain Triton takes over."""
    if not _loaded:
        try:
            version = tuple(int(part) for part in triton.__version__.split(".")[:2])
            if version != TRITON:
                raise ImportError(f"written for Triton {TRITON[0]}.{TRITON[1]}, found {triton.__version__}")
            _loaded["module"] = importlib.import_module("kvarena.kernels._hopper")
        except (ImportError, AttributeError, ValueError) as error:
            _loaded["reason"] = f"{type(error).__name__}: {error}"
            warnings.warn(f"no Gluon extend kernel, plain Triton instead ({_loaded['reason']})", stacklevel=3)
    return _loaded.get("module")


def runs_on(device: torch.device) -> bool:
    """Whether the Gluon kernel can run on `device`: Hopper, and a Triton with the API that it is written for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _capability(device) == (9, 0) and load_module() is not None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def why_not(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> str | None:
    """The first reason for which this kernel cannot take a call, or None. Reads shapes only."""
    extras = {
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    for name, value in extras.items():
        if value is not None:
            return f"{name} is set"
    if q.dtype not in (torch.bfloat16, torch.float16) or key_cache.dtype != q.dtype:
        return f"dtype {q.dtype} with a cache of {key_cache.dtype}"
    if {q.shape[2], key_cache.shape[3], value_cache.shape[3]} != {HEAD_DIM}:
        return f"head_dim {key_cache.shape[3]}"
    group = q.shape[1] // key_cache.shape[2]
    if not is_power_of_two(group) or group > TILE_ROWS // 2:
        return f"{group} query heads a KV head"
    if scale is not None and not scale > 0:
        return f"scale {scale}"
    if q.shape[0] == 0:
        return "no tokens"
    for name, tensor in (("q", q), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.data_ptr() % 16 or any(stride % 8 for stride in tensor.stride()[:-1]):
            return f"{name} is not aligned to 16 bytes"
    if key_cache.shape[1] >= MIN_BOX and None in (box_view(key_cache), box_view(value_cache)):
        return "a cache whose pages are no whole number of rows apart"
    if not runs_on(q.device):
        return _loaded.get("reason", "not a Hopper GPU")
    return None


def available(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, table: PageTable, query_start_loc: Tensor, **arguments: Any
) -> bool:
    """Whether `extend` takes this call; arguments as paged_extend's, already checked. Reads shapes only."""
    return why_not(q, key_cache, value_cache, **arguments) is None


def box_view(cache: Tensor) -> tuple[list[int], list[int], int, int] | None:
    """[P, S, HKV, D] as rows of one stride: (shape, strides, rows a head, columns a head), or None.

    Heads beside each other are columns (split, fused); heads before slots (hnd) are rows.
    """
    pages, page_size, heads, dim = cache.shape
    stride_page, stride_slot, stride_head, _ = cache.stride()
    if heads == 1:
        stride_head = 0
    head_rows = head_cols = 0
    if stride_head < stride_slot:
        head_cols = stride_head
    elif stride_head % stride_slot == 0:
        head_rows = stride_head // stride_slot
    else:
        return None
    if stride_page % stride_slot:
        return None
    rows = (pages - 1) * (stride_page // stride_slot) + (heads - 1) * head_rows + page_size
    return [rows, (heads - 1) * head_cols + dim], [stride_slot, 1], head_rows, head_cols


def extend_options(page_size: int) -> dict[str, Any]:
    """Compile-time choices by page size, from extend runs on one H200 (results/h200).

    The order barrier makes the consumers take turns at the tensor cores: it pays where boxes are small (8 and 16
    tokens), and costs up to 7 % elsewhere. The registers are what both partitions need without spilling.
    """
    if page_size < MIN_BOX:
        return {"IS_GATHER": True, "ORDER": False, "PRODUCER_WARPS": 4, "CONSUMER_REGS": 216, "PRODUCER_REGS": 72}
    order = page_size <= 16
    return {"IS_GATHER": False, "ORDER": order, "PRODUCER_WARPS": 1, "CONSUMER_REGS": 240, "PRODUCER_REGS": 24}


def _prepare(
    tensors: tuple[Tensor, Tensor, Tensor, PageTable],
    num_tiles: int,
    scale: float,
    with_lse: bool,
    options: dict[str, Any],
) -> Launch:
    """The launch of calls of one shape, with plans of `num_tiles` tiles; tensors as in `extend`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    q, key_cache, value_cache, table = tensors
    module = load_module()
    gl = module.gl
    page_size, num_kv_heads = key_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    chosen = {**extend_options(page_size), **options}
    q_box = [TILE_ROWS // 2 // group, group, HEAD_DIM]
    described = [(list(q.shape), list(q.stride()), q_box)]
    steps: list[int] = []
    for cache in () if chosen["IS_GATHER"] else (key_cache, value_cache):
        view = box_view(cache)
        if view is None:
            raise ValueError(f"cache: expected pages of whole rows, found strides {cache.stride()}")
        described.append((view[0], view[1], [min(page_size, 128), HEAD_DIM]))
        steps += view[2:]
    descriptors: Descriptors = {
        i: functools.partial(
            TensorDescriptor,
            shape=shape,
            strides=strides,
            block_shape=block,
            layout=gl.NVMMASharedLayout(128, 16, rank=len(block)),
        )
        for i, (shape, strides, block) in enumerate(described)
    }
    constants = {
        "GROUP": group,
        "HEADS": q.shape[1],
        "PAGE": page_size,
        "TPE": table.tokens_per_entry,
        "K_STRIDES": key_cache.stride()[:3],
        "V_STRIDES": value_cache.stride()[:3],
        "BOX": min(page_size, 128),
        "LSE": with_lse,
        **chosen,
        "num_warps": 4,
    }
    numbers = (num_tiles * RECORD, scale * LOG2E, table.entries.stride(0), *(steps or (0, 0, 0, 0)))
    grid = (min(num_sms(q.device), num_tiles), 1, 1)
    return Launch(module.extend_kernel, grid, numbers, constants, descriptors)


def launch(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    plan: ExtendPlan,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    kept: dict[object, Any],
    **options: Any,
) -> None:
    """Run the kernel on checked tensors; `out` [T, HQ, 128] and `lse` [T, HQ] contiguous. `options` for experiments.

    kept  what is remembered between calls of one shape, one dict a shape (`call_key` of the tensors, scale, options)
    """
    num_tiles = plan.buffer.shape[0] - 1
    call = kept.get(num_tiles)
    if call is None:
        tensors = (q, key_cache, value_cache, table)
        call = kept[num_tiles] = _prepare(tensors, num_tiles, scale, lse is not None, options)
    boxed = 1 in call.descriptors
    caches = (key_cache, value_cache, None, None) if boxed else (None, None, key_cache, value_cache)
    call((q, *caches, out, lse, table.entries, plan.buffer))


def extend(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    query_start_loc: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None,
    scale: float | None = None,
    plan: ExtendPlan | None = None,
    kept: dict[object, Any],
) -> None:
    """paged_extend for arguments that `available` accepts; writes `out` [T, HQ, 128] and `lse` [T, HQ].

    plan  from `plan_extend` for these lengths; made here when left out (one more launch)
    kept  see `launch`
    """
    num_heads, num_kv_heads = q.shape[1], key_cache.shape[2]
    if plan is None:
        plan = plan_extend(table, query_start_loc, q.shape[0], num_heads, num_kv_heads)
    elif plan.num_kv_heads != num_kv_heads or plan.tokens_per_tile * num_heads != TILE_ROWS * num_kv_heads:
        raise ValueError(f"plan: expected one for {num_heads} query and {num_kv_heads} KV heads, found {plan}")
    target = out if out.is_contiguous() else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scale = HEAD_DIM**-0.5 if scale is None else scale
    launch(q, key_cache, value_cache, table, plan, scale, target, lse, kept)
    if target is not out:
        out.copy_(target)
