"""paged_extend on Hopper in Gluon: the launcher, and what this path can take.

out = softmax(scale q K^T + causal mask) V over the page table, for head_dim 128 in bf16 or fp16. The device code is
`kvarena.kernels._hopper`; the plain Triton kernel of `kvarena.kernels.extend` is its readable form and takes every
case that `why_not` names (other cards, other Triton releases, other head sizes, window, softcap, ALiBi, scales).

Pages of 8 tokens and more are read by TMA boxes, smaller ones by a gather of rows. Unowned slots may hold anything:
keys past the end are masked, and values past the end are zeroed in shared memory before they meet a probability of
0 (the gather repeats the last token instead).

The work list is made on the device (`kvarena.kernels.extend_plan`), once a step for all layers, or inside each call
when no plan is given.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import torch
import triton
from kvarena.kernels._boxes import box_view
from kvarena.kernels._direct import Descriptors
from kvarena.kernels._launch import (
    LOG2E,
    Launch,
    is_power_of_two,
    num_sms,
)
from kvarena.kernels.extend_plan import HEAD_DIM, RECORD, TILE_ROWS, ExtendPlan, plan_extend
from kvarena.kernels.page_table import PageTable
from torch import Tensor

TRITON = (3, 6)  # the experimental API that _hopper is written for
MIN_BOX = 8  # tokens: a TMA box must cover whole 8-row groups of the swizzled buffer

_loaded: dict[str, Any] = {}  # "module", or "reason" for which there is none


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
