"""compute_slot_mapping: equal to the reference, and to hand-counted slots at every border."""

from __future__ import annotations

import pytest
import torch
from kvarena.kernels import reference
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.slots import compute_slot_mapping
from support.attention import DEVICE, make_table


def ints(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def two_rows(tokens_per_entry: int = 4) -> PageTable:
    return PageTable(ints([[3, 4], [6, 7]]), ints([0, 1]), ints([9, 3]), tokens_per_entry)


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("entry", [1, 4, 16, 256])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots_equal_the_reference(page_size: int, entry: int, position_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    lens = [65, 1, 0, 33, 300]
    table, _ = make_table(lens, page_size, entry, "random", 300, generator)
    new = [65, 1, 0, 3, 260]
    starts = ints([0, *torch.tensor(new).cumsum(0).tolist()])
    positions = torch.cat([torch.arange(n - m, n) for n, m in zip(lens, new, strict=True)])
    positions = positions.to(position_dtype).to(DEVICE)
    out = torch.full((len(positions) + 5,), 123, device=DEVICE)
    want = reference.compute_slot_mapping(table, starts, positions, out.clone())
    assert compute_slot_mapping(table, starts, positions, out) is out
    assert torch.equal(out, want)
    for request in range(len(lens)):
        mine = slice(int(starts[request]), int(starts[request + 1]))
        assert torch.equal(out[mine], table.slots(request)[lens[request] - new[request] :])


def test_a_position_past_the_row_never_reads_the_next_request() -> None:
    got = compute_slot_mapping(two_rows(), ints([0, 2, 3]), ints([7, 8, 0]), ints([0, 0, 0], torch.int64))
    assert got.tolist() == [19, -1, 24]


def test_padding_and_negative_positions_get_minus_one() -> None:
    out = torch.full((6,), 5, device=DEVICE)
    compute_slot_mapping(two_rows(), ints([0, 1, 3]), ints([0, -1, 2, 1]), out)
    assert out.tolist() == [12, -1, 26, -1, -1, -1]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("entry", [1, 4])
def test_ranks_share_the_tokens_and_fill_their_slots_without_holes(size: int, interleave: int, entry: int) -> None:
    """Each token has one rank; a rank's tokens take its local positions 0, 1, 2, ... in order."""
    count = 48
    table = PageTable(ints([list(range(1, count // entry + 2))]), ints([0]), ints([count]), entry)
    positions, starts = torch.arange(count, device=DEVICE), ints([0, count])
    owners = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    for rank in range(size):
        keywords = {"cp_size": size, "cp_rank": rank, "cp_interleave": interleave}
        out = compute_slot_mapping(table, starts, positions, torch.zeros_like(positions), **keywords)
        want = reference.compute_slot_mapping(table, starts, positions, torch.zeros_like(positions), **keywords)
        assert torch.equal(out, want)
        mine = out[out >= 0]
        assert torch.equal(mine, torch.arange(entry, entry + len(mine), device=DEVICE))
        owners += out >= 0
    assert (owners == 1).all()


def test_blocks_of_a_page_are_dealt_as_vllm_deals_them() -> None:
    """Pages of 4, two ranks, runs of 2: positions 0-1 and 4-5 are rank 0's, and fill one page of it."""
    table = two_rows()
    positions, starts = torch.arange(8, device=DEVICE), ints([0, 8, 8])
    out = torch.zeros_like(positions)
    compute_slot_mapping(table, starts, positions, out, cp_size=2, cp_rank=0, cp_interleave=2)
    assert out.tolist() == [12, 13, -1, -1, 14, 15, -1, -1]
    compute_slot_mapping(table, starts, positions, out, cp_size=2, cp_rank=1, cp_interleave=2)
    assert out.tolist() == [-1, -1, 12, 13, -1, -1, 14, 15]


def test_slots_beyond_32_bits_are_whole() -> None:
    table = PageTable(ints([[2**31 - 1]]), ints([0]), ints([1]), 256)
    out = compute_slot_mapping(table, ints([0, 1]), ints([255]), ints([0], torch.int64))
    assert out.tolist() == [(2**31 - 1) * 256 + 255]


def test_more_tokens_than_one_launch_row_covers() -> None:
    """Chunks beyond the last program go round again."""
    count = 256 * 33 + 7
    table = PageTable(ints([list(range(count))]).flip(1), ints([0]), ints([count]), 1)
    positions = torch.arange(count, device=DEVICE)
    out = compute_slot_mapping(table, ints([0, count]), positions, torch.zeros_like(positions))
    assert torch.equal(out, positions.flip(0))


BAD = [
    ({"starts": [0, 1]}, r"query_start_loc: expected shape \[3\], found \[2\]"),
    ({"out": 1}, r"out: expected at least 2 slots, one a position, found 1"),
    ({"cp_size": 0}, r"cp_size, cp_interleave: expected at least 1, found \(0, 1\)"),
    ({"cp_size": 2, "cp_rank": 2}, r"cp_rank: expected 0 to 1, found 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_argument_is_named_with_what_was_expected_and_found(changes: dict, message: str) -> None:
    changes = dict(changes)
    starts = ints(changes.pop("starts", [0, 1, 2]))
    out = torch.zeros(changes.pop("out", 2), dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        compute_slot_mapping(two_rows(), starts, ints([0, 0]), out, **changes)
