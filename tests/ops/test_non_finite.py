"""Rows that have diverged, or overflow, end as torch's do, and beside them nothing changes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.backends import Backend, on_backends
from tests.support.layouts import LAYOUTS, Layout, pinned
from tests.support.non_finite import (
    ALONE,
    FEW,
    ROW,
    WEIGHTS,
    assert_no_healthier,
    assert_same_kind,
    broken_case,
    healthy_case,
    names,
    torch_result,
)
from tests.support.options import assert_results_as_accurate, soft_case
from tests.support.outputs import values_case
from tests.support.reference import by_layout, ours
from tests.support.tiers import pairwise, pairwise_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BROKEN = [*names(torch.float32)]
BUDGETS: list[int | str | None] = ["max", "min", 1 << 18]
OTHERS = torch.arange(150) != ROW


@pairwise_of({"name": FEW}, name=BROKEN, dtype=DTYPES, budget=BUDGETS)
def test_losses_and_gradients_end_as_those_of_torch(
    name: str,
    dtype: torch.dtype,
    budget: int | str | None,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    case = broken_case(name, dtype, device)
    got, want = ours(case, workspace=budget), torch_result(case)
    assert_same_kind(got.loss, want.loss)
    assert_no_healthier(got.dx, want.dx)
    assert_no_healthier(got.dw, want.dw)
    if name not in WEIGHTS:
        clean = ours(healthy_case(dtype, device), workspace=budget)
        for a, b in ((got.loss, clean.loss), (got.dx, clean.dx)):
            # what is compiled first may sum in another order
            exact = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(a[OTHERS], b[OTHERS], **exact)


@on_backends(float32=True, layout=LAYOUTS, name=BROKEN, few={"name": FEW})
def test_every_layout_ends_as_torch(layout: Layout, name: str, backend: Backend) -> None:
    case = broken_case(name, backend.dtype, backend.device)
    got, want = by_layout(case, layout), torch_result(case)
    assert_same_kind(got.loss, want.loss.sum() if layout.in_chunks else want.loss)
    assert_no_healthier(got.dx, want.dx)
    assert_no_healthier(got.dw, want.dw)
    if name not in WEIGHTS:
        clean = by_layout(healthy_case(backend.dtype, backend.device), layout)
        assert torch.equal(got.dx[OTHERS], clean.dx[OTHERS])


@pairwise_of({"name": FEW}, name=BROKEN, dtype=DTYPES, reduction=["mean", "sum"], budget=BUDGETS)
def test_reduced_losses_beside_ignored_rows(
    name: str, dtype: torch.dtype, reduction: str, budget: int | str | None, device: str
) -> None:
    case = broken_case(name, dtype, device)
    case.y[1::7] = -100
    active = case.y != -100
    h, w = case.h.requires_grad_(), case.w
    options: dict[str, Any] = {"reduction": reduction}
    wide = torch.promote_types(dtype, torch.float32)
    want = F.cross_entropy(F.linear(h.to(wide), w.to(wide)), case.y, **options)
    (want_dx,) = torch.autograd.grad(want, h)
    got = cutefce.linear_cross_entropy(h, w, case.y, workspace=budget, **options)
    assert_same_kind(got.detach(), want)
    (dx,) = torch.autograd.grad(got, h)
    assert_no_healthier(dx[active], want_dx[active])
    assert not dx[~active].any()  # torch's are NaN where the weight is not finite
    with torch.no_grad():
        assert_same_kind(cutefce.linear_cross_entropy(h, w, case.y, **options), want)


@pairwise(budget=BUDGETS, dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_a_target_of_no_probability_has_the_gradient_of_torch(
    budget: int | str | None, dtype: torch.dtype, small_tiles: PortableTiles
) -> None:
    """A target logit of -inf among finite ones: loss inf, finite gradient (portable path)."""
    case = broken_case("target -inf", dtype)
    got, want = ours(case, workspace=budget), torch_result(case)
    assert got.loss[ROW] == torch.inf
    torch.testing.assert_close(got.dx[ROW], want.dx[ROW])
    assert bool(got.dw.isfinite().all())


@pytest.mark.parametrize("budget", BUDGETS)
def test_whole_reference_blocks_of_no_probability(
    budget: int | str | None, small_tiles: PortableTiles, device: str
) -> None:
    """The first half of the logits is -inf; the target's is one of them or is not."""
    case = broken_case("all -inf", torch.float32, device)
    case.w[166:, 1] = 0
    for target in (ALONE, 300):
        case.y[ROW] = target
        got, want = ours(case, workspace=budget), torch_result(case)
        assert_same_kind(got.loss, want.loss)
        torch.testing.assert_close(got.dx[ROW], want.dx[ROW])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("has_target", [True, False])
