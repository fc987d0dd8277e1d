"""defer: heads that are tied, copied, gathered, replaced or refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.deferral import TARGETS, TOKENS, D, Model, V, assert_same, ce, step


def test_tied_weights() -> None:
    def tied() -> Model:
        model = Model()
        model.head.weight = model.embedding.weight
        return model

    loss, theirs = step(tied(), ce)
    model = tied()
    cutefce.defer(model)
    ours, mine = step(model, ce)
    torch.testing.assert_close(ours, loss)
    assert_same(mine, theirs)


def test_a_copy_has_its_own_head() -> None:
    model = Model()
    cutefce.defer(model.head)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(other.head.weight)
        loss, theirs = step(other, ce)
        torch.testing.assert_close(loss, torch.tensor(float(V)).log())
        assert theirs["head.weight"].any() and model.head.weight.grad is None
        assert cutefce.deferral_report(other).fused == 1
    assert cutefce.deferral_report(model).fused == 0


def test_undefer_restores_the_head() -> None:
    model = Model()
    before = dict(model.head.__dict__)
    cutefce.defer(model)
    assert list(model.state_dict()) == list(Model().state_dict())
    cutefce.undefer(model)
    assert type(model.head) is nn.Linear and model.head.__dict__ == before
    assert type(model(TOKENS)) is Tensor
    cutefce.defer(model)


def test_hooks_of_the_head_see_what_they_did() -> None:
    model, seen = Model(), []
    model.head.register_full_backward_hook(lambda *args: seen.append(args[2][0].shape))
    cutefce.defer(model)
    step(model, ce)
    assert seen == [(2, 6, V)]
    assert cutefce.deferral_report(model) == (0, {"backward hooks of the head": 1})


def test_a_weight_that_is_gathered_for_the_heads_call() -> None:
    model = Model()
    model.head.weight.requires_grad_(False)
    loss, theirs = step(model, ce)
    whole, placeholder = model.head.weight.data, torch.empty(0)
    hooks = [
        model.head.register_forward_pre_hook(lambda head, _: setattr(head.weight, "data", whole)),
        model.head.register_forward_hook(
            lambda *_: setattr(model.head.weight, "data", placeholder)
        ),
    ]
    model.head.weight.data = placeholder
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    assert model.head.weight.numel() == 0 and isinstance(logits, DeferredLogits)
    ours = ce(logits, TARGETS)
    torch.testing.assert_close(ours, loss)
    assert logits.mean().isfinite()
    assert cutefce.deferral_report(model) == (1, {"mean": 1})
    for hook in hooks:
        hook.remove()
    model.head.weight.data = whole  # nothing gathers it any more
    logits = model(TOKENS)
    model.head.weight.data = placeholder
    with pytest.raises(
        RuntimeError, match="logits: got a use of them where the head's weight is s"
    ):
        ce(logits, TARGETS)
    assert set(theirs) == {"embedding.weight", "layer.weight", "layer.bias"}


def test_replicas_of_data_parallel_return_tensors() -> None:
    model = Model()
    cutefce.defer(model)
    replica = model.head._replicate_for_data_parallel()
    replica.weight, replica.bias = model.head.weight * 2, None
    logits = replica(torch.ones(2, D))
    assert torch.equal(logits, F.linear(torch.ones(2, D), replica.weight))
    assert cutefce.deferral_report(model) == (0, {"nn.DataParallel": 1})


def test_a_weight_of_fewer_rows_tells_the_classes() -> None:
    """As vocabularies are pruned: out_features stays."""
    model = Model()
    model.head.weight = nn.Parameter(model.head.weight[:19].detach().clone())
    targets = TARGETS.clamp(max=18)
    loss, theirs = step(model, ce, targets)
    cutefce.defer(model)
    ours, mine = step(model, ce, targets)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (1, {})
    assert model(TOKENS).shape == (*TOKENS.shape, 19)


class Quantized(nn.Linear):
    """A head that does not use its weight as it is."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.round())


def headless(head: Any) -> Model:
    model = Model()
    model.head = head
    return model


class Named(nn.Linear):
    """Another name, no other forward."""


def replaced() -> nn.Linear:
    head = nn.Linear(D, V)
    head.forward = lambda input: input  # type: ignore[method-assign]
    return head


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "model: got ReLU, expected one with get_output_embeddings"),
        (Model, r"model: got <class '\S*Model'>, expected an nn.Module"),
        (None, "model: got None, expected an nn.Module"),
        (headless(Quantized(D, V)), r"head: got \S*Quantized, expected a plain torch.nn.Lin"),
        (headless(nn.Conv1d(1, 1, 1)), r"head: got torch\S*Conv1d, expected a plain torch.nn.Lin"),
        (headless(nn.Linear(D, V).to(torch.float8_e4m3fn)), "head: got a weight of torch.float8"),
        (headless(replaced()), "head: got .*Linear with another forward, expected a plain"),
        (headless(Named(D, V)), r"head: got \S*Named, expected a plain torch.nn.Linear"),
        (
            headless(nn.ModuleList([nn.Linear(D, V)] * 4)),
            r"head: got torch\S*ModuleList, expected a plain",
        ),
        (headless(None), "model: got one without output embeddings, expected a language model"),
    ],
)
def test_other_heads_are_refused(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cutefce.defer(model)
    if "expected an nn.Module" in message:
        for call in (cutefce.undefer, cutefce.deferral_report):
            with pytest.raises(TypeError, match=message):
                call(model)


def test_a_head_that_was_replaced_is_named() -> None:
    model = Model()
    cutefce.defer(model)
    model.head = nn.Linear(D, V)
    with pytest.raises(RuntimeError, match="again after its head was replaced"):
        cutefce.deferral_report(model)


def test_wrong_order_is_named() -> None:
    model = Model()
    for call in (cutefce.undefer, cutefce.deferral_report):
        with pytest.raises(RuntimeError, match="model: got no deferred head, expected a call of"):
            call(model)
    cutefce.defer(model)
    with pytest.raises(RuntimeError, match="model: got a head that is deferred already"):
        cutefce.defer(model)
