"""dX's sums Σ_v e_iv w_v - S_i w_y, kept by gradients in forward until their factors are known.

A token's sums are final after its chunk, but the upstream gradient multiplies them, and dX is to be
rounded once.  float32 sums would take as much memory again as a 16-bit dX.  So a sum is kept with
16 significant bits: the sign, the exponent and the first 8 of these bits in the memory of its
element of dX, as a bfloat16, and the other 8 in a byte beside it, rounded to nearest.  The relative
error is at most 2⁻¹⁶, 256 times smaller than the one that the rounding of dX may make.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.ops.primitives.gradient_interface import TargetGradT
from cutefce.ops.primitives.interface import PartialT
from cutefce.ops.primitives.row_selection import restore_rows
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.loss_inputs import LossInputs


@dataclass(frozen=True)
class HiddenSums:
    """The sums of all tokens; `finish` makes dX of them, in their memory."""

    gradient: Tensor
    """(N, D): the sums, or their upper halves if it has 16 bits.

    Where kernels select rows, sums are in the order of the selection, their halves in the call's.
    """
    low: Tensor
    """(N, D) uint8, the third byte of each sum; no rows if `gradient` has the dtype of sums."""

    @classmethod
    def empty(cls, gradient: Tensor, dtype: torch.dtype) -> "HiddenSums":
        """Return uninitialized sums of `dtype` in the memory of `gradient` (N, D)."""
        rows = len(gradient) if gradient.dtype != dtype else 0
        return cls(gradient, gradient.new_empty(rows, gradient.shape[1], dtype=torch.uint8))

    def room(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return where the products of `rows` are to be added, in `dtype`, before they are kept."""
        to = self.gradient[rows]
        return to if to.dtype == dtype else to.new_empty(to.shape, dtype=dtype)

    def keep(
        self,
        rows: slice,
        products: Tensor,
        part: LossInputs[PartialT, TargetGradT],
        stats: RowStats,
    ) -> None:
        """Keep the sums of `rows`, whose targets are those of `part`.

        `products` are Σ_v e_iv w_v, computed in `room`.
        """
        if len(self.low):
            selection, kept, low = part.targets.selection, self.gradient, self.low
            order = None if selection is None else selection.order
            if order is None:
                kept, low = kept[rows], low[rows]
            keep_sums = part.primitives.gradients.keep_sums
            keep_sums(kept, low, products, part.w, part.targets, stats, order)
        else:
            coefficients = RowCoefficients.of_sums(stats, part.targets)
            windows.finish_dx(part, products, products, coefficients)

    def finish(
        self,
        inputs: LossInputs[PartialT, TargetGradT],
        stats: RowStats,
        coefficients: RowCoefficients,
        selection: RowSelection | None = None,
    ) -> Tensor:
        """Return dX in the order of the call, of which `selection` was computed.

        It overwrites the sums.
        """
        # what the target has beyond the part that the sums contain
        beyond = coefficients.target + coefficients.scale * stats.sum_exp_others
        coefficients = replace(coefficients, target=beyond)
        if len(self.low):
            operands = inputs.w, inputs.targets, coefficients
            every, gradients = windows.class_term(inputs, coefficients), inputs.primitives.gradients
            order = None
            if selection is not None and selection.is_on_device:
                order, selection = selection.order, None  # rows are in their places
            gradients.finish_kept(self.gradient, self.low, *operands, every, order)
        else:
            windows.finish_dx(inputs, self.gradient, self.gradient, coefficients)
        return restore_rows(selection, self.gradient)
