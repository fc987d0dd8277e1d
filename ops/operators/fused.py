"""Steps of plain losses whose forward and backward are one host call each.

Operators run those whose memory has several layouts: no other path has them, so that equal calls
have equal bits.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.parts import fused_part
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache, warn_once
from cutefce.cute_kernels.variant import PLAIN
from cutefce.ops import torch_compat
from cutefce.ops.interface.options import LossOptions, Sharding, TensorOptions
from cutefce.ops.operators.kept import Kept
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.plan import Plan
from cutefce.ops.planning.window_layout import WindowLayout, row_layouts
from cutefce.ops.primitives.dispatch import kernels_for, problem_of, unproven_reason
from cutefce.ops.primitives.fused.step import ForBackward, FusedStep, can_fuse
from cutefce.ops.primitives.row_selection import with_aligned_rows
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import OUTPUTS


@process_cache
def fused_step(problem: Problem, plan: Plan, device: torch.device) -> FusedStep | None:
    """Return what runs the plan of a plain step; None if it is no plan of windows, or too large."""
    if not plan.stores_windows:
        return None
    config, own, num_sms = kernels_for(device, problem, PLAIN)
    if own.fused_backward is None:
        return None
    kernels, block = (own, num_sms), config.reference_block
    memory = DwMemory(problem.tokens, problem.hidden, problem.vocab, block)
    whole = WindowLayout.of(memory, plan.aliased, plan.kept, config.half(plan.window))
    kind = problem.selects_rows, plan.hidden_bits
    for layouts in (row_layouts(problem, plan, whole, block), [whole]):
        if can_fuse(problem, *kernels, layouts, *kind):
            sizes = problem.tokens, problem.hidden, problem.vocab
            reason = unproven_reason(device, problem.dtype, sizes, fused_part(*kind))
            if reason is not None:
                warn_once(f"steps are launched kernel by kernel: {reason}")
                return None
            step = FusedStep(problem, *kernels, layouts, *kind)
            if torch_compat.capture_id() is None:
                _load(*kernels, *kind, device)
            return step
    return None


@process_cache
def _load(
    kernels: KernelSet, num_sms: int, selects: bool, hidden_bits: int | None, device: torch.device
) -> None:
    """Run a small step: the first launch of a library loads it, which a graph capture may refuse.

    Its sizes are those of a problem that verification covers; it launches all kernels.
    """
    tokens, hidden, vocab = 1, 64, 1000
    problem = Problem(tokens, hidden, vocab, "bfloat16", device.type, arch=kernels.row_sums.arch)
    memory, options = DwMemory(tokens, hidden, vocab, 256), LossOptions("none")
    h = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
    w, y = h.new_zeros(vocab, hidden), torch.zeros(tokens, dtype=torch.int64, device=device)
    for aliased, kept, short in ((256, 256, 300), (0, 1024, 300), (0, 1024, 2000)):
        layout = WindowLayout.of(memory, aliased, kept, 512)
        step = FusedStep(problem, kernels, num_sms, [layout], selects, hidden_bits, short)
        for shape in ((), (tokens,)):
            _, saved = step.forward(h, w, y, options)
            step.backward(saved.stats.new_ones(shape), h, w, y, saved, options)


Fused = tuple[FusedStep, Tensor, Tensor, Tensor]
"""A step, and h (N, D), w (V, D) and targets y (N,) int64 as it takes them."""


def step_with_layouts(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    plan: Plan,
    options: LossOptions,
    tensors: TensorOptions,
    sharding: Sharding,
) -> Fused | None:
    """Return a step whose memory has several layouts, with its operands; None for any other."""
    is_plain = options.is_plain and options.reduction != OUTPUTS and tensors.is_plain
    if not (is_plain and plan.stores_windows) or sharding.group is not None:
        return None
    problem = problem_of(h, w, *plan.gradients)
    step = None if problem.arch is None else fused_step(problem, plan, h.device)
    if step is None or not step.has_layouts:
        return None
    return step, with_aligned_rows(h), w, y.long().contiguous()


def run_fused_forward(
    step: FusedStep, h: Tensor, w: Tensor, y: Tensor, options: LossOptions, plan: Plan
) -> tuple[Tensor, RowStats, Kept]:
    """Return the loss, the statistics, and what is kept with these.

    If there is a selection, all but a reduced loss are in its order.
    """
    loss, (stats, exps, dw, selected, workspace) = step.forward(h, w, y, options)
    # where no backward overwrites exponentials, it does not matter which graph captures them
    capture = None if dw is None else torch_compat.capture_id()
    results = Kept(plan, exps, dw, workspace, selected=selected, capture=capture)
    return loss, RowStats(stats), results


def run_fused_backward(
    step: FusedStep,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    upstream: Tensor,
    stats: Tensor,
    options: LossOptions,
    results: Kept,
) -> tuple[Tensor, Tensor] | None:
    """Return dX (N, D) and dW (V, D) from `stats` and `results` of the forward.

    `upstream` is the gradient of the loss, () or (N,).  Where an earlier backward has overwritten
    what was stored in dW, the forward of several layouts runs again; with one layout this returns
    None, as recomputing these columns takes less time.
    """
    selected = results.selected
    assert not isinstance(selected, RowSelection), "expected the selection of a fused step"
    taken = results.take_dw(), selected, results.take_workspace()
    saved = ForBackward(stats, results.exps, *taken)
    if saved.dw is None and step.aliases:
        if not step.has_layouts:
            return None
        del saved
        results.exps = results.exps.new_empty(0, 0)  # freed before they are stored again
        _, saved = step.forward(h, w, y, options)
    if selected is not None and upstream.ndim:
        upstream = selected.unpack().take(upstream)
    return step.backward(upstream, h, w, y, saved, options)
