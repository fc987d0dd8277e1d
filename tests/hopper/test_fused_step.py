"""The host functions of a training step, with emulated kernels: right, and those kernels' bits."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs, PortableTiles
from cutefce.cute_kernels.kernel_set import KernelSet, kernel_set
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.primitives.dispatch import kernel_primitives
from cutefce.ops.primitives.fused_step import FusedStep
from cutefce.ops.primitives.row_selection import select_on_device
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.loss_inputs import LossInputs
from tests.emulation.hopper import run
from tests.support.kernel_models import use_models
from tests.support.reference import Case, random_case

TALL = GemmConfig(128, 64, cluster=2, stages=3, pingpong=True)
COOPERATIVE = GemmConfig(128, 64, cluster=1, stages=3, pingpong=False)
TOKENS, HIDDEN, VOCAB, COLUMNS = 150, 72, 333, 336
NUM_SMS = 2
Results = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_models(monkeypatch, lambda kernel: functools.partial(run, kernel))


@functools.cache
def kernels_of(config: GemmConfig, own_dx: bool) -> KernelSet:
    grad_hidden = config if own_dx else None
    configs = KernelConfigs(config, grad_hidden, config, grad_hidden)
    return kernel_set(arch_named("sm_90a"), "bfloat16", configs)


def random_problem(far: bool) -> Case:
    case = random_case(TOKENS, HIDDEN, VOCAB, dtype=torch.bfloat16, ignored=0.4)
    if far:
        case.h[::9] *= 60
    return case


def fused(case: Case, kernels: KernelSet, selects: bool, options: LossOptions) -> Results:
    problem = Problem(TOKENS, HIDDEN, VOCAB, "bfloat16", "cuda", arch="sm_90a")
    step = FusedStep(problem, kernels, NUM_SMS, COLUMNS, selects)
    loss, stats, exps, selection = step.forward(case.h, case.w, case.y, options)
    upstream = upstream_of(case, options, selection)
    given = case.h, case.w, case.y, stats.rows, exps, selection, options
    return loss, stats.rows, *step.backward(upstream, *given)


def separate(case: Case, kernels: KernelSet, selects: bool, options: LossOptions) -> Results:
    """Return what `fused` does, by one host function a kernel."""
    primitives = kernel_primitives(PortableTiles(512, 128, 128, 64), kernels, NUM_SMS)
    selection, y = None, case.y
    if selects:
        selection = select_on_device("sm_90a", y, -100, TOKENS)
        y = selection.targets
    targets = Targets(y, VOCAB, options)
    targets.selection = selection
    inputs: Any = LossInputs(primitives, case.h, case.w, targets, case.h.dtype, case.w.dtype)
    stored = [(0, case.h.new_empty(TOKENS, COLUMNS))]
    loss, stats = windows.forward(inputs, stored)
    dw, upstream = torch.empty_like(case.w), upstream_of(case, options, selection)
    dx = windows.backward(inputs, stats, stored, upstream, 512, True, dw)
    assert dx is not None
    return loss, stats.rows, dx, dw


def upstream_of(case: Case, options: LossOptions, selection: Any) -> Tensor:
    if options.is_scalar:
        return torch.tensor(0.7)
    return case.upstream if selection is None else selection.take(case.upstream)


@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "counted rows"])
@pytest.mark.parametrize(
    ("reduction", "far"), [("mean", False), ("none", True)], ids=["mean-near", "none-far rows"]
)
def test_it_equals_its_kernels(reduction: str, selects: bool, far: bool) -> None:
    case, options = random_problem(far), LossOptions(reduction)
    kernels = kernels_of(COOPERATIVE, own_dx=far)
    got = fused(case, kernels, selects, options)
    want = separate(case, kernels, selects, options)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("config", [TALL, COOPERATIVE], ids=str)
@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "counted rows"])
def test_it_is_right(selects: bool, config: GemmConfig) -> None:
    case = random_problem(far=False)
    loss, _, dx, dw = fused(case, kernels_of(config, own_dx=True), selects, LossOptions())
    h, w = (x.double().requires_grad_() for x in (case.h, case.w))
    want = F.cross_entropy(h @ w.t(), case.y)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    for got, exact in zip((dx, dw), torch.autograd.grad(0.7 * want, (h, w)), strict=True):
        assert float((got.double() - exact).norm()) <= 2**-7 * float(exact.norm())
    assert not dx[case.y == -100].any()
