"""The strategy that iterates over vocabulary windows, in the forward and again in the backward.

Exponentials of some columns are stored in between (`StoredExps`); those of the others are
recomputed, window by window.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from cutefce.ops.primitives.interface import PartialT, Primitives, TargetGradT
from cutefce.ops.primitives.rows import RowCoefficients, RowStats, Targets
from cutefce.ops.strategies.dw_views import free_tail

FLOAT16_TOTAL = 2.0**15
"""T of float16 rows: their exponentials are probabilities times this, within float16's range."""

StoredExps = Sequence[tuple[int, Tensor]]
"""First columns, ascending, and the exponentials (N, K) of the K columns from there on."""


@dataclass(frozen=True)
class LossInputs(Generic[PartialT, TargetGradT]):
    """The operands of a forward or backward, and the primitives that compute it."""

    primitives: Primitives[PartialT, TargetGradT]
    h: Tensor
    """(N, D)"""
    w: Tensor
    """(V, D)"""
    targets: Targets
    dx_dtype: torch.dtype
    """Dtype of dX as it is returned: that of sums if ranks add theirs before it is rounded."""


def split_windows(vocab: int, first: int, window: int) -> Iterator[tuple[int, int]]:
    """Cut [first, vocab) into windows [start, end)."""
    for start in range(first, vocab, window):
        yield start, min(start + window, vocab)


def iter_windows(
    vocab: int, stored: StoredExps, window: int
) -> Iterator[tuple[int, int, Tensor | None]]:
    """Cut [0, vocab) into stored windows, with their exponentials, and windows to recompute."""
    done = 0
    for first, exps in stored:
        yield from ((*columns, None) for columns in split_windows(first, done, window))
        done = min(first + exps.shape[1], vocab)
        yield first, done, exps[:, : done - first]
    yield from ((*columns, None) for columns in split_windows(vocab, done, window))


def forward(
    inputs: LossInputs[PartialT, TargetGradT],
    stored: StoredExps = (),
    target_logit: Tensor | None = None,
) -> tuple[Tensor, RowStats]:
    """Return the reduced loss, () or (N,), and the statistics of every token.

    `stored` receives the exponentials of its columns; they begin with column 0, are consecutive and
    whole reference blocks.  The last ones may be beyond V; those columns are undefined.
    `target_logit` (N,) is computed if it is not given.
    """
    projection, h, w, targets = inputs.primitives.projection, inputs.h, inputs.w, inputs.targets
    if not stored:
        stats, loss = projection.forward(h, w, targets)
    else:
        if target_logit is None:
            target_logit = projection.target_logit(h, w, targets)
        firsts, buffers = zip(*stored, strict=True)
        columns = zip(firsts, (*firsts[1:], w.shape[0]), strict=True)
        partial = projection.concat_partials(
            [
                projection.project_exp(h, w, window, target_logit, targets.index, exps)
                for window, exps in zip(columns, buffers, strict=True)
            ]
        )
        stats, loss = projection.reduce_partials(partial, target_logit, targets)
        for first, exps in stored:
            projection.repair_stored_exps(exps, h, w, first, targets.index, partial, stats)
    if h.dtype == torch.float16:
        stats = _as_probabilities(stats)
    return loss, stats


@dataclass(frozen=True)
class _Scaling:
    """How the factor scale_i of a token's exponentials is applied: scale_i = row_i · grad_scale."""

    reference: Tensor
    """(N,) that recomputed exponentials are relative to."""
    row_scale: Tensor | None
    """(N,) factor of h in dW; None if `reference` contains it."""
    target: Tensor
    """(N,) c_i / grad_scale, the factor of h_i at its target."""
    grad_scale: Tensor
    """() factor of dW."""
    dx: RowCoefficients
    """Factors of dX's sums and of W_y."""


