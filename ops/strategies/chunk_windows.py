"""Windows inside a chunk of gradients in forward: dX's sums while exponentials exist.

Exponentials of a few columns exist at a time, and are relative to the target's logit.  dX's sums
need no normalizer, so their product with w is added at once.  Where `reduce_partials` then moves
the reference of a row, both products of the chunk's windows are launched again, with a number of
rows that is 0 on the device where it has not: kernels exit at once.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any, Generic, cast

from torch import Tensor

from cutefce.ops.planning.chunks.windows import split_columns
from cutefce.ops.primitives.gradient_interface import Gradients, TargetGradT
from cutefce.ops.primitives.interface import PartialT, Projection, WrappedProjection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.windows import StoredExps


@dataclass(frozen=True)
class SummingProjection(WrappedProjection[PartialT], Generic[PartialT, TargetGradT]):
    """A `Projection` whose stored exponentials are multiplied by w at once, and then overwritten.

    A repair computes them again.  Those of soft targets are left out: `add_soft_rows` adds them.
    """

    gradients: Gradients[TargetGradT]
    sums: Tensor
    """(N, D): receives Σ_v e_iv w_v."""

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        targets: Targets,
        exps: Tensor,
    ) -> PartialT:
        """Also add the window's part of the sums."""
        partial = self.own.project_exp(h, w, window, reference, targets, exps)
        self._add(exps, w, window, targets)
        return partial

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
        """Compute the window's part of the sums again, relative to `stats.reference`."""
        again = copy.copy(targets)
        again.selection = self.own.far_rows(partial, targets)
        window = first, min(first + exps.shape[1], w.shape[0])
        self.own.recompute_exp(h, w, window, stats.reference, again, exps)
        self._add(exps, w, window, again)

    def _add(self, exps: Tensor, w: Tensor, window: tuple[int, int], targets: Targets) -> None:
        first, last = window
        if targets.soft is not None:  # entries are known with the sums of all columns
            self.own.put_soft(None, exps[:, : last - first], first, targets)
        more: Any = {"accumulate": first > 0, "selection": targets.selection}
        self.gradients.add_grad_hidden(self.sums, exps[:, : last - first], w[first:last], **more)


def summing(
    part: LossInputs[PartialT, TargetGradT], exps: Tensor, width: int, sums: Tensor
) -> tuple[LossInputs[PartialT, TargetGradT], StoredExps]:
    """Return what `windows.forward` takes to write a chunk's Σ_v e_iv w_v to `sums` (N, D).

    The exponentials of one window exist at a time, in `exps` (N, K): of `width` columns, or of up
    to K in the last one.
    """
    primitives = part.primitives
    projection = SummingProjection(primitives.projection, primitives.gradients, sums)
    primitives = replace(primitives, projection=cast(Projection[PartialT], projection))
    vocab = part.w.shape[0]
    windows = split_columns(vocab, width, exps.shape[1])
    stored = [(first, exps if last == vocab else exps[:, :width]) for first, last in windows]
    return replace(part, primitives=primitives), stored
