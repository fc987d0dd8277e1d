"""defer: deferred logits stand for the tensor that the head would return."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.deferral import TARGETS, TOKENS, Model, V, assert_same, ce, step


def test_logits_behave_like_a_tensor() -> None:
    model = Model()
    expected = model(TOKENS)
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    assert isinstance(logits, DeferredLogits)
    assert repr(logits) == "DeferredLogits(shape=(2, 6, 23), dtype=torch.float32)"
    assert logits.shape == expected.shape and logits.size(-1) == V and len(logits) == 2
    assert (logits.ndim, logits.dim(), logits.numel()) == (3, 3, 2 * 6 * V)
    assert logits.requires_grad and logits.is_floating_point() and not logits.is_cuda
    assert logits.device == expected.device and logits.dtype == expected.dtype
    assert not hasattr(logits, "no_such_name")
    assert cutefce.deferral_report(model) == (0, {})
    assert torch.equal(logits.detach(), expected)
    assert logits.grad_fn is not None and torch.equal(logits.float(), expected)
    assert torch.equal(logits[0] + logits[1], expected[0] + expected[1])
    made: Any = logits
    assert torch.equal(made > 0, expected > 0) and torch.equal(-made, -expected)
    assert torch.equal(pickle.loads(pickle.dumps(model(TOKENS).detach())), expected)
    assert cutefce.deferral_report(model) == (0, {"detach": 2})


def test_views_have_the_shapes_of_the_logits() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    assert logits.view([-1, V]).shape == logits.reshape((12, -1)).shape == (12, V)
    assert cutefce.deferral_report(model) == (0, {})
    for sizes, message in (((5, V), r"'\[5, 23\]'"), ((5, -1, V), r"'\[5, -1, 23\]'")):
        with pytest.raises(RuntimeError, match=f"{message} is invalid for input of size 276"):
            logits.view(*sizes)


def test_keywords_and_tuples_of_torch() -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    def many(logits: Any) -> Tensor:
        flat = logits.view(size=(-1, V)).reshape(shape=(2, 6, V)).permute(dims=(1, 0, 2))
        copy = flat.clone(memory_format=torch.contiguous_format).unsqueeze(0).squeeze(dim=0)
        return torch.stack(Pair(copy, torch.mul(copy, 2, out=torch.empty(6, 2, V))))

    with torch.no_grad():
        wanted = many(Model()(TOKENS))
        model = Model()
        cutefce.defer(model, evaluation=True)
        torch.testing.assert_close(many(model(TOKENS)), wanted)


def test_evaluation_sees_tensors_unless_asked() -> None:
    model = Model().eval()
    cutefce.defer(model)
    with torch.no_grad():
        assert type(model(TOKENS)) is type(model.train()(TOKENS)) is Tensor
    cutefce.undefer(model)
    expected = ce(model(TOKENS), TARGETS)
    cutefce.defer(model, evaluation=True)
    with torch.inference_mode():
        logits: Any = model.eval()(TOKENS)
        assert isinstance(logits, DeferredLogits) and not logits.requires_grad
        torch.testing.assert_close(ce(logits, TARGETS), expected.detach())
    with torch.no_grad():
        logits = model(TOKENS)
    loss = ce(logits, TARGETS)  # the logits have no gradient, so neither has the loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


def test_training_in_evaluation_mode_is_fused() -> None:
    model = Model().eval()  # as from_pretrained returns it, and Lightning leaves it
    loss, theirs = step(model, ce)
    cutefce.defer(model)
    ours, mine = step(model, ce)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (1, {})
    assert type(model.requires_grad_(False)(TOKENS)) is Tensor  # nothing is trained


def test_casts_of_states_come_before_later_steps() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    logits.hidden = logits.hidden.bfloat16()  # as Fabric casts the fields of outputs
    assert logits.dtype == torch.bfloat16
    assert logits.float().dtype == (logits * 2).float().dtype == torch.float32
    assert (logits + torch.zeros(V)).dtype == torch.float32
    assert (logits[:, 1:] * 2).dtype == torch.bfloat16


def test_logits_are_moved_where_a_model_moves_its_outputs() -> None:
    """As hooks of accelerate do after the loss, which need not make logits for it."""
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    loss = ce(logits, TARGETS)
    moved = logits.to("meta:0", non_blocking=True).float()
    assert (moved.device.type, moved.shape) == ("meta", logits.shape)
    assert cutefce.deferral_report(model) == (1, {}) and loss.isfinite()
    assert (moved + 0).device.type == "meta"


class Outputs(dict[str, Any]):
    """Outputs with attributes of their own."""


class WithOutputs(Model):
    """A model that returns the same object each time."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = Outputs()

    def forward(self, tokens: Tensor) -> Any:
        self.outputs["logits"] = super().forward(tokens)
        return self.outputs


def test_outputs_are_those_that_the_model_returns() -> None:
    model = WithOutputs()
    cutefce.defer(model)
    assert model(TOKENS) is model.outputs and isinstance(model.outputs["logits"], DeferredLogits)


@torch.jit.script
def scripted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def test_a_scripted_loss_takes_logits_plus_0() -> None:
    """The documented remedy for functions that take nothing but tensors keeps the gradient."""
    model = Model()
    loss, theirs = step(model, lambda x, y: scripted(x + 0, y))
    cutefce.defer(model)
    with pytest.raises(RuntimeError, match="DeferredLogits"):
        scripted(model(TOKENS), TARGETS)
    ours, mine = step(model, lambda x, y: scripted(x + 0, y))
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same(mine, theirs)


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.asarray, torch.tensor])
def test_a_conversion_that_loses_the_gradient_is_refused(convert: Any) -> None:
    model = Model()
    cutefce.defer(model, evaluation=True)
    with pytest.raises((RuntimeError, BufferError), match="export tensors that require grad"):
        convert(model(TOKENS))
    with torch.no_grad():
        assert convert(model(TOKENS)).shape == (2, 6, V)


def test_a_function_mapped_over_outputs_does_not_see_the_hidden_states() -> None:
    model = Model()
    cutefce.defer(model)
    outputs = {"logits": model(TOKENS)}
    for change in (torch.detach, lambda x: x[..., :3], lambda x: x.numpy(force=True)):
        with pytest.raises(TypeError, match="logits: got a function that was mapped over"):
            _pytree.tree_map(change, outputs)
    same = _pytree.tree_map(lambda x: x.clone(), outputs)["logits"]
    wanted, _ = step(Model(), ce)
    torch.testing.assert_close(ce(same, TARGETS).detach(), wanted)
