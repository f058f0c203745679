"""Kernels in CUDA graphs: no wait for the device, and a replay follows what changed in the buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvarena.kernels.decode import paged_decode
from kvarena.kernels.extend import paged_extend
from kvarena.kernels.merge import merge_states
from kvarena.kernels.page_table import PageTable
from kvarena.kernels.slots import compute_slot_mapping
from kvarena.kernels.store import store_kv
from support.attention import CUDA, DEVICE, Batch, assert_attention, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="CUDA graphs need a CUDA device")]
BF16 = torch.bfloat16


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run once eagerly with synchronising calls forbidden, then capture; (graph, what the captured call returned)."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        graph = torch.cuda.CUDAGraph()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def change_lengths(batch: Batch, lens: list[int]) -> None:
    """Write new lengths into the buffers that the graph reads."""
    batch.table.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_a_decode_graph_follows_lengths_and_padded_rows(num_splits: int | None) -> None:
    batch = make_batch(seq_lens=[65, 64, 33, 17], dtype=BF16)
    graph, result = captured(lambda: paged_decode(batch.q, *batch.caches, return_lse=True, num_splits=num_splits))
    for lens in ([65, 64, 33, 17], [1, 16, 0, 0], [50, 0, 33, 2]):
        change_lengths(batch, lens)
        for tensor in result:
            tensor.fill_(float("nan"))
        graph.replay()
        assert_attention(batch, result)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("backend", ["triton", None], ids=["triton", "fastest"])
def test_an_extend_graph_follows_lengths_and_offsets(backend: str | None, page_size: int) -> None:
    batch = make_batch(
        seq_lens=[65, 64, 33],
        extend_lens=[20, 10, 3],
        page_size=page_size,
        tokens_per_entry=page_size,
        head_dim=128,
        dtype=BF16,
        padding=4,
    )
    starts = batch.query_start_loc
    graph, result = captured(lambda: paged_extend(batch.q, *batch.caches, starts, return_lse=True, backend=backend))
    for lens, offsets in (
        ([65, 64, 33], [0, 20, 30, 33]),
        ([65, 20, 33], [0, 37, 37, 37]),
        ([40, 0, 1], [0, 33, 33, 34]),
    ):
        change_lengths(batch, lens)
        starts.copy_(torch.tensor(offsets, dtype=torch.int32))
        for tensor in result:
            tensor.fill_(float("nan"))
        graph.replay()
        assert_attention(batch, result)


def test_a_whole_step_in_one_graph() -> None:
    """Slot mapping, store and decode: the next token of each request, twice, through one captured step."""
    batch = make_batch(seq_lens=[65, 30, 16], dtype=BF16, page_size=16, tokens_per_entry=16)
    key, value, table = batch.caches
    new_k, new_v = (torch.randn((3, 2, 64), device=DEVICE).to(BF16) for _ in range(2))
    starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
    positions = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    mapping = torch.zeros(3, dtype=torch.int64, device=DEVICE)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        positions.copy_(table.seq_lens - 1)
        compute_slot_mapping(table, starts, positions, mapping)
        store_kv(new_k, new_v, key, value, mapping)
        out, lse = paged_decode(batch.q, key, value, table, return_lse=True)
        return merge_states(out, lse, out, torch.full_like(lse, float("-inf")))

    graph, result = captured(step)
    for lens in ([65, 30, 16], [64, 29, 0]):
        table.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        new_k.normal_()
        graph.replay()
        assert_attention(batch, result)
        last = table.slots(0)[-1]
        assert torch.equal(key[last // 16, last % 16], new_k[0])


def test_two_graphs_and_eager_calls_share_no_scratch() -> None:
    one, other = (make_batch(seq_lens=[65, 64], dtype=BF16, seed=seed) for seed in (0, 1))
    graphs = [captured(lambda b=b: paged_decode(b.q, *b.caches, return_lse=True, num_splits=4)) for b in (one, other)]
    side = torch.cuda.Stream()
    for _ in range(20):
        side.wait_stream(torch.cuda.current_stream())
        graphs[0][0].replay()
        with torch.cuda.stream(side):
            graphs[1][0].replay()
        eager = paged_decode(one.q, *one.caches, return_lse=True, num_splits=3)
        torch.cuda.synchronize()
        assert_attention(one, graphs[0][1])
        assert_attention(other, graphs[1][1])
        assert_attention(one, eager)


def test_a_table_of_another_length_is_read_by_its_own_width() -> None:
    """A graph is bound to its table's width; lengths up to that width are safe."""
    batch = make_batch(seq_lens=[80, 80], dtype=BF16, width=80)
    graph, result = captured(lambda: paged_decode(batch.q, *batch.caches, return_lse=True))
    table = batch.table
    assert table.entries.shape[1] * table.tokens_per_entry == 80
    graph.replay()
    assert_attention(batch, result)
    narrow = PageTable(table.entries, table.rows, torch.tensor([16, 0], dtype=torch.int32, device=DEVICE), 16)
    table.seq_lens.copy_(narrow.seq_lens)
    graph.replay()
    assert_attention(batch, result)
