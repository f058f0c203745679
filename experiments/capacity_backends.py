"""Which page sizes an attention backend reads, and the one that a server takes when nobody says.

The rules are vLLM 0.32.0's: the default of 16 where the backend supports it, else its smallest supported size; with
several backends in one model, the smallest common one. A backend that reads any multiple of a size is written as that
multiple; one that reads a few sizes only, as their list. `kvarena` are this project's own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True)
class BackendPages:
    """Page sizes of one backend: those listed, or every multiple of `multiple` from 1 x to `largest` (None: no end).

    preferred  what the platform takes in place of the server's default; None: the default rule
    """

    name: str
    sizes: tuple[int, ...] = ()
    multiple: int | None = None
    preferred: int | None = None
    largest: int | None = None
    power_of_two: bool = False

    def supports(self, page_size: int) -> bool:
        """Whether the backend reads pages of so many tokens.

        >>> BACKENDS["flash_attn"].supports(48), BACKENDS["flashinfer"].supports(48)
        (True, False)
        """
        if self.sizes:
            return page_size in self.sizes
        if page_size < 1 or page_size % (self.multiple or 1) or (self.largest is not None and page_size > self.largest):
            return False
        return not self.power_of_two or page_size & (page_size - 1) == 0

    @property
    def smallest(self) -> int:
        return min(self.sizes) if self.sizes else self.multiple or 1

    def text(self) -> str:
        """For people: the sizes."""
        if self.sizes:
            return ", ".join(map(str, self.sizes))
        if self.power_of_two:
            return f"powers of two, {self.smallest} to {self.largest}"
        return "any" if self.multiple in (None, 1) else f"multiples of {self.multiple}"


_TABLE = (
    BackendPages("kvarena", multiple=1, largest=256, power_of_two=True),
    BackendPages("flash_attn", multiple=16),
    BackendPages("flashinfer", sizes=(16, 32, 64)),
    BackendPages("triton", multiple=16),
    BackendPages("flex", multiple=16),
    BackendPages("turboquant", sizes=(16, 32, 64, 128)),
    BackendPages("flash_mla", sizes=(64,)),
    BackendPages("cutlass_mla", sizes=(128,)),
    BackendPages("flashinfer_mla", sizes=(32, 64)),
    BackendPages("flash_attn_mla", multiple=16),
    BackendPages("triton_mla", multiple=16),
    BackendPages("flash_mla_sparse", multiple=64),
    BackendPages("rocm_aiter_fa", sizes=(16, 32)),
    BackendPages("rocm_unified", multiple=16, preferred=64),
    BackendPages("cpu", multiple=32, preferred=128),
    BackendPages("cpu_mla", sizes=(16,)),
)
BACKENDS: dict[str, BackendPages] = {entry.name: entry for entry in _TABLE}


def backend_rows() -> list[dict[str, object]]:
    """A row a backend: its name, the page sizes that it reads, and the one that is chosen, tokens."""
    return [
        {"backend": name, "reads": entry.text(), "chosen": page_size_for([name])} for name, entry in BACKENDS.items()
    ]


def backend_pages(name: str) -> BackendPages:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"attention: expected one of {', '.join(BACKENDS)}, found {name!r}")
    return BACKENDS[name]


def page_size_for(backends: Iterable[str], asked: int | None = None) -> int:
    """Tokens a page for a model whose layers use these backends. Raises ValueError for an `asked` size that one of
    them does not read, and where they have none in common.

    >>> page_size_for(["flash_attn"]), page_size_for(["flash_mla"]), page_size_for(["flash_attn", "flash_mla"])
    (16, 64, 64)
    """
    entries = [backend_pages(name) for name in backends]
    if not entries:
        raise ValueError("attention: expected at least one backend, found none")
    if asked is not None:
        for entry in entries:
            if not entry.supports(asked):
                raise ValueError(f"page_size: attention backend {entry.name} reads {entry.text()}, found {asked}")
        return asked
    wanted = max((entry.preferred or 0 for entry in entries), default=0) or DEFAULT_PAGE_SIZE
    for size in (wanted, math.lcm(*(entry.smallest for entry in entries))):
        if all(entry.supports(size) for entry in entries):
            return size
    raise ValueError(f"attention: {', '.join(entry.name for entry in entries)} read no page size in common")
