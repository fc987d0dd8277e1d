"""The PTX of Hopper's gradients and row kernels, emulated, against float64.

`tests/emulation/test_project_exp.py` has the projection of both architectures.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("cutlass")

import cutefce
from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.arch.sm90 import PACKED_192
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs, PortableTiles
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS, LOWEST_LOGIT
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.cute_kernels.spec.rowwise import (
    OUT_AND_SUMS,
    MoveRowsSpec,
    PackedSumsSpec,
    PutSoftSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    SelectRowsSpec,
    SoftLogitsSpec,
    SortTargetsSpec,
)
from cutefce.cute_kernels.variant import LogitTransform
from cutefce.cute_kernels.workspace import (
    Coefficient,
    Move,
    Semaphore,
    Stat,
)
from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.primitives.select_rows import as_bits
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.loss_parts import LossParts
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.scaling import scaling_of
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from tests.emulation import core
from tests.emulation.configs import (
    COOPERATIVE,
    GRADIENTS,
    HOPPER,
    PINGPONG,
    SHARED,
    TALL,
    kernels_of,
)
from tests.emulation.hopper import run
from tests.support.backends import PTX
from tests.support.layouts import Layout
from tests.support.packed_sums import joined_sums, split_sums
from tests.support.reference import assert_as_accurate, by_layout, random_case
from tests.support.tiers import rest_slow

ARCH = HOPPER

# Gradients


class Product:
    """Operands of a gradient GEMM; exponentials (N, V) are columns of a wider matrix."""

    def __init__(
        self,
        tokens: int,
        hidden: int,
        vocab: int,
        dtype: torch.dtype,
        count: int | None = None,
        entries: int = 1,
    ) -> None:
        """Draw operands; those of tokens from `count` on are 0, as far as a GEMM reads them.

        Each token has some `entries`, whose targets may be the same.
        """
        generator = torch.Generator().manual_seed(0)
        wide = torch.rand(tokens, vocab + 24 + -vocab % 8, generator=generator).to(dtype)
        self.e = wide[:, 16 : 16 + vocab]
        self.w, self.h = (
            torch.randn(rows, hidden, generator=generator).to(dtype) for rows in (vocab, tokens)
        )
        self.y = torch.randint(-vocab, vocab, (tokens * entries,), generator=generator).clamp(-1)
        self.y[: tokens // 3] = vocab // 2
        if count is not None:
            end = max(1, ceil_div(count, TILE_K)) * TILE_K
            for rows in (wide, self.h):
                rows[count:], rows[end:] = 0, torch.nan
            self.y[count:] = -1

    def csr(self) -> tuple[torch.Tensor, ...]:
        """Return order, offsets, coefficients and h; tokens without a target come last."""
        vocab = len(self.w)
        target, order = torch.where(self.y < 0, vocab, self.y).sort(stable=True)
        offsets = torch.searchsorted(target, torch.arange(vocab + 1), out_int32=True)
        generator = torch.Generator().manual_seed(1)
        coefficient = torch.randn(len(self.y), generator=generator)
        return order % len(self.h), offsets, coefficient, self.h

    def target_terms(self) -> torch.Tensor:
        """Return Σ c_i h_i of the tokens of each target, in float64."""
        order, offsets, coefficient, h = self.csr()
        terms = coefficient.double()[:, None] * h[order].double()
        before = F.pad(terms.cumsum(0), (0, 0, 1, 0))[offsets.long()]
        return before.diff(dim=0)


PRODUCTS = {
    "many K tiles in splits": ((150, 136, 330), 3, 0),
    "many K tiles": ((150, 136, 330), 1, 1),
    "splits that grow": ((100, 64, 1400), 3, 0),
    "one row": ((1, 64, 200), 1, 1),
    "few columns": ((130, 8, 17), 3, 0),
}
"""Sizes, splits of K, and whether what was there is overwritten."""


def check_sums(
    kernel: GradGemmSpec | None,
    case: Product,
    splits: int,
    overwrite: int,
    count: int | None = None,
    **how: Any,
) -> None:
    """Compare sums; only `count` rows of tokens count, if given, and the others are 0."""
    assert kernel is not None
    a, b = (case.e, case.w) if kernel.wrt == "hidden" else (case.e.t(), case.h)
    clusters, splits = 4, min(splits, ceil_div(a.shape[1], TILE_K))
    before = torch.randn(a.shape[0], b.shape[1])
    out = before.clone()
    semaphores = torch.zeros(kernel.semaphore_count(clusters), dtype=torch.int32)
    rows = torch.tensor([count or 0], dtype=torch.int32), int(count is not None)
    operands = a, b.t(), out, None, None, semaphores, *rows, clusters, splits, overwrite
    run(kernel, *operands, **how)
    every, tokens = slice(None), slice(count)
    counted, inner = (tokens, every) if kernel.wrt == "hidden" else (every, tokens)
    want = a[:, inner].double() @ b[inner].double() + (0 if overwrite else before)
    torch.testing.assert_close(out[counted], want[counted].float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("product", rest_slow(PRODUCTS))
@pytest.mark.parametrize("config", rest_slow(GRADIENTS))
def test_sums_of_gradients(
    config: GemmConfig, product: tuple[tuple[int, int, int], int, int]
) -> None:
    shape, splits, overwrite = product
    case, kernels = Product(*shape, torch.bfloat16), kernels_of(config)
    check_sums(kernels.grad_hidden, case, splits, overwrite)


@pytest.mark.parametrize("seed", rest_slow(range(3)))
@pytest.mark.parametrize("config", rest_slow([COOPERATIVE, PINGPONG]))
def test_every_order_of_splits(config: GemmConfig, seed: int) -> None:
    """The first one overwrites what was there, others are added to it."""
    case = Product(150, 136, 330, torch.bfloat16)
    check_sums(kernels_of(config).grad_hidden, case, splits=3, overwrite=1, seed=seed)


def test_splits_run_beside_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits wait for later clusters, which others' kernels must not keep from running."""
    monkeypatch.setattr(core, "RESIDENT_BLOCKS", COOPERATIVE.cluster)
    case = Product(150, 136, 330, torch.bfloat16)
    check_sums(kernels_of(COOPERATIVE).grad_hidden, case, splits=3, overwrite=1)


