"""defer: what changed after the head's call is refused where the logits are made later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cutefce
from tests.support.deferral import TARGETS, TOKENS, Model, V, ce
from tests.support.tiers import rest_slow

LATE = "logits: got a use of deferred ones after"
SHARED = f"{LATE} others that may share their memory changed"


def test_a_copy_of_tanh_may_be_changed() -> None:
    """The backward of tanh reads its result."""
    model = Model()
    results = []
    for _ in range(2):
        logits: Any = model(TOKENS).tanh().clone()
        logits += torch.ones(V)
        results.append(torch.autograd.grad(ce(logits, TARGETS), model.head.weight)[0])
        cutefce.defer(model) if len(results) == 1 else None
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("use", ["metric", "loss"])
def test_logits_of_a_compiled_model_are_refused_after_a_step(use: str) -> None:
    """Its graph tells in which state the weight was."""
    torch.compiler.reset()
    model = Model()
    cutefce.defer(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        logits: Any = compiled(TOKENS)
        loss = ce(logits, TARGETS)
        assert logits.argmax(-1).shape == TOKENS.shape
        loss.backward()
        logits = compiled(TOKENS)
        optimizer.step()
        with pytest.raises(RuntimeError, match=f"{LATE} the head's weight"):
            logits.argmax(-1) if use == "metric" else ce(logits, TARGETS)


def test_logits_after_a_change_are_refused() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    early: Any = model(TOKENS)
    part = early[:, :-1]
    ce(logits, TARGETS).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=f"{LATE} the head's weight"):
        logits.argmax(-1)
    with pytest.raises(RuntimeError, match=f"{LATE} the head's weight"):
        ce(part, TARGETS[:, :-1])
    later: Any = model(TOKENS)
    part = later[:, :-1]
    later[..., 0] = 0.0
    assert later[0, 0, 0] == 0
    with pytest.raises(RuntimeError, match=SHARED):
        ce(part, TARGETS[:, :-1])


def test_a_change_of_what_was_added_is_refused() -> None:
    model, more = Model(), torch.zeros(V)
    cutefce.defer(model)
    logits: Any = model(TOKENS) + more
    more.add_(1)
    with pytest.raises(RuntimeError, match=f"{LATE} what was added to them"):
        ce(logits, TARGETS)


def test_a_change_of_the_bias_or_of_a_view_is_refused() -> None:
    model = Model(bias=True)
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    with torch.no_grad():
        model.head.bias.add_(1)
    with pytest.raises(RuntimeError, match=f"{LATE} the head's bias"):
        ce(logits, TARGETS)
    logits = model(TOKENS)
    flat = logits.view(-1, V)
    logits.argmax()
    flat.argmax()
    flat[:, 0] = -5.0
    with pytest.raises(RuntimeError, match=SHARED):
        ce(logits, TARGETS)
    part = model(TOKENS)[:, :-1]
    copy = part.contiguous()
    copy[..., 0] = -9.0
    with pytest.raises(RuntimeError, match=SHARED):
        ce(part, TARGETS[:, :-1])


def test_a_change_of_requires_grad_is_refused() -> None:
    """As `set_adapter` of peft changes it: torch has the gradients of the forward."""
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    model.head.requires_grad_(False)
    with pytest.raises(RuntimeError, match=f"{LATE} the head's weight"):
        ce(logits, TARGETS)
    model.head.requires_grad_(True)
    assert ce(logits, TARGETS).requires_grad


COPIES = [lambda x: x.clone(), lambda x: x.double(), lambda x: x / 2, lambda x: torch.tanh(x)]


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_the_logits_may_be_changed(copy: Any) -> None:
    """The logits keep their loss, as do copies that were taken before these are changed."""
    model = Model()
    wanted = ce(model(TOKENS), TARGETS)
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    changed, other = copy(logits), logits.clone()
    flat = changed.view(-1, V)
    changed.mul_(2)
    torch.testing.assert_close(ce(logits, TARGETS), wanted)
    logits.sub_(1)
    torch.testing.assert_close(ce(other, TARGETS), wanted)
    with pytest.raises(RuntimeError, match=SHARED):
        F.cross_entropy(flat, TARGETS.flatten())


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_changed_logits_is_refused(copy: Any) -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    part = logits[:, :-1]
    logits.mul_(2)
    with pytest.raises(RuntimeError, match=SHARED):
        copy(part)


def test_views_of_logits_that_were_scaled_in_place_are_refused() -> None:
    """A view that is taken afterwards has the scale; one of before would need it."""
    model = Model()
    wanted = ce(model(TOKENS) / 2, TARGETS)
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    early = logits[:, :-1]
    copy = logits.clone()
    logits /= 2
    torch.testing.assert_close(ce(logits, TARGETS), wanted)
    torch.testing.assert_close(ce(copy.div_(2)[:], TARGETS), wanted)
    uses: list[Any] = [lambda x: ce(x, TARGETS[:, :-1]), lambda x: x.argmax(), lambda x: x.clone()]
    for use in uses:
        with pytest.raises(RuntimeError, match=SHARED):
            use(early)
    assert cutefce.deferral_report(model) == cutefce.DeferralReport(2, {})


def written(logits: Any) -> Any:
    logits[..., 0] = -5.0
    return logits


def added(logits: Any) -> Any:
    logits += torch.arange(V) / 9
    return logits


def given_out(logits: Any) -> Any:
    with torch.no_grad():
        return torch.mul(logits, 3, out=logits)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": written,
    "added": added,
    "method": lambda x: x.sub_(1),
    "recorded": lambda x: x.mul_(2),
    "function": lambda x: F.relu(x, inplace=True),
    "function's name": torch.relu_,
    "out": given_out,
}


@pytest.mark.parametrize("place", rest_slow(["view", "base", "own"], default=2))
@pytest.mark.parametrize("name", rest_slow([*CHANGES]))
def test_a_change_in_a_compiled_graph_is_seen_or_refused(name: str, place: str) -> None:
    """Of logits and of their views, as without a graph."""
    model, change = Model(), CHANGES[name]

    def loss() -> Any:
        logits: Any = model(TOKENS)
        view = logits[:, :-1]
        change(view if place == "view" else logits)
        return ce(view, TARGETS[:, :-1]) if place == "base" else ce(logits, TARGETS)

    wanted = loss().detach()
    cutefce.defer(model)
    torch.compiler.reset()
    run = torch.compile(loss, backend="aot_eager")
    if place == "own":
        torch.testing.assert_close(run(), wanted)
        return
    with pytest.raises(RuntimeError, match=SHARED):
        run()
