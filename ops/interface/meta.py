"""Fake implementations of the operators: the shapes and dtypes of their results."""

from typing import Any

from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops import torch_compat
from cutefce.ops.interface.options import OPTIONS, Sharding
from cutefce.ops.planning.dw_aliasing import rows_in_place
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives.rows import sum_dtype
from cutefce.ops.schema import unpack


def forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> Tensor:
    """Return an empty loss."""
    options, _, _ = unpack(arguments, *OPTIONS)
    return h.new_empty(() if options.is_scalar else y.shape, dtype=sum_dtype(h.dtype))


def loss_forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return empty results of `operators.loss_forward`."""
    plan, options, _, sharding = unpack(arguments, Plan, *OPTIONS)
    tokens, hidden, dtype = y.shape[0], h.shape[1], sum_dtype(h.dtype)
    dx_rows = h.shape[0] if plan.in_forward and plan.grad_hidden else 0
    dw_rows = w.shape[0] if (plan.grad_weight if plan.in_forward else plan.aliased > 0) else 0
    dx_overflow, dw_overflow = (
        rows - rows_in_place(rows, narrow=dtype != h.dtype) if plan.in_forward else 0
        for rows in (dx_rows, dw_rows)
    )
    if sharding.group is not None:
        ranks = torch_compat.resolve_process_group(sharding.group).size()
        dx_rows, dx_overflow = 0, ceil_div(tokens, ranks) if dx_rows else 0
    overflow_dtype = dtype if plan.in_forward else h.dtype
    return (
        h.new_empty(() if options.is_scalar else (tokens,), dtype=dtype),
        h.new_empty((NUM_STATS, tokens), dtype=dtype),
        h.new_empty((0, 0) if plan.in_forward else (tokens, plan.kept)),
        h.new_empty((dx_rows, hidden)),
        w.new_empty((dw_rows, hidden)),
        h.new_empty((dx_overflow, hidden), dtype=overflow_dtype),
        h.new_empty((dw_overflow, hidden), dtype=overflow_dtype),
    )


def loss_backward(
    upstream: Tensor, h: Tensor, w: Tensor, y: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Return empty gradients; the first three of `arguments` are tensors of `loss_forward`."""
    plan, _, _, _ = unpack(arguments[3:], Plan, *OPTIONS)
    return (
        h.new_empty((h.shape[0] if plan.grad_hidden else 0, h.shape[1])),
        w.new_empty((w.shape[0] if plan.grad_weight else 0, w.shape[1])),
    )


def scale_gradients(
    upstream: Tensor,
    h: Tensor,
    w: Tensor,
    dx: Tensor,
    dw: Tensor,
    dx_overflow: Tensor,
    dw_overflow: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Return empty gradients."""
    (sharding,) = unpack(arguments, Sharding)
    whole = dx if sharding.group is None or not dx_overflow.shape[0] else h
    return h.new_empty(whole.shape), dw.new_empty(dw.shape)
