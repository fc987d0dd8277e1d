"""`Projection` of one vocabulary shard: a rank's own results, combined with the other ranks'."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions
from cutefce.ops.primitives.interface import PartialT, Projection, forward_unfused
from cutefce.ops.rows.outputs import PartialOutputs
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.estimate_classes import EstimateClasses
from cutefce.ops.sampling.interface import SamplingProjection
from cutefce.ops.sampling.samples import Samples, Sampling

if TYPE_CHECKING:
    from cutefce.ops.parallel.shard import VocabShard


class ShardProjection(Generic[PartialT]):
    """`cutefce.ops.primitives.interface.Projection`; `own` is that of this rank's shard."""

    def __init__(self, own: Projection[PartialT], shard: "VocabShard") -> None:
        self.own, self.shard = own, shard

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return self.own.prepare(h, w)

    def select(self, h: Tensor, selection: RowSelection, scale: Tensor | None = None) -> Tensor:
        return self.own.select(h, selection, scale)

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

    def put_soft(self, entries: Tensor | None, exps: Tensor, first: int, targets: Targets) -> None:
        self.own.put_soft(entries, exps, first, targets)

    def scale_soft(
        self,
        entries: Tensor,
        lead: Tensor,
        exps: Tensor,
        first: int,
        targets: Targets,
        scale: Tensor,
    ) -> None:
        self.own.scale_soft(entries, lead, exps, first, targets, scale)

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        targets: Targets,
        exps: Tensor | None = None,
    ) -> PartialT:
        return self.own.project_exp(h, w, window, reference, targets, exps)

    def choose_classes(self, targets: Targets, sampling: Sampling) -> EstimateClasses:
        return cast(SamplingProjection[PartialT], self.own).choose_classes(targets, sampling)

    def target_places(self, chosen: EstimateClasses, targets: Targets) -> tuple[Tensor, Tensor]:
        return cast(SamplingProjection[PartialT], self.own).target_places(chosen, targets)

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

    def sample(
        self,
        h: Tensor,
        w: Tensor,
        reference: Tensor,
        estimate: Tensor,
        targets: Targets,
        sampling: Sampling,
    ) -> tuple[PartialT, Any]:
        own = cast(SamplingProjection[PartialT], self.own)
        return own.sample(h, w, reference, estimate, targets, sampling)

    def finish_samples(self, samples: Any, *operands: Any) -> None:
        cast(SamplingProjection[PartialT], self.own).finish_samples(samples, *operands)

    def sampled_exps(
        self,
        h: Tensor,
        w: Tensor,
        samples: Samples,
        reference: Tensor,
        targets: Targets,
        window: int,
    ) -> Iterator[tuple[int, int, Any]]:
        own = cast(SamplingProjection[PartialT], self.own)
        return own.sampled_exps(h, w, samples, reference, targets, window)

    def concat_partials(self, partials: Sequence[PartialT]) -> PartialT:
        return self.own.concat_partials(partials)

    def gather_partials(self, partial: PartialT, gather: Callable[[Tensor], Tensor]) -> PartialT:
        return self.own.gather_partials(partial, gather)

    def partial_outputs(
        self, partial: PartialT, target_logit: Tensor, options: LossOptions
    ) -> PartialOutputs:
        """Return those of all ranks, one part each."""
        own = self.own.partial_outputs(partial, target_logit, options).combined()
        if own.column is not None:
            own = own._replace(column=own.column + self.shard.first)
        given = [x for x in own if x is not None]
        parts = iter(self.shard.all_gather(torch.cat(given, 1)).movedim(0, 2).unbind(1))
        others = (None if x is None else next(parts) for x in own[1:])
        return PartialOutputs(next(parts), *others)

    def forward(self, h: Tensor, w: Tensor, targets: Targets) -> tuple[RowStats, Tensor]:
        return forward_unfused(self, h, w, targets)

    def recompute_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        targets: Targets,
        exps: Tensor,
    ) -> None:
        self.own.recompute_exp(h, w, window, reference, targets, exps)

    def reduce_partials(
        self, partial: PartialT, target_logit: Tensor, targets: Targets
    ) -> tuple[RowStats, Tensor]:
        """Reduce the partials of all ranks; S and its coefficient are 0 where another owns y."""
        gathered = self.own.gather_partials(partial, self.shard.all_gather)
        stats, loss = self.own.reduce_partials(gathered, target_logit, targets)
        stats.sum_exp_others.masked_fill_(_owned_elsewhere(targets), 0)
        return stats, loss

    def repair_stored_exps(
        self,
        exps: Tensor,
        h: Tensor,
        w: Tensor,
        first: int,
        targets: Targets,
        partial: PartialT,
        stats: RowStats,
    ) -> None:
        self.own.repair_stored_exps(exps, h, w, first, targets, partial, stats)

    def far_rows(self, partial: PartialT, targets: Targets) -> RowSelection | None:
        return self.own.far_rows(partial, targets)


def _owned_elsewhere(targets: Targets) -> Tensor:
    """Return (N,) bool: the token is active, and another rank owns its target."""
    return targets.active & ~targets.owned
