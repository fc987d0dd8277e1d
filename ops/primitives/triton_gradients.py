"""`PortableGradients` with Triton's kernels of rows and of dW: cuBLAS forms the products of dX.

This module imports Triton.
"""

from typing import Any

from torch import Tensor

from cutefce.ops.primitives.portable_gradients import PortableGradients, TargetGrad
from cutefce.ops.primitives.triton_rows import KeptSums, combine
from cutefce.ops.primitives.triton_weight import Listed, weight_product
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.selection import CountedRows, RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets


class TritonGradients(PortableGradients):
    """The same steps, with dW's products, and what is done to rows, in one launch each."""

    def __init__(self, window: int, counted: CountedRows | None) -> None:
        super().__init__(window)
        self.counted = counted

    def keep_dx(
        self,
        kept: Tensor,
        low: Tensor,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        selection: RowSelection | None = None,
    ) -> None:
        sums = KeptSums(kept, low)
        for rows, product in self.hidden_products(kept, exps, w):
            own = sums.rows(rows)
            combine(own, product, joined=own if accumulate else None)

    def scale_kept_rows(self, kept: Tensor, low: Tensor, scale: Tensor) -> None:
        combine(KeptSums(kept, low), joined=KeptSums(kept, low), scale=scale)

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        combine(out, x, scale=scale)

    def finish_dx(
        self,
        out: Tensor,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        assert order is None, "these steps run over all rows that they are given"
        combine(out, sums, **_last_step(w, targets, coefficients, rank_one))

    def keep_sums(
        self,
        kept: Tensor,
        low: Tensor,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        stats: RowStats,
        order: Tensor | None = None,
    ) -> None:
        assert order is None, "these steps run over all rows that they are given"
        own = RowCoefficients.of_sums(stats, targets)
        combine(KeptSums(kept, low), sums, **_last_step(w, targets, own, None))

    def finish_kept(
        self,
        out: Tensor,
        kept: Tensor,
        low: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        assert order is None, "these steps run over all rows that they are given"
        combine(out, joined=KeptSums(kept, low), **_last_step(w, targets, coefficients, rank_one))

    def target_grad(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetGrad:
        return Listed.of(h, targets.safe_index, coefficient, targets.vocab)

    def no_target_grad(self, h: Tensor, targets: Targets) -> TargetGrad:
        return None

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGrad,
        first: int,
        grad_scale: Tensor,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
    ) -> None:
        more: Any = {"last": grad_scale, "rank_one": rank_one, "counted": self.counted}
        weight_product(out, exps, scaled, first, target_grad, **more)

    def keep_dw(
        self,
        kept: Tensor,
        low: Tensor | None,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGrad,
        first: int,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
        *,
        accumulate: bool,
    ) -> None:
        """More than eight parameters: see the class of plain torch."""
        out = kept if low is None else KeptSums(kept, low)
        more: Any = {"accumulate": accumulate, "rank_one": rank_one, "counted": self.counted}
        weight_product(out, exps, scaled, first, target_grad, **more)

    def finish_kept_dw(self, kept: Tensor, low: Tensor, factor: Tensor) -> None:
        combine(kept, joined=KeptSums(kept, low), scale=factor.expand(len(kept)))


def _last_step(
    w: Tensor, targets: Targets, coefficients: RowCoefficients, rank_one: RankOne | None
) -> dict[str, Any]:
    """Return the arguments of `combine` of the last step of dX."""
    own = {"table": w, "index": targets.safe_index, "coefficient": coefficients.target}
    return _terms({**own, "scale": coefficients.scale, "clears": True}, rank_one)


def _terms(given: dict[str, Any], rank_one: RankOne | None) -> dict[str, Any]:
    """Return the arguments of `combine` that are given, and those of `rank_one`."""
    if rank_one is None:
        return given
    return {**given, "factor": rank_one.factor, "row": rank_one.row}
