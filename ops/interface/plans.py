"""The plan of a call.

Operators make their plans when they run, where sizes are integers: a graph compiler sees no
comparison of sizes, and one graph serves all of them.
"""

import dataclasses

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions
from cutefce.ops.planning import planner
from cutefce.ops.primitives.dispatch import problem_of, window_configs_for, with_copies


def plan_for(
    h: Tensor, w: Tensor, step: StepOptions, options: LossOptions, sharding: Sharding
) -> planner.Plan:
    """Return the plan of this rank's part of a step with h (N, D) and w (V, D)."""
    problem = problem_of(h, w, step.grad_hidden, step.grad_weight)
    if sharding.group is not None:
        ranks, parallel = sharding.ranks(), sharding.sequence_parallel
        problem = dataclasses.replace(
            problem,
            tokens=problem.tokens * ranks if parallel else problem.tokens,
            ranks=ranks,
            sequence_parallel=parallel,
        )
    problem = with_copies(problem, h, w, (step.copied_hidden, step.copied_weight))
    widest = max(sharding.shards) if sharding.shards else problem.vocab
    return _make_plan(problem, h.device, step.budget, options, widest)


@process_cache
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
