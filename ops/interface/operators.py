"""The inner operators: schemas and implementations.

`torch.ops.cutefce.loss` (`call.py`), which users call, composes them, so that autograd,
`torch.compile` and graph capture see tensors in and tensors out:

    forward            the loss, where no gradient is needed
    loss_forward       the forward of a training step: loss, statistics, and what its backward needs
    loss_backward      the backward of "windows" plans
    scale_gradients    the backward of plans that form gradients in the forward

Their schemas are built from the option records; `meta.py` has their fake implementations and
`autograd.py` their derivatives.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface import meta
from cutefce.ops.interface.context import isolated_context
from cutefce.ops.interface.options import OPTIONS, LossOptions, Sharding, TensorOptions
from cutefce.ops.parallel.shard import Unsharded, shard_of
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives.dispatch import primitives_for, problem_of, scale_rows_for
from cutefce.ops.primitives.rows import RowStats, reduce_losses, sum_dtype
from cutefce.ops.schema import unpack
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.dw_views import aliased_views
from cutefce.ops.strategies.grad_accumulator import GradAccumulator
from cutefce.ops.strategies.gradients_in_forward import gradients_in_forward
from cutefce.ops.strategies.windows import LossInputs, StoredExps

LIBRARY = torch.library.Library("cutefce", "DEF")
PLANNED = (Plan, *OPTIONS)

_OPTIONS = ", ".join(record.schema() for record in OPTIONS)
_PLANNED = ", ".join(record.schema() for record in PLANNED)
LIBRARY.define(f"forward(Tensor h, Tensor w, Tensor y, {_OPTIONS}) -> Tensor")
LIBRARY.define(
    f"loss_forward(Tensor h, Tensor w, Tensor y, {_PLANNED}) -> (Tensor loss, Tensor stats, "
    "Tensor exps, Tensor dx, Tensor dw, Tensor dx_overflow, Tensor dw_overflow)"
)
LIBRARY.define(
    "loss_backward(Tensor upstream, Tensor h, Tensor w, Tensor y, Tensor stats, Tensor exps, "
    f"Tensor dw, {_PLANNED}) -> (Tensor dx, Tensor dw)"
)
LIBRARY.define(
    "scale_gradients(Tensor upstream, Tensor h, Tensor w, Tensor dx, Tensor dw, "
    f"Tensor dx_overflow, Tensor dw_overflow, {Sharding.schema()}) -> (Tensor dx, Tensor dw)"
)


def _prepare(
    shard: Unsharded,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    options: LossOptions,
    tensors: TensorOptions,
    grads: tuple[bool, bool] = (False, False),
) -> LossInputs[Any, Any]:
    """Return the operands as strategies take them."""
    h = shard.gather_hidden(h)
    own = primitives_for(h, w, problem_of(h, w, *grads))
    h, w = own.projection.prepare(h, w)
    targets = shard.make_targets(y.long(), w.shape[0], options, tensors)
    return LossInputs(shard.primitives(own), h, w, targets, shard.dx_dtype(h.dtype))


def forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> Tensor:
    """Return the reduced loss; `arguments` are those of `OPTIONS`."""
    options, tensors, sharding = unpack(arguments, *OPTIONS)
    shard = shard_of(sharding, h, w, **_agreed(y, options, tensors))
    inputs = _prepare(shard, h, w, y, options, tensors)
    loss = inputs.primitives.projection.forward(inputs.h, inputs.w, inputs.targets)[1]
    return loss if options.is_scalar else loss.clone()  # not a view of the statistics


def loss_forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the reduced loss, statistics, exponentials (N, kept), dX, dW and their overflows.

    `arguments` are those of `PLANNED`.  Of the last five results, those that the plan has no use
    for are empty.  Gradients in forward are `GradAccumulator`s with these overflows; a rank of a
    sharded call has an overflow alone, of the rows of dX that it rounds.  With aliased columns, dW
    is the memory of their exponentials.
    """
    plan, options, tensors, sharding = unpack(arguments, *PLANNED)
    grads = plan.grad_hidden, plan.grad_weight
    chosen = {"workspace, as (strategy, chunk)": [plan.strategy, plan.chunk]}
    shard = shard_of(sharding, h, w, **_agreed(y, options, tensors, grads), **chosen)
    inputs = _prepare(shard, h, w, y, options, tensors, grads)
    if plan.in_forward:
        return _gradients_in_forward(inputs, shard, plan)
    h, w = inputs.h, inputs.w
    exps = h.new_empty(h.shape[0], plan.kept)
    dx, dw = h.new_empty(0, h.shape[1]), w.new_empty(w.shape if plan.aliased else (0, w.shape[1]))
    loss, stats = windows.forward(inputs, _stored(exps, dw, plan))
    loss = loss if options.is_scalar else loss.clone()  # not a view of another result
    return loss, stats.rows, exps, dx, dw, dx.new_empty(dx.shape), dx.new_empty(dx.shape)


