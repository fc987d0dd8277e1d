"""From a user's call to the operators that run it: check, plan, compose."""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import Problem
from cutefce.ops.interface import no_grad_cache
from cutefce.ops.interface.checks import check_call, check_denominator
from cutefce.ops.interface.context import can_bypass_dispatcher, is_autocasting
from cutefce.ops.interface.operators import IMPLS, LIBRARY, SHARING, forward
from cutefce.ops.parallel import consistency
from cutefce.ops.planning import planner
from cutefce.ops.primitives.dispatch import are_concrete, problem_of, widths_for
from cutefce.ops.primitives.rows import Targets


def loss(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    workspace: int | str | None = None,
    denominator: Tensor | None = None,
    group: str | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
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
        denominator: () what "mean" divides by instead; with 0 the loss is 0.
        group: name of the process group over which the vocabulary is sharded: w is this rank's
            (V_k, D), V the sum of all V_k.  Everything else is the same on every rank, targets
            are global ids, and so are the loss and dX.
        shards: V_k of every rank; None if they are equal.
        sequence_parallel: h holds this rank's part of the tokens, an equal share of the first
            dimension, in order of the ranks; y has all of them.  So has the loss; dX is this
            part's.

    Returns:
        () or, with "none", (...): float32, or float64 for float64 inputs.

    Raises:
        TypeError, ValueError: naming the argument, what was got and what is expected.
        RuntimeError: if another rank of the group fails, or makes no such call in time.
        IndexError: on a CPU, for a target outside [0, V).  On a GPU, which is not waited for,
            such a row's loss and the gradients that it takes part in are NaN.
    """
    h, w = _autocast(h, w)
    grad = torch.is_grad_enabled()
    grad_hidden, grad_weight = grad and h.requires_grad, grad and w.requires_grad
    direct = (
        not (grad_hidden or grad_weight) and denominator is None and can_bypass_dispatcher(h, w, y)
    )
    alone = direct and group is None and not shards and not sequence_parallel
    looks = no_grad_cache.call_key(h, w, y, reduction, workspace) if alone else None
    known = no_grad_cache.cached_primitives(looks)
    if known is None:
        ranks = consistency.ranks(group, shards, sequence_parallel)
        with consistency.report_errors(group):
            check_call(h, w, y, reduction, ranks if sequence_parallel else 1)
            check_denominator(denominator, h, reduction)
            consistency.check_shards(group, shards, w)
            budget = planner.budget_bytes(workspace)
    # to reshape what needs it not takes 2 us of a call
    rows = h if h.ndim == 2 else h.reshape(-1, h.shape[-1])
    y_rows = y if y.ndim == 1 else y.reshape(-1)
    inputs, sharing = (rows, w, y_rows), (denominator, group, shards, sequence_parallel)
    result: Tensor
    if known is not None:
        targets = Targets(y_rows, w.shape[0], ignore_index)
        _, result = known.forward(rows, w, targets, reduction)
    elif not (grad_hidden or grad_weight):
        run = IMPLS[forward] if direct else torch.ops.cutefce.forward
        result = run(*inputs, reduction, ignore_index, *sharing)
        no_grad_cache.store(looks, *inputs)
    else:
        problem = problem_of(rows, w, grad_hidden, grad_weight)
        plan = _plan(problem, h.device, budget, reduction != "none", *sharing[1:])
        result = torch.ops.cutefce.loss_forward(
            *inputs,
            reduction,
            ignore_index,
            grad_hidden,
            grad_weight,
            plan.strategy,
            plan.window,
            plan.aliased,
            plan.kept,
            plan.chunk,
            *sharing,
        )[0]
    return result.reshape(y.shape) if reduction == "none" else result


def plan(
    h: Tensor,
    w: Tensor,
    *,
    reduction: str = "mean",
    workspace: int | str | None = None,
    group: str | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> planner.Plan:
    """Return how `loss` would run with these arguments; print it to read it.

    Args:
        h: (..., D) hidden states.  What is to be differentiated, h or w or both, requires grad.
        w: (V, D) weight.
        reduction: as for `loss`.
        workspace: as for `loss`.
        group: as for `loss`.
        shards: as for `loss`.
        sequence_parallel: as for `loss`.

    Returns:
        Strategy, window, columns aliased and kept, and predicted memory (bytes) and time (seconds).
    """
    h, w = _autocast(h, w)
    y = torch.empty(h.shape[:-1], dtype=torch.long, device=h.device)
    check_call(h, w, y, reduction)
    problem = problem_of(h.reshape(-1, h.shape[-1]), w, h.requires_grad, w.requires_grad)
    budget, scalar = planner.budget_bytes(workspace), reduction != "none"
    return _plan(problem, h.device, budget, scalar, group, shards, sequence_parallel)


def _autocast(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Cast as `torch.nn.functional.linear` does: all but float64, to the region's dtype."""
    if not is_autocasting(h.device.type):
        return h, w
    dtype = torch.get_autocast_dtype(h.device.type)

    def cast(x: Tensor) -> Tensor:
        eligible = x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return cast(h), cast(w)


def _plan(
    problem: Problem,
    device: torch.device,
    budget: int,
    scalar_upstream: bool,
    group: str | None,
    shards: Sequence[int] | None,
    sequence_parallel: bool,
) -> planner.Plan:
    """Plan the part of this rank; anew where sizes are symbols of a graph compiler."""
    if group is not None:
        ranks = consistency.ranks(group, shards, sequence_parallel)
        problem = dataclasses.replace(
            problem,
            tokens=problem.tokens * ranks if sequence_parallel else problem.tokens,
            ranks=ranks,
            sequence_parallel=sequence_parallel,
        )
    widest = max(shards) if shards else problem.vocab
    sizes = problem.tokens, problem.hidden, problem.vocab
    make = _cached_plan if are_concrete(*sizes) else _new_plan
    return make(problem, device, budget, scalar_upstream, widest)


def _new_plan(
    problem: Problem, device: torch.device, budget: int, scalar_upstream: bool, widest: int
) -> planner.Plan:
    """Plan as for the `widest` shard: ranks whose shards differ must walk the same chunks."""
    leading, more = dataclasses.replace(problem, vocab=widest), (budget, scalar_upstream)
    plan = planner.make_plan(leading, widths_for(leading, device), *more)
    if widest == problem.vocab:
        return plan
    return planner.replan_for_shard(plan, problem, widths_for(problem, device), *more)


_cached_plan = functools.lru_cache(maxsize=1024)(_new_plan)

for overload, budget in (("", "int? workspace=None"), (".preset", "str workspace")):
    LIBRARY.define(
        f"loss{overload}(Tensor h, Tensor w, Tensor y, *, str reduction='mean', "
        f"int ignore_index=-100, {budget}, {SHARING}) -> Tensor"
    )
    LIBRARY.impl(f"loss{overload}", loss, "CompositeImplicitAutograd")
