"""Samples of one vocabulary shard: a rank's own results, combined with the other ranks'."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from cutefce.ops.primitives.interface import PartialT, WrappedProjection
from cutefce.ops.sampling.interface import SamplingProjection

if TYPE_CHECKING:
    from cutefce.ops.parallel.shard import VocabShard


@dataclass(frozen=True)
class ShardSampling(WrappedProjection[PartialT]):
    """Steps of sampling that need other ranks; `own` is the projection of this rank's shard."""

    shard: "VocabShard"

    def class_rows(self, x: Tensor, classes: Tensor) -> Tensor:
        """Return the rows that ranks have: of each, one rank has another one than 0."""
        place = classes - self.shard.first
        here = (place >= 0) & (place < len(x))
        rows = x[place.clamp_(0, len(x) - 1)]
        rows.masked_fill_(~here.view(-1, *[1] * (x.ndim - 1)), 0)
        return self.shard.all_reduce_(rows)

    def share(self, count: int) -> slice:
        """Return which of `count` classes this rank draws."""
        rank, ranks = self.shard.rank, len(self.shard.vocab)
        return slice(count * rank // ranks, count * (rank + 1) // ranks)

    def estimate_lse(
        self,
        frequent: PartialT | None,
        drawn: PartialT,
        log_ratio: float,
        target_logit: Tensor,
    ) -> Tensor:
        """Return the estimate from the classes of all ranks."""
        own, gather = cast(SamplingProjection[PartialT], self.own), self.shard.all_gather
        if frequent is not None:
            frequent = own.gather_partials(frequent, gather)
        drawn = own.gather_partials(drawn, gather)
        return own.estimate_lse(frequent, drawn, log_ratio, target_logit)
