"""Sums of gradients that are packed in 16 bits and low bits: how they are rounded."""

import pytest
import torch
from torch import Tensor

from bench.harness.accuracy import relative_error
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.ops.program.plan import SHORT_SUMS
from tests.support.packed_sums import joined_sums, split_sums


def bits_of(*patterns: int) -> Tensor:
    """Return the float32 numbers of these bits."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


SPECIAL = bits_of(
    # NaN of any sign and bits, infinities, the largest and the smallest numbers, zeros, ties
    0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x00000001, 0x80000001, 0x007FFFFF, 0x00000800, 0x00000000, 0x80000000, 0x3F800800, 0x3F801800,
)  # fmt: skip


@pytest.mark.parametrize("low_bits", LOW_BITS)
@pytest.mark.parametrize("hidden", [2, 8, 26])
def test_sums_are_rounded_to_nearest_and_ties_to_even(hidden: int, low_bits: int) -> None:
    """Against arithmetic of float64, which is exact here."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200, hidden), generator=generator)
    values = bits.to(torch.int32).view(torch.float32)
    values.view(-1)[: len(SPECIAL)] = SPECIAL
    packed = torch.empty(200, hidden, dtype=torch.bfloat16)
    low = torch.empty(200, hidden * low_bits // 8, dtype=torch.uint8)
    split_sums(packed, low, values)
    got = joined_sums(packed, low)
    exponent = values.double().frexp().exponent.clamp(min=-125)
    unit = torch.ldexp(torch.ones_like(exponent).double(), exponent - 8 - low_bits)
    want = ((values.double() / unit).round() * unit).float()
    want = torch.where(values.isinf(), values, want)
    is_nan = values.isnan()
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got.view(torch.int32)[~is_nan], want.view(torch.int32)[~is_nan])


def growing(chunks: int, numbers: int) -> dict[str, Tensor]:
    """Return parts of sums over chunks (chunks, numbers), by how the sums grow."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(chunks, numbers, generator=generator)
    return {"in all directions": normal, "in one": normal.abs() + 1}


@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 16, 24, 32, 33, 64])
def test_no_number_of_chunks_adds_a_twentieth_to_the_rounding_error(chunks: int) -> None:
    low_bits = LOW_BITS[chunks > SHORT_SUMS]
    for parts in growing(chunks, 1 << 16).values():
        exact, sums = parts.double().sum(0), torch.zeros(1, parts.shape[1])
        packed = torch.empty_like(sums, dtype=torch.bfloat16)
        low = torch.empty(1, sums.shape[1] * low_bits // 8, dtype=torch.uint8)
        for part in parts:
            split_sums(packed, low, sums + part)
            sums = joined_sums(packed, low)
        error, least = (relative_error(x, exact) for x in (sums[0].bfloat16(), exact.bfloat16()))
        assert error <= 1.05 * least
