"""How a call would run: on which backend, and by which plan."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.ops.interface import checks, option_checks
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.interface.probabilities import is_probabilities
from cutefce.ops.interface.scalars import as_tensor
from cutefce.ops.interface.soft_targets import check_soft_targets
from cutefce.ops.operators.context import autocast, is_mixed
from cutefce.ops.operators.plans import copied_item_bytes, plan_for
from cutefce.ops.parallel.dtensor import localize, localize_options
from cutefce.ops.primitives import dispatch
from cutefce.ops.primitives.dispatch import Backend
from cutefce.ops.program.plan import Plan


def set_strict(enabled: bool) -> None:
    """Make calls that the kernels cannot serve raise RuntimeError, on a CPU too, or warn once.

    Raises:
        TypeError: for what is no bool.
    """
    checks.check_type("enabled", enabled)
    dispatch.set_strict(enabled)


def backend_for(input: Tensor, linear_weight: Tensor) -> Backend:
    """Return which backend serves hidden states (..., D) and a weight (V, D), and why.

    Raises:
        TypeError, ValueError: for what `linear_cross_entropy` would not take.
    """
    for name, x in (("input", input), ("linear_weight", linear_weight)):
        checks.check_type(name, x)
    h, w = autocast(input, linear_weight)
    checks.check_head(h, w)
    h = h if h.ndim == 2 else h.reshape(-1, h.shape[-1])
    return dispatch.backend_of(h, w.detach().to(h.dtype) if is_mixed(h, w) else w)


def plan(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    gradient: str = "exact",
    samples: int = 256,
    workspace: int | str | None = None,
    accumulate_into: Tensor | None = None,
    grad_output: Tensor | float | None = None,
    target_indices: Tensor | None = None,
    target_probs: Tensor | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
    **removed: Any,
) -> Plan:
    """Return how `linear_cross_entropy` would run with these arguments; print it to read it.

    The plan is that of a call in which every token counts.  Tensors on `meta`, which take no
    memory, are planned for as on a Hopper GPU without a tuned table, whatever GPU is here.

    Args:
        input: (..., D) hidden states.  Set requires_grad on input, linear_weight or both, as for
            the call; under `torch.no_grad` the plan is that of a forward alone.
        linear_weight: (V, D).
        target: class indices of the call.  They do not change the plan, and are not checked.
        reduction: as for the call, and so are the other arguments.
        label_smoothing: share of the uniform distribution; it changes plans of sampled gradients.
        gradient: "exact" or "sampled".
        samples: expected number of entries of a token, at most, with sampled gradients.
        workspace: peak memory, as for the call.
        accumulate_into: buffer of the weight's gradient, as for the call.
        grad_output: gradient of the loss; only whether it is given matters.
        target_indices: (..., K) those of the call, of which only the shape matters.
        target_probs: (..., K) the same.
        group: process group over which the vocabulary is sharded.
        shards: rows of every rank's weight.
        sequence_parallel: whether input holds this rank's share of the tokens.
        **removed: arguments of earlier versions, which are refused.

    More than eight parameters: they are arguments of the call.

    Returns:
        Problem and layout of the program, and predicted memory (bytes) and time (seconds).

    Raises:
        TypeError, ValueError, NotImplementedError: as the call does.
    """
    checks.check_types(
        input=input,
        linear_weight=linear_weight,
        reduction=reduction,
        label_smoothing=label_smoothing,
        gradient=gradient,
        samples=samples,
        accumulate_into=accumulate_into,
        grad_output=grad_output,
        target_indices=target_indices,
        target_probs=target_probs,
        shards=shards,
        sequence_parallel=sequence_parallel,
        **removed,
    )
    if target is not None:
        checks.check_type("target", target)
    some = torch.empty(input.shape[:-1], dtype=torch.long, device=input.device)
    given = some if target is None else target
    call = localize(input, linear_weight, given, group, shards, sequence_parallel)
    options = LossOptions(
        reduction,
        label_smoothing=label_smoothing,
        gradient=gradient,
        samples=samples,
    )
    tensors = TensorOptions()
    sharding = Sharding(call.group, call.shards, call.sequence_parallel)
    options.check()
    sharding.ranks()
    h, w = autocast(call.h, call.w)
    if is_mixed(h, w):
        w = w.detach().to(h.dtype).requires_grad_(w.requires_grad)
        tensors = TensorOptions(weight_cast=w if w.requires_grad else None)
    parts = sharding.ranks() if sharding.sequence_parallel else 1
    if is_probabilities(target):
        raise NotImplementedError(
            "target: got probabilities of all classes, whose loss has no plan, expected class "
            "indices or None"
        )
    checks.check_tensors(h, w, some.new_empty(h.shape[:-1]))
    if accumulate_into is not None:
        option_checks.check_buffer(accumulate_into, h, w)
        if torch.is_grad_enabled():
            checks.check_accumulates(call.w)
        tensors = dataclasses.replace(tensors, accumulate_into=accumulate_into)
    if grad_output is not None:
        number = as_tensor("grad_output", grad_output, h)
        option_checks.check_grad_output(number, h, reduction, accumulate_into is not None)
        tensors = dataclasses.replace(tensors, grad_output=number)
    soft = {"target_indices": target_indices, "target_probs": target_probs}
    if any(x is not None for x in soft.values()):
        tensors = dataclasses.replace(tensors, **localize_options(call, soft))
        check_soft_targets(target, h, options, tensors, parts)
    sharding.check(w)
    rows, budget = h.reshape(-1, h.shape[-1]), checks.workspace_bytes(workspace)
    copied = copied_item_bytes(call.h, rows), copied_item_bytes(call.w, w)
    grad = torch.is_grad_enabled()
    trained = grad and h.requires_grad, grad and w.requires_grad
    step = StepOptions(budget, *trained, False, *copied)
    return plan_for(rows, w, step, options, tensors, sharding)
