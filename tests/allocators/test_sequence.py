"""What a sequence takes for tokens: any integers that fit int32, whatever their type and byte order."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from kvarena.allocators.interface import Sequence, as_token_buffer

TOKENS = [0, 1, 256, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", ">i8", ">u8", "u4", "i2", "u1", ">i2"])
def test_every_integer_type_and_byte_order_gives_the_same_tokens(dtype: str) -> None:
    info = np.iinfo(np.dtype(dtype))
    tokens = [token for token in TOKENS if info.min <= token <= info.max]
    assert as_token_buffer(np.array(tokens, dtype=dtype)) == array("i", tokens)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, list, iter])
def test_bytes_are_ids_from_0_to_255_in_every_form(kind: Any) -> None:
    """`array` itself reads bytes four at a time."""
    assert as_token_buffer(kind(b"\x01\x00\xff\x07")).tolist() == [1, 0, 255, 7]


def test_arrays_of_another_kind_are_read_as_what_they_hold() -> None:
    torch = pytest.importorskip("torch")
    assert as_token_buffer(torch.arange(3)).tolist() == [0, 1, 2]
    assert as_token_buffer(memoryview(array("q", [5, -6]))).tolist() == [5, -6]


def test_views_of_arrays_give_what_they_show() -> None:
    whole = np.arange(12, dtype=np.int32)
    assert as_token_buffer(whole[::-2]).tolist() == whole[::-2].tolist()
    assert as_token_buffer(whole.reshape(3, 4)[:, 1]).tolist() == [1, 5, 9]


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1.0]),
        np.array([True]),
        np.array([[1]], dtype=np.int32),
        np.array(3, dtype=np.int32),
        np.array([2**31]),
        np.array([-(2**31) - 1]),
        np.array([2**32 - 1], dtype=np.uint32),
        [2**31],
        [1.5],
        ["1"],
        "1",
        None,
        memoryview(np.array([1], dtype=">i4")),
        memoryview(array("d", [1])),
        memoryview(array("q", [2**31])),
    ],
    ids=[
        "float",
        "bool",
        "2-d",
        "0-d",
        "above",
        "below",
        "uint32 above",
        "list above",
        "list float",
        "list text",
        "text",
        "none",
        "view of another byte order",
        "view of floats",
        "view above",
    ],
)
def test_what_is_no_int32_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        as_token_buffer(tokens)


def test_a_sequence_has_tokens_of_its_own() -> None:
    given = array("i", [1, 2, 3])
    seq = Sequence("a", given)
    seq.append(4)
    given[0] = 9
    assert (given.tolist(), seq.token_ids.tolist()) == ([9, 2, 3], [1, 2, 3, 4])
