"""`project_exp` of Hopper and of Blackwell, emulated, against float64.

Sizes count row blocks and tiles of a configuration.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.variant import (
    IDENTITY,
    KernelVariant,
    LogitTransform,
    RowReductions,
)
from cutefce.cute_kernels.workspace import Semaphore
from tests.emulation import blackwell, hopper
from tests.emulation.cases import Case, check, numbers
from tests.emulation.configs import (
    BLACKWELL,
    COOPERATIVE,
    PINGPONG,
    SHARED,
    SHARED_ALONE,
    SINGLE_CTA,
    TALL,
    TWO_CTA,
    kernels_of,
)
from tests.emulation.samples import Sampled
from tests.support.row_reductions import merged, reduced
from tests.support.tiers import rest_slow

assert hopper.run is blackwell.run, "one function runs both, with the instructions of both"
run = hopper.run

CONFIGS = (
    *(COOPERATIVE, TWO_CTA),
    *(TALL, PINGPONG, SHARED, SINGLE_CTA),
)
DEFAULT = 2
"""The first of these are not slow: what they compile serves most tests here."""


def case_of(config: GemmConfig, blocks: float, hidden: int, tiles: float, **more: Any) -> Case:
    """Return a case of one row more than some row blocks."""
    return Case(int(blocks * config.rows) + 1, hidden, int(tiles * config.tile_n), **more)


SIZES = {
    "more K tiles than stages": (1, 5 * 64 + 8, 3.1),
    "many tiles": (3.2, 136, 4.7),
    "one row": (0, 64, 3.1),
    "fewer columns than a tile": (0.6, 8, 0.3),
    "a last block of one row": (2, 72, 2.1),
}
"""Row blocks, hidden size and tiles."""


@pytest.mark.parametrize("size", rest_slow(SIZES))
@pytest.mark.parametrize("config", rest_slow(CONFIGS, DEFAULT))
def test_sums_and_exponentials(config: GemmConfig, size: tuple[float, int, float]) -> None:
    """Of several row blocks and splits: the last tile is partial."""
    case, kernel = case_of(config, *size), kernels_of(config).row_sums
    launch = case.launch(kernel, vocab_splits=2)
    launch.run(run, kernel, clusters=1 if size[0] > 3 else 2)
    check(launch, case)
    written = 0 if kernel.arch == BLACKWELL.name else 1  # Hopper's clusters keep in step
    assert (launch.semaphores[written:] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("config", [TALL, COOPERATIVE, TWO_CTA], ids=str)
def test_every_order_of_events(config: GemmConfig, seed: int) -> None:
    """More K tiles than stages, more tiles than accumulators, several work tiles a cluster."""
    case, kernel = case_of(config, 1.5, 5 * 64, 4.1), kernels_of(config).row_sums
    launch = case.launch(kernel, vocab_splits=2)
    launch.run(run, kernel, clusters=2, seed=seed)
    check(launch, case)


@pytest.mark.parametrize("config", rest_slow([PINGPONG, SHARED, TWO_CTA]))
def test_sums_beside_few_exponentials(config: GemmConfig) -> None:
    """Where none are wanted, those of the first columns are stored."""
    case, kernel = case_of(config, 1.5, 72, 3.2, scale=60.0), kernels_of(config).row_sums
    case.columns = 8
    launch = case.launch(kernel, vocab_splits=2)
    launch.run(run, kernel, clusters=2)
    u = case.others() - case.reference.double()[:, None]
    got = torch.from_numpy(launch.sums).double().mul(math.log(2)).logsumexp(1)
    assert u.max() > 150, "exponentials overflow float32"
    torch.testing.assert_close(got, u.logsumexp(1), rtol=1e-6, atol=1e-3)
    want = u[:, :8].exp().float().bfloat16()
    torch.testing.assert_close(
        torch.from_numpy(numbers(launch.exps)), want.double(), rtol=2e-2, atol=0
    )


@pytest.mark.parametrize("scale", rest_slow([100.0, 20.0]))
@pytest.mark.parametrize("config", rest_slow([PINGPONG, TWO_CTA]))
def test_logits_that_rise_from_tile_to_tile(config: GemmConfig, scale: float) -> None:
    """Relative to the maximum of the first tile, the sum of the last one overflows."""
    case, kernel = Case(50, 8, 6 * config.tile_n - 9, scale=scale), kernels_of(config).row_sums
    case.w *= torch.arange(1, len(case.w) + 1)[:, None] / len(case.w)
    case.reference = case.logits()[0][case.rows, case.own].float()
    launch = case.launch(kernel, vocab_splits=1)
    launch.run(run, kernel, clusters=1)
    got = torch.from_numpy(launch.sums).double().mul(math.log(2)).logsumexp(1)
    want = (case.others() - case.reference.double()[:, None]).logsumexp(1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("config", rest_slow([COOPERATIVE, TALL, SINGLE_CTA]))
def test_recomputed_exponentials(config: GemmConfig) -> None:
    case, kernel = case_of(config, 1.5, 72, 2.3, first=5000), kernels_of(config).exps
    launch = case.launch(kernel, vocab_splits=2)
    launch.run(run, kernel, clusters=2)
    check(launch, case)


@pytest.mark.parametrize("config", rest_slow([PINGPONG, SHARED, TWO_CTA]))
def test_only_flagged_blocks_are_stored_again(config: GemmConfig) -> None:
    case, kernel = case_of(config, 3, 64, 2.3), kernels_of(config).repair_exps
    launch = case.launch(kernel, vocab_splits=1)
    launch.semaphores[Semaphore.REPAIR_FLAGS :] = [0, 1, 0, 1]
    launch.run(run, kernel, clusters=3)
    flagged = np.repeat([False, True, False, True], config.rows)[: len(case.y)]
    assert (launch.exps[~flagged] == 0x7FFF).all()
    got = numbers(launch.exps)[flagged, : len(case.w)]
    np.testing.assert_allclose(got, case.exact()[flagged], rtol=1.01 * 2**-8, atol=1e-30)
    assert launch.semaphores[Semaphore.REPAIR_FLAGS :].tolist() == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("config", rest_slow([TALL, SHARED]))
def test_exponentials_have_the_same_bits_in_any_tiles(config: GemmConfig) -> None:
    """So a repair with other tiles changes no row but those that it is for."""
    case = Case(100, 200, 300)
    stored = []
    for kernel in (kernels_of(config).row_sums, kernels_of(PINGPONG).exps):
        launch = case.launch(kernel, vocab_splits=1)
        launch.run(run, kernel, clusters=1)
        stored.append(launch.exps)
    np.testing.assert_array_equal(*stored)


@pytest.mark.parametrize("config", rest_slow([TALL, TWO_CTA]))
def test_a_bad_row_stays_alone(config: GemmConfig) -> None:
    case, kernel = case_of(config, 1.2, 72, 2.3), kernels_of(config).row_sums
    clean, bad = (case.launch(kernel, 1) for _ in range(2))
    clean.run(run, kernel, clusters=1)
    row = config.rows // 2
    bad.h = bad.h.copy()
    bad.h[row, 5] = 0x7FC0
    bad.run(run, kernel, clusters=1)
    others = np.arange(len(case.y)) != row
    assert np.isnan(bad.sums[row].sum())
    assert np.array_equal(bad.sums[others], clean.sums[others])
    assert np.array_equal(bad.exps[others], clean.exps[others])


ALL_REDUCTIONS = RowReductions(entropy=True, sum_squares=True, of_others=True)
SCALE_AND_BIAS = LogitTransform(row_scale=True, bias=True)
SAME_BITS = {
    "warpgroups": PINGPONG,
    "pairs of blocks": TALL,
    "cooperative warpgroups": COOPERATIVE,
    "a pair of CTAs": TWO_CTA,
}


@pytest.mark.parametrize("config", rest_slow(SAME_BITS))
def test_rows_have_the_same_bits_anywhere(config: GemmConfig) -> None:
    """Warpgroups add the sums of different tokens in the same order.

    Sums of all columns do not depend on the target, either; every other one is the largest logit.
    """
    variant = KernelVariant(SCALE_AND_BIAS, ALL_REDUCTIONS)
    kernel = kernels_of(config, variant).row_sums
    # of an odd number of tiles, warpgroups take turns in which of a row block's they compute
    size = int(2.1 * config.rows), 8, 2 * config.tile_n + 9
    case = Case(*size, first=5000, transform=variant.transform)
    case.repeat_row()
    launch = case.launch(kernel, vocab_splits=1)
    launch.run(run, kernel, clusters=1)
    check(launch, case)
    equal = (case.y == case.y[0]).numpy()
    assert len(case.y) / 3 < equal.sum() < 2 * len(case.y) / 3
    for found in (launch.sums[equal], launch.exps[equal]):
        assert (found == found[0]).all()
    if variant.reductions.planes:
        of_all = launch.reductions[:-3]  # those of other columns depend on it
        assert (of_all == of_all[:, :1]).all()


# Options


ALL_TRANSFORMS = LogitTransform(row_scale=True, bias=True, softcap=True)
SOFTCAP = LogitTransform(row_scale=True, softcap=True)
FLOORED = SCALE_AND_BIAS._replace(floor=True)
TRANSFORMS = {
    "all": (PINGPONG, ALL_TRANSFORMS),
    "all, of a pair": (TWO_CTA, ALL_TRANSFORMS),
    "all, cooperative": (COOPERATIVE, ALL_TRANSFORMS),
    "temperature": (TWO_CTA, LogitTransform(row_scale=True)),
    "bias": (TWO_CTA, LogitTransform(bias=True)),
    "scale and bias": (SINGLE_CTA, LogitTransform(row_scale=True, bias=True)),
    "softcap": (SINGLE_CTA, SOFTCAP),
    "floor": (PINGPONG, LogitTransform(floor=True)),
    "floor, cooperative": (COOPERATIVE, ALL_TRANSFORMS._replace(floor=True)),
    "floor, of a pair": (TWO_CTA, ALL_TRANSFORMS._replace(floor=True)),
}


@pytest.mark.parametrize("name", rest_slow(["row_sums", "exps"]))
@pytest.mark.parametrize("given", rest_slow(TRANSFORMS))
def test_logit_transforms(given: tuple[GemmConfig, LogitTransform], name: str) -> None:
    config, transform = given
    kernel = getattr(kernels_of(config, KernelVariant(transform)), name)
    case = case_of(config, 1.2, 72, 1.2, first=5000, scale=1.0, transform=transform)
    launch = case.launch(kernel, vocab_splits=1)
    launch.run(run, kernel, clusters=1)
    check(launch, case)


@pytest.mark.parametrize("transform", rest_slow({"all": ALL_TRANSFORMS, "no bias": SOFTCAP}))
@pytest.mark.parametrize("config", rest_slow([PINGPONG, SINGLE_CTA]))
def test_softcap_of_huge_logits(config: GemmConfig, transform: LogitTransform) -> None:
    """Raw logits of ±2¹⁰⁰ become ±κ, almost without gradient; NaN stays in its row."""
    kernel = kernels_of(config, KernelVariant(transform)).row_sums
    case = Case(64, 8, 100, transform=transform)
    signs = torch.randn(100, generator=torch.Generator().manual_seed(1)).sign()
    case.h = torch.tensor([2.0**50, *[0.0] * 7]).bfloat16().repeat(64, 1)
    case.w = (signs[:, None] * case.h[0]).bfloat16()
    case.h[7, 3] = torch.nan
    case.y[:] = -100
    case.bias[:], case.reference[:] = 0.0, 0.0
    launch = case.launch(kernel, vocab_splits=1)
    launch.run(run, kernel, clusters=1)
    others = np.arange(64) != 7
    exact = torch.exp(case.row_scale.double()[:, None] * signs.double()).numpy()
    sums = np.logaddexp2.reduce(launch.sums.astype(np.float64), axis=1)
    np.testing.assert_allclose(sums[others], np.log2(exact.sum(1))[others], rtol=1e-6)
    got = numbers(launch.exps)[others]
    assert (got[:, :100] <= 5e-7 * exact[others]).all()
    assert (got[:, 100:] == 0).all()
    assert np.isnan(sums[7])
    assert np.isnan(numbers(launch.exps)[7, :100]).all()


REDUCTIONS = {
    "all, ping-pong": (PINGPONG, KernelVariant(SCALE_AND_BIAS, ALL_REDUCTIONS)),
    "all, cooperative": (COOPERATIVE, KernelVariant(SCALE_AND_BIAS, ALL_REDUCTIONS)),
    "all, of a pair": (TWO_CTA, KernelVariant(SCALE_AND_BIAS, ALL_REDUCTIONS)),
    "all, shared tiles": (TALL, KernelVariant(SCALE_AND_BIAS, ALL_REDUCTIONS)),
    "all, no transform": (COOPERATIVE, KernelVariant(reductions=ALL_REDUCTIONS)),
    "all, floor": (PINGPONG, KernelVariant(FLOORED, ALL_REDUCTIONS)),
    "all, floor, of a pair": (TWO_CTA, KernelVariant(FLOORED, ALL_REDUCTIONS)),
    "entropy": (TWO_CTA, KernelVariant(SCALE_AND_BIAS, RowReductions(entropy=True))),
    "sum_squares": (TWO_CTA, KernelVariant(SCALE_AND_BIAS, RowReductions(sum_squares=True))),
    "of_others": (SINGLE_CTA, KernelVariant(SCALE_AND_BIAS, RowReductions(of_others=True))),
}


@pytest.mark.parametrize("given", rest_slow(REDUCTIONS))
def test_row_reductions(given: tuple[GemmConfig, KernelVariant]) -> None:
    """Of every partial: one with a single column, which is a row's target, and one without any."""
    config, variant = given
    transform, reductions, own = variant.transform, variant.reductions, config.tile_n
    kernel = kernels_of(config, variant).row_sums
    case = Case(70, 8, own + 1, first=5000, transform=transform)
    # integers, so that the largest logits are exact and equal to others
    generator = torch.Generator().manual_seed(1)
    case.h, case.w = (torch.randint(-4, 5, x.shape, generator=generator).bfloat16()
                      for x in (case.h, case.w))  # fmt: skip
    if transform == IDENTITY:
        case.h *= torch.where(case.rows % 2 == 0, 8.0, 2.0**-5)[:, None]
    else:
        case.bias[:], case.row_scale[:] = case.bias.round(), 8.0
        case.row_scale[1::2] = 2.0**-5  # rows to which all columns contribute
    case.y[:3] = 5000 + own
    case.own = (case.y - 5000).clamp(0)
    if transform.floor:
        case.draw_floors()
    case.reference[:] = case.logits()[0][case.rows, case.own].float()
    launch = case.launch(kernel, vocab_splits=3)
    launch.run(run, kernel, clusters=1)
    u = case.logits()[0]
    assert u.amax() - case.reference.double().amin() > 200, "exponentials overflow float32"
    got = torch.from_numpy(launch.reductions)
    want = reduced(u, case.y, case.reference, 5000, reductions)
    rows = merged(got, reductions)
    torch.testing.assert_close(rows, want, rtol=1e-5, atol=1e-6)
    if reductions.of_others:
        assert torch.equal(rows[-3:], want[-3:])
    if config.partials_per_row == 1:
        parts = u[:, :own], u[:, own:], torch.full((70, 1), -torch.inf).double()
        for split, (part, first) in enumerate(zip(parts, (5000, 5000 + own, 0), strict=True)):
            want = reduced(part, case.y, case.reference, first, reductions)
            torch.testing.assert_close(got[:, :, split].double(), want, rtol=1e-5, atol=1e-6)
    sums = np.logaddexp2.reduce(launch.sums.astype(np.float64), axis=1)
    exact = (case.others() - case.reference.double()[:, None]).logsumexp(1).numpy() / math.log(2)
    np.testing.assert_allclose(sums, exact, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", rest_slow([PINGPONG, TALL, SHARED, SHARED_ALONE, TWO_CTA]))
def test_samples(config: GemmConfig) -> None:
    """Ragged tokens and columns, an ignored row, and sums of the launch without samples."""
    case, plain = Case(150, 72, 203, first=5000), kernels_of(config).row_sums
    kernel = dataclasses.replace(plain, samples=True)
    sampled, without = Sampled(case, kernel, samples=16, capacity=60), case.launch(plain, 2)
    sampled.launch.run(run, kernel, clusters=2)
    without.run(run, plain, clusters=2)
    sampled.check()
    assert sampled.counts[len(case.y) // 2] == 0, "ignored"
    assert 5 < sampled.counts.mean() < 17
    assert np.array_equal(without.sums, sampled.launch.sums)


# Rows that count


COUNTS = {
    "one block and a half": 1.5,
    "no row": 0,
    "less than a block": 0.3,
    "a whole block": 1,
}


@pytest.mark.parametrize("blocks", rest_slow(COUNTS, default=2))
@pytest.mark.parametrize("config", rest_slow(CONFIGS))
def test_counted_rows(config: GemmConfig, blocks: float) -> None:
    """The others of their last block are stored as 0; there is room for one more split."""
    case, kernel = case_of(config, 2.1, 72, 2.3), kernels_of(config).row_sums
    launch, count = case.launch(kernel, vocab_splits=2), int(blocks * config.rows)
    launch.count, launch.vocab_splits = count, 1
    launch.h = launch.h.copy()
    launch.h[count:] = 0x7FC0  # NaN
    launch.run(run, kernel, clusters=2)
    check(launch, case)
    end = max(1, ceil_div(count, config.rows)) * config.rows
    assert (numbers(launch.exps)[count:end, : len(case.w)] == 0).all()
    assert np.isnan(launch.sums[count:]).all(), "not written"


@pytest.mark.parametrize("counts", [False, True], ids=["no row", "all rows"])
@pytest.mark.parametrize("config", rest_slow([COOPERATIVE, PINGPONG, TALL, SHARED]))
def test_launches_that_may_skip(config: GemmConfig, counts: bool) -> None:
    """They write nothing of no rows, and all of all rows."""
    case, kernel = Case(150, 72, 150), kernels_of(config).exps
    launch = case.launch(kernel, vocab_splits=2)
    launch.count, launch.may_skip = 150 * counts, True
    launch.run(run, kernel, clusters=2)
    if counts:
        check(launch, case)
    else:
        assert (launch.exps == 0x7FFF).all()
