"""`PortableGradients` with Triton's kernels of rows and of dW: cuBLAS forms the products of dX.

This module imports Triton.
"""

from typing import Any

from torch import Tensor

from cutefce.ops.primitives import triton_rows
from cutefce.ops.primitives.portable_gradients import PortableGradients, TargetGrad
from cutefce.ops.primitives.triton_weight import Listed, weight_product
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.kept_sums import Sums
from cutefce.ops.rows.selection import CountedRows, RowSelection
from cutefce.ops.rows.targets import Targets


class TritonGradients(PortableGradients):
    """The same steps, with dW's products, and what is done to rows, in one launch each."""

    def __init__(self, window: int, counted: CountedRows | None) -> None:
        super().__init__(window)
        self.counted = counted

    def combine(
        self, out: Sums, x: Tensor | None = None, *, rank_one: RankOne | None = None, **given: Any
    ) -> None:
        if rank_one is not None:
            given.update(factor=rank_one.factor, row=rank_one.row)
        clears = given.get("coefficient") is not None
        triton_rows.combine(out, x, clears=clears, **given)

    def target_grad(self, h: Tensor, coefficient: Tensor | None, targets: Targets) -> TargetGrad:
        if coefficient is None:
            return None
        return Listed.of(h, targets.safe_index, coefficient, targets.vocab)

    def add_weight(
        self,
        out: Sums,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGrad,
        first: int,
        *,
        grad_scale: Tensor | None = None,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
        accumulate: bool = False,
    ) -> None:
        """More than eight parameters: see the class of plain torch."""
        more: Any = {"last": grad_scale, "rank_one": rank_one, "counted": self.counted}
        weight_product(out, exps, scaled, first, target_grad, accumulate=accumulate, **more)
