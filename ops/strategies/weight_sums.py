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

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.primitives.gradient_interface import Gradients, TargetGradT
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.selection import RowSelection

LOW_COLUMNS = 16
"""Rows of bytes are multiples of this: kernels read 16 bytes at a time."""


@dataclass(frozen=True)
class WeightSums:
    """The sums of all classes; `finish` makes dW of them, in their memory."""

    gradient: Tensor
    """(V, D): the sums, or their upper halves if it has 16 bits."""
    low: Tensor
    """(V, D) uint8, the third byte of each sum, and columns up to a multiple of `LOW_COLUMNS`; no
    rows if `gradient` has the dtype of sums."""

    @classmethod
    def empty(cls, gradient: Tensor, dtype: torch.dtype) -> "WeightSums":
        """Return uninitialized sums of `dtype` in the memory of `gradient` (V, D)."""
        rows = len(gradient) if gradient.dtype != dtype else 0
        columns = round_up(gradient.shape[1], LOW_COLUMNS)
        return cls(gradient, gradient.new_empty(rows, columns, dtype=torch.uint8))

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """The sums' upper halves and their third bytes (V, D)."""
        return self.gradient, self.low[:, : self.gradient.shape[1]]

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
            operands: Any = exps, scaled, target_grad, rank_one, selection
            gradients.keep_dw(*self.kept, *operands, accumulate=accumulate)
        else:
            more: Any = {"accumulate": accumulate, "selection": selection}
            gradients.add_grad_weight(self.gradient, exps, scaled, **more)
            gradients.add_target_grad(self.gradient, target_grad, 0, rank_one)

    def finish(self, gradients: Gradients[TargetGradT], factor: Tensor) -> Tensor:
        """Return dW, `factor` () times the sums, which it overwrites."""
        if len(self.low):
            gradients.finish_kept_dw(*self.kept, factor)
        else:
            self.gradient.mul_(factor)
        return self.gradient
