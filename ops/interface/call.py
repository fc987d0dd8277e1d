"""`torch.ops.cutefce.loss` and `plan`: from a user's call to the operators that run it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.interface import autograd, checks, no_grad_cache  # noqa: F401  (registers)
from cutefce.ops.interface.context import autocast, can_bypass_dispatcher
from cutefce.ops.interface.operators import IMPLS, LIBRARY, forward
from cutefce.ops.interface.options import OPTIONS, LossOptions, Sharding, TensorOptions
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.planning import planner
from cutefce.ops.primitives.dispatch import (
    are_concrete,
    copied_item_bytes,
    problem_of,
    window_configs_for,
    with_copies,
)
from cutefce.ops.primitives.rows import Targets
from cutefce.ops.torch_compat import has_dispatch_mode

DEFAULTS = LossOptions(), TensorOptions(), Sharding()


def loss(
    h: Tensor, w: Tensor, y: Tensor, *, workspace: int | str | None = None, **arguments: Any
) -> Tensor:
    """Cross entropy of softmax(h @ w.T) against y, as `torch.ops.cutefce.loss`.

    Args:
        h: (..., D) hidden states, bfloat16, float16, float32 or float64.
        w: (V, D) weight, of h's dtype and device.
        y: (...) integer targets in [0, V), or `ignore_index`.
        workspace: peak memory in bytes, beyond inputs and gradients, that the call may use for
            speed; "min", "max", or None for `planner.DEFAULT`.  Below what the smallest plan
            takes, the smallest plan runs.
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
    given, (h, w) = (h, w), autocast(h, w)
    grad = torch.is_grad_enabled()
    grad_hidden, grad_weight = grad and h.requires_grad, grad and w.requires_grad
    needs_grad = grad_hidden or grad_weight
    more = tensors.pack() if arguments else ()
    direct = not needs_grad and can_bypass_dispatcher(h, w, y, *more)
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
        problem = problem_of(rows, w, grad_hidden, grad_weight)
        problem = _with_copies(problem, given, (rows, w))
        chosen = _plan(problem, h.device, budget, options, sharding)
        result = torch.ops.cutefce.loss_forward(rows, w, y_rows, *chosen.pack(), *packed)[0]
    return result if options.is_scalar else result.reshape(y.shape)


def plan(
    h: Tensor,
    w: Tensor,
    *,
    reduction: str = "mean",
    workspace: int | str | None = None,
    group: str | None = None,
    shards: list[int] | None = None,
    sequence_parallel: bool = False,
) -> planner.Plan:
    """Return how `loss` would run with these arguments; print it to read it.

    Args:
        h: (..., D) hidden states.  Set requires_grad on h, w or both, as for the call.
        w: (V, D) weight.
        reduction: as for `loss`.
        workspace: as for `loss`.
        group: as for `loss`.
        shards: as for `loss`.
        sequence_parallel: as for `loss`.

    Returns:
        Strategy, window, columns aliased and kept, and predicted memory (bytes) and time (seconds).
    """
    given, (h, w) = (h, w), autocast(h, w)
    options, sharding = LossOptions(reduction), Sharding(group, shards, sequence_parallel)
    options.check()
    y = torch.empty(h.shape[:-1], dtype=torch.long, device=h.device)
    checks.check_tensors(h, w, y)
    rows = h.reshape(-1, h.shape[-1])
    problem = problem_of(rows, w, h.requires_grad, w.requires_grad)
    problem = _with_copies(problem, given, (rows, w))
    budget = checks.workspace_bytes(workspace)
    return _plan(problem, h.device, budget, options, sharding)


def _with_copies(
    problem: Problem, given: tuple[Tensor, Tensor], taken: tuple[Tensor, Tensor]
) -> Problem:
    """Count copies; a graph compiler does not know memory layouts."""
    if has_dispatch_mode():
        return problem
    h, w = map(copied_item_bytes, given, taken)
    return with_copies(problem, *taken, (h, w))


def _plan(
    problem: Problem, device: torch.device, budget: int, options: LossOptions, sharding: Sharding
) -> planner.Plan:
    """Plan this rank's part; not cached where sizes are symbols of a graph compiler."""
    if sharding.group is not None:
        ranks, parallel = sharding.ranks(), sharding.sequence_parallel
        problem = dataclasses.replace(
            problem,
            tokens=problem.tokens * ranks if parallel else problem.tokens,
            ranks=ranks,
            sequence_parallel=parallel,
        )
    widest = max(sharding.shards) if sharding.shards else problem.vocab
    sizes = problem.tokens, problem.hidden, problem.vocab
    make = _cached_plan if are_concrete(*sizes) else _make_plan
    return make(problem, device, budget, options, widest)


def _make_plan(
    problem: Problem, device: torch.device, budget: int, options: LossOptions, widest: int
) -> planner.Plan:
    """Plan for the `widest` shard first: ranks with different shards must use the same chunks."""
    leading = dataclasses.replace(problem, vocab=widest)
    more = budget, options.is_scalar, options.scales_rows
    plan = planner.make_plan(leading, window_configs_for(leading, device), *more)
    if widest == problem.vocab:
        return plan
    return planner.replan_for_shard(plan, problem, window_configs_for(problem, device), *more)


_cached_plan = process_cache(_make_plan)

for overload, budget in (("", "int? workspace=None"), (".preset", "str workspace")):
    first, *others = (record.schema() for record in OPTIONS)
    keywords = ", ".join((first, budget, *others))
    LIBRARY.define(f"loss{overload}(Tensor h, Tensor w, Tensor y, *, {keywords}) -> Tensor")
    LIBRARY.impl(f"loss{overload}", loss, "CompositeImplicitAutograd")
