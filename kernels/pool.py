"""KV tensors of all layers, in one of four layouts, seen through the same logical views.

A layout is an order of layer, page, head, slot and content, with K and V side by side or apart:

    split       K and V apart, [L, P, S, HKV, D]: as SGLang stores them
    fused       K and V side by side, [L, P, S, HKV, D + Dv]: as vLLM stores them
    hnd         K and V apart, heads before slots, [L, P, HKV, S, D]
    page_major  all layers of a page together, [P, L x (K page, V page)]: a page moves in one piece

Whatever the layout, `key(layer)` and `value(layer)` are strided views [P, S, HKV, D]; kernels take views
and strides. P = num_pages + 1: page 0 is the padding page, which no request owns.
"""

from __future__ import annotations

import torch
from kvarena.kernels._launch import FLOATS, QUANTISED, check_page_size, fail
from torch import Tensor

LAYOUTS = ("split", "fused", "hnd", "page_major")


class KVPool:
    """Storage for the KV of `num_pages` pages that requests can own, plus padding page 0.

    Bytes a page = layers x HKV x S x (D + Dv) x itemsize. The storage starts as zeros: wide hardware
    reads past a row's end must find finite numbers.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        layout: str = "split",
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
        }
        for name, size in sizes.items():
            if size < 1:
                fail(name, "at least 1", size)
        check_page_size(page_size)
        if layout not in LAYOUTS:
            fail("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
        if dtype not in (*FLOATS, *QUANTISED):
            fail("dtype", " or ".join(str(d) for d in (*FLOATS, *QUANTISED)), dtype)
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.head_dim_v = head_dim_v
        self.dtype = dtype
        self.layout = layout
        self._storage = [_zeros(shape, dtype, torch.device(device)) for shape in self._storage_shapes()]

    def _storage_shapes(self) -> list[tuple[int, ...]]:
        layers, pages, slots, heads = self.num_layers, self.num_pages + 1, self.page_size, self.num_kv_heads
        dims = (self.head_dim, self.head_dim_v)
        if self.layout == "split":
            return [(layers, pages, slots, heads, dim) for dim in dims]
        if self.layout == "hnd":
            return [(layers, pages, heads, slots, dim) for dim in dims]
        if self.layout == "fused":
            return [(layers, pages, slots, heads, sum(dims))]
        return [(pages, layers, slots * heads * sum(dims))]

    def key(self, layer: int) -> Tensor:
        """Keys of one layer, a view [P, S, HKV, D]."""
        return self._view(layer, 0)

    def value(self, layer: int) -> Tensor:
        """Values of one layer, a view [P, S, HKV, Dv]."""
        return self._view(layer, 1)

    def _view(self, layer: int, which: int) -> Tensor:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer: expected 0 to {self.num_layers - 1}, found {layer}")
        if self.layout == "split":
            return self._storage[which][layer]
        if self.layout == "hnd":
            return self._storage[which][layer].transpose(1, 2)
        start, dim = (0, self.head_dim) if which == 0 else (self.head_dim, self.head_dim_v)
        if self.layout == "fused":
            return self._storage[0][layer].narrow(3, start, dim)
        rows = self.page_size * self.num_kv_heads
        page = self._storage[0][:, layer].narrow(1, start * rows, dim * rows)
        return page.unflatten(1, (self.page_size, self.num_kv_heads, dim))

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """All layers with the page first, [P, L, elements] (page_major: [P, 1, elements]), for copies and swap.

        The last dimension is contiguous. One tensor where K and V lie together, else (K, V).
        """
        if self.layout == "page_major":
            return (self._storage[0].flatten(1).unsqueeze(1),)
        return tuple(storage.flatten(2).transpose(0, 1) for storage in self._storage)

    @property
    def bytes_per_page(self) -> int:
        elements = self.num_layers * self.num_kv_heads * self.page_size * (self.head_dim + self.head_dim_v)
        return elements * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, the padding page included."""
        return self.bytes_per_page * (self.num_pages + 1)

    @property
    def device(self) -> torch.device:
        return self._storage[0].device

    def fill_(self, value: float) -> KVPool:
        """Write `value` everywhere: tests poison a pool with NaN this way. Returns the pool."""
        for storage in self._storage:
            storage.copy_(torch.full((1,), value, device=storage.device).to(storage.dtype))
        return self

    def __repr__(self) -> str:
        return (
            f"KVPool({self.layout}, {self.num_layers} layers, {self.num_pages} + 1 pages of {self.page_size} tokens, "
            f"{self.num_kv_heads} heads x ({self.head_dim} + {self.head_dim_v}), {self.dtype}, "
            f"{self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.itemsize == 1:
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
