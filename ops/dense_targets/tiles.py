"""Probabilities of all classes beside a tile of logits, see `cutefce.ops.dense_targets.targets`.

R tokens, C classes.  On a GPU with Triton each function runs as a single kernel.
"""

import torch
from torch import Tensor

from cutefce.ops.primitives.portable_gradients import apply_rowwise
from cutefce.ops.rows.targets import Targets


def add_excess(
    logits: Tensor, reference: Tensor, targets: Targets, rows: slice, columns: slice
) -> None:
    """Add the part of a tile of the model's logits (R, C) to the excess of its tokens.

    The tile has the tokens `rows`, whose leads have the logits `reference` (N,), and the classes
    `columns`.
    """
    dense = targets.dense
    assert dense is not None
    if dense.excess is None:
        dense.excess = torch.zeros_like(dense.factor)
    lead = targets.index[rows] - columns.start
    own = logits, reference[rows], lead, dense.probs[rows, columns]
    apply_rowwise(add_excess_, dense.excess[rows], *own, whole=(_kappa(targets, columns),))


def write_gradient(
    out: Tensor,
    logits: Tensor,
    reference: Tensor,
    targets: Targets,
    rows: slice,
    columns: slice,
) -> None:
    """Write what a backward multiplies to `out` (R, C), of a tile of the model's logits.

    Exponentials are relative to `reference` (N,); `out` may be `logits`.
    """
    dense, cap = targets.dense, None if targets.logits is None else targets.logits.cap
    assert dense is not None and dense.gradient is not None
    a, c = dense.gradient
    lead = targets.index[rows] - columns.start
    own = logits, reference[rows], lead, dense.probs[rows, columns], a[rows], c[rows]
    cap = None if cap is None else cap[rows]
    apply_rowwise(write_gradient_, out, *own, cap, whole=(_kappa(targets, columns),))


def _kappa(targets: Targets, columns: slice) -> Tensor | None:
    """Return the class weights (1, C) of the classes `columns`; None for 1."""
    weight = None if targets.dense is None else targets.dense.class_weight
    return None if weight is None else weight[None, columns]


def add_excess_(
    excess: Tensor,
    logits: Tensor,
    reference: Tensor,
    lead: Tensor,
    probs: Tensor,
    kappa: Tensor | None,
) -> None:
    """Add Σ_v κ_v q_iv (u_iv - reference_i) to `excess` (R,), without v = lead_i and q_iv = 0."""
    q = probs.to(logits.dtype)
    if kappa is not None:
        q = q * kappa
    is_lead = lead[:, None] == torch.arange(logits.shape[1], device=logits.device)
    distances = (logits - reference[:, None]).mul_(q)
    excess.add_(distances.masked_fill_(is_lead | (q == 0), 0).sum(1))


def write_gradient_(
    out: Tensor,
    logits: Tensor,
    reference: Tensor,
    lead: Tensor,
    probs: Tensor,
    a: Tensor,
    c: Tensor,
    cap: Tensor | None,
    kappa: Tensor | None,
) -> None:
    """Write a_i exp(u_iv - reference_i) - c_i κ_v q_iv to `out` (R, C), 0 at v = lead_i.

    With `cap` (R,), κ of `LogitMap`, results are times 1 - (u / cap)²; `kappa` (1, C) are the
    class weights κ_v.  More than eight parameters: fused kernels take tensors.
    """
    q = probs.to(logits.dtype) * c[:, None]
    if kappa is not None:
        q.mul_(kappa)
    q.masked_fill_((c == 0)[:, None], 0)
    result = (logits - reference[:, None]).exp_().mul_(a[:, None])
    result.masked_fill_((a == 0)[:, None], 0).sub_(q)
    del q  # freed before the derivative is allocated
    if cap is not None:
        result.mul_((logits / cap[:, None]).square_().neg_().add_(1))
    is_lead = lead[:, None] == torch.arange(logits.shape[1], device=logits.device)
    out.copy_(result.masked_fill_(is_lead, 0))
