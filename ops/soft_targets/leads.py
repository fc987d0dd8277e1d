"""What the rows of soft targets are made of: their leads, and the other classes in order."""

import torch
from torch import Tensor

NO_CLASS = -1
"""The lead of a token with a bad probability or class, which is taken for a target out of range."""
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