FINAL = {
    "several targets a token": ("bfloat16", False, 3),
    "float16, a matrix of rank one": ("float16", True, 1),
}


@pytest.mark.parametrize("given", rest_slow(FINAL))
@pytest.mark.parametrize("config", rest_slow([PINGPONG, SHARED]))
def test_final_gradients(config: GemmConfig, given: tuple[str, bool, int]) -> None:
    dtype, with_rank_one, entries = given
    case = Product(150, 136, 200, getattr(torch, dtype), entries=entries)
    kernel = kernels_of(config, dtype=dtype).grad_weight
    assert kernel is not None
    kernel = dataclasses.replace(kernel, rank_one=with_rank_one)
    factor, row = torch.randn(200), torch.randn(136)
    out, targets = torch.empty(200, 136, dtype=case.h.dtype), (*case.csr(), torch.tensor([0.25]))
    rank_one = (factor, row) if with_rank_one else None
    semaphores = torch.zeros(1, dtype=torch.int32)
    operands = case.e.t(), case.h.t(), out, targets, rank_one, semaphores
    run(kernel, *operands, semaphores, 0, 2, None, None)
    want = case.e.double().t() @ case.h.double() + case.target_terms()
    if with_rank_one:
        want += factor.double()[:, None] * row.double()
    rounding = 2**-8 if dtype == "bfloat16" else 2**-11
    torch.testing.assert_close(out.double(), 0.25 * want, rtol=1.01 * rounding, atol=1e-5)


# Row-wise kernels


