"""The plan of a call.

Operators make their plans when they run, where sizes are integers: a graph compiler sees no
comparison of sizes, and one graph serves all of them.
"""

import dataclasses

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops import torch_compat
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.planning import planner
from cutefce.ops.planning.call_problem import CallProblem, forms_gradients, with_call
from cutefce.ops.primitives.dispatch import (
    options_unsupported_reason,
    problem_of,
    window_configs_for,
)
from cutefce.ops.primitives.portable_projection import is_dense
from cutefce.ops.primitives.row_selection import has_aligned_rows
from cutefce.ops.program.weight import can_add_in_place
from cutefce.ops.rows.targets import OUTPUTS


def plan_for(
    h: Tensor,
    w: Tensor,
    step: StepOptions,
    options: LossOptions,
    tensors: TensorOptions,
    sharding: Sharding,
    counted: int | None = None,
    leaves_out: bool = False,
) -> planner.Plan:
    """Return the plan of this rank's part of a step with h (N, D) and w (V, D).

    Ranks must use the same strategy and chunks, but may have different shards, copies and buffers:
    these are planned for the widest shard, without copies, and a buffer that GEMMs can add to.

    `counted` tokens count, if the host knows that.  The plan computes them alone, if `leaves_out`
    says so, or if with a copy of their hidden states and one of their dX it takes no more memory
    than the plan for all.  More than eight parameters: the arguments of a call, by kind.
    """
    ranks = sharding.ranks()
    tokens = h.shape[0] * ranks if sharding.sequence_parallel else None
    problem = problem_of(h, w, step.grad_hidden, step.grad_weight, step.grad_bias, tokens)
    copies = max(int(options.softcap is not None), 2 * options.reduces_all)
    buffer = tensors.accumulate_into if step.grad_weight else None
    if tensors.weight_cast is not None or copies:
        wide = tensors.weight_cast is not None
        problem = dataclasses.replace(problem, wide_grad_weight=wide, tile_copies=copies)
    if tensors.target_indices is not None:
        soft, returned = tensors.target_indices.shape[-1], options.reduction == OUTPUTS
        problem = with_call(problem, soft_targets=soft, returns_classes=returned)
    if buffer is not None:
        in_place = can_add_in_place(buffer, h.dtype, sum_dtype(h.dtype))
        problem = with_call(
            problem,
            wide_grad_weight=True,
            accumulates=True,
            adds_in_place=in_place,
            knows_upstream=tensors.grad_output is not None,
        )
    if sharding.group is not None:
        parallel = sharding.sequence_parallel
        problem = dataclasses.replace(problem, ranks=ranks, sequence_parallel=parallel)
    is_sampled = options.is_sampled and forms_gradients(problem)
    if is_sampled:
        smooths = options.label_smoothing > 0
        problem = with_call(problem, samples=options.samples, smooths=smooths)
    if problem.arch is not None:
        given = h.device, options, tensors, is_sampled
        if options_unsupported_reason(problem, *given) is not None:
            problem = dataclasses.replace(problem, arch=None)
    own = _with_copies(problem, h, w, (step.copied_hidden, step.copied_weight))
    widest = max(sharding.shards) if sharding.shards else problem.vocab
    leading = own
    if sharding.group is not None:
        leading = dataclasses.replace(problem, vocab=widest)
        if isinstance(leading, CallProblem):
            leading = dataclasses.replace(leading, adds_in_place=True)
    scales_rows = options.scales_rows or tensors.scales_rows
    # entries of output classes are those of the backward, too
    late = options.scales_exps or (options.reduction == OUTPUTS and tensors.output_classes > 1)
    factors = options.is_scalar, scales_rows, late
    more = h.device, step.budget, *factors
    if counted is not None and counted < leading.tokens:
        part = _of_tokens(leading, counted)
        limit = _make_plan(leading, leading, *more).workspace_bytes
        if leaves_out or _make_plan(part, part, *more).workspace_bytes <= limit:
            leading, own = part, _of_tokens(own, counted)
    return _make_plan(leading, own, *more)


def copied_item_bytes(given: Tensor, taken: Tensor) -> int:
    """Return the bytes per element of a tensor `given` to a call that works on `taken` instead.

    0 if `taken` is `given` or a view of it.  It does not depend on sizes.
    """
    if taken is given or torch_compat.shares_memory(given, taken):
        return 0
    return given.element_size()


def _with_copies(problem: Problem, h: Tensor, w: Tensor, copied: tuple[int, int]) -> Problem:
    """Return `problem`, that of h (N, D) and w (V, D), with the copies of them that a call makes.

    `copied` are the `copied_item_bytes` of h and w.  The others depend on their layouts: they are
    those of `Projection.prepare`.
    """
    accepts = is_dense if problem.arch is None else has_aligned_rows
    gathered = (w,) if problem.sequence_parallel else (h, w)
    dense_bytes = sum(x.numel() * x.element_size() for x in gathered if not accepts(x))
    if not any((dense_bytes, *copied)):
        return problem
    of_h, of_w = copied
    return with_call(problem, copied_hidden=of_h, copied_weight=of_w, dense_bytes=dense_bytes)


def _of_tokens(problem: Problem, tokens: int) -> Problem:
    """Return `problem` with some of its tokens, copied with their dX."""
    problem = with_call(problem, tokens=tokens)
    copied = (1 + problem.grad_hidden) * tokens * problem.hidden * problem.item_bytes
    return dataclasses.replace(problem, dense_bytes=problem.dense_bytes + copied)


@process_cache
def _make_plan(
    leading: Problem,
    own: Problem,
    device: torch.device,
    budget: int,
    is_scalar: bool,
    scales_rows: bool,
    scales_exps: bool = False,
) -> planner.Plan:
    """Plan for `leading`, which is the same on all ranks, then for this rank's `own` problem."""
    more = budget, is_scalar, scales_rows
    plan = planner.make_plan(leading, window_configs_for(leading, device), *more, scales_exps)
    if leading == own:
        return plan
    return planner.replan_for_shard(plan, own, window_configs_for(own, device), *more)
