"""The classes that log-sum-exps are estimated of: frequent targets, and some drawn at random.

Few classes have most of a language model's probability, and many the rest.  So the estimate takes
the M most frequent targets of the batch as they are, and one class of each of S strata of the
others for all of its stratum:

    l̂_i = log( e_iy + Σ_{v frequent} e_iv + (V - M) / S Σ_{v drawn} e_iv )        v ≠ y

Drawn classes are at equal distances, behind an offset of the seed, so that each is drawn with the
same chance.  All classes are taken if they are no more than M + S.  Every rank chooses the same.
"""

import torch
from torch import Tensor

from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.sample_sizes import estimate_count, frequent_count

ABSENT = -1
"""The place of a target that is not among the classes."""


def estimate_classes(targets: Targets, total: int) -> Tensor:
    """Return the M + S classes for a batch of targets, of `total` on all ranks; these are more.

    They are int64: the frequent ones, ascending, then the drawn ones, ascending.
    """
    seed = targets.tensors.seed
    assert seed is not None
    count, frequent = estimate_count(total), frequent_count(total)
    strata, others = count - frequent, total - frequent
    ids = targets.index + targets.first
    ids = torch.where(targets.active & (ids >= 0) & (ids < total), ids, total)
    counts = ids.new_zeros(total + 1).index_add_(0, ids, torch.ones_like(ids))[:total]
    # of equally frequent ones, the first; no two keys are equal, so that all devices agree
    keys = counts * total - torch.arange(total, device=ids.device)
    chosen = keys.topk(frequent).indices.sort().values
    offset = (seed[:1].long() & 0xFFFFFFFF) * others >> 32  # in [0, others)
    draws = (torch.arange(strata, device=ids.device) * others + offset) // strata
    before = chosen - torch.arange(frequent, device=ids.device)  # others before each of them
    return torch.cat([chosen, draws + torch.searchsorted(before, draws, right=True)])


def places_of(ids: Tensor, classes: Tensor) -> Tensor:
    """Return the places (N,) of `ids` (N,) among ascending `classes`; `ABSENT` of others."""
    place = torch.searchsorted(classes, ids).clamp_(max=len(classes) - 1)
    return torch.where(classes[place] == ids, place, ABSENT)