@pytest.mark.parametrize("hidden", rest_slow([600, 8, 1032, 9000]))
def test_target_logits(hidden: int) -> None:
    h, w = (torch.randn(rows, hidden).bfloat16() for rows in (21, 30))
    y = torch.randperm(30)[:21]
    y[3], y[4], y[5], h[6, 1], h[7], w[y[7]] = -100, 30, -1, torch.nan, 1e38, -1e38
    h[8], w[y[8]] = 1e38, 1e38  # +inf is the mark of an ignored token
    scale, bias = torch.rand(21), torch.randn(30)
    z = (h.double() * w[y.clamp(0, 29)].double()).sum(1)
    every = (None, (scale, bias, None), (None, bias, None), (scale, None, 0.25))
    for operands in every if hidden == 600 else every[:1]:
        kernel = kernels_of(PINGPONG).target_logit
        logit, zeros = torch.zeros(21), torch.full((40,), 7, dtype=torch.int32)
        want = z
        if operands is not None:
            given = LogitTransform(*(operand is not None for operand in operands))
            kernel = dataclasses.replace(kernel, transform=given)
            own_bias = 0 if operands[1] is None else bias.double()[y.clamp(0, 29)]
            want = z + own_bias if operands[2] is None else torch.tanh(operands[2] * (z + own_bias))
            want = want if operands[0] is None else scale.double() * want
        run(kernel, h, w, y, logit, zeros, operands, y, -100, 0, None)
        want = want.clamp(min=LOWEST_LOGIT)
        want[3], want[4:6] = torch.inf, torch.nan
        if operands is None or operands[2] is None:
            want[8] = torch.nan
        torch.testing.assert_close(logit.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not zeros.any()


@pytest.mark.parametrize("rows", rest_slow([45, 5]))
def test_reduced_partials(rows: int) -> None:
    """One block, and several, of which the last to finish adds the losses."""
    kernel = kernels_of(PINGPONG).reduce_partials
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn(rows, generator=generator)
    partials = 4 * torch.randn(rows, 70, generator=generator)
    target = torch.zeros(rows, dtype=torch.int64)
    target[1], logit[1], partials[1] = -100, torch.inf, torch.nan
    partials[rows - 1, 66] = 300.0
    stats, loss = torch.zeros(4, rows), torch.zeros(())
    semaphores = torch.zeros(Semaphore.REPAIR_FLAGS + 1, dtype=torch.int32)
    operands = partials, logit, target, stats, loss, semaphores, -100, 1
    run(kernel, *operands)
    assert semaphores[Semaphore.REPAIR_ROWS] == rows
    others = (partials.double() * math.log(2)).logsumexp(1)
    want = F.softplus(others)
    want[1] = 0.0
    torch.testing.assert_close(stats[Stat.LOSS].double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss.double(), want.sum() / (rows - 1), rtol=1e-6, atol=1e-6)
    assert stats[:, 1].tolist() == [torch.inf, 0.0, 1.0, 0.0], "those of an ignored row"
    far = torch.arange(rows) == rows - 1
    assert torch.equal(stats[Stat.REFERENCE, ~far], logit[~far])
    assert semaphores[Semaphore.REPAIR_FLAGS :].tolist() == [1]
    blocks = (rows + 7) // 8
    assert semaphores[Semaphore.DONE_COUNTER] == (blocks if blocks > 1 else 0)


ROW_KERNELS = {
    "last step of dX": ScaleAddRowsSpec(ARCH.name, "bfloat16", "float32", "bfloat16"),
    "with a matrix of rank one": ScaleAddRowsSpec(
        ARCH.name, "float32", "float32", "float16", rank_one=True
    ),
}


# only dX returns to the order of a call
ROW_LAUNCHES = {
    f"{name}, {place}": (kernel, scatters)
    for name, kernel in ROW_KERNELS.items()
    for scatters, place in enumerate(("in place", "scattered"))
}


@pytest.mark.parametrize("hidden", [8, 2064])
@pytest.mark.parametrize("given", rest_slow(ROW_LAUNCHES, default=2))
def test_scaled_rows(given: tuple[ScaleAddRowsSpec, int], hidden: int) -> None:
    """Vectors that are fewer than a block's threads, and more; an ignored row may hold anything."""
    kernel, scatters = given
    out, x = (torch.randn(5, hidden).to(getattr(torch, name)) for name in (kernel.out, kernel.x))
    scale, gather_scale, factor, row = *torch.randn(3, 5), torch.randn(hidden)
    index, term = torch.tensor([7, 0, 3, -(1 << 62), 2]), None
    scale[2] = gather_scale[2] = factor[2] = 0.0
    table = torch.randn(5, hidden).to(getattr(torch, kernel.table))
    want = scale.double()[:, None] * x.double()
    want += gather_scale.double()[:, None] * table[index.clamp(0, 4)].double()
    want[2], x[2], table[3] = 0.0, torch.nan, torch.nan
    if kernel.rank_one:
        term = factor, row
        want += factor.double()[:, None] * row.double()
    order = torch.tensor([4, 1, 0, 3, 2])
    run(kernel, out, x, table, scale, gather_scale, index, term, order, scatters)
    if scatters:
        out = out[order]
    rounding = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}[kernel.out]
    torch.testing.assert_close(out.double(), want, rtol=1.01 * rounding, atol=1e-5)


