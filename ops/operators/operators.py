"""The inner operators: schemas and implementations.

`torch.ops.cutefce.loss` (`call.py`), which users call, composes them, so that autograd,
`torch.compile` and graph capture see tensors in and tensors out, whose shapes depend on those of
the inputs alone:

    forward            the loss, where no gradient is needed
    loss_forward       the forward of a training step: loss and statistics
    loss_forward_into  the same where it may add dW to a buffer
    loss_backward      dX, dW and the gradient of the bias
    loss_backward_into the same where it may add dW to a buffer

Their schemas are built from the option records; `meta.py` has their fake implementations,
`autograd.py` the derivative of the loss, and `kept.py` what the forward keeps for the backward.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import OPTIONS, LossOptions, StepOptions, TensorOptions
from cutefce.ops.operators import kept, meta
from cutefce.ops.operators.agreement import agreed_backward, agreed_forward, agreed_upstream
from cutefce.ops.operators.context import isolated_context, refuse_tangents
from cutefce.ops.operators.fused import run_fused_backward, run_fused_forward, step_with_layouts
from cutefce.ops.operators.kept import GradSums, Kept
from cutefce.ops.operators.operands import NO_GRADIENTS, plan_of, prepare, stored_exps
from cutefce.ops.parallel.shard import Unsharded, shard_of
from cutefce.ops.planning.planner import MINIMUM, Plan
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats, reduce_losses, returned_rows
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.sampling.kernels import KernelSamples
from cutefce.ops.schema import unpack
from cutefce.ops.strategies import sampled, windows
from cutefce.ops.strategies.gradients_in_forward import gradients_in_forward
from cutefce.ops.strategies.hidden_sums import HiddenSums
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.weight_sums import WeightSums

LIBRARY = torch.library.Library("cutefce", "DEF")
STEP = (StepOptions, *OPTIONS)

_OPTIONS = ", ".join(record.schema() for record in OPTIONS)
_STEP = ", ".join(record.schema() for record in STEP)
_WRITING = _STEP.replace("Tensor? accumulate_into", "Tensor(a!)? accumulate_into")
assert _WRITING != _STEP
# CUDA graphs that a graph compiler makes must not contain them: a first call compiles, and what
# the forward keeps for the backward is no output
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
for schema in (
    f"forward(Tensor h, Tensor w, Tensor y, {_OPTIONS}) -> Tensor",
    f"loss_forward(Tensor h, Tensor w, Tensor y, {_STEP}) -> (Tensor loss, Tensor stats)",
    f"loss_forward_into(Tensor h, Tensor w, Tensor y, {_WRITING}) -> (Tensor loss, Tensor stats)",
    "loss_backward(Tensor upstream, Tensor h, Tensor w, Tensor y, Tensor stats, "
    f"{_STEP}) -> (Tensor dx, Tensor dw, Tensor dbias)",
    "loss_backward_into(Tensor upstream, Tensor h, Tensor w, Tensor y, Tensor stats, "
    f"{_WRITING}) -> (Tensor dx, Tensor dw, Tensor dbias)",
):
    LIBRARY.define(schema, tags=_TAGS)


def forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> Tensor:
    """Return the reduced loss; `arguments` are those of `OPTIONS`."""
    options, tensors, sharding = unpack(arguments, *OPTIONS)
    w = tensors.computed_weight(w)
    refuse_tangents()
    same = {} if sharding.group is None else agreed_forward(y, options, tensors)
    shard = shard_of(sharding, h, w, **same)
    plan = None
    if (
        y.device.type == "cpu"
        or sharding.is_sharded
        or options.transforms_logits
        or options.label_smoothing
        or (tensors.temperature is not None)
        or (tensors.target_probs is not None)
    ):  # otherwise the kernels' fused forward selects
        step = StepOptions(MINIMUM, *NO_GRADIENTS)
        plan = plan_of(h, w, y, step, options, tensors, sharding)
    inputs, selection = prepare(shard, h, w, y, options, tensors, plan)
    loss = inputs.primitives.projection.forward(inputs.h, inputs.w, inputs.targets)[1]
    return restored(loss, selection, options)


def loss_forward(h: Tensor, w: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and statistics (NUM_STATS, N); `arguments` are those of `STEP`."""
    refuse_tangents()
    step, options, tensors, sharding = unpack(arguments, *STEP)
    w = tensors.computed_weight(w)
    plan = plan_of(h, w, y, step, options, tensors, sharding)
    same = {}  # one device has nobody to agree with
    if sharding.group is not None:
        same = agreed_forward(y, options, tensors, plan.gradients)
        same["workspace"] = step.budget
        same["workspace, as (strategy, chunk)"] = [plan.strategy, plan.chunk]
    shard = shard_of(sharding, h, w, **same)
    fused = step_with_layouts(h, w, y, plan, options, tensors, sharding)
    if fused is not None:
        loss, stats, results = run_fused_forward(*fused, options, plan)
        selection = results.selection
    else:
        inputs, selection = prepare(shard, h, w, y, options, tensors, plan)
        loss, stats, results = run_forward(inputs, plan)
    if selection is not None:
        results.selected, results.stats = results.selected or selection, stats
        stats = stats.restore(selection)
    kept.keep(stats.rows, results)
    return restored(loss, selection, options), stats.rows


