"""Counting fused losses of deferred heads, and comparing training steps."""

from typing import Any

import pytest
from torch import Tensor, nn

import cutefce
from cutefce.integrations.deferral import loss as deferral_loss


def count_fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have each call of the fused loss by deferred logits append its options to the result."""
    calls: list[Any] = []
    own = cutefce.linear_cross_entropy

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return own(*args, **options)

    monkeypatch.setattr(deferral_loss, "linear_cross_entropy", counted)
    return calls


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model by parameter, and clear them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Raise AssertionError unless tensors by name differ by `rtol` of their largest, or 1e-8."""
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        error, scale = (ours[name] - x).abs().max(), x.abs().max()
        assert error <= rtol * scale + 1e-8, f"{name}: {error} of {scale}"


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
