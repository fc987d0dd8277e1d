"""The strategy that iterates over vocabulary windows, in the forward and again in the backward.

Exponentials of some columns are stored in between (`StoredExps`); those of the others are
recomputed, window by window.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.primitives.gradient_interface import TargetGradT
from cutefce.ops.primitives.interface import PartialT, target_logits
from cutefce.ops.primitives.portable_gradients import scale_by_log
from cutefce.ops.primitives.row_selection import row_range
from cutefce.ops.primitives.weighted_sum import RowFactors, add_soft_targets, weighted_sum
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.loss_terms import class_weights
from cutefce.ops.rows.outputs import reduce_outputs, stat_rows
from cutefce.ops.rows.scaling import as_probabilities
from cutefce.ops.rows.statistics import RowStats, returned_rows
from cutefce.ops.rows.targets import OUTPUTS, Targets
from cutefce.ops.sampling.interface import SamplingProjection
from cutefce.ops.sampling.samples import Samples
from cutefce.ops.strategies.dw_views import free_tail, memory_of
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.weight_gradient import WeightGradient

StoredExps = Sequence[tuple[int, Tensor]]
"""First columns, ascending, and the exponentials (N, K) of the K columns from there on."""


def split_windows(vocab: int, first: int, window: int) -> Iterator[tuple[int, int]]:
    """Cut [first, vocab) into windows [start, end)."""
    for start in range(first, vocab, window):
        yield start, min(start + window, vocab)


def iter_windows(
    inputs: LossInputs[PartialT, TargetGradT],
    stored: StoredExps,
    aliased: int,
    window: int,
    *,
    in_dw: bool,
) -> Iterator[tuple[int, int, Tensor | None]]:
    """Cut [0, V) into stored windows, with their exponentials, and windows to recompute.

    These depend on the plan alone: the first `aliased` columns are cut in the same way where
    an earlier backward consumed their exponentials.  `in_dw` says that recomputed ones use dW.
    """
    vocab, config, done = len(inputs.w), inputs.primitives.config, 0
    memory = memory_of(inputs.w, inputs.tokens, config.reference_block)
    if aliased and not (stored and stored[0][0] == 0):
        for width in memory.aliased_widths(aliased):
            yield done, done + width, None
            done += width
    for first, exps in stored:
        done = min(first + exps.shape[1], vocab)
        columns = done - first  # slicing takes CPU time
        yield first, done, exps if columns == exps.shape[1] else exps[:, :columns]
    if not in_dw:
        yield from ((*columns, None) for columns in split_windows(vocab, done, window))
    elif done < vocab:
        for width in memory.recomputed_widths(done, config.half(window)):
            yield done, done + width, None
            done += width


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
    if not stored and not targets.options.reduces_rows:
        stats, loss = projection.forward(h, w, targets)
    else:
        if target_logit is None:
            target_logit = target_logits(projection, h, w, targets)
        h = inputs.selected()
        parts: Sequence[tuple[int, Tensor | None]] = stored or [(0, None)]
        firsts, buffers = zip(*parts, strict=True)
        columns = zip(firsts, (*firsts[1:], w.shape[0]), strict=True)
        partial = projection.concat_partials(
            [
                projection.project_exp(h, w, window, target_logit, targets, exps)
                for window, exps in zip(columns, buffers, strict=True)
            ]
        )
        stats, loss = projection.reduce_partials(partial, target_logit, targets)
        for first, exps in stored:
            projection.repair_stored_exps(exps, h, w, first, targets, partial, stats)
            targets.clear_soft(exps, first)
    outputs, more = targets.options.output_names, None
    if stat_rows(outputs):
        part = None
        if targets.options.reduces_rows and target_logit is not None:
            part = projection.partial_outputs(partial, target_logit, targets.options)
        classes = targets.index + targets.first
        more = reduce_outputs(part, stats.loss, classes, targets.class_logits, outputs)
    if h.dtype == torch.float16:
        stats = as_probabilities(stats)
    if more is not None:
        stats = RowStats(torch.cat([stats.rows, more]))
    if targets.options.reduction == OUTPUTS:
        loss = returned_rows(stats, targets)
    return loss, stats


def backward(
    inputs: LossInputs[PartialT, TargetGradT],
    stats: RowStats,
    stored: StoredExps | Samples,
    upstream: Tensor,
    window: int,
    grad_hidden: bool,
    dw: Tensor | None,
    dbias: Tensor | None = None,
    aliased: int = 0,
) -> Tensor | None:
    """Return dX (N, D) for the upstream gradient of the loss, (N,) or (); write `dw` (V, D).

    The exponentials are `stored` and recomputed ones, or sampled.

    Where kernels select rows, `upstream` is in the order of the targets, dX in that of the call.
    With `inputs.accumulate_into`, that is `dw`, to which dW is added.

    `dbias` (V,) receives the gradient of the bias, in the dtype of sums.

    The exponentials of the first `aliased` columns are in the memory of `dw`, which is written from
    its first row on, see `planning.dw_aliasing`.  If an earlier backward consumed them, factors are
    applied as if they were stored, for equal bits.  More than eight parameters: results, and what
    an earlier forward has left.
    """
    gradients, h, w, targets = inputs.primitives.gradients, inputs.h, inputs.w, inputs.targets
    nothing_stored = not stored and not aliased
    adds = inputs.accumulate_into is not None
    as_sums = adds or inputs.dw_dtype != w.dtype
    uniform = upstream.ndim == 0 and not targets.scales_rows and not (as_sums and dw is not None)
    in_reference = nothing_stored and uniform
    scaling = gradients.scaling(h.dtype, targets, stats, upstream, in_reference=in_reference)
    free, selection = None if as_sums else dw, targets.selection
    sampled, columns = stored if isinstance(stored, Samples) else None, []
    if not isinstance(stored, Samples):
        columns = list(iter_windows(inputs, stored, aliased, window, in_dw=free is not None))
    every = None if dw is None else every_row(inputs, scaling.every)
    dx_sums = scaling.target.new_empty(inputs.tokens, h.shape[1]) if grad_hidden else None
    recomputes = sampled is not None or any(exps is None for *_, exps in columns)
    scales = dw is not None and scaling.row_scale is not None
    rows_h, scaled, weight = h, h, None
    if recomputes or (dw is not None and not scales):
        rows_h = scaled = inputs.selected()
    if dw is not None:
        if scales:
            scaled = inputs.selected(scaling.row_scale)
        target_grad = gradients.target_grad(h, scaling.target, targets, scaling.others)
        operands = scaled, target_grad, scaling.grad_scale, every, selection
        weight = WeightGradient(gradients, dw, *operands, as_sums, adds)
        del operands, target_grad
    factors = None
    if dbias is not None:
        factors = RowFactors.ones(h)
        if scaling.row_scale is not None:
            factors = RowFactors.of(scaling.row_scale, h.dtype)
    parts: Iterator[tuple[int, int, Any]]
    if sampled is not None:
        projection = cast(SamplingProjection[PartialT], inputs.primitives.projection)
        given = rows_h, w, sampled, scaling.reference, targets, window
        parts = projection.sampled_exps(*given)
        del given
    else:
        parts = _iter_exps(inputs, rows_h, scaling.reference, columns, free)
    for first, last, exps in parts:
        if scaling.factor is not None:
            scale_by_log(exps, *scaling.factor)
        if dx_sums is not None:
            more: Any = {"accumulate": first > 0, "selection": selection}
            more["in_windows"] = last - first < len(w)
            gradients.add_grad_hidden(dx_sums, exps, row_range(w, first, last), **more)
        if dbias is not None and factors is not None:
            dbias[first:last] = factors.sum(exps)
        if weight is not None:
            weight.finish(first, last, exps)
    if dbias is not None:
        finish_dbias(dbias, targets, scaling.target, scaling.every, scaling.others)
        dbias.mul_(scaling.grad_scale)
    if dx_sums is None:
        return None
    del parts, exps, rows_h, scaled, weight  # freed before dX is allocated
    if selection is None and dx_sums.dtype == inputs.dx_dtype:
        finish_dx(inputs, dx_sums, dx_sums, scaling.dx)
        return dx_sums
    dx = dx_sums.new_empty(dx_sums.shape, dtype=inputs.dx_dtype)
    finish_dx(inputs, dx, dx_sums, scaling.dx, None if selection is None else selection.order)
    return dx


def finish_dx(
    inputs: LossInputs[PartialT, TargetGradT],
    out: Tensor,
    sums: Tensor,
    coefficients: RowCoefficients,
    order: Tensor | None = None,
) -> None:
    """Write dX (N, D) of its `sums` to `out`, which may be `sums`.

    With `order` (N,), row i of `sums` becomes row order_i of `out`, which is not `sums` then.
    `sums` are overwritten.
    """
    if coefficients.others is not None:
        coefficients = add_soft_targets(sums, inputs.w, inputs.targets, coefficients)
    gradients, every = inputs.primitives.gradients, class_term(inputs, coefficients)
    gradients.finish_dx(out, sums, inputs.w, inputs.targets, coefficients, every, order)


def class_term(
    inputs: LossInputs[PartialT, TargetGradT], coefficients: RowCoefficients
) -> RankOne | None:
    """Return the class row's part of dX (N, D), None without label smoothing."""
    if coefficients.every is None or inputs.class_row is None:
        return None
    return RankOne(coefficients.every, inputs.class_row)


