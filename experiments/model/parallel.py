"""Tensor parallelism by heads: each rank has a share of the heads, and the same page table.

Query, key, value, gate and up projections keep this rank's rows; output and down projections keep its columns and
sum over the ranks. A rank's pool holds its KV heads only, so a page has 1 / size of the bytes. Schedulers and
allocators see tokens, which are the same on every rank, so their decisions and page tables are too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def shard_model(model: Any, rank: int, size: int, group: Any = None) -> Any:
    """Keep this rank's share of a Llama-family model, in place; returns it.

    group  process group over which outputs are summed; None: the default one

    Raises ValueError when heads or intermediate size do not divide by `size`.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank: expected 0 to {size - 1}, found {rank}")
    config = model.config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ValueError(f"{name}: expected a multiple of {size} ranks, found {getattr(config, name)}")
    if size == 1:
        return model
    for layer in model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _keep_rows(linear, rank, size)
        for linear in (attention.o_proj, mlp.down_proj):
            _keep_columns(linear, rank, size)
            linear.register_forward_hook(_summed(group))
    return model


def _keep_rows(linear: nn.Linear, rank: int, size: int) -> None:
    linear.weight = _part(linear.weight, 0, rank, size)
    if linear.bias is not None:
        linear.bias = _part(linear.bias, 0, rank, size)
    linear.out_features //= size


def _keep_columns(linear: nn.Linear, rank: int, size: int) -> None:
    linear.weight = _part(linear.weight, 1, rank, size)
    linear.in_features //= size
    if rank:  # the sum takes a bias once
        linear.register_parameter("bias", None)


def _part(tensor: Tensor, dim: int, rank: int, size: int) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(size, dim)[rank].clone(), requires_grad=False)


def _summed(group: Any) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        dist.all_reduce(output, group=group)
        return output

    return hook


def init_ranks(rank: int, size: int, store: str, backend: str) -> None:
    """Join a process group of one host through a file. backend: gloo (CPU) or nccl."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    if backend == "nccl":
        torch.cuda.set_device(rank)
