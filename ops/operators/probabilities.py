"""Losses of probabilities of all classes, whose logits exist for a block of tokens at a time.

With q the probabilities, u the logits, p their softmax, and the symbols of `ops.rows.loss_terms`,

    loss_i = Σ_v b_iv (lse_i - u_iv) + λ t_i lse_i²        b_iv = t_i κ_v ((1 - ε) q_iv + ε / V)
    dL/du_iv = g_i ((Σ_v b_iv + 2 λ t_i lse_i) p_iv - b_iv)

which is made in the dtype of sums, and rounded once: p and q cancel before.  Nothing is asked of q:
it need not be 0 or more, nor add up to 1.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossOptions, StepOptions, TensorOptions
from cutefce.ops.operators.autograd import differentiate
from cutefce.ops.operators.context import isolated_context
from cutefce.ops.operators.meta import empty_gradients
from cutefce.ops.operators.operators import IMPLS, LIBRARY, define
from cutefce.ops.primitives.dispatch import report
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.schema import unpack

COPIES = 7
"""Tensors of the size of a block's logits, in the dtype of sums, that a step makes at most."""
MIN_ROWS, MAX_ROWS = 64, 4096
"""Tokens of a block."""
RECORDS = StepOptions, LossOptions, TensorOptions
"""Those of an operator's arguments behind h, w and probs."""
SMALLEST = 2.0**-126
"""The smallest normal float32."""
BIAS = 3 + sum(len(record.names()) for record in RECORDS[:2])
"""The place of the bias among an operator's arguments."""


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


def losses_of_probabilities(
    h: Tensor, w: Tensor, probs: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exps (N,) of h (N, D), w (V, D) and probs (N, V).

    The others are those of `RECORDS`.

    Raises:
        RuntimeError: in strict mode.
    """
    if len(h):
        report("target: got probabilities (N, V), expected class indices", h.is_cuda)
    losses, lse = h.new_empty(2, len(h), dtype=sum_dtype(h.dtype))
    for rows, u, b, z in _blocks(h, w, probs, *unpack(arguments, *RECORDS)):
        lse[rows] = u.logsumexp(1)
        # where b is 0, a class may have the logit -inf
        losses[rows] = u.log_softmax(1).mul_(b).masked_fill_(b == 0, 0).sum(1).neg_()
        losses[rows] += z * lse[rows].square()
    return losses.clone(), lse.clone()


def losses_of_probabilities_backward(
    upstream: Tensor, h: Tensor, w: Tensor, probs: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of h, w and bias, the last two without rows if they are not wanted."""
    step, options, tensors = unpack(arguments, *RECORDS)
    own, dx = w.to(h.dtype), torch.empty_like(h)
    dw = upstream.new_zeros(len(w) if step.grad_weight else 0, w.shape[1])
    dbias = upstream.new_zeros(len(w) if step.grad_bias else 0)
    is_narrow, unit_of_dw = h.dtype == torch.float16, upstream.new_tensor(SMALLEST)
    for rows, u, b, z in _blocks(h, w, probs, step, options, tensors):
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
        part = upstream.new_empty(len(du), w.shape[1])
        matmul_into(part, rounded, own, accumulate=False)
        if units is not None:
            part.mul_(units)
            # sums of blocks before are of a unit that may be smaller
            largest = torch.maximum(units.amax(), unit_of_dw)
            dw.mul_(unit_of_dw / largest)
            unit_of_dw = largest
            rounded = du.mul_(units / largest).to(h.dtype)
        dx[rows] = part
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


def _blocks(
    h: Tensor,
    w: Tensor,
    probs: Tensor,
    step: StepOptions,
    options: LossOptions,
    tensors: TensorOptions,
) -> Iterator[Block]:
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


def _fake(h: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses = h.new_empty(len(h), dtype=sum_dtype(h.dtype))
    return losses, torch.empty_like(losses)


def _fake_backward(
    upstream: Tensor, h: Tensor, w: Tensor, probs: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    step, _, tensors = unpack(arguments, *RECORDS)
    return empty_gradients(h, w, tensors.linear_bias, True, step.grad_weight, step.grad_bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, w, probs, *arguments = inputs
    ctx.step, ctx.options, tensors = unpack(arguments, *RECORDS)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(h, w, probs, *tensors.pack())


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    h, w, probs, *given = ctx.saved_tensors
    records = ctx.step, ctx.options, TensorOptions(*given)
    arguments = (x for record in records for x in record.pack())
    operands = upstream, h, w, probs, *arguments
    dx, dw, dbias = differentiate(losses_of_probabilities_backward, operands)
    found = {0: dx, 1: dw, BIAS: dbias}
    wanted = enumerate(ctx.needs_input_grad)
    return (*(found.get(place) if is_wanted else None for place, is_wanted in wanted),)


_OPERANDS = "Tensor h, Tensor w, Tensor probs"
_RECORDS = ", ".join(record.schema() for record in RECORDS)
for function, fake, operands, results in (
    (losses_of_probabilities, _fake, _OPERANDS, "Tensor, Tensor"),
    (
        losses_of_probabilities_backward,
        _fake_backward,
        f"Tensor upstream, {_OPERANDS}",
        "Tensor, Tensor, Tensor",
    ),
):
    IMPLS[function] = isolated_context(function)
    define(function, f"({operands}, {_RECORDS}) -> ({results})", fake, IMPLS[function])
torch.library.register_autograd(
    "cutefce::losses_of_probabilities", _backward, setup_context=_save, lib=LIBRARY
)
