"""The classes of a token's k largest logits, from one pass over all classes.

The pass gives the largest logit of each block of classes.  The k largest logits are in the k blocks
of the largest of these.  A token's logits are computed again of these blocks alone, of which each
gives its k largest.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

ABSENT_CLASS = -100
"""The class where a token has none: soft targets do not count it."""
FOUND_BYTES = 32 << 20
"""Logits and classes of blocks that are found at a time; those of one token at least."""


def top_logits(
    largest: Tensor,
    block: int,
    logit: Tensor,
    targets: Targets,
    top_of_blocks: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    largest_of: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token in any order, and their classes, (N, k) both.

    They are those of this rank's classes.  With fewer classes than k, -1 of the logit -inf follows.

    Args:
        largest: (N, P) the largest logit but the target's of each block of classes.
        block: classes of a block.
        logit: (N,) of the targets.
        targets: those of the tokens.
        top_of_blocks: returns the k largest logits (R, M, k), or `block` if that is less, of some
            tokens, a slice, in each of the blocks (R, M) that they choose, and their classes.
        largest_of: returns the largest of each row of a matrix, as many as it is told, and their
            columns.
    """
    k = targets.options.top_k
    own = torch.where(targets.owned, logit, -torch.inf)[:, None]
    largest = largest.scatter_reduce(1, targets.safe_index[:, None] // block, own, "amax")
    _, chosen = largest_of(largest, min(k, largest.shape[1]))
    row = found_bytes(chosen.shape[1], min(k, block), logit.element_size())
    values, classes = logit.new_full((len(logit), k), -torch.inf), chosen.new_zeros(len(logit), k)
    for rows in blocks(len(logit), max(1, FOUND_BYTES // row)):
        found, of = (x.flatten(1) for x in top_of_blocks(chosen[rows], rows))
        count = min(k, found.shape[1])
        found, places = largest_of(found, count)
        values[rows, :count], classes[rows, :count] = found, of.gather(1, places)
    # places beyond this rank's classes must not be taken for another rank's target
    return values, (classes + targets.first).masked_fill_(values == -torch.inf, -1)


def found_bytes(chosen: int, k: int, item_bytes: int) -> int:
    """Return the bytes that are found of a token: k logits of each block, and their classes."""
    return chosen * k * (item_bytes + 8)


def top_rows(
    values: Tensor,
    classes: Tensor,
    stats: RowStats,
    targets: Targets,
    largest_of: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> Tensor:
    """Return the k largest log-probabilities of each token, then their classes, (2 k, N).

    They are the largest of logits `values` (N, M) of `classes` (N, M).  The target's has the bits
    of the log-probability that the call returns.  `largest_of` is that of `top_logits`.
    """
    log_p = values - stats.reference[:, None] - stats.sum_exp.log()[:, None]
    is_target = classes == (targets.index + targets.first)[:, None]
    log_p = torch.where(is_target, -stats.loss[:, None], log_p.clamp(max=0))
    log_p, places = largest_of(log_p, targets.options.top_k)
    classes = classes.gather(1, places)
    classes.masked_fill_((log_p == -torch.inf) | (classes < 0), ABSENT_CLASS)
    return torch.cat([log_p.t(), classes.t().to(log_p.dtype)])
