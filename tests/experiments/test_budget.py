"""Bytes to pages: every line is counted, and both designs get the same bytes."""

from __future__ import annotations

import pytest
from kvarena.experiments.budget import (
    Tables,
    bytes_for_pages,
    fit_pool,
    format_bytes,
    parse_bytes,
    parse_share,
    table_bytes,
)
from kvarena.experiments.compare import compare
from kvarena.experiments.config import config_from_mapping
from kvarena.experiments.engine.run_config import run_config
from kvarena.experiments.models import SHAPES, ModelShape, model_shape

TINY = ModelShape(num_layers=2, num_kv_heads=3, head_dim=4, head_dim_v=8, dtype="float16")


def test_bytes_a_page_are_layers_heads_tokens_dims_and_itemsize():
    assert TINY.bytes_per_page(16) == 2 * 3 * 16 * (4 + 8) * 2
    assert SHAPES["llama-3-8b"].bytes_per_page(16) == 2 * 2**20
    assert SHAPES["smollm2-135m"].bytes_per_token == 30 * 3 * (64 + 64) * 2


@pytest.mark.parametrize("kind", ["block", "token", "contiguous"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("tokens_per_id", [1, 512])
def test_a_budget_adds_up_and_one_more_page_would_not_fit(kind, page_size, tokens_per_id):
    tables = Tables(max_rows=5, max_tokens=1003)
    pool = 200 * 2**20
    budget = fit_pool(pool, kind, page_size, TINY, tables, tokens_per_id=tokens_per_id)
    page = TINY.bytes_per_page(page_size) * tokens_per_id
    parts = ("kv_bytes", "padding_page_bytes", "table_bytes", "slot_mapping_bytes", "unused_bytes")
    assert sum(budget.lines()[part] for part in parts) == pool
    assert 0 <= budget.unused_bytes < page
    assert budget.kv_bytes == budget.num_pages * page
    assert budget.padding_page_bytes == page
    assert budget.slot_mapping_bytes == 8 * 1003
    exact = bytes_for_pages(budget.num_pages, kind, page_size, TINY, tables, tokens_per_id=tokens_per_id)
    assert fit_pool(exact.pool_bytes, kind, page_size, TINY, tables, tokens_per_id=tokens_per_id).num_pages == (
        budget.num_pages
    )


def test_tables_by_hand():
    tables = Tables(max_rows=4, max_tokens=33)
    assert table_bytes("block", 16, tables) == 2 * 4 * 3 * 4  # 3 pages of 16 for 33 tokens; rows, and those of a batch
    assert table_bytes("token", 16, tables) == (4 + 1) * 33 * 4  # req_to_token: an entry a token, and a padding row


def test_a_pool_too_small_for_a_page_names_every_line():
    with pytest.raises(ValueError, match=r"hold no page of block: .*padding page.*table.*slot_mapping"):
        fit_pool(2**20, "block", 16, SHAPES["llama-3-8b"], Tables(1, 10))


def test_a_pool_of_more_slots_than_int32_names_is_refused():
    tables = Tables(1, 10)
    most = bytes_for_pages(2**31 // 16 - 1, "block", 16, TINY, tables).pool_bytes
    assert fit_pool(most, "block", 16, TINY, tables).num_pages == 2**27 - 1
    with pytest.raises(ValueError, match=r"pool: .*at most 2\^31 slots.* found 2147483664"):
        fit_pool(most + TINY.bytes_per_page(16), "block", 16, TINY, tables)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1 B", 1),
        ("1.5 KiB", 1536),
        ("16GiB", 16 * 2**30),
        ("2 tb", 2 * 10**12),
        (" 3 MB ", 3 * 10**6),
        ("1 PiB", 2**50),
        ("2 PB", 2 * 10**15),
    ],
)
def test_sizes_read(text, number):
    assert parse_bytes(text) == number


def test_an_unknown_unit_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"a unit of B, KiB, .*PiB, .*PB, found '1 EiB'"):
        parse_bytes("1 EiB")


