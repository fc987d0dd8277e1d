"""Fake implementations of the operators: the shapes and dtypes of their results."""

from typing import Any

from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import OPTIONS, StepOptions
from cutefce.ops.outputs.reductions import row_count
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.schema import unpack


def loss_forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return an empty loss and empty statistics."""
    _, options, tensors, _ = unpack(arguments, StepOptions, *OPTIONS)
    tokens, dtype = y.shape[0], sum_dtype(h.dtype)
    shape: tuple[int, ...] = () if options.is_scalar else (tokens,)
    rows = NUM_STATS
    if options.reduction == OUTPUTS:
        shape = 2 + tensors.output_classes, tokens
        rows += row_count(options)
    loss = h.new_empty(shape, dtype=dtype)
    return loss, h.new_empty((rows, tokens), dtype=dtype)


def loss_backward(
    upstream: Tensor, h: Tensor, w: Tensor, y: Tensor, stats: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty gradients."""
    step, _, tensors, _ = unpack(arguments, StepOptions, *OPTIONS)
    returns_dw = step.grad_weight and tensors.accumulate_into is None
    wanted = step.grad_hidden, returns_dw, step.grad_bias
    return empty_gradients(h, w, tensors.linear_bias, *wanted)


def empty_gradients(
    h: Tensor, w: Tensor, bias: Tensor | None, hidden: bool, weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty gradients, without rows of what is not wanted."""
    like = w if bias is None else bias
    return (
        h.new_empty((h.shape[0] if hidden else 0, h.shape[1])),
        w.new_empty((w.shape[0] if weight else 0, w.shape[1])),
        like.new_empty((w.shape[0] if of_bias else 0,)),
    )


loss_forward_into, loss_backward_into = loss_forward, loss_backward