@pytest.mark.parametrize("scatters", rest_slow({"scattered": 1, "in place": 0}))
@pytest.mark.parametrize("rank_one", rest_slow({"plain": False, "with a matrix of rank one": True}))
@pytest.mark.parametrize("size", rest_slow([(2064, 4), (8, 4), (2064, 8)]))
def test_packed_sums(size: tuple[int, int], rank_one: bool, scatters: int) -> None:
    """Ignored rows, targets beyond the vocabulary, and sums of all sizes."""
    hidden, low_bits = size
    kernels, generator = kernels_of(PINGPONG), torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (7, hidden), generator=generator)
    sums, table = bits.to(torch.int32).view(torch.float32), torch.randn(4, hidden).bfloat16()
    sums[:4] = torch.randn(4, hidden)
    sums[1] = torch.nan
    target, others = torch.tensor([3, -100, 0, 7, -1, 2, 1]), 100 * torch.rand(7)
    stats = RowStats(torch.stack([torch.zeros(7), others, others + 1, torch.zeros(7)]))
    targets = Targets(target, 4, LossOptions())
    packed, columns = torch.empty(7, hidden).bfloat16(), hidden * low_bits // 8
    low = torch.empty(7, round_up(columns, 16), dtype=torch.uint8)[:, :columns]
    want, want_low = torch.empty_like(packed), torch.empty(7, columns, dtype=torch.uint8)
    order = torch.tensor([5, 3, 6, 0, 2, 1, 4])
    places = order if scatters else torch.arange(7)
    pack = PackedSumsSpec(kernels.arch, kernels.dtype, low_bits, "pack")
    run(pack, packed, low, sums, table, target, others, -100, order, scatters)
    PortableGradients().pack_sums(Sums(want, want_low), sums, table, targets, stats)
    is_nan = joined_sums(want, want_low).isnan()
    assert torch.equal(joined_sums(packed, low)[places].isnan(), is_nan)
    pair = joined_sums(packed, low)[places], joined_sums(want, want_low)
    assert torch.equal(*(sums[~is_nan].view(torch.int32) for sums in pair))
    scale, target_scale, factor, row = *torch.randn(3, 7), torch.randn(hidden)
    scale[5] = target_scale[5] = factor[5] = 0.0
    term = RankOne(factor, row) if rank_one else None
    kernel = dataclasses.replace(pack, step="finish", rank_one=rank_one)
    more = table, target, scale, target_scale, (factor, row) if term else None, order
    # of sums in the order of the targets
    out = torch.full_like(packed, torch.nan)
    run(kernel, out, want.clone(), want_low, *more, scatters)
    run(kernel, packed, packed, low, *more, OUT_AND_SUMS if scatters else 0)
    coefficients = RowCoefficients(scale, target_scale)
    PortableGradients().finish_dx(
        Sums(want), Sums(want, want_low), table, targets, coefficients, term
    )
    for dx in (out, packed):
        torch.testing.assert_close(dx[places], want, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("low_bits", rest_slow(LOW_BITS))
def test_rows_of_packed_sums_are_scaled(low_bits: int) -> None:
    sums, scale = torch.randn(5, 72), torch.randn(5)
    kernel = PackedSumsSpec(HOPPER.name, "bfloat16", low_bits, "scale")
    scale[2] = torch.nan
    kept, columns = torch.empty(5, 72).bfloat16(), 72 * low_bits // 8
    low = torch.empty(5, round_up(columns, 16), dtype=torch.uint8)[:, :columns]
    split_sums(kept, low, sums)
    want, want_low = kept.clone(), low.contiguous()
    run(kernel, kept, low, scale)
    PortableGradients().scale_packed_rows(Sums(want, want_low), scale)
    got, expected = joined_sums(kept, low), joined_sums(want, want_low)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0, equal_nan=True)


