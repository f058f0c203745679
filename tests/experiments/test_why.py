"""Where the prompt tokens went, by the grain of each allocator: whole pages, or units where hits end inside them."""

from __future__ import annotations

from typing import Any

import pytest
from kvarena.allocators.config import block, token
from kvarena.experiments.compare import compare
from kvarena.experiments.why import FACTORS, hit_grain, token_split
from support.small import OPTIONS

FINE = block(page_size=16, hash_unit=4)


def small(**fields: Any):
    return compare("chat", options=OPTIONS, kernel_batches=0, too_long="reject", **fields)


@pytest.mark.parametrize("live", [1, 4])
@pytest.mark.parametrize("pool", ["250 MiB", "2 GiB"])
def test_no_share_is_negative_and_all_add_up_where_hits_end_inside_pages(pool, live):
    designs = [block(page_size=16), FINE, token(page_size=16, hash_unit=8), token()]
    result = small(allocators=designs, pool=pool, live=live)
    table = result.why()
    for entry, grain in zip(result.manifest["allocators"], (16, 4, 8, 1), strict=True):
        assert hit_grain(result, entry) == grain
        counts = token_split(result, entry, result.reference_pool)
        assert min(counts.values()) >= 0, (entry["name"], counts)
        rows = result.requests[(result.requests["allocator"] == entry["name"]) & result.requests["admitted"]]
        assert sum(counts.values()) == rows["num_prompt_tokens"].sum()
        assert table[entry["name"]].sum() == pytest.approx(1.0)
    assert list(table.index) == list(FACTORS)


def test_a_hit_inside_a_page_is_told_by_its_unit():
    """31 known tokens: a page of 16 with whole pages, 28 with units of 4; 3 fill none."""
    rows = [[*range(31), 100 + n] for n in range(2)]
    result = compare([[*range(31)], *rows], allocators=[block(page_size=16), FINE], pool="64 MiB", kernel_batches=0)
    told = str(result.first_divergence())
    assert "15 tokens do not fill a page of 16" in told
    assert "3 tokens do not fill a unit of 4 in a page of 16" in told
    fine = result.requests[result.requests["allocator"] == result.allocators[1]]
    assert fine["hit_tokens"].tolist()[1] == 28
