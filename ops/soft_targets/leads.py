"""What the rows of soft targets are: their leads, and the other classes with coefficients."""

import torch
from torch import Tensor

from cutefce.ops.rows.loss_terms import GivenTargets

NO_CLASS = -1
"""The lead of a token with a bad probability or class, which is taken for a target out of range."""
LEAST_DERIVATIVE = 2.0**-24
"""The least |a|, in units of Σ|b|, see `ops.soft_targets.targets`: z-loss can make it 0."""
LARGEST = torch.finfo(torch.float32).max
"""The largest probability of a class."""


def leads(indices: Tensor, probs: Tensor, vocab: int, ignored: int) -> Tensor:
    """Return the class (N,) of the largest probability of each token, of (N, K).

    `ignored` if all of them are 0, `NO_CLASS` if one is negative or not finite, or is of an index
    outside [0, vocab).
    """
    best = probs.argmax(-1, keepdim=True)
    lead = indices.gather(-1, best)[..., 0].long()
    lead = torch.where(is_wrong(indices, probs, vocab).any(-1), NO_CLASS, lead)
    return torch.where((probs == 0).all(-1), ignored, lead)


def soft_rows(
    x: GivenTargets, token: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the classes (N, K) of `SoftTargets`, coefficients b (N, K), and sums of these.

    b are the probabilities of the classes times the factors of smoothing, of `token` (N,) and of
    classes.  Classes are sorted, and counted from the rank's first one; the last of equal ones has
    the sum of their b.  The sums (N,), over the classes of all ranks, are the lead's b, those of
    the others, and `LEAST_DERIVATIVE` times the |b| of the others.
    """
    index, q, kappa = x.tensors.target_indices, x.tensors.target_probs, x.class_factors()
    assert index is not None and q is not None
    factor = 1 - x.options.label_smoothing
    index, scale = index.long(), torch.where(x.y == x.options.ignore_index, 0, factor * token)
    b = torch.where(scale[:, None] == 0, 0, q.to(x.dtype) * scale[:, None])
    if kappa is not None:
        b = b * kappa[index.clamp(0, len(kappa) - 1)]
    is_lead = index == x.y[:, None]
    lead, b = torch.where(is_lead, b, 0).sum(1), b.masked_fill(is_lead, 0)
    others, least = b.sum(1), LEAST_DERIVATIVE * b.abs().sum(1)
    return *_joined(index, b, x.own), (lead, others, least)


def _joined(index: Tensor, b: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    """Return the classes (N, K) of `own`, ascending, and b (N, K): the last of equal ones has all.

    What has no b, or is of another rank, is behind them as class 0.  Sums have a fixed order.
    """
    index, order = sort_own(index, b == 0, own)
    b = sum_equal(index, b.gather(1, order))
    b.masked_fill_(index == own.stop - own.start, 0)
    return index.masked_fill_(b == 0, 0), b


def sort_own(index: Tensor, absent: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    """Return the classes (N, K) of `own`, ascending from its first one on, and their places (N, K).

    What is `absent`, or of another rank, is behind them, with the number of all.
    """
    vocab = own.stop - own.start
    index = index - own.start
    return index.masked_fill_(absent | is_outside(index, vocab), vocab).sort(dim=1, stable=True)


def sum_equal(index: Tensor, b: Tensor) -> Tensor:
    """Let the last of equal classes `index` (N, K), which ascend, have their sum of b (N, K).

    Return b, which is overwritten.  Sums have a fixed order.
    """
    step = 1
    while step < index.shape[1]:  # of sorted classes, the last `step` of a run are summed
        equal = index[:, step:] == index[:, :-step]
        b[:, step:] += torch.where(equal, b[:, :-step], 0)
        step *= 2
    b[:, :-1].masked_fill_(index[:, 1:] == index[:, :-1], 0)
    return b


def is_wrong(indices: Tensor, probs: Tensor, vocab: int) -> Tensor:
    """Return where (..., K) a probability, or its index, is out of range."""
    outside = (probs != 0) & is_outside(indices, vocab)
    return outside | ~((probs >= 0) & (probs <= LARGEST))


def is_outside(indices: Tensor, vocab: int) -> Tensor:
    """Return where classes (..., K) are not in [0, vocab)."""
    return (indices < 0) | (indices >= vocab)
