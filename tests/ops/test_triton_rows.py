"""Triton's kernel of rows against the same in plain torch.

Without a GPU, Triton's interpreter runs it, see `tests.support.plugin`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.packed_sums import Sums
from tests.support.packed_sums import joined_sums
from tests.support.tiers import rest_slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's numpy has it
pytest.importorskip("triton")
kernels = pytest.importorskip("cutefce.ops.primitives.triton_rows")

SHAPES = [(5, 40), (3, 1100)]
PORTABLE = PortableGradients()
shapes = pytest.mark.parametrize("shape", rest_slow(SHAPES), ids=str)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def packed(sums: Tensor, low_bits: int) -> Sums:
    """Return the sums (R, D) as plain torch packs them."""
    rows, columns = sums.shape
    words = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    low = torch.empty(rows, columns * low_bits // 8, dtype=torch.uint8, device=DEVICE)
    PORTABLE.combine(Sums(words, low), sums)
    return Sums(words, low)


def low_of(sums: Sums) -> Tensor:
    assert sums.low is not None
    return sums.low


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
def test_rows_with_factors_and_rows_of_a_table(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    x, table, row = random(*shape), random(7, columns).to(DTYPE), random(columns)
    scale, b, factor = random(3, rows).unbind()
    for y in (scale, b, factor):
        y[1] = 0
    x[1] = torch.nan
    index = torch.randint(7, (rows,), device=DEVICE)
    want = scale[:, None] * x + b[:, None] * table[index] + factor[:, None] * row
    want[1] = 0
    out = torch.empty(shape, dtype=dtype, device=DEVICE)
    given: dict[str, Any] = {"table": table, "index": index, "coefficient": b}
    kernels.combine(Sums(out), x, scale=scale, rank_one=RankOne(factor, row), **given)
    torch.testing.assert_close(out, want.to(dtype), rtol=2e-3, atol=2e-3)
    kernels.combine(Sums(x), x, scale=scale, last=torch.tensor(0.5, device=DEVICE))
    assert x[1].isnan().all()


@shapes
@pytest.mark.parametrize("low_bits", [8, 4])
def test_sums_are_packed_as_plain_torch_packs_them(shape: tuple[int, int], low_bits: int) -> None:
    torch.manual_seed(0)
    sums, scale = random(*shape), random(shape[0])
    sums[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    first, second = packed(torch.zeros(shape, device=DEVICE), low_bits), packed(sums, low_bits)
    kernels.combine(first, sums)
    assert torch.equal(first.upper.view(torch.int16), second.upper.view(torch.int16))
    assert torch.equal(low_of(first), low_of(second))
    more = random(*shape)
    kernels.combine(first, more, joined=first)
    PORTABLE.combine(second, more, joined=second)
    assert torch.equal(first.upper.view(torch.int16), second.upper.view(torch.int16))
    assert torch.equal(low_of(first), low_of(second))
    if DEVICE == "cuda":  # the interpreter's numpy has no bfloat16
        want = joined_sums(second.upper, low_of(second)) * scale[:, None]
        kernels.combine(Sums(first.upper), joined=first, scale=scale)
        PORTABLE.combine(Sums(second.upper), joined=second, scale=scale)
        torch.testing.assert_close(first.upper, want.to(torch.bfloat16), equal_nan=True)
        assert torch.equal(first.upper.view(torch.int16), second.upper.view(torch.int16))
