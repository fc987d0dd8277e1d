"""`PortableGradients` with Triton's kernel of rows: cuBLAS forms the products.

This module imports Triton.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.portable_gradients import PortableGradients, TargetGrad
from cutefce.ops.primitives.triton_rows import KeptSums, Listed, combine
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.selection import CountedRows, RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets


class ListedTargets:
    """Targets (N,), with coefficients (N,) and hidden states (N, D), listed by class.

    Tokens whose coefficient is 0 are in no list.
    """

    def __init__(self, h: Tensor, target: Tensor, coefficient: Tensor, vocab: int) -> None:
        self.h, self.target, self.coefficient, self.vocab = h, target, coefficient, vocab

    @cached_property
    def all(self) -> Listed:
        """The tokens of all classes."""
        target = torch.where(self.coefficient == 0, self.vocab, self.target)
        target, order = target.sort(stable=True)
        classes = torch.arange(self.vocab + 1, device=target.device)
        bounds = torch.searchsorted(target, classes, out_int32=True)
        return Listed(order, bounds, self.coefficient.contiguous())

    def rows(self, first: int, last: int) -> dict[str, Any]:
        """Return arguments of `combine` that add the terms of classes [first, last)."""
        return {"table": self.h, "index": self.all.rows(first, last)} if len(self.target) else {}


class TritonGradients(PortableGradients):
    """The same steps, with what is done to rows in one launch each."""

    def __init__(self, counted: CountedRows | None, window: int) -> None:
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
        return ListedTargets(h, targets.safe_index, coefficient, targets.vocab)

    def no_target_grad(self, h: Tensor, targets: Targets) -> TargetGrad:
        none = h.new_empty(0, dtype=torch.float32)
        return ListedTargets(h[:0], targets.index[:0], none, targets.vocab)

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
        for rows, to, sums in self.products(out, exps, scaled):
            listed = target_grad.rows(first + rows.start, first + rows.stop)
            terms = _terms(listed, rank_one and rank_one.rows(rows))
            combine(to, sums, last=grad_scale, **terms)

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
        if low is None:
            self.add_product(kept, exps, scaled, accumulate=accumulate)
            terms = _terms(target_grad.rows(first, first + len(kept)), rank_one)
            if terms:
                combine(kept, kept, **terms)
            return
        sums = KeptSums(kept, low)
        for rows, _, product in self.products(kept, exps, scaled):
            listed = target_grad.rows(first + rows.start, first + rows.stop)
            terms = _terms(listed, rank_one and rank_one.rows(rows))
            own = sums.rows(rows)
            combine(own, product, joined=own if accumulate else None, **terms)

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
