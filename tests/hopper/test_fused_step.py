"""The host functions of a training step, which these tests go with: they have their kernels' bits.

The kernels are emulated.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm90 import KEPT_192
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs, PortableTiles
from cutefce.cute_kernels.kernel_set import KernelSet, kernel_set
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.workspace import ExpsMemory
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.window_layout import WindowLayout
from cutefce.ops.primitives.dispatch import kernel_primitives
from cutefce.ops.primitives.fused.step import FusedStep, can_fuse
from cutefce.ops.primitives.row_selection import select_on_device
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.dw_views import aliased_views
from cutefce.ops.strategies.loss_inputs import LossInputs
from tests.emulation.hopper import run
from tests.support.kernel_models import use_models
from tests.support.reference import Case, random_case

TALL = GemmConfig(128, 64, cluster=2, stages=3, pingpong=True)
COOPERATIVE = GemmConfig(128, 64, cluster=1, stages=3, pingpong=False)
SWAPPED = GemmConfig(64, 48, cluster=2, stages=2, pingpong=True, swaps=True)
TOKENS, HIDDEN, VOCAB, BLOCK, LEAST = 151, 72, 333, 16, 32
NUM_SMS = 2
MEMORY = DwMemory(TOKENS, HIDDEN, VOCAB, BLOCK)
KEPT = WindowLayout.of(MEMORY, 0, 336, LEAST)
"""All exponentials."""
WINDOWS = WindowLayout.of(MEMORY, 144, 48, LEAST)
"""Some in the memory of dW, some kept, and some computed again, in dW and in a buffer."""
LAYOUTS = [
    replace(WINDOWS, fewest=91),
    replace(WindowLayout.of(replace(MEMORY, tokens=90), 224, 80, 48), fewest=41),
    WindowLayout.of(replace(MEMORY, tokens=40), 160, 176, 48),
]
"""That for all tokens, and others in the same memory; the last one computes no column again."""
SHORT = 48
"""Columns from which windows have the kernel of dX of many."""
Results = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def two_kernels_of_dx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelConfigs, "SHORT", SHORT)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_models(monkeypatch, lambda kernel: functools.partial(run, kernel))


@functools.cache
def kernels_of(config: GemmConfig, own_dx: bool) -> KernelSet:
    gradient = COOPERATIVE if config.swaps else config
    grad_hidden, short = (gradient, TALL) if own_dx else (None, None)
    configs = KernelConfigs(config, grad_hidden, gradient, short, KEPT_192)
    return kernel_set(arch_named("sm_90a"), "bfloat16", configs)


def random_problem(far: bool) -> Case:
    case = random_case(TOKENS, HIDDEN, VOCAB, dtype=torch.bfloat16, ignored=0.4)
    if far:
        case.h[::9] *= 60
    return case


def fused(
    case: Case,
    kernels: KernelSet,
    selects: bool,
    options: LossOptions,
    layouts: Sequence[WindowLayout],
    bits: int | None,
) -> Results:
    problem = Problem(TOKENS, HIDDEN, VOCAB, "bfloat16", "cuda", arch="sm_90a")
    assert can_fuse(problem, kernels, NUM_SMS, layouts, selects, bits)
    step = FusedStep(problem, kernels, NUM_SMS, layouts, selects, bits)
    loss, saved = step.forward(case.h, case.w, case.y, options)
    upstream = upstream_of(case, options, saved.selected and saved.selected.unpack())
    dx, dw = step.backward(upstream, case.h, case.w, case.y, saved, options)
    return loss, saved.stats, dx, dw


def separate(
    case: Case,
    kernels: KernelSet,
    selects: bool,
    options: LossOptions,
    layout: WindowLayout,
    bits: int | None,
) -> Results:
    """Return what `fused` does, by one host function a kernel."""
    primitives = kernel_primitives(PortableTiles(2 * LEAST, BLOCK, BLOCK, 64), kernels, NUM_SMS)
    selection, y = None, case.y
    if selects:
        selection = select_on_device("sm_90a", y, -100, TOKENS)
        y = selection.targets
    targets = Targets(y, VOCAB, options)
    targets.selection = selection
    inputs: Any = LossInputs(primitives, case.h, case.w, targets, case.h.dtype, case.w.dtype)
    dw, aliased = torch.empty_like(case.w), layout.aliased
    stored = aliased_views(dw, MEMORY, aliased)
    if layout.kept:
        stored.append((aliased, case.h.new_empty(TOKENS, layout.kept)))
    loss, stats = windows.forward(inputs, stored)
    upstream = upstream_of(case, options, selection)
    step = stats, stored, upstream, 2 * LEAST, True
    dx = windows.backward(inputs, *step, dw, None, aliased, bits)
    assert dx is not None
    return loss, stats.rows, dx, dw


def upstream_of(case: Case, options: LossOptions, selection: Any) -> Tensor:
    if options.is_scalar:
        return torch.tensor(0.7)
    return case.upstream if selection is None else selection.take(case.upstream)


def test_windows_are_of_all_kinds() -> None:
    kinds = {(window.memory, window.recomputed) for window in WINDOWS.windows}
    stored = (ExpsMemory.DW, False), (ExpsMemory.KEPT, False)
    assert kinds == {*stored, (ExpsMemory.DW, True), (ExpsMemory.BUFFER, True)}
    widths = [window.last - window.first for window in WINDOWS.windows]
    assert min(widths) < SHORT <= max(widths)


STEPS: dict[str, tuple[WindowLayout, int | None, bool, bool]] = {
    "kept, counted rows, mean": (KEPT, None, True, False),
    "kept, all rows, far": (KEPT, None, False, True),
    "windows, all rows, mean": (WINDOWS, None, False, False),
    "windows, counted rows, far": (WINDOWS, None, True, True),
    "20 bits, counted rows, mean": (WINDOWS, 4, True, False),
    "20 bits, all rows, far": (WINDOWS, 4, False, True),
}
"""Layout, low bits of dX's sums, whether rows are selected, and whether some are far.

