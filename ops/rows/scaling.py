"""Where the factors of tokens are applied in a backward over windows."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import FLOAT16_TOTAL
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets


@dataclass(frozen=True)
class Scaling:
    """How the factor scale_i of a token's exponentials is applied: scale_i = row_i · grad_scale."""

    reference: Tensor
    """(N,) that recomputed exponentials are relative to."""
    row_scale: Tensor | None
    """(N,) factor of h in dW; None if `reference` contains it."""
    target: Tensor
    """(N,) c_i / grad_scale, the factor of h_i at its target."""
    every: Tensor | None
    """(N,) the factor of κ_v h_i at every class, / grad_scale; None without label smoothing."""
    factor: tuple[Tensor, Tensor] | None
    """a and b (N,) of exponentials' factors a + b log e; None for 1."""
    grad_scale: Tensor
    """() factor of dW."""
    dx: RowCoefficients
    """Factors of dX's sums, of W_y and of the class row."""
    entries: Tensor | None = None
    """(N, K) the `SoftTargets.entries` of exponentials, with `factor`; None without."""
    relative: Tensor | None = None
    """(N,) what makes exponentials relative to the statistics' reference those of `reference`; None
    if these are the same."""


def scaling_of(
    dtype: torch.dtype,
    targets: Targets,
    stats: RowStats,
    upstream: Tensor,
    *,
    in_reference: bool,
) -> Scaling:
    """Choose where the tokens' factors are applied for `upstream`, () or (N,), of the reduced loss.

    With `in_reference`, recomputed exponentials are probabilities, and dW needs no scaled copy of
    h; with soft targets they contain the sizes of all factors, and h gets their signs.  Otherwise h
    is scaled; float16 lacks the range of these factors, so that the largest of them becomes
    `grad_scale`.
    """
    narrow = dtype == torch.float16
    if targets.options.is_scalar:
        upstream = upstream * targets.loss_scale(stats.rows.dtype)
    if in_reference and targets.soft is None:
        total = torch.full_like(upstream, FLOAT16_TOTAL if narrow else 1)
        relative, grad_scale = RowCoefficients.of(stats, targets, total), upstream / total
        if targets.logits is not None and targets.logits.factor is not None:
            factor = targets.logits.factor  # one of all tokens
            relative, grad_scale = relative.over(factor), grad_scale * factor
        reference = stats.reference - relative.scale.log()
        scale = torch.where(targets.active, grad_scale, 0)
        dx = replace(relative.times(scale), scale=scale)
        factors = relative.target, relative.every, None
        return Scaling(reference, None, *factors, grad_scale, dx, relative=relative.scale)
    dx = RowCoefficients.of(stats, targets, upstream)
    if dx.by_log_exp is not None:
        return _scaling_by_log(stats, targets, dx, narrow)
    grad_scale, entries = dx.scale.new_ones(()), targets.soft_entries(stats, dtype)
    if in_reference and entries is not None:
        return _scaling_in_reference(stats, dx, entries, narrow)
    if narrow:
        grad_scale = largest_of(dx.scale)
    part = dx.over(grad_scale) if narrow else dx
    own = part.scale, part.target, part.every
    return Scaling(stats.reference, *own, None, grad_scale, dx, entries)


def _scaling_in_reference(
    stats: RowStats, dx: RowCoefficients, entries: Tensor, narrow: bool
) -> Scaling:
    """Apply the sizes of all factors to recomputed exponentials, their signs to h and dX."""
    size, sign = dx.scale.abs(), dx.scale.sign()
    grad_scale, entries = size.new_ones(()), entries * size[:, None]
    if narrow:
        of_entries = entries.abs().amax(1) / FLOAT16_TOTAL
        grad_scale = largest_of(torch.stack([size, of_entries]))
    part, reference = dx.over(grad_scale), stats.reference - (size / grad_scale).log()
    dx = replace(dx, scale=sign * grad_scale)
    own = part.target, part.every, None, grad_scale, dx, entries / grad_scale
    return Scaling(reference, sign, *own)


def _scaling_by_log(
    stats: RowStats, targets: Targets, dx: RowCoefficients, narrow: bool
) -> Scaling:
    """Apply all factors to the exponentials, as those of entropy's gradient depend on them."""
    assert dx.by_log_exp is not None
    # the results are at most (1 + log T) T = 11.4 T times these
    sizes, grad_scale = [16 * dx.scale, 16 * dx.by_log_exp], dx.scale.new_ones(())
    classes, entries = targets.output_classes, None
    if classes is not None:
        entries = classes.entries_by_log(stats, dx.scale, dx.by_log_exp, targets.logits)
        sizes.append(entries.abs().amax(1) / FLOAT16_TOTAL)
    if narrow:
        grad_scale = largest_of(torch.stack(sizes))
    if entries is not None:
        entries = entries / grad_scale
    part = dx.over(grad_scale)
    assert part.by_log_exp is not None
    factor = part.scale, part.by_log_exp
    uniform = replace(dx, scale=torch.where(targets.active, grad_scale, 0))
    own = part.target, None, factor, grad_scale
    return Scaling(stats.reference, None, *own, uniform, entries)


def largest_of(factors: Tensor) -> Tensor:
    """Return () the size of the largest finite factor, to divide all by; 1 if all are 0.

    A token whose factor is not finite leaves those of the others as they are.
    """
    sizes = torch.where(factors.isfinite(), factors.abs(), 0)
    largest = sizes.amax() if sizes.numel() else sizes.new_zeros(())
    return torch.where(largest == 0, 1, largest)


def as_probabilities(stats: RowStats) -> RowStats:
    """Move the references so that T = FLOAT16_TOTAL in every row."""
    reference = stats.reference + stats.sum_exp.log() - math.log(FLOAT16_TOTAL)
    total = torch.full_like(stats.sum_exp, FLOAT16_TOTAL)
    others = stats.sum_exp_others * (FLOAT16_TOTAL / stats.sum_exp)
    return RowStats(torch.stack([reference, others, total, stats.loss]))
