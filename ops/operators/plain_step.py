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
from cutefce.ops.operators.fused import fused_step, run_fused_backward, run_fused_forward
from cutefce.ops.operators.operators import (
    loss_backward,
    restored,
    run_forward,
    run_windows_backward,
)
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives.dispatch import (
    kernel_primitives,
    kernels_for,
    options_unsupported_reason,
    problem_of,
)
from cutefce.ops.primitives.fused.step import FusedStep
from cutefce.ops.primitives.row_selection import select_on_device, with_aligned_rows
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.samples import Sampling
from cutefce.ops.strategies.loss_inputs import LossInputs

NO_MORE = *TensorOptions().pack(), *Sharding().pack()
"""The arguments of `STEP` behind those of the `LossOptions` of a plain call."""
SEED = TensorOptions.names().index("seed")
"""The place of the seed of sampled gradients among these."""


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
        chunk = self.plan.selected_tokens(y.shape[0])
        return select_on_device(self.selecting_arch, y, options.ignore_index, chunk)

    def inputs(
        self,
        h: Tensor,
        w: Tensor,
        y: Tensor,
        options: LossOptions,
        selection: RowSelection | None,
        seed: Tensor | None = None,
    ) -> LossInputs[Any, Any]:
        """Return the operands of strategies; a `seed` is that of a forward with samples."""
        index = y if selection is None else selection.targets
        targets = Targets(index, w.shape[0], options)
        targets.selection = selection
        operands = kernel_primitives(*self.kernels), h, w, targets, h.dtype, w.dtype
        if seed is None:
            return LossInputs(*operands)
        rows = torch.arange(len(y), device=y.device) if selection is None else selection.order
        sampling = Sampling(seed, options.samples, rows, w.shape[0])
        return LossInputs(*operands, sampling=sampling)


def resolve(h: Tensor, w: Tensor, step: StepOptions, options: LossOptions) -> PlainStep | None:
    """Return the step for h (N, D) and w (V, D), None if no kernels serve it."""
    problem = problem_of(h, w, step.grad_hidden, step.grad_weight)
    if problem.arch is None:
        return None
    given = h.device, options, TensorOptions(), options.is_sampled
    if options_unsupported_reason(problem, *given) is not None:
        return None
    plan = plan_for(h, w, step, options, TensorOptions(), Sharding())
    kernels, fused = kernels_for(h.device, problem, PLAIN), fused_step(problem, plan, h.device)
    arch = problem.arch if problem.selects_rows else None
    return PlainStep(step, plan, kernels, arch, fused, step.pack())


def plain_loss(
    h: Tensor, w: Tensor, y: Tensor, seed: Tensor | None, options: LossOptions, step: PlainStep
) -> Tensor:
    """Return the reduced loss of targets y (N,), which can be differentiated.

    This is outside of autocast regions, and h is on the current device.  `seed` (2,) is that of
    sampled gradients, None for exact ones.
    """
    # the call cache has no entry for tensors that a transform has left behind
    (loss,) = torch_compat.apply_to_live(PlainLoss, h, w, y, seed, options, step)
    result: Tensor = loss
    return result


class PlainLoss(torch.autograd.Function):
    """The loss of a `PlainStep`."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w: Tensor,
        y: Tensor,
        seed: Tensor | None,
        options: LossOptions,
        step: PlainStep,
    ) -> tuple[Tensor]:
        """Return the reduced loss."""
        loss, stats = _forward(h, w, y, seed, options, step)
        ctx.options, ctx.step = options, step
        ctx.trained = step.step.grad_hidden, step.step.grad_weight
        # a graph compiler that traces the backward cannot read the records
        ctx.arguments = *step.packed, *options.pack()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, w, y, stats, seed)
        return (loss,)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dX and dW for the upstream gradient of the loss."""
        if upstream is None:
            return None, None, None, None, None, None
        (*saved, seed), results = ctx.saved_tensors, None
        if not torch.compiler.is_compiling() and can_bypass_dispatcher(upstream, *saved):
            h, w, y, stats = saved
            # hooks of saved tensors may restore them with other layouts
            saved = [with_aligned_rows(h), with_aligned_rows(w), y.contiguous(), stats]
            if not (torch.is_grad_enabled() or ctx.step.plan.in_forward):
                results = kept.kept_with(stats)
        if results is None:
            more = *NO_MORE[:SEED], seed, *NO_MORE[SEED + 1 :]
            dx, dw, _ = differentiate(loss_backward, upstream, *saved, *ctx.arguments, *more)
        else:
            dx, dw = _backward(upstream, *saved, ctx.options, ctx.step, results)
        grad_hidden, grad_weight = ctx.trained
        return dx if grad_hidden else None, dw if grad_weight else None, None, None, None, None


def _forward(
    h: Tensor, w: Tensor, y: Tensor, seed: Tensor | None, options: LossOptions, step: PlainStep
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and the statistics of the tokens that were computed."""
    if step.fused is not None:
        loss, stats, results = run_fused_forward(step.fused, h, w, y, options, step.plan)
        selection = None if options.is_scalar else results.selection
    else:
        selection = step.select(y, options)
        inputs = step.inputs(h, w, y, options, selection, seed)
        loss, stats, results = run_forward(inputs, step.plan)
        results.selected = selection
    kept.keep(stats.rows, results)
    return restored(loss, selection, options), stats.rows


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
    if step.fused is not None:
        given = h, w, y, upstream, stats, options, results
        gradients = run_fused_backward(step.fused, *given)
        if gradients is not None:
            return gradients
    selection = results.selection
    if selection is not None and upstream.ndim:
        upstream = selection.take(upstream)
    inputs = step.inputs(h, w, y, options, selection)
    dx, dw, _ = run_windows_backward(upstream, inputs, RowStats(stats), results)
    return dx, dw
