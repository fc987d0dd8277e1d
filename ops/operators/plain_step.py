"""A training step of a plain loss on the kernels of one GPU, of which everything is resolved.

It computes what `loss_forward` and `loss_backward` do, with less CPU time: what depends on the
metadata of a call alone, its plan and its kernels, comes with the call.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.variant import PLAIN
from cutefce.ops import torch_compat
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.operators import kept
from cutefce.ops.operators.autograd import differentiate
from cutefce.ops.operators.context import can_bypass_dispatcher, isolated_context
from cutefce.ops.operators.operators import (
    loss_backward,
    restored,
    run_forward,
    run_windows_backward,
)
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.planning.planner import Plan
from cutefce.ops.planning.window_layout import WindowLayout
from cutefce.ops.primitives.dispatch import kernel_primitives, kernels_for, problem_of
from cutefce.ops.primitives.fused_step import ForBackward, FusedStep, can_fuse, load
from cutefce.ops.primitives.row_selection import select_on_device
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies.dw_views import memory_of
from cutefce.ops.strategies.loss_inputs import LossInputs

NO_MORE = *TensorOptions().pack(), *Sharding().pack()
"""The arguments of `STEP` behind those of the `LossOptions` of a plain call."""


@dataclass(frozen=True)
class PlainStep:
    """What steps with the same metadata share."""

    step: StepOptions
    plan: Plan
    kernels: tuple[WindowConfig, KernelSet, int]
    """The arguments of `kernel_primitives`."""
    selecting_arch: str | None
    """Architecture of the kernels that select rows; None if all rows are computed."""
    fused: FusedStep | None
    """What runs a plan of windows that stores exponentials."""
    packed: tuple[Any, ...]
    """Those of `STEP` before the options of the loss."""

    def select(self, y: Tensor, options: LossOptions) -> RowSelection | None:
        """Return which of the targets y (N,) are computed, None for all."""
        if self.selecting_arch is None:
            return None
        plan, tokens = self.plan, y.shape[0]
        chunk = plan.chunks(tokens).unit if plan.in_forward else tokens
        return select_on_device(self.selecting_arch, y, options.ignore_index, chunk)

    def inputs(
        self,
        h: Tensor,
        w: Tensor,
        y: Tensor,
        options: LossOptions,
        selection: RowSelection | None,
    ) -> LossInputs[Any, Any]:
        """Return the operands of strategies."""
        index = y if selection is None else selection.targets
        targets = Targets(index, w.shape[0], options)
        targets.selection = selection
        return LossInputs(kernel_primitives(*self.kernels), h, w, targets, h.dtype, w.dtype)


def resolve(h: Tensor, w: Tensor, step: StepOptions, options: LossOptions) -> PlainStep | None:
    """Return the step for h (N, D) and w (V, D), None if no kernels serve it."""
    problem = problem_of(h, w, step.grad_hidden, step.grad_weight)
    if problem.arch is None:
        return None
    plan = plan_for(h, w, step, options, TensorOptions(), Sharding())
    selects = problem.selects_rows
    kernels, fused = kernels_for(h.device, problem, PLAIN), None
    if plan.stores_windows and kernels[1].fused_backward is not None:
        config = kernels[0]
        memory = memory_of(w, problem.tokens, config.reference_block)
        layout = WindowLayout.of(memory, plan.aliased, plan.kept, config.half(plan.window))
        kind = selects, plan.hidden_bits
        if can_fuse(problem, *kernels[1:], layout, *kind):
            fused = FusedStep(problem, *kernels[1:], layout, *kind)
            if torch_compat.capture_id() is None:
                load(*kernels[1:], *kind, h.device)
    arch = problem.arch if selects else None
    return PlainStep(step, plan, kernels, arch, fused, step.pack())


def plain_loss(h: Tensor, w: Tensor, y: Tensor, options: LossOptions, step: PlainStep) -> Tensor:
    """Return the reduced loss of targets y (N,), which can be differentiated."""
    # the call cache has no entry for tensors that a transform has left behind
    (loss,) = torch_compat.apply_to_live(PlainLoss, h, w, y, options, step)
    result: Tensor = loss
    return result


class PlainLoss(torch.autograd.Function):
    """The loss of a `PlainStep`."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, y: Tensor, options: LossOptions, step: PlainStep
    ) -> tuple[Tensor]:
        """Return the reduced loss."""
        loss, stats = _forward(h, w, y, options, step)
        ctx.options, ctx.step = options, step
        ctx.trained = step.step.grad_hidden, step.step.grad_weight
        # a graph compiler that traces the backward cannot read the records
        ctx.arguments = *step.packed, *options.pack(), *NO_MORE
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, w, y, stats)
        return (loss,)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dX and dW for the upstream gradient of the loss."""
        if upstream is None:
            return None, None, None, None, None
        saved, results = ctx.saved_tensors, None
        if (
            not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and not ctx.step.plan.in_forward
            and can_bypass_dispatcher(upstream, *saved)
        ):
            results = kept.kept_with(saved[3])
        if results is None:
            dx, dw, _ = differentiate(loss_backward, upstream, *saved, *ctx.arguments)
        else:
            dx, dw = _backward(upstream, *saved, ctx.options, ctx.step, results)
        grad_hidden, grad_weight = ctx.trained
        return dx if grad_hidden else None, dw if grad_weight else None, None, None, None


@isolated_context
def _forward(
    h: Tensor, w: Tensor, y: Tensor, options: LossOptions, step: PlainStep
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and the statistics of the tokens that were computed."""
    if step.fused is not None:
        loss, saved = step.fused.forward(h, w, y, options)
        rows, exps, dw, selection = saved
        # where no backward overwrites what is kept, it does not matter which graph captures it
        capture = None if dw is None else torch_compat.capture_id()
        results = kept.Kept(step.plan, exps, dw, capture=capture)
    else:
        selection = step.select(y, options)
        inputs = step.inputs(h, w, y, options, selection)
        loss, stats, results = run_forward(inputs, step.plan)
        rows = stats.rows
    results.selection = selection
    kept.keep(rows, results)
    return restored(loss, selection, options), rows


@isolated_context
def _backward(
    upstream: Tensor,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    stats: Tensor,
    options: LossOptions,
    step: PlainStep,
    results: kept.Kept,
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX and dW from what the forward has kept."""
    selection = results.selection
    if selection is not None and upstream.ndim:
        upstream = selection.take(upstream)
    dw = None if step.fused is None else results.take_dw()
    if step.fused is not None and (dw is not None or not step.plan.aliased):
        saved = ForBackward(stats, results.exps, dw, selection)
        return step.fused.backward(upstream, h, w, y, saved, options)
    inputs = step.inputs(h, w, y, options, selection)
    dx, dw, _ = run_windows_backward(upstream, inputs, RowStats(stats), results)
    return dx, dw
