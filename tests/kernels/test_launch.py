"""Launching again: equal shapes share what was decided, unlike ones do not, and no release of Triton is trusted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from kvarena.kernels import _direct, _launch
from kvarena.kernels._direct import direct_launcher
from kvarena.kernels._launch import Launch, call_key, launch, table_key
from kvarena.kernels.page_table import PageTable


def test_equal_shapes_have_equal_keys_whatever_their_contents() -> None:
    one, other = torch.zeros(4, 8), torch.ones(4, 8)
    assert call_key(one, None) == call_key(other, None)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 9),
        torch.zeros(8, 4).T,
        torch.zeros(4, 8, dtype=torch.float16),
        torch.zeros(33)[1:].view(4, 8),
        None,
    ],
    ids=["shape", "strides", "dtype", "alignment", "none"],
)
def test_what_a_launch_depends_on_is_in_the_key(other: torch.Tensor | None) -> None:
    assert call_key(torch.zeros(4, 8)) != call_key(other)


def table(tokens_per_entry: int) -> PageTable:
    lens = torch.zeros(2, dtype=torch.int32)
    return PageTable(torch.zeros(2, 4, dtype=torch.int32), lens, lens, tokens_per_entry)


def test_a_table_s_key_is_made_once_and_names_its_kind() -> None:
    first = table(16)
    assert table_key(first) is table_key(first)
    assert table_key(first) == table_key(table(16)) != table_key(table(1))


class Kernel:
    """Stands for a Triton kernel: counts launches through the public way."""

    arg_names = ("a", "b", "n", "BLOCK")

    def __init__(self, compiled: object) -> None:
        self.compiled, self.launches = compiled, []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*args: object, **constants: object) -> object:
            self.launches.append((grid, args, constants))
            return self.compiled

        return run


class Compiled:
    """Stands for a compiled kernel, as Triton's public way takes it."""

    packed_metadata = ("packed",)
    function = 1234

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.launches.append((grid, *args))


def test_the_first_launch_compiles_and_later_ones_call_what_it_compiled() -> None:
    compiled = Compiled()
    kernel = Kernel(compiled)
    call = Launch(kernel, (3, 1, 1), (7,), {"BLOCK": 16, "num_warps": 2})
    a, b = torch.zeros(4), torch.ones(4)
    call((a, b))
    call((b, None))
    call((a, b), (5, 1, 1), (8,))
    assert kernel.launches == [((3, 1, 1), (a, b, 7), {"BLOCK": 16, "num_warps": 2})]
    assert compiled.launches == [((3, 1, 1), b, None, 7, 16), ((5, 1, 1), a, b, 8, 16)]


def test_an_interpreted_kernel_is_launched_the_public_way_each_time() -> None:
    kernel = Kernel(None)
    call = Launch(kernel, (1, 1, 1), (7,), {"BLOCK": 16})
    for _ in range(3):
        call((torch.zeros(4), None))
    assert len(kernel.launches) == 3


def test_numbers_of_a_remembered_launch_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_launches", _launch.Remembered())
    compiled = Compiled()
    kernel, a = Kernel(compiled), torch.zeros(4)
    for number, key in ((1, "x"), (2, "x"), (3, "y")):
        launch(kernel, (number, 1, 1), (a, None, number), {"BLOCK": 8}, key)
    assert [found[1][2] for found in kernel.launches] == [1, 3]
    assert compiled.launches == [((2, 1, 1), a, None, 2, 8)]


def test_remembered_forgets_everything_at_its_limit() -> None:
    found = _launch.Remembered(limit=3)
    for i in range(7):
        found[i] = i
    assert dict(found) == {6: 6}


# --- the direct way --------------------------------------------------------------------------------------


class Hopper36:
    """A compiled kernel as Triton 3.6 has it, with its C function replaced by a list of calls."""

    packed_metadata = ("packed",)
    function = 1234

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scratch: int = 0) -> None:
        from triton.backends.nvidia.driver import CudaLauncher

        monkeypatch.setattr(_direct.triton, "__version__", "3.6.0")
        active = SimpleNamespace(get_current_stream=lambda device: 70 + device)
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
        self.calls: list[tuple[object, ...]] = []
        self.public: list[tuple[object, ...]] = []
        self.run = object.__new__(CudaLauncher)
        self.run.launch = lambda *args: self.calls.append(args)
        self.run.global_scratch_size, self.run.profile_scratch_size = scratch, 0
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, True

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.public.append((grid, *args))


def test_addresses_and_constants_go_straight_to_the_c_function(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, a = Hopper36(monkeypatch), torch.zeros(4)
    run = direct_launcher(compiled, (64, None), 3, {})
    assert run is not None
    run((5, 6, 7), (a, None), (1.5, 2))
    head = (5, 6, 7, 73, 1234, False, True, None, None, ("packed",), None, None, None)
    assert compiled.calls == [(*head, a.data_ptr(), None, 1.5, 2, 64, None)]
    assert compiled.public == []


def test_profiling_hooks_take_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled, a = Hopper36(monkeypatch), torch.zeros(4)
    run = direct_launcher(compiled, (64,), 0, {})
    assert run is not None
    hook = lambda *args: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run((1, 1, 1), (a,), (9,))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert compiled.public == [((1, 1, 1), a, 9, 64)]
    assert compiled.calls == []


def test_descriptors_are_encoded_once_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    compiled, encoded = Hopper36(monkeypatch), []
    launcher = compiled.run.launch
    tensordesc_indices, tensordesc_meta = {1}, ["meta"]

    def wrapped(*args: object) -> object:
        return launcher(*args, tensordesc_indices, tensordesc_meta)

    compiled.run.launch = wrapped
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda made, meta: encoded.append(made) or [made, meta, 8])
    run = direct_launcher(compiled, (), 0, {1: lambda tensor: ("box", tensor.data_ptr())})
    assert run is not None
    a, b = torch.zeros(4), torch.zeros(4)
    for box in (a, b, a):
        run((1, 1, 1), (a, box, None), (5,))
    assert encoded == [("box", a.data_ptr()), ("box", b.data_ptr())]
    assert [call[13:] for call in compiled.calls] == [
        (a.data_ptr(), ("box", box.data_ptr()), "meta", 8, None, 5) for box in (a, b, a)
    ]


def test_anything_unknown_is_left_to_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct_launcher(Hopper36(monkeypatch, scratch=64), (), 0, {}) is None
    assert direct_launcher(SimpleNamespace(run=object(), packed_metadata=()), (), 0, {}) is None
    assert direct_launcher(SimpleNamespace(), (), 0, {}) is None
    assert direct_launcher(Hopper36(monkeypatch), (), 0, {0: lambda tensor: tensor}) is None  # no wrapper to look under
    compiled = Hopper36(monkeypatch)
    monkeypatch.setattr(_direct.triton, "__version__", "3.7.1")
    assert direct_launcher(compiled, (), 0, {}) is None
