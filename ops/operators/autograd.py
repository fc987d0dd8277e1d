"""The derivative of the loss in reverse mode, but no second derivatives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops import torch_compat
from cutefce.ops.interface.options import OPTIONS, Sharding, StepOptions, TensorOptions
from cutefce.ops.operators import operators
from cutefce.ops.operators.context import can_bypass_dispatcher
from cutefce.ops.operators.operators import IMPLS, LIBRARY, STEP
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.planning import budget
from cutefce.ops.schema import unpack

_BUFFER = 4 + TensorOptions.names().index("accumulate_into")  # its place in what is saved
_GRAD_OUTPUT = [name for record in STEP for name in record.names()].index("grad_output")


def loss_and_stats(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the results of `loss_forward`; the reduced loss can be differentiated."""
    loss, stats = torch_compat.apply_function(LinearCrossEntropy, h, w, y, *arguments)
    return loss, stats


def row_outputs(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return log-probabilities (N,) or (N, K), lse and entropy (N,), and stats without gradient."""
    return torch_compat.apply_function(RowOutputs, h, w, y, *arguments)


class LinearCrossEntropy(torch.autograd.Function):
    """`loss_forward`, differentiated by `loss_backward`; the arguments are those of the former."""

    @staticmethod
    def forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the reduced loss and the statistics."""
        writes = arguments[_GRAD_OUTPUT] is not None
        operator = operators.loss_forward_into if writes else operators.loss_forward
        return _run(operator, h, w, y, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs and the statistics."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        _save(ctx, inputs, inputs[3:], output[1])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dX and dW for the upstream gradient of the loss."""
        if upstream[0] is None:
            return (*[None] * ctx.inputs,)
        return _backward(ctx, upstream[0], ctx.before, _saved(ctx))


class RowOutputs(torch.autograd.Function):
    """`loss_forward` with reduction "outputs": log-probabilities, lse, entropy and statistics."""

    @staticmethod
    def forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Return log-probabilities, lse and entropy, and the statistics, see `row_outputs`."""
        rows, stats = _run(operators.loss_forward, h, w, y, *arguments)
        own = rows[0] if len(rows) == 3 else rows[:-2].t()
        return own.clone(), *(row.clone() for row in rows[-2:]), stats

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs and the statistics."""
        LinearCrossEntropy.setup_context(ctx, inputs, (output[0], output[-1]))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients for the upstream gradients of the outputs."""
        if upstream[2] is not None:
            with report_errors(ctx.group):
                unpack(ctx.before, *STEP[:2])[1].check_entropy_gradient()
        saved = _saved(ctx)
        stats, tensors = saved[3], TensorOptions(*saved[4:])
        sizes, zeros = (tensors.output_classes, 1, 1), stats.new_zeros(1, stats.shape[1])
        # entropy's gradient takes one more pass over the exponentials
        given = upstream[:3] if upstream[2] is not None else upstream[:2]
        pairs = zip(given, sizes, strict=False)
        rows = [(zeros.expand(k, -1) if x is None else x.reshape(-1, k).t()) for x, k in pairs]
        return _backward(ctx, torch.cat(rows), ctx.before, saved)


class LinearCrossEntropyGradients(torch.autograd.Function):
    """A `loss_backward`, given by name, where somebody may differentiate it."""

    @staticmethod
    def forward(operator: str, *arguments: Any) -> tuple[Tensor, ...]:
        """Return dX, dW and the bias' gradient."""
        result: tuple[Tensor, ...] = getattr(torch.ops.cutefce, operator)(*arguments)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            "cutefce: the loss has no second derivatives, as by create_graph=True"
        )


def _save(ctx: Any, inputs: Sequence[Any], arguments: Sequence[Any], stats: Tensor) -> None:
    """Save what `_backward` needs; `arguments` are those of `STEP`."""
    step, options, tensors, sharding = unpack(arguments, *STEP)
    ctx.inputs, ctx.group, ctx.is_scalar = len(inputs), sharding.group, options.is_scalar
    returns_dw = step.grad_weight and tensors.accumulate_into is None
    ctx.trained = step.grad_hidden, returns_dw, step.grad_bias
    first = ctx.inputs - Sharding.width() - TensorOptions.width()
    ctx.differentiable = 0, 1, first + TensorOptions.names().index("linear_bias")
    ctx.before, ctx.after = (*step.pack(), *options.pack()), sharding.pack()
    # other backwards may write it in between, which autograd takes for an error in what is saved
    ctx.accumulate_into = tensors.accumulate_into
    tensors = dataclasses.replace(tensors, accumulate_into=None)
    ctx.save_for_backward(*inputs[:3], stats, *tensors.pack())


def _saved(ctx: Any) -> list[Any]:
    """Return h, w, y, the statistics and the arguments of `TensorOptions`; call it once."""
    with report_errors(ctx.group):  # of inputs that were modified
        saved = [*ctx.saved_tensors]  # hooks may compute them, or refuse to do it again
    saved[_BUFFER] = ctx.accumulate_into
    return saved


def _backward(
    ctx: Any, upstream: Tensor, before: Sequence[Any], saved: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs; `before` are the arguments before `TensorOptions`."""
    with report_errors(ctx.group):
        gradients = _gradients(ctx, upstream, before, saved)
    results: list[Tensor | None] = [None] * ctx.inputs
    for index, gradient, trained in zip(ctx.differentiable, gradients, ctx.trained, strict=True):
        results[index] = gradient if trained else None
    return (*results,)


def _gradients(
    ctx: Any, upstream: Tensor, before: Sequence[Any], saved: Sequence[Any]
) -> tuple[Tensor, ...]:
    operator: Any = operators.loss_backward
    if ctx.accumulate_into is not None:
        operator = operators.loss_backward_into
    return differentiate(operator, upstream, *saved[:4], *before, *saved[4:], *ctx.after)


def differentiate(operator: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
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
        name = operator.__name__
        return torch_compat.apply_function(LinearCrossEntropyGradients, name, *arguments)
    return _run(operator, *arguments)


def _run(operator: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    """Run an operator, without the dispatcher where that would only call the implementation."""
    if not torch.compiler.is_compiling() and can_bypass_dispatcher(
        *(x for x in arguments if isinstance(x, Tensor))
    ):
        result: tuple[Tensor, ...] = IMPLS[operator](*arguments)
    else:
        result = getattr(torch.ops.cutefce, operator.__name__)(*arguments)
    return result


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the inputs of the operator `forward`, whose backward makes the statistics again."""
    h, w, y, *arguments = inputs
    options, tensors, sharding = unpack(arguments, *OPTIONS)
    bias = tensors.linear_bias
    grad_bias = bias is not None and bias.requires_grad
    step = StepOptions(budget.DEFAULT, h.requires_grad, w.requires_grad, grad_bias)
    if options.is_sampled and tensors.seed is None:
        tensors = dataclasses.replace(tensors, seed=torch.ops.cutefce.draw_seed(y))
    arguments = [*step.pack(), *options.pack(), *tensors.pack(), *sharding.pack()]
    _save(ctx, inputs, arguments, output.new_empty(NUM_STATS, 0))


# graphs of operators, made without gradients or by a tracer, may be trained later
for name, setup in (
    ("forward", _save_forward),
    ("loss_forward", LinearCrossEntropy.setup_context),
):
    torch.library.register_autograd(
        f"cutefce::{name}", LinearCrossEntropy.backward, setup_context=setup, lib=LIBRARY
    )
