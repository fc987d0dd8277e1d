"""The plan of a call.

Operators make their plans when they run, where sizes are integers: a graph compiler sees no
comparison of sizes, and one graph serves all of them.
"""

import dataclasses

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.planning import planner
from cutefce.ops.primitives.dispatch import problem_of, window_configs_for, with_copies


def plan_for(
    h: Tensor,
    w: Tensor,
    step: StepOptions,
    options: LossOptions,
    tensors: TensorOptions,
    sharding: Sharding,
) -> planner.Plan:
    """Return the plan of this rank's part of a step with h (N, D) and w (V, D).

    Ranks must use the same strategy and chunks, but may have different shards and copies: these are
    planned for the widest shard, without copies.
    """
    problem = problem_of(h, w, step.grad_hidden, step.grad_weight, step.grad_bias)
    copies = (options.softcap is not None) + options.reduces_rows
    if tensors.weight_cast is not None or copies:
        wide = tensors.weight_cast is not None
        problem = dataclasses.replace(problem, wide_grad_weight=wide, tile_copies=copies)
    if sharding.group is not None:
        ranks, parallel = sharding.ranks(), sharding.sequence_parallel
        problem = dataclasses.replace(
            problem,
            tokens=problem.tokens * ranks if parallel else problem.tokens,
            ranks=ranks,
            sequence_parallel=parallel,
        )
    own = with_copies(problem, h, w, (step.copied_hidden, step.copied_weight))
    widest = max(sharding.shards) if sharding.shards else problem.vocab
    leading = dataclasses.replace(problem, vocab=widest) if sharding.group is not None else own
    scales_rows = options.scales_rows or tensors.scales_rows
    return _make_plan(leading, own, h.device, step.budget, options.is_scalar, scales_rows)


@process_cache
def _make_plan(
    leading: Problem,
    own: Problem,
    device: torch.device,
    budget: int,
    is_scalar: bool,
    scales_rows: bool,
) -> planner.Plan:
    """Plan for `leading`, which is the same on all ranks, then for this rank's `own` problem."""
    more = budget, is_scalar, scales_rows
    plan = planner.make_plan(leading, window_configs_for(leading, device), *more)
    if leading == own:
        return plan
    return planner.replan_for_shard(plan, own, window_configs_for(own, device), *more)
