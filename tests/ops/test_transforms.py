"""Derivatives other than a plain backward are refused by name."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import cutefce
from tests.support.reference import random_case

Function = Callable[..., Tensor]
TOKENS, HIDDEN, VOCAB = 12, 8, 40


class Inputs:
    """Hidden states, weight and targets in float64, and functions of these."""

    def __init__(self, reduction: str, workspace: int | str | None, device: str) -> None:
        case = random_case(TOKENS, HIDDEN, VOCAB, dtype=torch.float64, device=device)
        self.h, self.w, self.y = case.h, case.w, case.y
        self.reduction, self.workspace = reduction, workspace

    def ours(self, h: Tensor, w: Tensor | None = None) -> Tensor:
        return cutefce.linear_cross_entropy(
            h,
            self.w if w is None else w,
            self.y,
            reduction=self.reduction,
            workspace=self.workspace,
        )

    def log_probs(self, h: Tensor) -> Tensor:
        return cutefce.linear_log_probs(h, self.w, self.y).log_probs

    def of_probabilities(self, h: Tensor) -> Tensor:
        probs = torch.ones(TOKENS, VOCAB, device=h.device)
        return cutefce.linear_cross_entropy(h, self.w, probs, reduction=self.reduction)

    def divergence(self, h: Tensor) -> Tensor:
        heads = h, self.w, self.h.detach().sin(), self.w
        return cutefce.linear_divergence(*heads, reduction=self.reduction)

    @property
    def functions(self) -> dict[Function, str]:
        """Those of hidden states, with the names of what users call."""
        loss = "linear_cross_entropy"
        return {
            self.ours: loss,
            self.of_probabilities: loss,
            self.log_probs: "linear_log_probs",
            self.divergence: "linear_divergence",
        }

    def torchs(self, h: Tensor, w: Tensor | None = None) -> Tensor:
        logits = F.linear(h, self.w if w is None else w)
        return F.cross_entropy(logits, self.y, reduction=self.reduction)


def dual(function: Callable[..., Any], h: Tensor, *more: Any) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(h, h.cos()), *more)


def summed(function: Function) -> Function:
    return lambda h: function(h).sum()


TRANSFORMS: dict[str, Callable[[Tensor, Function], Any]] = {
    "jvp": lambda h, f: torch.func.jvp(f, (h,), (h,)),
    "jacfwd": lambda h, f: torch.func.jacfwd(f)(h),
    "jacrev": lambda h, f: torch.func.jacrev(f)(h),
    "linearize": lambda h, f: torch.func.linearize(f, h),
    "grad": lambda h, f: torch.func.grad(summed(f))(h),
    "vjp": lambda h, f: torch.func.vjp(f, h),
    "vmap": lambda h, f: torch.func.vmap(f)(torch.stack([h, h])),
    "gradients of samples": lambda h, f: torch.func.vmap(torch.func.grad(summed(f)))(
        torch.stack([h, h])
    ),
    "gradient of vmap": lambda h, f: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(
        torch.stack([h, h])
    ),
    "hessian": lambda h, f: torch.func.hessian(summed(f))(h),
    "functionalize": lambda h, f: torch.func.functionalize(f)(h),
    "dual numbers": lambda h, f: dual(f, h),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_refused(transform: Callable[[Tensor, Function], Any], device: str) -> None:
    x = Inputs("mean", None, device)
    for function, name in x.functions.items():
        with pytest.raises(
            NotImplementedError,
            match=rf"^{name}: got a call under a transform .*, expected torch\.autograd in reverse",
        ):
            transform(x.h, function)


@pytest.mark.parametrize("transform", ["grad", "jacfwd"])
def test_the_operator_itself_is_refused(transform: str, device: str) -> None:
    x = Inputs("mean", None, device)
    with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy: got a call under a tr"):
        TRANSFORMS[transform](x.h, lambda h: torch.ops.cutefce.loss(h, x.w, x.y))


def batched(loss: Tensor, h: Tensor) -> Any:
    return torch.autograd.grad(loss, h, torch.eye(TOKENS).to(h), is_grads_batched=True)


def vmap_of_backward(loss: Tensor, h: Tensor) -> Any:
    backward = lambda v: torch.autograd.grad(loss, h, v)[0]  # noqa: E731
    return torch.func.vmap(backward)(torch.eye(TOKENS).to(h))


def forward_over_reverse(loss: Tensor, h: Tensor) -> Any:
    return dual(lambda v: torch.autograd.grad(loss, h, v), torch.ones_like(loss))


@pytest.mark.parametrize("backward", [batched, vmap_of_backward, forward_over_reverse])
def test_batched_backwards_are_refused(
    backward: Callable[[Tensor, Tensor], Any], device: str
) -> None:
    x = Inputs("none", None, device)
    h = x.h.requires_grad_()
    for function in x.functions:
        with pytest.raises(
            NotImplementedError, match=r"^cutefce: got a backward with is_grads_batched=True, unde"
        ):
            backward(function(h), h)


def test_second_derivatives_are_refused(device: str) -> None:
    x = Inputs("none", None, device)
    h = x.h.requires_grad_()
    for function in x.functions:
        (dx,) = torch.autograd.grad(function(h).sum(), h, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"^cutefce: the loss has no second deriv"):
            dx.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_lose_no_tangent(backend: str, device: str) -> None:
    x = Inputs("mean", None, device)
    torch.compiler.reset()
    compiled = torch.compile(x.ours, backend=backend)
    with pytest.raises((NotImplementedError, AssertionError)) as raised:
        dual(compiled, x.h)
    # the tracer of torch 2.11 fails where it should raise our error
    if raised.type is NotImplementedError:
        assert re.search(r"in forward mode|no forward-mode derivatives", str(raised.value))


@pytest.mark.parametrize("workspace", ["min", "max", None])
def test_flops_are_those_of_the_unfused_form(workspace: str | None, device: str) -> None:
    x = Inputs("mean", workspace, device)
    for trained in ((x.h, x.w), (x.h,), (x.w,), ()):
        counts = []
        for loss in (x.ours, x.torchs):
            leaves = [
                each.detach().requires_grad_(any(each is other for other in trained))
                for each in (x.h, x.w)
            ]
            with FlopCounterMode(display=False) as counter:
                result = loss(*leaves)
                if trained:
                    result.backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] == 2 * TOKENS * HIDDEN * VOCAB * (1 + len(trained))
