"""dX's sums over windows of the vocabulary, in a backward, and dX of them.

They are float32, twice a 16-bit dX; or kept in 20 bits, of many windows in 24: 16 in memory as
large as dX, and the others beside it.  Each window adds its products in float32 and rounds to
nearest; dX is rounded once more, at the end.

Where kernels select rows, sums are in the order of the selection.  dX itself is then allocated at
the end, when the selected hidden states are freed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import low_bytes
from cutefce.ops.primitives.gradient_interface import Gradients, TargetGradT
from cutefce.ops.primitives.interface import PartialT
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.strategies.loss_inputs import LossInputs


@dataclass(frozen=True)
class HiddenGradient:
    """The sums of all tokens; `finish` makes dX of them."""

    sums: Tensor
    """(N, D): the sums, or their upper halves."""
    low: Tensor | None
    """(N, D) or (N, D / 2) uint8: the low bits of each sum; None of sums in float32."""
    selection: RowSelection | None
    """Which rows count, if kernels select them."""
    columns: int
    """V of all windows."""

    @classmethod
    def empty(
        cls, inputs: LossInputs[PartialT, TargetGradT], dtype: torch.dtype, low_bits: int | None
    ) -> "HiddenGradient":
        """Return uninitialized sums of `dtype`; with `low_bits` kept ones, unless dX is wider."""
        h, selection, shape = inputs.h, inputs.targets.selection, (inputs.tokens, inputs.h.shape[1])
        rows = selection, len(inputs.w)
        if low_bits is None or inputs.dx_dtype != h.dtype:
            return cls(h.new_empty(shape, dtype=dtype), None, *rows)
        return cls(h.new_empty(shape), empty_low(h, *shape, low_bits), *rows)

    def add(
        self,
        gradients: Gradients[TargetGradT],
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        factor: Tensor | None = None,
    ) -> bool:
        """Write `exps` (N, K) @ w (K, D), or add it if `accumulate`.

        Return whether `exps` are multiplied by `factor` (N,) afterwards.
        """
        more: Any = {"accumulate": accumulate, "selection": self.selection}
        if self.low is None:
            more |= {"in_windows": self.columns > len(w), "factor": factor}
            return gradients.add_grad_hidden(self.sums, exps, w, **more)
        gradients.keep_dx(self.sums, self.low, exps, w, **more)
        return False

    def scale_rows(self, gradients: Gradients[TargetGradT], scale: Tensor) -> None:
        """Multiply the sums of each token by `scale` (N,)."""
        if self.low is None:
            self.sums.mul_(scale[:, None])
        else:
            gradients.scale_kept_rows(self.sums, self.low, scale)

    def finish(
        self, inputs: LossInputs[PartialT, TargetGradT], coefficients: RowCoefficients
    ) -> Tensor:
        """Return dX (N, D), in the order of the call; the sums are overwritten."""
        order = None if self.selection is None else self.selection.order
        if self.low is not None:
            every, dx = class_term(inputs, coefficients), self.sums
            if order is not None:
                dx = torch.empty_like(self.sums)
            rows = inputs.w, inputs.targets, coefficients, every, order
            inputs.primitives.gradients.finish_kept(dx, self.sums, self.low, *rows)
            return dx
        dx = self.sums
        if order is not None or self.sums.dtype != inputs.dx_dtype:
            dx = torch.empty_like(self.sums, dtype=inputs.dx_dtype)
        finish_dx(inputs, dx, self.sums, coefficients, order)
        return dx


def empty_low(x: Tensor, rows: int, hidden: int, low_bits: int) -> Tensor:
    """Return room for the low bits of (rows, hidden) sums on the device of x."""
    pitch = low_bytes(hidden, low_bits)
    return x.new_empty(rows, pitch, dtype=torch.uint8)[:, : hidden * low_bits // 8]


def finish_dx(
    inputs: LossInputs[PartialT, TargetGradT],
    out: Tensor,
    sums: Tensor,
    coefficients: RowCoefficients,
    order: Tensor | None = None,
) -> None:
    """Write dX (N, D) of its `sums` to `out`, which may be `sums`.

    With `order` (N,), row i of `sums` becomes row order_i of `out`, which is not `sums` then.
    """
    gradients, every = inputs.primitives.gradients, class_term(inputs, coefficients)
    gradients.finish_dx(out, sums, inputs.w, inputs.targets, coefficients, every, order)


def class_term(
    inputs: LossInputs[PartialT, TargetGradT], coefficients: RowCoefficients
) -> RankOne | None:
    """Return the class row's part of dX (N, D), None without label smoothing."""
    if coefficients.every is None or inputs.class_row is None:
        return None
    return RankOne(coefficients.every, inputs.class_row)
