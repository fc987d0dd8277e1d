"""The strategies, written once over the primitives.

`forward` and `backward` walk vocabulary windows: exponentials of the first `kept` columns stay
in memory from the one to the other, the others are computed again.  `gradients_in_forward`
(the paper's Algorithms 3 and 4) walks chunks of tokens and needs a scalar upstream gradient.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cutefce.ops.primitives import Primitives, Stats, Targets

FLOAT16_TOTAL = 2.0**15
"""T of float16 rows: their exponentials are probabilities times this, within float16's range."""


def windows(vocab: int, kept: int, window: int) -> Iterator[tuple[int, int]]:
    """Cut [0, vocab) into windows: the `kept` columns together, then `window` at a time."""
    if kept:
        yield 0, kept
    for first in range(kept, vocab, window):
        yield first, min(first + window, vocab)


def locate(y: Tensor, vocab: int, ignore_index: int, denominator: Tensor | None = None) -> Targets:
    """Tell which targets count, and where; raise for one outside [0, V), unless it is on a GPU."""
    targets = Targets(y.contiguous(), vocab, ignore_index, denominator)
    if y.device.type == "cpu":
        wrong = targets.active & (targets.address != y)
        if bool(wrong.any()):
            raise IndexError(
                f"y: got target {int(y[wrong][0])}, expected 0 <= target < {vocab} "
                f"or ignore_index={ignore_index}"
            )
    return targets


def forward(
    primitives: Primitives,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    reduction: str,
    exps: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return the reduced loss, () or (N,), and stats.

    `exps` (N, K), if given, receives the first K columns' exponentials.  K is a multiple of the
    piece and may lie above V; the columns beyond V are undefined.
    """
    logit = primitives.target_logit(h, w, targets)
    partial = primitives.project_exp(h, w, logit, targets.index, exps)
    stats, loss = primitives.finish(partial, logit, targets, reduction)
    if exps is not None:
        primitives.settle(exps, h, w, targets.index, partial, stats)
    if h.dtype == torch.float16:
        stats = _as_probabilities(stats)
    return loss, stats


def backward(
    primitives: Primitives,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    stats: Stats,
    exps: Tensor,
    upstream: Tensor,
    window: int,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX (N, D) and dW (V, D) for the upstream gradient of each row's loss (N,) or ().

    s_i is kept apart as share_i · unit.  Exponentials that were kept need scaled hidden states.
    Those that are computed again for a scalar upstream gradient, which is the unit, take share_i
    into their reference, and so are probabilities.
    """
    (vocab, hidden), tokens, kept = w.shape, h.shape[0], min(exps.shape[1], w.shape[0])
    narrow = h.dtype == torch.float16
    as_probabilities = kept == 0 and upstream.ndim == 0
    if as_probabilities:
        total = FLOAT16_TOTAL if narrow else 1
        unit = upstream / total
        share = torch.where(targets.active, total / stats.total, 0)
        reference, row_sum = stats.reference - share.log(), share * stats.sum
        factor = unit.expand(tokens)
    else:
        factor = torch.where(targets.active, upstream / stats.total, 0)
        # float16 lacks the range of s_i
        unit = factor.abs().amax() if narrow else factor.new_ones(())
        share = torch.where(unit > 0, factor / unit, 0)
        reference, row_sum = stats.reference, stats.sum
    dx_sums = share.new_zeros(tokens, hidden) if grad_hidden else None
    dw = None
    if grad_weight:
        dw = w.new_empty(vocab, hidden)
        scaled = h if as_probabilities else primitives.scale_rows(h, share, h.dtype)
        part = primitives.target_part(h, -share * stats.sum, targets)
    buffer = h.new_empty(tokens, window if kept < vocab else 0)
    for first, last in windows(vocab, kept, window):
        if last <= kept:
            e = exps[:, first:last]
        else:
            primitives.recompute_exp(h, w, (first, last), reference, targets.index, buffer)
            e = buffer[:, : last - first]
        if dx_sums is not None:
            primitives.add_grad_hidden(dx_sums, e, w[first:last])
        if dw is not None:
            primitives.finish_dw(dw[first:last], e, scaled, part, first, unit)
    if dx_sums is None:
        return None, dw
    dtype = primitives.dx_dtype(h.dtype)
    dx = dx_sums if dx_sums.dtype == dtype else h.new_empty(h.shape)
    primitives.finish_dx(dx, dx_sums, w, targets, factor, -row_sum)
    return dx, dw


def gradients_in_forward(
    primitives: Primitives,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    weight: Tensor,
    stored: int,
    chunk: int,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return losses (N,), dX (N, D) and dW's sums (V, D), for upstream gradients of `weight` ().

    The exponentials of `chunk` tokens exist at a time, in `stored` >= V columns.
    """
    (vocab, hidden), tokens = w.shape, h.shape[0]
    losses, coefficient = weight.new_empty(2, tokens)
    dx = h.new_empty(h.shape, dtype=primitives.dx_dtype(h.dtype)) if grad_hidden else None
    dw_sums = weight.new_zeros(vocab, hidden) if grad_weight else None
    buffer = h.new_empty(min(chunk, tokens), stored)
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        some = targets.rows(rows)
        losses[rows], stats = forward(
            primitives, h[rows], w, some, "none", buffer[: rows.stop - start]
        )
        exps = buffer[: rows.stop - start, :vocab]
        scale = torch.where(some.active, weight / stats.total, 0)
        coefficient[rows] = -scale * stats.sum
        if dx is not None:
            dx_sums = weight.new_zeros(rows.stop - start, hidden)
            primitives.add_grad_hidden(dx_sums, exps, w)
            primitives.finish_dx(dx[rows], dx_sums, w, some, scale, -stats.sum)
            del dx_sums  # or the next chunk's would be there beside them
        if dw_sums is not None:
            scaled = primitives.scale_rows(h[rows], scale, h.dtype)
            primitives.add_grad_weight(dw_sums, exps, scaled)
            del scaled
    if dw_sums is not None:
        primitives.add_target_part(dw_sums, primitives.target_part(h, coefficient, targets))
    return losses, dx, dw_sums


def _as_probabilities(stats: Stats) -> Stats:
    """Move the references so that T = FLOAT16_TOTAL in every row."""
    reference = stats.reference + stats.total.log() - math.log(FLOAT16_TOTAL)
    total = torch.full_like(stats.total, FLOAT16_TOTAL)
    row_sum = stats.sum * (FLOAT16_TOTAL / stats.total)
    return Stats(torch.stack([reference, row_sum, total, stats.loss]))
