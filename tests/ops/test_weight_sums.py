"""WeightSums: dW's sums over chunks, in 24 and 20 bits, and their rounding."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from cutefce.cute_kernels.arch.sm90 import KEPT_128, KEPT_192, LOW
from cutefce.cute_kernels.problem import LOW_BITS, Problem
from cutefce.cute_kernels.spec import GradGemmSpec
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.planner import Plan
from cutefce.ops.planning.step_memory import kept_low_bits
from cutefce.ops.primitives.cute_gradients import kept_sums_kernel
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.kept_sums import joined_sums
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies.weight_sums import WeightSums
from tests.support.kept_sums import split_sums
from tests.support.options import OptionsCase, options_case
from tests.support.reference import fixed_plan, loss_of_plan, random_case

WINDOW = 64


def added(
    chunks: int, tokens: int, vocab: int, dtype: torch.dtype, low_bits: int
) -> tuple[WeightSums, Tensor]:
    """Return sums of random chunks, and the same in float64; the last chunk adds a rank one."""
    torch.manual_seed(chunks + tokens + vocab)
    gradients, hidden, wide = PortableGradients(WINDOW), 8, torch.promote_types(dtype, torch.float)
    sums = WeightSums.empty(torch.full((vocab, hidden), torch.nan, dtype=dtype), wide, low_bits)
    sums.low.fill_(0xFF)
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
        sums.add(gradients, exps, scaled, target_grad, rank_one, None, chunk=chunk)
    return sums, exact


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


@pytest.mark.parametrize(
    ("dtype", "low_bits"),
    [(torch.bfloat16, 8), (torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)],
    ids=str,
)
@pytest.mark.parametrize("vocab", [1, 7, WINDOW, 3 * WINDOW + 5])
@pytest.mark.parametrize("chunks", [1, 2, 9])
def test_chunks_add_up(chunks: int, vocab: int, dtype: torch.dtype, low_bits: int) -> None:
    sums, exact = added(chunks, 20, vocab, dtype, low_bits)
    factor = torch.tensor(0.37, dtype=torch.promote_types(dtype, torch.float))
    kept = len(sums.low) > 0
    assert kept == (dtype == torch.bfloat16)
    before = joined_sums(*sums.kept) if kept else sums.gradient.clone()
    got = sums.finish(PortableGradients(WINDOW), factor)
    assert got.data_ptr() == sums.gradient.data_ptr()
    assert torch.equal(got, (before * factor).to(dtype))
    # 12 or 16 significant bits after each chunk, of a sum that is not much larger than the largest
    rounding = 2.0 ** -(8 + low_bits) if kept else torch.finfo(dtype).eps
    bound = 4 * chunks * rounding * exact.abs().max().clamp(min=20)
    assert (before.double() - exact).abs().max() <= bound


@settings(deadline=None)
@given(chunks=st.integers(1, 40), low_bits=st.sampled_from(LOW_BITS))
def test_no_bias_grows_with_chunks(chunks: int, low_bits: int) -> None:
    """Rounding to nearest has no preferred direction."""
    sums, exact = added(chunks, 5, WINDOW, torch.bfloat16, low_bits)
    errors = joined_sums(*sums.kept).double() - exact
    spread = 2.0 ** -(8 + low_bits) * float(exact.square().mean().sqrt()) * chunks**0.5
    assert abs(float(errors.mean())) <= 5 * spread / errors.numel() ** 0.5


@pytest.mark.parametrize("upstream", [1.0, 0.37])
@pytest.mark.parametrize(("chunk", "low_bits"), [(400, 8), (64, 8), (400, 4), (64, 4)])
def test_gradients_in_forward_are_rounded_once(
    upstream: float, chunk: int, low_bits: int, device: str
) -> None:
    # rounded before they are multiplied, they would be off by 1.4 times as much
    case = random_case(1500, 64, 3000, dtype=torch.bfloat16, device=device)
    leaves = case.h.requires_grad_(), case.w.requires_grad_()
    errors = []
    plans = ("windows", 4096, 0, 3072, 1500), ("gradients_in_forward", 4096, 0, 3072, chunk)
    for plan in plans:
        chosen = Plan(*plan, True, True, low_bits=low_bits)
        loss = loss_of_plan(*leaves, case.y, chosen, LossOptions("sum"))
        got = torch.autograd.grad(loss * upstream, leaves)
        h, w = wide = [x.detach().double().requires_grad_() for x in leaves]
        exact = torch.autograd.grad(
            cutefce.linear_cross_entropy(h, w, case.y, reduction="sum") * upstream, wide
        )
        errors.append([relative_error(a, b) for a, b in zip(got, exact, strict=True)])
    for windows, chunks in zip(*errors, strict=True):
        assert chunks <= 1.05 * windows


@pytest.mark.parametrize("low_bits", LOW_BITS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_non_finite_sums_stay_so(value: float, low_bits: int) -> None:
    gradients, vocab, hidden = PortableGradients(WINDOW), 5, 8
    memory = torch.empty(vocab, hidden, dtype=torch.bfloat16)
    sums = WeightSums.empty(memory, torch.float32, low_bits)
    h = torch.ones(3, hidden, dtype=torch.bfloat16)
    nothing = gradients.target_grad(
        h, torch.zeros(3), Targets(torch.zeros(3, dtype=torch.int64), vocab, LossOptions())
    )
    for chunk in range(3):
        exps = torch.ones(3, vocab, dtype=torch.bfloat16)
        if chunk == 1:
            exps[1, 2] = value
        sums.add(gradients, exps, h, nothing, None, None, chunk=chunk)
    got = sums.finish(gradients, torch.ones(()))
    want = torch.full((vocab, hidden), 9.0, dtype=torch.bfloat16)
    want[2] = value
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("ignored", "low_bits"), [(0.0, 4), (0.6, 8), (1.0, 4)])
@pytest.mark.parametrize("name", ["label_smoothing", "linear_bias", "softcap", "logit_scale"])
def test_options_over_chunks(name: str, ignored: float, low_bits: int, device: str) -> None:
    sizes = 300, 16, 333
    x = options_case([name], *sizes, dtype=torch.bfloat16, ignored=ignored, device=device)
    wide = options_case([name], *sizes, dtype=torch.bfloat16, ignored=ignored, device=device)
    wide_case = dataclasses.replace(wide.case, h=x.case.h.double(), w=x.case.w.double())
    options = {k: v.double() if isinstance(v, Tensor) else v for k, v in x.options.items()}
    exact = OptionsCase(wide_case, options).ours(reduction="sum")
    errors = []
    for strategy, chunk in (("windows", 300), ("gradients_in_forward", 64)):
        gradients = True, True, name == "linear_bias"
        plan = Plan(strategy, 512, 0, 512, chunk, *gradients, 333, tokens=300, low_bits=low_bits)
        with fixed_plan(plan):
            results = x.ours(reduction="sum")
        if ignored == 1:
            assert not any(result.any() for result in results)
            continue
        errors.append([relative_error(a, b) for a, b in zip(results, exact, strict=True)])
    for windows, chunks in zip(*errors, strict=True) if errors else ():
        assert chunks <= max(1.05 * windows, 1e-6)


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
    kept = torch.empty(200, hidden, dtype=torch.bfloat16)
    low = torch.empty(200, hidden * low_bits // 8, dtype=torch.uint8)
    split_sums(kept, low, values)
    got = joined_sums(kept, low)
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
    problem = Problem(chunks * 512, 8, 1000, "bfloat16", "cuda")
    low_bits = kept_low_bits(problem, chunks)
    for parts in growing(chunks, 1 << 16).values():
        exact, sums = parts.double().sum(0), torch.zeros(1, parts.shape[1])
        kept = torch.empty_like(sums, dtype=torch.bfloat16)
        low = torch.empty(1, sums.shape[1] * low_bits // 8, dtype=torch.uint8)
        for part in parts:
            split_sums(kept, low, sums + part)
            sums = joined_sums(kept, low)
        error, least = (relative_error(x, exact) for x in (sums[0].bfloat16(), exact.bfloat16()))
        assert error <= 1.05 * least


def test_an_odd_number_of_columns_shares_no_bytes() -> None:
    even, odd = (Problem(4096, hidden, 1000, "bfloat16", "cpu") for hidden in (64, 63))
    assert (kept_low_bits(even, 8), kept_low_bits(odd, 8)) == LOW_BITS
