"""The last steps of rows of dW, in a backward over windows.

dW is written in the dtype of the weight, or as sums; or it is added to a buffer of the caller's, in
its own memory where that holds what a GEMM adds to, else by way of a block of rows.
"""

from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from cutefce.ops.planning.step_memory import added_rows
from cutefce.ops.primitives.gradient_interface import Gradients, TargetGradT
from cutefce.ops.primitives.interface import PartialT
from cutefce.ops.primitives.row_selection import row_range
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.rows.blocks import blocks, row_blocks
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.loss_terms import class_weights
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.strategies.loss_inputs import LossInputs


@dataclass(frozen=True)
class WeightGradient(Generic[TargetGradT]):
    """What rows of dW are made of, beside exponentials and hidden states."""

    gradients: Gradients[TargetGradT]
    out: Tensor
    """(V, D)"""
    target_grad: TargetGradT
    grad_scale: Tensor
    """() factor of dW."""
    every: RankOne | None
    """The part of dW (V, D) of a loss that depends on every class."""
    selection: RowSelection | None
    as_sums: bool
    """Whether `out` has the dtype of sums beside 16-bit operands, or is added to."""
    adds: bool
    """Whether dW is added to what `out` holds."""

    def finish(self, first: int, last: int, exps: Tensor, scaled: Tensor) -> None:
        """Write, or add, rows [first, last); `exps` (N, last - first) are their exponentials.

        `scaled` (N, D) are the hidden states with the factors of tokens.
        """
        rows = row_range(self.out, first, last)
        if not self.as_sums:
            term = self._term(first, last)
            last_step = first, self.grad_scale, term, self.selection
            self.gradients.finish_dw(rows, exps, scaled, self.target_grad, *last_step)
        elif not self.adds or can_add_in_place(self.out, exps.dtype, self.grad_scale.dtype):
            self._sum(rows, exps, scaled, first, accumulate=self.adds)
        else:
            add = added_rows(rows.shape[1], self.grad_scale.itemsize, rows.device.type)
            room = self.grad_scale.new_empty(min(add, len(rows)), rows.shape[1])
            for part in blocks(len(rows), add):
                sums = room[: part.stop - part.start]
                self._sum(sums, exps[:, part], scaled, first + part.start, accumulate=False)
                add_rows(rows[part], sums)

    def _sum(
        self, out: Tensor, exps: Tensor, scaled: Tensor, first: int, *, accumulate: bool
    ) -> None:
        """Write the rows of dW from `first` on to `out` (K, D), in the dtype of sums, or add."""
        last_step: Any = first, self._term(first, first + len(out)), self.selection
        operands = exps, scaled, self.target_grad
        self.gradients.keep_dw(out, None, *operands, *last_step, accumulate=accumulate)
        if exps.dtype == torch.float16:
            out.mul_(self.grad_scale)

    def _term(self, first: int, last: int) -> RankOne | None:
        return None if self.every is None else self.every.rows(slice(first, last))


def add_rows(buffer: Tensor, sums: Tensor) -> None:
    """Add `sums` (K, D) to `buffer` (K, D), each number rounded once."""
    for rows in row_blocks(sums):
        buffer[rows] += sums[rows]


def can_add_in_place(buffer: Tensor, dtype: torch.dtype, sums: torch.dtype) -> bool:
    """Whether GEMMs of operands of `dtype` can add dW to `buffer` (V, D), of the dtype of `sums`.

    Those of float16 have a factor that is applied after them; kernels need aligned rows.
    """
    is_aligned = not buffer.is_cuda or buffer.data_ptr() % 16 == 0
    return buffer.dtype == sums and dtype != torch.float16 and is_aligned


def every_row(inputs: LossInputs[PartialT, TargetGradT], every: Tensor | None) -> RankOne | None:
    """Return the part κ_v Σ_i every_i h_i of dW (V, D), None without label smoothing."""
    if every is None or inputs.targets.terms is None:
        return None
    factor = class_weights(inputs.targets.terms, inputs.w).contiguous()
    return RankOne(factor, weighted_sum(inputs.selected(), every))
