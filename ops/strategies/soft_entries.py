"""Entries of soft targets among exponentials, see `cutefce.ops.rows.classes.soft_targets`.

float32 and wider exponentials keep them.  Of 16-bit ones, which are all that a later backward
finds as the forward stored them, they are put before dX's product.  Before dW's product these get
the factors of tokens, unless their references have them, and the entries are put again: hidden
states with factors would be rounded, and so the entries' terms twice.  The leads' terms of dW are
entries, too, then: of frequent classes, lists of their tokens are long.
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
    scales_exps: bool
    """Whether exponentials get the factors of tokens before dW's product, instead of h."""

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
        scales, late = not wide and not in_reference, soft is not None and soft.replaces
        more = values, wide and not late, scales
        return SoftEntries(inputs.primitives.projection, inputs.targets, *more)

    def put(self, exps: Tensor, first: int) -> None:
        """Put entries among the exponentials `exps` (N, W) of the columns from `first` on."""
        self.projection.put_soft(self.values, exps, first, self.targets)

    def scale(
        self, exps: Tensor, first: int, factor: Tensor, lead: Tensor, *, is_scaled: bool = False
    ) -> None:
        """Multiply both by `factor` (N,), and put the entries, and those of the leads, `lead`.

        If `is_scaled`, `exps` were multiplied before.
        """
        more = self.targets, factor, is_scaled
        self.projection.scale_soft(self.values, lead, exps, first, *more)
