"""One side of a divergence, student or teacher: its logits tile by tile, and its gradients."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.ops.divergence.logits import write_logits
from cutefce.ops.dtypes import dtype_name, sum_dtype
from cutefce.ops.parallel.shard import Unsharded
from cutefce.ops.planning.divergence.planner import rounds_scaled
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.primitives.portable_projection import dense
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.rows.blocks import row_blocks
from cutefce.ops.rows.logit_map import LogitMap


@dataclass(frozen=True)
class Side:
    """The tokens that are computed, M of N, and the classes of this rank."""

    h: Tensor
    """(M, D) hidden states."""
    w: Tensor
    """(V, D)"""
    logits: LogitMap | None
    """From products to the model's logits; None for the identity."""
    bias: Tensor | None
    """(V,) as given; None without."""
    gradients: tuple[bool, bool, bool]
    """Whether those of hidden states, weight and bias are computed."""

    @property
    def is_trained(self) -> bool:
        """Whether it has gradients."""
        return any(self.gradients)

    @property
    def cap(self) -> Tensor | None:
        """(M,) the bound of the logits; None without a softcap."""
        return None if self.logits is None else self.logits.cap

    def selected(self, order: Tensor | None) -> "Side":
        """Return the side with the tokens `order` (M,) of its hidden states, None for all."""
        h = self.h if order is None else self.h.index_select(0, order)
        return replace(self, h=dense(h), w=dense(self.w))

    def project(self, out: Tensor, rows: slice, columns: slice) -> Tensor | None:
        """Write the model's logits of slices of tokens and classes to `out` (R, C).

        Return what `write_logits` does.
        """
        transform = None if self.logits is None else self.logits.part(rows, columns)
        return write_logits(out, self.h[rows], self.w[columns], transform)

    def row_scale(self, scale: Tensor) -> Tensor:
        """Return () or (M,) the derivatives by products, `scale` those by the model's logits.

        The derivative of a softcap is left out.
        """
        if self.logits is None or self.logits.factor is None:
            return scale
        return scale * self.logits.factor

    def factor_scale(self, loss_scale: Tensor | None, boost: float) -> Tensor | None:
        """Return () what factors are multiplied by before they are rounded.

        None if this depends on the token: there is no `loss_scale`, which a reduced divergence
        multiplies those of tokens by, or temperatures differ.  In float16, which may not hold
        their product, it is `boost`, a power of 2.
        """
        if loss_scale is None:
            return None
        scale = self.row_scale(loss_scale)
        if scale.ndim:
            return None
        return scale.new_full((), boost) if self.h.dtype == torch.float16 else scale

    @property
    def rounds_scaled(self) -> bool:
        """Whether dW is a single product of factors and scaled hidden states, where it can be."""
        dtype = dtype_name(self.h.dtype)
        return rounds_scaled(self.h.device.type, dtype, self.w.numel())


class SideGradients:
    """The gradients of a side, summed window by window from factors (M, C).

    Factors are the derivatives of each token's divergence by its logits, times `Side.factor_scale`
    or a `relative` scale of each token; what they are multiplied by in the end, `common`, is one
    number.
    """

    def __init__(
        self,
        side: Side,
        upstream: Tensor,
        loss_scale: Tensor | None,
        boost: float,
        *,
        in_one_block: bool,
        dw: Tensor | None = None,
    ) -> None:
        """Allocate sums.

        `upstream` is the gradient of the reduced divergence, or (M,) those of each token's; the
        others are those of `Side.factor_scale`.  `in_one_block` says that each window's factors
        of all tokens come at once.  `dw` (V, D) is memory for dW, whose rows are written from
        `begin` on; None for new memory.
        """
        grad_hidden, grad_weight, grad_bias = side.gradients
        (tokens, hidden), (vocab, _) = side.h.shape, side.w.shape
        dtype = sum_dtype(side.h.dtype)
        self.side, self.relative = side, None
        upstream = upstream.to(dtype)
        own = side.factor_scale(loss_scale, boost)
        if own is not None and side.h.dtype != torch.float16:
            common = upstream
        else:
            common = side.row_scale(upstream if loss_scale is None else upstream * loss_scale)
            if own is None:
                # relative to the largest, for factors of 16 bits
                scale, finite = common, torch.where(common.isfinite(), common.abs(), 0)
                largest = finite.amax() if tokens else finite.sum()
                common = torch.where(largest == 0, 1, largest)
                self.relative = scale / common * boost
            common = common / boost
        self.common = common
        self.dx = side.h.new_empty(tokens, hidden, dtype=dtype) if grad_hidden else None
        self.dw = side.w.new_empty(vocab if grad_weight else 0, hidden) if dw is None else dw
        if not tokens:  # then nothing is added
            self.dw.zero_()
        self.dbias = common.new_zeros(vocab) if grad_bias else None
        self.sums = self.dw
        self.scaled: Tensor | None = None
        if grad_weight and in_one_block and side.rounds_scaled:
            self.scaled = (side.h * common).to(side.h.dtype)

    def begin(self, columns: slice) -> None:
        """Begin with the classes `columns`."""
        if len(self.dw):
            self.sums = self.dw[columns]
            if self.scaled is None and self.dw.dtype != self.common.dtype:
                self.sums = self.sums.new_empty(self.sums.shape, dtype=self.common.dtype)

    def add(self, factors: Tensor, rows: slice, columns: slice) -> None:
        """Add what a tile of factors (R, C) gives."""
        if self.dx is not None:
            matmul_into(self.dx[rows], factors, self.side.w[columns], accumulate=columns.start > 0)
        if len(self.dw):
            h = self.side.h[rows] if self.scaled is None else self.scaled
            matmul_into(self.sums, factors.t(), h, accumulate=rows.start > 0)
        if self.dbias is not None:
            self.dbias[columns] += weighted_sum(factors, None)

    def end(self, columns: slice) -> None:
        """Finish the rows of dW of the classes `columns`."""
        if len(self.dw):
            if self.scaled is None:
                self.sums.mul_(self.common)
            if self.sums.dtype != self.dw.dtype:
                self.dw[columns] = self.sums
            self.sums = self.dw

    def finish(
        self, shard: Unsharded, order: Tensor | None, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dX (tokens, D), dW (V, D) and the bias' gradient (V,), without rows if not asked.

        `order` (M,) are the places of the computed tokens, None for all; the others get 0.
        """
        h, dbias, self.scaled = self.side.h, self.dbias, None
        dx = h.new_empty(0, h.shape[1])
        if self.dx is not None:
            sums, self.dx = shard.reduce_dx(self.dx), None
            rows = sums if sums.dtype == h.dtype else h.new_empty(sums.shape)
            for part in row_blocks(sums):
                torch.mul(sums[part], self.common, out=rows[part])
            del sums
            dx = shard.gather_dx(rows, len(h))
            if order is not None:
                dx = dx.new_zeros(tokens, dx.shape[1]).index_copy_(0, order, dx)
        if dbias is None:
            return dx, self.dw, h.new_empty(0)
        assert self.side.bias is not None
        scale = self.common if self.side.logits is None else self.common / self.side.logits.scale
        return dx, self.dw, (dbias * scale).to(self.side.bias.dtype)
