"""From a user's call to the operators that run it: check, plan, compose."""

import functools

import torch
from torch import Tensor

from cutefce import autotune_cache
from cutefce.cute_kernels.problem import Problem
from cutefce.ops import planner
from cutefce.ops.checks import check_call
from cutefce.ops.dispatch import problem_of


def loss(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    workspace: int | str | None = None,
) -> Tensor:
    """Cross entropy of softmax(h @ w.T) against y, as `torch.ops.cutefce.loss`.

    Args:
        h: (..., D) hidden states, bfloat16, float16, float32 or float64.
        w: (V, D) weight, of h's dtype and device.
        y: (...) integer targets in [0, V), or `ignore_index`.
        reduction: "mean" over the targets that are not ignored (0 if there is none), "sum" or
            "none".
        ignore_index: rows with this target have loss 0 and gradient 0.
        workspace: peak memory in bytes, beyond inputs and gradients, that the call may take for
            speed; "min", "max", or None for `planner.DEFAULT`.  Below what the smallest plan
            takes, the smallest plan runs.

    Returns:
        () or, with "none", (...): float32, or float64 for float64 inputs.

    Raises:
        TypeError, ValueError: naming the argument, what was got and what is expected.
        IndexError: on a CPU, for a target outside [0, V).  On a GPU, which is not waited for,
            such a row's loss and the gradients that it takes part in are NaN.
    """
    h, w = _autocast(h, w)
    check_call(h, w, y, reduction)
    rows = h.reshape(-1, h.shape[-1])
    budget, inputs = planner.budget_bytes(workspace), (rows, w, y.reshape(-1))
    grad = torch.is_grad_enabled()
    grad_hidden, grad_weight = grad and h.requires_grad, grad and w.requires_grad
    result: Tensor
    if not (grad_hidden or grad_weight):
        result = torch.ops.cutefce.forward(*inputs, reduction, ignore_index)
    else:
        plan = _plan(problem_of(rows, w, grad_hidden, grad_weight), budget, reduction != "none")
        result = torch.ops.cutefce.project_loss(
            *inputs,
            reduction,
            ignore_index,
            grad_hidden,
            grad_weight,
            plan.strategy,
            plan.window,
            plan.kept,
            plan.chunk,
        )[0]
    return result.reshape(y.shape) if reduction == "none" else result


def plan(
    h: Tensor, w: Tensor, *, reduction: str = "mean", workspace: int | str | None = None
) -> planner.Plan:
    """Return how `loss` would run with these arguments; print it to read it.

    Args:
        h: (..., D) hidden states.  What is to be differentiated, h or w or both, requires grad.
        w: (V, D) weight.
        reduction: as for `loss`.
        workspace: as for `loss`.

    Returns:
        Strategy, window, columns kept, and predicted memory (bytes) and time (seconds).
    """
    h, w = _autocast(h, w)
    y = torch.empty(h.shape[:-1], dtype=torch.long, device=h.device)
    check_call(h, w, y, reduction)
    problem = problem_of(h.reshape(-1, h.shape[-1]), w, h.requires_grad, w.requires_grad)
    return _plan(problem, planner.budget_bytes(workspace), reduction != "none")


def _autocast(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Cast as `torch.nn.functional.linear` does: all but float64, to the region's dtype."""
    device = h.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return h, w
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        eligible = x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return cast(h), cast(w)


def _plan(problem: Problem, budget: int, scalar_upstream: bool) -> planner.Plan:
    """Plan anew where sizes are symbols of a graph compiler, which cannot be cached."""
    sizes = problem.tokens, problem.hidden, problem.vocab
    make = _cached_plan if all(type(size) is int for size in sizes) else _new_plan
    return make(problem, budget, scalar_upstream)


def _new_plan(problem: Problem, budget: int, scalar_upstream: bool) -> planner.Plan:
    config = autotune_cache.lookup(problem)
    return planner.make_plan(problem, config, budget, scalar_upstream)


_cached_plan = functools.lru_cache(maxsize=1024)(_new_plan)