@pytest.mark.parametrize(
    "text", ["16", "GiB", "16 GiBs", "-1 GiB", "0 B", "1e3 MiB", "nan GiB", "", "9" * 400 + " B", "9e9 TiB"]
)
def test_bad_sizes_are_refused(text):
    with pytest.raises(ValueError, match="pool: expected"):
        parse_bytes(text)


def test_shares_read():
    assert parse_share("12.5 %") == 0.125
    assert parse_share("16 GiB") is None
    for text in ("0 %", "100.1 %", "x %", "nan %"):
        with pytest.raises(ValueError, match="pool: expected"):
            parse_share(text)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1010 * 2**20, "0.986 GiB"), (2**40, "1 TiB"), (2**44, "16 TiB")]
)
def test_sizes_for_people(number, text):
    assert format_bytes(number) == text


def test_shapes_by_name_and_numbers():
    assert model_shape({"num_layers": 1, "num_kv_heads": 1, "head_dim": 2}).bytes_per_token == 8
    with pytest.raises(ValueError, match="unknown; known: llama-2-7b"):
        model_shape("llama-4")
    with pytest.raises(ValueError, match="layers: unknown key"):
        model_shape({"layers": 1, "num_kv_heads": 1, "head_dim": 2})
    with pytest.raises(ValueError, match="head_dim"):
        model_shape({"num_layers": 1, "num_kv_heads": 1, "head_dim": 2.5})


@pytest.mark.parametrize(("kind", "page_size"), [("block", 16), ("block", 1), ("token", 16), ("token", 1)])
def test_the_line_of_the_tables_is_what_an_adapter_allocates(kind: str, page_size: int) -> None:
    torch = pytest.importorskip("torch")
    from kvarena.allocators.adapter import BlockTableAdapter, ReqToTokenAdapter
    from kvarena.allocators.config import make_allocator

    pool = make_allocator({"kind": kind, "page_size": page_size}, num_pages=4)
    make = ReqToTokenAdapter if kind == "token" else BlockTableAdapter
    adapter = make(pool, max_requests=32, max_tokens=512, max_batch_tokens=64, slots_by="torch")
    kept = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in vars(adapter).values()
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.dtype == torch.int32}  # fmt: skip
    row = 4 * 512 // (1 if kind == "token" else page_size)
    counted = table_bytes(kind, page_size, Tables(32, 512))
    assert sum(kept.values()) - counted == (0 if kind == "token" else row)  # ours has a row for padding


SHAPES_THAT_LACK = {
    "two fields": ({"num_layers": 2}, "expected a shape's num_kv_heads, head_dim, found none"),
    "all fields": ({}, "expected a shape's num_layers, num_kv_heads, head_dim, found none"),
    "one field and a wrong one": (
        {"num_layers": 0, "num_kv_heads": 1},
        "expected a shape's head_dim, found none; num_layers: .*found 0",
    ),
    "another word": ({"layers": 2, "num_kv_heads": 1, "head_dim": 8}, "num_layers, found none; layers: unknown key"),
    "a wrong type": ({"num_layers": 2, "num_kv_heads": 1, "head_dim": "x"}, "head_dim: .*found 'x'"),
    "a wrong dtype": (
        {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "f4"},
        "dtype: .*float32.*found 'f4'",
    ),
    "no text for a name": ({1: 2}, "keywords must be strings"),
}


@pytest.mark.parametrize(("shape", "said"), SHAPES_THAT_LACK.values(), ids=SHAPES_THAT_LACK)
def test_a_shape_that_lacks_fields_is_told_which_by_every_face(shape, said):
    faces = [
        lambda: model_shape(shape),
        lambda: compare("chat", model=shape, requests=3),
        lambda: config_from_mapping({"pool": {"model": shape}}),
        lambda: run_config({"pool": {"model": shape}, "allocator": {"name": "vllm"}}),
    ]
    for face in faces:
        with pytest.raises(ValueError, match=said):
            face()
