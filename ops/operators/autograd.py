"""The derivative of the loss in reverse mode, but no second derivatives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops import torch_compat
from cutefce.ops.interface.arguments import (
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.operators import operators
from cutefce.ops.operators.context import can_bypass_dispatcher
from cutefce.ops.operators.operators import IMPLS, LIBRARY, STEP
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.rows.targets import NO_TENSORS, OUTPUTS
from cutefce.ops.schema import unpack

Records = tuple[StepOptions, LossOptions, TensorOptions, Sharding]

NAMES = {record: record.names() for record in STEP}
"""Of their fields, where a graph compiler that traces a backward finds them."""


class LinearCrossEntropy(torch.autograd.Function):
    """The loss or the outputs of tokens, differentiated by an operator of the backward."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, records: Records
    ) -> tuple[Tensor, ...]:
        """Return the reduced loss, or the outputs, and the statistics.

        The bias is that of the records, too.  Outputs are log-probabilities (N,) or (N, K), lse and
        entropy (N,).
        """
        writes = records[2].grad_output is not None
        operator = operators.loss_forward_into if writes else operators.loss_forward
        result, stats = run(operator, (h, w, y), records)
        ctx.mark_non_differentiable(stats)
        _save(ctx, h, w, y, stats, records)
        if records[1].reduction != OUTPUTS:
            return result, stats
        own = result[0] if len(result) == 3 else result[:-2].t()
        return own.clone(), *(row.clone() for row in result[-2:]), stats

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        """Return dX, dW and the bias' gradient for the upstream gradients of the results."""
        if not any(x is not None for x in upstream):
            return None, None, None, None, None
        with report_errors(ctx.group):
            returns_rows = ctx.options.reduction == OUTPUTS
            if returns_rows and upstream[2] is not None:
                ctx.options.check_entropy_gradient()
            operands, tensors = _saved(ctx)
            given = _joined(upstream, operands[-1], tensors) if returns_rows else upstream[0]
            return *_backward(ctx, given, operands, tensors), None, None


def _joined(upstream: Sequence[Tensor | None], stats: Tensor, tensors: TensorOptions) -> Tensor:
    """Return the upstream gradients of outputs as rows, without entropy's if it has none."""
    sizes, zeros = (tensors.output_classes, 1, 1), stats.new_zeros(1, stats.shape[1])
    # entropy's gradient takes one more pass over the exponentials
    given = upstream[:3] if upstream[2] is not None else upstream[:2]
    pairs = zip(given, sizes, strict=False)
    return torch.cat(
        [(zeros.expand(k, -1) if x is None else x.reshape(-1, k).t()) for x, k in pairs]
    )


class LinearCrossEntropyGradients(torch.autograd.Function):
    """A `loss_backward`, given by name, where somebody may differentiate it."""

    @staticmethod
    def forward(
        ctx: Any, operator: Callable[..., Any], records: tuple[Any, ...], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        """Return dX, dW and the bias' gradient."""
        gradients: tuple[Tensor, ...] = dispatch(operator, operands, records)
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            "cutefce: the loss has no second derivatives, as by create_graph=True"
        )


def _save(ctx: Any, h: Tensor, w: Tensor, y: Tensor, stats: Tensor, records: Records) -> None:
    """Save what `_backward` needs."""
    ctx.set_materialize_grads(False)
    ctx.step, ctx.options, tensors, ctx.sharding = records
    ctx.group = ctx.sharding.group
    # other backwards may write it in between, which autograd takes for an error in what is saved
    ctx.accumulate_into = tensors.accumulate_into
    given = tensors.given
    ctx.given = [name for name in given if name != "accumulate_into"]
    ctx.save_for_backward(h, w, y, stats, *map(given.get, ctx.given))


