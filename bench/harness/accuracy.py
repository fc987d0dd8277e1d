"""How far results are from what float64 gives."""

import torch
from torch import Tensor

ROWS = 1024
"""Tokens whose logits are held at a time: the products of float64 stay large enough to be fast."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Mean loss, a scalar; dX (N, D); dW (V, D)."""

Errors = tuple[float, float, float]
"""Relative errors of loss, dX and dW, in the Euclidean norm."""


def exact(h: Tensor, w: Tensor, y: Tensor) -> Gradients:
    """Return loss, dX and dW in float64, every number of them, from h (N, D), w (V, D) and y (N,).

    A GPU with float64 tensor cores takes about a second for 8192 tokens and 128k classes.
    """
    wide = w.detach().double()
    loss, dw = wide.new_zeros(()), torch.zeros_like(wide)
    dx = []
    for part, target in zip(h.detach().split(ROWS), y[:, None].split(ROWS), strict=True):
        x = part.double()
        g = x @ wide.t()
        total = g.logsumexp(1, keepdim=True)
        loss += (total - g.gather(1, target)).sum() / len(h)
        g.sub_(total).exp_().scatter_add_(1, target, -torch.ones_like(total)).div_(len(h))
        dx.append(g @ wide)
        dw.addmm_(g.t(), x)
    return loss, torch.cat(dx), dw


def errors(got: Gradients, want: Gradients) -> Errors:
    """Return how far results are from those of `exact`."""
    loss, dx, dw = (relative_error(a, b) for a, b in zip(got, want, strict=True))
    return loss, dx, dw


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference over that of `want`, in float64; 0 where both are 0."""
    size = float(want.norm())
    distance = float((got.double() - want).norm())
    return distance / size if size else distance
