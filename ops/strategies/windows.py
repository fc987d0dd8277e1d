"""The strategy that iterates over vocabulary windows, in the forward and again in the backward.

Exponentials of some columns are stored in between (`StoredExps`); those of the others are
recomputed, window by window.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.primitives.gradient_interface import TargetGradT
from cutefce.ops.primitives.interface import PartialT, expect_soft_logits, set_soft_excess
from cutefce.ops.primitives.portable_gradients import scale_by_log
from cutefce.ops.primitives.row_selection import row_range
from cutefce.ops.primitives.weighted_sum import RowFactors, weighted_sum
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.loss_terms import class_weights
from cutefce.ops.rows.outputs import reduce_outputs, stat_rows
from cutefce.ops.rows.scaling import as_probabilities
from cutefce.ops.rows.statistics import RowStats, returned_rows
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.sampling.interface import SamplingProjection
from cutefce.ops.sampling.samples import Samples
from cutefce.ops.strategies.bias_gradient import finish_dbias
from cutefce.ops.strategies.dw_views import free_tail, memory_of
from cutefce.ops.strategies.hidden_gradient import HiddenGradient
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.soft_entries import SoftEntries
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

    `stored` receives the exponentials of its columns; they begin with column 0 and are consecutive.
    The last ones may be beyond V: they are undefined.  `target_logit` (N,) is computed if None.
    """
    projection, h, w, targets = inputs.primitives.projection, inputs.h, inputs.w, inputs.targets
    if not stored and not targets.options.reduces_rows:
        stats, loss = projection.forward(h, w, targets)
    else:
        if target_logit is None:
            target_logit = projection.target_logit(h, w, targets)
        h = inputs.selected()
        expect_soft_logits(projection, targets)
        parts: Sequence[tuple[int, Tensor | None]] = stored or [(0, None)]
        firsts, buffers = zip(*parts, strict=True)
        columns = zip(firsts, (*firsts[1:], w.shape[0]), strict=True)
        partial = projection.concat_partials(
            [
                projection.project_exp(h, w, window, target_logit, targets, exps)
                for window, exps in zip(columns, buffers, strict=True)
            ]
        )
        set_soft_excess(projection, inputs.h, w, targets, target_logit)
        stats, loss = projection.reduce_partials(partial, target_logit, targets)
        puts_none = not stored or targets.has_narrow_entries(h.dtype)
        soft = None if puts_none else SoftEntries.of(inputs, targets.soft_entries(stats, h.dtype))
        for first, exps in stored:
            projection.repair_stored_exps(exps, h, w, first, targets, partial, stats)
            if soft is not None:
                soft.put(exps, first)
    outputs, more = targets.options.output_names, None
    if stat_rows(outputs):
        part = None
        if targets.options.reduces_rows and target_logit is not None:
            part = projection.partial_outputs(partial, target_logit)
        classes = targets.index + targets.first
        more = reduce_outputs(part, classes, targets.class_logits, outputs)
    if h.dtype == torch.float16:
        stats = as_probabilities(stats)
    if more is not None:
        stats = RowStats(torch.cat([stats.rows, more]))
    if targets.options.reduction == OUTPUTS:
        loss = returned_rows(stats, targets)
    return loss, stats


