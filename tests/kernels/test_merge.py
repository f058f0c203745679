"""merge_states: joining two halves of the keys gives attention over all of them."""

from __future__ import annotations

import pytest
import torch
from kvarena.kernels import reference
from kvarena.kernels.merge import merge_states
from support.attention import DEVICE, unit_roundoff

DTYPES = [torch.float32, torch.float16]


def parts(dtype: torch.dtype, dim: int, rows: int = 5, spread: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dim)
    out = torch.randn((2, rows, 3, dim), generator=generator).to(dtype).to(DEVICE)
    lse = (torch.randn((2, rows, 3), generator=generator) * spread).to(DEVICE)
    return [out[0], lse[0], out[1], lse[1]]


def exact(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.merge_states(*(tensor.double() for tensor in inputs))


@pytest.mark.parametrize("spread", [0.1, 5.0, 100.0])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_equals_the_oracle(dtype: torch.dtype, dim: int, spread: float) -> None:
    """Weights carry a float32 rounding of lse's size; the result one rounding of its dtype."""
    inputs = parts(dtype, dim, spread=spread)
    out, lse = merge_states(*inputs)
    want, want_lse = exact(inputs)
    size = 2.0**-24 * (8 + 4 * torch.maximum(inputs[1].abs(), inputs[3].abs()).double())
    terms = inputs[0].double().abs() + inputs[2].double().abs()
    assert ((out.double() - want).abs() <= size[..., None] * terms + unit_roundoff(dtype) * want.abs()).all()
    assert ((lse.double() - want_lse).abs() <= size).all()


def test_a_side_without_keys_carries_no_weight_whatever_it_holds() -> None:
    out_a, lse_a, out_b, lse_b = parts(torch.float32, 64)
    lse_a[0], lse_b[1] = float("-inf"), float("-inf")
    lse_a[2] = lse_b[2] = float("-inf")
    out_a[0] = out_b[1] = out_a[2] = float("nan")
    out_b[2] = float("inf")
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(lse[0], lse_b[0])
    assert torch.equal(out[1], out_a[1])
    assert (out[2] == 0).all()
    assert (lse[2] == float("-inf")).all()
    assert not out.isnan().any()


def test_the_order_of_the_sides_does_not_matter() -> None:
    out_a, lse_a, out_b, lse_b = parts(torch.float32, 64)
    one, other = merge_states(out_a, lse_a, out_b, lse_b), merge_states(out_b, lse_b, out_a, lse_a)
    assert torch.allclose(one[0], other[0], atol=1e-6)
    assert torch.equal(one[1], other[1])


def test_no_rows_is_no_work() -> None:
    out, lse = merge_states(*parts(torch.float32, 64, rows=0))
    assert out.shape == (0, 3, 64)
    assert lse.shape == (0, 3)


def test_bad_arguments_are_named() -> None:
    out_a, lse_a, out_b, lse_b = parts(torch.float32, 64)
    with pytest.raises(ValueError, match=r"out_b: expected shape \[5, 3, 64\], found \[4, 3, 64\]"):
        merge_states(out_a, lse_a, out_b[:4], lse_b)
    with pytest.raises(ValueError, match=r"lse_a: expected torch.float32, found torch.float64"):
        merge_states(out_a, lse_a.double(), out_b, lse_b)
    with pytest.raises(ValueError, match=r"out_b: expected torch.float32, found torch.float16"):
        merge_states(out_a, lse_a, out_b.half(), lse_b)
    with pytest.raises(ValueError, match="lse_b: expected a contiguous tensor"):
        merge_states(out_a, lse_a, out_b, lse_b.T.contiguous().T)
