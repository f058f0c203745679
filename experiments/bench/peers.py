"""Other people's kernels on the same bytes, where they can be imported; a reason for each that cannot.

Each peer turns a case (pool views, page table, lengths) into a function of no arguments that runs one call with its
metadata prepared beforehand, as the engines do once a step for all layers.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import lzma
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvarena.kernels.page_table import PageTable
from torch import Tensor

FA3_ENV = "KVARENA_FA3"  # path of vLLM's _vllm_fa3_C.abi3.so, plain or packed with xz, when vLLM is not installed


@dataclass(frozen=True)
class Case:
    """One step for one layer: q [T, HQ, D], K and V [P, S, HKV, D], a block table, lengths on the host too."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    table: PageTable
    new: tuple[int, ...]
    lens: tuple[int, ...]

    @property
    def page_size(self) -> int:
        return int(self.key_cache.shape[1])

    @property
    def starts(self) -> Tensor:
        """query_start_loc, int32 [B + 1], on the device."""
        counts = torch.tensor([0, *self.new], dtype=torch.int32)
        return counts.cumsum(0, dtype=torch.int32).to(self.q.device)


class FlashAttention3:
    """vLLM's FlashAttention-3 binary, paged or contiguous; its scheduler metadata is made beforehand."""

    name = "fa3"

    def __init__(self) -> None:
        torch.ops.load_library(str(_fa3_library()))
        self._ops: Any = torch.ops._vllm_fa3_C

    def call(self, case: Case, out: Tensor) -> Callable[[], object]:
        """One paged call, decode or extend."""
        q, k, v = case.q, case.key_cache, case.value_cache
        starts, longest_q, longest_k = case.starts, max(case.new), max(case.lens)
        causal = longest_q > 1
        metadata = self._ops.get_scheduler_metadata(
            len(case.lens), longest_q, longest_k, q.shape[1], k.shape[2], q.shape[2], q.shape[2], q.dtype,
            case.table.seq_lens, starts, None, None, None, None, case.page_size, 0, causal, -1, -1, False, 0, None, 0,
        )  # fmt: skip
        return lambda: self._ops.fwd(
            q, k, v, None, None, None, out, starts, None, None, None, case.table.seq_lens, longest_q, longest_k,
            case.table.entries, None, None, None, None, None, None, None, None, q.shape[2] ** -0.5, causal, -1, -1,
            0.0, True, metadata, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip

    def contiguous(
        self, q: Tensor, k: Tensor, v: Tensor, new: tuple[int, ...], lens: tuple[int, ...], out: Tensor
    ) -> Callable[[], object]:
        """The same binary without a table: k, v [tokens, HKV, D], requests back to back."""
        starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
        starts_k = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
        causal = max(new) > 1
        return lambda: self._ops.fwd(
            q, k, v, None, None, None, out, starts, starts_k, None, None, None, max(new), max(lens),
            None, None, None, None, None, None, None, None, None, q.shape[2] ** -0.5, causal, -1, -1,
            0.0, True, None, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip


def _fa3_library() -> Path:
    """The shared library: from FA3_ENV (unpacked when it ends in .xz), else from an installed vLLM."""
    given = os.environ.get(FA3_ENV)
    if given:
        path = Path(given)
        if path.suffix != ".xz":
            return path
        unpacked = Path(tempfile.gettempdir()) / path.stem
        if not unpacked.exists():
            partial = unpacked.with_suffix(f".{os.getpid()}")
            partial.write_bytes(lzma.decompress(path.read_bytes()))
            partial.rename(unpacked)
        return unpacked
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"vLLM is not installed and {FA3_ENV} is not set")
    found = glob.glob(f"{spec.submodule_search_locations[0]}/vllm_flash_attn/_vllm_fa3_C*.so")
    if not found:
        raise ImportError("this vLLM has no FlashAttention-3 binary")
    return Path(found[0])