Without far rows, the loss is the mean.
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPS.values(), ids=STEPS)
def test_it_equals_its_kernels(
    kind: tuple[WindowLayout, int | None, bool, bool], emulated: None
) -> None:
    layout, bits, selects, far = kind
    case, options = random_problem(far), LossOptions("none" if far else "mean")
    kernels = kernels_of(SWAPPED if far else COOPERATIVE, own_dx=far)
    got = fused(case, kernels, selects, options, [layout], bits)
    want = separate(case, kernels, selects, options, layout, bits)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


COUNTS: dict[str, tuple[int | None, int | None]] = {
    "40": (40, None),
    **{str(count): (count, 4) for count in (0, 41, 91)},
    "90": (90, None),
    "all": (None, None),
}
"""How many rows count, None for all without a selection, and low bits of dX's sums."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_it_is_right(kind: tuple[int | None, int | None], emulated: None) -> None:
    """Also where the number of rows that count chooses the layout: others write nothing to it."""
    count, bits = kind
    case, kernels = random_problem(far=False), kernels_of(TALL, own_dx=True)
    layouts = [WINDOWS]
    if count is not None:
        order = torch.randperm(TOKENS)
        case.y.clamp_(min=0)[order[count:]] = -100
        layouts = LAYOUTS
    loss, _, dx, dw = fused(case, kernels, count is not None, LossOptions(), layouts, bits)
    h, w = (x.double().requires_grad_() for x in (case.h, case.w))
    want = F.cross_entropy(h @ w.t(), case.y) if count != 0 else 0 * (h.sum() + w.sum())
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    for got, exact in zip((dx, dw), torch.autograd.grad(0.7 * want, (h, w)), strict=True):
        assert float((got.double() - exact).norm()) <= 2**-7 * float(exact.norm())
    assert not dx[case.y == -100].any()
