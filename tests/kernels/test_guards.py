"""Guard bands around every tensor that a kernel writes, those that a launcher makes for itself included: outputs, lse,
workspaces, plans, pools, tables. Whatever the sizes, nothing beside them changes. In the interpreter, and on a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvarena.kernels import decode
from kvarena.kernels.copy import copy_pages, gather_pages, scatter_pages
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.merge import merge_states
from kvarena.kernels.pool import LAYOUTS, KVPool
from kvarena.kernels.slots import compute_slot_mapping
from kvarena.kernels.step import LANES, StepBuffers, apply_decode, apply_step, gather_rows
from kvarena.kernels.store import store_kv
from support.attention import DEVICE, LAYER, make_batch

BAND = 2**15  # elements on either side: a whole tile that is not masked falls into it
MARK = 0xA5


class Guards:
    """Makes tensors with a band on either side, and says whether all bands are as they were."""

    def __init__(self) -> None:
        self.bands: list[torch.Tensor] = []

    def make(self, *shape: int, dtype: torch.dtype = torch.float32, device: Any = DEVICE) -> torch.Tensor:
        count, size = math.prod(shape), dtype.itemsize
        whole = torch.full(((count + 2 * BAND) * size,), MARK, dtype=torch.uint8, device=device)
        self.bands += [whole[: BAND * size], whole[(BAND + count) * size :]]
        return whole.view(dtype)[BAND : BAND + count].view(shape)

    def whole(self) -> bool:
        return all(bool((band == MARK).all()) for band in self.bands)


@pytest.fixture
def guards(monkeypatch):
    """From here on whatever is allocated lies between bands."""
    made = Guards()

    plain, plain_new = torch.empty, torch.Tensor.new_empty

    def empty(*size: Any, dtype: torch.dtype = torch.float32, device: Any = DEVICE, **options: Any) -> torch.Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        if not math.prod(shape) or options.get("pin_memory"):  # the interpreter's own, and a copy's source
            return plain(*size, dtype=dtype, device=device, **options)
        return made.make(*shape, dtype=dtype)

    def new_empty(self: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
        return plain_new(self, size, **options) if isinstance(size, int) else empty(size, dtype=self.dtype)

    monkeypatch.setattr(decode, "_workspaces", {})
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: empty(*size, **options).zero_())
    monkeypatch.setattr(torch, "empty_like", lambda like, **_: empty(like.shape, dtype=like.dtype))
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return made


def test_a_write_into_a_band_is_seen(guards):
    out = torch.empty(3, 5, dtype=torch.float16)
    out.fill_(1)
    assert guards.whole()
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1)
    assert not guards.whole()


LENS = [1, 17, 0, 37]
SHAPES = [((64, 64), "split"), ((96, 96), "hnd"), ((80, 64), "page_major")]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("dims", "layout"), SHAPES, ids=str)
def test_decode_writes_its_output_its_lse_and_its_workspace_alone(guards, layout, splits, dims):
    batch = make_batch(
        seq_lens=LENS, group=3, kv_heads=1, head_dim=dims[0], head_dim_v=dims[1], layout=layout, padding=2
    )
    before = [storage.clone() for storage in batch.pool._storage]
    made = len(guards.bands)
    out, lse = paged_decode(batch.q[: len(LENS)], *batch.caches, return_lse=True, num_splits=splits)
    assert out.shape == (len(LENS), 3, dims[1])
    assert lse.shape == (len(LENS), 3)
    assert len(guards.bands) >= made + 4 + 2 * (splits > 1)
    assert guards.whole()
    for storage, old in zip(batch.pool._storage, before, strict=True):  # and it reads its caches
        assert torch.equal(storage.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("new", [[1, 3, 0, 37], [1, 17, 0, 5]], ids=str)
@pytest.mark.parametrize(("dims", "layout"), SHAPES, ids=str)
def test_extend_writes_its_output_its_lse_and_its_plan_alone(guards, layout, new, dims):
    batch = make_batch(
        seq_lens=LENS,
        extend_lens=new,
        group=3,
        kv_heads=1,
        head_dim=dims[0],
        head_dim_v=dims[1],
        layout=layout,
        padding=3,
    )
    made = len(guards.bands)
    out, lse = paged_extend(batch.q, *batch.caches, batch.query_start_loc, return_lse=True)
    assert out.shape == (sum(new) + 3, 3, dims[1])
    assert lse.shape == out.shape[:2]
    assert len(guards.bands) >= made + 4
    assert guards.whole()


@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_merge_writes_its_two_outputs_alone(guards, rows, dim):
    outs, lses = torch.randn(2, rows, 3, dim, device=DEVICE), torch.randn(2, rows, 3, device=DEVICE)
    made = len(guards.bands)
    merge_states(outs[0], lses[0], outs[1], lses[1])
    assert len(guards.bands) == made + 4
    assert guards.whole()


@pytest.mark.parametrize("count", [0, 1, 7, 63])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_are_written_for_the_tokens_of_the_call_alone(guards, count, dtype):
    batch = make_batch(seq_lens=[70], page_size=4, tokens_per_entry=4)
    out = guards.make(count + 2, dtype=torch.int64)
    starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
    compute_slot_mapping(batch.table, starts, torch.arange(count + 2, dtype=dtype, device=DEVICE), out)
    assert out[count:].tolist() == [-1, -1]
    assert guards.whole()


def pools(layout: str, dtype: torch.dtype) -> KVPool:
    return KVPool(2, 6, 4, 3, 80, 64, dtype=dtype, device=DEVICE, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_store_writes_no_slot_outside_of_its_pool(guards, layout, dtype):
    pool = pools(layout, dtype)
    k, v = torch.randn(9, 3, 80, device=DEVICE).half(), torch.randn(9, 3, 64, device=DEVICE).half()
    slots = torch.tensor([4, 27, 28, 29, -1, -2, 10**6, 2**40, -(2**40)], device=DEVICE)  # 28 slots with padding
    scales = {} if dtype == torch.float16 else {"k_scale": 0.1, "v_scale": 0.1}
    store_kv(k, v, pool.key(LAYER), pool.value(LAYER), slots, **scales)
    assert bool(pool.key(LAYER)[1, 0].view(torch.uint8).any())
    assert guards.whole()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_write_the_pages_that_they_name_and_the_packed_rows_alone(guards, layout):
    pool = pools(layout, torch.float16)
    for storage in pool._storage:
        storage.view(torch.uint8).random_(0, 256)
    copy_pages(pool.layers, [1, 2, 6], [6, 1, 5])
    packed = gather_pages(pool.layers, [6, 0, 3])
    own = guards.make(3, pool.bytes_per_page, dtype=torch.uint8)
    gather_pages(pool.layers, [6, 0, 3], own)
    assert torch.equal(own, packed)
    scatter_pages(own, pool.layers, [1, 2, 6])
    assert guards.whole()


def buffers(guards: Guards, requests: int, gathers: bool, page_size: int) -> StepBuffers:
    expand = 1 if gathers else page_size
    entries = guards.make(requests + 1, 9 * expand, dtype=torch.int32).fill_(77)
    gathered = guards.make(requests, 9, dtype=torch.int32).fill_(77) if gathers else None
    positions, slots = (guards.make(4 * requests + 3, dtype=torch.int64).fill_(77) for _ in range(2))
    inbox = guards.make(4096, dtype=torch.int32).zero_()
    return StepBuffers(inbox, entries, gathered, positions, slots, requests, page_size, expand, "triton")


STEPS = [(requests, gathers, size) for requests in (1, 5, LANES + 3) for gathers in (True, False) for size in (1, 3)]


@pytest.mark.parametrize(("requests", "gathers", "page_size"), STEPS)
def test_steps_write_the_buffers_of_the_adapter_alone(guards, requests, gathers, page_size):
    """All rows, all of the positions and slots, a change in the last entry of the last row, a decode step."""
    made = buffers(guards, requests, gathers, page_size)
    rows = torch.arange(requests, 0, -1, dtype=torch.int32)
    header = [rows, rows * 0 + 1, torch.arange(requests + 1), torch.arange(requests + 1), rows * 0 + 8]
    numbers = torch.cat([part.int() for part in header])
    made.packed[: len(numbers)] = numbers.to(DEVICE)
    changes = [requests, 8, 5, requests - 1][: 4 if gathers else 3]
    made.packed[len(numbers) : len(numbers) + len(changes)] = torch.tensor(changes, dtype=torch.int32)
    apply_step(made, requests, len(made.slots), len(made.slots), 1, len(numbers))
    assert made.entries[requests, -1].item() == (5 if gathers else 5 * page_size + page_size - 1)
    assert made.slots[requests:].tolist() == [-1] * (len(made.slots) - requests)
    if gathers:
        gather_rows(made, requests, 9, requests)
    inbox = torch.cat([rows * 0 + 8 * page_size, rows * 0 + 6, rows * 0 + 8]).int().to(DEVICE)
    apply_decode(made, inbox, requests, len(made.slots))
    assert made.slots[requests:].tolist() == [-1] * (len(made.slots) - requests)
    assert guards.whole()


KERNELS: dict[str, tuple[Callable[..., Any], ...]] = {
    "decode": (paged_decode,),
    "extend": (paged_extend,),
    "merge": (merge_states,),
    "slots": (compute_slot_mapping,),
    "store": (store_kv,),
    "copy": (copy_pages, gather_pages, scatter_pages),
    "step": (apply_step, apply_decode, gather_rows),
}


def test_every_module_with_a_launcher_is_guarded_here():
    """`extend_gluon` runs on a Hopper: `kvarena bench kernels --part safety` puts bands around its output there."""
    from pathlib import Path

    folder = Path(__file__).resolve().parents[2] / "kernels"
    launching = {path.stem for path in folder.glob("*.py") if "@triton.jit" in path.read_text()}
    parts = {name for name in launching if name.startswith("_")}  # of the kernels of other modules
    assert launching - parts - {"extend_plan"} == KERNELS.keys()  # the plan is one of extend's
