"""The inner operators: schemas and implementations.

`torch.ops.cutefce.loss` (`call.py`), which users call, composes them, so that autograd,
`torch.compile` and graph capture see tensors in and tensors out, whose shapes depend on those of
the inputs alone:

    loss_forward       loss and statistics
    loss_forward_into  the same where it may add dW to a buffer
    loss_backward      dX, dW and the gradient of the bias
    loss_backward_into the same where it may add dW to a buffer

Their schemas are built from the option records; `meta.py` has their fake implementations,
`autograd.py` the derivative of the loss, and `saved.py` what the forward saves for the backward.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.ops.interface.arguments import (
    OPTIONS,
    LossCall,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.operators import meta, saved
from cutefce.ops.operators.agreement import agreed_backward, agreed_forward, agreed_upstream
from cutefce.ops.operators.context import isolated_context, refuse_tangents
from cutefce.ops.operators.operands import plan_of, prepare, resume
from cutefce.ops.operators.probabilities import (
    gradients_of_probabilities,
    losses_of_probabilities,
)
from cutefce.ops.operators.saved import Saved
from cutefce.ops.parallel.shard import shard_of
from cutefce.ops.primitives.dispatch import falls_back
from cutefce.ops.program import calls as programs
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.schema import unpack

NOTHING = contextlib.nullcontext()
LIBRARY = torch.library.Library("cutefce", "DEF")
STEP = (StepOptions, *OPTIONS)

_STEP = ", ".join(record.schema() for record in STEP)
_WRITING = _STEP.replace("Tensor? accumulate_into", "Tensor(a!)? accumulate_into")
assert _WRITING != _STEP
_FORWARD = "Tensor h, Tensor w, Tensor y"
_BACKWARD = "Tensor upstream, Tensor h, Tensor w, Tensor y, Tensor stats"
_RESULTS, _GRADIENTS = "(Tensor loss, Tensor stats)", "(Tensor dx, Tensor dw, Tensor dbias)"
# CUDA graphs that a graph compiler makes must not contain them: a first call compiles, and what
# the forward saves for the backward is no output
UNSAFE = (torch.Tag.cudagraph_unsafe,)


def define(
    function: Callable[..., Any],
    schema: str,
    fake: Callable[..., Any],
    run: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Define the operator with the name of `function`, which `run` does if given.

    `fake` returns results of the same shapes and dtypes.
    """
    name = function.__name__
    LIBRARY.define(f"{name}{schema}", tags=tags)
    LIBRARY.impl(name, run or function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cutefce::{name}", fake, lib=LIBRARY)


def loss_forward(h: Tensor, w: Tensor, y: Tensor, *records: Any) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and the statistics (NUM_STATS, N), of the records `STEP`.

    Targets that are probabilities (N, V) have a loss for each token.
    """
    refuse_tangents()
    x = LossCall(h, w, y, *records).computed()
    if y.is_floating_point():
        return losses_of_probabilities(x)
    plan = plan_of(x)
    with _compiling_at_once(plan, x):
        return _loss_forward(plan, x)


def _compiling_at_once(plan: Plan, x: LossCall) -> contextlib.AbstractContextManager[None]:
    """Return a region in which a kernel that is missing is compiled with all others of a call.

    Ranks of a group, which would wait for each other, compile one kernel after the other.
    """
    has_kernels = plan.problem.arch is not None and not x.h.is_meta
    if not has_kernels or x.sharding.group is not None:
        return NOTHING

    def make(missed: KernelSpec) -> None:
        build.build(build.missing([missed, *kernels_of(plan, x)]))

    return jit_cache.made_by(make)


def kernels_of(plan: Plan, x: LossCall) -> list[KernelSpec]:
    """Return the kernels that forward and backward of a call on one device launch.

    They run without data, and launch nothing.
    """

    def shape(x: Tensor) -> Tensor:
        return torch.empty_like(x, device="meta")

    with jit_cache.recording() as found:
        h, w, y = map(shape, x[:3])
        tensors = TensorOptions(**{name: shape(t) for name, t in x.tensors.given.items()})
        records = x.step, x.options, tensors, Sharding()
        loss, stats = _loss_forward(plan, LossCall(h, w, y, *records))
        if plan.problem.needs_gradients:
            loss_backward(loss, h, w, y, stats, *records)
    return list(found)


def _loss_forward(plan: Plan, x: LossCall) -> tuple[Tensor, Tensor]:
    """Return what `loss_forward` does, by a plan."""
    same = {}  # one device has nobody to agree with
    if x.sharding.group is not None:
        same = agreed_forward(x)
        if any(x.step.gradients):  # a forward alone has one chunk on ranks, whatever the budget
            same["workspace"] = x.step.budget
            same["workspace, as (strategy, chunk)"] = [plan.strategy, plan.chunk]
    shard = shard_of(x.sharding, x.h, x.w, **same)
    inputs = prepare(shard, x, plan)
    loss, stats, results = run_forward(inputs, plan)
    selection = inputs.selection
    if selection is not None:
        results.stats, stats = stats, stats.restore(selection)
    results.given = saved.of_targets(x.y, x.tensors)
    saved.save(stats.rows, results)
    return restored(loss, selection), stats.rows


def restored(loss: Tensor, selection: RowSelection | None) -> Tensor:
    """Return the reduced loss, or those of all tokens, which are no view of the statistics."""
    if not loss.ndim:
        return loss
    return loss.clone() if selection is None else selection.restore(loss)


def run_forward(inputs: LossInputs, plan: Plan) -> tuple[Tensor, RowStats, Saved]:
    """Return the reduced loss, the statistics, and what is saved with them."""
    loss, stats, memory = programs.forward(inputs, plan)
    targets = inputs.targets
    targets.drop_forward(keeps_soft=not plan.layout.in_chunks)
    return loss, stats, Saved(plan, memory, targets, inputs.selection, None, inputs.class_row)


def loss_backward(
    upstream: Tensor, h: Tensor, w: Tensor, y: Tensor, stats: Tensor, *records: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dX (N, D), dW (V, D) and the bias' gradient (V,), without rows where not computed.

    `stats` are those of `loss_forward`, and so are the other arguments.  `upstream` is () or (N,),
    or of outputs (K + 2, N), without its last row if entropy has no gradient.
    """
    x = LossCall(h, w, y, *records).computed()
    if y.is_floating_point():
        return gradients_of_probabilities(upstream, x)
    upstream, options, tensors = agreed_upstream(upstream, x.tensors), x.options, x.tensors
    results = saved.saved_with(stats)
    if results and not results.is_of(y, tensors):
        saved.forget(stats)
        results = None
    plan = results.plan if results else plan_of(x)
    if plan.adds_in_forward and results is None:
        raise RuntimeError(
            "grad_output: got a backward that does not find what its forward has kept, expected "
            "None where what a graph saves is moved or computed again"
        )
    memory = results.memory.take() if results else None
    runs_again = memory is None
    same = {} if x.sharding.group is None else agreed_backward(upstream, stats, runs_again)
    shard = shard_of(x.sharding, x.h, x.w, **same)
    if memory is None:
        inputs = prepare(shard, x, plan)
        _, rows, results = run_forward(inputs, plan)
        memory = results.memory.take()
    else:
        assert results is not None
        inputs = resume(shard, x, results)
        rows = results.stats or RowStats(stats)
    selection = inputs.selection
    if selection is not None and upstream.ndim:
        upstream = selection.take(upstream)
    assert memory is not None
    if options.reduction == OUTPUTS and len(upstream) == tensors.output_classes + 1:
        upstream = torch.cat([upstream, torch.zeros_like(upstream[:1])])
        inputs.targets.options = options.without_entropy()
    if (classes := inputs.targets.output_classes) is not None:
        soft, upstream = classes.take(upstream)
        inputs.targets.parts = inputs.targets.parts._replace(soft=soft)
    of_chunks = None
    if plan.layout.in_chunks and plan.problem.grad_hidden:
        inputs.targets.selection = None  # all rows of the sums are defined
        selection, of_chunks = None, selection
    dx, dw, dbias = programs.backward(plan, memory, inputs, upstream, rows, of_chunks)
    del inputs, memory  # freed before a copy of dX
    if dx is not None:
        if selection is not None and not selection.is_on_device:
            dx = selection.restore(dx, 0)
        dx = shard.finish_dx(dx, h.dtype)
    bias = w if tensors.linear_bias is None else tensors.linear_bias
    return (
        h.new_empty(0, h.shape[1]) if dx is None else dx,
        w.new_empty(0, w.shape[1]) if dw is None else dw,
        bias.new_empty(0) if dbias is None else dbias.to(bias.dtype),
    )


def _writing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `function` does of arguments with `accumulate_into`, as `function`_into."""

    def run(*arguments: Any) -> Any:
        # autograd is told that the buffer is written, which kernels do not
        torch.autograd.graph.increment_version(arguments[-2].accumulate_into)
        return function(*arguments)

    run.__name__ = f"{function.__name__}_into"
    return run


loss_forward_into, loss_backward_into = _writing(loss_forward), _writing(loss_backward)
IMPLS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{f: isolated_context(falls_back(f)) for f in (loss_forward, loss_backward)},
    # these may have added to the caller's buffer before a kernel failed to compile
    **{f: isolated_context(f) for f in (loss_forward_into, loss_backward_into)},
}
"""The implementations as eager autograd calls them: operands, and records of the others."""


def _of_arguments(function: Any) -> Callable[..., Any]:
    """Return an implementation as the dispatcher calls it: with fields of records one by one."""
    run, is_backward = IMPLS[function], function in (loss_backward, loss_backward_into)
    operands = 5 if is_backward else 3

    def of_arguments(*arguments: Any) -> Any:
        return run(*arguments[:operands], *unpack(arguments[operands:], *STEP))

    return of_arguments


for function, operands, options, results in (
    (loss_forward, _FORWARD, _STEP, _RESULTS),
    (loss_forward_into, _FORWARD, _WRITING, _RESULTS),
    (loss_backward, _BACKWARD, _STEP, _GRADIENTS),
    (loss_backward_into, _BACKWARD, _WRITING, _GRADIENTS),
):
    schema, fake = f"({operands}, {options}) -> {results}", getattr(meta, function.__name__)
    define(function, schema, fake, _of_arguments(function), UNSAFE)