def _gradients_in_forward(
    inputs: LossInputs[Any, Any], shard: Unsharded, plan: Plan
) -> tuple[Tensor, ...]:
    """Return the results of `loss_forward` for a plan that forms gradients in the forward."""
    h, w, targets = inputs.h, inputs.w, inputs.targets
    dtype, hidden = sum_dtype(h.dtype), h.shape[1]
    loss_scale = targets.loss_scale(dtype)
    dx = h.new_empty(len(h) if plan.grad_hidden else 0, hidden, dtype=inputs.dx_dtype)
    dw = w.new_empty(len(w) if plan.grad_weight else 0, hidden)
    dx_sums, dw_sums = GradAccumulator.empty(dx, dtype), GradAccumulator.empty(dw, dtype)
    sums = dx_sums, dw_sums
    stats = gradients_in_forward(inputs, loss_scale, plan.kept, plan.chunk, *sums)
    dx_overflow = dx_sums.overflow
    if shard.is_sharded:
        # the ranks' parts of dX are added before they are rounded
        dx, dx_overflow = h.new_empty(0, hidden), shard.reduce_dx(dx) if len(dx) else dx
    loss, exps = reduce_losses(stats, targets), h.new_empty(0, 0)
    return loss, stats.rows, exps, dx, dw, dx_overflow, dw_sums.overflow


def loss_backward(
    upstream: Tensor,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    stats: Tensor,
    exps: Tensor,
    dw: Tensor,
    *arguments: Any,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dX (N, D) and dW (V, D) of a "windows" plan, without rows where not computed.

    The tensors are those of `loss_forward`; `dw`, the memory of aliased exponentials, is empty once
    consumed.  `arguments` are those of `PLANNED`.  Operators return new tensors; eager autograd
    passes `in_place` to write into `dw`.  More than eight parameters: they are the schema's.
    """
    plan, options, tensors, sharding = unpack(arguments, *PLANNED)
    shard = shard_of(sharding, h, w, operator="loss_backward")
    inputs = _prepare(shard, h, w, y, options, tensors, (plan.grad_hidden, plan.grad_weight))
    upstream = upstream * inputs.targets.loss_scale(sum_dtype(h.dtype))
    stored, discarded = _stored(exps, dw, plan), plan.aliased > 0
    out = (dw if in_place else w.new_empty(w.shape)) if plan.grad_weight else None
    step = RowStats(stats), stored, upstream, plan.window, plan.grad_hidden
    dx = windows.backward(inputs, *step, out, discarded)
    return (
        h.new_empty(0, h.shape[1]) if dx is None else shard.finish_dx(dx, h.dtype),
        w.new_empty(0, w.shape[1]) if out is None else out,
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
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dX (N, D) and dW (V, D) times `upstream` (), from the sums of `loss_forward`.

    `arguments` are those of `Sharding`.  Operators return new tensors; eager autograd passes
    `in_place` to write into `dx` and `dw`.  More than eight parameters: they are the schema's.
    """
    (sharding,) = unpack(arguments, Sharding)
    shard = shard_of(sharding, h, w, operator="scale_gradients")
    scale_rows = scale_rows_for(w)
    if shard.is_sharded:
        dx = h.new_empty(dx_overflow.shape)
    dx_sums, dw_sums = GradAccumulator(dx, dx_overflow), GradAccumulator(dw, dw_overflow)
    dx = dx_sums.finish(scale_rows, upstream, in_place=in_place or shard.is_sharded)
    return (
        shard.gather_dx(dx, len(h)) if len(dx) else dx,
        dw_sums.finish(scale_rows, upstream, in_place=in_place),
    )


def _agreed(
    y: Tensor,
    options: LossOptions,
    tensors: TensorOptions,
    grads: tuple[bool, bool] = (False, False),
) -> dict[str, Any]:
    """Return what all ranks must agree on in a forward, by the names that errors use."""
    return {
        "operator": "forward",
        "requires_grad of (input, linear_weight)": list(grads),
        "target": y,
        **dict(zip(LossOptions.names(), options.pack(), strict=True)),
        "denominator": tensors.denominator,
    }


def _stored(exps: Tensor, dw: Tensor, plan: Plan) -> StoredExps:
    """Return where exponentials are stored: aliased columns in dW, then `exps` (N, K)."""
    aliased = aliased_views(dw, exps.shape[0], plan.window, plan.aliased) if len(dw) else []
    return [*aliased, (plan.aliased, exps)] if exps.shape[1] else aliased


IMPLS = {
    function: isolated_context(function)
    for function in (forward, loss_forward, loss_backward, scale_gradients)
}
"""The implementations, as the dispatcher and eager autograd call them."""

for function, implementation in IMPLS.items():
    LIBRARY.impl(function.__name__, implementation, "CompositeExplicitAutograd")
    fake = getattr(meta, function.__name__)
    torch.library.register_fake(f"cutefce::{function.__name__}", fake, lib=LIBRARY)
