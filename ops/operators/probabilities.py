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
from cutefce.ops.operators.autograd import differentiate
from cutefce.ops.operators.context import isolated_context
from cutefce.ops.operators.operators import IMPLS, LIBRARY
from cutefce.ops.primitives.dispatch import report
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.rows.blocks import blocks

COPIES = 7
"""Tensors of the size of a block's logits, in the dtype of sums, that a step makes at most."""
MIN_ROWS, MAX_ROWS = 64, 4096
"""Tokens of a block."""
OPERANDS = "Tensor h, Tensor w, Tensor probs"
FACTORS = (
    "Tensor? bias, Tensor? token_weights, Tensor? weight, Tensor? temperature, "
    "float label_smoothing, float z_loss, float logit_scale, float? softcap, int block"
)


class Factors(NamedTuple):
    """The options of a loss."""

    bias: Tensor | None
    token_weights: Tensor | None
    weight: Tensor | None
    temperature: Tensor | None
    label_smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float | None
    block: int
    """Tokens of a block."""


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
    h: Tensor, w: Tensor, probs: Tensor, *factors: Any
) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exps (N,) of h (N, D), w (V, D) and probs (N, V).

    The others are those of `Factors`.

    Raises:
        RuntimeError: in strict mode.
    """
    if len(h):
        report("target: got probabilities (N, V), expected class indices", h.is_cuda)
    losses, lse = h.new_empty(2, len(h), dtype=sum_dtype(h.dtype))
    for rows, u, b, z in _blocks(h, w, probs, Factors(*factors)):
        lse[rows] = u.logsumexp(1)
        # where b is 0, a class may have the logit -inf
        losses[rows] = u.log_softmax(1).mul_(b).masked_fill_(b == 0, 0).sum(1).neg_()
        losses[rows] += z * lse[rows].square()
    return losses.clone(), lse.clone()


def losses_of_probabilities_backward(
    upstream: Tensor, h: Tensor, w: Tensor, probs: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of h, w and bias, the last two without rows if they are not wanted.

    `given` are those of `Factors`, and whether the gradients of w and bias are wanted.
    """
    *factors, grad_weight, grad_bias = given
    options = Factors(*factors)
    own, dx = w.to(h.dtype), torch.empty_like(h)
    dw = upstream.new_zeros(len(w) if grad_weight else 0, w.shape[1])
    dbias = upstream.new_zeros(len(w) if grad_bias else 0)
    largest = upstream.abs().amax() if len(upstream) else upstream.new_ones(())
    # float16 lacks the range of upstream gradients
    unit = torch.where(largest == 0, 1, largest).log2().ceil().exp2()
    for rows, u, b, z in _blocks(h, w, probs, options):
        g = (upstream[rows] / unit)[:, None]
        total = b.sum(1) + 2 * z * u.logsumexp(1)
        du = u.softmax(1).mul_(g * total[:, None]).sub_(b.mul_(g))
        divisor = _column(options.temperature, rows)
        if options.softcap is not None:
            du.mul_(1 - (u * divisor / options.softcap).square_())
        du.div_(divisor)
        if grad_bias:
            dbias += du.sum(0)
        dt = du.mul_(options.logit_scale).to(h.dtype)
        part = upstream.new_empty(len(dt), w.shape[1])
        matmul_into(part, dt, own, accumulate=False)
        dx[rows] = part.mul_(unit)
        if grad_weight:
            matmul_into(dw, dt.t(), h[rows], accumulate=True)
    bias_dtype = w.dtype if options.bias is None else options.bias.dtype
    return dx, dw.mul_(unit).to(w.dtype), dbias.mul_(unit).to(bias_dtype)


def _blocks(h: Tensor, w: Tensor, probs: Tensor, options: Factors) -> Iterator[Block]:
    dtype, own = sum_dtype(h.dtype), w.to(h.dtype).t()
    for rows in blocks(len(h), options.block):
        u = h.new_empty(rows.stop - rows.start, len(w), dtype=dtype)
        matmul_into(u, h[rows], own, accumulate=False)
        u.mul_(options.logit_scale)
        if options.bias is not None:
            u.add_(options.bias)
        if options.softcap is not None:
            u.div_(options.softcap).tanh_().mul_(options.softcap)
        u.div_(_column(options.temperature, rows))
        b = probs[rows].to(dtype) * (1 - options.label_smoothing)
        b.add_(options.label_smoothing / len(w))
        if options.weight is not None:
            b.mul_(options.weight)
        z: Tensor | float = options.z_loss
        if options.token_weights is not None:
            token = options.token_weights[rows].to(dtype)
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
    upstream: Tensor, h: Tensor, w: Tensor, probs: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, grad_weight, grad_bias = rest
    dbias = (w if bias is None else bias).new_empty(len(w) if grad_bias else 0)
    return torch.empty_like(h), w.new_empty(len(w) if grad_weight else 0, w.shape[1]), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, smoothing, z_loss, scale, softcap, block = inputs
    ctx.numbers = smoothing, z_loss, scale, softcap, block
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_weight, _, grad_bias, *others = ctx.needs_input_grad
    given = *ctx.saved_tensors, *ctx.numbers, grad_weight, grad_bias
    dx, dw, dbias = differentiate(losses_of_probabilities_backward, (upstream, *given))
    gradients = dx if grad_hidden else None, dw if grad_weight else None, None
    return *gradients, dbias if grad_bias else None, *[None] * len(others)


for function, fake, schema in (
    (losses_of_probabilities, _fake, f"{OPERANDS}, {FACTORS}) -> (Tensor, Tensor"),
    (
        losses_of_probabilities_backward,
        _fake_backward,
        f"Tensor upstream, {OPERANDS}, {FACTORS}, bool grad_weight, bool grad_bias"
        ") -> (Tensor, Tensor, Tensor",
    ),
):
    name = function.__name__
    LIBRARY.define(f"{name}({schema})")
    IMPLS[function] = isolated_context(function)
    LIBRARY.impl(name, IMPLS[function], "CompositeExplicitAutograd")
    torch.library.register_fake(f"cutefce::{name}", fake, lib=LIBRARY)
torch.library.register_autograd(
    "cutefce::losses_of_probabilities", _backward, setup_context=_save, lib=LIBRARY
)
