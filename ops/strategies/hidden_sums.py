"""dX's sums Σ_v e_iv w_v - S_i w_y, kept by gradients in forward until their factors are known.

A token's sums are final after its chunk, but the upstream gradient multiplies them, and dX is to be
rounded once.  float32 sums would take as much memory again as a 16-bit dX.  So a sum is kept with
16 significant bits: the sign, the exponent and the first 8 of these bits in the memory of its
element of dX, as a bfloat16, and the other 8 in a byte beside it.  Its last bit is set if any bit
that is dropped was (rounding to odd), which keeps NaN and infinities.  The relative error is below
2⁻¹⁵, 128 times smaller than the one that the rounding of dX may make.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.ops.planning.dw_aliasing import FINISHED_ROWS
from cutefce.ops.primitives.interface import PartialT, TargetGradT
from cutefce.ops.primitives.portable_gradients import blocks
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.windows import LossInputs


def unscaled(stats: RowStats, targets: Targets) -> RowCoefficients:
    """Return coefficients of Σ_v e_iv w_v - S_i w_y; 0 for ignored tokens."""
    active = targets.active
    others = torch.where(active, stats.sum_exp_others, 0)
    return RowCoefficients(active.to(others.dtype), -others)


@dataclass(frozen=True)
class HiddenSums:
    """The sums of all tokens; `finish` makes dX of them, in their memory."""

    gradient: Tensor
    """(N, D): the sums, or their upper halves if it has 16 bits."""
    low: Tensor
    """(N, D) uint8, the third byte of each sum; no rows if `gradient` has the dtype of sums."""

    @classmethod
    def empty(cls, gradient: Tensor, dtype: torch.dtype) -> "HiddenSums":
        """Return uninitialized sums of `dtype` in the memory of `gradient` (N, D)."""
        rows = len(gradient) if gradient.dtype != dtype else 0
        return cls(gradient, gradient.new_empty(rows, gradient.shape[1], dtype=torch.uint8))

    def room(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return where the sums of `rows` are to be computed, in `dtype`, before they are kept."""
        to = self.gradient[rows]
        return to if to.dtype == dtype else to.new_empty(to.shape, dtype=dtype)

    def keep(self, rows: slice, sums: Tensor) -> None:
        """Keep the `sums` of `rows`, computed in `room`."""
        if not len(self.low):
            return
        halves, parts = sums.view(torch.int16), sums.view(torch.uint8)
        self.gradient[rows].view(torch.int16).copy_(halves[:, 1::2])
        torch.bitwise_or(parts[:, 1::4], parts[:, ::4] != 0, out=self.low[rows])

    def finish(
        self,
        inputs: LossInputs[PartialT, TargetGradT],
        stats: RowStats,
        coefficients: RowCoefficients,
    ) -> Tensor:
        """Return dX, which overwrites the sums."""
        # what the target has beyond the part that the sums contain
        beyond = coefficients.target + coefficients.scale * stats.sum_exp_others
        coefficients = replace(coefficients, target=beyond)
        if not len(self.low):
            windows.finish_dx(inputs, self.gradient, self.gradient, coefficients)
            return self.gradient
        for rows in blocks(len(self.gradient), FINISHED_ROWS):
            part = replace(inputs, targets=inputs.targets.per_token(rows))
            sums = self._kept(rows, coefficients.scale.dtype)
            windows.finish_dx(part, self.gradient[rows], sums, coefficients.rows(rows))
            del sums  # freed before the next ones are allocated
        return self.gradient

    def _kept(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return the sums of `rows` in `dtype`."""
        sums = self.gradient[rows].new_zeros(self.low[rows].shape, dtype=dtype)
        sums.view(torch.int16)[:, 1::2] = self.gradient[rows].view(torch.int16)
        sums.view(torch.uint8)[:, 1::4] = self.low[rows]
        return sums
