"""The Triton attention kernels of vLLM and SGLang, from an installed package or from their Python files alone.

KVARENA_PEER_FILES names a folder that holds `vllm/v1/attention/ops/...` of vLLM 0.32.0 and
`sglang/kernels/ops/attention/...` of SGLang 0.5.22, as in their wheels. What those files import from the rest of their
packages (platform, logger, settings) is then replaced by small stand-ins, which answer for a CUDA card.
"""

from __future__ import annotations

import enum
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from kvarena.experiments.bench.peers import Case

FILES_ENV = "KVARENA_PEER_FILES"
SEGMENTS = 16  # vLLM: parts of a sequence in its 3D kernel
SPLITS = 8  # SGLang: its default number of KV splits


class VllmTriton:
    """vLLM's unified_attention, 2D or 3D by its own rule (3D: decode of at most 128 / KV heads requests)."""

    name = "vllm-triton"

    def __init__(self) -> None:
        self._module = _import("vllm.v1.attention.ops.triton_unified_attention", _vllm_stand_ins)

    def takes(self, new: Sequence[int], lens: Sequence[int], page_size: int) -> bool:
        """Page 16, as vLLM runs it."""
        return page_size == 16

    def call(self, case: Case, out: Tensor) -> Callable[[], object]:
        """One paged call, decode or extend."""
        q, k, v, starts = case.q, case.key_cache, case.value_cache, case.starts
        threshold = 128 // k.shape[2]
        segments: dict[str, Any] = {}
        if max(case.new) == 1 and len(case.lens) <= threshold:
            shape = (len(case.lens), q.shape[1], SEGMENTS)
            empty = [torch.empty(size, device=q.device) for size in ((*shape, q.shape[2]), shape, shape)]
            names = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
            segments = dict(zip(names, empty, strict=True))
            segments |= {"seq_threshold_3D": threshold, "num_par_softmax_segments": SEGMENTS}
        one = torch.ones(1, device=q.device).expand(len(case.lens), k.shape[2])
        return lambda: self._module.unified_attention(
            q, k, v, out, starts, max(case.new), case.table.seq_lens, max(case.lens), q.shape[2] ** -0.5, True,
            (-1, -1), case.table.entries, 0, None, one, one, **segments,
        )  # fmt: skip


class SglangTriton:
    """SGLang's decode (8 KV splits) and extend kernels; slots of all tokens are listed beforehand."""

    name = "sglang-triton"

    def __init__(self) -> None:
        self._decode = _import("sglang.kernels.ops.attention.decode_attention", _sglang_stand_ins)
        self._extend = _import("sglang.kernels.ops.attention.extend_attention", _sglang_stand_ins)

    def takes(self, new: Sequence[int], lens: Sequence[int], page_size: int) -> bool:
        """Page 1, as SGLang runs it."""
        return page_size == 1

    def call(self, case: Case, out: Tensor) -> Callable[[], object]:
        """One call, decode or extend."""
        q = case.q
        k, v = (cache.view(-1, *cache.shape[2:]) for cache in (case.key_cache, case.value_cache))
        if max(case.new) == 1:
            indptr, indices = self._slots(case, [0] * len(case.lens))
            logits = torch.empty((*q.shape[:2], SPLITS, q.shape[2]), device=q.device)
            lse = torch.empty((*q.shape[:2], SPLITS), device=q.device)
            splits = torch.full((len(case.lens),), SPLITS, dtype=torch.int32, device=q.device)
            return lambda: self._decode.decode_attention_fwd(
                q, k, v, out, indptr, indices, logits, lse, splits, SPLITS, q.shape[2] ** -0.5, 1.0, 1.0
            )
        indptr, indices = self._slots(case, list(case.new))
        new_slots = torch.cat([case.table.slots(b)[-n:] for b, n in enumerate(case.new)])
        k_new, v_new = k[new_slots], v[new_slots]
        starts = case.starts
        return lambda: self._extend.extend_attention_fwd(
            q, k_new, v_new, out, k, v, starts, indptr, indices, None, True, None, max(case.new), 1.0, 1.0
        )

    def _slots(self, case: Case, behind: list[int]) -> tuple[Tensor, Tensor]:
        """(indptr int32, slots int64) of each request's tokens but its last `behind`."""
        counts = [n - b for n, b in zip(case.lens, behind, strict=True)]
        indptr = torch.tensor([0, *counts]).cumsum(0).int().to(case.q.device)
        return indptr, torch.cat([case.table.slots(b)[:n] for b, n in enumerate(counts)])


def _import(name: str, stand_ins: Callable[[], dict[str, ModuleType]]) -> Any:
    """The module of an installed package, else of the files in FILES_ENV."""
    folder = os.environ.get(FILES_ENV)
    if not folder:
        return importlib.import_module(name)
    root = name.split(".", maxsplit=1)[0]
    if not (Path(folder) / root).is_dir():
        raise ImportError(f"{FILES_ENV}={folder} holds no folder {root}")
    for path, module in stand_ins().items():
        sys.modules.setdefault(path, module)
    parts = name.split(".")
    for i in range(1, len(parts)):  # packages without running their __init__
        package = sys.modules.setdefault(".".join(parts[:i]), ModuleType(parts[i - 1]))
        package.__path__ = [str(Path(folder).joinpath(*parts[:i]))]
    return importlib.import_module(name)


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


class _QuantMode(enum.IntEnum):
    """The members of vLLM's KVQuantMode that unified_attention compares with."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4

    @property
    def is_per_token_head(self) -> bool:
        return False


def _vllm_stand_ins() -> dict[str, ModuleType]:
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda family: False,
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
    )
    return {
        "vllm.envs": _module("vllm.envs", VLLM_BATCH_INVARIANT=False),
        "vllm.logger": _module("vllm.logger", init_logger=logging.getLogger),
        "vllm.platforms": _module("vllm.platforms", current_platform=platform),
        "vllm.triton_utils": _module("vllm.triton_utils", tl=tl, triton=triton),
        "vllm.v1.kv_cache_interface": _module("vllm.v1.kv_cache_interface", KVQuantMode=_QuantMode),
    }


class _Settings:
    """Every setting is off."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: False)


def _sglang_stand_ins() -> dict[str, ModuleType]:
    utils = _module(
        "sglang.srt.utils",
        get_device_core_count=lambda device=0: torch.cuda.get_device_properties(device).multi_processor_count,
        is_cuda=lambda: True,
        is_hip=lambda: False,
        is_gfx95_supported=lambda: False,
        is_gfx1250_supported=lambda: False,
    )
    kernel = SimpleNamespace(triton_attention_split_tile_size=None)
    settings = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False), kernel=kernel)
    return {
        "sglang.srt": _module("sglang.srt"),
        "sglang.srt.runtime_context": _module("sglang.srt.runtime_context", get_exec=lambda: settings),
        "sglang.srt.environ": _module("sglang.srt.environ", envs=_Settings()),
        "sglang.srt.utils": utils,
    }
