"""What runs the steps of `kvarena run`: scripted outputs, a page table beside them, or real pools and kernels.

The clock is the simulated one in every case and no decision depends on the executor, so rows are the same; what is
measured on the way goes to the table of measured times.
"""

from __future__ import annotations

import os

from kvarena.experiments.budget import format_bytes
from kvarena.experiments.engine.attention_time import TableKind
from kvarena.experiments.engine.run_config import RunConfig
from kvarena.experiments.engine.simulate import MakeExecutor
from kvarena.experiments.engine.step_time import compute_of


def executor_of(config: RunConfig, num_pages: int, page_size: int, tokens_per_id: int) -> MakeExecutor | None:
    """What the config asks for, for a pool of so many pages; None: scripted outputs alone.

    Raises ValueError naming the field for what this machine or the trace cannot run.
    """
    if config.engine.executor == "kernels":
        return _with_kernels(config, num_pages * page_size, tokens_per_id)
    return _with_table(config.engine.adapter)


def _with_table(table: TableKind | None) -> MakeExecutor | None:
    if table is None:
        return None
    try:
        from kvarena.experiments.engine.table_watcher import TableExecutor
    except ImportError:
        raise ValueError(f"engine.adapter: {table!r} needs torch, which is not installed") from None
    return lambda allocator, outputs, limits: TableExecutor(allocator, outputs, limits, table)


def _with_kernels(config: RunConfig, num_tokens: int, tokens_per_id: int) -> MakeExecutor:
    try:
        import torch
        from kvarena.experiments.engine.kernel_executor import KernelExecutor
        from kvarena.experiments.engine.paged_memory import KVShape, MemoryOptions
    except ImportError:
        raise ValueError("engine.executor: 'kernels' needs torch, which is not installed") from None
    engine, shape = config.engine, config.pool.shape
    if tokens_per_id > 1:
        raise ValueError(f"engine.executor: 'kernels' needs single tokens; an id of this trace is {tokens_per_id}")
    if shape.head_dim_v not in (None, shape.head_dim) or shape.dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"engine.executor: 'kernels' runs K and V of one width, float32, float16 or bfloat16; found {shape}"
        )
    if engine.device == "cpu":
        _refuse_too_large(num_tokens * shape.bytes_per_token)
    elif not torch.cuda.is_available():
        raise ValueError(f"engine.device: {engine.device!r}, and torch finds no GPU")
    kv = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    options = MemoryOptions(
        engine.backend, engine.adapter or "block_table", dtype=getattr(torch, shape.dtype), device=engine.device
    )
    heads = compute_of(config.pool.model, shape).num_heads
    return lambda allocator, outputs, limits: KernelExecutor(allocator, outputs, kv, heads, limits, options)


def _refuse_too_large(num_bytes: int) -> None:
    try:
        here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return  # a system that does not say
    if num_bytes > here:
        raise ValueError(
            f"engine.executor: 'kernels' holds the pool in memory, {format_bytes(num_bytes)}; this machine has "
            f"{format_bytes(here)}"
        )
