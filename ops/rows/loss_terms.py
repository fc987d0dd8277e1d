"""The loss of a token as a function of its statistics, and what it weighs.

With the model's logits u, their log-sum-exp lse, and the class row U_i = Σ_v κ_v u_iv,

    loss_i = A_i lse_i - B_i u_iy - Γ_i U_i + Z_i lse_i²

so that with p the softmax of u, the gradient of a loss with upstream g_i is

    dL/du_iv = α_i p_iv - β_i [v = y_i] - γ_i κ_v
    α_i = g_i (A_i + 2 Z_i lse_i)        β_i = g_i B_i        γ_i = g_i Γ_i

Of label smoothing ε, z-loss λ, class weights κ (1 if not given), token weights t_i, m_i = t_i κ_y:

    A_i = (1 - ε) m_i + ε t_i Σκ / V     B_i = (1 - ε) m_i     Γ_i = ε t_i / V     Z_i = λ m_i

as `torch.nn.functional.cross_entropy` defines smoothing.  "mean" divides by Σ m_i.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, is_tensor

from cutefce.ops.interface.arguments import LossOptions, TensorOptions

if TYPE_CHECKING:
    from cutefce.ops.rows.statistics import RowStats


class GivenTargets(NamedTuple):
    """The targets of N tokens as a call has them, and what a rank's losses of them depend on."""

    y: Tensor
    """(N,) int64 of the classes of all ranks; the leads of soft targets."""
    options: LossOptions
    tensors: TensorOptions
    vocab: int
    """Classes of all ranks."""
    own: slice
    """Those of this rank."""
    dtype: torch.dtype
    """That of sums."""

    def token_factors(self) -> Tensor:
        """Return t (N,) in the dtype of sums."""
        if self.tensors.token_weights is None:
            return torch.ones(self.y.shape, dtype=self.dtype, device=self.y.device)
        return self.tensors.token_weights.to(self.dtype)

    def class_factors(self) -> Tensor | None:
        """Return κ (V,) of all ranks in the dtype of sums; None for 1."""
        weight = self.tensors.weight
        return None if weight is None else weight.to(self.dtype)


@dataclass(frozen=True)
class LossTerms:
    """The coefficients of the losses of N tokens: numbers if all tokens have the same."""

    lse: Tensor | float
    """(N,) A"""
    target: Tensor | float
    """(N,) B"""
    class_row: Tensor | float
    """(N,) Γ; the number 0 without label smoothing."""
    lse_squared: Tensor | float
    """(N,) Z; the number 0 without z-loss."""
    weight: Tensor | None
    """(N,) m; None for 1."""
    class_weight: Tensor | None
    """(V,) κ of this rank's classes; None for 1."""
    others: Tensor | float = 0.0
    """(N,) Σ_k b of `soft_targets`; the number 0 without soft targets."""

    @staticmethod
    def of(x: GivenTargets) -> "LossTerms | None":
        """Return the terms of targets; None if the losses are plain cross entropies."""
        smoothing, z_loss = x.options.label_smoothing, x.options.z_loss
        if x.tensors.weight is None and x.tensors.token_weights is None:
            if not (smoothing or z_loss):
                return None
            return LossTerms(1.0, 1 - smoothing, smoothing / x.vocab, z_loss, None, None)
        m, kappa = x.token_factors(), x.class_factors()
        if kappa is not None:
            m = m * kappa[x.y.clamp(0, x.vocab - 1)]
        return LossTerms.of_classes(x, m, (1 - smoothing) * m)

    @staticmethod
    def of_classes(
        x: GivenTargets, m: Tensor, lead: Tensor, others: Tensor | float = 0.0
    ) -> "LossTerms":
        """Return the terms of m (N,), of B of the leads, and of Σ_k b of the `others` (N,)."""
        smoothing, z_loss = x.options.label_smoothing, x.options.z_loss
        squared = z_loss * m if z_loss else 0.0  # 0 times an infinite square is NaN
        if not smoothing:
            return LossTerms(lead + others, lead, 0.0, squared, m, None, others)
        every, kappa = smoothing * x.token_factors(), x.class_factors()
        own_kappa = None if kappa is None else kappa[x.own]
        total = lead + others + every * (1 if kappa is None else kappa.sum() / x.vocab)
        return LossTerms(total, lead, every / x.vocab, squared, m, own_kappa, others)

    def by_lse(self, stats: "RowStats") -> Tensor | float:
        """Return the derivatives A + 2 Z lse of the losses by the log-sum-exps (N,) of `stats`."""
        if isinstance(self.lse_squared, Tensor) or self.lse_squared:
            return self.lse + 2 * self.lse_squared * stats.lse
        return self.lse

    @property
    def has_class_row(self) -> bool:
        """Whether losses depend on the class row."""
        return isinstance(self.class_row, Tensor) or self.class_row != 0

    def rows(self, rows: slice | Tensor) -> "LossTerms":
        """Return the terms of some of the tokens."""
        of_tokens = {name: x for name, x in vars(self).items() if name != "class_weight"}
        own: Any = {name: x[rows] for name, x in of_tokens.items() if is_tensor(x)}
        return replace(self, **own)

    def losses(self, lse: Tensor, nll: Tensor, class_logits: Tensor | None) -> Tensor:
        """Return the losses (N,) of log-sum-exps, lse - u_y and U, all (N,).

        Written as A nll + (A - B) u_y - Γ U + Z lse², the first term of which does not cancel.
        Soft targets beside u_y are left out: they count as if their logits were u_y.
        """
        losses = self.lse * nll
        if class_logits is not None:
            target_logit = lse - nll
            every = self.lse - self.target - self.others
            losses = losses + every * target_logit - self.class_row * class_logits
        if isinstance(self.lse_squared, Tensor) or self.lse_squared:
            losses = losses + self.lse_squared * lse.square()
        return losses


def class_weights(terms: LossTerms | None, w: Tensor) -> Tensor:
    """Return κ (V,) of the classes of w (V, D)."""
    if terms is None or terms.class_weight is None:
        dtype = torch.promote_types(w.dtype, torch.float32)
        return torch.ones((), dtype=dtype, device=w.device).expand(len(w))
    return terms.class_weight