def every_row(inputs: LossInputs[PartialT, TargetGradT], every: Tensor | None) -> RankOne | None:
    """Return the part κ_v Σ_i every_i h_i of dW (V, D), None without label smoothing."""
    if every is None or inputs.targets.terms is None:
        return None
    factor = class_weights(inputs.targets.terms, inputs.w).contiguous()
    return RankOne(factor, weighted_sum(inputs.selected(), every))


def finish_dbias(
    dbias: Tensor,
    targets: Targets,
    target: Tensor | None,
    every: Tensor | None,
    others: Tensor | None,
) -> None:
    """Add the terms of targets (N,) and of every class to the sums of the bias' gradient (V,).

    Those of soft targets are `others` (N, K).  Those of targets may be in the sums.
    """
    if target is not None:
        dbias.index_put_((targets.safe_index,), target, accumulate=True)  # deterministic
    if others is not None and targets.soft is not None:
        dbias.index_put_((targets.soft.index,), others, accumulate=True)
    if every is not None and targets.terms is not None:
        weight = targets.terms.class_weight
        dbias.add_(every.sum() if weight is None else every.sum() * weight)
    if targets.logits is not None and targets.logits.scale != 1:
        dbias.div_(targets.logits.scale)


def _iter_exps(
    inputs: LossInputs[PartialT, TargetGradT],
    h: Tensor,
    reference: Tensor,
    columns: Sequence[tuple[int, int, Tensor | None]],
    dw: Tensor | None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield column ranges with their exponentials, recomputing those that are not stored.

    `h` (N, D) are the hidden states in the order of the targets.  Recomputed ones use the unwritten
    tail of dW or, where it is too small, a buffer.
    """
    projection, w, tokens = inputs.primitives.projection, inputs.w, h.shape[0]
    missing = [(first, last) for first, last, exps in columns if exps is None]
    tails = {
        first: None if dw is None else free_tail(dw, last, tokens, last - first)
        for first, last in missing
    }
    width = max((last - first for first, last in missing if tails[first] is None), default=0)
    width = round_up(width, inputs.primitives.config.reference_block)
    buffer = h.new_empty(tokens, width)
    for first, last, exps in columns:
        if exps is None:
            tail = tails[first]
            to = buffer if tail is None else tail
            projection.recompute_exp(h, w, (first, last), reference, inputs.targets, to)
            exps = to if to.shape[1] == last - first else to[:, : last - first]
            inputs.targets.clear_soft(exps, first)
        yield first, last, exps
