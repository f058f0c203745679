"""What every launcher asks before it launches: shapes, dtypes, devices, scales. No kernels here.

Checks read shapes and dtypes only, never data, so none of them waits for the device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
from kvarena.kernels._direct import Descriptors, Grid, Run, direct_launcher, with_descriptors
from kvarena.kernels._numbers import ceil_div as ceil_div
from kvarena.kernels._numbers import next_power_of_two as next_power_of_two
from kvarena.kernels.page_table import PageTable
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
LOG2E = 1.4426950408889634

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTISED = (*FP8, torch.int8)
# Largest magnitude that a quantised cache can hold; store_kv saturates there.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
MAX_PAGE_SIZE = 256


def fail(name: str, expected: str, found: object) -> NoReturn:
    """Raise the ValueError of a bad argument."""
    raise ValueError(f"{name}: expected {expected}, found {found}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless `tensor` has `shape`; None stands for any size."""
    if tensor.dim() != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        fail(name, f"shape [{wanted}]", list(tensor.shape))


def check_dtype(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise ValueError unless the dtype is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        fail(name, " or ".join(str(dtype) for dtype in dtypes), tensor.dtype)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError when `tensor` lies on another device than the first argument."""
    if tensor.device != device:
        fail(name, f"a tensor on {device}", tensor.device)


def check_runnable(device: torch.device) -> None:
    """Raise RuntimeError when a Triton kernel cannot run on tensors of this device."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"tensors on {device}: Triton kernels need a CUDA device, or TRITON_INTERPRET=1 "
            "in the environment before triton is imported"
        )


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless the page size is one that kernels take."""
    if not is_power_of_two(page_size) or page_size > MAX_PAGE_SIZE:
        fail("page_size", f"a power of two from 1 to {MAX_PAGE_SIZE}", page_size)


def check_cache(key_cache: Tensor, value_cache: Tensor) -> tuple[int, int, int]:
    """Check a layer's key [P, S, HKV, D] and value [P, S, HKV, Dv]; return (S, HKV, Dv)."""
    if key_cache.dim() != 4:
        fail("key_cache", "shape [P, S, HKV, D]", list(key_cache.shape))
    pages, page_size, num_kv_heads, _ = key_cache.shape
    check_shape("value_cache", value_cache, (pages, page_size, num_kv_heads, None))
    check_dtype("key_cache", key_cache, (*FLOATS, *QUANTISED))
    check_dtype("value_cache", value_cache, (key_cache.dtype,))
    check_device("value_cache", value_cache, key_cache.device)
    check_page_size(page_size)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.stride(3) != 1:
            fail(name, "a last dimension of stride 1", cache.stride())
    return page_size, num_kv_heads, value_cache.shape[3]


def check_table(table: PageTable, device: torch.device) -> int:
    """Check the page table's tensors; return B, the number of requests."""
    entries, rows, seq_lens = table.entries, table.rows, table.seq_lens
    check_shape("table.entries", entries, (None, None))
    check_shape("table.rows", rows, (None,))
    check_shape("table.seq_lens", seq_lens, (rows.shape[0],))
    for name, tensor in (("table.entries", entries), ("table.rows", rows), ("table.seq_lens", seq_lens)):
        check_dtype(name, tensor, (torch.int32,))
        check_device(name, tensor, device)
    if entries.stride(1) != 1:
        fail("table.entries", "rows of stride 1", entries.stride())
    if not is_power_of_two(table.tokens_per_entry):
        fail("table.tokens_per_entry", "a power of two", table.tokens_per_entry)
    return rows.shape[0]


def check_heads(q: Tensor, num_kv_heads: int) -> int:
    """Return the query heads of one KV head."""
    if q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        fail("q", f"a multiple of {num_kv_heads} query heads", q.shape[1])
    return q.shape[1] // num_kv_heads


def check_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: PageTable,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> tuple[int, int, int, int]:
    """Check what decode and extend share; return (S, HKV, Dv, B)."""
    page_size, num_kv_heads, head_dim_v = check_cache(key_cache, value_cache)
    check_shape("q", q, (None, None, key_cache.shape[3]))
    check_dtype("q", q, FLOATS)
    check_device("key_cache", key_cache, q.device)
    if key_cache.dtype not in QUANTISED:
        check_dtype("key_cache", key_cache, (q.dtype,))
    if q.stride(2) != 1:
        fail("q", "a last dimension of stride 1", q.stride())
    check_heads(q, num_kv_heads)
    batch = check_table(table, q.device)
    if scale is not None and not scale > 0:
        fail("scale", "None or a positive number", scale)
    if window is not None and window < 1:
        fail("window", "None or at least 1 (the current token counts)", window)
    if softcap is not None and not softcap > 0:
        fail("softcap", "None or a positive number", softcap)
    check_runnable(q.device)
    return page_size, num_kv_heads, head_dim_v, batch


def check_slopes(alibi_slopes: Tensor | None, num_heads: int, device: torch.device) -> None:
    """ALiBi slopes are float32 [HQ]."""
    if alibi_slopes is not None:
        check_shape("alibi_slopes", alibi_slopes, (num_heads,))
        check_dtype("alibi_slopes", alibi_slopes, (torch.float32,))
        check_device("alibi_slopes", alibi_slopes, device)