def _saved(ctx: Any) -> tuple[Sequence[Tensor], TensorOptions]:
    """Return h, w, y and the statistics, and the options that are tensors; call it once.

    It raises an error of inputs that were modified.
    """
    saved = [*ctx.saved_tensors]  # hooks may compute them, or refuse to do it again
    if ctx.accumulate_into is None and not ctx.given:
        return saved, NO_TENSORS
    given = dict(zip(ctx.given, saved[4:], strict=True))
    return saved[:4], TensorOptions(**given, accumulate_into=ctx.accumulate_into)


def _backward(
    ctx: Any, upstream: Tensor, operands: Sequence[Tensor], tensors: TensorOptions
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of h, w and the bias."""
    step, adds = ctx.step, tensors.accumulate_into is not None
    operator = operators.loss_backward_into if adds else operators.loss_backward
    records = step, ctx.options, tensors, ctx.sharding
    dx, dw, dbias = differentiate(operator, (upstream, *operands), records)
    return (
        dx if step.grad_hidden else None,
        dw if step.grad_weight and not adds else None,
        dbias if step.grad_bias else None,
    )


def differentiate(
    operator: Callable[..., Any], operands: tuple[Any, ...], records: tuple[Any, ...] = ()
) -> tuple[Tensor | None, ...]:
    """Return the results of `operator`, a `loss_backward`, which may be differentiated.

    Raises:
        NotImplementedError: under a transform, which may batch it.
    """
    if torch_compat.is_batched_backward() or torch_compat.is_transformed():
        raise NotImplementedError(
            "cutefce: got a backward with is_grads_batched=True, under a transform of torch.func "
            "or in forward mode, expected torch.autograd in reverse mode, of one gradient"
        )
    if torch.is_grad_enabled():
        given = operator, records, *operands
        return torch_compat.apply_function(LinearCrossEntropyGradients, *given)
    gradients: tuple[Tensor | None, ...] = run(operator, operands, records)
    return gradients


def run(operator: Callable[..., Any], operands: tuple[Any, ...], records: tuple[Any, ...]) -> Any:
    """Run an operator, without the dispatcher where that would only call the implementation.

    `operands` are its first arguments; `records` have the others, the last but one those that are
    tensors.
    """
    if not torch.compiler.is_compiling():
        more = records[-2].given.values() if records else ()
        if can_bypass_dispatcher(*operands, *more):
            return IMPLS[operator](*operands, *records)
    return dispatch(operator, operands, records)


def dispatch(
    operator: Callable[..., Any], operands: tuple[Any, ...], records: tuple[Any, ...]
) -> Any:
    """Call an operator by its name, with the fields of records one by one."""
    more = [getattr(record, name) for record in records for name in NAMES[type(record)]]
    return getattr(torch.ops.cutefce, operator.__name__)(*operands, *more)


def _save_loss_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs of the operator; a backward makes statistics again that had no gradients."""
    h, w, y, *arguments = inputs
    step, options, tensors, sharding = unpack(arguments, *STEP)
    ctx.mark_non_differentiable(output[1])
    stats = output[1]
    if not any(step.gradients):
        bias, stats = tensors.linear_bias, stats.new_empty(NUM_STATS, 0)
        own = h.requires_grad, w.requires_grad, bias is not None and bias.requires_grad
        step = StepOptions(step.budget, *own)
        if options.is_sampled and tensors.seed is None:
            tensors = dataclasses.replace(tensors, seed=torch.ops.cutefce.draw_seed(y))
    _save(ctx, h, w, y, stats, (step, options, tensors, sharding))


def _derivative(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of the operator."""
    dx = dw = dbias = None
    if upstream[0] is not None:
        with report_errors(ctx.group):
            dx, dw, dbias = _backward(ctx, upstream[0], *_saved(ctx))
    names = "h", "w", "y", *(name for record in STEP for name in record.names())
    return (*map({"h": dx, "w": dw, "linear_bias": dbias}.get, names),)


# graphs of operators, made without gradients or by a tracer, may be trained later
torch.library.register_autograd(
    "cutefce::loss_forward", _derivative, setup_context=_save_loss_forward, lib=LIBRARY
)
