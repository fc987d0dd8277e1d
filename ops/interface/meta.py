"""Fake implementations of the operators: the shapes and dtypes of their results."""

from typing import Any

from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops.interface.options import OPTIONS, StepOptions
from cutefce.ops.primitives.rows import sum_dtype
from cutefce.ops.schema import unpack


def forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> Tensor:
    """Return an empty loss."""
    options, _, _ = unpack(arguments, *OPTIONS)
    return h.new_empty(() if options.is_scalar else y.shape, dtype=sum_dtype(h.dtype))


def loss_forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return an empty loss and empty statistics."""
    _, *rest = unpack(arguments, StepOptions, *OPTIONS)
    options, tokens, dtype = rest[0], y.shape[0], sum_dtype(h.dtype)
    loss = h.new_empty(() if options.is_scalar else (tokens,), dtype=dtype)
    return loss, h.new_empty((NUM_STATS, tokens), dtype=dtype)


def loss_backward(
    upstream: Tensor, h: Tensor, w: Tensor, y: Tensor, stats: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Return empty gradients."""
    step = unpack(arguments, StepOptions, *OPTIONS)[0]
    return (
        h.new_empty((h.shape[0] if step.grad_hidden else 0, h.shape[1])),
        w.new_empty((w.shape[0] if step.grad_weight else 0, w.shape[1])),
    )
