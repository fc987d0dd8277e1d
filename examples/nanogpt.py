"""Train a small transformer with the head of modded-nanogpt: capped by a sigmoid, K next tokens.

    python -m examples.nanogpt

The head's logits are 23 σ((x + 5) / 7.5) of products x.  As σ(y) = 1/2 + tanh(y / 2) / 2,

    a σ((x + b) / c) = a / 2 + s tanh((r x + r b) / s)        s = a / 2,  r = a / (4 c)

So that is `softcap` s = 11.5 of the products times `logit_scale` r = 23/30 plus a `linear_bias` of
r b = 23/6 for every class.  The constant a / 2 falls out of the softmax: loss and gradients are
exactly those of the sigmoid, and only an lse is smaller by 11.5.  Its targets are the next tokens
with a weight each, which share one softmax: soft targets.  Its float8 products are not served.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cutefce
from examples.training import Sizes, Transformer, fit

SIZES = Sizes(hidden=64, layers=1, heads=2, context=32, batch=16, steps=60, learning_rate=1e-2)
VOCAB = 97


def sigmoid_cap(weight: Tensor, a: float = 23.0, b: float = 5.0, c: float = 7.5) -> dict[str, Any]:
    """Return the options of logits a σ((x + b) / c) of products x with the weight (V, D)."""
    scale = a / (4 * c)
    bias = torch.full((len(weight),), scale * b, device=weight.device)
    return {"logit_scale": scale, "linear_bias": bias, "softcap": a / 2}


def next_tokens_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Sequence[float] = (1.0, 0.5, 0.25)
) -> Tensor:
    """Return the mean over positions () of the weighted losses of the next K tokens.

    Args:
        hidden: (B, T, D) hidden states.
        weight: (V, D) of the head.
        targets: (B, T) the token after each; those after the end do not count.
        weights: K factors, of the next token and of those that follow it.
    """
    classes = F.pad(targets, (0, len(weights) - 1), value=-1).unfold(-1, len(weights), 1)
    probs = hidden.new_tensor(weights, dtype=torch.float32) * (classes >= 0)
    loss: Tensor = cutefce.linear_cross_entropy(
        hidden, weight, target_indices=classes, target_probs=probs, **sigmoid_cap(weight)
    )
    return loss


def train(steps: int = SIZES.steps) -> list[float]:
    """Train on sequences with a constant difference, and return the losses."""
    torch.manual_seed(0)
    model = Transformer(VOCAB, SIZES)

    def loss() -> Tensor:
        first, step = torch.randint(VOCAB, (2, SIZES.batch, 1))
        tokens = (first + step % 4 * torch.arange(SIZES.context + 1)) % VOCAB
        return next_tokens_loss(model(tokens[:, :-1]), model.head.weight, tokens[:, 1:])

    return fit(model.parameters(), loss, steps)


def main() -> None:
    """Train, and print losses."""
    train()


if __name__ == "__main__":
    main()
