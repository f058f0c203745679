"""kvarena: the same requests, the same kernels, two KV-cache allocators.

The face of the package. Everything here is loaded on first use, so `import kvarena` costs
neither numpy nor torch.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "allocators").is_dir():
    # A bare checkout (a GPU machine, say) has the sub-packages as top folders.
    __path__.append(str(_ROOT))

_PUBLIC = {
    "make_allocator": "allocators.config",
    "block": "allocators.config",
    "token": "allocators.config",
    "contiguous": "allocators.config",
    "exact": "allocators.config",
    "Design": "allocators.config",
    "Sequence": "allocators.interface",
    "KVAllocator": "allocators.interface",
    "Gate": "allocators.interface",
    "Release": "allocators.interface",
    "compare": "experiments.compare",
    "bounds": "experiments.bounds",
    "explain": "experiments.explain",
    "sweep": "experiments.sweep",
    "load_result": "experiments.results",
    "merge_results": "experiments.results",
    "load_trace": "experiments.traces",
}
_MODULES = {"plots": "experiments.plots", "testing": "experiments.conformance"}

__all__ = ["__version__", *_PUBLIC, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'kvarena' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
