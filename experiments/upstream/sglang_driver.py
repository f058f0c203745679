"""SGLang's own tree, slot allocators and row pool behind the neutral operations, without its scheduler.

From an installed package, or from the Python files and the compiled tree core of an unpacked wheel. Written against
SGLang 0.5.22; another version either answers the same calls or the comparison ends with what it raised.
"""

from __future__ import annotations

import dataclasses
import importlib
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvarena.experiments.upstream.compare import Setting, Upstream
from kvarena.experiments.upstream.stubs import Finder, install, version_of

REAL = (
    "sglang.srt.mem_cache",
    "sglang.srt.environ",
    "sglang.srt.rust_extensions",
    "sglang.srt.session.streaming_session",
    "sglang.srt.utils.common",
    "sglang.kernels.ops.memory.allocator",
    "sglang.kernels.ops.memory.common",
)
ALSO_REAL = ("sglang.srt.utils",)  # but not what lies below
ABSENT = (
    *("msgspec", "orjson", "psutil", "pybase64", "starlette", "sgl_kernel", "zmq"),
    *("fastapi", "aiohttp", "requests", "PIL"),
)
NAMES = {
    "sglang.srt.mem_cache.allocator.paged": ("PagedTokenToKVPoolAllocator",),
    "sglang.srt.mem_cache.allocator.token": ("TokenToKVPoolAllocator",),
    "sglang.srt.mem_cache.base_prefix_cache": ("EvictParams", "MatchPrefixParams"),
    "sglang.srt.mem_cache.cache_init_params": ("CacheInitParams",),
    "sglang.srt.mem_cache.memory_pool": ("ReqToTokenPool",),
    "sglang.srt.mem_cache.radix_cache": ("RadixKey",),
    "sglang.srt.mem_cache.unified_cache.components": ("ComponentType",),
    "sglang.srt.mem_cache.unified_radix_cache": ("UnifiedRadixCache",),
}


class Struct:
    """Stands in for msgspec's where that is not installed: a plain dataclass of the annotated fields."""

    def __init_subclass__(cls, kw_only: bool = False, **_: Any) -> None:
        for name in vars(cls).get("__annotations__", {}):
            default = vars(cls).get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, dataclasses.field(default_factory=default.copy))
        dataclasses.dataclass(kw_only=kw_only)(cls)


def load(root: Path | None) -> SimpleNamespace:
    """SGLang's classes by name, its allocation functions, and its `version`.

    root  folder of an unpacked wheel; None: the installed package. Raises ImportError where there is none.
    """
    import torch

    if root is not None:
        if not (root / "sglang" / "srt" / "mem_cache").is_dir():
            raise ImportError(f"{root} holds no sglang/srt/mem_cache")
        platform = SimpleNamespace(
            capabilities=SimpleNamespace(supports_triton=False),
            is_pin_memory_available=lambda device=None: False,
            is_cuda=lambda: False,
        )
        given = {
            "sglang.srt.platforms": {"current_platform": platform},
            "msgspec": {"Struct": Struct, "field": dataclasses.field},
        }
        install(Finder(root, "sglang", _is_real, given, ABSENT))
    torch.set_num_threads(1)  # waking a second one costs more than these small tensors
    found: dict[str, Any] = {"torch": torch}
    for module, names in NAMES.items():
        loaded = importlib.import_module(module)
        found |= {name: getattr(loaded, name) for name in names}
    found["allocation"] = importlib.import_module("sglang.srt.mem_cache.allocation")
    return SimpleNamespace(**found, version=version_of("sglang", root))


def _is_real(name: str) -> bool:
    return name in ALSO_REAL or any(name == parent or name.startswith(f"{parent}.") for parent in REAL)
