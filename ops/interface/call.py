"""`torch.ops.cutefce.loss` and `plan`: from a user's call to the operators that run it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS, Stat
from cutefce.ops import torch_compat
from cutefce.ops.interface import checks, no_grad_cache
from cutefce.ops.interface.options import (
    OPTIONS,
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.operators import flops  # noqa: F401  (registers)
from cutefce.ops.operators.autograd import loss_and_stats, row_outputs
from cutefce.ops.operators.context import autocast, can_bypass_dispatcher, is_mixed
from cutefce.ops.operators.operators import IMPLS, LIBRARY, forward
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.primitives.dispatch import copied_item_bytes
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import OUTPUTS, Targets

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
    return _evaluate(input, linear_weight, target, workspace, arguments)[0]


def loss_and_lse(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    workspace: int | str | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Return `loss` and the log-sum-exps (...) of the logits, 0 if ignored, without gradient."""
    result, more = _evaluate(input, linear_weight, target, workspace, arguments, with_stats=True)
    (stats,) = more
    lse = torch.where(_is_active(stats), RowStats(stats).lse, 0).detach()
    return result, lse.reshape(target.shape)


def log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    workspace: int | str | None = None,
    **arguments: Any,
) -> list[Tensor]:
    """Return the log-probabilities of targets (...), and other values of each token.

    As `loss` with reduction "outputs".

    Returns:
        log-probabilities, lse and entropy (0 if not asked for), which have gradients; then those of
        `ops.rows.outputs.stat_rows`.  All are 0 for ignored tokens.
    """
    arguments = {"outputs": "lse", **arguments, "reduction": OUTPUTS}
    result, more = _evaluate(input, linear_weight, target, workspace, arguments, with_stats=True)
    *rows, stats = result, *more
    rows += [torch.where(_is_active(stats), row, 0) for row in stats[NUM_STATS:].detach()]
    return [row.reshape(target.shape) for row in rows]


def _evaluate(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    workspace: int | str | None,
    arguments: dict[str, Any],
    with_stats: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss, and further results of `loss_forward` if they are wanted."""
    options, tensors, sharding = DEFAULTS
    if arguments:  # the dispatcher leaves out arguments at their defaults
        options = LossOptions.from_keywords(arguments)
        tensors = TensorOptions.from_keywords(arguments)
        sharding = Sharding.from_keywords(arguments)
    h, w = autocast(input, linear_weight)
    y, grad, bias, own = target, torch.is_grad_enabled(), tensors.linear_bias, w
    grad_hidden, grad_weight = grad and h.requires_grad, grad and w.requires_grad
    grad_bias = grad and bias is not None and bias.requires_grad
    needs_grad = grad_hidden or grad_weight or grad_bias
    more = tensors.pack() if arguments else ()
    direct = not needs_grad and can_bypass_dispatcher(h, w, y, *more)
    if not direct and torch_compat.is_transformed():
        checks.check_transform()
        # tensors of a transform do not tell what is differentiated outside of it
        needs_grad = grad_hidden = grad_weight = True
        grad_bias = bias is not None
    if w.dtype != h.dtype and is_mixed(h, w):
        w = w.detach().to(h.dtype)
        if grad_weight:
            tensors = dataclasses.replace(tensors, weight_cast=w)
        else:
            own = w
    is_plain = not arguments or (options.is_plain and tensors.is_plain)
    is_cacheable = direct and is_plain and not sharding.is_sharded and not with_stats
    key = no_grad_cache.call_key(h, w, y, workspace, options) if is_cacheable else None
    primitives = no_grad_cache.cached_primitives(key)
    if primitives is None:
        ranks = sharding.ranks()
        with report_errors(sharding.group):
            options.check()
            checks.check_tensors(h, w, y, ranks if sharding.sequence_parallel else 1)
            sharding.check(w)
            if not tensors.is_plain:
                tensors.check(h, w, y, options, sharding.vocab(w))
                tensors = tensors.prepared(h)
            budget = checks.workspace_bytes(workspace)
    # reshaping what is flat already takes CPU time
    rows = h if h.ndim == 2 else h.reshape(-1, h.shape[-1])
    y_rows = y if y.ndim == 1 else y.reshape(-1)
    result: Tensor
    if primitives is not None:
        targets = Targets(y_rows, w.shape[0], options, tensors)
        _, result = primitives.projection.forward(rows, w, targets)
        # not a view of the statistics
        return result if options.is_scalar else result.clone().reshape(y.shape), ()
    packed = *options.pack(), *tensors.pack(), *sharding.pack()
    rest: Sequence[Tensor] = ()
    if not needs_grad and not with_stats:
        result = (IMPLS[forward] if direct else torch.ops.cutefce.forward)(rows, w, y_rows, *packed)
        no_grad_cache.store(key, rows, w, y_rows)
    else:
        copied = copied_item_bytes(input, rows), copied_item_bytes(linear_weight, w)
        step = StepOptions(budget, grad_hidden, grad_weight, grad_bias, *copied)
        run = row_outputs if options.reduction == OUTPUTS else loss_and_stats
        result, *rest = run(rows, own, y_rows, *step.pack(), *packed)
    if options.reduction == "none":
        result = result.reshape(y.shape)
    return result, (*rest,)


def _is_active(stats: Tensor) -> Tensor:
    """Return (N,) bool: the token of statistics (NUM_STATS, N) is not ignored."""
    return stats[Stat.REFERENCE] != torch.inf


for overload, budget in (("", "int? workspace=None"), (".preset", "str workspace")):
    first, *others = (record.schema(public=True) for record in OPTIONS)
    keywords = ", ".join((first, budget, *others))
    for function, own, results in (
        (loss, "", "Tensor"),
        (loss_and_lse, "", "(Tensor loss, Tensor lse)"),
        (log_probs, "str outputs='lse', ", "Tensor[]"),
    ):
        name = f"{function.__name__}{overload}"
        LIBRARY.define(f"{name}({TENSORS}, *, {own}{keywords}) -> {results}")
        LIBRARY.impl(name, function, "CompositeImplicitAutograd")
