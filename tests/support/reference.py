"""What results are compared with, and how far they may be from it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from bench.harness.reference import float64_reference, unfused
from tests.support.layouts import Layout, pinned
from tests.support.once import once

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Inputs of one call and the upstream gradient of each row's loss."""

    h: Tensor
    w: Tensor
    y: Tensor
    upstream: Tensor


@dataclass(frozen=True)
class Result:
    """Losses (N,) and gradients."""

    loss: Tensor
    dx: Tensor
    dw: Tensor


def random_case(
    tokens: int,
    hidden: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    logit_std: float = 1.0,
    ignored: float = 0.1,
    seed: int = 0,
) -> Case:
    """Draw a case whose logits have the given standard deviation, some targets being -100."""
    torch.manual_seed(seed)
    h = torch.randn(tokens, hidden)
    w = torch.randn(vocab, hidden) * (logit_std / hidden**0.5)
    y = torch.randint(vocab, (tokens,))
    y[torch.rand(tokens) < ignored] = -100
    upstream = torch.randn(tokens, dtype=torch.promote_types(dtype, torch.float32))
    return Case(h.to(device, dtype), w.to(device, dtype), y.to(device), upstream.to(device))


def logits_case(logits: Tensor, y: Tensor, device: str = "cpu") -> Case:
    """Return a case with exactly these logits (N, V): the weight is the identity."""
    w = torch.eye(logits.shape[1], dtype=logits.dtype)
    upstream = torch.ones(len(y), dtype=torch.promote_types(logits.dtype, torch.float32))
    return Case(logits.to(device), w.to(device), y.to(device), upstream.to(device))


def evaluate(case: Case, loss: Loss) -> Result:
    """Run `loss`, which returns per-token losses, and its gradients."""
    h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
    losses = loss(h, w)
    dx, dw = torch.autograd.grad(losses, (h, w), case.upstream.to(losses.dtype))
    return Result(losses.detach(), dx, dw)


def exact(case: Case) -> Result:
    """Evaluate in float64."""
    return Result(*float64_reference(case.h, case.w, case.y, case.upstream))


def evaluate_unfused(case: Case) -> Result:
    """Evaluate the unfused loss: a GEMM in the inputs' dtype and a float32 cross entropy."""
    return evaluate(case, lambda h, w: unfused(h, w, case.y, reduction="none"))


def wide_logits(case: Case) -> Result:
    """Evaluate with logits in float32 and their gradient rounded to the inputs' dtype."""
    dtype = case.h.dtype
    logits = (case.h.float() @ case.w.float().t()).requires_grad_()
    losses = F.cross_entropy(logits, case.y, reduction="none")
    (dz,) = torch.autograd.grad(losses, logits, case.upstream)
    dz = dz.to(dtype)
    dx, dw = dz.float() @ case.w.float(), dz.float().t() @ case.h.float()
    return Result(losses.detach(), dx.to(dtype), dw.to(dtype))


def are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two results have the same bits.

    On the portable path of a GPU, which kernels run depends on what the process compiled before:
    there, whether they are the same up to rounding.
    """
    if a.is_cuda and a.dtype in (torch.float32, torch.float64):
        return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
    return torch.equal(a, b)


def ours(case: Case, **options: Any) -> Result:
    """Evaluate cutefce with reduction "none"."""
    return evaluate(
        case,
        lambda h, w: cutefce.linear_cross_entropy(h, w, case.y, reduction="none", **options),
    )


def by_layout(case: Case, layout: Layout, **options: Any) -> Result:
    """Evaluate cutefce in a layout; the loss of gradients in forward is the sum of all rows'."""
    if layout.in_chunks:
        ones = torch.ones((), dtype=case.upstream.dtype, device=case.h.device)
        case = Case(case.h, case.w, case.y, ones)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        given: dict[str, Any] = {"reduction": layout.reduction, **options}
        result: Tensor = cutefce.linear_cross_entropy(h, w, case.y, **given)
        return result

    with pinned(layout):
        return evaluate(case, loss)


def assert_as_accurate(
    got: Result,
    case: Case,
    names: tuple[str, ...] = ("loss", "dx", "dw"),
    saturated: bool = False,
) -> None:
    """Assert that errors against float64 are those of the unfused loss or smaller."""
    truth, other, wide = _references(case)
    forms = got, truth, other, wide or truth
    rows = ((name, *(getattr(form, name) for form in forms)) for name in names)
    assert_errors(rows, case.h.dtype, saturated)


def assert_errors(
    rows: Iterable[tuple[str, Tensor, Tensor, Tensor, Tensor]],
    dtype: torch.dtype,
    saturated: bool,
    factors: Mapping[str, float] | None = None,
) -> None:
    """Assert that results of inputs of a `dtype` are as accurate as the unfused form's.

    Each row has a name, ours, the exact result, the unfused form's, and that of float32 logits.

    For 16-bit inputs the factors are the project's guarantee: 1.05 of the unfused loss and 1.35 of
    float32 logits.  float32 results, whose errors are those of the order of their sums alone, are
    allowed twice the error of the unfused loss and the rounding of the exact result.  `saturated`
    cases are such that the unfused loss is exact: probabilities that round to 1 have no error,
    while a stored exponential has its rounding: they are allowed that, one unit roundoff.
    `factors` of some results take the place of 1.05 and 2.
    """
    narrow = dtype.itemsize == 2
    for name, result, want, other, wide in rows:
        error = distance(result, want)
        allowed = (factors or {}).get(name, 1.05 if narrow else 2) * distance(other, want)
        if name == "loss" or not narrow:
            allowed += distance(want.to(result.dtype), want)
        else:
            allowed = min(allowed, 1.35 * distance(wide, want))
        if saturated:
            allowed += torch.finfo(result.dtype).eps / 2 * float(want.norm())
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@once
def _references(case: Case) -> tuple[Result, Result, Result | None]:
    """Return float64 results, those of the unfused loss, and of 16-bit inputs those of float32."""
    narrow = case.h.dtype.itemsize == 2
    return exact(case), evaluate_unfused(case), wide_logits(case) if narrow else None


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference."""
    return float((a.double() - b.double()).detach().norm())