def test_entropy_where_the_target_has_no_probability(
    has_target: bool, budget: int | str | None, small_tiles: PortableTiles
) -> None:
    """Its gradient is finite; without a target class 0 stands for it."""
    case, bias = healthy_case(torch.float64), torch.zeros(333, dtype=torch.float64)
    bias[0] = -torch.inf
    h, w, y = case.h.requires_grad_(), case.w, case.y.masked_fill(case.y > 0, 0)
    target = y if has_target else None
    given: Any = {"outputs": ("entropy",), "linear_bias": bias, "workspace": budget}
    found = cutefce.linear_log_probs(h, w, target, **given)
    counts = y >= 0 if has_target else torch.ones_like(y, dtype=torch.bool)
    log_p = (h @ w.t())[counts, 1:].log_softmax(1)
    want = -(log_p.exp() * log_p).sum(1)
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy[counts], want)
    got = torch.autograd.grad(found.entropy.sum(), h)
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), h))


def test_classes_of_rows_that_are_no_numbers(device: str) -> None:
    """An argmax is a class, so that it may index, and the largest ones are classes or absent."""
    h, w = torch.randn(2, 16, device=device), torch.randn(600, 16, device=device)
    h[1] = torch.nan
    bias = torch.full((600,), -torch.inf, device=device)
    for target, more in ((None, None), (torch.tensor([1, 2], device=device), bias)):
        given: Any = {"outputs": ("argmax",), "top_k": 2, "linear_bias": more}
        found = cutefce.linear_log_probs(h, w, target, **given)
        assert found.argmax is not None and found.top_classes is not None
        assert {*found.argmax.tolist()} <= {*range(600)}
        assert {*found.top_classes.flatten().tolist()} <= {-100, *range(600)}
    kept = torch.tensor([[5, 6], [5, -1]], device=device)
    y = torch.tensor([1, 2], device=device)
    for number in (None, bias):
        given = {"kept_classes": kept, "outputs": ("argmax",), "linear_bias": number}
        argmax = cutefce.linear_log_probs(h, w, y, **given).argmax
        assert argmax is not None and {*argmax.tolist()} <= {1, 2, 5, 6}


