"""The device-made work list: every tile once, longest first inside groups that fit L2, against a plain-Python list.

Rows of q behind the last request are a sequence of length 0.
"""

from __future__ import annotations

import pytest
import torch
from kvarena.kernels import extend_plan
from kvarena.kernels._launch import Remembered
from kvarena.kernels.extend_plan import HEAD_DIM, L2_GROUP_BYTES, plan_extend
from kvarena.kernels.page_table import PageTable
from support.attention import DEVICE

BATCHES = {
    "one": [(0, 77)],
    "even": [(0, 64), (0, 64), (0, 64)],
    "odd": [(200, 133), (16, 1000), (0, 1), (7, 7), (31, 32), (90, 33)],
    "padded": [(5, 9), (0, 0), (40, 65), (0, 0)],
    "groups": [(30_000, 64), (3, 40), (16_384, 128), (50_000, 33)],
    "many": [(11 * i % 97, 1 + 5 * i % 71) for i in range(37)],
}


def expected_tiles(batch: list[tuple[int, int]], rows: list[int], tokens: int, heads: int) -> list[list[int]]:
    group_tokens = L2_GROUP_BYTES // (4 * HEAD_DIM)
    tiles, start, pairs = [], 0, 0
    for b, (prefix, new) in enumerate(batch):
        size = max(prefix + new, 1)
        for head in range(heads):
            group = (pairs + head * size) // group_tokens
            for t in range(-(-new // tokens)):
                end = min((t + 1) * tokens, new)
                record = [start + t * tokens, end - t * tokens, prefix + t * tokens, prefix + new, rows[b], head]
                tiles.append(((group, -(prefix + end), b, head), record))
        start += new
        pairs += size * heads
    return [record for _, record in sorted(tiles)]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (1, 1), (16, 1)])
def test_plan_lists_every_tile_once_in_order(name: str, num_heads: int, num_kv_heads: int) -> None:
    batch = BATCHES[name]
    rows = [(3 * b + 1) % 64 for b in range(len(batch))]
    lens = torch.tensor([prefix + new for prefix, new in batch], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *[new for _, new in batch]], dtype=torch.int32).cumsum(0).int().to(DEVICE)
    entries = torch.zeros(64, 1, dtype=torch.int32, device=DEVICE)
    table = PageTable(entries, torch.tensor(rows, dtype=torch.int32, device=DEVICE), lens, 16)
    padding = 40
    plan = plan_extend(table, starts, int(starts[-1]) + padding, num_heads, num_kv_heads)
    wanted = expected_tiles([*batch, (-padding, padding)], [*rows, 0], 128 * num_kv_heads // num_heads, num_kv_heads)
    assert plan.state[:3].tolist() == [len(wanted), 0, 0]
    assert plan.tiles[: len(wanted), :6].tolist() == wanted


def test_plans_of_other_head_counts_are_other_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int]] = []

    class Recorded:
        def __init__(self, kernel: object, grid: object, numbers: object, constants: dict[str, int]) -> None:
            self.made = (constants["HEADS"], constants["TT"])

        def __call__(self, tensors: object) -> None:
            launched.append(self.made)

    monkeypatch.setattr(extend_plan, "Launch", Recorded)
    monkeypatch.setattr(extend_plan, "_plans", Remembered())
    lens = torch.tensor([64, 64], dtype=torch.int32)
    table = PageTable(torch.zeros(2, 4, dtype=torch.int32), torch.arange(2, dtype=torch.int32), lens, 16)
    starts = torch.tensor([0, 64, 128], dtype=torch.int32)
    shapes = ((32, 8), (32, 32), (32, 4), (8, 8), (64, 8))
    for num_heads, num_kv_heads in (*shapes, *shapes):
        plan_extend(table, starts, 128, num_heads, num_kv_heads)
    assert launched == [(kv, 128 * kv // q) for q, kv in (*shapes, *shapes)]
