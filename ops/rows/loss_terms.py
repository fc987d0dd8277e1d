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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions

if TYPE_CHECKING:
    from cutefce.ops.rows.statistics import RowStats


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
    def of(
        y: Tensor,
        options: LossOptions,
        tensors: TensorOptions,
        vocab: int,
        own: slice,
        dtype: torch.dtype,
    ) -> "LossTerms | None":
        """Return the terms of targets y (N,) among the `vocab` classes of all ranks.

        None if the losses are plain cross entropies.  This rank has the classes `own`; `dtype` is
        that of sums.
        """
        smoothing, z_loss = options.label_smoothing, options.z_loss
        kappa, weight = tensors.weight, tensors.token_weights
        if kappa is None and weight is None:
            if not (smoothing or z_loss):
                return None
            return LossTerms(1.0, 1 - smoothing, smoothing / vocab, z_loss, None, None)
        token = token_factors(y, tensors, dtype)
        m, mean = token, token.new_ones(())
        if kappa is not None:
            kappa = kappa.to(dtype)
            m, mean = token * kappa[y.clamp(0, vocab - 1)], kappa.sum() / vocab
        squared = z_loss * m if z_loss else 0.0  # 0 times an infinite square is NaN
        if not smoothing:
            return LossTerms(m, m, 0.0, squared, m, None)
        target = (1 - smoothing) * m
        own_kappa = None if kappa is None else kappa[own]
        every = smoothing * token
        return LossTerms(target + every * mean, target, every / vocab, squared, m, own_kappa)

    @staticmethod
    def of_probabilities(
        b: tuple[Tensor, Tensor, Tensor],
        token: Tensor,
        tensors: TensorOptions,
        options: LossOptions,
        vocab: int,
        own: slice,
    ) -> "LossTerms":
        """Return the terms of targets with probabilities among the `vocab` classes of all ranks.

        `b` are the Σ_v b_iv (N,) of the lead, of the other classes, and of all; `token` (N,) are
        the factors of tokens; this rank has the classes `own`.
        """
        lead, others, total = b
        kappa = None if tensors.weight is None else tensors.weight.to(token.dtype)
        every: Tensor | float = 0.0
        if options.label_smoothing:
            every = options.label_smoothing / vocab * token
            total = total + every * (vocab if kappa is None else kappa.sum())
        squared = options.z_loss * token if options.z_loss else 0.0
        own_kappa = None if kappa is None else kappa[own]
        weight = None if tensors.token_weights is None else token
        return LossTerms(total, lead, every, squared, weight, own_kappa, others)

    def by_lse(self, stats: "RowStats") -> Tensor | float:
        """Return the derivatives A + 2 Z lse of the losses by the log-sum-exps (N,) of `stats`."""
        if isinstance(self.lse_squared, Tensor) or self.lse_squared:
            return self.lse + 2 * self.lse_squared * stats.lse
        return self.lse

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """A, B, Γ and Z as numbers, None if they differ between tokens."""
        if isinstance(self.lse, Tensor):
            return None
        return tuple(map(float, (self.lse, self.target, self.class_row, self.lse_squared)))

    @property
    def has_class_row(self) -> bool:
        """Whether losses depend on the class row."""
        return isinstance(self.class_row, Tensor) or self.class_row != 0

    def rows(self, rows: slice | Tensor) -> "LossTerms":
        """Return the terms of some of the tokens."""

        def part(x: Any) -> Any:
            return x[rows] if isinstance(x, Tensor) else x

        own = part(self.lse), part(self.target), part(self.class_row), part(self.lse_squared)
        return LossTerms(*own, part(self.weight), self.class_weight, part(self.others))

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


def token_factors(y: Tensor, tensors: TensorOptions, dtype: torch.dtype) -> Tensor:
    """Return t (N,) of the tokens with targets y (N,), in `dtype`."""
    if tensors.token_weights is None:
        return torch.ones(y.shape, dtype=dtype, device=y.device)
    return tensors.token_weights.to(dtype)


def class_weights(terms: LossTerms | None, w: Tensor) -> Tensor:
    """Return κ (V,) of the classes of w (V, D)."""
    if terms is None or terms.class_weight is None:
        dtype = torch.promote_types(w.dtype, torch.float32)
        return torch.ones((), dtype=dtype, device=w.device).expand(len(w))
    return terms.class_weight
