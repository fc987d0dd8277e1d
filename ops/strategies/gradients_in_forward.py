"""TODO."""

import torch
from torch import Tensor

from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.primitives.rows import RowStats, Targets
from cutefce.ops.strategies.grad_accumulator import GradAccumulator
from cutefce.ops.strategies.windows import forward


def gradients_in_forward(
    primitives: Primitives,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    weight: Tensor,
    stored: int,
    chunk: int,
    dx: GradAccumulator,
    dw: GradAccumulator,
) -> RowStats:
    """Return stats; set `dx` and `dw` to the gradients for upstream gradients of `weight` ().

    One that has no rows is not wanted.

    The exponentials of `chunk` tokens exist at a time, in `stored` >= V columns.
    """
    vocab, tokens = w.shape[0], h.shape[0]
    whole = RowStats(weight.new_empty(4, tokens))
    coefficient = weight.new_empty(tokens)
    logit = primitives.target_logit(h, w, targets)  # of all: ranks wait for each other once
    exps = buffer = h.new_empty(min(chunk, tokens), stored)
    for start in range(0, max(tokens, 1), chunk):  # without a token too, sums are set
        rows = slice(start, min(start + chunk, tokens))
        some, x = targets.rows(rows), h[rows]
        exps = buffer[: len(x)]
        _, stats = forward(primitives, x, w, some, "none", [(0, exps)], logit[rows])
        whole.rows[:, rows] = stats.rows
        exps = exps[:, :vocab]
        scale = torch.where(some.active, weight / stats.sum_exp, 0)
        coefficient[rows] = -scale * stats.sum_exp_others
        for place, sums in dx.of(rows):
            own = slice(place.start - start, place.stop - start)
            primitives.add_grad_hidden(sums, exps[own], w, fresh=True)
            parts = w, some.rows(own), scale[own], -stats.sum_exp_others[own]
            primitives.finish_dx(sums, sums, *parts)
        if len(dw.gradient):
            scaled = x.new_empty(x.shape)
            primitives.scale_rows(scaled, x, scale)
            for entries, sums in dw.of(slice(0, vocab)):
                primitives.add_grad_weight(sums, exps[:, entries], scaled, fresh=start == 0)
            del scaled
    del exps, buffer, logit  # or they would be there beside what the targets' part takes
    if len(dw.gradient):
        part = primitives.target_grad(h, coefficient, targets)
        for entries, sums in dw.of(slice(0, vocab)):
            primitives.add_target_grad(sums, part, entries.start)
    return whole
