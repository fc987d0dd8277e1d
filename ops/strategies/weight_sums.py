"""dW's sums over chunks of tokens, kept by gradients in forward until their factor is known.

float32 sums would take twice the memory of a 16-bit dW, and 8 bytes an element would move in every
chunk.  So a sum is kept in 20 bits: 16 in the memory of its element of dW, and four beside it, two
columns in a byte.  Sums over many chunks are kept in 24 bits, as those of dX are (`hidden_sums`).
Each chunk adds its products in float32 and rounds to nearest; targets' terms are added with those
of the last chunk with tokens, or of each.  dW is rounded once more, at the end.  Sums added to a
buffer of the caller's are kept in 24 bits; with an upstream gradient that is known before the
backward, they are in the buffer itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import low_bytes
from cutefce.ops.primitives.gradient_interface import Gradients, TargetGradT
from cutefce.ops.primitives.portable_gradients import apply_rowwise
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.kept_sums import add_kept_to_, words_of
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.strategies.weight_gradient import add_rows


@dataclass(frozen=True)
class WeightSums:
    """The sums of all classes; `finish` makes dW of them, in their memory."""

    gradient: Tensor
    """(V, D): the sums, or their upper halves if it has 16 bits."""
    low: Tensor
    """(V, `low_bytes`) uint8: the low bits of each sum; no rows if `gradient` has the dtype of
    sums."""
    low_bits: int
    """How many these are: 4 or 8, and 0 of sums added to a buffer."""
    factor: Tensor | None = None
    """() of all that is added, if `gradient` is a buffer of the caller's; None of sums whose factor
    comes at the end."""

    @classmethod
    def empty(cls, gradient: Tensor, dtype: torch.dtype, low_bits: int) -> "WeightSums":
        """Return uninitialized sums of `dtype` in the memory of `gradient` (V, D)."""
        rows = len(gradient) if gradient.dtype != dtype else 0
        columns = low_bytes(gradient.shape[1], low_bits)
        return cls(gradient, gradient.new_empty(rows, columns, dtype=torch.uint8), low_bits)

    @classmethod
    def in_buffer(cls, buffer: Tensor, factor: Tensor) -> "WeightSums":
        """Return what adds `factor` () times dW to `buffer` (V, D), of the dtype of sums."""
        return cls(buffer, buffer.new_empty(0, 0, dtype=torch.uint8), 0, factor=factor)

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """The sums' upper halves (V, D) and their low bits, (V, D) bytes or (V, D / 2)."""
        return self.gradient, self.low[:, : self.gradient.shape[1] * self.low_bits // 8]

    def map(self, function: Callable[[Tensor], Tensor]) -> "WeightSums":
        """Return the sums with `function` of each tensor."""
        return replace(self, gradient=function(self.gradient), low=function(self.low))

    def add(
        self,
        gradients: Gradients[TargetGradT],
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGradT,
        rank_one: RankOne | None,
        selection: RowSelection | None,
        *,
        chunk: int,
    ) -> None:
        """Write the part of dW of chunk 0, or add that of `chunk`; see `Gradients.keep_dw`.

        With `factor`, which the operands contain, that of chunk 0 is added too.
        """
        kept, low = self.kept if len(self.low) else (self.gradient, None)
        operands: Any = exps, scaled, target_grad, 0, rank_one, selection
        accumulate = chunk > 0 or self.factor is not None
        gradients.keep_dw(kept, low, *operands, accumulate=accumulate)

    def finish(self, gradients: Gradients[TargetGradT], factor: Tensor) -> Tensor:
        """Return dW, `factor` () times the sums, which it overwrites."""
        if len(self.low):
            gradients.finish_kept_dw(*self.kept, factor)
        else:
            self.gradient.mul_(factor)
        return self.gradient

    def add_to(self, buffer: Tensor, factor: Tensor) -> None:
        """Add dW, `factor` () times the sums, to `buffer` (V, D), rounded once."""
        if len(self.low):
            kept, low = self.kept
            apply_rowwise(add_kept_to_, buffer, words_of(kept, low), low, whole=(factor,))
        else:
            add_rows(buffer, self.gradient.mul_(factor))
