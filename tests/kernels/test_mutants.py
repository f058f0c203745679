"""Every check of writes, copies, slots and merges has a planted fault that it refuses.

A mutant is a copy of a kernel module with one piece of source replaced. Each is run on probe inputs that the true
kernel passes; the check that the other tests use must refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kvarena.kernels import copy, merge, reference, slots, store
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.pool import KVPool
from support.attention import CUDA, DEVICE
from support.mutants import mutate

pytestmark = pytest.mark.skipif(CUDA, reason="faults are planted in the interpreter: on a GPU they read foreign memory")

Fault = tuple[str, str]


def refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


STORE_FAULTS: dict[str, list[Fault]] = {
    "slot -1 wraps around": [
        (
            "m = (slot >= 0) & (slot < num_slots)",
            "slot = tl.where(m_row, (slot + num_slots) % num_slots, -1)\n    m = slot >= 0",
        )
    ],
    "offset within the page forgotten": [("offset = slot & (PAGE_SIZE - 1)", "offset = slot * 0")],
    "V written with K's page stride": [("page * value_stride_p", "page * key_stride_p")],
    "multiplied by the scale": [("tl.math.div_rn(x.to(tl.float32), scale)", "x.to(tl.float32) * scale")],
    "v_scale ignored": [("m_row, m, v_scale, v_scale_ptr", "m_row, m, 1.0, v_scale_ptr")],
    "last head left out": [("(o_h < HEADS)", "(o_h < HEADS - 1)")],
}


def store_is_right(module: ModuleType) -> None:
    """Half and fp8 pools, slots that skip, wrap and fill a page.

    V is wider than K, so that a confusion of strides stays inside the pool.
    """
    for dtype, scales in ((torch.float16, {}), (torch.float8_e4m3fn, {"k_scale": 0.5, "v_scale": 2.0})):
        pools = [KVPool(1, 3, 4, 2, 64, 96, dtype=dtype, device=DEVICE, layout="split").fill_(9) for _ in range(2)]
        v = torch.randint(-7, 8, (5, 2, 96), generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
        k = v[:, :, :64].contiguous()
        mapping = torch.tensor([5, -1, 7, 8, 13], device=DEVICE)
        for pool, op in zip(pools, (module.store_kv, reference.store_kv), strict=True):
            op(k, v, pool.key(0), pool.value(0), mapping, **scales)
        assert torch.equal(pools[0].key(0).float(), pools[1].key(0).float())
        assert torch.equal(pools[0].value(0).float(), pools[1].value(0).float())


@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_a_fault_in_store_is_caught(fault: str, tmp_path: Path) -> None:
    store_is_right(store)
    faulty = mutate(tmp_path, "store", *STORE_FAULTS[fault])
    assert refused(lambda: store_is_right(faulty))


SLOTS_FAULTS: dict[str, list[Fault]] = {
    "column not bounded by the row": [("m &= column < width", "m &= column < 1000")],
    "offset within the entry forgotten": [(" + (p & ((1 << LOG_ENTRY) - 1))", "")],
    "row index ignored": [("row * entries_stride", "i_b * entries_stride")],
    "padding not marked": [
        ("tl.store(out_ptr + o_t, tl.where(m, slot, -1), mask=m_t)", "tl.store(out_ptr + o_t, slot, mask=m_t & m)")
    ],
    "runs of a rank not closed up": [
        ("p = p // (CP_SIZE * CP_INTERLEAVE) * CP_INTERLEAVE + p % CP_INTERLEAVE", "p = p + 0")
    ],
    "runs of one token": [("(p // CP_INTERLEAVE) % CP_SIZE", "p % CP_SIZE")],
}


def slots_are_right(module: ModuleType) -> None:
    entries = torch.tensor([[3, 4], [6, 7], [8, 9]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([9, 3], dtype=torch.int32, device=DEVICE)
    table = PageTable(entries, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE), lens, 4)
    starts = torch.tensor([0, 5, 7], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([4, 5, 6, 7, 8, 1, 2], device=DEVICE)
    for keywords in ({}, {"cp_size": 2, "cp_rank": 1, "cp_interleave": 2}):
        got, want = (torch.full((9,), 77, device=DEVICE) for _ in range(2))
        module.compute_slot_mapping(table, starts, positions, got, **keywords)
        reference.compute_slot_mapping(table, starts, positions, want, **keywords)
        assert torch.equal(got, want)


@pytest.mark.parametrize("fault", SLOTS_FAULTS)
def test_a_fault_in_slot_mapping_is_caught(fault: str, tmp_path: Path) -> None:
    slots_are_right(slots)
    faulty = mutate(tmp_path, "slots", *SLOTS_FAULTS[fault])
    assert refused(lambda: slots_are_right(faulty))


COPY_FAULTS: dict[str, list[Fault]] = {
    "one copy after the other": [("if s != d and s in targets]", "if False]"), ("if s not in targets]", "if s != d]")],
    "first layer only": [("return self.num_runs, ceil_div", "return 1, ceil_div")],
    "source and target swapped": [
        (
            "tl.store(base + dst * stride + o, tl.load(base + src * stride + o",
            "tl.store(base + src * stride + o, tl.load(base + dst * stride + o",
        )
    ],
    "end of a run left out": [(("m = o < length\n    tl.store"), ("m = o < length - 1\n    tl.store"))],
    "packed at the wrong place": [("(row * page_units + place)[:, None]", "(row * page_units)[:, None]")],
}


def copies_are_right(module: ModuleType) -> None:
    pools = [KVPool(2, 5, 4, 1, 64, dtype=torch.float32, device=DEVICE, layout="split") for _ in range(2)]
    for pool in pools:
        for i, tensor in enumerate(pool.layers):
            tensor.copy_(torch.arange(tensor.numel(), device=DEVICE).view(tensor.shape) + 0.5 * i)
    module.copy_pages(pools[0].layers, [1, 2, 4], [2, 3, 5])
    reference.copy_pages(pools[1].layers, [1, 2, 4], [2, 3, 5])
    packed = module.gather_pages(pools[0].layers, [5, 1])
    assert torch.equal(packed, reference.gather_pages(pools[1].layers, [5, 1]))
    assert all(torch.equal(a, b) for a, b in zip(pools[0].layers, pools[1].layers, strict=True))


@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_a_fault_in_copying_is_caught(fault: str, tmp_path: Path) -> None:
    copies_are_right(copy)
    faulty = mutate(tmp_path, "copy", *COPY_FAULTS[fault])
    assert refused(lambda: copies_are_right(faulty))


MERGE_FAULTS: dict[str, list[Fault]] = {
    "weights not relative to the larger": [
        ('base = tl.where(largest == float("-inf"), 0.0, largest)', "base = largest * 0.0")
    ],
    "two empty sides": [('base = tl.where(largest == float("-inf"), 0.0, largest)', "base = largest")],
    "output of an empty side leaks": [("    b_a = tl.where(w_a[:, None] == 0, 0.0, b_a)\n", "")],
    "both sides weigh alike": [("b_b * (w_b / safe)", "b_b * (w_a / safe)")],
    "lse of one side": [("base + tl.log(safe)", "base")],
}


def merge_is_right(module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    out_a, out_b = (torch.randn((4, 2, 80), generator=generator).to(DEVICE) for _ in range(2))
    lse_a, lse_b = (torch.randn((4, 2), generator=generator).to(DEVICE) for _ in range(2))
    lse_a[0] = lse_b[0] = lse_a[1] = float("-inf")
    out_a[1] = float("nan")
    lse_a[2] += 200
    out, lse = module.merge_states(out_a, lse_a, out_b, lse_b)
    want, want_lse = reference.merge_states(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert ((out - want).abs() <= 1e-6 * (1 + out_a.nan_to_num().abs() + out_b.abs())).all()
    finite = ~want_lse.isinf()
    assert ((lse - want_lse).abs()[finite] <= 1e-6 * (1 + want_lse.abs())[finite]).all()


@pytest.mark.parametrize("fault", MERGE_FAULTS)
def test_a_fault_in_merging_is_caught(fault: str, tmp_path: Path) -> None:
    merge_is_right(merge)
    faulty = mutate(tmp_path, "merge", *MERGE_FAULTS[fault])
    assert refused(lambda: merge_is_right(faulty))
