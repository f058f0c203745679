"""Launching a compiled kernel again without what Triton does around it: the host time of eager calls.

Triton's public way inspects every argument, asks the driver about every address, and calls its profiling hooks, empty
or not. With the same specialisation nothing of that changes, so a repeated launch goes straight to Triton's C function
with plain addresses. That function is private, so this file is written for one release (`TRITON`): with any other, with
profiling hooks set, or where anything looks different, `direct_launcher` says None and the public way is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor

TRITON = (3, 6)
MOST_ADDRESSES = 256  # encoded descriptors kept for one launch, by address

Grid = tuple[int, int, int]
Descriptors = dict[int, Callable[[Tensor], Any]]
Run = Callable[[Grid, Sequence[Tensor | None], Sequence[object]], None]


def direct_launcher(compiled: Any, tail: tuple[object, ...], device: int, descriptors: Descriptors) -> Run | None:
    """A function of (grid, tensors, numbers) that launches `compiled`, or None where only the public way is safe.

    tail         the compile-time arguments, which come behind tensors and numbers
    device       CUDA device of the tensors
    descriptors  for each tensor argument that is a tensor descriptor: how to make one; encoded once an address
    """
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) != TRITON:
        return None
    try:
        return _for_3_6(compiled, tail, device, descriptors)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _for_3_6(compiled: Any, tail: tuple[object, ...], device: int, descriptors: Descriptors) -> Run | None:
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = compiled.run
    if type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    function = launcher.launch
    encoders: dict[int, Callable[[Tensor], list[object]]] = {}
    if descriptors:
        function, encoders = _under_descriptors(function, descriptors)
    stream = triton.runtime.driver.active.get_current_stream
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    fixed = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    ending = (compiled.packed_metadata, None, None, None)

    def run(grid: Grid, tensors: Sequence[Tensor | None], numbers: Sequence[object]) -> None:
        if hooks[0].calls or hooks[1].calls:
            compiled[grid](*with_descriptors(tensors, descriptors), *numbers, *tail)
            return
        addresses: list[object] = [None if t is None else t.data_ptr() for t in tensors]
        for i, encode in encoders.items():
            addresses[i : i + 1] = encode(tensors[i])  # type: ignore[arg-type]  # a descriptor has a tensor
        function(*grid, stream(device), *fixed, *ending, *addresses, *numbers, *tail)

    return run


def with_descriptors(tensors: Sequence[Tensor | None], descriptors: Descriptors) -> list[Any]:
    """The tensors, those of descriptor arguments wrapped in one."""
    return [descriptors[i](t) if i in descriptors and t is not None else t for i, t in enumerate(tensors)]


def _under_descriptors(
    wrapped: Any, descriptors: Descriptors
) -> tuple[Any, dict[int, Callable[[Tensor], list[object]]]]:
    """(the C function under Triton's wrapper, for each descriptor argument what encodes it), last argument first."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    held = dict(zip(wrapped.__code__.co_freevars, (cell.cell_contents for cell in wrapped.__closure__), strict=True))
    indices = sorted(descriptors)
    if held["tensordesc_indices"] != set(indices) or any(meta is None for meta in held["tensordesc_meta"]):
        raise ValueError("descriptors: expected those that Triton found, found others")

    def encoder(index: int, meta: Any) -> Callable[[Tensor], list[object]]:
        make = descriptors[index]
        encoded: dict[int, list[object]] = {}

        def encode(tensor: Tensor) -> list[object]:
            address = tensor.data_ptr()
            found: list[object] | None = encoded.get(address)
            if found is None:
                if len(encoded) >= MOST_ADDRESSES:
                    encoded.clear()
                found = encoded[address] = make_tensordesc_arg(make(tensor), meta)
            return found

        return encode

    pairs = list(zip(indices, held["tensordesc_meta"], strict=True))
    return held["launcher"], {index: encoder(index, meta) for index, meta in reversed(pairs)}
