"""The strategy that forms gradients in the forward, a chunk of tokens at a time.

These are the paper's Algorithms 3 and 4; they need a scalar upstream gradient.
"""

from dataclasses import replace

from torch import Tensor

from cutefce.ops.primitives.interface import PartialT, TargetGradT
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.grad_accumulator import GradAccumulator
from cutefce.ops.strategies.windows import LossInputs


def gradients_in_forward(
    inputs: LossInputs[PartialT, TargetGradT],
    loss_scale: Tensor,
    stored: int,
    chunk: int,
    dx: GradAccumulator,
    dw: GradAccumulator,
    dbias: Tensor | None,
) -> RowStats:
    """Return the statistics; set `dx`, `dw`, `dbias` to the gradients for upstream `loss_scale` ().

    A gradient without rows, or `dbias` (V,) if None, is not computed.  The exponentials of `chunk`
    tokens exist at a time, in `stored` >= V columns.
    """
    primitives, h, w, targets = inputs.primitives, inputs.h, inputs.w, inputs.targets
    gradients, (tokens, vocab) = primitives.gradients, (h.shape[0], w.shape[0])
    stats = RowStats.empty(loss_scale, tokens)
    target_coefficient = loss_scale.new_empty(tokens)
    every = None
    if targets.terms is not None and targets.terms.has_class_row:
        every = loss_scale.new_empty(tokens)
    # of all tokens at once: ranks wait for each other once
    target_logit = primitives.projection.target_logit(h, w, targets)
    exps = buffer = h.new_empty(min(chunk, tokens), stored)
    for start in range(0, max(tokens, 1), chunk):  # one chunk even of no tokens sets the sums
        rows = slice(start, min(start + chunk, tokens))
        part = replace(inputs, h=h[rows], targets=targets.per_token(rows))
        exps = buffer[: len(part.h)]
        _, part_stats = windows.forward(part, [(0, exps)], target_logit[rows])
        stats.rows[:, rows] = part_stats.rows
        exps = exps[:, :vocab]
        coefficients = RowCoefficients.of(part_stats, part.targets, loss_scale)
        target_coefficient[rows] = coefficients.target
        if every is not None and coefficients.every is not None:
            every[rows] = coefficients.every
        for place, sums in dx.split(rows):
            own = slice(place.start - start, place.stop - start)
            gradients.add_grad_hidden(sums, exps[own], w, accumulate=False)
            own_part = replace(part, targets=part.targets.per_token(own))
            windows.finish_dx(own_part, sums, sums, coefficients.rows(own))
        if dbias is not None:
            part_sums = weighted_sum(exps, coefficients.scale)
            dbias.copy_(part_sums if start == 0 else dbias + part_sums)
        if len(dw.gradient):
            scaled = part.h.new_empty(part.h.shape)
            gradients.scale_rows(scaled, part.h, coefficients.scale)
            for entries, sums in dw.split(slice(0, vocab)):
                gradients.add_grad_weight(sums, exps[:, entries], scaled, accumulate=start > 0)
            del scaled
    del exps, buffer, target_logit  # freed before the targets' part is added
    if dbias is not None:
        windows.finish_dbias(dbias, targets, target_coefficient, every)
    if len(dw.gradient):
        target_grad = gradients.target_grad(h, target_coefficient, targets)
        row = windows.every_row(inputs, every)
        for entries, sums in dw.split(slice(0, vocab)):
            more = None if row is None else row.rows(entries)
            gradients.add_target_grad(sums, target_grad, entries.start, more)
    return stats