def loss_forward_into(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Do what `loss_forward` does of arguments with `accumulate_into` and `grad_output`."""
    _count_write(arguments[3:])
    return loss_forward(*arguments)


def _count_write(arguments: tuple[Any, ...]) -> None:
    """Tell autograd that the buffer is written, which kernels do not; `arguments` are of `STEP`."""
    torch.autograd.graph.increment_version(unpack(arguments, *STEP)[2].accumulate_into)


def restored(loss: Tensor, selection: RowSelection | None, options: LossOptions) -> Tensor:
    """Return the reduced loss, or those of all tokens, which are no view of the statistics."""
    if options.is_scalar:
        return loss
    return loss.clone() if selection is None else selection.restore(loss)


def run_forward(inputs: LossInputs[Any, Any], plan: Plan) -> tuple[Tensor, RowStats, Kept]:
    """Return the reduced loss, the statistics, and what is kept with them."""
    h, w, targets, row = inputs.h, inputs.w, inputs.targets, inputs.class_row
    if inputs.sampling is not None:
        loss, stats, samples = sampled.forward(inputs, inputs.sampling)
        results = Kept(plan, h.new_empty(0, 0), samples=samples, class_row=row)
        results.soft = targets.soft_parts()
        return loss, stats, results
    if not plan.in_forward:
        results = Kept(plan, h.new_empty(inputs.tokens, plan.kept), class_row=row)
        results.dw = w.new_empty(w.shape) if plan.aliased else None
        stored = stored_exps(inputs, results.exps, results.dw, plan)
        loss, stats = windows.forward(inputs, stored)
        results.soft = targets.soft_parts()
        return loss, stats, results
    dtype, hidden = sum_dtype(h.dtype), h.shape[1]
    loss_scale = targets.loss_scale(dtype)
    dx = h.new_empty(inputs.tokens if plan.grad_hidden else 0, hidden, dtype=inputs.dx_dtype)
    # what is added to a buffer is rounded there
    dw_dtype = w.dtype if inputs.accumulate_into is not None else inputs.dw_dtype
    keeps_dw = plan.grad_weight and not plan.adds_in_forward
    dw = w.new_empty(len(w) if keeps_dw else 0, hidden, dtype=dw_dtype)
    dbias = loss_scale.new_empty(len(w)) if plan.grad_bias else None
    factor = targets.tensors.grad_output if plan.adds_in_forward else None
    kept_dx = HiddenSums.empty(dx, dtype, factor)
    sums = GradSums(kept_dx, WeightSums.empty(dw, dtype, plan.low_bits), dbias)
    buffer, written = inputs.accumulate_into, sums
    if buffer is not None and factor is not None:
        written = sums._replace(dw=WeightSums.in_buffer(buffer, factor))
    stats = gradients_in_forward(inputs, loss_scale, plan.window, plan.kept, plan.chunk, *written)
    results = Kept(plan, h.new_empty(0, 0), sums=sums, class_row=row)
    returned = returned_rows if targets.options.reduction == OUTPUTS else reduce_losses
    return returned(stats, targets), stats, results


def loss_backward(
    upstream: Tensor, h: Tensor, w: Tensor, y: Tensor, stats: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dX (N, D), dW (V, D) and the bias' gradient (V,), without rows where not computed.

    `stats` are those of `loss_forward`; `arguments` are those of `STEP`.
    """
    step, options, tensors, sharding = unpack(arguments, *STEP)
    w, upstream = tensors.computed_weight(w), agreed_upstream(upstream, tensors)
    results = kept.kept_with(stats)
    plan = results.plan if results else plan_of(h, w, y, step, options, tensors, sharding)
    if kept.consumes_exps(options, tensors) and not plan.in_forward:
        kept.forget(stats)
    if plan.adds_in_forward and results is None:
        raise RuntimeError(
            "grad_output: got a backward that does not find what its forward has kept, expected "
            "None where what a graph saves is moved or computed again"
        )
    fused = step_with_layouts(h, w, y, plan, options, tensors, sharding)
    if fused is not None:
        if results is None:
            _, rows, results = run_fused_forward(*fused, options, plan)
        else:
            rows = RowStats(stats) if results.stats is None else results.stats
        gradients = run_fused_backward(*fused, upstream, rows.rows, options, results)
        assert gradients is not None
        return *gradients, h.new_empty(0)
    sums = results.take_sums() if results else None
    runs_again = sums is None if plan.in_forward else results is None
    same = {} if sharding.group is None else agreed_backward(upstream, stats, runs_again)
    shard = shard_of(sharding, h, w, **same)
    known = None if runs_again else results
    inputs, selection = prepare(shard, h, w, y, options, tensors, plan, known)
    if known is not None:
        rows = RowStats(stats) if known.stats is None else known.stats
    else:
        _, rows, results = run_forward(inputs, plan)
        sums = results.take_sums()
    if selection is not None and upstream.ndim:
        upstream = selection.take(upstream)
    assert results is not None
    if sums is not None:
        return _finish(sums, inputs, selection, shard, rows, upstream, plan, tensors)
    dx, dw, dbias = run_windows_backward(upstream, inputs, rows, results)
    dw_dtype = inputs.dw_dtype
    del inputs  # freed before a copy of dX
    if dx is not None and selection is not None and not selection.is_on_device:
        dx = selection.restore(dx, 0)
    return (
        h.new_empty(0, h.shape[1]) if dx is None else shard.finish_dx(dx, h.dtype),
        w.new_empty(0, w.shape[1], dtype=dw_dtype) if dw is None else dw,
        _rounded(dbias, w, tensors),
    )


def loss_backward_into(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `loss_backward` does of arguments with `accumulate_into`."""
    _count_write(arguments[5:])
    return loss_backward(*arguments)


def run_windows_backward(
    upstream: Tensor, inputs: LossInputs[Any, Any], stats: RowStats, results: Kept
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dX, dW and, in the dtype of sums, the bias' gradient of a plan of windows.

    What is not computed is None.  `results` are those of the forward.
    """
    plan, w, classes = results.plan, inputs.w, inputs.targets.output_classes
    if classes is not None:
        soft, upstream = classes.take(upstream)
        inputs.targets.parts = inputs.targets.parts._replace(soft=soft)
    dw, exps = results.take_dw(), results.exps
    results.take_workspace()  # not used here: freed before others are made
    if kept.consumes_exps(inputs.targets.options, inputs.targets.tensors):
        exps = results.own(exps)
    stored = results.samples or stored_exps(inputs, exps, dw, plan)
    if dw is None and plan.grad_weight:
        dw = inputs.accumulate_into
        if dw is None:
            dw = w.new_empty(w.shape, dtype=inputs.dw_dtype)
    dbias = stats.rows.new_empty(w.shape[0]) if plan.grad_bias else None
    if isinstance(stored, KernelSamples):
        dx = sampled.backward(inputs, stats, stored, upstream, plan.grad_hidden, dw, dbias)
    else:
        more = stats, stored, upstream, plan.window, plan.grad_hidden
        dx = windows.backward(inputs, *more, dw, dbias, plan.aliased, plan.hidden_bits)
    return dx, dw if inputs.accumulate_into is None else None, dbias


def _rounded(dbias: Tensor | None, w: Tensor, tensors: TensorOptions) -> Tensor:
    """Return the bias' gradient (V,) in the bias' dtype, without elements if not computed."""
    bias = w if tensors.linear_bias is None else tensors.linear_bias
    return bias.new_empty(0) if dbias is None else dbias.to(bias.dtype)


def _finish(
    sums: GradSums,
    inputs: LossInputs[Any, Any],
    selection: RowSelection | None,
    shard: Unsharded,
    stats: RowStats,
    upstream: Tensor,
    plan: Plan,
    tensors: TensorOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for the upstream gradient of the loss, in the memory of their sums."""
    targets, dx, dw, dtype = inputs.targets, sums.dx.gradient, sums.dw.gradient, inputs.h.dtype
    if plan.grad_hidden:  # of no row, where no token counts
        targets.selection = None  # all rows of the sums are defined
        dx = shard.finish_dx(sums.dx.finish(inputs, stats, upstream, selection), dtype)
    if len(dw):
        if inputs.accumulate_into is None:
            dw = sums.dw.finish(inputs.primitives.gradients, upstream)
        else:
            sums.dw.add_to(inputs.accumulate_into, upstream)
            dw = upstream.new_empty(0, dw.shape[1], dtype=inputs.dw_dtype)
    dbias = None if sums.dbias is None else sums.dbias * upstream
    return dx.to(dtype), dw, _rounded(dbias, inputs.w, tensors)


IMPLS = {
    function: isolated_context(function)
    for function in (forward, loss_forward, loss_forward_into, loss_backward, loss_backward_into)
}
"""The implementations, as the dispatcher and eager autograd call them."""

for function, implementation in IMPLS.items():
    LIBRARY.impl(function.__name__, implementation, "CompositeExplicitAutograd")
    fake = getattr(meta, function.__name__)
    torch.library.register_fake(f"cutefce::{function.__name__}", fake, lib=LIBRARY)
