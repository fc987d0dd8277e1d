"""Weighted sums of rows, as of hidden states for the gradient of label smoothing.

A 16-bit operand is read once, as it is: each factor becomes a sum of three numbers of its dtype,
which hold the 24 bits of a float32, and one GEMM with float32 sums multiplies all three.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.primitives.portable_gradients import matmul_into

TERMS = 3
"""Numbers that a factor is split into."""
LARGEST_EXPONENT = {torch.bfloat16: 0, torch.float16: 15}
"""The largest factor is scaled to below 2 to this.  Terms in float16 are multiples of 2^-24, which
is then 2^-39 of it or less."""
ALIGNMENT = 8
"""Rows of a 16-bit GEMM operand begin at multiples of 16 bytes."""


def weighted_sum(x: Tensor, factor: Tensor) -> Tensor:
    """Return Σ_i factor_i x_i (K,) in the dtype of sums.

    The result is deterministic.  A row that is not finite spreads, even if its factor is 0; a
    factor that is not finite makes the sum NaN or infinite.

    Args:
        x: (M, K), with rows of any pitch.
        factor: (M,) in the dtype of sums.  Errors are relative to the largest.
    """
    if x.dtype == factor.dtype:
        return torch.mv(x.t(), factor)
    if not len(x):
        return factor.new_zeros(x.shape[1])
    terms, scale = _split(factor, x.dtype)
    sums = factor.new_empty(TERMS, x.shape[1])
    matmul_into(sums, terms, x, accumulate=False)
    return (sums.double().sum(0) / scale).to(factor.dtype)


def _split(factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return terms (TERMS, M) of `dtype` that add up to factor · scale, and scale (), a power of 2.

    The scale is float64, because neither it nor its inverse is always a float32.
    """
    exponent = torch.frexp(factor.abs().amax()).exponent
    scale = torch.exp2(LARGEST_EXPONENT[dtype] - exponent.double())
    rest = factor.double() * scale
    terms = torch.empty(TERMS, round_up(len(factor), ALIGNMENT), dtype=dtype, device=factor.device)
    terms = terms[:, : len(factor)]
    for term in terms:
        term.copy_(rest)
        rest -= term
    return terms, scale
