"""Derivatives other than a plain backward: forward mode, batches of samples, second derivatives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import cutefce
from cutefce.ops.operators import kept
from tests.support.reference import random_case

Function = Callable[..., Tensor]
TOKENS, HIDDEN, VOCAB = 12, 8, 40


class Inputs:
    """Hidden states, weight, targets and tangents in float64, and the two forms of the loss."""

    def __init__(
        self,
        reduction: str,
        workspace: int | str | None,
        device: str,
        sizes: tuple[int, int, int] = (TOKENS, HIDDEN, VOCAB),
    ) -> None:
        case = random_case(*sizes, dtype=torch.float64, device=device)
        self.h, self.w, self.y = case.h, case.w, case.y
        self.dh, self.dw = torch.randn_like(self.h), torch.randn_like(self.w)
        self.reduction, self.workspace = reduction, workspace

    def ours(self, h: Tensor, w: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        return cutefce.linear_cross_entropy(
            h,
            self.w if w is None else w,
            self.y if y is None else y,
            reduction=self.reduction,
            workspace=self.workspace,
        )

    def torchs(self, h: Tensor, w: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        logits = F.linear(h, self.w if w is None else w)
        return F.cross_entropy(logits, self.y if y is None else y, reduction=self.reduction)

    def summed(self, loss: Function) -> Function:
        def summed(*arguments: Tensor) -> Tensor:
            total: Tensor = loss(*arguments).sum()
            return total

        return summed


@pytest.fixture(
    params=[("mean", None), ("mean", "min"), ("sum", "max"), ("none", "min"), ("none", "max")],
    ids=str,
)
def inputs(request: pytest.FixtureRequest, device: str) -> Inputs:
    reduction, workspace = request.param
    return Inputs(reduction, workspace, device)


def dual_tangent(x: Inputs, loss: Function) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(x.h, x.dh))).tangent
    assert isinstance(tangent, Tensor)
    return tangent


def batched_gradients(x: Inputs, loss: Function) -> tuple[Tensor, ...]:
    h, w = x.h.clone().requires_grad_(), x.w.clone().requires_grad_()
    result = loss(h, w)
    upstream = torch.stack([torch.full_like(result, 1.0 + i) for i in range(3)])
    return torch.autograd.grad(result, (h, w), upstream, is_grads_batched=True)


SERVED: dict[str, Callable[[Inputs, Function], Any]] = {
    "jvp of h": lambda x, f: torch.func.jvp(f, (x.h,), (x.dh,)),
    "jacfwd": lambda x, f: torch.func.jacfwd(f)(x.h),
    "jacrev": lambda x, f: torch.func.jacrev(f)(x.h),
    "linearize": lambda x, f: torch.func.linearize(f, x.h)[1](x.dh),
    "grad": lambda x, f: torch.func.grad(x.summed(f), argnums=(0, 1))(x.h, x.w),
    "vjp": lambda x, f: torch.func.vjp(f, x.h)[1](torch.ones_like(f(x.h))),
    "vmap": lambda x, f: torch.func.vmap(f)(torch.stack([x.h, x.dh])),
    "vmap of targets": lambda x, f: torch.func.vmap(f, in_dims=(0, None, 0))(
        torch.stack([x.h, x.dh]), x.w, torch.stack([x.y, x.y.flip(0)])
    ),
    "gradients of samples": lambda x, f: torch.func.vmap(torch.func.grad(x.summed(f)))(
        torch.stack([x.h, x.dh])
    ),
    "gradient of vmap": lambda x, f: torch.func.grad(
        lambda h: torch.func.vmap(f)(h).sum(), argnums=0
    )(torch.stack([x.h, x.dh])),
    "gradient of vmap of weights": lambda x, f: torch.func.grad(
        lambda w: torch.func.vmap(f, in_dims=(None, 0))(x.h, w).sum()
    )(torch.stack([x.w, x.dw])),
    "dual numbers": dual_tangent,
    "batched gradients": batched_gradients,
}


@pytest.mark.parametrize("transform", SERVED.values(), ids=SERVED)
def test_transforms_equal_torch(
    transform: Callable[[Inputs, Function], Any], inputs: Inputs
) -> None:
    torch.testing.assert_close(transform(inputs, inputs.ours), transform(inputs, inputs.torchs))


def test_backward_through_vmap(inputs: Inputs) -> None:
    gradients = []
    for loss in (inputs.ours, inputs.torchs):
        h, w = torch.stack([inputs.h, inputs.dh]).requires_grad_(), inputs.w.clone()
        losses = torch.func.vmap(loss, in_dims=(0, None))(h, w.requires_grad_())
        gradients.append(torch.autograd.grad(losses.sum(), (h, w)))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_lose_no_tangent(backend: str, device: str) -> None:
    x = Inputs("mean", None, device)
    torch.compiler.reset()
    compiled = torch.compile(x.ours, backend=backend)
    try:
        tangent = dual_tangent(x, compiled)
    except (NotImplementedError, RuntimeError):
        return  # refused, not lost
    torch.testing.assert_close(tangent, dual_tangent(x, x.torchs))


def test_tangents_of_a_denominator_are_refused(device: str) -> None:
    x = Inputs("mean", None, device)

    def loss(d: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(x.h, x.w, x.y, denominator=d)

    d = torch.tensor(3.0, device=device)
    with pytest.raises(NotImplementedError, match="denominator: got a tangent"):
        torch.func.jvp(loss, (d,), (torch.ones_like(d),))


def test_tangents_in_float16_stay_finite(device: str) -> None:
    torch.manual_seed(0)
    h, w = torch.randn(8192, 8, device=device), torch.randn(40, 8, device=device)
    h[:, 0], y = 60, torch.randint(40, (8192,), device=device)
    y[:2000] = 3
    dh, dw = torch.randn_like(h), torch.randn_like(w)

    def tangent(dtype: torch.dtype) -> Tensor:
        def loss(h: Tensor, w: Tensor) -> Tensor:
            return cutefce.linear_cross_entropy(h, w, y)

        primals, tangents = (h.to(dtype), w.to(dtype)), (dh.to(dtype), dw.to(dtype))
        result: Tensor = torch.func.jvp(loss, primals, tangents)[1]
        return result.double()

    torch.testing.assert_close(tangent(torch.float16), tangent(torch.float64), rtol=3e-2, atol=3e-2)


@pytest.mark.slow
def test_tangents_of_float16_means_over_many_tokens(device: str) -> None:
    """A row of dX divided by the tokens is below what float16 can hold."""
    torch.manual_seed(0)
    h, dh = torch.randn(2, 32768, 64, device=device).half()
    w = (torch.randn(200, 64, device=device) * 0.0005).half()
    y = torch.randint(200, (32768,), device=device)

    def tangent(dtype: torch.dtype, loss: Function, **options: Any) -> Tensor:
        def of_hidden(h: Tensor) -> Tensor:
            return loss(h, w.to(dtype), y, **options)

        result: Tensor = torch.func.jvp(of_hidden, (h.to(dtype),), (dh.to(dtype),))[1]
        return result.double()

    def torchs(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    want = tangent(torch.float64, torchs)
    got = tangent(torch.float16, cutefce.linear_cross_entropy)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
    halved = tangent(torch.float16, cutefce.linear_cross_entropy, denominator=65536.0)
    torch.testing.assert_close(halved, want / 2, rtol=1e-2, atol=0)
    assert not tangent(torch.float16, cutefce.linear_cross_entropy, denominator=0.0)


def test_samples_keep_nothing_for_each_other(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x, counts = Inputs("mean", "max", device), []
    keep = kept.keep

    def counted(stats: Tensor, results: kept.Kept) -> None:
        keep(stats, results)
        counts.append(len(kept._kept))

    monkeypatch.setattr(kept, "keep", counted)
    losses = torch.func.vmap(x.ours)(torch.stack([x.h, x.dh, x.h]))
    assert counts == [1, 1, 1] and not kept._kept
    assert losses.shape == (3,)


def test_batches_of_no_samples_are_refused(device: str) -> None:
    x = Inputs("mean", None, device)
    with pytest.raises(ValueError, match="vmap: got a batch of no samples"):
        torch.func.vmap(x.ours)(x.h.new_empty(0, *x.h.shape))


def test_tangents_of_the_weight(inputs: Inputs) -> None:
    primals, tangents = (inputs.h, inputs.w), (inputs.dh, inputs.dw)
    if inputs.reduction == "none":
        with pytest.raises(NotImplementedError, match="linear_weight: got a tangent"):
            torch.func.jvp(inputs.ours, primals, tangents)
        return
    torch.testing.assert_close(
        torch.func.jvp(inputs.ours, primals, tangents),
        torch.func.jvp(inputs.torchs, primals, tangents),
    )


SECOND: dict[str, Callable[[Inputs, Function], Any]] = {
    "hessian": lambda x, f: torch.func.hessian(x.summed(f))(x.h),
    "grad of grad": lambda x, f: torch.func.grad(
        lambda h: torch.func.grad(x.summed(f))(h).square().sum()
    )(x.h),
    "jvp of grad": lambda x, f: torch.func.jvp(torch.func.grad(x.summed(f)), (x.h,), (x.dh,)),
}


@pytest.mark.parametrize("transform", SECOND.values(), ids=SECOND)
def test_second_derivatives_are_refused(
    transform: Callable[[Inputs, Function], Any], inputs: Inputs
) -> None:
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        transform(inputs, inputs.ours)


def test_the_operator_itself_is_refused_under_transforms(device: str) -> None:
    x = Inputs("mean", None, device)
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(NotImplementedError, match=r"expected cutefce\.linear_cross_entropy"):
            transform(lambda h: torch.ops.cutefce.loss(h, x.w, x.y))(x.h)


@pytest.mark.parametrize(
    ("reduction", "workspace"), [("mean", "min"), ("sum", "max"), ("mean", None)]
)
def test_gradcheck(reduction: str, workspace: str | None, device: str) -> None:
    x = Inputs(reduction, workspace, device, (4, 3, 7))  # each element is perturbed
    leaves = x.h.requires_grad_(), x.w.requires_grad_()
    assert torch.autograd.gradcheck(x.ours, leaves, check_forward_ad=True, check_batched_grad=True)


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
