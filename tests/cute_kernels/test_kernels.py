"""The kernels on a GPU: every configuration, sizes past 2³¹, repair, and what serves a call."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.autotune_cache.defaults import widest_window
from cutefce.cute_kernels import kernel_set
from cutefce.cute_kernels.arch import arch_for
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import GRADIENT_LOSS, Problem
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.variant import (
    IDENTITY,
    SUM_ONLY,
    KernelVariant,
    LogitTransform,
    RowReductions,
)
from cutefce.cute_kernels.workspace import NUM_STATS, Semaphore, Stat, forward_semaphore_count
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.arguments import LossOptions
from cutefce.ops.primitives import dispatch
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.dispatch import kernel_primitives
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.targets import Targets
from tests.support.non_finite import assert_same_kind, broken_case, names, torch_result
from tests.support.reference import Case, assert_as_accurate, evaluate, ours, random_case
from tests.support.row_reductions import merged, reduced

NONE = LossOptions("none")

HERE = arch_for(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
ARCH = HERE or Sm90()
CONFIGS = ARCH.listed["project_exp"]
RAGGED = {
    "one row": (1, 64, 1000),
    "fewer columns than a tile": (70, 8, 17),
    "a last block of one row": (257, 72, 3001),
    "several raster groups": (2500, 136, 5000),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HERE is None, reason="needs a GPU that has kernels"),
]


@pytest.fixture
def strict() -> Any:
    dispatch.set_strict(True)
    yield
    dispatch.set_strict(False)


def with_project_exp(config: GemmConfig) -> KernelConfigs:
    default = ARCH.default_configs(tokens=8192, hidden=4096, num_sms=132)
    return dataclasses.replace(default, project_exp=config)


def primitives(config: GemmConfig, dtype: torch.dtype) -> Primitives:
    return with_configs(with_project_exp(config), dtype)


def with_configs(configs: KernelConfigs, dtype: torch.dtype) -> Primitives:
    name = dtype_name(dtype)
    tiles = widest_window(Problem(1, 64, 1000, name, "cuda"))
    count = torch.cuda.get_device_properties(0).multi_processor_count
    kernels = kernel_set.kernel_set(ARCH, name, configs)
    return kernel_primitives(tiles, kernels, count)


def exact_exps(case: Case, reference: Tensor) -> Tensor:
    """Return exp(z - reference) in float64, 0 at the target."""
    z = case.h.double() @ case.w.double().t()
    e = torch.exp(z - reference.double()[:, None])
    active = case.y >= 0
    e[active.nonzero()[:, 0], case.y[active]] = 0
    return e


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration(
    config: GemmConfig, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = random_case(*shape, dtype=dtype, device="cuda", ignored=0)
    steps = primitives(config, dtype)
    targets = Targets(case.y, shape[2], NONE)
    logit = steps.target_logit(case.h, case.w, targets)
    exact = exact_exps(case, logit)
    buffer = torch.full((shape[0], round_up(shape[2], 8)), torch.nan, dtype=dtype, device="cuda")
    kept = buffer if dtype == torch.bfloat16 else None
    partial = steps.project_exp(Logits(case.h, case.w, (0, shape[2]), logit, targets), kept)
    stats, losses = steps.reduce_partials(partial, logit, targets)
    torch.testing.assert_close(stats.sum_exp_others.double(), exact.sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(losses.double(), torch.log1p(exact.sum(1)), rtol=1e-5, atol=1e-6)
    assert torch.equal(stats.reference, logit)
    if kept is None:
        steps.recompute_exp(Logits(case.h, case.w, (0, shape[2]), logit, targets), buffer)
    rounding = torch.finfo(dtype).eps / 2
    smallest = 2.0**-24 if dtype == torch.float16 else 1e-30
    got = buffer[:, : shape[2]].double()
    torch.testing.assert_close(got, exact, rtol=1.01 * rounding, atol=smallest)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_repair_stores_only_flagged_blocks_again(config: GemmConfig) -> None:
    """Blocks are those of the kernel that repairs, whatever the tiles of row sums."""
    steps = primitives(config, torch.bfloat16)
    assert isinstance(steps, CuteProjection)
    rows = steps.kernels.repair_exps.config.rows
    case = random_case(3 * rows + 1, 64, 2000, dtype=torch.bfloat16, device="cuda", ignored=0)
    far = torch.tensor([rows + 3, 3 * rows], device="cuda")
    case.h[far] *= 100
    case.y[far] = (case.h[far].float() @ case.w.float().t()).argmin(1)
    targets = Targets(case.y, 2000, NONE)
    logit = steps.target_logit(case.h, case.w, targets)
    buffer = torch.empty(len(case.y), 2000, dtype=torch.bfloat16, device="cuda")
    partial = steps.project_exp(Logits(case.h, case.w, (0, 2000), logit, targets), buffer)
    stats, _ = steps.reduce_partials(partial, logit, targets)
    moved = (stats.reference != logit).nonzero()[:, 0]
    assert moved.tolist() == far.tolist()
    assert (
        partial.semaphores[Semaphore.REPAIR_FLAGS :].nonzero()[:, 0].tolist()
        == (far // rows).tolist()
    )
    before = buffer.clone()
    logits = Logits(case.h, case.w, (0, 2000), stats.reference, targets)
    steps.repair_stored_exps(logits, buffer, partial)
    others = torch.ones(len(case.y), dtype=torch.bool, device="cuda")
    others[far] = False
    assert torch.equal(buffer[others], before[others])
    exact = exact_exps(case, stats.reference)[far]
    torch.testing.assert_close(buffer[far].double(), exact, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workspace", ["max", "min"])
@pytest.mark.parametrize("which", ["none", "some", "all", "the last one"])
def test_far_rows(which: str, workspace: str, dtype: torch.dtype, strict: None) -> None:
    case = random_case(515, 64, 1500, dtype=dtype, device="cuda")
    rows = {"none": [], "some": [7, 300], "all": list(range(515)), "the last one": [514]}[which]
    case.h[rows] *= 60
    assert_as_accurate(ours(case, workspace=workspace), case, saturated=True)


@pytest.mark.parametrize("shape", [(521, 264, 1003), (1000, 1096, 20001), (300, 64, 5003)], ids=str)
@pytest.mark.parametrize("config", ARCH.listed["grad_hidden"], ids=str)
@pytest.mark.parametrize("fresh", [False, True])
def test_sums_are_accurate_and_deterministic(
    fresh: bool, config: GemmConfig, shape: tuple[int, int, int], strict: None
) -> None:
    """Also dX's with K splits, whose sums different clusters add."""
    tokens, hidden, vocab = shape
    case = random_case(*shape, dtype=torch.bfloat16, device="cuda")
    configs = dataclasses.replace(
        with_project_exp(CONFIGS[0]),
        grad_hidden=config,
        grad_weight=config,
        grad_hidden_short=config,
    )
    steps = with_configs(configs, torch.bfloat16)
    exps = torch.rand(tokens, -(-vocab // 8) * 8, device="cuda").to(torch.bfloat16)[:, :vocab]
    before = torch.randn(tokens, hidden, device="cuda"), torch.randn(vocab, hidden, device="cuda")
    coef, targets = torch.randn(tokens, device="cuda"), Targets(case.y, vocab, LossOptions())
    target_grad = steps.target_grad(case.h, coef, targets)
    results = []
    for _ in range(3):
        dx, dw = (torch.full_like(x, torch.nan) if fresh else x.clone() for x in before)
        steps.add_hidden(Sums(dx), exps, case.w, accumulate=not fresh)
        steps.add_weight(Sums(dw), exps, case.h, target_grad, 0, accumulate=not fresh)
        results.append((dx, dw))
    e = exps.double()
    exact = [e @ case.w.double(), e.t() @ case.h.double()]
    active = case.y >= 0
    terms = coef[active, None].double() * case.h[active].double()
    exact[1].index_add_(0, case.y[active], terms)
    if not fresh:
        exact = [x + there for x, there in zip(exact, before, strict=True)]
    for got, want in zip(results[0], exact, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-4
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


Operands = tuple[Tensor | None, Tensor | None, float | None]
"""κ, b and s of a logit transform."""


def operands_of(transform: LogitTransform, tokens: int, vocab: int) -> Operands:
    """Return random operands: derivatives of tanh are from 1 to almost 0."""
    return (
        1 + 3 * torch.rand(tokens, device="cuda") if transform.row_scale else None,
        torch.randn(vocab, device="cuda") if transform.bias else None,
        0.8 if transform.softcap else None,
    )


def exact_logits(case: Case, operands: Operands) -> tuple[Tensor, Tensor]:
    """Return the model's logits and the derivative of tanh, 1 without softcap, in float64."""
    row_scale, bias, slope = operands
    u = case.h.double() @ case.w.double().t()
    u = u if bias is None else u + bias.double()
    u = u if slope is None else torch.tanh(u * slope)
    derivative = torch.ones_like(u) if slope is None else 1 - u**2
    return u if row_scale is None else row_scale.double()[:, None] * u, derivative


class Launches:
    """Direct launches of the kernels of a variant, on all columns."""

    def __init__(self, config: GemmConfig, variant: KernelVariant, case: Case) -> None:
        dtype = dtype_name(case.h.dtype)
        self.kernels = kernel_set.kernel_set(ARCH, dtype, with_project_exp(config), variant)
        config = self.kernels.row_sums.config
        self.config, self.case, (self.tokens, self.vocab) = config, case, (len(case.h), len(case.w))
        self.operands = operands_of(variant.transform, self.tokens, self.vocab)
        self.transform = None if variant.transform == IDENTITY else self.operands
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.splits = 3
        self.columns = round_up(self.vocab, 8)

    def semaphores(self) -> Tensor:
        count: int = forward_semaphore_count(self.tokens, self.config.rows)
        return torch.zeros(count, dtype=torch.int32, device="cuda")

    def target_logit(self) -> Tensor:
        logit, zeros = torch.empty(self.tokens, device="cuda"), self.semaphores()
        tensors = self.case.h, self.case.w, self.case.y, logit, zeros
        more = self.transform, self.case.y, -100, 0, None
        jit_cache.compiled(self.kernels.target_logit)(*tensors, *more)
        return logit

    def project_exp(self, kernel: ProjectExpSpec, reference: Tensor, first: int = 0) -> Any:
        """Return (partial sums, exponentials, reductions); targets are counted from `first`."""
        partials, planes = self.splits * self.config.partials_per_row, kernel.reductions.planes
        nan = torch.full((1 + planes, self.tokens, partials), torch.nan, device="cuda")
        sums, reductions = nan[0] if kernel.sums else None, nan[1:] if planes else None
        stored = torch.full((self.tokens, self.columns), torch.nan, device="cuda")
        exps = stored.to(self.case.h.dtype) if kernel.store else None
        target = torch.where(self.case.y < 0, self.case.y, self.case.y + first)
        tensors = self.case.h, self.case.w, reference, target, sums, exps, self.semaphores()
        clusters = self.sms // kernel.config.cluster
        numbers = self.semaphores(), 0, first, self.splits, clusters
        jit_cache.compiled(kernel)(*tensors, self.transform, reductions, None, *numbers)
        return sums, exps, reductions

    def statistics(self, logit: Tensor) -> Tensor:
        """Return those of a forward that stores nothing."""
        sums, _, _ = self.project_exp(self.kernels.row_sums, logit)
        stats = torch.empty(NUM_STATS, self.tokens, device="cuda")
        results = stats, stats.new_empty(()), self.semaphores()
        more = -100, 0
        kernel = jit_cache.compiled(self.kernels.reduce_partials)
        kernel(sums, logit, self.case.y, *results, *more)
        return stats


def others(case: Case, u: Tensor) -> Tensor:
    """Return logits with -inf at the targets."""
    active = (case.y >= 0).nonzero()[:, 0]
    u = u.clone()
    u[active, case.y[active]] = -torch.inf
    return u


TRANSFORMS = {
    "temperature": LogitTransform(row_scale=True),
    "bias": LogitTransform(bias=True),
    "scale and bias": LogitTransform(row_scale=True, bias=True),
    "softcap": LogitTransform(row_scale=True, softcap=True),
    "all": LogitTransform(row_scale=True, bias=True, softcap=True),
}


def check_transform(
    config: GemmConfig, transform: LogitTransform, case: Case, first: int = 0
) -> None:
    """Compare every launch of a transform with float64."""
    launches = Launches(config, KernelVariant(transform), case)
    u, derivative = exact_logits(case, launches.operands)
    active = case.y >= 0
    logit = launches.target_logit()
    exact_logit = u.gather(1, case.y.clamp(0)[:, None])[:, 0]
    torch.testing.assert_close(logit[active].double(), exact_logit[active], rtol=1e-6, atol=2e-5)
    assert bool((logit[~active] == torch.inf).all())
    kernels, narrow = launches.kernels, case.h.dtype == torch.float16
    references = {
        kernels.row_sums: torch.where(active, logit, 0.0),
        kernels.exps: torch.logsumexp(u, 1).float(),  # in the range of float16
    }
    for kernel, reference in references.items():
        exact = torch.exp(others(case, u) - reference.double()[:, None])
        sums, exps, _ = launches.project_exp(kernel, reference, first)
        if sums is not None:
            total = torch.exp2(sums.double()).sum(1)
            torch.testing.assert_close(total, exact.sum(1), rtol=5e-5, atol=0)
        if exps is not None:
            got, want = exps.double(), exact * derivative
            # 1 - tanh² cancels: its error is relative to 1
            cancelled = 2e-6 * exact if transform.softcap else 0
            rounding = torch.finfo(exps.dtype).eps / 2 + 5e-5
            allowed = rounding * want + cancelled + (2.0**-24 if narrow else 1e-30)
            assert bool(((got[:, : len(case.w)] - want).abs() <= allowed).all())
            assert not got[:, len(case.w) :].any()
    stats = launches.statistics(logit)
    loss = torch.logsumexp(u, 1) - exact_logit
    torch.testing.assert_close(
        stats[Stat.LOSS].double()[active], loss[active], rtol=1e-5, atol=5e-5
    )
    assert not stats[Stat.LOSS][~active].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_logit_transforms(transform: LogitTransform, dtype: torch.dtype) -> None:
    case = random_case(257, 72, 3001, dtype=dtype, device="cuda")
    check_transform(CONFIGS[0], transform, case, first=4000)


@pytest.mark.parametrize("shape", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_logit_transforms_in_every_configuration(
    config: GemmConfig, shape: tuple[int, int, int]
) -> None:
    check_transform(
        config, TRANSFORMS["all"], random_case(*shape, dtype=torch.bfloat16, device="cuda")
    )


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_softcap_of_huge_logits(config: GemmConfig) -> None:
    """Raw logits of ±2¹⁰⁰ and ±inf become ±κ, almost without gradient; NaN stays in its row."""
    case = random_case(150, 8, 333, dtype=torch.bfloat16, device="cuda")
    case.h[:], case.w[:], case.y[:] = 0, 0, -100
    signs = torch.randn(333, device="cuda").sign()
    case.h[:, 0], case.w[:, 0] = 2.0**50, 2.0**50 * signs
    case.h[11, 0] = torch.inf
    case.h[7, 3] = torch.nan
    launches = Launches(config, KernelVariant(TRANSFORMS["softcap"]), case)
    reference = torch.zeros(150, device="cuda")
    sums, exps, _ = launches.project_exp(launches.kernels.row_sums, reference)
    scale = launches.operands[0]
    assert scale is not None
    exact = torch.exp(scale.double()[:, None] * signs.double())
    healthy = torch.arange(150, device="cuda") != 7
    total = torch.exp2(sums.double()).sum(1)
    torch.testing.assert_close(total[healthy], exact.sum(1)[healthy], rtol=1e-5, atol=0)
    assert bool((exps[healthy, :333].double().abs() <= 5e-7 * exact[healthy]).all())
    assert bool(total[~healthy].isnan().all())
    assert bool(exps[~healthy, :333].isnan().all())


def integers_case(tokens: int, hidden: int, vocab: int) -> Case:
    """Return a case of exact logits, many of them equal.

    The exponentials of every other row overflow float32; to those of the rest all columns
    contribute.
    """
    case = random_case(tokens, hidden, vocab, dtype=torch.bfloat16, device="cuda")
    for x in (case.h, case.w):
        x.copy_(torch.randint(-4, 5, x.shape))
    case.h[1::2] /= 64
    return case


REDUCTIONS = {
    "entropy": RowReductions(entropy=True),
    "sum_squares": RowReductions(sum_squares=True),
    "of_others": RowReductions(of_others=True),
    "all": RowReductions(entropy=True, sum_squares=True, of_others=True),
}


def check_reductions(config: GemmConfig, variant: KernelVariant, case: Case) -> None:
    """Compare the reductions of whole rows, and row sums, with float64.

    Row sums stay those without reductions, if none is of all columns.
    """
    options = variant.reductions
    launches = Launches(config, variant, case)
    plain = variant._replace(reductions=SUM_ONLY)
    kernels, others_ = launches.kernels, Launches(config, plain, case)
    others_.transform = launches.transform
    logit = launches.target_logit()
    reference = torch.where(case.y >= 0, logit, 0.0)
    u = exact_logits(case, launches.operands)[0]
    target = torch.where(case.y < 0, case.y, case.y + 4000)
    want, u = reduced(u, target, reference, 4000, options), others(case, u)
    total = (u - reference.double()[:, None]).logsumexp(1)
    expected = others_.project_exp(others_.kernels.row_sums, reference, 4000)[0]
    sums, _, planes = launches.project_exp(kernels.row_sums, reference, 4000)
    assert torch.equal(sums, expected) or options.of_all
    got = (sums.double() * math.log(2)).logsumexp(1)
    torch.testing.assert_close(got, total, rtol=1e-6, atol=1e-4)
    assert not planes.isnan().any()
    got = merged(planes, options)
    if options.of_others:
        found = u.gather(1, got[-2].long()[:, None] - 4000)[:, 0]
        torch.testing.assert_close(found, want[-3], rtol=1e-6, atol=1e-5)
        near = (u - reference.double()[:, None]).abs() < 1e-4  # where float32 cannot tell
        assert ((got[-1] - want[-1]).abs() <= near.sum(1)).all()
        if variant.transform == IDENTITY:
            assert torch.equal(got[-3:], want[-3:])
    numbers = options.planes - 2 * options.of_others  # without vocabulary entries and counts
    torch.testing.assert_close(got[:numbers], want[:numbers], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_row_reductions_in_every_configuration(
    config: GemmConfig, shape: tuple[int, int, int]
) -> None:
    check_reductions(config, KernelVariant(reductions=REDUCTIONS["all"]), integers_case(*shape))


@pytest.mark.parametrize("transform", [IDENTITY, TRANSFORMS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("reductions", REDUCTIONS.values(), ids=REDUCTIONS)
def test_row_reductions(reductions: RowReductions, transform: LogitTransform) -> None:
    variant = KernelVariant(transform, reductions)
    check_reductions(CONFIGS[0], variant, integers_case(257, 72, 3001))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_row_reductions_of_a_bad_row_and_of_no_column(config: GemmConfig) -> None:
    case = integers_case(150, 64, 1)
    variant = KernelVariant(reductions=REDUCTIONS["all"])
    case.y[:] = 0
    reference = torch.zeros(150, device="cuda")
    launches = Launches(config, variant, case)
    _, _, planes = launches.project_exp(launches.kernels.row_sums, reference)
    # the only column, in one partial, is all rows' target
    largest, empty = planes[0], planes[0] == -torch.inf
    own = launches.target_logit()[:, None].expand_as(largest)
    assert torch.equal(largest[~empty], own[~empty]) and bool(((~empty).sum(1) == 1).all())
    assert not planes[1:4].any() and not planes[5].any()
    assert bool((planes[4] == -torch.inf).all())
    case = integers_case(150, 64, 333)
    launches = Launches(config, variant, case)
    clean = launches.project_exp(launches.kernels.row_sums, reference)[2]
    case.h[123, 5] = torch.nan
    bad = launches.project_exp(launches.kernels.row_sums, reference)[2]
    rows = torch.arange(150, device="cuda") != 123
    assert torch.equal(bad[:, rows], clean[:, rows])
    assert bool(bad[1:4, 123].isnan().any(1).all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums_of_all_columns_do_not_depend_on_the_target(config: GemmConfig) -> None:
    """Nor on the row block, nor on the row in it."""
    case = random_case(1100, 72, 3001, dtype=torch.bfloat16, device="cuda")
    case.h[:] = case.h[7].clone()
    u = case.h[0].float() @ case.w.float().t()
    case.y[::5] = u.argmax()
    reductions = RowReductions(entropy=True, sum_squares=True)
    launches = Launches(config, KernelVariant(reductions=reductions), case)
    reference = torch.where(case.y >= 0, launches.target_logit(), 0.0)
    planes = launches.project_exp(launches.kernels.row_sums, reference)[2]
    assert torch.equal(planes, planes[:, :1].expand_as(planes))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_diverged_rows_in_every_configuration(config: GemmConfig) -> None:
    """With stored exponentials and without them."""
    steps = primitives(config, torch.bfloat16)
    for name in names(torch.bfloat16):
        case = broken_case(name, torch.bfloat16, "cuda")
        want = torch_result(case).loss
        targets = Targets(case.y, 333, NONE)
        logit = steps.target_logit(case.h, case.w, targets)
        assert not bool((logit == torch.inf).any()), name
        for buffer in (case.h.new_empty(150, 336), None):
            partial = steps.project_exp(Logits(case.h, case.w, (0, 333), logit, targets), buffer)
            stats, losses = steps.reduce_partials(partial, logit, targets)
            assert_same_kind(losses, want)
            bad = ~(want < GRADIENT_LOSS)
            assert torch.equal(stats.sum_exp.isnan(), bad), name


@pytest.mark.parametrize("shape", [(17000, 64, 131072), (300, 8200, 262200)], ids=["N·V", "V·D"])
def test_past_two_to_the_31(shape: tuple[int, int, int], strict: None) -> None:
    tokens, hidden, vocab = shape
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, device="cuda").bfloat16()
    w = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16).div_(hidden**0.5)
    y = torch.randint(vocab - 100, vocab, (tokens,), device="cuda")
    leaf = h.detach().requires_grad_()
    losses = cutefce.linear_cross_entropy(leaf, w, y, reduction="none", workspace="max")
    (dx,) = torch.autograd.grad(losses.sum(), leaf)
    last = slice(tokens - 50, tokens)
    case = Case(h[last], w, y[last], torch.ones(50, device="cuda"))

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((h @ w.t()).float(), case.y, reduction="none")

    rounded = evaluate(case, loss)
    torch.testing.assert_close(losses[last].detach(), rounded.loss, rtol=1e-3, atol=5e-3)
    torch.testing.assert_close(dx[last].float(), rounded.dx.float(), rtol=2e-2, atol=2e-3)


def test_other_layouts(strict: None) -> None:
    case = random_case(300, 64, 1500, dtype=torch.bfloat16, device="cuda")
    want = cutefce.linear_cross_entropy(case.h, case.w, case.y)
    got = cutefce.linear_cross_entropy(case.h.t().contiguous().t(), case.w, case.y)
    assert torch.equal(got, want)
    padded = torch.empty(1500, 72, dtype=torch.bfloat16, device="cuda")[:, :64].copy_(case.w)
    assert torch.equal(cutefce.linear_cross_entropy(case.h, padded, case.y), want)


def test_replay_and_compilation_are_bitwise_equal(strict: None) -> None:
    case = random_case(300, 64, 1500, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        want = cutefce.linear_cross_entropy(case.h, case.w, case.y)
        compiled = torch.compile(cutefce.linear_cross_entropy, fullgraph=True)
        assert torch.equal(compiled(case.h, case.w, case.y), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = cutefce.linear_cross_entropy(case.h, case.w, case.y)
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:cutefce")
def test_unsupported_inputs_take_the_portable_path() -> None:
    case = random_case(32, 64, 300, dtype=torch.bfloat16, device="cuda")
    assert cutefce.backend_for(case.h, case.w).name == "cute"
    reasons = {
        "float32": (case.h.float(), case.w.float()),
        "multiple of 8": (case.h[:, :60], case.w[:, :60]),
        "16 bytes": (case.h, case.w.t().contiguous().t()),
    }
    for reason, (h, w) in reasons.items():
        backend = cutefce.backend_for(h, w)
        assert backend.name == "torch"
        assert reason in backend.reason
        cutefce.linear_cross_entropy(h, w, case.y)
