"""defer: checkpoints, hooks, functions and transforms of autograd see the gradients of logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cutefce
from tests.support.deferral import TARGETS, TOKENS, D, Model, V, assert_same, ce, gradients, step


def test_logits_made_without_gradients_keep_theirs() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    with torch.no_grad():
        seen = logits[:, :-1].argmax(-1)
        assert not seen.requires_grad
    logits.logsumexp(-1).mean().backward()
    assert model.head.weight.grad is not None and model.embedding.weight.grad is not None


def test_a_bias_has_a_gradient_beside_logits_without() -> None:
    model, more = Model(), torch.zeros(V, requires_grad=True)
    cutefce.defer(model, evaluation=True)
    with torch.no_grad():
        logits: Any = model(TOKENS)
    ce(logits + more, TARGETS).backward()
    assert more.grad is not None and more.grad.abs().max() > 0


def test_a_metric_in_inference_mode_leaves_the_gradient() -> None:
    def with_metric(logits: Any, targets: Tensor) -> Tensor:
        with torch.inference_mode():
            logits.argmax(-1)
        return ce(logits, targets)

    _, wanted = step(Model(), with_metric)
    model = Model()
    cutefce.defer(model)
    _, found = step(model, with_metric)
    assert_same(found, wanted)


@pytest.mark.parametrize("method", ["retain_grad", "register_hook"])
def test_gradients_of_logits_are_watched_before_the_loss_alone(method: str) -> None:
    def watched(model: Model, before: bool) -> list[Tensor]:
        seen: list[Tensor] = []
        logits = model(TOKENS)
        loss = None if before else ce(logits, TARGETS)
        given = (seen.append,) if method == "register_hook" else ()
        getattr(logits, method)(*given)
        (ce(logits, TARGETS) if loss is None else loss).backward()
        return seen or [logits.grad]

    model = Model()
    (wanted,) = watched(model, before=False)
    cutefce.defer(model)
    (found,) = watched(model, before=True)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match=f"^logits: got {method} after a loss that was"):
        watched(model, before=False)
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda view: ce(view, TARGETS.flatten()),
        lambda view: view.log_softmax(-1),
    ]
    for use in uses:
        logits = model(TOKENS)
        view = logits.view(-1, V)
        if method == "register_hook":
            torch.Tensor.register_hook(logits, print)  # type: ignore[no-untyped-call]
        else:
            logits.retain_grad()
        with pytest.raises(RuntimeError, match=r"^logits: got a use of a view that was taken"):
            use(view)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_a_gradient_by_logits_after_their_loss_is_refused(allow_unused: bool) -> None:
    model = Model()
    logits: Any = model(TOKENS)
    (wanted,) = torch.autograd.grad(ce(logits, TARGETS), logits)
    cutefce.defer(model)
    logits = model(TOKENS)
    loss = ce(logits, TARGETS)
    with pytest.raises(RuntimeError, match=r"logits: got torch.autograd.grad after a loss"):
        torch.autograd.grad(loss, [logits], allow_unused=allow_unused)
    logits = model(TOKENS) + 0
    torch.testing.assert_close(torch.autograd.grad(ce(logits, TARGETS), logits)[0], wanted)


def test_a_backward_hook_of_a_model_sees_logits() -> None:
    model, seen = Model(), list[Any]()

    def hook(module: nn.Module, into: Any, out: Any) -> None:
        seen.append(out[0].shape)

    cutefce.defer(model)
    model.register_full_backward_hook(hook)
    step(model, ce)
    assert seen == [(2, 6, V)]
    assert cutefce.deferral_report(model) == (0, {"backward hooks of the model": 1})


class OwnLoss(torch.autograd.Function):
    """A loss that sees logits without their gradient, or computes it in its forward."""

    @staticmethod
    def forward(ctx: Any, logits: Any, computes: bool) -> Tensor:
        with torch.set_grad_enabled(computes):
            loss: Tensor = ce(logits, TARGETS) if computes else logits.sum()
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


@pytest.mark.parametrize("computes", [False, True])
def test_an_autograd_function_is_refused(computes: bool) -> None:
    model = Model()
    cutefce.defer(model)
    with pytest.raises(RuntimeError, match=r"deferred ones in torch\.autograd\.Function"):
        OwnLoss.apply(model(TOKENS), computes)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_that_is_checkpointed(use_reentrant: bool) -> None:
    model = Model()

    def loss(hidden: Tensor) -> Tensor:
        return ce(model.head(hidden), TARGETS)

    found: list[Any] = []
    for _ in range(2):
        hidden = torch.ones(2, 6, D, requires_grad=True)
        checkpoint(loss, hidden, use_reentrant=use_reentrant).backward()
        found.append(hidden.grad)
        if len(found) == 1:
            cutefce.defer(model)
    torch.testing.assert_close(found[1], found[0])
    assert cutefce.deferral_report(model) == (1, {})


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_head_that_is_checkpointed_has_a_gradient(evaluation: bool, reentrant: bool) -> None:
    model, hidden = Model(), torch.ones(2, 6, D, requires_grad=True)
    ce(model.head(hidden), TARGETS).backward()
    wanted, theirs = hidden.grad, gradients(model)
    cutefce.defer(model, evaluation=evaluation)
    for function in (model.head, lambda x: model.head(x)[:, :-1], lambda x: model.head(x) * 2):
        hidden.grad = None
        logits: Any = checkpoint(function, hidden, use_reentrant=reentrant)
        loss_of = F.cross_entropy(logits.flatten(0, 1), TARGETS[:, : logits.shape[1]].flatten())
        loss_of.backward()
        mine = gradients(model)
        if function is model.head:
            torch.testing.assert_close(hidden.grad, wanted)
            assert_same(mine, theirs)
        assert hidden.grad is not None and len(mine) == 1


@pytest.mark.parametrize("cut", ["sliced", "transposed", "with a loss"])
def test_a_reentrant_checkpoint_may_return_any_rows(cut: str) -> None:
    def forward(hidden: Tensor) -> Any:
        logits = model.head(hidden)
        if cut == "with a loss":
            return ce(logits, TARGETS), logits[..., :9] * 1
        return hidden * 2, logits[..., :9] if cut == "sliced" else logits.transpose(1, 2)

    def train() -> dict[str, Tensor]:
        hidden = torch.linspace(-1, 1, 12 * D).view(2, 6, D).requires_grad_()
        first, second = checkpoint(forward, hidden, use_reentrant=True)
        (first.sum() + second.square().mean()).backward()
        return gradients(model)

    model = Model()
    theirs = train()
    cutefce.defer(model)
    assert_same(train(), theirs)


def test_the_parameters_are_those_of_the_heads_call() -> None:
    model = Model(bias=True)
    own = {name: (x.detach() * 1.5).requires_grad_() for name, x in model.named_parameters()}
    results = []
    for _ in range(2):
        loss = ce(torch.func.functional_call(model, own, (TOKENS,)), TARGETS)
        results.append((loss.detach(), *torch.autograd.grad(loss, [*own.values()])))
        if len(results) == 1:
            cutefce.defer(model)
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted)
    assert cutefce.deferral_report(model) == (1, {})


@pytest.mark.parametrize("calls_inside", [True, False], ids=["call inside", "call before"])
def test_a_scale_has_derivatives_by_transforms(calls_inside: bool) -> None:
    def derivative() -> Tensor:
        before = model(TOKENS)

        def loss_of(scale: Tensor) -> Tensor:
            return ce((model(TOKENS) if calls_inside else before) * scale, TARGETS)

        found: Tensor = torch.func.jacfwd(loss_of)(scale)
        return found

    model, scale = Model(), torch.tensor(0.7)
    wanted = derivative()
    cutefce.defer(model)
    torch.testing.assert_close(derivative(), wanted)


def test_transforms_of_the_model_see_tensors() -> None:
    model = Model()

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        loss: Tensor = ce(torch.func.functional_call(model, parameters, (TOKENS,)), TARGETS)
        return loss

    parameters = {name: x.detach() for name, x in model.named_parameters()}
    wanted = torch.func.grad(loss_of)(parameters)
    cutefce.defer(model)
    assert_same(torch.func.grad(loss_of)(parameters), wanted)
    tangent = torch.func.jvp(loss_of, (parameters,), (parameters,))[1]
    assert tangent.isfinite()
    assert cutefce.deferral_report(model).fallbacks == {"torch.func": 2}
