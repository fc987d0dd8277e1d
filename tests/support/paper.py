"""The paper's own streaming form, for comparison with calls.

Algorithms 1 and 2 of "From Projection to Prediction: Beyond Logits for Scalable Language Models"
(arXiv 2511.17599), window by window: the forward keeps a running maximum m and sum a of every row
and, separately, the target's logit; the backward computes every logit again and forms
g_v = Γ (exp(z_v - m) / a - [v = y]) in the inputs' dtype.  Only tests and
benchmarks call this.  Algorithms 3 and 4 are programs of chunks (`ops.program`).
"""

import torch
from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.primitives.portable_projection import PartialSums, PortableProjection
from cutefce.ops.program.layout import even_windows
from cutefce.ops.rows.targets import Targets

NO_TARGET = -1


def algorithm_1(
    projection: PortableProjection, h: Tensor, w: Tensor, targets: Targets, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, m and a, each (N,); an ignored row's loss is 0."""
    target_logit = projection.target_logit(h, w, targets)
    m = torch.full_like(target_logit, -torch.inf)
    a = torch.zeros_like(m)
    nothing = Targets(torch.full_like(targets.index, NO_TARGET), targets.vocab, targets.options)
    for first, last in even_windows(0, w.shape[0], window, 1):
        # every logit lies above a reference of -inf, so that each block uses its own maximum
        below = torch.full_like(m, -torch.inf)
        pieces = projection.project_exp(h, w, (first, last), below, nothing)
        m, a = _merge(m, a, pieces)
    losses = torch.where(targets.active, m + a.log() - target_logit, 0)
    return losses, m, a


def _merge(m: Tensor, a: Tensor, pieces: PartialSums) -> tuple[Tensor, Tensor]:
    """Join a running maximum and sum with those of further pieces."""
    maximum = torch.maximum(m, pieces.references.amax(1))
    total = pieces.sums * torch.exp(pieces.references - maximum[:, None])
    return maximum, a * torch.exp(m - maximum) + total.sum(1)


def algorithm_2(
    projection: PortableProjection,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    m: Tensor,
    a: Tensor,
    upstream: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return dX (N, D) and dW (V, D) for the upstream gradient Γ (N,) of each row's loss."""
    dtype = sum_dtype(h.dtype)
    dx = torch.zeros(h.shape, dtype=dtype, device=h.device)
    dw = torch.empty_like(w)
    gamma = torch.where(targets.active, upstream, 0)
    nothing = Targets(torch.full_like(targets.index, NO_TARGET), targets.vocab, targets.options)
    exps = torch.empty(h.shape[0], window, dtype=dtype, device=h.device)
    for first, last in even_windows(0, w.shape[0], window, 1):
        projection.recompute_exp(h, w, (first, last), m, nothing, exps)
        g = exps[:, : last - first] * (gamma / a)[:, None]
        column = torch.arange(first, last, device=h.device)
        g = torch.where(targets.index[:, None] == column, g - gamma[:, None], g).to(h.dtype)
        matmul_into(dx, g, w[first:last], accumulate=True)
        sums = dw.new_empty(last - first, h.shape[1], dtype=dtype)
        matmul_into(sums, g.t(), h, accumulate=False)
        dw[first:last] = sums
    return dx.to(h.dtype), dw
