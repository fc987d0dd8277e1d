"""`torch.ops.cutefce.loss` and `plan`: from a user's call to the operators that run it."""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops import torch_compat
from cutefce.ops.interface import checks, flops, no_grad_cache  # noqa: F401  (registers)
from cutefce.ops.interface.autograd import training_loss
from cutefce.ops.interface.context import autocast, can_bypass_dispatcher
from cutefce.ops.interface.operators import IMPLS, LIBRARY, forward
from cutefce.ops.interface.options import (
    OPTIONS,
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.primitives.dispatch import copied_item_bytes
from cutefce.ops.primitives.rows import Targets

DEFAULTS = LossOptions(), TensorOptions(), Sharding()
TENSORS = "Tensor input, Tensor linear_weight, Tensor target"


def loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    workspace: int | str | None = None,
    **arguments: Any,
) -> Tensor:
    """Cross entropy of softmax(input @ linear_weight.T), as `torch.ops.cutefce.loss`.

    Args:
        input: (..., D) hidden states, bfloat16, float16, float32 or float64.
        linear_weight: (V, D), of input's dtype and device.
        target: (...) integer class indices in [0, V), or `ignore_index`.
        workspace: peak memory in bytes, beyond inputs and gradients, that the call may use for
            speed; "min", "max", or None for `planner.DEFAULT`.  A budget below what "min" takes
            means "min".
        arguments: the fields of `LossOptions`, `TensorOptions` and `Sharding`, by name.

    Returns:
        () or, with reduction "none", (...): float32, or float64 for float64 inputs.

    Raises:
        TypeError, ValueError: naming the argument, what was got and what is expected.
        RuntimeError: if another rank of the group fails, or makes no such call in time.
        IndexError: on a CPU, for a target outside [0, V).  On a GPU, which is not synchronized,
            such a token's loss and the gradients that it takes part in are NaN.
    """
    options, tensors, sharding = DEFAULTS
    if arguments:  # the dispatcher leaves out arguments at their defaults
        options = LossOptions.from_keywords(arguments)
        tensors = TensorOptions.from_keywords(arguments)
        sharding = Sharding.from_keywords(arguments)
    h, w = autocast(input, linear_weight)
    y, grad = target, torch.is_grad_enabled()
    grad_hidden, grad_weight = grad and h.requires_grad, grad and w.requires_grad
    needs_grad = grad_hidden or grad_weight
    more = tensors.pack() if arguments else ()
    direct = not needs_grad and can_bypass_dispatcher(h, w, y, *more)
    if not direct and torch_compat.is_transformed():
        checks.check_transform()
        # tensors of a transform do not tell what is differentiated outside of it
        needs_grad = grad_hidden = grad_weight = True
    is_cacheable = direct and not sharding.is_sharded
    key = no_grad_cache.call_key(h, w, y, workspace, options, tensors) if is_cacheable else None
    primitives = no_grad_cache.cached_primitives(key)
    if primitives is None:
        ranks = sharding.ranks()
        with report_errors(sharding.group):
            options.check()
            checks.check_tensors(h, w, y, ranks if sharding.sequence_parallel else 1)
            tensors.check(h, options)
            sharding.check(w)
            budget = checks.workspace_bytes(workspace)
    # reshaping what is flat already takes CPU time
    rows = h if h.ndim == 2 else h.reshape(-1, h.shape[-1])
    y_rows = y if y.ndim == 1 else y.reshape(-1)
    result: Tensor
    if primitives is not None:
        targets = Targets(y_rows, w.shape[0], options, tensors)
        _, result = primitives.projection.forward(rows, w, targets)
        return result if options.is_scalar else result.reshape(y.shape)
    packed = *options.pack(), *tensors.pack(), *sharding.pack()
    if not needs_grad:
        result = (IMPLS[forward] if direct else torch.ops.cutefce.forward)(rows, w, y_rows, *packed)
        no_grad_cache.store(key, rows, w, y_rows)
    else:
        copied = copied_item_bytes(input, rows), copied_item_bytes(linear_weight, w)
        step = StepOptions(budget, grad_hidden, grad_weight, *copied)
        result = training_loss(rows, w, y_rows, *step.pack(), *packed)
    return result if options.is_scalar else result.reshape(y.shape)


for overload, budget in (("", "int? workspace=None"), (".preset", "str workspace")):
    first, *others = (record.schema() for record in OPTIONS)
    keywords = ", ".join((first, budget, *others))
    LIBRARY.define(f"loss{overload}({TENSORS}, *, {keywords}) -> Tensor")
    LIBRARY.impl(f"loss{overload}", loss, "CompositeImplicitAutograd")