def output_like(q: Tensor, head_dim_v: int, out: Tensor | None) -> Tensor:
    """`out`, checked, or a new [rows, HQ, Dv] of q's dtype."""
    shape = (q.shape[0], q.shape[1], head_dim_v)
    if out is None:
        return q.new_empty(shape)
    check_shape("out", out, shape)
    check_dtype("out", out, (q.dtype,))
    check_device("out", out, q.device)
    if out.stride(2) != 1:
        fail("out", "a last dimension of stride 1", out.stride())
    return out


def scale_argument(
    name: str, scale: float | Tensor | None, num_kv_heads: int, device: torch.device
) -> tuple[float, Tensor | None, int]:
    """Split a cache scale into (number, tensor, stride): a number is folded in on the host.

    A tensor is float32 with one element or [HKV]; it is read on the device, so no value is waited for.
    """
    if scale is None:
        return 1.0, None, 0
    if not isinstance(scale, Tensor):
        if not scale > 0:
            fail(name, "a positive number", scale)
        return float(scale), None, 0
    check_dtype(name, scale, (torch.float32,))
    check_device(name, scale, device)
    if scale.numel() == 1:
        return 1.0, scale, 0
    check_shape(name, scale, (num_kv_heads,))
    return 1.0, scale, scale.stride(0)


class Remembered(dict[Hashable, Any]):
    """What was decided for calls of one key; forgets everything at `limit` keys, so that no workload fills memory."""

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)


def call_key(*tensors: Tensor | None) -> tuple[object, ...]:
    """All that checks, tile sizes and Triton's specialisation read of tensors: equal keys, equal launches."""
    return tuple(
        [None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16 == 0) for t in tensors]
    )


def table_key(table: PageTable) -> tuple[object, ...]:
    """`call_key` of a page table, made once: one table serves all layers of a step."""
    key: tuple[object, ...] | None = table.__dict__.get("_key")
    if key is None:
        key = (table.tokens_per_entry, *call_key(table.entries, table.rows, table.seq_lens))
        object.__setattr__(table, "_key", key)
    return key


class Launch:
    """One kernel with the grid, numbers and compile-time arguments of one call shape (see `call_key`).

    kernel       the arguments of a kernel are tensors first, then numbers, then what is known at compile time
    constants    the compile-time ones and launch options
    descriptors  tensor arguments that the kernel takes as tensor descriptors: index -> how to make one

    The first launch goes through Triton, which inspects every argument and compiles; later ones call the compiled
    kernel (`kvarena.kernels._direct`), since for an equal shape nothing but addresses changes.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Grid,
        numbers: Sequence[object],
        constants: dict[str, Any],
        descriptors: Descriptors | None = None,
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.descriptors: Descriptors = descriptors or {}
        self._run: Run | None = None

    def __call__(
        self, tensors: Sequence[Tensor | None], grid: Grid | None = None, numbers: Sequence[object] | None = None
    ) -> None:
        """Launch on these tensors; `grid` and `numbers` where they differ from call to call."""
        grid, numbers = grid or self.grid, self.numbers if numbers is None else numbers
        if self._run is not None:
            self._run(grid, tensors, numbers)
            return
        made = with_descriptors(tensors, self.descriptors)
        compiled = self.kernel[grid](*made, *numbers, **self.constants)
        if hasattr(compiled, "packed_metadata"):  # neither the interpreter nor a launch that only compiles
            self._run = self._repeated(compiled, tensors, len(numbers))

    def _repeated(self, compiled: Any, tensors: Sequence[Tensor | None], num_numbers: int) -> Run:
        names = self.kernel.arg_names[len(tensors) + num_numbers :]
        tail = tuple(self.constants[name] for name in names)
        device = next(t.get_device() for t in tensors if t is not None)
        direct = direct_launcher(compiled, tail, device, self.descriptors)
        if direct is not None:
            return direct

        def public(grid: Grid, tensors: Sequence[Tensor | None], numbers: Sequence[object]) -> None:
            compiled[grid](*with_descriptors(tensors, self.descriptors), *numbers, *tail)

        return public


_launches = Remembered()


def launch(kernel: Any, grid: Grid, args: tuple[Any, ...], constants: dict[str, Any], key: Hashable) -> None:
    """`kernel[grid](*args, **constants)`; with a known `key`, without Triton's inspection of every argument.

    args       in the kernel's order: tensors (or None), then numbers, all but the compile-time ones
    constants  the compile-time ones and launch options
    key        equal for launches that differ in addresses alone (see `call_key`), unlike for others
    """
    found = _launches.get((kernel, key))
    if found is None:
        count = next((i for i, a in enumerate(args) if not (a is None or isinstance(a, Tensor))), len(args))
        found = _launches[kernel, key] = (Launch(kernel, grid, (), constants), count)
    call, count = found
    call(args[:count], grid, args[count:])


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def log2(number: int) -> int:
    """Exponent of a power of two."""
    return number.bit_length() - 1


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 132 (H100, H200) for the interpreter."""
    if device.type != "cuda":
        return 132
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