class _Phase(NamedTuple):
    """Columns of a backward whose exponentials have the same reference."""

    columns: list[tuple[int, int, Tensor | None]]
    """First and last of each window, and its exponentials if they are stored."""
    reference: Tensor
    """(N,) that recomputed ones are relative to."""
    row_scale: Tensor | None
    """(N,) factor of h in dW; None if `reference` contains it."""


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
    hidden_bits: int | None = None,
) -> Tensor | None:
    """Return dX (N, D) for the upstream gradient of the loss, (N,) or (); write `dw` (V, D).

    The exponentials are `stored` and recomputed ones, or sampled.  Where kernels select rows,
    `upstream` is in the order of the targets, dX in that of the call.  With
    `inputs.accumulate_into`, that is `dw`, to which dW is added.
    `dbias` (V,) receives the gradient of the bias, in the dtype of sums.

    The exponentials of the first `aliased` columns are in the memory of `dw`, which is written from
    its first row on, see `planning.dw_aliasing`.  If an earlier backward consumed them, factors are
    applied as if they were stored, for equal bits.  With `hidden_bits`, these are kept of dX's sums
    beside 16.  More than eight parameters: results, and what an earlier forward has left.
    """
    gradients, h, w, targets = inputs.primitives.gradients, inputs.h, inputs.w, inputs.targets
    as_sums = (adds := inputs.accumulate_into is not None) or inputs.dw_dtype != w.dtype
    free, sampled = None if as_sums else dw, stored if isinstance(stored, Samples) else None
    columns: list[tuple[int, int, Tensor | None]] = []
    end = aliased
    if not isinstance(stored, Samples):
        columns = list(iter_windows(inputs, stored, aliased, window, in_dw=free is not None))
        end = max((first + exps.shape[1] for first, exps in stored), default=aliased)
    uniform = upstream.ndim == 0 and not targets.scales_rows and not (as_sums and dw is not None)
    # the columns behind those that are stored, or were, whose factors are those of h in dW
    later = [part for part in columns if part[0] >= end]
    in_reference = uniform and bool(later) and (dw is not None or not end)
    if targets.soft is not None:
        nothing_stored = not stored and not aliased
        in_reference = nothing_stored and (uniform or targets.has_narrow_entries(h.dtype))
    scaling = gradients.scaling(h.dtype, targets, stats, upstream, in_reference=in_reference)
    phases = [_Phase(columns, scaling.reference, scaling.row_scale)]
    if in_reference and end:
        before = columns[: len(columns) - len(later)]
        own = _Phase(before, stats.reference, scaling.relative)
        phases = [own, _Phase(later, scaling.reference, None)]
    every = None if dw is None else every_row(inputs, scaling.every)
    elsewhere = in_reference or sampled is not None or scaling.factor is not None
    soft = SoftEntries.of(inputs, scaling.entries, in_reference=elsewhere)
    if sampled is not None and targets.soft is not None and scaling.entries is not None:
        sampled = sampled.with_terms(targets.soft.index, scaling.entries)
    dx = None
    if grad_hidden:
        dx = HiddenGradient.empty(inputs, scaling.target.dtype, hidden_bits)
    weight, scales_exps = None, dw is not None and soft is not None and soft.scales_exps
    if dw is not None:
        if scales_exps:
            target_grad = gradients.no_target_grad(h, targets)
        else:
            target_grad = gradients.target_grad(h, scaling.target, targets)
        operands = target_grad, scaling.grad_scale, every, targets.selection
        weight = WeightGradient(gradients, dw, *operands, as_sums, adds)
        del operands, target_grad
    for phase in phases:
        if phase is not phases[0] and dx is not None and scaling.relative is not None:
            dx.scale_rows(gradients, scaling.relative)
        early = soft if scaling.factor is None else None
        scaled, parts = _operands(inputs, phase, weight, sampled, window, free, early)
        factors = None if dbias is None else RowFactors.ones(h)
        if factors is not None and phase.row_scale is not None:
            factors = RowFactors.of(phase.row_scale, h.dtype)
        factor, exps = phase.row_scale if scales_exps else None, None
        for first, last, exps in parts:
            if scaling.factor is not None:
                scale_by_log(exps, *scaling.factor)
                if soft is not None:
                    soft.put(exps, first)
            if dbias is not None and factors is not None:
                dbias[first:last] = factors.sum(exps)
            is_scaled, own_w = False, row_range(w, first, last)
            if dx is not None:
                is_scaled = dx.add(gradients, exps, own_w, accumulate=first > 0, factor=factor)
            if weight is not None:
                if soft is not None and factor is not None:
                    soft.scale(exps, first, factor, scaling.target, is_scaled=is_scaled)
                weight.finish(first, last, exps, scaled)
        del scaled, parts, exps  # freed before other hidden states, or dX, are allocated
    if dbias is not None:
        finish_dbias(dbias, targets, scaling.target, scaling.every)
        dbias.mul_(scaling.grad_scale)
    del weight
    return None if dx is None else dx.finish(inputs, scaling.dx)


def _operands(
    inputs: LossInputs[PartialT, TargetGradT],
    phase: _Phase,
    weight: WeightGradient[TargetGradT] | None,
    sampled: Samples | None,
    window: int,
    dw: Tensor | None,
    soft: SoftEntries[PartialT] | None,
) -> tuple[Tensor, Iterator[tuple[int, int, Any]]]:
    """Return the hidden states that make dW in a phase, and its windows with exponentials.

    Recomputed ones may use the memory of `dw`.
    """
    scaled = rows_h = inputs.h
    scales = weight is not None and phase.row_scale is not None
    scales = scales and (soft is None or not soft.scales_exps)
    recomputes = sampled is not None or any(exps is None for *_, exps in phase.columns)
    if recomputes or (weight is not None and not scales):
        rows_h = scaled = inputs.selected()
    if scales:
        scaled = inputs.selected(phase.row_scale)
    if sampled is None:
        return scaled, _iter_exps(inputs, rows_h, phase.reference, phase.columns, dw, soft)
    projection = cast(SamplingProjection[PartialT], inputs.primitives.projection)
    given = rows_h, inputs.w, sampled, phase.reference, inputs.targets, window
    return scaled, projection.sampled_exps(*given)


def every_row(inputs: LossInputs[PartialT, TargetGradT], every: Tensor | None) -> RankOne | None:
    """Return the part κ_v Σ_i every_i h_i of dW (V, D), None without label smoothing."""
    if every is None or inputs.targets.terms is None:
        return None
    factor = class_weights(inputs.targets.terms, inputs.w).contiguous()
    return RankOne(factor, weighted_sum(inputs.selected(), every))


def _iter_exps(
    inputs: LossInputs[PartialT, TargetGradT],
    h: Tensor,
    reference: Tensor,
    columns: Sequence[tuple[int, int, Tensor | None]],
    dw: Tensor | None,
    soft: SoftEntries[PartialT] | None,
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
        if exps is not None:
            if soft is not None and not soft.is_wide:
                soft.put(exps, first)
        else:
            tail = tails[first]
            to = buffer if tail is None else tail
            projection.recompute_exp(h, w, (first, last), reference, inputs.targets, to)
            exps = to if to.shape[1] == last - first else to[:, : last - first]
            if soft is not None:
                soft.put(exps, first)
        yield first, last, exps
