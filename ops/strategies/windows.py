"""The strategies, written once over the primitives.

`forward` and `backward` walk vocabulary windows: exponentials of some columns stay in memory from
the one to the other (`StoredExps`), the others are computed again.  `gradients_in_forward`
(the paper's Algorithms 3 and 4) walks chunks of tokens and needs a scalar upstream gradient.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.primitives.rows import RowStats, Targets
from cutefce.ops.strategies.dw_views import free_tail

FLOAT16_TOTAL = 2.0**15
"""T of float16 rows: their exponentials are probabilities times this, within float16's range."""


StoredExps = Sequence[tuple[int, Tensor]]
"""First columns, ascending, and the exponentials (N, K) of the K columns from there on."""


def split_windows(vocab: int, first: int, window: int) -> Iterator[tuple[int, int]]:
    """Cut [first, vocab) into windows."""
    for start in range(first, vocab, window):
        yield start, min(start + window, vocab)


def iter_windows(
    vocab: int, stored: StoredExps, window: int
) -> Iterator[tuple[int, int, Tensor | None]]:
    """Cut [0, vocab) into what is stored and, in between, windows that are not."""
    done = 0
    for first, exps in stored:
        yield from ((*columns, None) for columns in split_windows(first, done, window))
        done = min(first + exps.shape[1], vocab)
        yield first, done, exps[:, : done - first]
    yield from ((*columns, None) for columns in split_windows(vocab, done, window))


def forward(
    primitives: Primitives,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    reduction: str,
    stored: StoredExps = (),
    logit: Tensor | None = None,
) -> tuple[Tensor, RowStats]:
    """Return the reduced loss, () or (N,), and stats, of target logits (N,) if these are known.

    `stored` receives its columns' exponentials; they begin with column 0, one after another, and
    are whole pieces.  The last ones may lie beyond V; such columns are undefined.
    """
    if not stored:
        stats, loss = primitives.forward(h, w, targets, reduction)
    else:
        if logit is None:
            logit = primitives.target_logit(h, w, targets)
        firsts, rooms = zip(*stored, strict=True)
        columns = zip(firsts, (*firsts[1:], w.shape[0]), strict=True)
        partial = primitives.concat_partials(
            [
                primitives.project_exp(h, w, window, logit, targets.index, exps)
                for window, exps in zip(columns, rooms, strict=True)
            ]
        )
        stats, loss = primitives.reduce_partials(partial, logit, targets, reduction)
        for first, exps in stored:
            primitives.repair_stored_exps(exps, h, w, first, targets.index, partial, stats)
    if h.dtype == torch.float16:
        stats = _as_probabilities(stats)
    return loss, stats


def backward(
    primitives: Primitives,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    stats: RowStats,
    stored: StoredExps,
    upstream: Tensor,
    window: int,
    grad_hidden: bool,
    dw: Tensor | None,
    lost: bool = False,
) -> Tensor | None:
    """Return dX (N, D) for the upstream gradient of each row's loss (N,) or (); write `dw` (V, D).

    s_i is kept apart as share_i · unit.  Exponentials that were kept need scaled hidden states.
    Where none were, those that are computed for a scalar upstream gradient, which is the unit, take
    share_i into their reference, and so are probabilities.  `lost` says that some were kept that
    may not be in `stored` any more: what is computed instead has the same bits.

    `dw` is written from its first row on, so that some of `stored` may lie in it, see `lending`.
    """
    (vocab, hidden), tokens = w.shape, h.shape[0]
    narrow = h.dtype == torch.float16
    as_probabilities = not stored and not lost and upstream.ndim == 0
    if as_probabilities:
        total = FLOAT16_TOTAL if narrow else 1
        unit = upstream / total
        share = torch.where(targets.active, total / stats.sum_exp, 0)
        reference, row_sum = stats.reference - share.log(), share * stats.sum_exp_others
        factor = unit.expand(tokens)
    else:
        factor = torch.where(targets.active, upstream / stats.sum_exp, 0)
        # float16 lacks the range of s_i
        unit = factor.abs().amax() if narrow else factor.new_ones(())
        share = torch.where(unit > 0, factor / unit, 0)
        reference, row_sum = stats.reference, stats.sum_exp_others
    dx_sums = share.new_empty(tokens, hidden) if grad_hidden else None
    scaled, part = h, None
    if dw is not None:
        if not as_probabilities:
            scaled = h.new_empty(h.shape)
            primitives.scale_rows(scaled, h, share)
        part = primitives.target_grad(h, -share * stats.sum_exp_others, targets)
    columns = list(iter_windows(vocab, stored, window))
    for first, last, exps in iter_exps(primitives, h, w, targets, reference, columns, window, dw):
        if dx_sums is not None:
            primitives.add_grad_hidden(dx_sums, exps, w[first:last], fresh=first == 0)
        if dw is not None:
            primitives.finish_dw(dw[first:last], exps, scaled, part, first, unit)
    if dx_sums is None:
        return None
    del exps, scaled, part  # or they would be there beside dX
    dtype = primitives.dx_dtype(h.dtype)
    dx = dx_sums if dx_sums.dtype == dtype else h.new_empty(h.shape)
    primitives.finish_dx(dx, dx_sums, w, targets, factor, -row_sum)
    return dx


def iter_exps(
    primitives: Primitives,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    reference: Tensor,
    columns: Sequence[tuple[int, int, Tensor | None]],
    window: int,
    dw: Tensor | None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield columns with their exponentials, of which those that are not there are computed again.

    They lie in the rest of dW, or where there is too little, half a window at a time, in memory of
    their own.
    """
    half = primitives.config.half(window)
    tokens, width = h.shape[0], window if dw is None else min(window, half)
    own = h.new_empty(tokens, width if any(exps is None for _, _, exps in columns) else 0)
    for first, last, exps in columns:
        if exps is not None:
            yield first, last, exps
            continue
        room = None if dw is None else free_tail(dw, last, tokens, window)
        to = own if room is None else room
        for part in split_windows(last, first, to.shape[1]):
            primitives.recompute_exp(h, w, part, reference, targets.index, to)
            yield *part, to[:, : part[1] - part[0]]


def _as_probabilities(stats: RowStats) -> RowStats:
    """Move the references so that T = FLOAT16_TOTAL in every row."""
    reference = stats.reference + stats.sum_exp.log() - math.log(FLOAT16_TOTAL)
    total = torch.full_like(stats.sum_exp, FLOAT16_TOTAL)
    row_sum = stats.sum_exp_others * (FLOAT16_TOTAL / stats.sum_exp)
    return RowStats(torch.stack([reference, row_sum, total, stats.loss]))
