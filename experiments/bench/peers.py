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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from kvarena.experiments.bench.peers_triton import SglangTriton, VllmTriton
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


class Peer(Protocol):
    """A competitor: a name for its rows, and a call made ready for one case."""

    name: str

    def takes(self, new: Sequence[int], lens: Sequence[int], page_size: int) -> bool:
        """Whether the peer runs on such a case."""
        ...

    def call(self, case: Case, out: Tensor) -> Callable[[], object]:
        """A function that runs the case once into `out`."""
        ...


class FlashAttention3:
    """vLLM's FlashAttention-3 binary, paged or contiguous; its scheduler metadata is made beforehand."""

    name = "fa3"

    def __init__(self) -> None:
        torch.ops.load_library(str(_fa3_library()))
        self._ops: Any = torch.ops._vllm_fa3_C

    def takes(self, new: Sequence[int], lens: Sequence[int], page_size: int) -> bool:
        """Any batch."""
        return True

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


class FlashInfer:
    """FlashInfer's paged decode on tensor cores and paged prefill; plan made beforehand. Compiles on first use."""

    name = "flashinfer"
    _workspace: Tensor | None = None

    def __init__(self) -> None:
        self._module: Any = importlib.import_module("flashinfer")

    def takes(self, new: Sequence[int], lens: Sequence[int], page_size: int) -> bool:
        """Any batch."""
        return True

    def call(self, case: Case, out: Tensor) -> Callable[[], object]:
        """One paged call, decode or extend."""
        if FlashInfer._workspace is None:
            FlashInfer._workspace = torch.empty(384 * 2**20, dtype=torch.uint8, device=case.q.device)
        heads, dim = case.q.shape[1:]
        shape = (heads, case.key_cache.shape[2], dim, case.page_size)
        dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.key_cache.dtype}
        pages = case.table.to_csr(case.page_size)
        wrapper: Any
        if max(case.new) == 1:
            decode = self._module.BatchDecodeWithPagedKVCacheWrapper
            wrapper = decode(FlashInfer._workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(*pages, *shape, **dtypes)
        else:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(FlashInfer._workspace, "NHD", backend="fa3")
            wrapper.plan(case.starts, *pages, *shape, causal=True, **dtypes)
        return lambda: wrapper.run(case.q, (case.key_cache, case.value_cache), out=out)


class ContiguousSdpa:
    """torch's scaled_dot_product_attention (cuDNN) on KV copied out of the pool: the library kernel without paging."""

    name = "sdpa-contiguous"

    def takes(self, new: Sequence[int], lens: Sequence[int], page_size: int) -> bool:
        """Decode of equal lengths; at one page size, since it knows none."""
        return max(new) == 1 and len(set(lens)) == 1 and page_size == 64

    def call(self, case: Case, out: Tensor) -> Callable[[], object]:
        """One decode call; the copy is made beforehand."""
        k, v = (self._gather(cache, case) for cache in (case.key_cache, case.value_cache))
        q, target = case.q[:, :, None], out[:, :, None]
        backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION

        def run() -> None:
            with torch.nn.attention.sdpa_kernel(backend):
                target.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))

        return run

    def _gather(self, cache: Tensor, case: Case) -> Tensor:
        """[B, HKV, n, D]."""
        slots = torch.stack([case.table.slots(b) for b in range(len(case.lens))])
        return cache[slots // case.page_size, slots % case.page_size].transpose(1, 2).contiguous()


PEERS: dict[str, Callable[[], Peer]] = {
    "fa3": FlashAttention3,
    "flashinfer": FlashInfer,
    "sdpa": ContiguousSdpa,
    "vllm": VllmTriton,
    "sglang": SglangTriton,
}


def load_peers(names: list[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """(those that can run here, the reason for each that cannot)."""
    found: dict[str, Peer] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            found[name] = PEERS[name]()
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found, skipped


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
