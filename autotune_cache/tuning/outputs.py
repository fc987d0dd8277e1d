"""What primitives find for a case: losses, exponentials and gradients, as any call has them."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.tuning.targets.base import Case, Result
from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.ops.planning import planner
from cutefce.ops.primitives import rows
from cutefce.ops.primitives.interface import Primitives, forward_unfused
from cutefce.ops.primitives.rows import Targets, sum_dtype
from cutefce.ops.strategies import gradients_in_forward, windows
from cutefce.ops.strategies.dw_views import aliased_views
from cutefce.ops.strategies.grad_accumulator import GradAccumulator


def targets_of(case: Case) -> Targets:
    """Return which targets count, and where."""
    return rows.make_targets(case.y, case.problem.vocab, -100)


def plan_of(case: Case) -> planner.Plan:
    """Return how a step with the default workspace would run."""
    configs = defaults.window_configs(case.problem)
    return planner.make_plan(case.problem, configs, planner.DEFAULT, scalar_upstream=False)


def smallest_plan(problem: Problem, configs: Sequence[WindowConfig]) -> planner.Plan:
    """Return how a step with the smallest workspace would run."""
    return planner.make_plan(problem, configs, planner.MINIMUM, scalar_upstream=True)


def _stored(case: Case) -> list[tuple[int, Tensor]]:
    """Return room for what a step keeps; of a small problem in two parts, as what dW is lent."""
    kept, piece = plan_of(case).kept, defaults.widest_window(case.problem).reference_block
    first = 0 if case.upstream is None else kept // 2 // piece * piece
    parts = (0, first), (first, kept - first)
    return [(at, case.h.new_empty(case.problem.tokens, size)) for at, size in parts if size]


def smallest_step(case: Case, primitives: Primitives) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return losses (N,) and the gradients of their mean, in windows of the primitives.

    The workspace is the smallest one.
    """
    config, window = primitives.config, primitives.config.window
    plan = smallest_plan(case.problem, (config,))
    h, w = primitives.prepare(case.h, case.w)
    targets, dw = targets_of(case), torch.empty_like(w)
    stored = aliased_views(dw, len(h), window, plan.aliased)
    loss, stats = windows.forward(primitives, h, w, targets, "none", stored)
    upstream = targets.loss_scale("mean", sum_dtype(h.dtype))
    inputs = primitives, h, w, targets, stats, stored, upstream, window
    return loss, windows.backward(*inputs, True, dw, plan.aliased > 0), dw


def of_smallest_step(case: Case, primitives: Primitives) -> dict[str, Result]:
    """Return the same to compare."""
    loss, dx, dw = smallest_step(case, primitives)
    return {"loss": Result(loss, 1)} | _gradients("", dx, dw)


def of_steps(case: Case, primitives: Primitives) -> dict[str, Result]:
    """Return losses, probabilities as they are kept and as they are computed again, gradients.

    With an upstream gradient all kernels are launched that some call may launch.
    """
    vocab, dtype = case.problem.vocab, case.h.dtype
    h, w = primitives.prepare(case.h, case.w)
    targets, stored, window = targets_of(case), _stored(case), plan_of(case).window
    loss, stats = windows.forward(primitives, h, w, targets, "none", stored)
    again = h.new_empty(h.shape[0], window)
    first, last = list(windows.split_windows(vocab, 0, window))[-1]
    primitives.recompute_exp(h, w, (first, last), stats.reference, targets.index, again)
    # float16's smallest exponentials are lost, relative to totals of at most FLOAT16_TOTAL
    floor = 2.0**-28 if dtype == torch.float16 else 1e-30
    results = {
        "loss": Result(loss, 1),
        "others' share": Result(stats.sum_exp_others, 1, stats.sum_exp),
        "recomputed": Result(again[:, : last - first], 1, stats.sum_exp, floor),
    }
    if stored:
        parts = [exps for _, exps in stored]
        kept = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        # the portable path rounds again what it moves to another reference
        results["kept"] = Result(kept[:, :vocab], 2, stats.sum_exp, floor)
    if case.upstream is not None:
        dw = torch.empty_like(w)
        dx = windows.backward(
            primitives, h, w, targets, stats, stored, case.upstream, window, True, dw
        )
        results |= _gradients("", dx, dw)
        if can_keep(case.problem.dtype):
            results |= _chunks(
                h, w, targets, primitives, defaults.widest_window(case.problem).reference_block
            )
        results |= _alone(h, w, targets, primitives, case.upstream)
    return results


def _chunks(
    h: Tensor, w: Tensor, targets: Targets, primitives: Primitives, piece: int
) -> dict[str, Result]:
    """Return the gradients of the losses' sum, formed in the forward of two chunks of tokens."""
    tokens, vocab = h.shape[0], w.shape[0]
    stored, chunk = -(-vocab // piece) * piece, -(-tokens // 2)
    weight = targets.loss_scale("sum", sum_dtype(h.dtype))
    gradients = [GradAccumulator.empty(torch.empty_like(x), weight.dtype) for x in (h, w)]
    gradients_in_forward.gradients_in_forward(
        primitives, h, w, targets, weight, stored, chunk, *gradients
    )
    finished = [sums.finish(primitives, weight, in_place=True) for sums in gradients]
    return _gradients(" of chunks", *finished)


def _alone(
    h: Tensor, w: Tensor, targets: Targets, primitives: Primitives, upstream: Tensor
) -> dict[str, Result]:
    """Return what a forward without gradients finds, and one rank's part of dX for any sums."""
    results, steps = {}, functools.partial(forward_unfused, primitives)
    for name, forward in (("alone", primitives.forward), ("alone, by steps", steps)):
        stats, loss = forward(h, w, targets, "none")
        results[f"loss {name}"] = Result(loss, 1)
        results[f"others' share {name}"] = Result(stats.sum_exp_others, 1, stats.sum_exp)
    sums = h.to(upstream.dtype)
    part = torch.empty_like(sums)
    primitives.finish_dx(part, sums, w, targets, upstream, upstream)
    return results | {"a rank's part of dX": Result(part, 1, of_row=True)}


def _gradients(which: str, dx: Tensor | None, dw: Tensor | None) -> dict[str, Result]:
    """Return dX and dW; exponentials, scaled hidden states and they themselves are rounded."""
    assert dx is not None
    assert dw is not None
    floor = torch.finfo(dx.dtype).smallest_normal
    return {
        f"{name}{which}": Result(gradient, 3, floor=floor, of_row=True)
        for name, gradient in (("dX", dx), ("dW", dw))
    }
