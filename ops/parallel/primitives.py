"""`Projection` of one vocabulary shard: a rank's own results, combined with the other ranks'."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cutefce.ops.primitives.interface import PartialT, WrappedProjection
from cutefce.ops.rows.outputs import PartialOutputs
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.interface import SamplingProjection

if TYPE_CHECKING:
    from cutefce.ops.parallel.shard import VocabShard


@dataclass(frozen=True)
class ShardProjection(WrappedProjection[PartialT]):
    """Steps that need other ranks; `own` is the projection of this rank's shard."""

    shard: "VocabShard"

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        """Return r (N,): +inf for ignored tokens alone, NaN for targets of no rank or of several.

        Raises:
            IndexError: on a CPU, on every rank, for such a target, or one that some ranks ignore.
        """
        logit, here = self.own.target_logit(h, w, targets), targets.owned
        ranks = len(self.shard.vocab)
        # an owner counts 1, and a rank that ignores the token more than all ranks could as owners
        count = torch.where(targets.active, here.to(logit.dtype), ranks + 1)
        found = torch.stack([torch.where(here, logit, 0), count])
        logit, count = self.shard.all_reduce_(found)
        ignored = count == ranks * (ranks + 1)
        wrong = ~ignored & (count != 1)
        if wrong.device.type == "cpu" and bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            target = int(targets.index[row]) + self.shard.first
            raise IndexError(
                f"target: got {target if bool(targets.active[row]) else 'ignore_index'}, expected "
                f"0 <= target < {sum(self.shard.vocab)} or ignore_index, on every rank"
            )
        return torch.where(ignored, torch.inf, torch.where(wrong, torch.nan, logit))

    def soft_excess(self, h: Tensor, w: Tensor, targets: Targets, target_logit: Tensor) -> Tensor:
        """Return that of the classes of all ranks."""
        return self.shard.all_reduce_(self.own.soft_excess(h, w, targets, target_logit))

    def class_rows(self, x: Tensor, classes: Tensor) -> Tensor:
        """Return the rows that ranks have: of each, one rank has another one than 0."""
        place = classes - self.shard.first
        here = (place >= 0) & (place < len(x))
        rows = x[place.clamp_(0, len(x) - 1)]
        rows.masked_fill_(~here.view(-1, *[1] * (x.ndim - 1)), 0)
        return self.shard.all_reduce_(rows)

    def share(self, count: int) -> slice:
        rank, ranks = self.shard.rank, len(self.shard.vocab)
        return slice(count * rank // ranks, count * (rank + 1) // ranks)

    def estimate_lse(
        self,
        frequent: PartialT | None,
        drawn: PartialT,
        log_ratio: float,
        target_logit: Tensor,
    ) -> Tensor:
        own, gather = cast(SamplingProjection[PartialT], self.own), self.shard.all_gather
        if frequent is not None:
            frequent = own.gather_partials(frequent, gather)
        drawn = own.gather_partials(drawn, gather)
        return own.estimate_lse(frequent, drawn, log_ratio, target_logit)

    def partial_outputs(self, partial: PartialT, target_logit: Tensor) -> PartialOutputs:
        """Return those of all ranks, one part each."""
        own = self.own.partial_outputs(partial, target_logit).combined()
        if own.column is not None:
            own = own._replace(column=own.column + self.shard.first)
        given = torch.cat([x for x in own if x is not None], 1)
        # contiguous parts of a token are added in the same order for all tokens
        parts = iter(self.shard.all_gather(given).permute(2, 1, 0).contiguous())
        return PartialOutputs(*(None if x is None else next(parts) for x in own))

    def reduce_partials(
        self, partial: PartialT, target_logit: Tensor, targets: Targets
    ) -> tuple[RowStats, Tensor]:
        """Reduce the partials of all ranks; S and its coefficient are 0 where another owns y."""
        gathered = self.own.gather_partials(partial, self.shard.all_gather)
        stats, loss = self.own.reduce_partials(gathered, target_logit, targets)
        stats.sum_exp_others.masked_fill_(_owned_elsewhere(targets), 0)
        return stats, loss


def _owned_elsewhere(targets: Targets) -> Tensor:
    """Return (N,) bool: the token is active, and another rank owns its target."""
    return targets.active & ~targets.owned