TARGETS = {
    "several blocks of classes": (300, 2100, 0),
    "several blocks of tokens": (2100, 1500, -100),
    "few": (90, 40, 0),
    "one": (1, 1, 0),
    "a multiple of a block": (64, 1024, 7),
}


@pytest.mark.parametrize("selects", rest_slow({"counted rows": True, "all rows": False}))
@pytest.mark.parametrize("skewed", rest_slow({"skewed": True, "even": False}))
@pytest.mark.parametrize("sizes", rest_slow(TARGETS, default=2))
def test_sorted_targets(sizes: tuple[int, int, int], skewed: bool, selects: bool) -> None:
    """Some targets are ignored or no class, or most of them are one class."""
    tokens, vocab, ignored = sizes
    target = torch.randint(-3, vocab + 3, (tokens,))
    if skewed:
        target = torch.where(torch.rand(tokens) < 0.9, vocab - 1, target)
    target[torch.rand(tokens) < 0.2] = ignored
    target[: tokens // 8] += 1 << 32
    coefficient, rows = torch.randn(tokens), torch.randperm(tokens)
    order, in_order = torch.full((tokens,), -7), torch.full((tokens,), torch.nan)
    offsets = torch.full((vocab + 1,), -7, dtype=torch.int32)
    arguments = target, coefficient, rows, order, offsets, in_order, ignored, int(selects)
    run(SortTargetsSpec(HOPPER.name), *arguments)
    inside = (target != ignored) & (target >= 0) & (target < vocab)
    key, listed = torch.where(inside, target, vocab).sort(stable=True)
    listed = listed[: int(inside.sum())]
    assert torch.equal(offsets.long(), torch.searchsorted(key, torch.arange(vocab + 1)))
    assert torch.equal(order[: len(listed)], rows[listed] if selects else listed)
    assert torch.equal(in_order[: len(listed)], coefficient[listed])
    assert (order[len(listed) :] == -7).all(), "nothing is written behind the last list"


@pytest.mark.parametrize("mean", [True, False], ids=["mean of counted rows", "sum of all rows"])
@pytest.mark.parametrize("uniform", [True, False], ids=["one gradient", "one a token"])
@pytest.mark.parametrize("dtype", rest_slow(["float16", "bfloat16"]))
def test_row_coefficients(dtype: str, uniform: bool, mean: bool) -> None:
    tokens, vocab, ignored = 600, 9, 5
    kernels = kernels_of(PINGPONG, dtype=dtype)
    target = torch.randint(-2, vocab + 2, (tokens,))
    active = target != ignored
    others, reference = 10 ** (6 * torch.rand(tokens) - 3), torch.randn(tokens)
    stats = torch.stack([reference, others, 1 + others, torch.randn(tokens)])
    stats[:, ~active] = torch.tensor([torch.inf, torch.nan, 1.0, 0.0])[:, None]
    stats[1, ~active] = 0.0
    upstream = torch.randn(1 if uniform else tokens)
    count = active.sum().view(1).int()
    options, tensors = LossOptions("mean" if mean else "sum", ignored), TensorOptions()
    for in_reference in (False, True)[: 1 + uniform]:
        kernel = RowCoefficientsSpec(kernels.arch, in_reference, narrow=dtype == "float16")
        got, grad_scale = torch.full((kernel.planes, tokens), torch.nan), torch.zeros(())
        zeros = torch.full((5000,), 7, dtype=torch.int32)
        operands = stats, target, upstream, got, grad_scale, zeros
        numbers = count if mean else zeros, int(mean), ignored, int(mean)
        run(kernel, *operands, *numbers)
        dtypes, in_reference = getattr(torch, dtype), kernel.in_reference
        targets = Targets(target, vocab, options, tensors, LossParts)
        exact = RowStats(stats.double()), (upstream[0] if uniform else upstream).double()
        want = scaling_of(dtypes, targets, *exact, in_reference=in_reference)
        assert not zeros.any()
        expected = {
            Coefficient.DX_SCALE: want.dx.scale,
            Coefficient.DX_TARGET: want.dx.target,
        }
        if kernel.in_reference or kernel.narrow:
            expected[Coefficient.DW_TARGET] = want.target
            if want.row_scale is not None:
                expected[Coefficient.DW_SCALE] = want.row_scale
        if kernel.in_reference:
            expected[Coefficient.REFERENCE] = want.reference
        for plane, values in expected.items():
            # the two terms at the target may cancel
            size = float(values[values.isfinite()].abs().max())
            torch.testing.assert_close(got[plane].double(), values, rtol=1e-6, atol=1e-6 * size)
        torch.testing.assert_close(grad_scale.double(), want.grad_scale.double())


# Rows that count


@pytest.mark.parametrize(
    "given", rest_slow([(0, 0), (130, 1), (0, 1), (1, 1), (64, 0), (130, 0)], default=2)
)
@pytest.mark.parametrize("config", rest_slow(GRADIENTS))
def test_counted_rows_of_gradients(config: GemmConfig, given: tuple[int, int]) -> None:
    count, overwrite = given
    kernels, case = kernels_of(config), Product(150, 136, 330, torch.bfloat16, count)
    check_sums(kernels.grad_hidden, case, 2, overwrite, count)


@pytest.mark.parametrize("count", rest_slow([0, 97, 1, 64], default=2))
@pytest.mark.parametrize("config", rest_slow([PINGPONG, TALL]))
def test_counted_rows_of_final_gradients(config: GemmConfig, count: int) -> None:
    """MMAs beyond the last token are skipped; without any token, accumulators are 0."""
    case, kernel = Product(150, 136, 330, torch.bfloat16, count), kernels_of(config).grad_weight
    assert kernel is not None
    out, terms = torch.full((330, 136), torch.nan).bfloat16(), (*case.csr(), torch.tensor([0.25]))
    rows = torch.zeros(1, dtype=torch.int32), torch.tensor([count], dtype=torch.int32), 1
    run(kernel, case.e.t(), case.h.t(), out, terms, None, *rows, 2, None, None)
    want = case.e[:count].double().t() @ case.h[:count].double() + case.target_terms()
    torch.testing.assert_close(out.double(), 0.25 * want, rtol=1.01 * 2**-8, atol=1e-5)


@pytest.mark.parametrize("count", [0, 150])
@pytest.mark.parametrize("config", rest_slow(GRADIENTS))
def test_launches_that_may_skip(config: GemmConfig, count: int) -> None:
    """They write nothing of no rows, and all of all rows."""
    product = Product(150, 136, 330, torch.bfloat16)
    kernel = kernels_of(config).grad_hidden_again
    assert kernel is not None
    before = torch.randn(150, 136)
    out, semaphores = before.clone(), torch.zeros(kernel.semaphore_count(4), dtype=torch.int32)
    rows = torch.tensor([count], dtype=torch.int32), 2
    run(kernel, product.e, product.w.t(), out, None, None, semaphores, *rows, 4, 1, 1)
    want = product.e.double() @ product.w.double() if count else before.double()
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ignored", [0.4, 0.0, 1.0])
@pytest.mark.parametrize("size", rest_slow([(700, 256), (1, 1), (2100, 1024)]))
def test_selected_rows(size: tuple[int, int], ignored: float) -> None:
    tokens, chunk = size
    y = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(0))
    counts_of_all = torch.rand(tokens, generator=torch.Generator().manual_seed(1)) >= ignored
    y[~counts_of_all] = -100
    order, selected = (torch.full_like(y, -7) for _ in range(2))
    counts = torch.zeros(ceil_div(tokens, chunk), dtype=torch.int32)
    run(SelectRowsSpec("sm_90a"), y, order, selected, counts, chunk, -100)
    assert torch.equal(order, (~counts_of_all).long().argsort(stable=True))
    assert torch.equal(selected, y[order])
    firsts, count = torch.arange(0, tokens, chunk), int(counts_of_all.sum())
    assert torch.equal(counts.long(), (count - firsts).clamp(0, chunk))


