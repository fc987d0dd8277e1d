"""References: the unfused loss, and loss and gradients in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The target that every implementation ignores by default."""
ROWS = 1024
"""Tokens per chunk of the float64 logits: few enough for memory, enough for fast GEMMs."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Mean loss (), dX (N, D) and dW (V, D)."""


def unfused(h: Tensor, w: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss computed from all logits, in the inputs' dtype and then in float32 or wider.

    Args:
        h: (N, D) hidden states.
        w: (V, D) weight.
        y: (N,) targets.
        reduction: "mean" or "sum", for a loss (), or "none", for losses (N,).
    """
    logits = F.linear(h, w)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, y, reduction=reduction)


def float64_reference(h: Tensor, w: Tensor, y: Tensor, upstream: Tensor) -> Gradients:
    """Return losses (N,), dX (N, D) and dW (V, D) in float64.

    Takes h (N, D), w (V, D), targets y (N,) and the upstream gradient of each token's loss (N,).
    """
    wide = w.detach().double().requires_grad_()
    losses, dx = [], []
    chunks = zip(h.detach().split(ROWS), y.split(ROWS), upstream.split(ROWS), strict=True)
    for h_chunk, y_chunk, upstream_chunk in chunks:
        x = h_chunk.double().requires_grad_()
        loss = F.cross_entropy(F.linear(x, wide), y_chunk, reduction="none")
        loss.backward(upstream_chunk.double())
        assert x.grad is not None
        losses.append(loss.detach())
        dx.append(x.grad)
    assert wide.grad is not None
    return torch.cat(losses), torch.cat(dx), wide.grad


def float64_mean_reference(h: Tensor, w: Tensor, y: Tensor) -> Gradients:
    """Return the mean loss () over targets that are not ignored, dX and dW in float64."""
    active = (y != IGNORED).double()
    upstream = active / active.sum()
    losses, dx, dw = float64_reference(h, w, y, upstream)
    return (losses * upstream).sum(), dx, dw
