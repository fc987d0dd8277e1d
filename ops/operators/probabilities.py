"""Losses of probabilities of all classes, whose logits exist for a block of tokens at a time.

With q the probabilities, u the logits, p their softmax, and the symbols of `ops.rows.loss_terms`,

    loss_i = Σ_v b_iv (lse_i - u_iv) + λ t_i lse_i²        b_iv = t_i κ_v ((1 - ε) q_iv + ε / V)
    dL/du_iv = g_i ((Σ_v b_iv + 2 λ t_i lse_i) p_iv - b_iv)

which is made in the dtype of sums, and rounded once: p and q cancel before.  Nothing is asked of q:
it need not be 0 or more, nor add up to 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS, Stat
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossCall
from cutefce.ops.primitives.dispatch import report
from cutefce.ops.primitives.products import matmul_into
from cutefce.ops.rows.blocks import blocks

COPIES = 7
"""Tensors of the size of a block's logits, in the dtype of sums, that a step makes at most."""
MIN_ROWS, MAX_ROWS = 64, 4096
"""Tokens of a block."""
SMALLEST = 2.0**-126
"""The smallest normal float32."""


class Block(NamedTuple):
    """Some of the tokens; tensors are in the dtype of sums."""

    rows: slice
    u: Tensor
    """(R, V) logits."""
    b: Tensor
    """(R, V)"""
    z: Tensor | float
    """(R,) λ t, or the number 0."""


def block_rows(budget: int, vocab: int, dtype: torch.dtype) -> int:
    """Return how many tokens a block has whose steps take `budget` bytes, within bounds."""
    rows = budget // (COPIES * vocab * sum_dtype(dtype).itemsize)
    return min(max(rows, MIN_ROWS), MAX_ROWS)


def losses_of_probabilities(x: LossCall) -> tuple[Tensor, Tensor]:
    """Return losses (N,) and statistics of a call whose targets are probabilities (N, V).

    Of the statistics only what the log-sum-exp is made of is defined.

    Raises:
        RuntimeError: in strict mode.
    """
    h, token = x.h, x.tensors.token_weights
    if len(h):
        report("target: got probabilities (N, V), expected class indices", h.is_cuda)
    losses = h.new_empty(len(h), dtype=sum_dtype(h.dtype))
    stats = losses.new_ones(NUM_STATS, len(h))
    for rows, u, b, z in _blocks(x):
        lse = u.logsumexp(1)
        # where b is 0, a class may have the logit -inf
        losses[rows] = u.log_softmax(1).mul_(b).masked_fill_(b == 0, 0).sum(1).neg_()
        losses[rows] += z * lse.square()
        # a reference of +inf is that of an ignored token
        stats[Stat.REFERENCE, rows] = lse.clamp(max=torch.finfo(lse.dtype).max)
        stats[Stat.SUM_EXP, rows] = torch.where(lse == torch.inf, torch.inf, 1.0)
    if token is not None:
        stats[Stat.REFERENCE].masked_fill_(token == 0, torch.inf)
    return losses, stats


def gradients_of_probabilities(upstream: Tensor, x: LossCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dX (N, D), dW (V, D) and the bias' gradient (V,), without rows if not wanted.

    `upstream` are the gradients of the losses (N,).
    """
    h, w, _, step, options, tensors, _ = x
    own, dx = w.to(h.dtype), h.new_empty(len(h) if step.grad_hidden else 0, h.shape[1])
    dw = upstream.new_zeros(len(w) if step.grad_weight else 0, w.shape[1])
    dbias = upstream.new_zeros(len(w) if step.grad_bias else 0)
    is_narrow, unit_of_dw = h.dtype == torch.float16, upstream.new_tensor(SMALLEST)
    for rows, u, b, z in _blocks(x):
        g = upstream[rows, None]
        total = b.sum(1) + 2 * z * u.logsumexp(1)
        du = u.softmax(1).mul_(g * total[:, None]).sub_(b.mul_(g))
        divisor = _column(tensors.temperature, rows)
        if options.softcap is not None:
            du.mul_(1 - (u * divisor / options.softcap).square_())
        du.div_(divisor)
        if step.grad_bias:
            dbias += du.sum(0)
        du.mul_(options.logit_scale)
        units = _units(du) if is_narrow else None
        rounded = (du if units is None else du.div_(units)).to(h.dtype)
        if step.grad_hidden:
            part = upstream.new_empty(len(du), w.shape[1])
            matmul_into(part, rounded, own, accumulate=False)
            dx[rows] = part if units is None else part.mul_(units)
        if units is not None:
            # sums of blocks before are of a unit that may be smaller
            largest = torch.maximum(units.amax(), unit_of_dw)
            dw.mul_(unit_of_dw / largest)
            unit_of_dw = largest
            rounded = du.mul_(units / largest).to(h.dtype)
        if step.grad_weight:
            matmul_into(dw, rounded.t(), h[rows], accumulate=True)
    if is_narrow:
        dw.mul_(unit_of_dw)
    bias_dtype = (w if tensors.linear_bias is None else tensors.linear_bias).dtype
    return dx, dw.to(w.dtype), dbias.to(bias_dtype)


def _units(du: Tensor) -> Tensor:
    """Return powers of 2 (R, 1) for rows (R, V), which over them are at most 2^14: in float16.

    It has less range than gradients have, which may be large or all small.  `SMALLEST` is for
    rows of 0 and rows that are not finite, which then leave others as they are.
    """
    units = du.abs().amax(1, keepdim=True).log2().ceil().sub(14).exp2()
    return torch.where((units > 0) & units.isfinite(), units, SMALLEST)


def _blocks(x: LossCall) -> Iterator[Block]:
    h, w, probs, step, options, tensors, _ = x
    dtype, own = sum_dtype(h.dtype), w.to(h.dtype).t()
    for rows in blocks(len(h), block_rows(step.budget, len(w), h.dtype)):
        u = h.new_empty(rows.stop - rows.start, len(w), dtype=dtype)
        matmul_into(u, h[rows], own, accumulate=False)
        u.mul_(options.logit_scale)
        if tensors.linear_bias is not None:
            u.add_(tensors.linear_bias)
        if options.softcap is not None:
            u.div_(options.softcap).tanh_().mul_(options.softcap)
        u.div_(_column(tensors.temperature, rows))
        b = probs[rows].to(dtype) * (1 - options.label_smoothing)
        b.add_(options.label_smoothing / len(w))
        if tensors.weight is not None:
            b.mul_(tensors.weight)
        z: Tensor | float = options.z_loss
        if tensors.token_weights is not None:
            token = tensors.token_weights[rows].to(dtype)
            b.mul_(token[:, None]).masked_fill_((token == 0)[:, None], 0)
            z = z * token
        yield Block(rows, u, b, z)


def _column(temperature: Tensor | None, rows: slice) -> Tensor | float:
    """Return the divisor of the logits of some tokens."""
    if temperature is None or not temperature.ndim:
        return 1.0 if temperature is None else temperature
    return temperature[rows, None]