def backward(
    inputs: LossInputs[PartialT, TargetGradT],
    stats: RowStats,
    stored: StoredExps,
    upstream: Tensor,
    window: int,
    grad_hidden: bool,
    dw: Tensor | None,
    stored_discarded: bool = False,
) -> Tensor | None:
    """Return dX (N, D) for the upstream gradient of the losses, (N,) or (); write `dw` (V, D).

    `stored_discarded` says that an earlier backward consumed aliased exponentials: factors are then
    applied as if these were stored, for equal bits.  `dw` is written from its first row on, so that
    some of `stored` may alias it, see `planning.dw_aliasing`.
    """
    gradients, h, w, targets = inputs.primitives.gradients, inputs.h, inputs.w, inputs.targets
    nothing_stored = not stored and not stored_discarded
    uniform = upstream.ndim == 0 and not targets.options.scales_rows
    scaling = _scaling(inputs, stats, upstream, in_reference=nothing_stored and uniform)
    dx_sums = scaling.target.new_empty(h.shape) if grad_hidden else None
    scaled, target_grad = h, None
    if dw is not None:
        if scaling.row_scale is not None:
            scaled = h.new_empty(h.shape)
            gradients.scale_rows(scaled, h, scaling.row_scale)
        target_grad = gradients.target_grad(h, scaling.target, targets)
    columns = list(iter_windows(w.shape[0], stored, window))
    for first, last, exps in _iter_exps(inputs, scaling.reference, columns, window, dw):
        if dx_sums is not None:
            gradients.add_grad_hidden(dx_sums, exps, w[first:last], accumulate=first > 0)
        if dw is not None and target_grad is not None:
            rows = dw[first:last]
            gradients.finish_dw(rows, exps, scaled, target_grad, first, scaling.grad_scale)
    if dx_sums is None:
        return None
    del exps, scaled, target_grad  # freed before dX is allocated
    dx = dx_sums if dx_sums.dtype == inputs.dx_dtype else h.new_empty(h.shape)
    gradients.finish_dx(dx, dx_sums, w, targets, scaling.dx)
    return dx


def _scaling(
    inputs: LossInputs[PartialT, TargetGradT],
    stats: RowStats,
    upstream: Tensor,
    *,
    in_reference: bool,
) -> _Scaling:
    """Choose where the tokens' factors are applied.

    With `in_reference`, recomputed exponentials are probabilities, and dW needs no scaled copy of
    h.  Otherwise h is scaled; float16 lacks the range of these factors, so that the largest of
    them becomes `grad_scale`.
    """
    h, targets = inputs.h, inputs.targets
    narrow = h.dtype == torch.float16
    if in_reference:
        total = torch.full_like(upstream, FLOAT16_TOTAL if narrow else 1)
        relative, grad_scale = RowCoefficients.of(stats, targets, total), upstream / total
        reference = stats.reference - relative.scale.log()
        scale = torch.where(targets.active, grad_scale, 0)
        dx = RowCoefficients(scale, relative.target * scale)
        return _Scaling(reference, None, relative.target, grad_scale, dx)
    dx = RowCoefficients.of(stats, targets, upstream)
    if not narrow:
        one = dx.scale.new_ones(())
        return _Scaling(stats.reference, dx.scale, dx.target, one, dx)
    grad_scale = dx.scale.abs().amax() if len(dx.scale) else dx.scale.new_zeros(())
    grad_scale = torch.where(grad_scale == 0, 1, grad_scale)
    row_scale, target = dx.scale / grad_scale, dx.target / grad_scale
    return _Scaling(stats.reference, row_scale, target, grad_scale, dx)


def _iter_exps(
    inputs: LossInputs[PartialT, TargetGradT],
    reference: Tensor,
    columns: Sequence[tuple[int, int, Tensor | None]],
    window: int,
    dw: Tensor | None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield column ranges with their exponentials, recomputing those that are not stored.

    Recomputed ones use the unwritten tail of dW or, where it is too small, a buffer of half a
    window.
    """
    projection, h, w = inputs.primitives.projection, inputs.h, inputs.w
    half = inputs.primitives.config.half(window)
    tokens, width = h.shape[0], window if dw is None else min(window, half)
    buffer = h.new_empty(tokens, width if any(exps is None for _, _, exps in columns) else 0)
    for first, last, exps in columns:
        if exps is not None:
            yield first, last, exps
            continue
        tail = None if dw is None else free_tail(dw, last, tokens, window)
        to = buffer if tail is None else tail
        for part in split_windows(last, first, to.shape[1]):
            projection.recompute_exp(h, w, part, reference, inputs.targets.index, to)
            yield *part, to[:, : part[1] - part[0]]


def _as_probabilities(stats: RowStats) -> RowStats:
    """Move the references so that T = FLOAT16_TOTAL in every row."""
    reference = stats.reference + stats.sum_exp.log() - math.log(FLOAT16_TOTAL)
    total = torch.full_like(stats.sum_exp, FLOAT16_TOTAL)
    others = stats.sum_exp_others * (FLOAT16_TOTAL / stats.sum_exp)
    return RowStats(torch.stack([reference, others, total, stats.loss]))
