"""What the rows of soft targets are: their leads, and the other classes with coefficients.

Kernels make both where there are any, else plain torch, with equal bits but for sums of a row.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.spec.rowwise import PrepareSoftSpec, SoftLeadsSpec
from cutefce.cute_kernels.workspace import LEAST_DERIVATIVE, NO_CLASS, NUM_SOFT_ROWS

LARGEST = torch.finfo(torch.float32).max
"""The largest probability of a class."""


def leads(
    indices: Tensor, probs: Tensor, vocab: int, ignored: int, arch: str | None = None
) -> Tensor:
    """Return the class (N,) of the largest probability of each token, of (N, K).

    `ignored` if all of them are 0, `NO_CLASS` if one is negative or not finite, or is of an index
    outside [0, vocab).  `arch` has kernels, if given.
    """
    if arch is not None and probs.dtype != torch.float64:
        lead = indices.new_empty(len(indices))
        given = indices.contiguous(), probs.float().contiguous()
        compiled(SoftLeadsSpec(arch))(*given, lead, vocab, ignored)
        return lead
    best = probs.argmax(-1, keepdim=True)
    lead = indices.gather(-1, best)[..., 0].long()
    lead = torch.where(is_wrong(indices, probs, vocab).any(-1), NO_CLASS, lead)
    return torch.where((probs == 0).all(-1), ignored, lead)


def soft_rows(
    y: Tensor,
    index: Tensor,
    q: Tensor,
    token: Tensor,
    kappa: Tensor | None,
    factor: float,
    ignored: int,
    own: slice,
    dtype: torch.dtype,
    arch: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes (N, K) of `SoftTargets`, coefficients (N, K), and sums of these.

    The leads are y (N,), of which some are `ignored`.  b are the probabilities q (N, K) of the
    classes `index` (N, K) times `factor` times those of `token` (N,) and of classes, `kappa` (V,).
    This rank has the classes `own`.  Those are sorted and counted from its first one, and the last
    of equal ones has the sum of their b, in `dtype`.  Sums are (NUM_SOFT_ROWS, N), by `SoftRow`.
    More than eight parameters: a kernel's, and what says whether there is one.
    """
    if arch is not None and kappa is None and q.dtype != torch.float64 and index.shape[1] > 1:
        made = torch.empty_like(index), token.new_empty(index.shape)
        sums, first = token.new_empty(NUM_SOFT_ROWS, len(y)), own.start
        given = index.contiguous(), q.float().contiguous(), y.contiguous(), token.contiguous()
        compiled(PrepareSoftSpec(arch))(
            *given, *made, sums, factor, ignored, first, own.stop - first
        )
        return *made, sums
    index, scale = index.long(), torch.where(y == ignored, 0, factor * token)
    b = torch.where(scale[:, None] == 0, 0, q.to(dtype) * scale[:, None])
    if kappa is not None:
        b = b * kappa[index.clamp(0, len(kappa) - 1)]
    is_lead = index == y[:, None]
    lead, b = torch.where(is_lead, b, 0).sum(1), b.masked_fill(is_lead, 0)
    others, least = b.sum(1), LEAST_DERIVATIVE * b.abs().sum(1)
    sums = torch.stack([lead, others, lead + others, least])  # in the order of `SoftRow`
    return *_joined(index, b, own), sums


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
