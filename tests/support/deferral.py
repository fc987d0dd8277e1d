"""A small model to defer, its losses, and comparisons of training steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cutefce
from bench.harness import tiny_models
from cutefce.integrations.deferral import loss as deferral_loss

D, V = 16, 23
Use = Callable[[Any, Tensor], Tensor]
"""Maps logits (2, 6, V) and targets (2, 6) to a loss ()."""


class Model(nn.Module):
    """Hidden states of tokens, and a head."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D, dtype=dtype)
        self.layer = nn.Linear(D, D, dtype=dtype)
        self.head = nn.Linear(D, V, bias=bias, dtype=dtype)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layer(self.embedding(tokens)).tanh())

    def get_output_embeddings(self) -> nn.Module:
        return self.head


TOKENS = torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.roll(-1, 1).masked_fill(torch.arange(6) == 2, -100)


def step(model: nn.Module, use: Use, targets: Tensor = TARGETS) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a model."""
    loss = use(model(TOKENS), targets)
    loss.backward()
    return loss.detach(), gradients(model)


def tiny_llama() -> nn.Module:
    """Return a tiny Llama of transformers in training."""
    return tiny_models.build(tiny_models.tiny_config("llama")).train()


def own_step(model: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss that a model of transformers computes itself, and its gradients."""
    loss = model(**tiny_models.batch(), **more).loss
    loss.backward()
    return loss.detach(), gradients(model)


def ce(logits: Any, targets: Tensor, **options: Any) -> Tensor:
    """Return the loss that is fused."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def gathered(logits: Any, targets: Tensor) -> Tensor:
    """Return a loss that is not."""
    chosen = targets.clamp(0)[..., None]
    loss: Tensor = -logits.log_softmax(-1).gather(-1, chosen).mean() + logits.logsumexp(-1).mean()
    return loss


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
