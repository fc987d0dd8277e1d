"""dW's sums over chunks, in 24 and 20 bits, and their rounding."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cutefce.cute_kernels.arch.sm90 import KEPT_128, KEPT_192, LOW
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.cute_kernels.spec import GradGemmSpec
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.primitives.cute_gradients import kept_sums_kernel
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.kept_sums import joined_sums
from cutefce.ops.rows.targets import Targets
from tests.support.tiers import pairwise

WINDOW = 64


def added(
    chunks: int, tokens: int, vocab: int, dtype: torch.dtype, low_bits: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return sums of random chunks, with their low bits, and the same in float64.

    The last chunk adds a rank one.
    """
    torch.manual_seed(chunks + tokens + vocab)
    gradients, hidden, wide = PortableGradients(WINDOW), 8, torch.promote_types(dtype, torch.float)
    sums, low = torch.full((vocab, hidden), torch.nan, dtype=dtype), None
    if dtype != wide:
        low = torch.full((vocab, hidden * low_bits // 8), 0xFF, dtype=torch.uint8)
    exact = torch.zeros(vocab, hidden, dtype=torch.float64)
    for chunk in range(chunks):
        exps, scaled, h = (torch.randn(tokens, n).to(dtype) for n in (vocab, hidden, hidden))
        index, coefficient = torch.randint(vocab, (tokens,)), torch.randn(tokens)
        targets = Targets(index, vocab, LossOptions())
        target_grad = gradients.target_grad(h, coefficient.to(wide), targets)
        rank_one = None
        exact += exps.double().t() @ scaled.double()
        exact.index_add_(0, index, coefficient.to(wide).double()[:, None] * h.double())
        if chunk == chunks - 1:
            rank_one = RankOne(torch.randn(vocab).to(wide), torch.randn(hidden).to(wide))
            exact += rank_one.factor.double()[:, None] * rank_one.row.double()
        operands = exps, scaled, target_grad, 0, rank_one, None
        gradients.keep_dw(sums, low, *operands, accumulate=chunk > 0)
    return sums, low, exact


@pytest.mark.parametrize(
    ("rows", "columns"), [(512, 128), (4096, 128), (8448, 192), (131072, None)]
)
def test_sums_of_few_rows_have_tiles_of_their_own(rows: int, columns: int | None) -> None:
    """On 66 clusters, 4096 rows are 352 tiles of 192 columns in 6 waves, 512 of 128 in 8."""
    for config in (KEPT_128, KEPT_192):
        kernel = GradGemmSpec("sm_90a", "bfloat16", config, "weight", final=False, low_bits=8)
        found = kept_sums_kernel(kernel, (rows, 4096, 8192), 132)
        assert found.config.tile_n == (columns or config.tile_n)
        assert dataclasses.replace(found, config=config) == kernel
    own = dataclasses.replace(kernel, config=LOW)
    assert kept_sums_kernel(own, (rows, 4096, 512), 132) is own


def test_sums_of_few_products_have_narrow_tiles() -> None:
    """Their epilogues take longer than their MMAs."""
    kernel = GradGemmSpec("sm_90a", "bfloat16", KEPT_192, "weight", final=False, low_bits=8)
    for tokens, columns in ((512, 128), (1023, 128), (1024, 192), (8192, 192)):
        assert kept_sums_kernel(kernel, (131072, 4096, tokens), 132).config.tile_n == columns


@pairwise(
    chunks=[1, 2, 9],
    vocab=[1, 7, WINDOW, 3 * WINDOW + 5],
    kind=[(torch.bfloat16, 8), (torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)],
)
def test_chunks_add_up(chunks: int, vocab: int, kind: tuple[torch.dtype, int]) -> None:
    dtype, low_bits = kind
    sums, low, exact = added(chunks, 20, vocab, dtype, low_bits)
    factor = torch.tensor(0.37, dtype=torch.promote_types(dtype, torch.float))
    before = sums if low is None else joined_sums(sums, low)
    if low is not None:
        got = sums.clone()
        PortableGradients(WINDOW).finish_kept_dw(got, low, factor)
        assert torch.equal(got, (before * factor).to(dtype))
    # 12 or 16 significant bits after each chunk, of a sum that is not much larger than the largest
    rounding = torch.finfo(dtype).eps if low is None else 2.0 ** -(8 + low_bits)
    bound = 4 * chunks * rounding * exact.abs().max().clamp(min=20)
    assert (before.double() - exact).abs().max() <= bound


@given(chunks=st.integers(1, 40), low_bits=st.sampled_from(LOW_BITS))
def test_no_bias_grows_with_chunks(chunks: int, low_bits: int) -> None:
    """Rounding to nearest has no preferred direction."""
    sums, low, exact = added(chunks, 5, WINDOW, torch.bfloat16, low_bits)
    assert low is not None
    errors = joined_sums(sums, low).double() - exact
    spread = 2.0 ** -(8 + low_bits) * float(exact.square().mean().sqrt()) * chunks**0.5
    assert abs(float(errors.mean())) <= 5 * spread / errors.numel() ** 0.5


@pytest.mark.parametrize("low_bits", LOW_BITS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_non_finite_sums_stay_so(value: float, low_bits: int) -> None:
    gradients, vocab, hidden = PortableGradients(WINDOW), 5, 8
    sums = torch.empty(vocab, hidden, dtype=torch.bfloat16)
    low = torch.empty(vocab, hidden * low_bits // 8, dtype=torch.uint8)
    h = torch.ones(3, hidden, dtype=torch.bfloat16)
    nothing = gradients.target_grad(
        h, torch.zeros(3), Targets(torch.zeros(3, dtype=torch.int64), vocab, LossOptions())
    )
    for chunk in range(3):
        exps = torch.ones(3, vocab, dtype=torch.bfloat16)
        if chunk == 1:
            exps[1, 2] = value
        operands = exps, h, nothing, 0, None, None
        gradients.keep_dw(sums, low, *operands, accumulate=chunk > 0)
    gradients.finish_kept_dw(sums, low, torch.ones(()))
    want = torch.full((vocab, hidden), 9.0, dtype=torch.bfloat16)
    want[2] = value
    torch.testing.assert_close(sums, want, equal_nan=True, rtol=0, atol=0)
