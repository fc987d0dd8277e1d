"""TODO."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutefce.ops.primitives.interface import Partial, Primitives, forward_unfused
from cutefce.ops.primitives.rows import RowStats, Targets, sum_dtype

if TYPE_CHECKING:
    pass


class ShardPrimitives:
    """`cutefce.ops.primitives.interface.Primitives` of one shard: `own`, joined with the others' results."""

    def __init__(self, own: Primitives, shard: "VocabShard") -> None:
        self.own, self.shard = own, shard

    def __getattr__(self, name: str) -> Any:
        """Leave every other step to `own`: it needs nothing of the other shards."""
        return getattr(self.own, name)

    forward = forward_unfused

    def dx_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of sums: dX is rounded after the ranks' parts are added."""
        return sum_dtype(dtype)

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        """Return r (N,): +inf for ignored rows, NaN for targets that no rank has, or several.

        Raises:
            IndexError: for such a target, on every rank; but not on a GPU, which is not waited for.
        """
        logit, elsewhere = self.own.target_logit(h, w, targets), _owned_elsewhere(targets)
        here = targets.active & ~elsewhere
        found = torch.stack([torch.where(elsewhere, 0, logit), here.to(logit.dtype)])
        logit, owners = self.shard.all_reduce_(found)
        wrong = (owners != 1) & (logit != torch.inf)
        if wrong.device.type == "cpu" and bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise IndexError(
                f"y: got target {int(targets.index[row]) + self.shard.first}, which "
                f"{int(owners[row])} ranks of the group own, expected 0 <= target < "
                f"{sum(self.shard.vocab)} or ignore_index, and the same targets on every rank"
            )
        return torch.where(wrong, torch.nan, logit)

    def reduce_partials(
        self, partial: Partial, target_logit: Tensor, targets: Targets, reduction: str
    ) -> tuple[RowStats, Tensor]:
        """Join the parts of every row; S is 0 where another rank has the target, and its part."""
        joined = self.own.gather_partials(partial, self.shard.all_gather)
        stats, loss = self.own.reduce_partials(joined, target_logit, targets, reduction)
        stats.sum_exp_others.masked_fill_(_owned_elsewhere(targets), 0)
        return stats, loss


def _owned_elsewhere(targets: Targets) -> Tensor:
    """Return (N,) bool: the row counts, and its target is not one of this shard's."""
    return targets.active & (targets.safe_index != targets.index)