@pytest.mark.parametrize("number", [-torch.inf, -1e30, -1e9])
@pytest.mark.parametrize("has_target", [True, False])
def test_argmax_where_the_target_is_far_below(
    has_target: bool, number: float, small_tiles: PortableTiles, device: str
) -> None:
    """Each block of classes has its own largest logit; without a target class 0 stands for it."""
    torch.manual_seed(0)
    h, w = torch.randn(150, 16, device=device), torch.randn(3000, 16, device=device)
    bias = torch.zeros(3000, device=device)
    bias[0] = number
    y = torch.zeros(150, dtype=torch.int64, device=device) if has_target else None
    given: Any = {"linear_bias": bias, "outputs": ("argmax",), "top_k": 1}
    found = cutefce.linear_log_probs(h, w, y, **given)
    assert found.argmax is not None and found.top_classes is not None
    assert torch.equal(found.argmax, found.top_classes[:, 0])
    assert torch.equal(found.argmax, (h @ w.t() + bias).argmax(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_confident_rows_with_large_logits(scale: float, dtype: torch.dtype, device: str) -> None:
    """The target's logit exceeds all others, and its own by a GEMM by rounding alone."""
    torch.manual_seed(0)
    h, w = ((torch.randn(rows, 64, device=device) * scale).to(dtype) for rows in (64, 1000))
    y = (h.float() @ w.float().t()).argmax(1)
    h, w = h.requires_grad_(), w.requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, y)
    assert 0 <= loss.item() < 1e-6 * scale**2
    for gradient in torch.autograd.grad(loss, (h, w)):
        assert bool(gradient.isfinite().all())


@on_backends(
    few_backends=True, float32=True, layout=LAYOUTS, upstream=[torch.nan, torch.inf, -torch.inf]
)
def test_ignored_rows_have_no_gradient_whatever_the_upstream_one_is(
    layout: Layout, upstream: float, backend: Backend
) -> None:
    case = healthy_case(backend.dtype, backend.device)
    case.y[::3] = -100
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(h, w, case.y)
        dx = torch.autograd.grad(loss, h, torch.full_like(loss, upstream))[0]
    assert not dx[::3].any()
    assert not dx[1::3].isfinite().any()


@pairwise(
    kind=["indices", "soft targets", "probabilities", "log-probabilities", "entropy"],
    where=["upstream", "hidden states"],
    value=[torch.nan, torch.inf],
    dtype=DTYPES,
    workspace=["min", "max"],
)
def test_a_token_that_is_not_finite_leaves_dx_of_the_others(
    kind: str, where: str, value: float, dtype: torch.dtype, workspace: str, device: str
) -> None:
    """Its hidden states, or its upstream gradient, for every kind of targets and outputs."""
    case = healthy_case(dtype, device)
    clean, vocab, of_k = case.h.detach(), len(case.w), (len(case.h), 3)
    torch.manual_seed(0)
    soft = {"target_indices": torch.randint(vocab, of_k), "target_probs": torch.rand(of_k)}
    given: dict[str, Any] = {name: x.to(device) for name, x in soft.items()}
    every = torch.rand(len(clean), vocab, device=device).softmax(1)

    def dx(h: Tensor, upstream: Tensor) -> Tensor:
        h = h.clone().requires_grad_()
        if kind in ("log-probabilities", "entropy"):
            more: Any = {"outputs": ("entropy",), "workspace": workspace}
            values = cutefce.linear_log_probs(h, case.w, case.y, **more)
            rows: Any = values.log_probs if kind == "log-probabilities" else values.entropy
        else:
            target = {"indices": case.y, "soft targets": None, "probabilities": every}[kind]
            more = {"reduction": "none", "workspace": workspace}
            more |= given if target is None else {}
            rows = cutefce.linear_cross_entropy(h, case.w, target, **more)
        return torch.autograd.grad(rows, h, upstream)[0]

    ones = torch.ones(len(clean), dtype=torch.promote_types(dtype, torch.float32), device=device)
    broken, is_row = [clean, ones], ~OTHERS.to(device)
    if where == "upstream":
        broken[1] = ones.masked_fill(is_row, value)
    else:
        broken[0] = clean.masked_fill(is_row[:, None], value)
    got, want = dx(*broken), dx(clean, ones)
    assert not got[ROW].isfinite().any()
    tolerance = 2 * torch.finfo(dtype).eps  # float16's common factor may be another one
    torch.testing.assert_close(got[OTHERS], want[OTHERS], rtol=tolerance, atol=tolerance**2)


@pytest.mark.parametrize("workspace", ["min", "max"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_tokens_of_small_gradients_leave_the_others(
    dtype: torch.dtype, workspace: str, small_tiles: PortableTiles, device: str
) -> None:
    """Of log-probabilities of K classes, and of soft targets; T over their factors overflows."""
    x = values_case([], 5, 150, 16, 333, dtype=dtype, device=device)
    x.upstream["log_probs"][::3] *= 1e-38
    x.check(x.ours(workspace=workspace))
    soft = soft_case([], 5, 150, 16, 333, dtype=dtype, device=device)
    soft.options["target_probs"][::3] *= 1e-38
    assert_results_as_accurate(soft.ours(workspace=workspace), soft)