@pytest.mark.slow
@pytest.mark.parametrize("count", rest_slow([70, 0, 1, 64]))
def test_moved_rows(count: int) -> None:
    move, tokens, hidden = MoveRowsSpec(HOPPER.name), 90, 264
    scaled = MoveRowsSpec(HOPPER.name, "bfloat16")
    x, scale = torch.randn(tokens, hidden).bfloat16(), torch.randn(tokens)
    order, counter = torch.randperm(tokens), torch.tensor([count], dtype=torch.int32)
    x[order[count:]] = torch.nan
    for kernel, factor in ((move, None), (scaled, scale)):
        out = torch.full_like(x, 7)
        run(kernel, out, x, order, factor, counter, Move.GATHER)
        want = x[order[:count]].float()
        want = want if factor is None else want * factor[:count, None]
        assert torch.equal(out[:count], want.bfloat16())
        assert not out[count:].any()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = x.to(dtype)
        out = torch.full_like(rows, torch.nan)
        own = order, None, counter, Move.SCATTER
        run(move, as_bits(out), as_bits(rows), *own)
        assert torch.equal(out[order[:count]].nan_to_num(), rows[:count].nan_to_num())
        assert not out[order[count:]].any()
    out = torch.full_like(x, torch.nan)
    run(dataclasses.replace(scaled, orders=False), out, x, None, scale, None, Move.GATHER)
    assert torch.equal(out.nan_to_num(), (x.float() * scale[:, None]).bfloat16().nan_to_num())
    before = x.clone()
    run(move, x, x, order, None, counter, Move.CLEAR)
    assert not x[count:].any()
    assert torch.equal(x[:count].nan_to_num(), before[:count].nan_to_num())


