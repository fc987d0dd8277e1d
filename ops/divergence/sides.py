"""One side of a divergence, student or teacher."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.ops.primitives.products import dense
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.scaling import largest_of
from cutefce.ops.rows.selection import RowSelection


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
    boost: float = 1.0
    """Power of 2 that factors are multiplied by, for float16's range."""

    @property
    def cap(self) -> Tensor | None:
        """(M,) the bound of the logits; None without a softcap."""
        return None if self.logits is None else self.logits.cap

    def selected(self, selection: RowSelection | None) -> "Side":
        """Return the side of the tokens of a selection, None for all, as GEMMs can address it."""
        h, logits = self.h, self.logits
        if selection is not None:
            h = h.index_select(0, selection.order)
            logits = None if logits is None else logits.rows(selection.order)
        return replace(self, h=dense(h), w=dense(self.w), logits=logits)

    def row_scale(self, scale: Tensor) -> Tensor:
        """Return () or (M,) the derivatives by products, `scale` those by the model's logits.

        The derivative of a softcap is left out.
        """
        if self.logits is None or self.logits.factor is None:
            return scale
        return scale * self.logits.factor

    def factor_scale(self, loss_scale: Tensor | None) -> Tensor | None:
        """Return () what factors are multiplied by before they are rounded.

        None if this depends on the token: there is no `loss_scale`, which a reduced divergence
        multiplies those of tokens by, or temperatures differ.  In float16, which may not hold
        their product, it is `boost`.
        """
        if loss_scale is None:
            return None
        scale = self.row_scale(loss_scale)
        if scale.ndim:
            return None
        return scale.new_full((), self.boost) if self.h.dtype == torch.float16 else scale

    def scales(self, upstream: Tensor, loss_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return () what gradients are multiplied by in the end, and () or (M,) what factors are.

        The latter is `factor_scale`, or relative to the largest of the tokens' scales.  `upstream`
        is the gradient of the reduced divergence; with no `loss_scale`, (M,) those of each token's.
        """
        own = self.factor_scale(loss_scale)
        if own is not None and self.h.dtype != torch.float16:
            return upstream, own
        scale = self.row_scale(upstream if loss_scale is None else upstream * loss_scale)
        if own is not None:
            return scale / self.boost, own
        # relative to the largest, for factors of 16 bits
        common = largest_of(scale)
        return common / self.boost, scale / common * self.boost
