"""`torch.ops.cutefce.loss` and `plan`: from a user's call to the operators that run it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import Stat
from cutefce.ops import torch_compat
from cutefce.ops.interface import checks, heads
from cutefce.ops.interface.arguments import (
    OPTIONS,
    LossCall,
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.interface.probabilities import (
    check_probabilities,
    of_rows,
    reduced,
)
from cutefce.ops.interface.soft_targets import check_soft_targets
from cutefce.ops.operators.autograd import LinearCrossEntropy, run
from cutefce.ops.operators.context import (
    autocast,
    can_bypass_dispatcher,
    is_mixed,
    wanted_gradients,
)
from cutefce.ops.operators.operators import LIBRARY, loss_forward
from cutefce.ops.operators.plans import copied_item_bytes
from cutefce.ops.operators.seed import draw_seed
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.soft_targets.leads import leads
from cutefce.ops.soft_targets.output_classes import class_leads

DEFAULTS = LossOptions(), TensorOptions(), Sharding()
REFERENCE = int(Stat.REFERENCE)
TENSORS = "Tensor input, Tensor linear_weight, Tensor? target=None"


def loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    **arguments: Any,
) -> Tensor:
    """Cross entropy of softmax(input @ linear_weight.T), as `torch.ops.cutefce.loss`.

    Args:
        input: (..., D) hidden states, bfloat16, float16, float32 or float64.
        linear_weight: (V, D), of input's dtype and device.
        target: (...) integer class indices in [0, V), or `ignore_index`, or (..., V) probabilities;
            None with soft targets.
        arguments: the fields of `LossOptions`, `TensorOptions` and `Sharding`, by name, and
            `workspace`: peak memory in bytes, beyond inputs and gradients, that the call may use
            for speed, or the least that any plan takes; "min", "max", or None for 2.25 GiB.

    Returns:
        () or, with reduction "none", (...): float32, or float64 for float64 inputs.

    Raises:
        TypeError, ValueError: naming the argument, what was got and what is expected.
        RuntimeError: if another rank of the group fails, or makes no such call in time.
        IndexError: on a CPU, for a target outside [0, V).  On a GPU, which is not synchronized,
            such a token's loss and the gradients that it takes part in are NaN.
    """
    return _evaluate(input, linear_weight, target, arguments)[0]


def loss_and_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    **arguments: Any,
) -> list[Tensor]:
    """Return `loss`, or with names of `outputs` those of tokens, and the statistics.

    Outputs are log-probabilities of targets (N,), or of `target_indices` (N, K), lse and entropy
    (N,), 0 if not asked for or ignored, which have gradients.  The statistics (R, N) have none:
    those of `Stat`, of `ops.outputs.reductions.stat_rows` and, of the largest classes, of
    `ops.outputs.top_classes.top_rows`.
    """
    if "outputs" in arguments:
        arguments["reduction"] = OUTPUTS
    return [*_evaluate(input, linear_weight, target, arguments)]


def is_active(stats: Tensor) -> Tensor:
    """Return (N,) bool: the token of statistics (R, N) is not ignored."""
    return stats[REFERENCE] != torch.inf


def _evaluate(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Return the loss, or the outputs, and the statistics of the tokens."""
    with report_errors(arguments.get("group")):
        call = checked_call(input, linear_weight, target, arguments)
    _, w, y, step, options, tensors, sharding = call
    if y.is_floating_point():
        losses, stats = _run(of_rows(call))
        return reduced(losses, call), stats
    if tensors.target_indices is not None and tensors.target_probs is not None:
        soft = tensors.target_indices, tensors.target_probs
        y = leads(*soft, sharding.vocab(w), options.ignore_index).reshape(y.shape)
    elif tensors.target_indices is not None:
        given = tensors.target_indices, sharding.vocab(w), options.ignore_index
        y = class_leads(*given).reshape(y.shape)
    if options.is_sampled and any(step.gradients):
        seed = (draw_seed if can_bypass_dispatcher(y) else torch.ops.cutefce.draw_seed)(y)
        call = call._replace(tensors=dataclasses.replace(tensors, seed=seed))
    if y.ndim != 1 or y is not call.y:
        call = call._replace(y=y.reshape(-1))
    result, *more = _run(call)
    return result.reshape(y.shape) if options.reduction == "none" else result, *more


