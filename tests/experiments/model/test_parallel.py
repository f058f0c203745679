"""Heads over two processes: the outputs of one process, the same page table on each rank, half the bytes a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="models come from transformers: pip install 'kvarena[model]'")

from kvarena.experiments.model.loading import random_model  # noqa: E402
from kvarena.experiments.model.parallel import shard_model  # noqa: E402
from kvarena.kernels import torch_backend  # noqa: E402
from support.attention import make_batch  # noqa: E402
from support.ranks import rank_main  # noqa: E402

CASES = [("llama", "block", "block_table"), ("qwen2", "token", "req_to_token")]


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_main, args=(2, str(tmp_path), CASES), nprocs=2)
    rank_main(0, 1, str(tmp_path), CASES)
    names = ("rank0of2", "rank1of2", "rank0of1")
    first, second, alone = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    for one, two, whole in zip(first, second, alone, strict=True):
        assert one["outputs"] == two["outputs"]
        assert whole["ties"] == 0
        assert one["outputs"] == whole["outputs"]
        assert one["tables"] == two["tables"] == whole["tables"]
        assert (one["kv_heads"], whole["kv_heads"]) == (1, 2)
        assert 2 * one["page_bytes"] == 2 * two["page_bytes"] == whole["page_bytes"]
        assert whole["preemptions"] > 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_attention_of_a_shard_of_heads_is_that_shard_of_the_attention(num_ranks: int) -> None:
    batch = make_batch(seq_lens=[9, 1, 30], extend_lens=[9, 1, 3], page_size=4, tokens_per_entry=4, group=2, kv_heads=4)
    whole = torch_backend.paged_extend(batch.q, *batch.caches, batch.query_start_loc)
    key, value, table = batch.caches
    shards = [
        torch_backend.paged_extend(q, k, v, table, batch.query_start_loc)
        for q, k, v in zip(*(x.chunk(num_ranks, -2) for x in (batch.q, key, value)), strict=True)
    ]
    torch.testing.assert_close(torch.cat(shards, 1), whole, rtol=0, atol=1e-6)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads: expected a multiple of 3 ranks, found 4"):
        shard_model(random_model("llama"), 0, 3)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, found 2"):
        shard_model(random_model("llama"), 2, 2)
