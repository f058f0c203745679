"""copy_pages, gather_pages, scatter_pages: bit for bit, in every layout, overlapping lists too."""

from __future__ import annotations

import random

import pytest
import torch
from kvarena.kernels import _host, reference
from kvarena.kernels.copy import copy_pages, gather_pages, scatter_pages
from kvarena.kernels.pool import LAYOUTS, KVPool
from support.attention import CUDA, DEVICE

DTYPES = (torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn)


def filled(layout: str, dtype: torch.dtype, dims: tuple[int, int] = (80, 64), page_size: int = 4) -> KVPool:
    """A pool of random bytes, the same at every call."""
    pool = KVPool(3, 8, page_size, 3, *dims, dtype=dtype, device=DEVICE, layout=layout)
    generator = torch.Generator().manual_seed(0)
    for storage in pool._storage:
        noise = torch.randint(0, 256, (storage.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        storage.view(-1).view(torch.uint8).copy_(noise)
    return pool


def content(pool: KVPool) -> list[torch.Tensor]:
    return [storage.view(-1).view(torch.uint8) for storage in pool._storage]


def same(a: KVPool, b: KVPool) -> bool:
    return all(torch.equal(x, y) for x, y in zip(content(a), content(b), strict=True))


def layer_views(pool: KVPool) -> list[torch.Tensor]:
    return [view(layer) for layer in range(pool.num_layers) for view in (pool.key, pool.value)]


LISTS = {
    "apart": ([1, 2, 3], [4, 5, 6]),
    "fan out": ([1, 1, 1], [2, 3, 4]),
    "chain": ([1, 2, 3], [2, 3, 4]),
    "cycle": ([1, 2, 3], [2, 3, 1]),
    "swap and more": ([1, 2, 7, 3], [2, 1, 8, 4]),
    "onto itself": ([1, 2], [1, 3]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("pages", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_copies_of_a_call_happen_at_once(layout: str, dtype: torch.dtype, pages: tuple) -> None:
    got, want, before = filled(layout, dtype), filled(layout, dtype), filled(layout, dtype)
    copy_pages(got.layers, *pages)
    reference.copy_pages(want.layers, *pages)
    assert same(got, want)
    old = dict(zip(pages[1], pages[0], strict=True))
    for page in range(9):
        for now, then in zip(layer_views(got), layer_views(before), strict=True):
            assert torch.equal(now[page].view(torch.uint8), then[old.get(page, page)].view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_single_layers_do_as_well(layout: str) -> None:
    got, want = filled(layout, torch.float16), filled(layout, torch.float16)
    copy_pages(layer_views(got), [1, 2, 3], [2, 1, 4])
    copy_pages(want.layers, [1, 2, 3], [2, 1, 4])
    assert same(got, want)


@pytest.mark.parametrize(("dims", "page_size"), [((5, 3), 1), ((5, 3), 2), ((64, 64), 16), ((256, 256), 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["split", "page_major"])
def test_odd_and_long_runs(layout: str, dtype: torch.dtype, dims: tuple[int, int], page_size: int) -> None:
    """Runs of 3 bytes and of more than one program's block; addresses that are no multiple of 16."""
    got, want = filled(layout, dtype, dims, page_size), filled(layout, dtype, dims, page_size)
    copy_pages(got.layers, [1, 2, 3], [2, 1, 4])
    reference.copy_pages(want.layers, [1, 2, 3], [2, 1, 4])
    assert same(got, want)
    assert torch.equal(gather_pages(got.layers, [8, 1]), reference.gather_pages(want.layers, [8, 1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_undoes_gather_on_other_pages(layout: str, dtype: torch.dtype) -> None:
    pool, other, before = filled(layout, dtype), filled(layout, dtype), filled(layout, dtype)
    packed = gather_pages(pool.layers, [5, 1, 7])
    assert packed.shape == (3, pool.bytes_per_page)
    assert torch.equal(packed, reference.gather_pages(pool.layers, [5, 1, 7]))
    assert same(pool, before)
    scatter_pages(packed, other.layers, [1, 2, 3])
    assert torch.equal(gather_pages(other.layers, [1, 2, 3]), packed)
    for page in (4, 5, 6, 7, 8, 0):
        assert torch.equal(gather_pages(other.layers, [page]), gather_pages(before.layers, [page]))


def test_random_lists_equal_the_reference() -> None:
    rng = random.Random(0)
    got, want = filled("fused", torch.float16), filled("fused", torch.float16)
    for _ in range(20):
        targets = rng.sample(range(9), rng.randrange(1, 9))
        sources = [rng.randrange(9) for _ in targets]
        copy_pages(got.layers, sources, torch.tensor(targets))
        reference.copy_pages(want.layers, sources, targets)
        assert same(got, want)


def cut(monkeypatch: pytest.MonkeyPatch, short_bytes: int) -> None:
    """Transfers in small pieces, the one that nothing overlaps of so many bytes."""
    for name, value in (("FIRST_BYTES", short_bytes), ("LAST_BYTES", short_bytes), ("STAGE_BYTES", 8 * 2**20)):
        monkeypatch.setattr(_host, name, value)
    monkeypatch.setattr(_host, "_lanes", {})  # they remember how sizes are cut


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="host and device are one without a GPU")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("num_pages", [1, 100, 3000])
@pytest.mark.parametrize("pieces", ["one", "several"])
def test_pages_go_to_host_memory_and_back(
    num_pages: int, pinned: bool, pieces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, 2**20 if pieces == "several" else 2**40)
    pool = KVPool(2, 3000, 16, 4, 64, dtype=torch.float16, device=DEVICE)
    for storage in pool._storage:
        storage.normal_()
    ids = random.Random(0).sample(range(1, 3001), num_pages)
    want = gather_pages(pool.layers, ids)
    host = torch.empty(want.shape, dtype=torch.uint8, pin_memory=pinned)
    gather_pages(pool.layers, ids, host)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(host, want.cpu())
    pool.fill_(0)
    scatter_pages(host, pool.layers, ids)
    assert torch.equal(gather_pages(pool.layers, ids), want)
    assert (pool.key(0)[0] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="streams need a CUDA device")
@pytest.mark.parametrize("own_stream", [False, True])
def test_transfers_follow_what_their_stream_did_before_and_come_before_what_it_does_next(
    own_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, 2**20)
    pool = KVPool(2, 1500, 16, 4, 64, dtype=torch.float16, device=DEVICE)
    rng, rounds = random.Random(0), range(1, 9)
    lists = [rng.sample(range(1, 1501), rng.choice([1, 40, 900, 1400])) for _ in rounds]
    hosts = [torch.empty((len(ids), pool.bytes_per_page), dtype=torch.uint8, pin_memory=True) for ids in lists]
    back = []
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        for number, ids, host in zip(rounds, lists, hosts, strict=True):  # nothing waits in here
            pool.fill_(number)
            gather_pages(pool.layers, ids, host)
            pool.fill_(0)
            scatter_pages(host, pool.layers, ids)
            back.append(pool.key(1)[:, 0, 0, 0].clone())
            scatter_pages(hosts[0], pool.layers, lists[0])
            host_again = torch.empty_like(host, device=DEVICE).copy_(host, non_blocking=True)
            host.copy_(host_again, non_blocking=True)
    torch.cuda.synchronize()
    for number, ids, host, found in zip(rounds, lists, hosts, back, strict=True):
        assert (host.view(torch.float16) == number).all()
        wanted = torch.zeros(1501).index_fill_(0, torch.tensor(ids), number)
        assert torch.equal(found.float().cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="host and device are one without a GPU")
def test_a_bad_id_after_the_first_copy_from_the_host_writes_nothing_and_harms_no_later_call() -> None:
    pool = KVPool(1, 3000, 16, 4, 64, dtype=torch.float16, device=DEVICE)
    host = torch.ones((2, pool.bytes_per_page), dtype=torch.uint8, pin_memory=True)
    with pytest.raises(ValueError, match="page ids from 0 to 3000, found 3001"):
        scatter_pages(host, pool.layers, [1, 3001])
    assert not any(tensor.any() for tensor in pool.layers)
    scatter_pages(host, pool.layers, [1, 2])
    assert torch.equal(gather_pages(pool.layers, [1, 2]).cpu(), host)


@pytest.mark.parametrize("num_pages", [1, 2, 127, 128, 129, 3000])
def test_pieces_cover_every_row_once(num_pages: int) -> None:
    pieces = _host._pieces(num_pages, 32_768, 4 * 2**20)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(num_pages))
    assert all(0 < piece.stop - piece.start <= _host.STAGE_BYTES // 32_768 for piece in pieces)


BAD_COPIES = [
    ([1, 2], [3, 3], "dst_ids: target 3 named twice"),
    ([1, 2], [3], "dst_ids: expected 2 targets, one a source, found 1"),
    ([1, 9], [3, 4], "src_ids: expected page ids from 0 to 8, found 9"),
    ([1, 2], [3, -1], "dst_ids: expected page ids from 0 to 8, found -1"),
    ([1.5], [3], "src_ids: expected whole numbers, found 1.5"),
    (torch.tensor([1.0]), [3], r"src_ids: expected integers \[n\], found torch.float32 \[1\]"),
]


@pytest.mark.parametrize(("src", "dst", "message"), BAD_COPIES, ids=lambda value: str(value)[:30])
def test_a_copy_that_is_not_well_defined_is_refused_before_anything_is_written(src, dst, message: str) -> None:
    pool, before = filled("split", torch.float16), filled("split", torch.float16)
    with pytest.raises(ValueError, match=message):
        copy_pages(pool.layers, src, dst)
    assert same(pool, before)


def test_bad_tensors_are_named() -> None:
    pool = filled("split", torch.float16)
    with pytest.raises(ValueError, match=r"pool_tensors\[1\]: expected shape \[9 pages, ...\], found \[8, 3, 960\]"):
        copy_pages([pool.layers[0], pool.layers[0][:8]], [1], [2])
    with pytest.raises(ValueError, match="pool_tensors: expected at least one tensor, found none"):
        copy_pages([], [1], [2])
    with pytest.raises(ValueError, match="page_ids: target 4 named twice"):
        scatter_pages(gather_pages(pool.layers, [1, 2]), pool.layers, [4, 4])
    with pytest.raises(ValueError, match=rf"out: expected a contiguous \[2, {pool.bytes_per_page}\]"):
        gather_pages(pool.layers, [1, 2], torch.empty((2, 7), dtype=torch.uint8, device=DEVICE))
    with pytest.raises(ValueError, match=r"packed: expected torch.uint8, found torch.int8"):
        scatter_pages(torch.empty((1, pool.bytes_per_page), dtype=torch.int8, device=DEVICE), pool.layers, [1])
