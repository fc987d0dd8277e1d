"""From the tensors of a call to the operands of programs: tokens, targets, primitives."""

from copy import copy
from dataclasses import replace

from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossCall, TensorOptions
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.operators.saved import Saved
from cutefce.ops.parallel.class_row import set_class_row
from cutefce.ops.parallel.shard import VocabShard
from cutefce.ops.primitives.dispatch import primitives_for, report
from cutefce.ops.primitives.select_rows import select_rows, with_aligned_rows
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.rows.loss_parts import check_soft_values, without_weightless
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets, make_targets
from cutefce.ops.sampling.kernels import unsupported_reason


def prepare(shard: VocabShard, x: LossCall, plan: Plan) -> LossInputs:
    """Return the operands of a forward, as programs take them."""
    h, vocab = shard.gather_hidden(x.h), shard.total_vocab(x.w)
    problem = plan.problem
    options, tensors, ignored = x.options, x.tensors, x.options.ignore_index
    is_exact = problem.arch is not None and not problem.samples
    if is_exact and options.is_sampled and any(x.step.gradients):
        reason = unsupported_reason(problem, h.device, options, tensors)
        if reason is not None:
            report(reason, h.is_cuda, "gradients are exact:")
    check_soft_values(x.y, options, tensors, vocab)
    y = without_weightless(x.y.long(), options, tensors).contiguous()
    counted = shard.counted(y, ignored) if problem.selects else y
    chunk = plan.layout.chunk if plan.layout.in_chunks else y.shape[0]
    tokens = problem.tokens, problem.sorts
    selection = select_rows(
        problem.arch if problem.selects else None, y, counted, ignored, tokens, chunk
    )
    if selection is not None:
        y, tensors = selection.targets, selection.take_options(tensors)
        if not selection.is_on_device:
            h = h.index_select(0, selection.order)
    if problem.samples:
        assert tensors.seed is not None
        tensors = replace(tensors, seed=shard.of_first_rank(tensors.seed))
    given = y, vocab, options, tensors, sum_dtype(h.dtype)
    targets = make_targets(*given, selection, shard.classes())
    if selection is not None and selection.is_on_device:
        targets.selection = selection
    inputs = _operands(shard, h, x.w, targets, tensors, plan, selection)
    if problem.every_class:
        inputs.class_row = set_class_row(shard, inputs.w, targets)
    return inputs


def resume(shard: VocabShard, x: LossCall, saved: Saved) -> LossInputs:
    """Return the operands of a backward whose forward has `saved` the others.

    If that has the sums of the gradients, the hidden states are those given: the rest of the
    backward does not read them.
    """
    h, w, selection = x.h, x.w, saved.selection
    if not saved.plan.layout.in_chunks:
        h = shard.gather_hidden(h)
        if selection is not None and not selection.is_on_device:
            h = h.index_select(0, selection.order)
    problem = saved.plan.problem
    if problem.arch is not None or problem.triton:
        w = with_aligned_rows(w)  # hooks of saved tensors may restore another layout
    inputs = _operands(shard, h, w, copy(saved.targets), x.tensors, saved.plan, selection)
    inputs.class_row = saved.class_row
    return inputs


def _operands(
    shard: VocabShard,
    h: Tensor,
    w: Tensor,
    targets: Targets,
    tensors: TensorOptions,
    plan: Plan,
    selection: RowSelection | None,
) -> LossInputs:
    """Return the operands of a program that forward and backward have in common."""
    counted, p = None if selection is None else selection.counted, plan.problem
    own = primitives_for(h, w, p, p.tiles, targets, plan.device, counted)
    h, w = own.prepare(h, w)
    buffer = tensors.accumulate_into if p.grad_weight else None
    return LossInputs(own, h, w, targets, buffer, ranks=shard.ranks(), selection=selection)


def plan_of(x: LossCall) -> Plan:
    """Return the plan of a step, which on a CPU may leave out tokens that do not count.

    Outside of a group it always does where what these hold would reach the gradients of the weight.
    """
    if x.y.device.type != "cpu":
        return plan_for(x)
    is_counted = without_weightless(x.y.long(), x.options, x.tensors) != x.options.ignore_index
    plan = plan_for(x, int(is_counted.sum()))
    sums_tokens = (x.step.grad_weight or x.step.grad_bias) and x.sharding.group is None
    if not sums_tokens or plan.tokens < len(x.y) or bool(is_counted.all()):
        return plan
    # a sum that overflows is taken for a bad value, which costs memory alone
    if bool(x.h.sum(1).isfinite().masked_fill_(is_counted, True).all()):
        return plan
    return plan_for(x, int(is_counted.sum()), leaves_out=True)
