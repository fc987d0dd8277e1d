"""dX's sums Σ_v e_iv w_v - S_i w_y, kept by gradients in forward until their factors are known.

A token's sums are final after its chunk, but the upstream gradient multiplies them, and dX is to be
rounded once.  float32 sums would take as much memory again as a 16-bit dX.  So a sum is kept in 20
bits: 16 in the memory of its element of dX, as a bfloat16, and four beside it, rounded to nearest.
The relative error is at most 2⁻¹³, 16 times smaller than that of the rounding of dX.

Where the upstream gradient is known before the backward, dX itself is kept, rounded once, with
nothing beside.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.ops.planning.step_memory import few_low_bits
from cutefce.ops.primitives.gradient_interface import TargetGradT
from cutefce.ops.primitives.interface import PartialT
from cutefce.ops.primitives.row_selection import restore_rows
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.strategies.hidden_gradient import class_term, empty_low, finish_dx
from cutefce.ops.strategies.loss_inputs import LossInputs


@dataclass(frozen=True)
class HiddenSums:
    """The sums of all tokens; `finish` makes dX of them, in their memory."""

    gradient: Tensor
    """(N, D): the sums, or their upper halves if it has 16 bits.

    Where kernels select rows, sums are in the order of the selection, their halves in the call's.
    """
    low: Tensor
    """(N, D / 2) uint8, the low bits of each sum, or (N, D) of an odd D; no rows if `gradient` has
    the dtype of sums, or is rounded."""
    factor: Tensor | None = None
    """(): the upstream gradient for which `gradient` is dX; None of sums."""

    @classmethod
    def empty(
        cls,
        gradient: Tensor,
        dtype: torch.dtype,
        factor: Tensor | None = None,
    ) -> "HiddenSums":
        """Return uninitialized sums of `dtype` in the memory of `gradient` (N, D).

        If that is narrower, dX is rounded for the upstream gradient `factor` () if that is given;
        else sums are kept.
        """
        (rows, hidden), is_wide = gradient.shape, gradient.dtype == dtype
        rows = 0 if is_wide or factor is not None else rows
        low = empty_low(gradient, rows, hidden, few_low_bits(hidden))
        return cls(gradient, low, None if is_wide else factor)

    def map(self, function: Callable[[Tensor], Tensor]) -> "HiddenSums":
        """Return the sums with `function` of each tensor."""
        return replace(self, gradient=function(self.gradient), low=function(self.low))

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
        coefficients: RowCoefficients | None,
    ) -> None:
        """Keep the sums of `rows`, whose targets are those of `part`.

        `products` are Σ_v e_iv w_v, computed in `room`.  If dX is rounded, `coefficients` are those
        for an upstream gradient of 1.
        """
        selection = part.targets.selection
        order = None if selection is None else selection.order
        kept = self.gradient if order is not None else self.gradient[rows]
        if self.factor is not None:
            assert coefficients is not None
            finish_dx(part, kept, products, coefficients.times(self.factor), order)
        elif len(self.low):
            low = self.low if order is not None else self.low[rows]
            keep_sums = part.primitives.gradients.keep_sums
            keep_sums(kept, low, products, part.w, part.targets, stats, order)
        else:
            sums = RowCoefficients.of_sums(stats, part.targets)
            finish_dx(part, products, products, sums)

    def finish(
        self,
        inputs: LossInputs[PartialT, TargetGradT],
        stats: RowStats,
        upstream: Tensor,
        selection: RowSelection | None = None,
    ) -> Tensor:
        """Return dX for the upstream gradient of the loss, () or (N,), in the order of the call.

        `selection` was computed of it.  It overwrites the sums.  If the upstream gradient was
        known, `upstream` only makes dX NaN where it is NaN.
        """
        gradients, targets = inputs.primitives.gradients, inputs.targets
        on_device = selection is not None and selection.is_on_device
        if self.factor is not None:
            upstream = torch.where(upstream.isnan(), upstream, 1)
            factor = torch.where(targets.active, upstream.to(stats.rows.dtype), 0)
            if selection is not None and on_device:
                factor = selection.restore(factor)
            scaled = RowCoefficients(factor, factor)
        else:
            given = inputs.h.dtype, targets, stats, upstream
            scaled = gradients.scaling(*given, in_reference=False).dx
            # what the target has beyond the part that the sums contain
            own = scaled.target + scaled.scale * stats.sum_exp_others
            scaled = replace(scaled, target=own)
        out, order = self.gradient, selection.order if selection is not None and on_device else None
        if self.factor is not None:
            gradients.scale_rows(out, out, scaled.scale)
        elif len(self.low):
            operands = out, out, self.low, inputs.w, targets, scaled
            gradients.finish_kept(*operands, class_term(inputs, scaled), order)
        else:
            finish_dx(inputs, out, out, scaled)
        # rows whose halves, or which themselves, were kept are in their places
        is_placed = on_device and (self.factor is not None or len(self.low) > 0)
        return restore_rows(None if is_placed else selection, self.gradient)
