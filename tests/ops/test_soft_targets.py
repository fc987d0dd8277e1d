"""Soft targets: a few classes of each token with probabilities."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.planning.planner import Plan
from tests.support.kernel_models import serve_calls
from tests.support.options import (
    OptionsCase,
    assert_results_as_accurate,
    exact,
    soft_case,
)
from tests.support.reference import PLANS, fixed_plan

EACH: dict[str, list[str]] = {
    "nothing": [],
    "smoothing and all factors": [
        "linear_bias",
        "weight",
        "label_smoothing",
        "token_weights",
        "z_loss",
        "logit_scale",
        "temperature (N,)",
    ],
    "softcap and all factors": [
        "linear_bias",
        "weight",
        "token_weights",
        "z_loss",
        "negative logit_scale",
        "softcap",
        "temperature (N,)",
    ],
}
each = pytest.mark.parametrize("names", EACH.values(), ids=list(EACH))
classes = pytest.mark.parametrize("classes", [1, 7, 64])
workspaces = pytest.mark.parametrize("workspace", ["min", 100_000, "max", None])
SIZES = 150, 16, 333


def loss_of(x: OptionsCase, leaves: tuple[Tensor, ...], **more: Any) -> Tensor:
    loss: Tensor = cutefce.linear_cross_entropy(
        leaves[0], leaves[1], **x.with_leaves(leaves), **more
    )
    return loss


def results(x: OptionsCase, **more: Any) -> tuple[Tensor, ...]:
    leaves = x.leaves
    loss = loss_of(x, leaves, **more)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@workspaces
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@classes
@each
def test_equals_float64(
    names: list[str],
    classes: int,
    reduction: str,
    workspace: Any,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    x = soft_case(names, classes, *SIZES, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"reduction": reduction}
    for got, want in zip(x.ours(**options, workspace=workspace), exact(x, **options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", [EACH["nothing"], EACH["softcap and all factors"]], ids=str)
def test_every_plan_is_as_accurate_as_the_unfused_loss(
    names: list[str],
    dtype: torch.dtype,
    plan: tuple[str, int, int, int],
    small_tiles: PortableTiles,
    device: str,
) -> None:
    strategy, aliased, kept, chunk = plan
    if dtype == torch.float16 and (aliased or kept):
        return  # no plan of float16 keeps exponentials
    x = soft_case(names, 7, 150, 64, 333, dtype=dtype, device=device)
    bias = "linear_bias" in x.options
    made = Plan(strategy, 64, aliased, kept, chunk, True, True, bias, 333, tokens=150)
    in_forward = strategy == "gradients_in_forward"
    if in_forward:
        upstream = torch.ones_like(x.case.upstream)
        x = OptionsCase(dataclasses.replace(x.case, upstream=upstream), x.options)
    with fixed_plan(made):
        got = x.ours(reduction="sum" if in_forward else "none")
    assert_results_as_accurate(got, x, first=in_forward)


@pytest.mark.parametrize("logit_std", [0.1, 1, 4, 12])
@pytest.mark.parametrize("sizes", [(150, 16, 333), (64, 96, 1001), (331, 40, 61)], ids=str)
@classes
def test_is_as_accurate_as_the_unfused_loss(
    classes: int, sizes: tuple[int, int, int], logit_std: float, device: str
) -> None:
    for dtype in DTYPES:
        x = soft_case([], classes, *sizes, dtype=dtype, device=device, logit_std=logit_std)
        assert_results_as_accurate(x.ours(), x)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: str(arch.name))
@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("names", [EACH["nothing"], EACH["softcap and all factors"]], ids=str)
def test_every_plan_on_the_kernels(
    names: list[str],
    plan: tuple[str, int, int, int],
    selects: bool,
    arch: Any,
    monkeypatch: pytest.MonkeyPatch,
    small_tiles: PortableTiles,
) -> None:
    pytest.importorskip("cutlass")
    strategy, aliased, kept, chunk = plan
    in_forward = strategy == "gradients_in_forward"
    x = soft_case(names, 7, 150, 64, 333, dtype=torch.bfloat16)
    if in_forward:
        upstream = torch.ones_like(x.case.upstream)
        x = OptionsCase(dataclasses.replace(x.case, upstream=upstream), x.options)
    bias = "linear_bias" in x.options
    made = Plan(strategy, 64, aliased, kept, chunk, True, True, bias, 333, tokens=150)
    serve_calls(monkeypatch, arch, small_tiles, selects=selects)
    reduction = "sum" if in_forward else "none"
    with fixed_plan(made):
        got = x.ours(reduction=reduction)
    assert_results_as_accurate(got, x, first=in_forward)
    if selects:
        ignored = (x.options["target_probs"] == 0).all(1)
        x.case.h[ignored] = torch.nan
        with fixed_plan(made):
            again = x.ours(reduction=reduction)
        for a, b in zip(again, got, strict=True):
            assert torch.equal(a, b), "what ignored rows hold does not matter"


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: str(arch.name))
@pytest.mark.parametrize("kept", [128, 336])
def test_a_frozen_head_on_the_kernels(
    kept: int, arch: Any, monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> None:
    """Sums of dX are kept in 24 bits, and formed in windows inside a chunk."""
    pytest.importorskip("cutlass")
    x = soft_case(["label_smoothing", "z_loss"], 7, 150, 64, 333, dtype=torch.bfloat16)
    serve_calls(monkeypatch, arch, small_tiles, selects=True)
    plan = Plan("gradients_in_forward", 64, 0, kept, 40, True, False, False, 333, tokens=150)
    h = x.case.h.clone().requires_grad_()
    with fixed_plan(plan):
        loss = loss_of(x, (h, x.case.w), reduction="none")
        (dx,) = torch.autograd.grad(loss, h, x.case.upstream)
    assert_results_as_accurate((loss.detach(), dx, exact(x)[2]), x)
