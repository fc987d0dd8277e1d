"""From the tensors of a call to the operands of programs: tokens, targets, primitives."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import Problem
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.operators.kept import Kept
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.parallel.class_row import needs_class_row, set_class_row
from cutefce.ops.parallel.shard import Unsharded
from cutefce.ops.primitives.dispatch import primitives_for
from cutefce.ops.primitives.row_selection import select_rows, with_aligned_rows
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.rows.loss_parts import check_soft_values, without_weightless
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.sampling.samples import Sampling

NO_GRADIENTS = False, False, False


def prepare(
    shard: Unsharded,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    options: LossOptions,
    tensors: TensorOptions,
    plan: Plan,
    known: Kept | None = None,
) -> tuple[LossInputs[Any, Any], RowSelection | None]:
    """Return the operands as programs take them, and which tokens they are, None for all.

    In a backward, `known` is what its forward has found out.  If that has the sums of the
    gradients, the hidden states are those given: what is left of the backward does not read them.
    """
    gathers = known is None or not known.plan.in_forward
    h = shard.gather_hidden(h) if gathers else h
    if known is not None and known.arch is not None:
        w = with_aligned_rows(w)  # hooks of saved tensors may restore another layout
    problem = plan.backend.operands
    selection = None if known is None else known.selection
    if known is None:
        check_soft_values(y, options, tensors, shard.total_vocab(w))
        selection = _select(shard, problem, y, options, tensors, plan)
    if selection is not None:
        y, tensors = selection.targets, selection.take_options(tensors)
        if not selection.is_on_device and gathers:
            h = h.index_select(0, selection.order)
            problem = replace(problem, tokens=len(h))
    given_y = y.long(), w.shape[0], options, tensors, sum_dtype(h.dtype)
    targets = shard.make_targets(*given_y, problem.arch, selection)
    if selection is not None and selection.is_on_device:
        targets.selection = selection
    if known is not None and known.soft is not None:
        targets.parts = known.soft
    own = primitives_for(h, w, problem, targets)
    h, w = own.projection.prepare(h, w)
    class_row = None if known is None else known.class_row
    if class_row is None and needs_class_row(targets):
        class_row = set_class_row(shard, w, targets)
    own_sums = tensors.weight_cast is not None or tensors.accumulate_into is not None
    dw_dtype = sum_dtype(w.dtype) if own_sums else w.dtype
    dtypes = shard.dx_dtype(h.dtype), dw_dtype
    buffer = tensors.accumulate_into if plan.problem.grad_weight else None
    operands = own, h, w, targets, *dtypes, buffer, class_row
    sampling = None
    if plan.is_sampled and known is None:
        sampling = _sampling(shard, w, y, options, tensors, selection)
    return LossInputs(*operands, sampling, shard.ranks(), problem.arch), selection


def _sampling(
    shard: Unsharded,
    w: Tensor,
    y: Tensor,
    options: LossOptions,
    tensors: TensorOptions,
    selection: RowSelection | None,
) -> Sampling:
    """Return how entries of the tokens with targets y (N,) are chosen."""
    assert tensors.seed is not None
    rows = torch.arange(len(y), device=y.device) if selection is None else selection.order
    seed = shard.of_first_rank(tensors.seed)
    return Sampling(seed, options.samples, rows, shard.total_vocab(w))


def _select(
    shard: Unsharded,
    problem: Problem,
    y: Tensor,
    options: LossOptions,
    tensors: TensorOptions,
    plan: Plan,
) -> RowSelection | None:
    """Return which tokens are computed, None for all."""
    y, ignored = without_weightless(y.long(), options, tensors).contiguous(), options.ignore_index
    counted = shard.counted(y, ignored) if problem.selects_rows else y
    chunk = plan.layout.chunk if plan.in_forward else len(y)
    return select_rows(problem, y, counted, ignored, plan.tokens, chunk)


def plan_of(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    step: StepOptions,
    options: LossOptions,
    tensors: TensorOptions,
    sharding: Sharding,
) -> Plan:
    """Return the plan of a step, which on a CPU may leave out tokens that do not count.

    Outside of a group it always does where what these hold would reach the gradients of the weight.
    """
    given = h, w, step, options, tensors, sharding
    if y.device.type != "cpu":
        return plan_for(*given)
    counts = without_weightless(y.long(), options, tensors) != options.ignore_index
    plan = plan_for(*given, int(counts.sum()))
    sums_tokens = (step.grad_weight or step.grad_bias) and sharding.group is None
    if not sums_tokens or plan.tokens < len(y) or bool(counts.all()):
        return plan
    # a sum that overflows is taken for a bad value, which costs memory alone
    if bool(h.sum(1).isfinite().masked_fill_(counts, True).all()):
        return plan
    return plan_for(*given, int(counts.sum()), leaves_out=True)
