"""Row reductions of the logits beside their log-sum-exp, from those of parts of the classes.

With u_iv the logits and p_iv their softmax, the outputs of a token are

    entropy          H_i = -Σ_v p_iv log p_iv = Σ_v p_iv (nll_i - (u_iv - u_iy))
    sum_p_squared    Σ_v p_iv²
    mean_logit       Σ_v u_iv / V
    is_top1          whether no other logit is above the target's
    argmax           the class of the largest logit; the target of equal ones, else the lowest
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS

STORED = "entropy", "sum_p_squared", "mean_logit", "is_top1", "argmax"
"""Outputs that are rows of the statistics; lse follows from the others."""


class PartialOutputs(NamedTuple):
    """Reductions over parts P of the classes without the target, relative to the target's logit.

    Each is (N, P) in the dtype of sums, or None if not asked for.
    """

    lse: Tensor
    """log Σ exp(u - u_y)"""
    mean: Tensor | None
    """Σ (u - u_y) exp(u) / Σ exp(u); 0 of an empty part."""
    squares: Tensor | None
    """log Σ exp(2 (u - u_y))"""
    largest: Tensor | None
    """The largest u - u_y; -inf of an empty part."""
    column: Tensor | None
    """Its class, as a number of the dtype of sums; the lowest of equal ones."""

    def combined(self) -> "PartialOutputs":
        """Return the reductions of all parts together, P = 1."""
        lse = self.lse.logsumexp(1, keepdim=True)
        mean = squares = largest = column = None
        if self.mean is not None:
            weight = torch.where(self.lse == -torch.inf, 0, (self.lse - lse).exp())
            # of distances from lse, which are small: weights add up to 1 but for rounding
            distance = torch.where(weight == 0, 0, self.mean - lse)
            mean = torch.where(lse == -torch.inf, 0, lse + (weight * distance).sum(1, keepdim=True))
        if self.squares is not None:
            squares = self.squares.logsumexp(1, keepdim=True)
        if self.largest is not None and self.column is not None:
            largest = self.largest.amax(1, keepdim=True)
            is_largest = self.largest == largest
            column = torch.where(is_largest, self.column, torch.inf).amin(1, keepdim=True)
        return PartialOutputs(lse, mean, squares, largest, column)


def stat_rows(outputs: Sequence[str]) -> dict[str, int]:
    """Return the row of each of `outputs` in the statistics, after those of every call."""
    named = [name for name in STORED if name in outputs]
    return {name: NUM_STATS + row for row, name in enumerate(named)}


def reduce_outputs(
    partial: PartialOutputs | None,
    nll: Tensor,
    target: Tensor,
    class_mean: Tensor | None,
    outputs: Sequence[str],
) -> Tensor:
    """Return the `outputs` of all classes, stacked in the order of `stat_rows`.

    Args:
        partial: reductions of the parts of all ranks; None if no output needs them.
        nll: (N,) lse - u_y.
        target: (N,) classes in [0, V), of all ranks' classes.
        class_mean: (N,) Σ_v u / V; needed for "mean_logit" alone.
        outputs: names of outputs, at least one of `STORED`.
    """
    rows: dict[str, Tensor] = {}
    if class_mean is not None:
        rows["mean_logit"] = class_mean
    if partial is None:
        return torch.stack([rows[name] for name in stat_rows(outputs)])
    every = partial.combined()
    if every.mean is not None:
        # Σ_v p_v (lse - u_v), of the others and of the target
        others = (every.lse[:, 0] - nll).exp() * (nll - every.mean[:, 0])
        rows["entropy"] = others + (-nll).exp() * nll
    if every.squares is not None:
        rows["sum_p_squared"] = (every.squares[:, 0] - 2 * nll).exp() + (-2 * nll).exp()
    if every.largest is not None and every.column is not None:
        is_top1 = every.largest[:, 0] <= 0
        rows["is_top1"] = is_top1.to(nll.dtype)
        rows["argmax"] = torch.where(is_top1, target.to(nll.dtype), every.column[:, 0])
    return torch.stack([rows[name] for name in stat_rows(outputs)])
