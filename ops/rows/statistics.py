"""Statistics of every token after the forward, and the losses made of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import Stat
from cutefce.ops.interface.arguments import LossOptions
from cutefce.ops.outputs.reductions import stat_rows
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets

LSE_ROUNDING = 2.0**-16
"""Relative difference of a target's logit and its reference up to which they are one number."""


@dataclass(frozen=True)
class RowStats:
    """The statistics of every token after the forward, in the dtype of sums."""

    rows: Tensor
    """(NUM_STATS, N), indexed by `Stat`."""

    def restore(self, selection: RowSelection) -> "RowStats":
        """Return the statistics of all tokens, of those of `selection`."""
        stats = RowStats(selection.restore(self.rows))
        if len(selection.order) < selection.tokens:
            absent = torch.ones(selection.tokens, dtype=torch.bool, device=self.rows.device)
            absent[selection.order] = False
            stats.reference[absent], stats.sum_exp[absent] = torch.inf, 1
        return stats

    @property
    def reference(self) -> Tensor:
        """(N,) ρ, what stored and recomputed exponentials are relative to; +inf if ignored."""
        return self.rows[Stat.REFERENCE]

    @property
    def sum_exp_others(self) -> Tensor:
        """(N,) S, over all columns but the target's; 0 where another rank owns the target."""
        return self.rows[Stat.SUM_EXP_OTHERS]

    @property
    def sum_exp(self) -> Tensor:
        """(N,) T = exp(r - ρ) + S, which includes the target's exponential.

        1 if ignored; NaN if a logit is NaN or +inf, and where kernels cannot give a gradient.
        """
        return self.rows[Stat.SUM_EXP]

    @property
    def loss(self) -> Tensor:
        """(N,) the token's cross entropy lse - u_y, 0 if ignored."""
        return self.rows[Stat.LOSS]

    def output(self, name: str, options: LossOptions) -> Tensor:
        """(N,) the output called `name` of a call with reduction "outputs"."""
        return self.rows[stat_rows(options.output_names)[name]]

    @property
    def lse(self) -> Tensor:
        """(N,) ρ + log T, the log-sum-exp of the model's logits; +inf if ignored."""
        return self.reference + self.sum_exp.log()

    @property
    def target_logit(self) -> Tensor:
        """(N,) u_y, the reference of rows that are not far; lse - loss has the rounding of lse."""
        lse = self.lse
        logit = lse - self.loss
        is_reference = (self.reference - logit).abs() <= LSE_ROUNDING * (1 + lse.abs())
        return torch.where(is_reference, self.reference, logit)

    def returned_lse(self, options: LossOptions) -> Tensor:
        """(N,) lse as an output, which is formed without the target where it can be."""
        stored = "lse" in stat_rows(options.output_names)
        return self.output("lse", options) if stored else self.lse


def token_losses(stats: RowStats, targets: Targets) -> Tensor:
    """Return the loss of every token (N,), 0 if ignored."""
    if targets.terms is None:
        return stats.loss
    losses = targets.terms.losses(stats.lse, stats.loss, targets.class_logits)
    if targets.soft is not None and targets.soft.excess is not None:
        losses = losses - targets.soft.excess
    # beside an infinite cross entropy, other terms may be infinite or NaN; 0 times it is 0
    infinite = torch.xlogy(targets.terms.lse, stats.loss)
    losses = torch.where(stats.loss == torch.inf, infinite, losses)
    return torch.where(targets.active, losses, 0)


def returned_rows(stats: RowStats, targets: Targets) -> Tensor:
    """Return log-probabilities, lse, and entropy or 0 if not asked for, 0 if ignored.

    (3, N), or of K classes (K + 2, N).
    """
    options, entropy = targets.options, torch.zeros_like(stats.loss)
    if "entropy" in options.output_names:
        entropy = stats.output("entropy", options)
    lse, classes = stats.returned_lse(options), targets.output_classes
    rows = torch.stack([-stats.loss, lse, entropy])
    if classes is not None:
        rows = torch.cat([classes.log_probs(stats).t(), rows[1:]])
    return torch.where(targets.active, rows, 0)


def reduce_losses(stats: RowStats, targets: Targets, reduced: Tensor | None = None) -> Tensor:
    """Return the loss, () or (N,); the mean over no active token is 0.

    `reduced` () is what a kernel has reduced the losses to: their sum, divided already if
    `targets.divides_by_count`.
    """
    options = targets.options
    if reduced is None or not options.is_scalar:
        losses = token_losses(stats, targets)
        return losses.sum() * targets.loss_scale(losses.dtype) if options.is_scalar else losses
    if targets.tensors.denominator is None:
        return reduced
    return reduced * targets.loss_scale(reduced.dtype)
