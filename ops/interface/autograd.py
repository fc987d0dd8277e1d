"""Derivatives of the operators.

`loss_forward` is differentiated by `loss_backward`, or by `scale_gradients` where gradients were
formed in the forward.  There are no second derivatives.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface.operators import (
    IMPLS,
    LIBRARY,
    PLANNED,
    loss_backward,
    scale_gradients,
)
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.schema import unpack


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, w, y, *arguments = inputs
    ctx.plan, ctx.options, tensors, ctx.sharding = unpack(arguments, *PLANNED)
    _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.inputs = len(inputs)
    ctx.buffers_consumed = False
    ctx.save_for_backward(h, w, y, *saved, *tensors.pack())


def _backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    with report_errors(ctx.sharding.group):
        return _gradients(ctx, upstream)


def _gradients(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (*[None] * ctx.inputs,)
    h, w, y, stats, exps, dx, dw, dx_overflow, dw_overflow, *tensors = ctx.saved_tensors
    # a graph, also one of second derivatives, must not see a saved tensor change
    in_place = type(dw) is Tensor and not torch.is_grad_enabled()
    run: Callable[..., Any]
    if ctx.plan.in_forward and not ctx.buffers_consumed:
        run = torch.ops.cutefce.scale_gradients
        if in_place:
            ctx.buffers_consumed, dx, dw = True, dx.data, dw.data
            run = functools.partial(IMPLS[scale_gradients], in_place=True)
        dx, dw = run(upstream, h, w, dx, dw, dx_overflow, dw_overflow, *ctx.sharding.pack())
    else:
        run = torch.ops.cutefce.loss_backward
        if ctx.buffers_consumed:  # what the first backward overwrote is recomputed
            dw = dw[:0]
        elif in_place and len(dw):
            ctx.buffers_consumed, dw = True, dw.data
            run = functools.partial(IMPLS[loss_backward], in_place=True)
        options = *ctx.plan.pack(), *ctx.options.pack(), *tensors, *ctx.sharding.pack()
        dx, dw = run(upstream, h, w, y, stats, exps, dw, *options)
    gradients = dx if ctx.plan.grad_hidden else None, dw if ctx.plan.grad_weight else None
    return *gradients, *[None] * (ctx.inputs - 2)


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("cutefce: the loss has no second derivatives (create_graph=True)")


torch.library.register_autograd(
    "cutefce::loss_forward", _backward, setup_context=_setup_context, lib=LIBRARY
)
for name in ("loss_backward", "scale_gradients"):
    torch.library.register_autograd(f"cutefce::{name}", _no_second_derivative, lib=LIBRARY)
