"""weighted_sum: 16-bit rows with float32 factors, against float64."""

import pytest
import torch
from torch import Tensor

from cutefce.ops.primitives.weighted_sum import _terms, weighted_sum

NARROW = [torch.bfloat16, torch.float16]
DTYPES = [torch.float64, torch.float32, *NARROW]


def exact(x: Tensor, factor: Tensor) -> Tensor:
    return x.double().t() @ factor.double()


def factors(count: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(count, device=device, dtype=torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 2049, 5000])
def test_it_is_as_accurate_as_a_product_of_float32_rows(
    rows: int, dtype: torch.dtype, device: str
) -> None:
    """Of rows with a pitch, which lie beside others; twice the same."""
    torch.manual_seed(0)
    buffer = torch.full((rows, 64), torch.nan, device=device, dtype=dtype)
    x, factor = buffer[:, :40], factors(rows, dtype, device)
    x.copy_(torch.randn(rows, 40))
    got, want = weighted_sum(x, factor), exact(x, factor)
    assert got.dtype == factor.dtype and got.shape == (40,)
    error = (x.to(factor.dtype) * factor[:, None]).sum(0).double() - want
    size = x.double().abs().t() @ factor.double().abs()
    allowed = 4 * error.norm() + torch.finfo(factor.dtype).eps * size.norm()
    assert float((got.double() - want).norm()) <= float(allowed)
    assert torch.equal(weighted_sum(x, factor), got)


@pytest.mark.parametrize("largest", [1.0, 3e38, 1e-30, 1e-38])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_no_bit_of_a_factor_is_lost(dtype: torch.dtype, largest: float, device: str) -> None:
    """The sums of one row each are the factors, of magnitudes 1 to 2^-14 of the largest."""
    torch.manual_seed(0)
    factor = torch.rand(999, device=device) * 0.5 + 0.5
    factor *= torch.exp2(-torch.arange(999.0, device=device).remainder(15)) * largest
    factor[::2].neg_()
    assert torch.equal(weighted_sum(torch.eye(999, device=device, dtype=dtype), factor), factor)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_factors_close_below_a_power_of_2(dtype: torch.dtype, device: str) -> None:
    """Those of means over a token more than a power of 2 are, whose rounding is that power."""
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
    tokens = torch.exp2(torch.arange(24.0)) + 1
    for factor in (*tokens.reciprocal(), below, -below):
        terms, scale = _terms(factor.to(device)[None], dtype)
        assert bool(terms.isfinite().all())
        assert torch.equal((terms.double().sum(0) * scale).float(), factor.to(device)[None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_of_many_magnitudes(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(61, 61, device=device).to(dtype)
    factor = 10 * factors(61, dtype, device).sign()
    factor *= torch.logspace(-30, 30, 61, device=device, dtype=factor.dtype)
    got, want = weighted_sum(x, factor), exact(x, factor)
    bound = 8 * torch.finfo(factor.dtype).eps * (x.double().abs().t() @ factor.double().abs())
    assert bool(((got.double() - want).abs() <= bound).all())
    one_each = weighted_sum(torch.eye(61, device=device, dtype=dtype), factor)
    error = (one_each - factor).abs()
    assert bool((error <= 2.0**-39 * factor.abs().amax()).all())


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_largest_rows_do_not_overflow(dtype: torch.dtype, device: str) -> None:
    """Rows of float16's largest numbers, whose factors are tiny."""
    x = torch.full((3000, 8), 65000.0, device=device).to(dtype)
    factor = torch.full((3000,), 1e-20, device=device)
    tolerance = len(x) * torch.finfo(torch.float32).eps
    got = weighted_sum(x, factor).double()
    torch.testing.assert_close(got, exact(x, factor), rtol=tolerance, atol=0)