def test_target_logits_of_selected_rows() -> None:
    h, w = torch.randn(40, 72).bfloat16(), torch.randn(30, 72).bfloat16()
    order, y = torch.randperm(40)[:21], torch.randint(30, (21,))
    y[15:] = -100
    h[order[15:]] = torch.nan
    logit, zeros = torch.zeros(21), torch.full((40,), 7, dtype=torch.int32)
    row, products = torch.randn(72), torch.full((21,), 7.0)
    kernel = dataclasses.replace(kernels_of(PINGPONG).target_logit, class_row=True)
    run(kernel, h, w, y, logit, zeros, None, order, -100, 1, (row, products))
    want = (h[order].float() * w[y.clamp(0)].float()).sum(1)
    torch.testing.assert_close(logit[:15], want[:15], rtol=1e-5, atol=1e-5)
    assert (logit[15:] == torch.inf).all()
    torch.testing.assert_close(products[:15], h[order[:15]].float() @ row, rtol=1e-5, atol=1e-5)
    assert not products[15:].any()


@pytest.mark.parametrize("size", rest_slow([(7, 264), (1, 8), (70, 600)]))
def test_logits_of_soft_targets(size: tuple[int, int]) -> None:
    classes, hidden = size
    h, w = torch.randn(9, hidden).bfloat16(), torch.randn(30, hidden).bfloat16()
    index, b = torch.randint(30, (5, classes)), torch.rand(5, classes)
    order, index[1, 0], b[1, 0] = torch.randperm(9)[:5], 99, 0.0
    b[2, classes // 2 :], b[4] = 0, 0
    h[order[4]] = torch.nan
    for selects in (0, 1):
        logits = torch.full((5, classes), 7.0)
        kernel = SoftLogitsSpec("sm_90a", "bfloat16")
        run(kernel, h, w, index, b, logits, order, selects)
        rows = h[order] if selects else h[:5]
        want = (rows.double()[:, None] * w[index.clamp(max=29)].double()).sum(2)
        counts = b != 0
        limits: Any = {"rtol": 1e-5, "atol": 1e-4, "equal_nan": True}
        torch.testing.assert_close(logits[counts].double(), want[counts], **limits)


@pytest.mark.parametrize("first", [0, 40])
def test_entries_of_soft_targets(first: int) -> None:
    """Those of other windows, and those without a coefficient, are not written."""
    index = torch.rand(19, 100).topk(70, 1).indices
    b, entries = torch.rand(19, 70), torch.randn(19, 70)
    b[torch.rand(19, 70) < 0.3] = 0
    kernel = PutSoftSpec("sm_90a", "bfloat16")
    memory = torch.full((19, 64), 7.0).bfloat16()
    all_columns = torch.full((19, 100), 7.0)
    for clears in (0, 1):
        run(kernel, memory[:, :50], index, b, entries, first, clears)
        written = all_columns.scatter(
            1, index, torch.where(b == 0, 7, 0 * b if clears else entries)
        )
        assert torch.equal(memory[:, :50], written[:, first : first + 50].bfloat16())
        assert (memory[:, 50:] == 7).all()


@pytest.mark.parametrize("window", rest_slow([(8200, 40), (50, 0), (16387, 0)]))
def test_scaled_exponentials_with_entries_of_soft_targets(window: tuple[int, int]) -> None:
    columns, first = window
    index = torch.rand(5, first + columns).topk(37, 1).indices
    b, entries, scale = torch.rand(5, 37), torch.randn(5, 37), torch.randn(5)
    b[torch.rand(5, 37) < 0.3] = 0
    memory = torch.rand(5, columns + 22 & ~7).bfloat16()
    exps, before = memory[:, :columns], memory.clone()
    lead, of_lead = torch.tensor([first, -100, first + columns - 1, 99999, 3]), torch.randn(5)
    index[b != 0] = torch.where(index == lead[:, None], 0, index)[b != 0]
    b[(index == 0) & (first == 0)] = 0
    given = exps, index, b, entries, lead, of_lead, scale, first
    run(PutSoftSpec("sm_90a", "bfloat16", scales=True), *given)
    others = before[:, :columns] * scale[:, None]
    want = torch.cat([torch.zeros(5, first), others], 1)
    row, place = (b != 0).nonzero(as_tuple=True)
    want[row, index[row, place]] = (entries * scale[:, None])[row, place]
    inside = (lead >= first) & (lead < first + columns)
    want[inside, lead[inside]] = of_lead[inside]
    assert torch.equal(exps, want[:, first:].bfloat16())
    assert torch.equal(memory[:, columns:], before[:, columns:])


# Whole calls; tests/ops runs those of every layout and option

EMULATED = PTX["emulated sm_90a"]


OF_EVERY_KIND = Layout(aliased=64, kept=64)
"""Columns in the memory of dW, in their own, and computed again."""


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4], ids=["float32 sums of dX", "20 bits"])
@pytest.mark.parametrize("config", [COOPERATIVE, TALL], ids=str)
def test_windows_of_every_kind(
    config: GemmConfig,
    bits: int | None,
    small_tiles: PortableTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two kernels of dX, for few columns and for many, and with tokens of far references."""
    monkeypatch.setattr(KernelConfigs, "SHORT", 70)
    configs = KernelConfigs(config, config, config, TALL, PACKED_192)
    EMULATED.serve(monkeypatch, small_tiles, configs=configs)
    case = random_case(70, 48, 333, dtype=torch.bfloat16, ignored=0.5)
    case.h[::9] *= 60
    got = by_layout(case, dataclasses.replace(OF_EVERY_KIND, hidden_bits=bits))
    assert_as_accurate(got, case, ("loss", "dx", "dw"))


@pytest.mark.slow
def test_an_expanded_gradient(small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a sum over tokens is one number, expanded."""
    PTX["emulated sm_90a, all rows"].serve(monkeypatch, small_tiles)
    case = random_case(30, 16, 70, dtype=torch.bfloat16)
    h = case.h.requires_grad_()
    (got,) = torch.autograd.grad(
        cutefce.linear_cross_entropy(h, case.w, case.y, reduction="none").sum(), h
    )
    (want,) = torch.autograd.grad(
        cutefce.linear_cross_entropy(h, case.w, case.y, reduction="sum"), h
    )
    torch.testing.assert_close(got, want)
