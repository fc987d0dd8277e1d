"""defer: losses are torch's; a cross entropy of logits is fused, all else makes the logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.backends import KERNELS
from tests.support.deferral import (
    TARGETS,
    TOKENS,
    Model,
    Use,
    V,
    assert_same,
    ce,
    count_fused,
    gathered,
    step,
)
from tests.support.float64 import assert_no_float64
from tests.support.layouts import SMALL_TILES


def capped(logits: Any, targets: Tensor) -> Tensor:
    return ce(torch.tanh(logits * 3 / 5) * 5, targets)


def capped_twice_scaled(logits: Any, targets: Tensor) -> Tensor:
    return ce(2 * (7.0 * (logits / 7).tanh()) / 0.5, targets)


def added_and_scaled(logits: Any, targets: Tensor) -> Tensor:
    return ce(((logits * 0.5 + torch.arange(V) / 9) / 3 + torch.arange(V).flip(0) / 5) * 2, targets)


def first_classes(logits: Any, targets: Tensor) -> Tensor:
    cut = targets.clamp(max=19)
    return F.cross_entropy(
        logits[..., 2:20][:, 1:].reshape(-1, 18), (cut - 2).clamp(0)[:, 1:].flatten()
    )


def in_chunks(logits: Any, targets: Tensor) -> Tensor:
    chunks = zip(logits.split(4, dim=1), targets.split(4, dim=1), strict=True)
    return torch.stack([ce(x, y, reduction="sum") for x, y in chunks]).sum() / 5


def shifted(logits: Any, targets: Tensor) -> Tensor:
    flat = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
    return F.cross_entropy(flat, targets[..., 1:].reshape(-1))


def scaled_in_place(logits: Any, targets: Tensor) -> Tensor:
    logits.div_(0.7).mul_(torch.tensor(0.9))
    logits *= 3
    flat = logits.float().flatten(0, 1)
    flat.div_(2)
    return F.cross_entropy(flat, targets.flatten())


FUSED: dict[str, Use] = {
    "flat": ce,
    "float": lambda x, y: ce(x.float(), y),
    "to": lambda x, y: ce(x.to(torch.float32).to(x.device, torch.float32), y),
    "shifted": shifted,
    "sum": lambda x, y: ce(x, y, reduction="sum") / 7,
    "none": lambda x, y: ce(x, y, reduction="none").square().sum(),
    "ignore_index": lambda x, y: ce(x, y.masked_fill(y == -100, 3), ignore_index=3),
    "class weights": lambda x, y: ce(x, y, weight=torch.arange(V) / 7 + 0.1),
    "label smoothing": lambda x, y: ce(x, y, label_smoothing=0.1),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.view(-1, V), y.view(-1)),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="none").sum(),
    "torch.permute": lambda x, y: F.cross_entropy(torch.permute(x, (1, 2, 0)), y.t()),
    "scale": lambda x, y: ce(x * 0.3, y),
    "reflected scale": lambda x, y: ce(2 * x, y),
    "negative scale": lambda x, y: ce(x.mul(-1), y),
    "division": lambda x, y: ce(torch.div(x, 3), y),
    "softcap": lambda x, y: ce(4 * torch.tanh(x / 4), y),
    "scale and softcap": capped,
    "softcap and scale": capped_twice_scaled,
    "tensor scale": lambda x, y: ce(x * torch.tensor(0.5), y),
    "tensor from the left": lambda x, y: ce(torch.tensor(3) * x, y),
    "tensor as temperature": lambda x, y: ce(x / torch.tensor(0.7), y),
    "scaled in place": scaled_in_place,
    "added": lambda x, y: ce(x + torch.arange(V) / 9, y),
    "added from the left": lambda x, y: ce(torch.arange(V)[None] / 9 + x, y),
    "torch.add": lambda x, y: ce(torch.add(x, torch.arange(V)[None, None] / 9), y),
    "added and scaled": added_and_scaled,
    "added and capped": lambda x, y: ce(4 * ((x + torch.arange(V) / 9) / 4).tanh(), y),
    "added, first classes": lambda x, y: first_classes(x + torch.arange(V) / 9, y),
    "first classes": first_classes,
    "mask": lambda x, y: F.cross_entropy(x[y >= 0], y[y >= 0]),
    "one row": lambda x, y: F.cross_entropy(x[1, -2], y[1, -2]),
    "last": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "new dimension": lambda x, y: F.cross_entropy(x[None].squeeze(0)[0].unsqueeze(0)[0], y[0]),
    "chunks": in_chunks,
    "nothing counts": lambda x, y: ce(x, torch.full_like(y, -100)),
}
WITH_NUMBERS = {"class weights", "label smoothing", "tensor as temperature", "added and capped"}
"""Those whose numbers, of each kind, could be made as float64."""


def written(logits: Any, targets: Tensor) -> Tensor:
    logits[..., 3] = -5.0
    return ce(logits, targets)


def noted(logits: Any, targets: Tensor) -> Tensor:
    with torch.no_grad():
        assert logits.argmax(-1).shape == targets.shape
    return ce(logits, targets)


FALLS_BACK: dict[str, tuple[Use, str]] = {
    "log_softmax": (gathered, "log_softmax"),
    "+": (lambda x, y: ce(x + 1.5, y), "add"),
    "-": (lambda x, y: ce(1 - x, y), "__rsub__"),
    "scale with a gradient": (lambda x, y: ce(x * torch.ones((), requires_grad=True), y), "mul"),
    "one for each token": (lambda x, y: ce(torch.ones(2, 6, 1) * x, y), "mul"),
    "added for each token": (lambda x, y: ce(x + torch.ones(2, 6, 1), y), "add"),
    "added after a softcap": (
        lambda x, y: ce(x.tanh() + torch.arange(V) / 9, y),
        "cross_entropy: steps before it",
    ),
    "written": (written, "__setitem__"),
    "scaled in place by a row": (lambda x, y: ce(x.mul_(torch.ones(2, 6, 1)), y), "mul_"),
    "used before": (noted, "argmax"),
    "no scale": (lambda x, y: ce(x * 0, y), "mul"),
    "two softcaps": (lambda x, y: ce(x.tanh().tanh(), y), "cross_entropy: steps before it"),
    "negative softcap": (lambda x, y: ce(x.tanh() * -2, y), "cross_entropy: steps before it"),
    "softcap and smoothing": (
        lambda x, y: ce(x.tanh(), y, label_smoothing=0.1),
        "cross_entropy: label_smoothing with softcap",
    ),
    "probabilities": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.ones(12, V) / V),
        "cross_entropy: targets that are not int64 class indices",
    ),
    "float64": (lambda x, y: ce(x.double(), y).float(), "cross_entropy: logits cast to float64"),
    "all one": (lambda x, y: x.view(-1).square().mean(), "view"),
    "every other class": (lambda x, y: x[..., ::2].square().mean(), "__getitem__"),
    "python's sum": (lambda x, y: sum(row.square().sum() for row in x), "__iter__"),
    "list of logits": (lambda x, y: torch.stack([x, x]).mean(), "stack"),
    "matrix product": (lambda x, y: (x @ torch.ones(V)).square().mean(), "__matmul__"),
    "size_average": (
        lambda x, y: ce(x, y, size_average=False),
        "cross_entropy: size_average, reduce, another reduction or no ignore_index",
    ),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", FUSED)
def test_a_loss_is_fused(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(bias)
    loss, theirs = step(model, FUSED[name])
    cutefce.defer(model)
    calls = count_fused(monkeypatch)
    ours, mine = step(model, FUSED[name])
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-8, equal_nan=True)
    assert torch.isnan(loss) == (name == "nothing counts")
    assert_same(mine, theirs)
    assert len(calls) == (2 if name == "chunks" else 1)
    assert cutefce.deferral_report(model) == (len(calls), {})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in WITH_NUMBERS else [pytest.mark.slow])
        for name in FUSED
    ],
)
def test_a_fused_loss_makes_no_float64(name: str) -> None:
    """Some devices have none."""
    model = Model(True)
    cutefce.defer(model)
    assert_no_float64(lambda: step(model, FUSED[name]))
    assert cutefce.deferral_report(model).fused


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", FALLS_BACK)
def test_anything_else_makes_the_logits(name: str, bias: bool) -> None:
    model, (use, reason) = Model(bias), FALLS_BACK[name]
    loss, theirs = step(model, use)
    cutefce.defer(model)
    ours, mine = step(model, use)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-8)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (0, {reason: 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("cast", [False, True], ids=["own dtype", "float"])
def test_the_loss_has_the_dtype_of_torchs(dtype: torch.dtype, autocast: bool, cast: bool) -> None:
    def use(logits: Any, targets: Tensor) -> Tensor:
        return ce(logits.float() if cast else logits, targets)

    model = Model(dtype=torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        loss, theirs = step(model, use)
        cutefce.defer(model)
        ours, mine = step(model, use)
        logits = model(TOKENS)
    assert ours.dtype == loss.dtype == (torch.float32 if autocast or cast else dtype)
    assert isinstance(logits, DeferredLogits) and logits.dtype == dtype
    torch.testing.assert_close(ours, loss, rtol=2e-2, atol=0)
    assert_same(mine, theirs, rtol=5e-2)
    assert cutefce.deferral_report(model) == (1, {})
    # a loss outside of the region, as trainers have it
    torch.testing.assert_close(ce(logits.float(), TARGETS), loss.float(), rtol=2e-2, atol=0)
    assert logits.tensor("test").dtype == dtype


def test_gradients_are_sampled_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    KERNELS["kernels of sm_90a"].serve(monkeypatch, SMALL_TILES)
    torch.manual_seed(0)
    head, h = nn.Linear(8, 600, bias=False).bfloat16(), torch.randn(50, 8).bfloat16()
    y = torch.randint(600, (50,))
    found: list[Any] = []
    for loss in ("sampled", "call", "exact"):
        head.weight.grad = None
        torch.manual_seed(1)
        if loss == "call":
            more: dict[str, Any] = {"gradient": "sampled", "samples": 32}
            cutefce.linear_cross_entropy(h, head.weight, y, **more).backward()
        else:
            cutefce.defer(head, gradient=loss, samples=32)
            F.cross_entropy(head(h), y).backward()
            cutefce.undefer(head)
        found.append(head.weight.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match="samples: got 2"):
        cutefce.defer(head, gradient="sampled", samples=2)
