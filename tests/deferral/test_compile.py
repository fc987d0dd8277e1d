"""defer: a compiled loop is one graph, and compiled, traced or exported parts see logits."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cutefce
from tests.support.deferral import (
    TARGETS,
    TOKENS,
    Model,
    V,
    assert_same,
    ce,
    gathered,
    gradients,
    step,
)
from tests.support.tiers import rest_slow


@pytest.mark.parametrize("backend", rest_slow(["aot_eager", "eager"]))
def test_a_compiled_loop_is_one_graph(backend: str) -> None:
    def train(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens)[..., :20].float()
        return F.cross_entropy((15 * torch.tanh(logits / 15)).view(-1, 20), targets.view(-1))

    model, targets = Model(), TARGETS.clamp(max=19)
    loss = train(TOKENS, targets)
    loss.backward()
    theirs = gradients(model)
    cutefce.defer(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(train, backend=backend, fullgraph=True)
    for _ in range(3):
        ours = compiled(TOKENS, targets)
        ours.backward()
        assert_same(gradients(model), theirs)
        torch.testing.assert_close(ours, loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert cutefce.deferral_report(model) == (1, {})  # traced once


def test_a_compiled_fallback() -> None:
    model = Model()
    loss, theirs = step(model, gathered)
    cutefce.defer(model)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: gathered(model(TOKENS), TARGETS), backend="aot_eager")
    ours = compiled()
    ours.backward()
    torch.testing.assert_close(ours, loss)
    assert_same(gradients(model), theirs)


def test_a_compiled_loss_of_a_model_that_is_not() -> None:
    wanted, _ = step(Model(), ce)
    model = Model()
    cutefce.defer(model)
    torch.compiler.reset()
    loss, _ = step(model, torch.compile(ce, backend="aot_eager"))
    torch.testing.assert_close(loss, wanted)


def test_a_bias_is_added_across_a_compiled_graph() -> None:
    model, more = Model(), torch.arange(V) / 9
    expected = ce(model(TOKENS) + more, TARGETS)
    cutefce.defer(model)
    torch._dynamo.reset()
    logits = torch.compile(model, backend="aot_eager")(TOKENS)
    torch.testing.assert_close(ce(logits + more, TARGETS), expected)


def test_a_traced_or_exported_model_has_tensors() -> None:
    model = Model()
    expected = model(TOKENS)
    cutefce.defer(model)
    graph = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(graph(TOKENS), expected)
    for strict in (True, False):
        exported = torch.export.export(model, (TOKENS,), strict=strict)
        torch.testing.assert_close(exported.module()(TOKENS), expected)
