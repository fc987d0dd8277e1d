"""dW's sums over chunks of tokens, kept by gradients in forward until their factor is known.

float32 sums would take twice the memory of a 16-bit dW, and 8 bytes an element would move in every
chunk.  So a sum is kept in 24 bits as those of dX are (`hidden_sums`): 16 in the memory of its
element of dW, 8 in a byte beside it.  Each chunk adds its products and targets' terms in float32
and rounds to odd; dW is rounded once more, at the end.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.interface import Gradients, TargetGradT
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.selection import RowSelection


@dataclass(frozen=True)
class WeightSums:
    """The sums of all classes; `finish` makes dW of them, in their memory."""

    gradient: Tensor
    """(V, D): the sums, or their upper halves if it has 16 bits."""
    low: Tensor
    """(V, D) uint8, the third byte of each sum; no rows if `gradient` has the dtype of sums."""

    @classmethod
    def empty(cls, gradient: Tensor, dtype: torch.dtype) -> "WeightSums":
        """Return uninitialized sums of `dtype` in the memory of `gradient` (V, D)."""
        rows = len(gradient) if gradient.dtype != dtype else 0
        return cls(gradient, gradient.new_empty(rows, gradient.shape[1], dtype=torch.uint8))

    def add(
        self,
        gradients: Gradients[TargetGradT],
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGradT,
        rank_one: RankOne | None,
        selection: RowSelection | None,
        *,
        accumulate: bool,
    ) -> None:
        """Write a chunk's part of dW, or add it if `accumulate`; see `Gradients.keep_dw`."""
        if len(self.low):
            operands = exps, scaled, target_grad, rank_one, selection
            gradients.keep_dw(self.gradient, self.low, *operands, accumulate=accumulate)
        else:
            more: Any = {"accumulate": accumulate, "selection": selection}
            gradients.add_grad_weight(self.gradient, exps, scaled, **more)
            gradients.add_target_grad(self.gradient, target_grad, 0, rank_one)

    def finish(self, gradients: Gradients[TargetGradT], factor: Tensor) -> Tensor:
        """Return dW, `factor` () times the sums, which it overwrites."""
        if len(self.low):
            gradients.finish_kept_dw(self.gradient, self.low, factor)
        else:
            gradients.scale_rows(self.gradient, self.gradient, factor.expand(len(self.gradient)))
        return self.gradient
