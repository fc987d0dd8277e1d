"""The Blackwell kernels' PTX, emulated on numpy, against float64; injected faults are detected."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.kernel_set import KernelSet, kernel_set
from cutefce.cute_kernels.spec import ProjectExpSpec
from cutefce.cute_kernels.variant import (
    PLAIN,
    KernelVariant,
    LogitTransform,
    RowReductions,
)
from cutefce.cute_kernels.workspace import Semaphore
from tests.emulation import blackwell
from tests.emulation.cases import Case, Launch, check, check_counted, launch_of_counted, numbers
from tests.emulation.core import Stuck
from tests.emulation.host import host_function
from tests.emulation.samples import Sampled
from tests.support.row_reductions import reduced

ARCH = arch_named("sm_100a")
CONFIGS = ARCH.prebuilt_configs()
TWO_CTA, MULTICAST, SINGLE_CTA, POLY_EXP2 = CONFIGS


def kernels_of(config: GemmConfig, variant: KernelVariant = PLAIN) -> KernelSet:
    return kernel_set(ARCH, "bfloat16", KernelConfigs(config, None, None), variant)


KERNELS = {config: kernels_of(config) for config in CONFIGS}


def run(kernel: ProjectExpSpec, launch: Launch, clusters: int = 1, seed: int = 0) -> None:
    launch.run(blackwell.run, kernel, clusters, seed=seed)


SHAPES = {
    "many tiles": (300, 136, 700),
    "one row": (1, 64, 600),
    "fewer columns than a tile": (70, 8, 17),
    "a last block of one row": (257, 72, 300),
}


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sums_and_exponentials(config: GemmConfig, shape: tuple[int, int, int]) -> None:
    case, kernel = Case(*shape), KERNELS[config].row_sums_and_exps
    launch = case.launch(kernel, vocab_splits=2, semaphore=7)
    run(kernel, launch, clusters=1 if shape[0] == 300 else 2)
    check(launch, case)
    assert (launch.semaphores == 7).all(), "no semaphore is written"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("config", [TWO_CTA, MULTICAST], ids=str)
def test_every_order_of_events(config: GemmConfig, seed: int) -> None:
    """More K tiles than stages, and more tiles than accumulators."""
    case, kernel = Case(config.rows, 3 * 64, 700), KERNELS[config].row_sums_and_exps
    launch = case.launch(kernel, vocab_splits=1)
    run(kernel, launch, seed=seed)
    check(launch, case)


@pytest.mark.parametrize(("config", "count"), [(TWO_CTA, 0), (TWO_CTA, 130), (SINGLE_CTA, 140)])
def test_counted_rows(config: GemmConfig, count: int) -> None:
    case, kernel = Case(300, 72, 300), KERNELS[config].row_sums_and_exps
    launch = launch_of_counted(case, kernel, count)
    run(kernel, launch, clusters=2)
    check_counted(launch, case, config.rows)


def test_sums_alone() -> None:
    config = TWO_CTA
    case, kernel = Case(300, 72, 700, scale=60.0), KERNELS[config].row_sums
    launch = case.launch(kernel, vocab_splits=2)
    run(kernel, launch, clusters=2)
    z = np.log2(case.exact(), where=case.exact() > 0, out=np.full((300, 700), -np.inf))
    highest = z.max(1)
    exact = highest + np.log2(np.exp2(z - highest[:, None]).sum(1))
    largest = launch.sums.max(1).astype(np.float64)
    got = largest + np.log2(np.exp2(launch.sums - largest[:, None]).sum(1))
    assert highest.max() > 200, "exponentials overflow float32"
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-3)


def test_recomputed_exponentials() -> None:
    config = SINGLE_CTA
    case, kernel = Case(300, 72, 600, first=5000), KERNELS[config].exps
    launch = case.launch(kernel, vocab_splits=2)
    run(kernel, launch, clusters=2)
    check(launch, case)


@pytest.mark.parametrize("config", [TWO_CTA, POLY_EXP2], ids=str)
def test_samples(config: GemmConfig) -> None:
    case, plain = Case(140, 72, 203, first=5000), KERNELS[config].row_sums
    kernel = dataclasses.replace(plain, samples=True)
    sampled, without = Sampled(case, kernel, samples=16, capacity=60), case.launch(plain, 2)
    run(kernel, sampled.launch, clusters=2)
    run(plain, without, clusters=2)
    sampled.check()
    assert np.array_equal(without.sums, sampled.launch.sums)


TRANSFORMS = {
    "temperature": (TWO_CTA, LogitTransform(row_scale=True)),
    "bias": (MULTICAST, LogitTransform(bias=True)),
    "scale and bias": (SINGLE_CTA, LogitTransform(row_scale=True, bias=True)),
    "softcap": (SINGLE_CTA, LogitTransform(row_scale=True, softcap=True)),
    "all": (POLY_EXP2, LogitTransform(row_scale=True, bias=True, softcap=True)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_logit_transforms(name: str) -> None:
    config, transform = TRANSFORMS[name]
    kernels = kernels_of(config, KernelVariant(transform))
    for kernel in (kernels.row_sums_and_exps, kernels.exps):
        case = Case(130, 72, 300, first=5000, scale=1.0, transform=transform)
        launch = case.launch(kernel, vocab_splits=1)
        run(kernel, launch)
        check(launch, case)


REDUCTIONS = {
    "entropy": (TWO_CTA, RowReductions(entropy=True)),
    "sum_squares": (MULTICAST, RowReductions(sum_squares=True)),
    "argmax": (SINGLE_CTA, RowReductions(argmax=True)),
    "all": (POLY_EXP2, RowReductions(entropy=True, sum_squares=True, argmax=True)),
}


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_row_reductions(name: str, store: bool) -> None:
    """Of every partial: one with a single column, which is a row's target, and one without any."""
    config, reductions = REDUCTIONS[name]
    transform = LogitTransform(row_scale=True, bias=True)
    kernels = kernels_of(config, KernelVariant(transform, reductions))
    case = Case(70, 8, 257, first=5000, scale=20.0, transform=transform)
    # integers, so that the largest logits are exact and equal to others
    generator = torch.Generator().manual_seed(1)
    case.h, case.w = (torch.randint(-4, 5, x.shape, generator=generator).bfloat16()
                      for x in (case.h, case.w))  # fmt: skip
    case.bias[:], case.row_scale[:] = case.bias.round(), 8.0
    case.row_scale[1::2] = 2.0**-5  # rows to which all columns contribute
    case.y[:3] = 5256
    case.own = (case.y - 5000).clamp(0)
    case.reference[:] = case.logits()[0][case.rows, case.own].float()
    launch = case.launch(kernels.row_sums_and_exps if store else kernels.row_sums, vocab_splits=3)
    run(kernels.row_sums_and_exps if store else kernels.row_sums, launch)
    u = case.logits()[0]
    assert u.amax() - case.reference.double().amin() > 200, "exponentials overflow float32"
    parts = u[:, :256], u[:, 256:], torch.full((70, 1), -torch.inf).double()
    for split, (part, first) in enumerate(zip(parts, (5000, 5256, 0), strict=True)):
        want = reduced(part, case.y, first, reductions).numpy()
        got = launch.reductions[:, :, split]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        if reductions.argmax:
            assert np.array_equal(got[-2:], want[-2:])
    sums = np.logaddexp2.reduce(launch.sums.astype(np.float64), axis=1)
    exact = (case.others() - case.reference.double()[:, None]).logsumexp(1).numpy() / math.log(2)
    np.testing.assert_allclose(sums, exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("config", [TWO_CTA, POLY_EXP2], ids=str)
def test_sums_of_all_columns_do_not_depend_on_the_target(config: GemmConfig) -> None:
    """Nor on the row block and the row in it; targets are the largest logit and others."""
    transform = LogitTransform(row_scale=True, bias=True)
    variant = KernelVariant(transform, RowReductions(entropy=True, sum_squares=True))
    kernel = kernels_of(config, variant).row_sums_and_exps
    case = Case(config.rows + 3, 8, 257, first=5000, transform=transform)
    case.repeat_row()
    launch = case.launch(kernel, vocab_splits=2)
    run(kernel, launch)
    check(launch, case)
    assert len({*case.y.tolist()}) > config.rows / 2
    assert (launch.reductions == launch.reductions[:, :1]).all()


def test_softcap_of_huge_logits() -> None:
    """Raw logits of ±2¹⁰⁰ become ±κ, almost without gradient; NaN stays in its row."""
    transform = LogitTransform(row_scale=True, softcap=True)
    kernel = kernels_of(SINGLE_CTA, KernelVariant(transform)).row_sums_and_exps
    case = Case(64, 8, 100, transform=transform)
    signs = torch.randn(100, generator=torch.Generator().manual_seed(1)).sign()
    case.h = torch.tensor([2.0**50, *[0.0] * 7]).bfloat16().repeat(64, 1)
    case.w = (signs[:, None] * case.h[0]).bfloat16()
    case.h[7, 3] = torch.nan
    case.y[:] = -100
    case.reference[:] = 0.0
    launch = case.launch(kernel, vocab_splits=1)
    run(kernel, launch)
    others = np.arange(64) != 7
    exact = torch.exp(case.row_scale.double()[:, None] * signs.double()).numpy()
    np.testing.assert_allclose(launch.sums[others, 0], np.log2(exact.sum(1))[others], rtol=1e-6)
    got = numbers(launch.exps)[others]
    assert (got[:, :100] <= 5e-7 * exact[others]).all()
    assert (got[:, 100:] == 0).all()
    assert np.isnan(launch.sums[7]).all()
    assert np.isnan(numbers(launch.exps)[7, :100]).all()


def test_only_flagged_blocks_are_stored_again() -> None:
    config = TWO_CTA
    case, kernel = Case(3 * config.rows + 1, 64, 600), KERNELS[config].repair_exps
    launch = case.launch(kernel, vocab_splits=1)
    launch.semaphores[Semaphore.REPAIR_FLAGS :] = [0, 1, 0, 1]
    run(kernel, launch, clusters=3)
    flagged = np.repeat([False, True, False, True], config.rows)[: len(case.y)]
    assert (launch.exps[~flagged] == 0x7FFF).all()
    got = numbers(launch.exps)[flagged]
    np.testing.assert_allclose(got, case.exact()[flagged], rtol=1.01 * 2**-8, atol=1e-30)
    assert launch.semaphores[Semaphore.REPAIR_FLAGS :].tolist() == [0, 1, 0, 1]


def test_a_bad_row_stays_alone() -> None:
    config = POLY_EXP2
    case, kernel = Case(300, 72, 300), KERNELS[config].row_sums_and_exps
    clean, bad = (case.launch(kernel, 1) for _ in range(2))
    run(kernel, clean)
    bad.h = bad.h.copy()
    bad.h[123, 5] = 0x7FC0
    run(kernel, bad)
    others = np.arange(300) != 123
    assert np.isnan(bad.sums[123]).all()
    assert np.array_equal(bad.sums[others], clean.sums[others])
    assert np.array_equal(bad.exps[others], clean.exps[others])


# configuration, pattern, replacement, and the outcome: a deadlock or wrong results
FAULTS: dict[str, tuple[GemmConfig, str, str, type[Exception]]] = {
    "a commit reaches only a pair's first block": (
        TWO_CTA, r"(tcgen05\.commit[^\n]*), %rs\d+;", r"\1, 1;", Stuck),
    "w reaches only one block": (
        MULTICAST, r"(mov\.b16\s+%rs\d+), 3;(?=[^$]*multicast::cluster)", r"\1, 1;", Stuck),
    "more bytes are expected than come": (
        TWO_CTA, r"(mov\.b32\s+%r\d+), 65536;", r"\1, 65552;", Stuck),
    "accumulators are never released": (
        SINGLE_CTA, r"mbarrier\.arrive\.shared[^\n]*\n", "", Stuck),
    "K tiles overwrite each other": (
        SINGLE_CTA, r"(mov\.pred\s+%p\d+), -1;", r"\1, 0;", AssertionError),
    "a quarter of a stage is taken twice": (
        SINGLE_CTA, r"(add\.s32\s+%r\d+, %r\d+), 4;", r"\1, 2;", AssertionError),
    "stages are filled before they are drained": (
        SINGLE_CTA, r"(mbarrier\.init\S+\s+\[%r1\+32\]), %r\d+", r"\1, 2", Stuck),
    "epilogue tiles are written while they are stored": (
        SINGLE_CTA, r"(cp\.async\.bulk\.wait_group\.read\s+)1;", r"\g<1>2;", AssertionError),
    "a block ends before its stores": (
        SINGLE_CTA, r"cp\.async\.bulk\.wait_group\.read\s+0;", "", AssertionError),
    "every lane releases an accumulator": (
        SINGLE_CTA, r"elect\.sync[^\n]*\n[^\n]*\n[^\n]*\n(?=[^$]*mbarrier\.arrive\.shared)", "",
        Stuck),
    "tensor memory is not freed": (TWO_CTA, r"tcgen05\.dealloc[^\n]*\n", "", AssertionError),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected(fault: str) -> None:
    config, pattern, replacement, outcome = FAULTS[fault]
    case, kernel = Case(config.rows, 3 * 64, 700), KERNELS[config].row_sums_and_exps
    broken, count = re.subn(pattern, replacement, host_function(kernel).ptx, count=1)
    assert count == 1
    launch = case.launch(kernel, vocab_splits=1)
    with pytest.raises(outcome):
        launch.run(blackwell.run, kernel, clusters=1, ptx=broken)
        check(launch, case)
