"""PageTable: slots and the CSR form, for both table kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.attention import make_table

CASES = Path(__file__).parent.parent / "cases/cases.jsonl"


@pytest.mark.parametrize("entry", ["page", "token", "wide"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("order", ["random", "reverse"])
def test_csr_lists_the_pages_of_every_request_in_order(page_size: int, entry: str, order: str) -> None:
    lens = [0, 1, page_size, 65, page_size + 1, 0, 64]
    per_entry = {"page": page_size, "token": 1, "wide": 4 * page_size}[entry]
    table, _ = make_table(lens, page_size, per_entry, order, 80, torch.Generator().manual_seed(0))
    kv_indptr, kv_indices, last_page_len = table.to_csr(page_size)
    assert {tensor.dtype for tensor in (kv_indptr, kv_indices, last_page_len)} == {torch.int32}
    assert int(kv_indptr[-1]) == len(kv_indices)
    for request, length in enumerate(lens):
        slots = table.slots(request)
        pages = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        rebuilt = (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()[:length]
        assert torch.equal(rebuilt.long(), slots)
        full = max(len(pages) - 1, 0) * page_size
        assert full + int(last_page_len[request]) == length


def test_case_adapter_03_last_page_lengths() -> None:
    case = next(json.loads(line) for line in CASES.read_text().splitlines() if '"adapter-03"' in line)
    for run, want in zip(case["input"]["runs"], case["expect"]["runs"], strict=True):
        lens, page_size = run["seq_lens"], run["page_size"]
        for entry in (page_size, 1):
            table, _ = make_table(lens, page_size, entry, "reverse", 112, torch.Generator())
            kv_indptr, _, last_page_len = table.to_csr(page_size)
            assert kv_indptr.diff().tolist() == want["pages"]
            assert kv_indptr.tolist() == want["indptr"]
            assert last_page_len.tolist() == want["last_page_len"]


def test_a_batch_of_empty_requests_has_an_empty_csr() -> None:
    table, _ = make_table([0, 0], 16, 16, "random", 16, torch.Generator())
    kv_indptr, kv_indices, last_page_len = table.to_csr(16)
    assert kv_indptr.tolist() == [0, 0, 0]
    assert kv_indices.tolist() == []
    assert last_page_len.tolist() == [0, 0]
