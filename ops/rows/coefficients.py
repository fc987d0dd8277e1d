"""The gradient of a loss by raw logits: per-token coefficients.

With t_iv = h_i · w_v, u_iv the model's logits (`LogitMap`), and e_iv their exponentials relative to
the reference ρ_i (0 at the target y_i), the gradient of a loss is

    dL/dt_iv = scale_i e_iv + every_i κ_v  (v ≠ y_i)        dL/dt_iy = target_i + every_i κ_y

Options that only change these numbers, such as z-loss or class weights, are served by
`LossTerms` and `RowCoefficients` alone: no GEMM knows them.  Of bounded logits, stored
exponentials are e_iv (1 - (u / κ)²), which is the map's derivative but for a row's factor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import OUTPUTS, Targets


@dataclass(frozen=True)
class RowCoefficients:
    """The gradient of the loss by raw logits: scale_i e_iv + every_i κ_v, target_i more at y_i."""

    scale: Tensor
    """(N,) factor of every exponential but the target's; 0 for ignored tokens."""
    target: Tensor
    """(N,) dL/dt at the target; 0 where another rank owns the target."""
    every: Tensor | None = None
    """(N,) factor of the class weights κ, with label smoothing; 0 for ignored tokens."""
    by_log_exp: Tensor | None = None
    """(N,) what log e_iv, times this, adds to `scale`, for the gradient of entropy."""

    @staticmethod
    def of(stats: RowStats, targets: Targets, upstream: Tensor) -> "RowCoefficients":
        """Return the coefficients for the upstream gradient, () or (N,), of each token's loss.

        dL/du_iv = α_i p_iv with p_iv = e_iv / T_i, and at the target α_i p_iy - β_i, written as
        -α_i S_i / T_i + (α_i - β_i), which does not cancel for α = β and p → 1.
        """
        if targets.options.reduction == OUTPUTS:
            return RowCoefficients._of_outputs(stats, targets, upstream)
        active, terms, every = targets.active, targets.terms, None
        by_lse = targets.by_lse(stats)
        scale = torch.where(active, upstream * by_lse / stats.sum_exp, 0)
        target = -scale * stats.sum_exp_others
        if terms is not None:
            beyond = upstream * (by_lse - terms.target)
            target = target + torch.where(targets.owned, beyond, 0)
            if terms.has_class_row:
                every = torch.where(active, -upstream * terms.class_row, 0)
        return RowCoefficients(scale, target, every).by_raw_logits(stats, targets)

    @staticmethod
    def of_sums(stats: RowStats, targets: Targets) -> "RowCoefficients":
        """Return the coefficients of dX's sums Σ_v e_iv w_v - S_i w_y; 0 for ignored tokens."""
        others = torch.where(targets.active, stats.sum_exp_others, 0)
        return RowCoefficients(targets.active.to(others.dtype), -others)

    @staticmethod
    def _of_outputs(stats: RowStats, targets: Targets, upstream: Tensor) -> "RowCoefficients":
        """Return the coefficients for upstream gradients (3, N) of log-probability, lse, entropy.

        Those of entropy H are of -p_v (log p_v + H): the factor of e_v depends on log e_v.
        """
        of_log_prob, of_lse, of_entropy = upstream
        by_softmax, beyond, by_log_p = of_lse - of_log_prob, of_lse, None
        classes = targets.output_classes
        if classes is not None and classes.gradients is not None:
            by_softmax, beyond = classes.gradients.by_softmax, beyond - classes.gradients.others
        if "entropy" in targets.options.output_names:
            by_log_p = -of_entropy
            own = of_entropy * stats.output("entropy", targets.options)
            by_softmax, beyond = by_softmax - own, beyond - own
        scale = torch.where(targets.active, by_softmax / stats.sum_exp, 0)
        target = -scale * stats.sum_exp_others
        if by_log_p is not None:
            p_loss = torch.where(stats.loss == torch.inf, 0, stats.loss * (-stats.loss).exp())
            beyond = beyond - by_log_p * p_loss
            by_log_p = torch.where(targets.active, by_log_p / stats.sum_exp, 0)
            scale = scale - by_log_p * stats.sum_exp.log()
        target = target + torch.where(targets.owned, beyond, 0)
        return RowCoefficients(scale, target, None, by_log_p).by_raw_logits(stats, targets)

    def by_raw_logits(self, stats: RowStats, targets: Targets) -> "RowCoefficients":
        """Return the coefficients by raw logits of those by the model's."""
        logits = targets.logits
        if logits is None:
            return self
        derivative = logits.derivative(stats.target_logit)
        result = self if logits.factor is None else self.times(logits.factor)
        target = torch.where(targets.owned, self.target * derivative, 0)
        return replace(result, target=target)

    def times(self, factor: Tensor) -> "RowCoefficients":
        """Return the coefficients times `factor` () or (N,)."""
        return self._map(lambda x: x * factor)

    def over(self, divisor: Tensor) -> "RowCoefficients":
        """Return the coefficients over `divisor` () or (N,)."""
        return self._map(lambda x: x / divisor)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "RowCoefficients":
        fields = self.scale, self.target, self.every, self.by_log_exp
        results: Any = (None if x is None else function(x) for x in fields)
        return RowCoefficients(*results)


@dataclass(frozen=True)
class RankOne:
    """A matrix factor ⊗ row that is added to a gradient before it is rounded.

    Label smoothing adds γ ⊗ v to dX and κ ⊗ H to dW.
    """

    factor: Tensor
    """(M,) a factor for each row of the gradient, in the dtype of sums."""
    row: Tensor
    """(D,) in the dtype of sums, contiguous from a multiple of 16 bytes on."""

    def rows(self, rows: slice) -> "RankOne":
        """Return the matrix's rows of a slice."""
        return RankOne(self.factor[rows], self.row)