def _run(call: LossCall) -> tuple[Tensor, ...]:
    """Return the results of a call with targets (N,) or (N, V), and the statistics."""
    h, w, y, step, options, tensors, sharding = call
    records = step, options, tensors, sharding
    if options.reduction == OUTPUTS or any(step.gradients):
        operands = h, w, tensors.linear_bias, y, records
        return torch_compat.apply_function(LinearCrossEntropy, *operands)
    results: tuple[Tensor, Tensor] = run(loss_forward, (h, w, y), records)
    return results


def checked_call(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    arguments: dict[str, Any],
) -> LossCall:
    """Return a call of class indices or soft targets; raise an error that names an argument.

    The arguments are those of `loss`, `arguments` the others by name.
    """
    options, tensors, sharding = DEFAULTS
    if arguments:  # the dispatcher leaves out arguments at their defaults
        options = LossOptions.from_keywords(arguments)
        tensors = TensorOptions.from_keywords(arguments)
        sharding = Sharding.from_keywords(arguments)
    returns_outputs = options.reduction == OUTPUTS
    checks.check_transform("linear_log_probs" if returns_outputs else "linear_cross_entropy")
    is_dense = target is not None and target.is_floating_point() and not returns_outputs
    h, w = autocast(input, linear_weight)
    parts = 1 if is_dense else sharding.parts(h)
    if target is None or tensors.soft_targets:
        target = check_soft_targets(target, h, options, tensors, parts)
    grads, own = wanted_gradients(h, w, tensors.linear_bias), w
    if w.dtype != h.dtype and is_mixed(h, w) and not is_dense:
        w = w.detach().to(h.dtype)
        if grads[1]:
            tensors = dataclasses.replace(tensors, weight_cast=w)
        else:
            own = w
    if arguments:
        options.check()
    if is_dense:
        check_probabilities(target, h, w, arguments)
    else:
        heads.check_tensors(h, w, target, parts)
    sharding.check(w)
    adds, grad = tensors.accumulate_into is not None, torch.is_grad_enabled()
    if adds and grad and not own.requires_grad:
        raise ValueError(
            "accumulate_into: got a buffer for a linear_weight that does not require grad, "
            "expected None"
        )
    if tensors.given:
        tokens = target.shape[:-1] if is_dense else target.shape
        of = checks.Operands(h, w, tokens, sharding.vocab(w))
        if tensors.accumulate_into is not None:  # of what is given, which may be cast
            given = {"linear_weight": linear_weight, "input": input}
            checks.check_apart("accumulate_into", tensors.accumulate_into, **given)
        tensors.check(of, options.reduction)
        tensors = tensors.prepared(h)
    if adds and not grad:
        tensors = dataclasses.replace(tensors, accumulate_into=None, grad_output=None)
    if tensors.grad_output is not None and torch_compat.may_recompute():
        # a forward that runs twice would add twice
        tensors = dataclasses.replace(tensors, grad_output=None)
    budget = checks.workspace_bytes(arguments.get("workspace"))
    rows = h if h.ndim == 2 else h.reshape(-1, w.shape[1])
    copied = copied_item_bytes(input, rows), copied_item_bytes(linear_weight, w)
    step = StepOptions(budget, *grads, *copied)
    return LossCall(rows, own, target, step, options, tensors, sharding)


def needs_operator(*operands: Tensor) -> bool:
    """Whether something must see an operator; calling its function directly takes less CPU time."""
    if torch.compiler.is_compiling() or torch_compat.has_function_mode():
        return True
    return not can_bypass_dispatcher(*operands)


for overload, budget in (("", "int? workspace=None"), (".preset", "str workspace")):
    first, *others = (record.schema(of="loss") for record in OPTIONS)
    own = [record.schema(of="values") for record in (LossOptions, TensorOptions)]
    keywords = first, budget, *others
    for function, arguments, result in (
        (loss, keywords, "Tensor"),
        (loss_and_stats, (*own, *keywords), "Tensor[]"),
    ):
        name = f"{function.__name__}{overload}"
        LIBRARY.define(f"{name}({TENSORS}, *, {', '.join(arguments)}) -> {result}")
        LIBRARY.impl(name, function, "CompositeImplicitAutograd")

torch_compat.import_behind("torch.utils.flop_counter", "cutefce.ops.operators.flops")
