"""The strategy that forms gradients in the forward, a chunk of tokens at a time.

These are the paper's Algorithms 3 and 4.  dX's sums get their factors in the backward, unless the
upstream gradient is known; those of dW and of the bias need a scalar upstream gradient.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.gradient_interface import TargetGradT
from cutefce.ops.primitives.interface import PartialT
from cutefce.ops.primitives.row_selection import clear_first_rows, row_range
from cutefce.ops.primitives.weighted_sum import add_soft_rows, weighted_sum
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.bias_gradient import finish_dbias
from cutefce.ops.strategies.chunk_windows import summing
from cutefce.ops.strategies.hidden_sums import HiddenSums
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.soft_entries import SoftEntries
from cutefce.ops.strategies.weight_sums import WeightSums


def gradients_in_forward(
    inputs: LossInputs[PartialT, TargetGradT],
    loss_scale: Tensor,
    window: int,
    stored: int,
    chunk: int,
    dx: HiddenSums,
    dw: WeightSums,
    dbias: Tensor | None,
) -> RowStats:
    """Return the statistics; set `dx` to dX's sums, `dw` and `dbias` to gradients.

    The latter are those for the upstream gradient `loss_scale` () of each token's loss; with
    `dw.factor`, dW times that is added.  What has no rows, or `dbias` (V,) if None, is not
    computed.  The exponentials of `chunk` tokens exist at a time, in memory for `stored` columns:
    of all columns if `stored` >= V, else of `window` columns, for dX alone.
    """
    primitives, h, w, targets = inputs.primitives, inputs.h, inputs.w, inputs.targets
    gradients, (tokens, vocab) = primitives.gradients, (inputs.tokens, w.shape[0])
    parts, excess, row = [], [], None
    target_coefficient = loss_scale.new_zeros(tokens)  # also of tokens that do not count
    every = None
    if targets.terms is not None and targets.terms.has_class_row:
        every = loss_scale.new_empty(tokens)
    # of all tokens at once: ranks wait for each other once, but for soft targets
    target_logit = primitives.projection.target_logit(h, w, targets)
    of_all = targets.selection
    counted = of_all.count if of_all is not None and of_all.is_on_device else None
    memory = h.new_empty(min(chunk, tokens), stored)
    for number, rows in enumerate([*blocks(tokens, chunk)] or [slice(0, 0)]):
        own_h = h if targets.selection is not None else h[rows]
        part = replace(inputs, h=own_h, targets=targets.per_token(rows))
        last, selection, coefficients = rows.stop == tokens, part.targets.selection, None
        skips = None if selection is None else selection.skipping()
        # dW's kernel begins the sums, and adds what classes have in common, even of no tokens
        must_run = len(dw.gradient) > 0 and (number == 0 or (last and every is not None))
        part.targets.selection, of_dw = skips, selection if must_run else skips
        exps = row_range(memory, 0, part.tokens)
        if must_run and counted is not None:
            clear_first_rows(exps)
        if stored < vocab:
            sums = dx.room(rows, loss_scale.dtype)
            summed = summing(part, exps, window, sums)
            _, part_stats = windows.forward(*summed, target_logit[rows])
        else:
            _, part_stats = windows.forward(part, [(0, exps)], target_logit[rows])
        parts.append(part_stats.rows)
        if part.targets.soft is not None and part.targets.soft.excess is not None:
            excess.append(part.targets.soft.excess)
        exps = exps[:, :vocab]
        values, soft = part.targets.soft_entries(part_stats, h.dtype), None
        if values is not None and stored < vocab:
            add_soft_rows(sums, values, part.targets, w)
        else:
            soft = SoftEntries.of(part, values)
        if soft is not None and not soft.is_wide:
            soft.put(exps, 0)
        if dbias is not None or len(dw.gradient):
            factors = h.dtype, part.targets, part_stats, loss_scale
            coefficients = gradients.scaling(*factors, in_reference=False).dx
        if dbias is not None and coefficients is not None:
            part_sums = weighted_sum(exps, coefficients.scale)
            dbias.copy_(part_sums if number == 0 else dbias + part_sums)
        own_dw, factor, is_scaled = coefficients, None, False
        if own_dw is not None and dw.factor is not None:
            own_dw = own_dw.times(dw.factor)
        if own_dw is not None and len(dw.gradient) and soft is not None and soft.scales_exps:
            factor = own_dw.scale  # of exponentials, after dX's products
        if len(dx.gradient):
            if stored >= vocab:
                sums = dx.room(rows, loss_scale.dtype)
                more: Any = {"accumulate": False, "selection": skips}
                is_scaled = gradients.add_grad_hidden(sums, exps, w, factor=factor, **more)
            dx.keep(rows, sums, part, part_stats, coefficients)
            del sums
        if coefficients is None or own_dw is None:
            continue
        target_coefficient[rows] = coefficients.target
        if every is not None and coefficients.every is not None:
            every[rows] = coefficients.every
        if len(dw.gradient):
            scale = None if factor is not None else own_dw.scale
            if soft is not None and factor is not None:
                soft.scale(exps, 0, factor, own_dw.target, is_scaled=is_scaled)
            all_at_once = gradients.lists_targets
            listed = None
            if factor is None:
                listed = _listed_with(rows, counted, targets) if all_at_once else part.targets
            if listed is None:
                target_grad = gradients.no_target_grad(own_h, part.targets)
            else:
                at_target = target_coefficient if all_at_once else target_coefficient[rows]
                if dw.factor is not None:
                    at_target = at_target * dw.factor
                target_grad = gradients.target_grad(h if all_at_once else own_h, at_target, listed)
            own_row = windows.every_row(part, own_dw.every)
            if own_row is not None:
                row = own_row if row is None else replace(own_row, row=row.row + own_row.row)
            scaled = part.selected(scale)
            given = scaled, target_grad, row if last else None, of_dw
            dw.add(gradients, exps, *given, chunk=number)
            del given, scaled, target_grad
    del exps, memory, target_logit  # freed before the statistics are joined
    stats = RowStats(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
    if targets.soft is not None:
        targets.soft.excess = torch.cat(excess)
    if dbias is not None:
        finish_dbias(dbias, targets, target_coefficient, every)
    return stats


def _listed_with(rows: slice, counted: Tensor | None, targets: Targets) -> Targets | None:
    """Return the targets that dW's kernel adds with the chunk of tokens `rows`; None of none.

    They are all of them, with the last chunk, or with the last in which a token counts if `counted`
    (1,) tells how many do.  Chunks behind it compute nothing, whatever they list.
    """
    last = rows.stop == len(targets.index)
    if counted is None or (last and rows.start == 0):
        return targets if last else None
    elsewhere = counted <= rows.start if last else counted > rows.stop
    index = targets.index.masked_fill(elsewhere, targets.options.ignore_index)
    listed = Targets(index, targets.vocab, targets.options, first=targets.first)
    listed.selection = targets.selection
    return listed
