"""The classes of a token's k largest logits, from one pass over all classes.

The pass gives the largest logit of each block of classes.  The k largest logits are in the k blocks
of the largest of these, so that a token's logits are computed again of few blocks alone.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

ABSENT_CLASS = -100
"""The class where a token has none: soft targets do not count it."""
COMPUTED_BYTES = 32 << 20
"""Logits that are computed again at a time; those of one token at least."""


def top_logits(
    largest: Tensor,
    block: int,
    logit: Tensor,
    targets: Targets,
    logits_of_blocks: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token in any order, and their classes, (N, k) both.

    They are those of this rank's classes.  With fewer classes than k, -1 of the logit -inf follows.

    Args:
        largest: (N, P) the largest logit but the target's of each block of classes.
        block: classes of a block.
        logit: (N,) of the targets.
        targets: those of the tokens.
        logits_of_blocks: returns the logits (R, M, `block`) of some tokens, a slice, and of the
            blocks (R, M) that each chooses; -inf beyond the last class.
    """
    k = targets.options.top_k
    own = torch.where(targets.owned, logit, -torch.inf)[:, None]
    largest = largest.scatter_reduce(1, targets.safe_index[:, None] // block, own, "amax")
    chosen = largest.topk(min(k, largest.shape[1]), 1, sorted=False).indices
    computed = chosen.shape[1] * block
    size = max(1, COMPUTED_BYTES // (computed * logit.element_size()))
    values, classes = logit.new_empty(len(logit), k), chosen.new_empty(len(logit), k)
    for rows in blocks(len(logit), size):
        u, first = logits_of_blocks(chosen[rows], rows), chosen[rows] * block
        if targets.logits is not None and targets.logits.floor is not None:
            place = (targets.index[rows, None] - first)[:, :, None]  # (R, M, 1) of the target
            is_here, place = (place >= 0) & (place < block), place.clamp(0, block - 1)
            own_logit = u.gather(2, place)
            u.masked_fill_(u < targets.logits.floor[rows, None, None], -torch.inf)
            u.scatter_(2, place, torch.where(is_here, own_logit, u.gather(2, place)))
        found, places = u.flatten(1).topk(min(k, computed), 1, sorted=False)
        del u  # freed before the next ones are allocated
        found_classes = first.gather(1, places // block) + places % block
        absent = 0, k - found.shape[1]
        values[rows] = F.pad(found, absent, value=-torch.inf)
        classes[rows] = F.pad(found_classes, absent)
    # places beyond this rank's classes must not be taken for another rank's target
    return values, (classes + targets.first).masked_fill_(values == -torch.inf, -1)


def top_rows(values: Tensor, classes: Tensor, stats: RowStats, targets: Targets) -> Tensor:
    """Return the k largest log-probabilities of each token, then their classes, (2 k, N).

    They are the largest of logits `values` (N, M) of `classes` (N, M).  The target's has the bits
    of the log-probability that the call returns.
    """
    log_p = values - stats.reference[:, None] - stats.sum_exp.log()[:, None]
    is_target = classes == (targets.index + targets.first)[:, None]
    log_p = torch.where(is_target, -stats.loss[:, None], log_p.clamp(max=0))
    log_p, places = log_p.topk(targets.options.top_k, 1)
    classes = classes.gather(1, places).masked_fill(log_p == -torch.inf, ABSENT_CLASS)
    return torch.cat([log_p.t(), classes.t().to(log_p.dtype)])
