"""Entries of soft targets among the exponentials of a step, see `cutefce.ops.rows.soft_targets`.

float32 and wider exponentials keep them.  Of 16-bit ones, which are all that a later backward
finds as the forward stored them, they are put before dX's product; before dW's product they become
0 where its sums take the terms.
"""

from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor

from cutefce.ops.primitives.interface import PartialT, Projection
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies.loss_inputs import LossInputs


@dataclass(frozen=True)
class SoftEntries(Generic[PartialT]):
    """The entries of N tokens with K classes each."""

    projection: Projection[PartialT]
    targets: Targets
    values: Tensor
    """(N, K) that are put, or added to wide exponentials, in the dtype of sums."""
    is_wide: bool
    """Whether exponentials have the dtype of sums, and forwards put what is added to them."""
    in_sums: bool
    """Whether the terms are added to dW's sums."""

    @staticmethod
    def of(
        inputs: LossInputs[PartialT, Any], values: Tensor | None, *, in_reference: bool = False
    ) -> "SoftEntries[PartialT] | None":
        """Return those of `values`; None without.

        `in_reference` says that the factors of tokens are in the references of exponentials.
        """
        if values is None:
            return None
        wide, soft = values.dtype == inputs.h.dtype, inputs.targets.soft
        in_sums, late = not wide and not in_reference, soft is not None and soft.replaces
        more = values, wide and not late, in_sums
        return SoftEntries(inputs.primitives.projection, inputs.targets, *more)

    def put(self, exps: Tensor, first: int) -> None:
        """Put entries among the exponentials `exps` (N, W) of the columns from `first` on."""
        self.projection.put_soft(self.values, exps, first, self.targets)

    def clear(self, exps: Tensor, first: int) -> None:
        """Make them 0 if dW's sums take the terms."""
        if self.in_sums:
            self.projection.put_soft(None, exps, first, self.targets)

    def terms(self, row_scale: Tensor | None) -> Tensor | None:
        """Return what dW's sums take, (N, K), of entries with factors (N,); None if nothing."""
        if not self.in_sums or row_scale is None:
            return None
        return self.values * row_scale[:, None]
