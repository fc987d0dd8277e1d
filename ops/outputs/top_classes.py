"""The classes of a token's k largest logits, from one pass over all classes.

The pass gives the largest logit but the target's of each block of classes.  The k largest but the
target's are in the k blocks of the largest of these.  A token's logits are computed again of these
blocks alone, of which each gives its k largest.
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
    chosen: Tensor,
    logit: Tensor,
    targets: Targets,
    top_of_blocks: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    largest_of: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return the target's logit and the k largest others of each token, and their classes.

    They are those of this rank's classes, (N, k + 1) both, in any order.  Where there are fewer,
    -1 of the logit -inf follows.

    Args:
        chosen: (N, M) the k blocks whose largest logit but the target's is largest, or all blocks.
        logit: (N,) of the targets.
        targets: those of the tokens.
        top_of_blocks: returns the k largest logits (R, M, K) but the target's of some tokens, a
            slice, in each of the blocks (R, M) that they choose, and their classes.  A block may
            have K < k classes.
        largest_of: returns the largest of each row of a matrix, as many as it is told, and their
            columns.
    """
    k = targets.options.top_k
    values, classes = (
        logit.new_full((len(logit), k + 1), -torch.inf),
        chosen.new_zeros(len(logit), k + 1),
    )
    values[:, k], classes[:, k] = torch.where(targets.owned, logit, -torch.inf), targets.index
    row = found_bytes(chosen.shape[1], k, logit.element_size())
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
